"""The number of calls that luck alone would bring, beside the number made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from knockout.config.sweep import VerdictRule
from knockout.ledger.grades import GradeCube
from knockout.verdicts.blocks import POOLED, TIE

__all__ = ["expected_by_luck"]


def expected_by_luck(cubes: Sequence[GradeCube], rule: VerdictRule) -> dict[str, dict[str, Any]]:
    """How many nominal calls there would be if no candidate did anything.

    Args:
        cubes: One per benchmark, of a fixed design.
        rule: Its level and target.

    Returns:
        For each benchmark, and `pooled` for two or more: `observed` nominal calls, their `mean`,
        `quantile_95` and `chance` (of at least so many) by luck, whether the observed number is
        above the quantile (`exceeds`), and the same of the losses among them (`pillars_…`).
        Canaries are left out.
    """
    found: dict[str, dict[str, Any]] = {}
    moves = {cube.benchmark: _moves(cube, rule) for cube in cubes}
    for cube in cubes:
        found[cube.benchmark] = _one(moves[cube.benchmark][1], rule)
    if len(cubes) >= 2:
        shared = [n for n in moves[cubes[0].benchmark][0] if all(n in m[0] for m in moves.values())]
        parts = [of[[names.index(n) for n in shared]] for names, of in moves.values()]
        if shared:
            found[POOLED] = _one(np.concatenate(parts, axis=1), rule)
    return found


def _moves(cube: GradeCube, rule: VerdictRule) -> tuple[list[str], NDArray[np.float64]]:
    """Names of the hypotheses, and their (C, U) differences."""
    from knockout.stats.paired import pair

    counted = [i for i, c in enumerate(cube.candidates) if c.group != "canary"]
    names = [cube.candidates[i].name for i in counted]
    knockout = cube.knockout[counted]
    if rule.target == "benchmark":
        seen = (knockout >= 0) & (cube.baseline[None] >= 0)
        cells = np.where(seen, knockout - cube.baseline[None], 0)
        return names, cells.reshape(len(names), -1).astype(np.float64)
    pairs = pair(cube.baseline, knockout)
    return names, (pairs.won - pairs.lost) / np.maximum(pairs.n, 1)


def _one(moves: NDArray[np.float64], rule: VerdictRule) -> dict[str, Any]:
    from knockout.stats.luck import expected_calls
    from knockout.stats.paired import Tally
    from knockout.stats.signflip import signflip_p

    luck = expected_calls(moves, rule.alpha)
    # Exact p-values of the same differences, on a common grid of at least 1/240 of a problem.
    whole = np.round(moves * 5040).astype(np.int64)
    kinds, place = np.unique(whole, return_inverse=True)
    counts = np.zeros((len(moves), len(kinds)), dtype=np.int64)
    for row, of in enumerate(place.reshape(moves.shape)):
        counts[row] = np.bincount(of, minlength=len(kinds))
    common = np.gcd(kinds, 5040)
    tally = Tally(kinds // common, 5040 // common, counts)
    called = signflip_p(tally) <= rule.alpha * (1 + TIE) if moves.size else np.zeros(0, bool)
    observed, pillars = int(called.sum()), int((called & (moves.sum(axis=1) < 0)).sum())
    return {
        "observed": observed,
        "mean": round(luck.mean, 2),
        "quantile_95": luck.quantile,
        "chance": round(luck.chance(observed), 4),
        "exceeds": observed > luck.quantile,
        "pillars_observed": pillars,
        "pillars_mean": round(luck.pillars_mean, 2),
        "pillars_quantile_95": luck.pillars_quantile,
        "pillars_exceed": pillars > luck.pillars_quantile,
    }
