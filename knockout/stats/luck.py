"""How many candidates chance alone would call: false calls come in flocks.

All candidates are compared with the same baselines. A problem on which the baseline happened to be
wrong turns into a win for every candidate that forks there, so under "no candidate does anything"
the number of significant ones scatters far more than that of independent tests, and nearly all of
them point the same way. The sign of a problem is therefore flipped for *all* candidates together:
that keeps what they share, and is again a draw under the null hypothesis.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Luck", "expected_calls"]


@dataclass(frozen=True, slots=True)
class Luck:
    """Uncorrected calls of candidates that do nothing.

    Attributes:
        mean: Expected number.
        quantile: 95 % quantile.
        pillars_mean: Expected losses among them.
        pillars_quantile: 95 % quantile of the losses.
        counts: (B,) calls in each draw.
        pillars: (B,) losses in each draw.
    """

    mean: float
    quantile: int
    pillars_mean: float
    pillars_quantile: int
    counts: NDArray[np.int64]
    pillars: NDArray[np.int64]

    def chance(self, observed: int) -> float:
        """Share of draws with at least this many calls; the observed one counts as a draw."""
        return float((1 + (self.counts >= observed).sum()) / (1 + len(self.counts)))


def expected_calls(
    moves: NDArray[np.floating], alpha: float = 0.05, draws: int = 2000, seed: int = 0
) -> Luck:
    """Redraws the signs of all differences, jointly over candidates.

    Args:
        moves: (C, U) differences of each candidate on each unit (problem, or cell), 0 if it has
            none.
        alpha: Two-sided level of an uncorrected call.
        draws: B, how often.
        seed: Of the draws; the same data give the same numbers, in any order of the units.

    Returns:
        The counts. A call is a |sum| that at most alpha of the candidate's own draws reach.
    """
    moves = np.asarray(moves, dtype=np.float32)
    moves = moves[:, np.abs(moves).sum(axis=0) > 0]
    moves = moves[np.abs(moves).sum(axis=1) > 0]
    counts = np.zeros(draws, dtype=np.int64)
    pillars = np.zeros(draws, dtype=np.int64)
    if moves.size:
        # A canonical order of units, and of a unit's overall sign.
        first = np.take_along_axis(moves, (moves != 0).argmax(axis=0)[None], axis=0)[0]
        moves = moves * np.sign(first)
        moves = moves[:, np.lexsort(moves)]
        rng = np.random.default_rng(seed)
        signs = rng.integers(0, 2, (draws, moves.shape[1]), dtype=np.int8) * np.float32(2) - 1
        sums = np.round(signs @ moves.T, 4)  # (B, C)
        for column in sums.T:
            size = np.abs(column)
            ordered = np.sort(size)[::-1]
            allowed = int(alpha * draws)
            # Ties at the edge do not fit: only what lies above the first one left out is called.
            edge = ordered[allowed] if allowed < draws else -1.0
            called = size > edge
            counts += called
            pillars += called & (column < 0)
    return Luck(
        mean=float(counts.mean()),
        quantile=int(np.quantile(counts, 0.95, method="higher")),
        pillars_mean=float(pillars.mean()),
        pillars_quantile=int(np.quantile(pillars, 0.95, method="higher")),
        counts=counts,
        pillars=pillars,
    )
