"""The verdict table for a terminal of 80 columns or more."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from knockout.verdicts.table import verdict_key

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult

__all__ = ["render_verdicts"]

_ORDER = ("strong_pillar", "strong_stumbling_block", "equivalent", "undetermined")
_WORDS = dict(zip(_ORDER, ("pillar", "stumbling", "equivalent", "undetermined"), strict=True))
# Blue against orange stays apart for colour-blind readers; the words say it without colour.
_STYLES = dict(zip(_ORDER, ("bold blue", "bold yellow", "", "dim"), strict=True))
_COLUMNS = (("", 2), ("Δ", 6), ("interval", 16), ("p", 5), ("p adj.", 6))
_FLIPS = (("lost", 4), ("won", 4), ("mde", 5))
_SHORT = {"strong_pillar": "pillar", "strong_stumbling_block": "stumbl.", "neutral": "–"}
_WIDE = 96
"""Width of a terminal with room for flips and the smallest visible loss."""
_GROUPS = {"candidate": "", "control": "c", "canary": "A"}


def render_verdicts(
    table: pd.DataFrame,
    title: str,
    *,
    rule: str = "fdr",
    luck: Mapping[str, Mapping[str, Any]] | None = None,
) -> RenderableType:
    """Shows a verdict table: a block for each benchmark, effects first, then by p-value.

    Both rules are shown: the last column is the verdict by the rule that was asked for, the one
    before it what `nominal` says, or `fdr` if the table is by `nominal`.

    Names are quoted, so that a space, a line break and an empty name differ; where
    the terminal is narrow they are cut, numbers never.

    Args:
        table: As `verdicts.build_verdicts` makes it.
        title: Printed above; says by which rule.
        rule: Which one.
        luck: As `verdicts.luck.expected_by_luck` makes it.
    """
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = [Text(title, style="bold")]
    for benchmark in dict.fromkeys(table["benchmark"]):
        rows = table[table["benchmark"] == benchmark].to_dict("records")
        rows.sort(
            key=lambda row: (_ORDER.index(verdict_key(row)) > 1, _missing_last(row["p_value"]))
        )
        parts += [Text(), Text(_heading(str(benchmark), rows))]
        if luck is not None and benchmark in luck:
            parts.append(Text(_luck(luck[str(benchmark)])))
        parts.append(_Block(rows, "fdr" if rule == "nominal" else "nominal"))
    if bool((table["group"] != "candidate").any()):
        parts.append(Text("c: control   A: A/A check", style="dim"))
    if "looks" in table and len(table) and (n := int(table["looks"].iloc[0])) > 1:
        parts.append(
            Text(f"Look {n} at a run that grew: for claims that you rely on, judge at alpha / {n}.")
        )
    if bool(table["few_carry"].any()):
        parts.append(Text("!: three problems or fewer carry half of the sum", style="dim"))
    return Group(*parts)


def _heading(benchmark: str, rows: list[dict[str, Any]]) -> str:
    counted = [verdict_key(row) for row in rows if row["group"] == "candidate"]
    counts = ", ".join(f"{counted.count(key)} {_WORDS[key]}" for key in _ORDER if key in counted)
    seen = sorted(
        row["mde"] for row in rows if row["group"] != "canary" and row["mde"] == row["mde"]
    )
    smallest = f"{seen[len(seen) // 2]:.3f}" if seen else "none"
    return (
        f"{benchmark}: Pass@1 {_number(rows[0]['pass1_baseline'], '.3f')}; {counts}; "
        f"loss seen with 80 % power: {smallest}"
    )


def _luck(found: Mapping[str, Any]) -> str:
    above = "more than" if found["exceeds"] else "no more than"
    return (
        f"nominal calls: {found['observed']}; luck alone brings {found['mean']:.1f} on average, up "
        f"to {found['quantile_95']} in 95 of 100 sweeps: {above} that"
    )


class _Block:
    """The rows of one benchmark, as wide as the terminal lets the names be."""

    def __init__(self, rows: list[dict[str, Any]], other: str) -> None:
        self.rows, self.other = rows, other
        self.raced = any(row.get("settled_round") for row in rows)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.table import Table
        from rich.text import Text

        wide = options.max_width >= _WIDE
        columns = [
            *_COLUMNS,
            *(_FLIPS if wide else ()),
            *((("round", 5),) if self.raced else ()),
            (self.other, 7),
            ("verdict", 12),
        ]
        room = options.max_width - sum(width + 1 for _, width in columns)
        shown = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
        shown.add_column("candidate", no_wrap=True, overflow="ellipsis", max_width=max(room - 1, 6))
        for name, width in columns:
            left = name in ("", self.other, "verdict")
            shown.add_column(
                name, justify="left" if left else "right", no_wrap=True, min_width=width
            )
        for row in self.rows:
            shown.add_row(*(Text(text, style=style) for text, style in self._cells(row, wide)))
        yield shown

    def _cells(self, row: dict[str, Any], wide: bool) -> list[tuple[str, str]]:
        key = verdict_key(row)
        cells = [
            str(row["candidate"]),
            _GROUPS.get(row["group"], "") + ("!" if row["few_carry"] else ""),
            _number(row["delta"], "+.3f"),
            f"[{_number(row['ci_low'], '+.3f')}, {_number(row['ci_high'], '+.3f')}]",
            _p(row["p_value"]),
            _p(row["p_adjusted"]),
        ]
        if wide:
            cells += [str(row["lost"]), str(row["won"]), _number(row["mde"], ".3f")]
        if self.raced:
            cells.append(str(row["settled_round"] or ""))
        cells.append(_SHORT[row[f"verdict_{self.other}"]])
        return [*((cell, "") for cell in cells), (_WORDS[key], _STYLES[key])]


def _missing_last(p: float) -> float:
    return p if p == p else 2.0


def _number(value: Any, form: str) -> str:
    return "–" if value is None or value != value else format(float(value), form)


def _p(value: Any) -> str:
    if value is None or value != value:
        return "–"
    return f"{value:.3f}" if value >= 0.001 else f"{value:.0e}"
