"""One answer for a candidate from several benchmarks, which decides about freeze lists.

A candidate is `equivalent` over all benchmarks if

1. all problems together, each with the same weight, show |Δ| < margin (two one-sided tests);
2. no benchmark, and not all of them together, calls it a pillar even without correction;
3. on no benchmark did it lose more than the margin, or than what the benchmark cannot rule out even
   for a token that changes no answer (.10 of 30 problems), if that is more.

Point 1 alone would let a large benchmark vouch for a small one. But if every benchmark had to show
the margin, nothing would pass: 30 problems cannot show ± .02 with any number of seeds. Without a
pooled test (a race), every benchmark that is large enough to show the margin must show it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from knockout.config.sweep import VerdictRule
from knockout.verdicts.blocks import POOLED

__all__ = ["overall_evidence"]


def overall_evidence(columns: Mapping[str, Sequence[Any]], rule: VerdictRule) -> list[str]:
    """The evidence over all benchmarks, for each row of a table that of its candidate.

    Args:
        columns: The table's columns, rows of all benchmarks and pooled ones.
        rule: Its margin and level.

    Returns:
        "effect" (a verdict other than neutral on any benchmark), "equivalent" or "undetermined".
    """
    of: dict[str, list[int]] = {}
    for row, name in enumerate(columns["candidate"]):
        of.setdefault(name, []).append(row)
    found = {name: _one(columns, rows, rule) for name, rows in of.items()}
    return [found[name] for name in columns["candidate"]]


def _one(columns: Mapping[str, Sequence[Any]], rows: Sequence[int], rule: VerdictRule) -> str:
    from knockout.stats.interval import resolution

    single = [row for row in rows if columns["benchmark"][row] != POOLED]
    if any(columns["verdict"][row] != "neutral" for row in single):
        return "effect"
    sizes = {row: int(columns["n_problems"][row]) for row in single}
    widths = {row: resolution(n, rule.alpha) if n else 1.0 for row, n in sizes.items()}
    harmful = any(columns["verdict_nominal"][row] == "strong_pillar" for row in rows) or any(
        not columns["delta"][row] >= -max(rule.margin, widths[row]) for row in single
    )
    if harmful:
        return "undetermined"
    pooled = [row for row in rows if row not in sizes and np.isfinite(columns["eq_low"][row])]
    asked = pooled or [row for row in single if widths[row] <= rule.margin]
    same = bool(asked) and all(columns["equivalent"][row] for row in asked)
    return "equivalent" if same else "undetermined"
