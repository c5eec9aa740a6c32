"""Confidence intervals for Δ, and the interval that decides equivalence.

Most differences are exactly 0, so the bootstrap fails here: with 2 of 30 problems differing its
percentile and BCa limits cover far less than they say, and with none it has width zero. What a
sample of problems cannot rule out is a rare kind of problem on which the token matters much. So
each limit is computed from the sample **and one more problem with the worst difference that there
can be**, −1 for the lower limit and +1 for the upper one:

    limit = mean ∓ z · sd / √(n + 1) ∓ skewness term,   over the n + 1 problems.

The term is Hall's correction in the direction of the limit (never towards the mean). If nothing
differs this is close to the rule of three; more differences, of whatever size, never make it
tighter. For Poisson-like losses it lies within a few per cent of the exact limit.

- `mean_interval`: two-sided, and it **excludes 0 exactly when p < alpha**: if the sign-flip test
  rejects and the limit next to 0 would not, that limit is the test's own, Δ (1 − z / z_p), or
  Δ ∓ z √Σd² / n if it is wider; if the test does not reject, 0 is inside.
- `equivalence_interval`: the 1 − 2 alpha interval of two one-sided tests at level alpha
  (Schuirmann 1987). Its limits do not look at p.

Source of the correction: P. Hall, "On the removal of skewness by transformation", JRSS-B 54 (1992).
"""

from __future__ import annotations

import numpy as np
from scipy import stats

from .paired import Floats, Ints, Tally, wilson_interval

__all__ = ["equivalence_interval", "equivalence_margin", "mean_interval", "resolution"]


def mean_interval(
    tally: Tally, p_values: Floats, alpha: float | Floats = 0.05
) -> tuple[Floats, Floats]:
    """Two-sided 1 − alpha interval of the mean difference of each candidate.

    Args:
        tally: Differences per unit of C candidates.
        p_values: (C,) their two-sided sign-flip p-values.
        alpha: Error rate, one or (C,).

    Returns:
        (C,) lower and upper limits, NaN if there are fewer than two units. They exclude 0
        exactly if p < alpha and touch it if p = alpha.
    """
    z = np.asarray(stats.norm.isf(np.asarray(alpha, dtype=np.float64) / 2))
    n, delta = tally.n, tally.mean()
    low, high = _limits(tally, z, 6.0)
    none = wilson_interval(np.zeros(len(n)), np.maximum(n, 1), z)[1]
    low, high = np.minimum(low, delta - none), np.maximum(high, delta + none)
    # If the test rejects and the limit next to 0 does not, the test decides.
    size, sign = np.abs(delta), np.where(delta < 0, -1.0, 1.0)
    z_exact = stats.norm.isf(np.clip(np.nan_to_num(p_values, nan=1.0), 0.0, 1.0) / 2)
    plain = size - z * np.sqrt(tally.moments()[2]) / np.maximum(n, 1)
    own = size * (1 - z / np.maximum(z_exact, z))
    own = np.where(plain > 0, np.minimum(own, plain), own)
    near = np.where(delta < 0, -high, low)
    near = np.where(z_exact > z, np.where(near > 0, near, own), np.minimum(near, 0.0))
    low, high = np.where(sign > 0, near, low), np.where(sign < 0, -near, high)
    return _known(n, np.maximum(low, -1.0)), _known(n, np.minimum(high, 1.0))


def equivalence_interval(tally: Tally, alpha: float = 0.05) -> tuple[Floats, Floats]:
    """The 1 − 2 alpha interval of two one-sided tests: inside ± margin means equivalent.

    Args:
        tally: Differences per unit of C candidates.
        alpha: Level of each one-sided test.

    Returns:
        (C,) lower and upper limits, NaN if there are fewer than two units.
    """
    low, high = _limits(tally, np.asarray(stats.norm.isf(alpha)), 3.0)
    return _known(tally.n, np.maximum(low, -1.0)), _known(tally.n, np.minimum(high, 1.0))


def resolution(n_problems: int, alpha: float = 0.05, square: float = 0.0) -> float:
    """Half-width of the equivalence interval of a candidate whose Δ is exactly 0.

    Args:
        n_problems: Problems.
        alpha: Level of each one-sided test.
        square: Expected Σ d² over problems; 0 for a candidate that never differs. No margin
            below that one can be shown on this many problems, whatever is generated.

    Example:
        >>> round(resolution(30), 3), round(resolution(500), 4)
        (0.101, 0.0063)
    """
    parts = _moments(float(n_problems), np.zeros(1), np.array([square]), np.zeros(1))
    return min(1.0, float(-_limit(*parts, np.asarray(stats.norm.isf(alpha)), 3.0)[0]))


def equivalence_margin(
    n_problems: int, square: float, alpha: float = 0.05, chance: float = 0.8
) -> float:
    """Smallest margin within which a candidate without any effect is shown to lie, usually.

    Args:
        n_problems: Problems.
        square: Expected Σ d² over problems.
        alpha: Level of each one-sided test.
        chance: How often it has to be shown.

    Returns:
        At most 1, within which every candidate lies.
    """
    noise = float(stats.norm.ppf((1 + chance) / 2)) * float(square) ** 0.5 / n_problems
    return min(1.0, float(resolution(n_problems, alpha, square) + noise))


def _limits(tally: Tally, z: Floats, bend: float) -> tuple[Floats, Floats]:
    n = np.maximum(tally.n, 1).astype(np.float64)
    values, counts = tally.values, tally.counts
    total, _, square = tally.moments()
    cube = counts @ values**3
    low = _limit(*_moments(n, total, square, cube), z, bend)
    high = -_limit(*_moments(n, -total, square, -cube), z, bend)
    return low, high


def _moments(
    n: Floats | float, total: Floats, square: Floats, cube: Floats
) -> tuple[Floats | float, Floats, Floats, Floats]:
    """Size, mean, variance and third central moment with one more problem of difference −1."""
    more = n + 1
    mean = (total - 1) / more
    second, third = (square + 1) / more, (cube - 1) / more
    variance = np.maximum(second - mean**2, 0.0)
    return more, mean, variance, third - 3 * mean * second + 2 * mean**3


def _limit(
    n: Floats | float, mean: Floats, variance: Floats, third: Floats, z: Floats, bend: float
) -> Floats:
    skew = np.maximum(-third / np.maximum(variance, 1e-300), 0.0)
    return np.asarray(mean - z * np.sqrt(variance / n) - np.maximum(z**2 - 1, 0) / bend * skew / n)


def _known(n: Ints, values: Floats) -> Floats:
    return np.where(n >= 2, values, np.nan)
