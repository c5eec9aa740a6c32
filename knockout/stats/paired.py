"""Paired differences between a knockout and its baseline, as exact integer tallies.

A cell's difference is −1, 0 or +1. Problems are the sampling unit and seeds are repeats inside
it, so a problem's difference is the fraction (sum of differences) / (number of pairs). All that
the tests and intervals need is how many problems show which fraction. Counting them keeps every
number independent of the order of problems and seeds, and makes 200 candidates × 1,131 problems
× 16 seeds a matter of milliseconds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = [
    "Pairs",
    "Tally",
    "flips_needed",
    "pair",
    "tally_cells",
    "tally_problems",
    "wilson_interval",
]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Pairs:
    """Counts over seeds for C candidates × P problems, of cells with both grades.

    Attributes:
        n: (C, P) number of pairs.
        won: (C, P) pairs in which only the knockout is right.
        lost: (C, P) pairs in which only the baseline is right.
        base: (C, P) right baseline grades among the pairs.
        n_seeds: Length of the seed axis.
    """

    n: Ints
    won: Ints
    lost: Ints
    base: Ints
    n_seeds: int


@dataclass(frozen=True, slots=True)
class Tally:
    """How many units (problems or cells) of each candidate show which difference.

    Attributes:
        numerators: (A,) int64, summed difference of a unit.
        denominators: (A,) int64, pairs in that unit, at least 1.
        counts: (C, A) int64, units.
    """

    numerators: Ints
    denominators: Ints
    counts: Ints

    @property
    def values(self) -> Floats:
        """(A,) the differences, in [−1, 1]."""
        return self.numerators / self.denominators

    @property
    def n(self) -> Ints:
        """(C,) units."""
        return np.asarray(self.counts.sum(axis=1), dtype=np.int64)

    def moments(self) -> tuple[Floats, Floats, Floats]:
        """(C,) Σd, Σ|d| and Σd² over units, from whole numbers if they fit."""
        common = math.lcm(*(int(d) for d in np.unique(self.denominators)))
        if common <= 1_000_000:
            whole = self.numerators * (common // self.denominators)
            return (
                (self.counts @ whole) / common,
                (self.counts @ np.abs(whole)) / common,
                (self.counts @ whole**2) / common**2,
            )
        terms = self.counts * self.values
        return (
            terms.sum(axis=1),
            np.abs(terms).sum(axis=1),
            (terms * self.values).sum(axis=1),
        )

    def mean(self) -> Floats:
        """(C,) Δ, the mean difference over units; NaN if there is none."""
        n = self.n
        return np.where(n > 0, self.moments()[0] / np.maximum(n, 1), np.nan)

    def merge(self, other: Tally) -> Tally:
        """Both sets of units together, for the same candidates in the same order."""
        if len(self.counts) != len(other.counts):
            raise ValueError(f"{len(self.counts)} candidates against {len(other.counts)}")
        keys = np.concatenate(
            [
                np.stack([self.denominators, self.numerators]),
                np.stack([other.denominators, other.numerators]),
            ],
            axis=1,
        )
        unique, index = np.unique(keys, axis=1, return_inverse=True)
        counts = np.zeros((len(self.counts), unique.shape[1]), dtype=np.int64)
        both = np.concatenate([self.counts, other.counts], axis=1)
        for atom, target in enumerate(index.ravel()):
            counts[:, target] += both[:, atom]
        return Tally(numerators=unique[1], denominators=unique[0], counts=counts)


def pair(baseline: NDArray[np.int8], knockout: NDArray[np.int8]) -> Pairs:
    """Counts pairs per candidate and problem.

    Args:
        baseline: (P, S) int8, 0/1 grades, −1 missing.
        knockout: (C, P, S) int8, the same.

    Returns:
        The counts. A pair needs both grades.
    """
    if knockout.ndim != 3 or knockout.shape[1:] != baseline.shape:
        raise ValueError(f"baseline {baseline.shape} does not fit knockout {knockout.shape}")
    shape = knockout.shape[:2]
    n, won, lost, base = (np.zeros(shape, dtype=np.int64) for _ in range(4))
    there, right = baseline >= 0, baseline == 1
    for c, grades in enumerate(knockout):
        valid = (grades >= 0) & there
        hit = grades == 1
        n[c] = np.count_nonzero(valid, axis=1)
        won[c] = np.count_nonzero(valid & hit & ~right, axis=1)
        lost[c] = np.count_nonzero(valid & ~hit & right, axis=1)
        base[c] = np.count_nonzero(valid & right, axis=1)
    return Pairs(n=n, won=won, lost=lost, base=base, n_seeds=baseline.shape[1])


def tally_problems(pairs: Pairs) -> Tally:
    """Problems as units: the difference of a problem is its mean over the seeds that it has."""
    s = pairs.n_seeds
    width = 2 * s + 1
    n_candidates = len(pairs.n)
    keys = pairs.n * width + (pairs.won - pairs.lost) + s
    size = (s + 1) * width
    offsets = np.arange(n_candidates, dtype=np.int64)[:, None] * size
    counts = np.bincount((keys + offsets).ravel(), minlength=n_candidates * size)
    counts = counts.reshape(n_candidates, size).astype(np.int64)
    counts[:, :width] = 0  # problems without a pair say nothing
    kept = np.flatnonzero(counts.any(axis=0))
    return Tally(
        numerators=kept % width - s,
        denominators=kept // width,
        counts=np.ascontiguousarray(counts[:, kept]),
    )


def tally_cells(pairs: Pairs) -> Tally:
    """Cells as units, for inference on these very problems: the seeds alone are a sample."""
    n, won, lost = (x.sum(axis=1) for x in (pairs.n, pairs.won, pairs.lost))
    return Tally(
        numerators=np.array([-1, 0, 1], dtype=np.int64),
        denominators=np.ones(3, dtype=np.int64),
        counts=np.stack([lost, n - won - lost, won], axis=1).astype(np.int64),
    )


def wilson_interval(
    share: ArrayLike, n: ArrayLike, z: ArrayLike = 1.959963984540054
) -> tuple[Floats, Floats]:
    """Score interval of a proportion (Wilson 1927): both limits at z standard errors.

    Args:
        share: Observed proportion in [0, 1].
        n: Number of trials, not necessarily whole; 0 gives [0, 1].
        z: Normal quantile, at least 0; 0 gives the share itself.

    Returns:
        Lower and upper limit, broadcast.

    Example:
        >>> low, high = wilson_interval(0.0, 30)
        >>> round(float(low), 4), round(float(high), 4)
        (0.0, 0.1135)
    """
    p, m, q = np.broadcast_arrays(
        *(np.asarray(x, dtype=np.float64) for x in (share, n, np.square(z)))
    )
    total = m + q
    safe = np.where(total > 0, total, 1.0)
    centre = np.where(total > 0, (p * m + q / 2) / safe, p)
    half = np.sqrt(q * (np.maximum(p * (1 - p), 0) * m + q / 4)) / safe
    return np.maximum(centre - half, 0.0), np.minimum(centre + half, 1.0)


def flips_needed(alpha: ArrayLike) -> Floats:
    """One-way flips before an exact two-sided sign test reaches alpha: 2 · 2^−k ≤ alpha.

    Example:
        >>> flips_needed([0.05, 0.05 / 200]).tolist()
        [6.0, 13.0]
    """
    return np.asarray(np.ceil(1 - np.log2(np.asarray(alpha, dtype=np.float64)) - 1e-9))
