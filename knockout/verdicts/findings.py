"""The result in words: the block at the top of the report and at the end of a run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from knockout.errors import counted

__all__ = ["Findings", "findings", "interval_of"]

_NAMED = 4
_KINDS = (("strong_pillar", "pillar"), ("strong_stumbling_block", "stumbling block"))

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Findings:
    """The answer of a run.

    Attributes:
        headline: What was found, with the numbers.
        context: Controls, luck, neutral candidates; one sentence each.
        cost: What was generated and what full re-runs would have generated.
        next_steps: What to do now, most useful first.
    """

    headline: str
    context: tuple[str, ...]
    cost: str
    next_steps: tuple[str, ...]

    @property
    def lines(self) -> list[str]:
        """All of it, a line each, for a terminal."""
        steps = [f"next: {step}" for step in self.next_steps]
        return [self.headline, *self.context, self.cost, *steps]


def interval_of(row: Row, rule: str) -> tuple[float | None, float | None]:
    """The interval that agrees with a rule: it excludes 0 exactly if the rule calls the row."""
    ends = ("ci_low_fdr", "ci_high_fdr") if rule == "fdr" else ("ci_low", "ci_high")
    low, high = (row.get(end, row[end.removesuffix("_fdr")]) for end in ends)
    return (low, high) if _known(low) and _known(high) else (None, None)


def findings(
    rows: Sequence[Row],
    summary: Mapping[str, Any],
    *,
    rule: str,
    alpha: float,
    margin: float,
    folder: str = "DIR",
) -> Findings:
    """Puts a verdict table into words.

    Args:
        rows: Of the table; proportions in [0, 1].
        summary: The content of `summary.json`.
        rule, alpha, margin: How the verdicts were reached.
        folder: The run directory, for the commands that are named.
    """
    named = [row for row in rows if row["benchmark"] == "pooled"] or list(rows)
    own = [row for row in named if row["group"] == "candidate"]
    controls = [row for row in named if row["group"] == "control"]
    many = len({row["benchmark"] for row in named}) > 1
    parts = []
    for verdict, name in _KINDS:
        found = sorted((r for r in own if r["verdict"] == verdict), key=lambda r: -abs(r["delta"]))
        parts.append(_named(found, name, rule, many))
    n = len({row["candidate"] for row in own})
    headline = f"{counted(n, 'candidate')} by rule {rule} at {alpha:g}: " + "; ".join(parts)
    return Findings(
        headline if rows else "No verdict yet: no cell has finished.",
        tuple(_context(own, controls, summary, rule, alpha)) if rows else (),
        _cost(summary),
        tuple(_next(own, summary, margin, folder)),
    )


def _named(found: Sequence[Row], name: str, rule: str, many: bool) -> str:
    if not found:
        return f"no {name}"
    shown = []
    for row in found[:_NAMED]:
        low, high = interval_of(row, rule)
        ends = f" [{_signed(low)}, {_signed(high)}]" if low is not None and high is not None else ""
        place = f" on {row['benchmark']}" if many else ""
        shown.append(f"{row['candidate']} {_signed(row['delta'])}{ends}{place}")
    rest = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
    return f"{counted(len(found), name)}: {', '.join(shown)}{rest}"


def _context(
    own: Sequence[Row],
    controls: Sequence[Row],
    summary: Mapping[str, Any],
    rule: str,
    alpha: float,
) -> list[str]:
    out = []
    called = [row for row in own if row["verdict"] != "neutral"]
    if any(interval_of(row, rule) != interval_of(row, "nominal") for row in called):
        out.append(
            f"The intervals above allow for the selection of these rows (false coverage rate {alpha:g}); "
            f"the interval column of the table is the plain {1 - alpha:.0%} one, which is narrower."
        )
    if controls:
        n_called = sum(row["verdict"] != "neutral" for row in controls)
        out.append(f"{n_called} of {counted(len(controls), 'control row')} called.")
    luck = (summary.get("luck") or {}).get(str(own[0]["benchmark"])) if own else None
    if luck:
        out.append(
            f"Without the correction {counted(luck['observed'], 'row')} would be called; luck alone brings "
            f"{luck['mean']:.1f} on average, and more than {luck['quantile_95']:g} in one run of 20."
        )
    neutral = [row for row in own if row["verdict"] == "neutral"]
    same = sum(row["evidence"] == "equivalent" for row in neutral)
    if neutral:
        out.append(
            f"{counted(same, 'neutral row')} {'is' if same == 1 else 'are'} equivalent (shown to have no effect beyond the margin), "
            f"{len(neutral) - same} undetermined (too little data)."
        )
    return out


def _cost(summary: Mapping[str, Any]) -> str:
    made, naive = summary["tokens_generated"], summary["tokens_naive"]
    if not made:
        return "Nothing has been generated yet."
    times = f"{naive / made:.1f} times" if naive else "as many"
    return f"{_big(made)} tokens generated; full re-runs would have generated {_big(naive)}, {times} as many."


def _next(own: Sequence[Row], summary: Mapping[str, Any], margin: float, folder: str) -> list[str]:
    if not summary["complete"]:
        return ["repeat the command that started the run; it resumes where it stopped"]
    out = []
    if any(row["verdict"] != "neutral" for row in own):
        out.append(f"`knockout confirm {folder}` measures the findings again on fresh seeds")
    open_ = [row for row in own if row["evidence"] == "undetermined"]
    if own and len(open_) > len(own) / 2:
        reach = [
            max(abs(row["eq_low"]), abs(row["eq_high"]))
            for row in open_
            if _known(row["eq_low"]) and _known(row["eq_high"])
        ]
        text = f"{len(open_)} of {counted(len(own), 'row')} undetermined at a margin of {margin:g}: raise `seeds` or `limit` and repeat the command"
        if reach:
            text += (
                f", or ask for a margin of {median(reach):.2g}, which half of their intervals fit"
            )
        out.append(text)
    return out


def _known(value: Any) -> bool:
    return value is not None and not (isinstance(value, float) and math.isnan(value))


def _signed(value: float | None) -> str:
    """A difference of proportions as the tables write it: −0.400, +0.020."""
    return "–" if value is None else f"{value:+.3f}".replace("-", "−")


def _big(n: float) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if n >= size:
            return f"{n / (1e3 if unit == 'k' else size):.3g} {unit}"
    return str(round(n))
