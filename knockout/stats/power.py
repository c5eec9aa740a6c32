"""What a design can see: the smallest detectable effect, one function for before and after the data.

Problems have mixed difficulty, b ~ beta, and two things make the grade of a cell differ:

- **noise**: a fork is drawn again, so the grade may differ although the ban does nothing. A share
  π of the cells does, most of them on problems that are neither easy nor hopeless;
- **the effect, on top of it**: of what is right, as much is lost as makes Δ = −δ.

So nearly π + δ of the cells differ, not max(π, δ). With one seed a cell is a trial of McNemar's exact
test and its power a binomial sum. With several, the sizes of the problems' differences decide what
the sign-flip test can reach, so its power is simulated (fixed random numbers, the same answer every
time) with a saddlepoint p-value. A loss cannot exceed Pass@1: if the smallest visible one
would have to, there is none (NaN).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special, stats

from .paired import Floats, Pairs, flips_needed
from .signflip import signflip_approx

__all__ = [
    "CORRELATION",
    "SPREAD",
    "Design",
    "difficulty",
    "expected_share",
    "flips_needed",
    "mde",
    "mde_of_shares",
    "never_rising",
    "plan_mde",
    "power",
    "reachable",
    "seed_correlation",
]

CORRELATION = 0.2
"""Agreement of a problem's differences between seeds, without data; about that of IFEval in
results/smollm2-135m."""

SPREAD = 0.6
"""Parameters a + b of the beta distribution of difficulty, without data: many problems are
nearly always or nearly never solved."""

_NODES = 48  # of the difficulty's distribution
_DRAWS = 600  # simulated sweeps per effect


@dataclass(frozen=True, slots=True)
class Design:
    """One candidate on one benchmark.

    Attributes:
        n_problems: Problems; for target `benchmark` cells, with one seed each.
        n_seeds: Seeds of a problem.
        share: Share π of cells whose grade differs without any effect.
        correlation: Of two cells' differences on one problem without an effect, in [0, 1]: 0 if
            no problem leans to either side, 1 if repeats add nothing.
        pass1: Pass@1 of the baseline, the largest loss that there can be.
        spread: a + b of the beta distribution of difficulty (`difficulty`); more is taken if so
            large a share could not differ otherwise.
    """

    n_problems: int
    n_seeds: int
    share: float = 0.1
    correlation: float = 0.0
    pass1: float = 0.5
    spread: float = SPREAD

    def differences(self, effect: float) -> Floats:
        """(2S + 1,) probabilities of a problem's net losses −S…S, for a loss of `effect`."""
        p = min(max(self.pass1, 1e-6), 1 - 1e-6)
        grid = (np.arange(_NODES) + 0.5) / _NODES
        spread = _possible_spread(self.share, p, self.spread)
        b = special.betaincinv(max(p * spread, 1e-3), max((1 - p) * spread, 1e-3), grid)
        noise = _scaled(b * (1 - b), self.share)
        kept = 1 - min(1.0, effect / max(float(b.mean()), 1e-12))
        # Repeats that agree: problems lean to one side; if that is not enough, few move at all.
        wanted = self.correlation * noise.mean() / max(float((noise**2).mean()), 1e-12)
        lean = min(1.0, wanted**0.5) if self.n_seeds > 1 else 0.0
        moving = max(1 / wanted, float(noise.max())) if wanted > 1 and self.n_seeds > 1 else 1.0
        out = np.zeros(2 * self.n_seeds + 1)
        for weight, part in ((moving, noise / moving), (1 - moving, np.zeros_like(noise))):
            for up, down in _sides(part, lean, b) if weight else ():
                # What noise has won can be lost again; what it has lost cannot.
                down = down + (1 - kept) * (b - down)
                out += weight * _net(self.n_seeds, up * kept, down).mean(axis=1)
        return np.asarray(out / out.sum())


def power(effect: ArrayLike, design: Design, alpha: float = 0.05) -> Floats:
    """Probability that the sign-flip test sees losses of these sizes at level alpha.

    Args:
        effect: (E,) losses of Pass@1, each in [0, `design.pass1`].
        design: The design.
        alpha: Two-sided level; alpha / m for the first of m candidates.

    Returns:
        (E,) powers: exact for one seed, simulated for more.

    Example:
        >>> power([0.0, 0.05], Design(500, 1, share=0.05)).round(2).tolist()
        [0.04, 0.98]
    """
    effects = np.atleast_1d(np.asarray(effect, dtype=np.float64))
    n, s = design.n_problems, design.n_seeds
    needed = float(flips_needed(alpha))
    found = [design.differences(float(delta)) for delta in effects]
    if s == 1:
        return np.array([_exact_power(n, float(up), float(down), alpha) for up, _, down in found])
    # The same random numbers for all effects, so that power rises with the effect.
    rows = np.concatenate([np.random.default_rng(0).multinomial(n, d, _DRAWS) for d in found])
    sizes = np.arange(1, s + 1)
    down, up = rows[:, s + 1 :], rows[:, s - 1 :: -1]
    net = (down - up) @ sizes
    p = signflip_approx(sizes, down + up, net)
    seen = (p <= alpha) & (net > 0) & ((down + up).sum(axis=1) >= needed)
    return np.asarray(seen.reshape(len(effects), _DRAWS).mean(axis=1), dtype=np.float64)


@lru_cache(maxsize=4096)
def mde(design: Design, alpha: float = 0.05, promised: float = 0.8) -> float:
    """Smallest loss of Pass@1 that the design sees with the promised power.

    Returns:
        The loss in (0, `design.pass1`], or NaN if no possible loss reaches that power.

    Example:
        >>> round(mde(Design(30, 1, share=0.0)), 3), mde(Design(12, 16), 0.05 / 200)
        (0.251, nan)
    """
    most = design.pass1
    if design.n_problems < flips_needed(alpha) or not most > 0:
        return float("nan")
    if design.n_seeds == 1:
        low, high = 0.0, most
        if power(high, design, alpha)[0] < promised:
            return float("nan")
        for _ in range(18):
            middle = (low + high) / 2
            seen = power(middle, design, alpha)[0] >= promised
            low, high = (low, middle) if seen else (middle, high)
        return high
    guess = min(_normal_mde(design, alpha, promised), most)
    factors = np.array([0.6, 0.8, 1.0, 1.25])
    for _ in range(12):
        tried = np.minimum(guess * factors, most)
        seen = power(tried, design, alpha)
        if seen[-1] < promised:
            if tried[-1] >= most:
                return float("nan")
            guess *= 1.5
        elif seen[0] >= promised:
            guess *= 0.6
        else:
            break
    # Probit of the power is nearly linear in the effect: all four points say where it crosses.
    score = stats.norm.ppf(np.clip(seen, 0.5 / _DRAWS, 1 - 0.5 / _DRAWS))
    near = stats.norm.pdf(score - stats.norm.ppf(promised)) + 1e-6
    slope, level = np.polyfit(tried, score, 1, w=np.sqrt(near))
    found = (stats.norm.ppf(promised) - level) / slope if slope > 0 else tried[-1]
    return float(np.clip(found, tried[0], tried[-1]))


def mde_of_shares(
    shares: ArrayLike, design: Design, alpha: float = 0.05, promised: float = 0.8
) -> Floats:
    """`mde` of many candidates that differ in their share alone: computed for a few and interpolated linearly.

    Args:
        shares: (C,) shares of differing cells without an effect, NaN if unknown.
        design: All else.
        alpha: Two-sided level.
        promised: Power.
    """
    wanted = np.asarray(shares, dtype=np.float64)
    known = wanted[np.isfinite(wanted)]
    if not len(known):
        return np.full(wanted.shape, np.nan)
    ends = np.sqrt([known.min(), known.max()])
    distinct = np.unique(np.round(np.sqrt(known), 4))
    knots = distinct if len(distinct) <= 5 else np.linspace(ends[0], ends[1], 5)
    found = np.array(
        [mde(replace(design, share=round(float(k**2), 6)), alpha, promised) for k in knots]
    )
    return np.asarray(np.interp(np.sqrt(wanted), knots, found), dtype=np.float64)


def plan_mde(
    n_problems: int,
    seeds: Sequence[int] = tuple(range(1, 17)),
    *,
    share: float = 0.1,
    correlation: float = 0.0,
    alpha: float = 0.05,
    m: float = 1,
    power: float = 0.8,
    pass1: float = 0.5,
    spread: float = SPREAD,
) -> Floats:
    """Smallest detectable loss of a planned benchmark for each number of seeds.

    Args:
        n_problems: Problems.
        seeds: Numbers of seeds to consider, rising.
        share: Share of cells whose grade differs without an effect (`expected_share`).
        correlation, pass1, spread: As in `Design`.
        alpha: Level of the verdict.
        m: Candidates corrected for; 1 for the nominal rule. The first discovery of the fdr rule
            has to pass alpha / m, with m the candidates that can pass it (`reachable`).
        power: Promised power.

    Returns:
        (len(seeds),) losses, NaN if none is seen.

    Example:
        >>> plan_mde(30, [1, 4]).round(2).tolist()
        [0.39, 0.14]
    """
    designs = [Design(n_problems, s, share, correlation, pass1, spread) for s in seeds]
    return never_rising(np.array([mde(design, alpha / m, power) for design in designs]))


def never_rising(effects: Floats) -> Floats:
    """Smallest effects by rising numbers of seeds, without the simulation's last digits."""
    return np.asarray(np.fmin.accumulate(effects), dtype=np.float64)


def reachable(differing: ArrayLike, n_problems: int, alpha: float = 0.05) -> int:
    """Candidates that will be corrected for: those whose differing problems can reach the level.

    Args:
        differing: (C,) expected share of problems that differ, for each candidate.
        n_problems: Problems.
        alpha: Level.

    Returns:
        The smallest K ≥ 1 of which at most K candidates are expected to differ on as many
        problems as a level of alpha / K needs (`multiplicity.can_reach` once the data are there).
    """
    q = np.atleast_1d(np.asarray(differing, dtype=np.float64))
    k = 1
    while (
        k < len(q) and np.sum(stats.binom.sf(flips_needed(alpha / k) - 1, n_problems, q)) > k + 0.5
    ):
        k += 1
    return k


def difficulty(right: ArrayLike, n_seeds: int) -> tuple[float, float]:
    """Pass@1 and the spread of difficulty, from a baseline.

    Args:
        right: (P,) right answers out of n_seeds.
        n_seeds: Seeds; with one the spread is unknown and taken as `SPREAD`.
    """
    k = np.asarray(right, dtype=np.float64)
    if not len(k):
        return 0.5, SPREAD
    p = float(k.mean() / n_seeds)
    if n_seeds < 2 or not 0 < p < 1:
        return p, SPREAD
    between = float((k * (k - 1)).mean() / (n_seeds * (n_seeds - 1))) - p * p
    if between <= 0:
        return p, 50.0
    return p, float(np.clip(p * (1 - p) / between - 1, 0.05, 50.0))


def seed_correlation(pairs: Pairs) -> Floats:
    """(C,) how much repeats of a problem agree in their differences, for `Design`.

    From (Σ over seeds)² = own squares + products of two seeds; 0 if fewer than two seeds or no
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


def _exact_power(n: int, up: float, down: float, alpha: float) -> float:
    """Power of McNemar's exact test for n cells that are won and lost with these probabilities."""
    q = min(up + down, 1.0)
    low = max(int(stats.binom.ppf(1e-10, n, q)), int(flips_needed(alpha)))
    differing = np.arange(low, int(stats.binom.isf(1e-10, n, q)) + 1)
    reject = stats.binom.isf(alpha / 2, differing, 0.5) + 1
    seen = stats.binom.sf(reject - 1, differing, down / max(up + down, 1e-300))
    return float(stats.binom.pmf(differing, n, q) @ seen)


def _normal_mde(design: Design, alpha: float, promised: float) -> float:
    """A first guess: z standard errors of trials that differ in π + δ of the cells."""
    s = design.n_seeds
    trials = design.n_problems * s / (1 + (s - 1) * design.correlation)
    z = stats.norm.isf(alpha / 2) + stats.norm.ppf(promised)
    noise = z * (design.share / trials) ** 0.5
    return float(max((noise**2 + (z * z / trials) ** 2) ** 0.5, flips_needed(alpha) / trials))


def _possible_spread(share: float, p: float, spread: float) -> float:
    """The least spread of difficulty, from `spread` on, at which a share of cells can differ.

    Two draws of a problem differ with probability 2b(1 − b), on average 2p(1 − p)s / (1 + s) for a
    beta distribution of mean p with a + b = s.
    """
    of_all = share / (2 * p * (1 - p))
    return spread if of_all <= 0 else max(spread, of_all / (1 - of_all) if of_all < 0.98 else 50.0)


def _sides(noise: Floats, lean: float, b: Floats) -> list[tuple[Floats, Floats]]:
    """Gains and losses of problems that lean to the one and to the other side.

    On average over both sides they cancel, and `noise` of the cells differ as far as there is that
    much to gain (1 − b) and to lose (b).
    """
    asked, share = noise, float(noise.mean())
    for _ in range(6):
        gain, loss = _balanced(asked * (1 + lean) / 2, b)
        less_gain, less_loss = _balanced(asked * (1 - lean) / 2, b)
        found = float((gain + loss + less_gain + less_loss).mean()) / 2
        asked = asked * share / max(found, 1e-12)
    return [(less_gain, loss), (gain, less_loss)] if lean else [(gain, loss)]


def _balanced(noise: Floats, b: Floats) -> tuple[Floats, Floats]:
    """Gains of what is wrong and losses of what is right, of one mean: noise has no effect."""
    gain, loss = np.minimum(noise, 1 - b), np.minimum(noise, b)
    both = min(gain.mean(), loss.mean())
    return gain * both / max(gain.mean(), 1e-12), loss * both / max(loss.mean(), 1e-12)


def _scaled(shape: Floats, mean: float) -> Floats:
    """Shares of this shape and mean, none above .98."""
    noise = np.minimum(shape * mean / max(float(shape.mean()), 1e-12), 0.95)
    return np.asarray(np.minimum(noise * mean / max(float(noise.mean()), 1e-12), 0.98))


def _net(n_seeds: int, up: Floats, down: Floats) -> NDArray[np.float64]:
    """(2S + 1, K) distribution of losses less wins over S cells, for K kinds of problems."""
    total = np.maximum(up + down, 1.0)
    up, down = up / total, down / total
    dist = np.zeros((2 * n_seeds + 1, len(up)))
    dist[n_seeds] = 1.0
    for _ in range(n_seeds):
        fresh = dist * (1 - up - down)
        fresh[1:] += dist[:-1] * down
        fresh[:-1] += dist[1:] * up
        dist = fresh
    return dist
