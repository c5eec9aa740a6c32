"""Columns of the verdict table that need a whole block: corrections, power, what carries a sum."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from knockout.config.sweep import VerdictRule
from knockout.verdicts.blocks import TIE, Block
from knockout.verdicts.rules import Family, find_rule

__all__ = ["FEW", "Corrected", "carrying", "corrected", "smallest_effects"]

Floats = NDArray[np.float64]

FEW = 3
"""A call carried by this many problems or fewer is marked (`few_carry`)."""


@dataclass(frozen=True, slots=True)
class Corrected:
    """What correcting a block gives.

    Attributes:
        adjusted: (C,) adjusted p-values by rule.
        inside: (C,) which candidates are corrected for.
        levels: (C,) level R·alpha / m of an interval that is adjusted for R selected of m rows.
        next: (C,) level that one more discovery has to pass.
    """

    adjusted: dict[str, Floats]
    inside: NDArray[np.bool_]
    levels: Floats
    next: Floats


def corrected(
    block: Block,
    p: Floats,
    differing: NDArray[np.int64],
    rule: VerdictRule,
    planned: int | Mapping[str, int] | None,
    *,
    exact: bool,
) -> Corrected:
    """Corrects each family of a block separately; a canary is no hypothesis and keeps its p."""
    names = tuple(dict.fromkeys(("fdr", "holm", "by", "nominal", rule.rule)))
    adjusted = {name: p.copy() for name in names}
    inside = np.zeros(len(p), dtype=np.bool_)
    levels, following = np.full(len(p), rule.alpha), np.full(len(p), rule.alpha)
    labels = np.array([c.family for c in block.candidates], dtype=object)
    counted = np.array([c.group != "canary" for c in block.candidates], dtype=np.bool_)
    for label in dict.fromkeys(labels[counted].tolist()):
        mine = np.flatnonzero(counted & (labels == label))
        wanted = planned.get(label) if isinstance(planned, Mapping) else planned
        if wanted is not None and wanted < len(mine):
            raise ValueError(f"{wanted} candidates were planned but {len(mine)} are here")
        family = Family(p[mine], differing[mine], wanted or len(mine), rule.alpha, exact)
        for name in names:
            adjusted[name][mine] = find_rule(name)(family)
        tested = family.testable()
        m = max(int(tested.sum()) + family.unknown, 1)
        selected = int((adjusted["fdr"][mine] <= rule.alpha * (1 + TIE)).sum())
        level = np.full(len(mine), min(1.0, max(selected, 1) / m) * rule.alpha)
        if exact:  # a row outside the family is never called, so its interval contains 0
            out = np.ldexp(2.0, -np.minimum(differing[mine], 1000)) * (1 - 1e-9)
            level = np.where(tested, level, np.minimum(level, np.minimum(out, rule.alpha)))
        inside[mine], levels[mine] = tested, level
        following[mine] = rule.alpha * np.minimum(1.0, (selected + 1) / (m + ~tested))
    return Corrected(adjusted, inside, levels, following)


def smallest_effects(block: Block, alpha: float | Floats) -> Floats:
    """(C,) smallest loss that data like these show with 80 % power, at level alpha, one or (C,).

    A candidate's noise is its share of differing cells less those that its own Δ explains. The rest
    comes from the benchmark: problems, seeds, difficulty, agreement between seeds.
    """
    from knockout.stats.power import mde_of_shares

    counts, n = block.counts, block.tally.n
    cells = np.maximum(counts["cells"], 1)
    noise = (counts["won"] + counts["lost"] - np.abs(counts["won"] - counts["lost"])) / cells
    levels = np.broadcast_to(np.asarray(alpha, dtype=np.float64), n.shape)
    single = block.design.n_seeds == 1
    seeds = np.where(single, 1, np.minimum(counts["n_seeds"], block.design.n_seeds))
    out = np.full(len(n), np.nan)
    for key in {(*row,) for row in zip(n.tolist(), seeds.tolist(), levels.tolist(), strict=True)}:
        mine = (n == key[0]) & (seeds == key[1]) & (levels == key[2])
        design = replace(block.design, n_problems=key[0], n_seeds=max(key[1], 1))
        out[mine] = mde_of_shares(noise[mine], design, key[2])
    return out


def carrying(values: Floats, counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """(C,) the fewest units that make up at least half of the sum of the differences.

    Taken in the direction of Δ, the largest first; 0 if the sum is 0.

    Args:
        values: (A,) differences.
        counts: (C, A) units that show each.

    Example:
        >>> carrying(np.array([-1.0, -0.1, 0.1]), np.array([[2, 10, 0], [0, 40, 4]])).tolist()
        [2, 18]
    """
    total = counts @ values
    out = np.zeros(len(counts), dtype=np.int64)
    for side in (-1.0, 1.0):
        rows = np.flatnonzero(np.sign(total) == side)
        size = side * values
        order = [int(a) for a in np.argsort(-size, kind="stable") if size[a] > 0]
        left = np.abs(total[rows]) / 2
        for a in order:
            taken = np.minimum(counts[rows, a], np.ceil(left / size[a] - 1e-9).clip(0))
            out[rows] += taken.astype(np.int64)
            left = left - taken * size[a]
    return out
