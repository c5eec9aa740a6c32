"""Verdicts of a run directory, and tables of them for a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from knockout.config import VerdictRule
from knockout.store import Ledger, grade_cubes, totals

if TYPE_CHECKING:
    import pandas as pd
    from rich.table import Table

__all__ = ["render_verdicts", "verdict_table"]

_STYLES = {"strong_pillar": "bold red", "strong_stumbling_block": "bold green"}


def verdict_table(ledger: Ledger, rule: VerdictRule) -> pd.DataFrame:
    """Computes the verdicts of what is in a ledger; the same ledger gives the same table.

    Args:
        ledger: The run's. A raced one is judged by its complete rounds, each candidate's up to
            the one that settled it, and always for the target that it was raced for.
        rule: What the table is asked for.
    """
    from knockout.racing import complete_rounds, race_rule
    from knockout.verdicts import build_verdicts

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
        ended=state.ended,
        preliminary=not state.complete,
    )


def render_verdicts(table: pd.DataFrame, title: str) -> Table:
    """A table for a terminal, pillars first."""
    from rich.table import Table
    from rich.text import Text

    raced = bool((table["settled_as"] != "").any())
    shown = Table(title=title, title_justify="left")
    for name in ("benchmark", "candidate"):
        shown.add_column(name, overflow="fold")
    for name in ("Pass@1", "Δ", "interval", "p", "p adj.", "forked"):
        shown.add_column(name, justify="right", no_wrap=True)
    for name in ("verdict", "evidence", *(("settled",) if raced else ())):
        shown.add_column(name, no_wrap=True)
    for row in table.to_dict("records"):
        verdict = str(row["verdict"])
        n = int(row["n_forked"]) + int(row["n_inherited"])
        shown.add_row(
            str(row["benchmark"]),
            Text(str(row["candidate"])),
            _number(row["pass1_knockout"], ".3f"),
            _number(row["delta"], "+.3f"),
            f"[{_number(row['ci_low'], '+.3f')}, {_number(row['ci_high'], '+.3f')}]".replace(
                "[", r"\["
            ),
            _number(row["p_value"], ".3g"),
            _number(row["p_adjusted"], ".3g"),
            f"{row['n_forked']}/{n}",
            Text(verdict, style=_STYLES.get(verdict, "")),
            str(row["evidence"] or ""),
            *((f"round {row['settled_round']}" if row["settled_round"] else "",) if raced else ()),
        )
    return shown


def _number(value: Any, form: str) -> str:
    return "–" if value is None or value != value else format(float(value), form)
