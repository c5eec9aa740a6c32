"""Whether going on could still change a verdict: stopping a race for futility.

After r of R planned rounds a candidate's final net flips are predicted from the data so far with a
flat prior on its effect: they scatter around R/r times those seen, with the variance of the
cells to come plus that of the estimate itself (the predictive power of Spiegelhalter, Freedman
and Blackburn, Controlled Clinical Trials 7, 1986, in the normal form). Problems and their Δ_p stay the
same in later rounds, so only the scatter between seeds counts; the share of differing cells is an
upper bound of its variance. What the final flips must reach is the bet's own threshold.

Every approximation leans towards going on: the flat prior is centred at the estimate and not at
zero, near which nearly all candidates are; the variance is an upper bound, and takes three differing
cells more than were seen; the noise that the final bet must overcome is a lower bound; the price
of the weights of target `population`'s looks is left out. One leans the other way and is small:
a candidate that would cross its threshold on the way and fall back is counted as not called.

Nothing here can make a false positive: a claim needs an e-value above its threshold, and fewer
looks at an e-value are fewer chances to get there. What it costs is power, and equivalence that
more rounds would have shown.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import special

from .paired import Floats, Ints

__all__ = ["UNSEEN", "Progress", "chance_by_rule", "chance_of_claim", "needed_flips", "progress"]

UNSEEN = 3.0
"""Differing cells added to those seen: with none in n cells, 3/n is the 95 % limit of their share
(the rule of three), so that a candidate that has not differed yet is not taken for inert."""


@dataclass(frozen=True, slots=True)
class Progress:
    """What C candidates show after some rounds, as (C,) whole numbers.

    Attributes:
        problems: Problems with a pair of grades.
        cells: Pairs of grades.
        differing: Pairs that differ.
        net: Wins less losses.
        sizes: Σ over problems of |wins − losses|.
        squares: Σ over problems of (wins − losses)².
    """

    problems: Ints
    cells: Ints
    differing: Ints
    net: Ints
    sizes: Ints
    squares: Ints


def progress(baseline: NDArray[np.int8], knockout: NDArray[np.int8], rounds: int) -> Progress:
    """Counts the first rounds.

    Args:
        baseline: (P, R) int8 grades, −1 missing.
        knockout: (C, P, R) int8 grades, −1 missing.
        rounds: How many of the R rounds count.
    """
    base, knock = baseline[None, :, :rounds], knockout[:, :, :rounds]
    seen = (base >= 0) & (knock >= 0)
    moves = np.where(seen, knock - base, np.int8(0))
    sums = moves.sum(axis=2, dtype=np.int64)
    return Progress(
        problems=np.count_nonzero(seen.any(axis=2), axis=1),
        cells=np.count_nonzero(seen, axis=(1, 2)),
        differing=np.count_nonzero(moves, axis=(1, 2)),
        net=sums.sum(axis=1),
        sizes=np.abs(sums).sum(axis=1),
        squares=(sums**2).sum(axis=1),
    )


def chance_of_claim(
    now: Progress, rounds: int, last: int, log_goal: float, bets: Floats, *, by_problem: bool
) -> Floats:
    """Predictive probability that a candidate's evidence reaches its goal after the last round.

    Args:
        now: Counts after the rounds that were run.
        rounds: How many those are, at least 1.
        last: Planned rounds.
        log_goal: Log e-value that a claim needs, on either side.
        bets: (G,) shares λ of the mixture of bets.
        by_problem: Whether the bet's units are problems (target `population`) and not cells.

    Returns:
        (C,) probabilities; 1 without any pair of grades, 0 if no outcome could reach the goal.

    Example:
        >>> counts = {"problems": 100, "cells": 400, "differing": 40, "sizes": 40, "squares": 40}
        >>> flat = Progress(net=np.array([0]), **{k: np.array([v]) for k, v in counts.items()})
        >>> bets = 2.0 ** np.arange(-4, 0)
        >>> chance_of_claim(flat, 4, 8, np.log(40), bets, by_problem=False).round(4).tolist()
        [0.0027]
    """
    growth = last / rounds
    cells = np.maximum(now.cells, 1)
    share = np.minimum((now.differing + UNSEEN) / cells, 1.0)
    spread = np.sqrt(share * cells * growth * (growth - 1))
    if by_problem:
        # Problems that moved by unequal amounts are worth as many equal ones as have the same
        # ratio of sum to scatter. Σ(wins − losses)² grows at least in proportion to the rounds.
        squares = np.maximum(now.squares, 1)
        units = now.sizes**2 / squares
        size = np.where(units > 0, np.sqrt(squares * growth / np.maximum(units, 1e-12)), 1.0)
        most = now.problems.astype(np.float64)
    else:
        units, size, most = now.differing * growth, np.ones(len(cells)), cells * growth
    flips = needed_flips(units, log_goal, bets)
    centre = now.net * growth
    with np.errstate(divide="ignore", invalid="ignore"):
        chance = special.ndtr((centre - size * flips) / spread)
        chance += special.ndtr((-centre - size * flips) / spread)
    return np.asarray(np.where(now.cells == 0, 1.0, np.where(flips > most, 0.0, chance)))


def chance_by_rule(
    now: Progress,
    rounds: int,
    last: int,
    bets: Floats,
    *,
    rule: str,
    alpha: float,
    family: int,
    claims: int,
    by_problem: bool,
) -> Floats:
    """Predictive probability that the effect of an open candidate will be claimed.

    Two-sided claims need 2 / alpha by the nominal rule, and by e-BH 2m / (alpha k) for k claims of
    m planned candidates. k counts those that were made and those to come that are more likely than
    not, found from the top: the lowest threshold that supports itself.

    Args:
        now: Counts of the open candidates.
        rounds, last, bets, by_problem: As in `chance_of_claim`.
        rule: "nominal" or "fdr".
        alpha: Error rate of the claims.
        family: Planned candidates.
        claims: Effects that were claimed before.
    """

    def chances(goal: float) -> Floats:
        return chance_of_claim(now, rounds, last, np.log(goal), bets, by_problem=by_problem)

    if rule == "nominal":
        return chances(2 / alpha)
    expected = claims + len(now.cells)
    while True:
        found = chances(2 * family / (alpha * expected))
        likely = claims + max(1, int(np.count_nonzero(found >= 0.5)))
        if likely >= expected:
            return found
        expected = likely


def needed_flips(differing: Floats, log_goal: float, bets: Floats) -> Floats:
    """Net flips with which the mixed capital reaches the goal, among this many differing units.

    Args:
        differing: (C,) differing units, not necessarily whole. If more net flips than these
            are needed, all flips go one way.
        log_goal: Log capital wanted.
        bets: (G,) shares λ; r flips one way and w the other pay mean over λ of (1+λ)^r (1−λ)^w.

    Example:
        >>> needed_flips(np.array([0.0]), np.log(1.5**7), np.array([0.5])).round(6).tolist()
        [7.0]
    """
    low = np.zeros(len(differing))
    high = differing + (log_goal + np.log(len(bets))) / np.log1p(bets.max())
    up, down = np.log1p(bets), np.log1p(-bets)
    for _ in range(40):
        net = (low + high) / 2
        against = np.maximum(differing - net, 0.0) / 2
        logs = (against + net)[:, None] * up + against[:, None] * down
        top = logs.max(axis=1)
        enough = top + np.log(np.exp(logs - top[:, None]).mean(axis=1)) >= log_goal
        low, high = np.where(enough, low, net), np.where(enough, net, high)
    return np.asarray(high)
