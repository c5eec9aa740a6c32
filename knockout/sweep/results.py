"""Verdicts of a run directory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from knockout.config.sweep import VerdictRule
from knockout.ledger import Ledger, grade_cubes, totals

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["verdict_table"]


def verdict_table(ledger: Ledger, rule: VerdictRule) -> pd.DataFrame:
    """Computes the verdicts of what is in a ledger; the same ledger gives the same table.

    Args:
        ledger: The run's. A raced one is judged by its complete rounds, each candidate's up to
            the one that settled it, and always for the target that it was raced for.
        rule: What the table is asked for.
    """
    from knockout.sweep.racing import complete_rounds, race_futility, race_rule
    from knockout.verdicts.table import build_verdicts

    raced_by = race_rule(ledger)
    state = totals(ledger)
    return build_verdicts(
        grade_cubes(ledger),
        rule=rule.rule,
        alpha=rule.alpha,
        margin=rule.margin,
        target=rule.target if raced_by is None else raced_by.target,
        m_planned=sum(c.group != "canary" for c in ledger.candidates),
        max_rounds=None if raced_by is None else {b.name: b.n_seeds for b in ledger.benchmarks},
        rounds_done=None if raced_by is None else complete_rounds(ledger),
        raced_by=raced_by,
        futility=race_futility(ledger),
        ended=state.ended,
        preliminary=not state.complete,
    )
