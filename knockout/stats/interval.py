"""A confidence interval for Δ that agrees with the sign-flip test and is never of width zero.

Most differences are exactly 0, so the bootstrap fails here: with 2 of 30 problems differing its
percentile and BCa limits cover far less than they say, and with none it has width zero. Instead
Δ is written as the product of two nearly orthogonal parts,

    Δ = share × direction,   share = E|d|,   direction = Δ / E|d| in [−1, 1],

each with a Wilson score interval: the share from all units, the direction from those that differ.
The interval is the range of the product over the joint region z_share² + z_direction² ≤ z²
(square-and-add, as in Newcombe's method for paired proportions, 1998, and Zou & Donner's MOVER,
2008). On the side of zero, the direction's score is rescaled so that at direction 0 it equals the
exact sign-flip p-value; hence **the interval excludes 0 exactly when p < alpha**.

Where nothing differs the direction is unknown and the interval is ± Wilson's upper limit of the
share with *problems* as trials (0 of 30: ± .1135, close to the rule of three): a sample of problems
without any difference, however many seeds each had, does not rule out a rare kind of problem
on which the token matters. Nor do a few differences: while fewer problems differ than any exact
test needs to reach alpha (6 at .05), no side of the interval is closer to Δ than that.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from scipy import stats

from .paired import Floats, Tally, flips_needed, wilson_interval

__all__ = ["mean_interval"]

_ANGLES = 65


def mean_interval(tally: Tally, p_values: Floats, alpha: float = 0.05) -> tuple[Floats, Floats]:
    """Two-sided 1 − alpha interval of the mean difference of each candidate.

    Args:
        tally: Differences per unit of C candidates.
        p_values: (C,) their two-sided sign-flip p-values.
        alpha: Error rate.

    Returns:
        (C,) lower and upper limits, NaN where there are fewer than two units. They exclude 0
        exactly where p < alpha and touch it where p = alpha.
    """
    n = tally.n.astype(np.float64)
    total, size, square = tally.moments()
    z = float(stats.norm.isf(alpha / 2))

    sign = np.where(total < 0, -1.0, 1.0)
    differs = size > 0
    safe_n, safe_size, safe_square = (np.where(x > 0, x, 1.0) for x in (n, size, square))
    share = size / safe_n
    # Several seeds make |d| steadier than a 0/1 trial: this many trials have the same variance.
    # One pseudo-problem with |d| = 1 keeps the number near n until the data show otherwise, so
    # that the first few small differences do not shrink the interval.
    padded = (size + 1) / (n + 1)
    variance = np.maximum((square + 1) / (n + 1) - padded**2, 0.0)
    binomial = padded * (1 - padded)
    trials = n * np.where(variance > 1e-12, binomial / np.maximum(variance, 1e-12), 1.0)
    direction = np.abs(total) / safe_size
    differing = np.where(differs, size**2 / safe_square, 0.0)

    # Score at direction 0: by the normal formula and exactly.
    z_score = np.abs(total) / np.sqrt(safe_square)
    z_exact = stats.norm.isf(np.clip(np.nan_to_num(p_values, nan=1.0), 0.0, 1.0) / 2)
    gap = np.where(differs, z_score - z_exact, 0.0)

    def limits(angles: Floats) -> tuple[Floats, Floats]:
        """(C, G) near and far limit for each way to split z between share and direction."""
        of_share, of_direction = z * np.cos(angles), z * np.sin(angles)
        low_share, high_share = wilson_interval(share[:, None], trials[:, None], of_share)
        with np.errstate(divide="ignore", invalid="ignore"):
            part = np.where(
                z_exact[:, None] > 0, np.minimum(of_direction / z_exact[:, None], 1.0), 1.0
            )
        q = (1 + direction[:, None]) / 2
        near_z = np.maximum(of_direction + gap[:, None] * part, 0.0)
        near = 2 * wilson_interval(q, differing[:, None], near_z)[0] - 1
        far = 2 * wilson_interval(q, differing[:, None], of_direction)[1] - 1
        return np.minimum(near * low_share, near * high_share), far * high_share

    grid = np.broadcast_to(np.linspace(0.0, np.pi / 2, _ANGLES), (len(n), _ANGLES))
    near, far = (_refine(limits, grid, side) for side in (0, 1))
    low = np.where(sign > 0, near, -far)
    high = np.where(sign > 0, far, -near)
    # A few differences are no stronger evidence of no effect than none at all.
    few = tally.counts[:, tally.numerators != 0].sum(axis=1) < flips_needed(alpha)
    none = wilson_interval(np.zeros(len(n)), np.maximum(n, 1.0), z)[1]
    low = np.where(few, np.clip(tally.mean() - none, -1.0, low), low)
    high = np.where(few, np.clip(tally.mean() + none, high, 1.0), high)
    known = n >= 2
    return np.where(known, low, np.nan), np.where(known, high, np.nan)


def _refine(limits: Callable[[Floats], tuple[Floats, Floats]], grid: Floats, side: int) -> Floats:
    """Extreme over the angle: a coarse grid, then a fine one around its best point."""
    sense = 1.0 if side == 0 else -1.0
    step = np.pi / 2 / (_ANGLES - 1)
    coarse = sense * limits(grid)[side]
    best = np.take_along_axis(grid, coarse.argmin(axis=1)[:, None], axis=1)
    around = np.clip(best + step * np.linspace(-1.0, 1.0, _ANGLES), 0.0, np.pi / 2)
    fine = sense * limits(around)[side]
    return np.asarray(sense * np.minimum(coarse.min(axis=1), fine.min(axis=1)))
