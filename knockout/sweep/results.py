"""Verdicts of a run directory."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from knockout.config.sweep import VerdictRule
from knockout.ledger import Ledger, grade_cubes, totals
from knockout.sweep.looks import looks

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["luck_of", "planned_by_family", "verdict_table"]


def verdict_table(ledger: Ledger, rule: VerdictRule) -> pd.DataFrame:
    """Computes the verdicts of what is in a ledger; the same ledger gives the same table.

    Args:
        ledger: The run's. A raced one is judged by its complete rounds, each candidate's up to
            the one that settled it, and always for the target that it was raced for.
        rule: What the table is asked for.
    """
    from knockout.sweep.racing import race_of
    from knockout.verdicts.table import build_verdicts

    race = race_of(ledger)
    if race is not None:
        rule = rule.model_copy(update={"target": race.rule.target})
    return build_verdicts(
        grade_cubes(ledger),
        rule,
        planned=planned_by_family(ledger),
        race=race,
        preliminary=not totals(ledger).complete,
        looks=looks(ledger),
    )


def planned_by_family(ledger: Ledger) -> dict[str, int]:
    """Hypotheses of a run by family; a canary is none."""
    asked = [ledger.candidates[index] for index in ledger.asked().candidates]
    return dict(Counter(c.family for c in asked if c.group != "canary"))


def luck_of(ledger: Ledger, rule: VerdictRule) -> dict[str, dict[str, Any]] | None:
    """Nominal calls that luck alone would bring; None for a race, whose tests are others."""
    from knockout.sweep.racing import race_rule
    from knockout.verdicts.luck import expected_by_luck

    return None if race_rule(ledger) is not None else expected_by_luck(grade_cubes(ledger), rule)
