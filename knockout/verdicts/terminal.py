"""The verdict table for a terminal of 80 columns or more."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult

__all__ = ["render_verdicts"]

_ORDER = ("strong_pillar", "strong_stumbling_block", "equivalent", "undetermined")
_WORDS = dict(zip(_ORDER, ("pillar", "stumbling", "equivalent", "undetermined"), strict=True))
# Blue against orange stays apart for colour-blind readers; the words say it without colour.
_STYLES = dict(zip(_ORDER, ("bold blue", "bold yellow", "", "dim"), strict=True))
_COLUMNS = (
    ("", 1), ("Δ", 6), ("interval", 16), ("p", 5), ("p adj.", 6), ("lost", 4), ("won", 4),
    ("verdict", 12),
)  # fmt: skip
_GROUPS = {"candidate": "", "control": "c", "canary": "A"}


def render_verdicts(table: pd.DataFrame, title: str) -> RenderableType:
    """Shows a verdict table: a block for each benchmark, effects first, then by p-value.

    Names are quoted, so that a space, a line break and nothing at all can be told apart; where
    the terminal is narrow they are cut, numbers never.

    Args:
        table: As `verdicts.build_verdicts` makes it.
        title: Printed above; says by which rule.
    """
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = [Text(title, style="bold")]
    for benchmark in dict.fromkeys(table["benchmark"]):
        rows = table[table["benchmark"] == benchmark].to_dict("records")
        rows.sort(key=lambda row: (_ORDER.index(_key(row)) > 1, _missing_last(row["p_value"])))
        parts += [Text(), Text(_heading(str(benchmark), rows)), _Block(rows)]
    controls = bool((table["group"] == "control").any())
    if controls or bool((table["group"] == "canary").any()):
        parts.append(Text("c: control   A: A/A check", style="dim"))
    return Group(*parts)


def _heading(benchmark: str, rows: list[dict[str, Any]]) -> str:
    counted = [_key(row) for row in rows if row["group"] == "candidate"]
    counts = ", ".join(f"{counted.count(key)} {_WORDS[key]}" for key in _ORDER if key in counted)
    return f"{benchmark}: Pass@1 {_number(rows[0]['pass1_baseline'], '.3f')}; {counts}"


class _Block:
    """The rows of one benchmark, as wide as the terminal lets the names be."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows
        self.raced = any(row.get("settled_round") for row in rows)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.table import Table
        from rich.text import Text

        columns = [*_COLUMNS, *((("round", 5),) if self.raced else ())]
        room = options.max_width - sum(width + 1 for _, width in columns)
        shown = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
        shown.add_column("candidate", no_wrap=True, overflow="ellipsis", max_width=max(room - 1, 6))
        for name, width in columns:
            left = name in ("", "verdict")
            shown.add_column(
                name, justify="left" if left else "right", no_wrap=True, min_width=width
            )
        for row in self.rows:
            shown.add_row(*(Text(text, style=style) for text, style in self._cells(row)))
        yield shown

    def _cells(self, row: dict[str, Any]) -> list[tuple[str, str]]:
        key = _key(row)
        cells = [
            str(row["candidate"]),
            _GROUPS.get(row["group"], ""),
            _number(row["delta"], "+.3f"),
            f"[{_number(row['ci_low'], '+.3f')}, {_number(row['ci_high'], '+.3f')}]",
            _p(row["p_value"]),
            _p(row["p_adjusted"]),
            str(row["lost"]),
            str(row["won"]),
        ]
        last = [(str(row["settled_round"] or ""), "")] if self.raced else []
        return [*((cell, "") for cell in cells), (_WORDS[key], _STYLES[key]), *last]


def _key(row: dict[str, Any]) -> str:
    verdict = str(row["verdict"])
    if verdict != "neutral":
        return verdict
    return "equivalent" if row["evidence"] == "equivalent" else "undetermined"


def _missing_last(p: float) -> float:
    return p if p == p else 2.0


def _number(value: Any, form: str) -> str:
    return "–" if value is None or value != value else format(float(value), form)


def _p(value: Any) -> str:
    if value is None or value != value:
        return "–"
    return f"{value:.3f}" if value >= 0.001 else f"{value:.0e}"
