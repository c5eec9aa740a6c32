"""How much the candidates of a run share of their noise, and what that does to a correlation.

All knockouts are compared with the same baselines. Where a baseline happened to be right, every
candidate that leaves it there loses, and frequent candidates leave it most often. So on noise alone
they rise and fall together, and any score that goes with frequency seems to predict harm. Flipping
the sign of a problem for all candidates together keeps what they share and takes the effects away:
the spread of a correlation over such draws says how wide its interval must be.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

__all__ = ["Moves", "noise_factors", "read_moves"]

Moves = dict[str, dict[str, NDArray[np.float64]]]
"""By benchmark and candidate's name: (P,) its differences on the problems, 0 if it has none."""


def read_moves(run: Path) -> Moves:
    """Reads the differences of a run's candidates, problem by problem.

    Args:
        run: A run directory; `{}` where it holds no ledger.
    """
    from knockout.ledger import Ledger, grade_cubes
    from knockout.stats.paired import pair

    if not (run / "run.db").is_file():
        return {}
    found: Moves = {}
    with Ledger.open(run / "run.db") as ledger:
        for cube in grade_cubes(ledger):
            pairs = pair(cube.baseline, cube.knockout)
            moves = (pairs.won - pairs.lost) / np.maximum(pairs.n, 1)
            names = [candidate.name for candidate in cube.candidates]
            found[cube.benchmark] = dict(zip(names, moves, strict=True))
    return found


def noise_factors(
    score: NDArray[np.float64],
    moves: Sequence[NDArray[np.float64]],
    n_pillars: int = 0,
    draws: int = 2000,
    seed: int = 0,
) -> tuple[float, float]:
    """How much wider a score's statistics scatter by noise than with independent candidates.

    Args:
        score: (n,), no NaN.
        moves: n times (P,), as in `Moves`.
        n_pillars: How many of them are pillars; in each draw the most harmed ones count as such.
        draws: How many sign flips of all problems.
        seed: Of the draws.

    Returns:
        The standard deviation over the draws, in units of that of independent candidates and at
        least 1: of a rank correlation, and of the area under the ROC curve (1 without pillars).
    """
    from scipy.stats import rankdata

    rows, ranks = np.array(moves, dtype=np.float64), rankdata(score)
    n, m = len(rows), n_pillars
    if n < 3 or (ranks == ranks[0]).all() or not rows.any():
        return 1.0, 1.0
    rows = rows[:, rows.any(axis=0)]
    rng = np.random.default_rng(seed)
    signs = rng.integers(0, 2, (draws, rows.shape[1])) * 2.0 - 1
    spread = np.sqrt(np.square(rows).sum(axis=1))
    harm = np.divide(signs @ rows.T, spread, out=np.zeros((draws, n)), where=spread > 0)
    # Rounded, since candidates that differ on the same problems must tie.
    harm = np.round(harm, 9)
    order = rankdata(harm, axis=1)
    order -= order.mean(axis=1, keepdims=True)
    ranks -= ranks.mean()
    length = np.sqrt(np.square(order).sum(axis=1))
    dots = order @ (ranks / np.sqrt(np.square(ranks).sum()))
    rho = np.divide(dots, length, out=np.zeros(draws), where=length > 0)
    # Squares about 0, the mean: a flip of everything turns ρ into −ρ.
    correlation = max(1.0, float(np.sqrt(np.square(rho).mean() * (n - 1))))
    if not 0 < m < n:
        return correlation, 1.0
    worst = np.argpartition(harm + rng.random(harm.shape) * 1e-10, n - m, axis=1)[:, n - m :]
    sums = ranks[worst].sum(axis=1)  # of m ranks drawn without replacement from n
    usual = m * (n - m) / (n * (n - 1)) * float(np.square(ranks).sum())
    return correlation, max(1.0, float(np.sqrt(np.square(sums).mean() / usual)))
