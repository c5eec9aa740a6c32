"""What a design can see: smallest detectable effects, before data and after.

A design is reduced to two numbers. `trials` N is how many independent 0/±1 trials carry the same
variance: n·S cells, less what the cells of one problem share. `share` π is the part of them that
differs. An effect δ needs δ of the trials to flip one way, so at least max(π, δ) of them differ,
and two things limit what can be seen:

- noise: the normal power of McNemar's test, (δ − c)√N ≥ z_α √v + z_β √(v − δ²) with v = max(π, δ)
  (Connor 1987), where c = (1 − δ/v)/N stands for the lattice of an exact test: flips both ways make
  it half a step of 2, flips all one way none;
- counting: even flips that all go one way need 1 + log2(1/alpha) of them before the sign test can
  reach alpha: 6 at .05, 13 at .05 / 200. With 30 problems that alone is a large effect.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike
from scipy import special, stats

from .paired import Floats, Pairs, Tally, flips_needed

__all__ = [
    "design_trials",
    "expected_share",
    "flips_needed",
    "mde",
    "mde_of_tally",
    "plan_mde",
    "power",
    "seed_correlation",
]


def design_trials(
    n_problems: ArrayLike, n_seeds: ArrayLike, correlation: ArrayLike = 0.0
) -> Floats:
    """Independent trials that n problems × S seeds are worth: n·S / (1 + (S − 1)·correlation).

    Args:
        n_problems: Problems.
        n_seeds: Seeds per problem.
        correlation: Correlation of two cells' differences on one problem, in [0, 1]: 0 where a
            problem's Δ is the same everywhere, 1 where repeats add nothing (Kish 1965).
    """
    n, s, r = (np.asarray(x, dtype=np.float64) for x in (n_problems, n_seeds, correlation))
    return np.asarray(n * s / (1 + (s - 1) * r), dtype=np.float64)


def power(
    effect: ArrayLike, trials: ArrayLike, share: ArrayLike, alpha: ArrayLike = 0.05
) -> Floats:
    """Probability that the sign-flip test sees an effect at level alpha.

    Args:
        effect: |Δ|, in (0, 1].
        trials: Independent trials N (`design_trials`).
        share: Share of trials that differ without any effect, in [0, 1].
        alpha: Two-sided level; alpha / m for the first of m candidates.

    Returns:
        Power, broadcast, the smaller of the noise and the counting limit.
    """
    d, n, p, a = np.broadcast_arrays(
        *(np.asarray(x, dtype=np.float64) for x in (effect, trials, share, alpha))
    )
    v = np.maximum(p, d)
    noise = stats.norm.cdf(_noise_score(d, n, v, stats.norm.isf(a / 2)))
    return np.asarray(np.minimum(noise, _at_least(flips_needed(a), n, v)))


def mde(trials: ArrayLike, share: ArrayLike, alpha: ArrayLike = 0.05, power: float = 0.8) -> Floats:
    """Smallest |Δ| that the design sees with the given power.

    Args:
        trials: Independent trials N.
        share: Share of trials that differ without any effect.
        alpha: Two-sided level.
        power: Wanted power.

    Returns:
        The effect in (0, 1], broadcast; NaN where no effect can reach alpha at all.
    """
    n, p, a = np.broadcast_arrays(
        *(np.asarray(x, dtype=np.float64) for x in (trials, share, alpha))
    )
    needed = flips_needed(a)
    z_a, z_b = stats.norm.isf(a / 2), stats.norm.ppf(power)
    low, high = np.zeros(n.shape), np.ones(n.shape)
    for _ in range(50):
        d = (low + high) / 2
        seen = _noise_score(d, n, np.maximum(p, d), z_a) >= z_b
        low, high = np.where(seen, low, d), np.where(seen, d, high)
    possible = n >= needed
    safe = np.where(possible, n, needed)
    counting = special.betaincinv(needed, safe - needed + 1, power)
    return np.where(possible, np.maximum(high, counting), np.nan)


def mde_of_tally(tally: Tally, alpha: ArrayLike = 0.05, power: float = 0.8) -> Floats:
    """Smallest |Δ| that the data at hand could have seen, for each candidate.

    The share and the trials are those observed; one pseudo-problem with |d| = 1 keeps the trials
    near the number of problems until the data show that differences are smaller. NaN with too few
    units for any effect to reach alpha.
    """
    n = tally.n.astype(np.float64)
    _, size, square = tally.moments()
    safe = np.maximum(n, 1.0)
    found = mde(n * (size + 1) / (square + 1), size / safe, alpha, power)
    return np.where(n >= flips_needed(alpha), found, np.nan)


def seed_correlation(pairs: Pairs) -> Floats:
    """(C,) how much repeats of a problem agree in their differences, for `design_trials`.

    From (Σ over seeds)² = own squares + products of two seeds; 0 where fewer than two seeds or no
    difference say anything, never below 0.
    """
    sums = pairs.won - pairs.lost
    squares = (pairs.won + pairs.lost).sum(axis=1).astype(np.float64)
    products = (sums**2 - pairs.won - pairs.lost).sum(axis=1)
    per_cell = squares / np.maximum(pairs.n.sum(axis=1), 1)
    pairs_of_seeds = (pairs.n * (pairs.n - 1)).sum(axis=1)
    known = (squares > 0) & (pairs_of_seeds > 0)
    scale = np.where(known, per_cell * pairs_of_seeds, 1.0)
    return np.where(known, np.clip(products / scale, 0.0, 1.0), 0.0)


def expected_share(right: ArrayLike, n_seeds: int, forked_share: ArrayLike) -> Floats:
    """Share of cells whose grade should differ under no effect, from a baseline alone.

    A forked cell is taken as a fresh draw, so its grade differs with probability 2b(1 − b) on a
    problem that is solved with probability b; an inherited one never differs.

    Args:
        right: (P,) right answers out of n_seeds.
        n_seeds: Baseline seeds; with one, the mean Pass@1 stands in for every problem (an upper
            bound, as problems differ).
        forked_share: Share of cells in which the candidate forks, any shape.
    """
    k = np.asarray(right, dtype=np.float64)
    if n_seeds >= 2:
        differs = float(np.mean(2 * k * (n_seeds - k) / (n_seeds * (n_seeds - 1))))
    else:
        differs = float(2 * k.mean() * (1 - k.mean()))
    return np.asarray(np.asarray(forked_share, dtype=np.float64) * differs)


def plan_mde(
    n_problems: int,
    seeds: Sequence[int] = tuple(range(1, 17)),
    *,
    share: float = 0.1,
    correlation: float = 0.0,
    alpha: float = 0.05,
    m: int = 1,
    power: float = 0.8,
) -> Floats:
    """Smallest detectable |Δ| of a planned benchmark for each number of seeds.

    Args:
        n_problems: Problems.
        seeds: Numbers of seeds to consider.
        share: Share of cells whose grade differs without an effect (`expected_share`).
        correlation: As in `design_trials`.
        alpha: Level of the verdict.
        m: Candidates corrected for; 1 for the nominal rule. The first discovery of the fdr rule
            has to pass alpha / m.
        power: Wanted power.

    Returns:
        (len(seeds),) effects, NaN where none can be seen.

    Example:
        >>> plan_mde(30, [1, 3]).round(2).tolist()
        [0.25, 0.09]
    """
    counts = np.asarray(seeds, dtype=np.float64)
    if n_problems < flips_needed(alpha / m):
        return np.full(len(counts), np.nan)
    return mde(design_trials(n_problems, counts, correlation), share, alpha / m, power)


def _noise_score(effect: Floats, trials: Floats, v: Floats, z: Floats) -> Floats:
    """How many standard deviations the net flips are expected above what z needs."""
    spread = np.sqrt(np.maximum(v - effect**2, 1e-12))
    lattice = (1 - effect / np.maximum(v, 1e-12)) / np.maximum(trials, 1.0)
    return np.asarray(((effect - lattice) * np.sqrt(trials) - z * np.sqrt(v)) / spread)


def _at_least(k: Floats, n: Floats, p: Floats) -> Floats:
    """P(Binomial(n, p) ≥ k) for whole k and n not necessarily whole."""
    possible = n >= k
    value = special.betainc(k, np.where(possible, n - k + 1, 1.0), p)
    return np.where(possible, value, 0.0)
