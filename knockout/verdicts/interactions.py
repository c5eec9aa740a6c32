"""Do two tokens stand in for each other? The effect of a pair beyond those of its members."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from knockout.ledger.grades import GradeCube

if TYPE_CHECKING:
    import pandas as pd

    from knockout.stats.paired import Tally

__all__ = ["INTERACTION_COLUMNS", "build_interactions"]

INTERACTION_COLUMNS = (
    "benchmark", "pair", "first", "second", "n_problems", "delta_first", "delta_second",
    "delta_pair", "interaction", "ci_low", "ci_high", "p_value", "p_adjusted",
)  # fmt: skip


def build_interactions(cubes: Sequence[GradeCube], alpha: float = 0.05) -> pd.DataFrame:
    """A row for each benchmark and pair: Δ_AB − Δ_A − Δ_B on the cells that have all four grades.

    Below 0 the pair loses more than its members do alone: each stands in for the other. Above 0
    they lose the same answers. An interaction lies in [−2, 2]; its half is what the exact sign-flip
    test and the interval of `knockout.stats` are given, with problems as units.

    Args:
        cubes: One per benchmark; those without pairs give no rows.
        alpha: 1 − the confidence level of the intervals.

    Returns:
        The frame with `INTERACTION_COLUMNS`. `p_adjusted` is Benjamini-Hochberg over the pairs of
        a benchmark; a number that cannot be computed is NaN.
    """
    import pandas as pd

    from knockout.stats.interval import mean_interval
    from knockout.stats.multiplicity import adjust_bh
    from knockout.stats.signflip import signflip_p

    tables = []
    for cube in cubes:
        place = {c.name: i for i, c in enumerate(cube.candidates)}
        rows = [
            (i, *(place[m] for m in c.members)) for i, c in enumerate(cube.candidates) if c.members
        ]
        if not rows:
            continue
        ab, a, b = (cube.knockout[[row[k] for row in rows]].astype(np.int64) for k in range(3))
        base = cube.baseline.astype(np.int64)[None]
        there = (ab >= 0) & (a >= 0) & (b >= 0) & (base >= 0)
        n = there.sum(axis=2)
        excess = np.where(there, ab - a - b + base, 0).sum(axis=2)
        tally = _tally(excess, 2 * n)
        p = signflip_p(tally)
        low, high = mean_interval(tally, p, alpha)
        tables.append(
            {
                "benchmark": [cube.benchmark] * len(rows),
                "pair": [cube.candidates[row[0]].name for row in rows],
                "first": [cube.candidates[row[1]].name for row in rows],
                "second": [cube.candidates[row[2]].name for row in rows],
                "n_problems": (n > 0).sum(axis=1).tolist(),
                "delta_first": _mean(a - base, there).tolist(),
                "delta_second": _mean(b - base, there).tolist(),
                "delta_pair": _mean(ab - base, there).tolist(),
                "interaction": (2 * tally.mean()).tolist(),
                "ci_low": (2 * low).tolist(),
                "ci_high": (2 * high).tolist(),
                "p_value": p.tolist(),
                "p_adjusted": adjust_bh(p).tolist(),
            }
        )
    columns = {c: [v for table in tables for v in table[c]] for c in INTERACTION_COLUMNS}
    return pd.DataFrame(columns, columns=list(INTERACTION_COLUMNS))


def _tally(numerators: NDArray[np.int64], denominators: NDArray[np.int64]) -> Tally:
    """Counts how many problems of each pair, (C, P), show which fraction; 0 of 0 says nothing."""
    from knockout.stats.paired import Tally

    keys = np.stack([denominators.ravel(), numerators.ravel()])
    unique, index = np.unique(keys, axis=1, return_inverse=True)
    index = index.reshape(numerators.shape)
    counts = np.stack([np.bincount(row, minlength=unique.shape[1]) for row in index])
    kept = unique[0] > 0
    return Tally(unique[1][kept], unique[0][kept], counts[:, kept].astype(np.int64))


def _mean(differences: NDArray[np.int64], there: NDArray[np.bool_]) -> NDArray[np.float64]:
    """(C,) mean over problems of the mean over seeds."""
    n = there.sum(axis=2)
    own = np.where(there, differences, 0).sum(axis=2) / np.maximum(n, 1)
    problems = (n > 0).sum(axis=1)
    return np.where(problems > 0, own.sum(axis=1) / np.maximum(problems, 1), np.nan)
