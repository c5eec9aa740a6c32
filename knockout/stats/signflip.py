"""The sign-flip test, exactly, at every size.

If banning a token does nothing, then on each problem "only the knockout is right" and "only the
baseline is right" are equally likely, so the sign of each problem's difference is a fair coin
given its size (Fisher's randomisation test for pairs). Differences are fractions over few seeds;
on their common denominator they are whole numbers, and the distribution of Σ ±k_i is a
convolution of whole numbers. It is computed directly: no random draws, never 0, and the same
p-value in any order of problems.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from .paired import Floats, Ints, Tally

__all__ = ["signflip_approx", "signflip_p", "signflip_sizes_p"]

_FINEST = 240
"""Largest common denominator; beyond it (odd patterns of missing seeds) sizes are rounded to
this grid, which changes the statistic by under 1/480 of a problem and keeps the test exact."""

_TINY = float(np.finfo(np.float64).tiny)


def signflip_p(tally: Tally) -> Floats:
    """Two-sided sign-flip p-value of "no effect on any problem" for each candidate.

    Args:
        tally: Differences per unit of C candidates.

    Returns:
        (C,) p-values in (0, 1]: P(|Σ ±k_i| ≥ |Σ observed|). 1 if nothing differs, NaN if
        there are no units. With one seed this is the exact McNemar test.

    Source: Pesarin & Salmaso, "Permutation Tests for Complex Data" (2010), section 1.9; the
    convolution is the "shift algorithm" of Streitberg & Röhmel (1986).
    """
    numerators, sizes = _whole(tally.numerators, tally.denominators)
    totals = np.abs(tally.counts @ numerators)
    unique = np.unique(sizes)
    by_size = np.stack(
        [tally.counts[:, sizes == size].sum(axis=1) for size in unique if size > 0]
        or [np.zeros(len(tally.counts), dtype=np.int64)],
        axis=1,
    )
    unique = unique[unique > 0]
    out = np.ones(len(tally.counts))
    cache: dict[tuple[int, bytes], float] = {}
    for c, (total, counts) in enumerate(zip(totals, by_size, strict=True)):
        if not counts.any():
            continue
        key = (int(total), counts.tobytes())
        if key not in cache:
            cache[key] = signflip_sizes_p(unique, counts, int(total))
        out[c] = cache[key]
    out[tally.n == 0] = np.nan
    return out


def signflip_sizes_p(sizes: Ints, counts: Ints, total: int) -> float:
    """P(|Σ ± sizes| ≥ total) with independent fair signs.

    Args:
        sizes: (K,) distinct positive whole numbers.
        counts: (K,) how often each occurs.
        total: The observed |sum|, of the parity that such a sum can have.

    Returns:
        The probability, in (0, 1].

    Example:
        >>> import numpy as np
        >>> signflip_sizes_p(np.array([1]), np.array([6]), 6)
        0.03125
    """
    used = counts > 0
    sizes, counts = sizes[used], counts[used]
    n = int(counts.sum())
    if n == 0 or total == 0:
        return 1.0
    step = int(np.gcd.reduce(sizes))
    sizes, total = sizes // step, total // step
    # Σ ±k ≥ t exactly when the sizes with a minus sign add up to at most (Σk − t) / 2.
    room = (int(sizes @ counts) - total) // 2
    if len(sizes) == 1:
        return float(min(1.0, max(2.0 * stats.binom.cdf(room, n, 0.5), _TINY)))
    ways, exponent = _subset_counts(sizes, counts, room)
    log2 = math.log2(float(ways.sum())) + exponent + 1 - n
    return min(1.0, max(2.0**log2 if log2 > -1021 else 0.0, _TINY))


def signflip_approx(sizes: Ints, counts: Ints, totals: Ints) -> Floats:
    """Two-sided p-values of many rows at once, by a saddlepoint; for simulations.

    Args:
        sizes: (K,) distinct positive whole numbers.
        counts: (R, K) how often each occurs.
        totals: (R,) observed sums.

    Returns:
        (R,) approximations of `signflip_sizes_p`: exact if all signs agree, within a few per
        cent from 15 differences on.

    Source: Lugannani & Rice, Advances in Applied Probability 12 (1980), with Daniels' second
    correction for lattices; Robinson, JRSS-B 44 (1982), for permutation tests.
    """
    k = np.asarray(sizes, dtype=np.float64)
    total = np.abs(totals).astype(np.float64)
    step = np.maximum(np.gcd.reduce(np.where(counts > 0, sizes, 0), axis=1), 1).astype(np.float64)
    goal = np.maximum(total - step, 0.0)  # half a step of 2 · gcd below what was seen
    low, high = np.zeros(len(total)), np.full(len(total), 40.0)
    t = np.clip(goal / np.maximum(counts @ k**2, 1.0), 1e-3, 5.0)
    for _ in range(30):
        bent = np.tanh(t[:, None] * k)
        slope = (counts * k * bent).sum(axis=1)
        low, high = np.where(slope < goal, t, low), np.where(slope < goal, high, t)
        curve = (counts * k**2 * (1 - bent**2)).sum(axis=1)
        step_t = t + (goal - slope) / np.maximum(curve, 1e-12)
        inside = (step_t > low) & (step_t < high)
        moved = np.where(inside, step_t, (low + high) / 2)
        done = np.abs(moved - t).max() < 1e-9
        t = moved
        if done:
            break
    tk = t[:, None] * k
    curve = (counts * k**2 * (1 - np.tanh(tk) ** 2)).sum(axis=1)
    cumulant = (counts * (np.logaddexp(tk, -tk) - math.log(2))).sum(axis=1)
    w = np.sqrt(np.maximum(2 * (t * goal - cumulant), 1e-16))
    u = np.sinh(np.minimum(step * t, 700)) / step * np.sqrt(curve)
    tail = stats.norm.sf(w) + stats.norm.pdf(w) * (1 / np.maximum(u, 1e-12) - 1 / w)
    plain = stats.norm.sf(goal / np.sqrt(np.maximum(counts @ k**2, 1.0)))
    tail = np.where(w < 0.1, plain, tail)
    tail = np.where(total >= counts @ k, 0.5 ** counts.sum(axis=1), tail)
    return np.where(total > 0, np.clip(2 * tail, _TINY, 1.0), 1.0)


def _subset_counts(sizes: Ints, counts: Ints, room: int) -> tuple[NDArray[np.float64], int]:
    """Number of subsets per sum 0…room, as (ways, exponent): ways × 2^exponent."""
    ways = np.zeros(room + 1)
    ways[0] = 1.0
    exponent = reach = steps = 0
    for size, count in zip(sizes.tolist(), counts.tolist(), strict=True):
        if size > room:
            continue
        for _ in range(count):
            reach = min(room, reach + size)
            ways[size : reach + 1] += ways[: reach + 1 - size]
            steps += 1
            if steps % 512 == 0:  # each step at most doubles the largest entry
                shift = math.frexp(float(ways.max()))[1]
                ways = np.ldexp(ways, -shift)
                exponent += shift
    return ways, exponent


def _whole(numerators: Ints, denominators: Ints) -> tuple[Ints, Ints]:
    """Fractions as whole numbers on a common grid, and their absolute values."""
    common = math.lcm(*(int(d) for d in np.unique(denominators))) if len(denominators) else 1
    if common <= _FINEST:
        whole = numerators * (common // denominators)
    else:
        # Away from zero at .5, so that a difference and its opposite keep the same size.
        scaled = np.abs(numerators) * _FINEST
        whole = np.sign(numerators) * ((2 * scaled + denominators) // (2 * denominators))
    return whole.astype(np.int64), np.abs(whole).astype(np.int64)
