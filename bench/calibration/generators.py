"""Sweeps whose truth is known.

- `decided`: the outcome of a trajectory is decided at a random step. A knockout leaves its baseline at
  an exponential time; if it leaves before that step its outcome is drawn again, so it may differ
  although the ban does nothing. The effect then spoils right answers. Difficulty is beta(.3, .3);
  `lean` lets problems gain or lose by being drawn again, so that their seeds agree.
- `shared`: the same for many candidates that share their baselines.
- `forked`, `graded`, `skewed`: one candidate; uneven shares of cells fork or differ.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from knockout.stats.paired import Pairs

Draw = Callable[[np.random.Generator, int, int, int, float, float], tuple[Pairs, float]]


def decided(
    rng: np.random.Generator,
    runs: int,
    n: int,
    seeds: int,
    rate: float,
    loss: float = 0.0,
    lean: float = 0.0,
    spread: float = 0.6,
) -> Pairs:
    """Independent sweeps of one candidate that forks at this rate per trajectory."""
    b = rng.beta(spread / 2, spread / 2, (runs, n, 1))
    before = rng.random((runs, n, seeds)) < b
    again = rng.exponential(1, (runs, n, seeds)) < rate * rng.random((runs, n, seeds))
    side = lean * np.where(rng.random((runs, n, 1)) < 0.5, 1, -1)
    after = np.where(again, rng.random((runs, n, seeds)) < b + side * np.minimum(b, 1 - b), before)
    after &= rng.random((runs, n, seeds)) >= loss / 0.5
    return paired(before, after)


def shared(
    rng: np.random.Generator, n: int, seeds: int, rates: np.ndarray, losses: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """One benchmark: baseline (P, S), knockouts and forks (C, P, S)."""
    b = rng.beta(0.3, 0.3, (n, 1))
    base = rng.random((n, seeds)) < b
    step = rng.random((n, seeds))
    shape = (len(rates), n, seeds)
    again = rng.exponential(1, shape) < rates[:, None, None] * step
    after = np.where(again, rng.random(shape) < b, base)
    after &= rng.random(shape) >= (losses / 0.5)[:, None, None]
    return base.astype(np.int8), after.astype(np.int8), again | (after != base)


def rates_like_published(rng: np.random.Generator, c: int, median: float = 0.6) -> np.ndarray:
    """Uneven occurrences per trajectory."""
    return np.minimum(rng.lognormal(np.log(median), 1.3, c), 8.0)


def paired(before: np.ndarray, after: np.ndarray) -> Pairs:
    """Counts over the last axis."""
    won = (after & ~before).sum(axis=-1)
    lost = (before & ~after).sum(axis=-1)
    total = np.full(won.shape, before.shape[-1])
    return Pairs(total, won, lost, before.sum(axis=-1), before.shape[-1])


def spread(rng: np.random.Generator, mean: float, shape: tuple[int, ...]) -> np.ndarray:
    """Shares that differ from problem to problem around a mean."""
    return np.ones(shape) if mean >= 1 else rng.beta(2 * mean, 2 * (1 - mean), shape)


def forked(
    rng: np.random.Generator, runs: int, n: int, seeds: int, share: float, effect: float
) -> tuple[Pairs, float]:
    """A fork is a fresh draw; the knockout solves (1 − effect) as often. And Δ."""
    b = rng.beta(0.6, 0.6, (runs, n, 1))
    fork = rng.random((runs, n, seeds)) < spread(rng, share, (runs, n, 1))
    before = rng.random((runs, n, seeds)) < b
    fresh = rng.random((runs, n, seeds)) < b * (1 - effect)
    return paired(before, np.where(fork, fresh, before)), -share * 0.5 * effect


def graded(
    rng: np.random.Generator, runs: int, n: int, seeds: int, share: float, effect: float
) -> tuple[Pairs, float]:
    """Grades differ in `share` of the cells, (1 + effect)/2 of them losses, problem by problem."""
    lose = (1 + effect) / 2
    losing = rng.beta(4 * lose, 4 * (1 - lose), (runs, n, 1))
    return _flips(rng, losing, (runs, n, seeds), share), -share * effect


def skewed(
    rng: np.random.Generator, runs: int, n: int, seeds: int, share: float, effect: float
) -> tuple[Pairs, float]:
    """Δ = 0 without symmetry: one problem in ten loses nine times what each other one gains."""
    losing = np.where(rng.random((runs, n, 1)) < 0.1, 0.95, 0.45)
    return _flips(rng, losing, (runs, n, seeds), share), 0.0


def strongly_skewed(rng: np.random.Generator, runs: int, n: int, seeds: int) -> Pairs:
    """Δ = 0: one problem in twenty gains .9, the others lose .9 / 19."""
    helped = rng.random((runs, n, 1)) < 0.05
    u = rng.random((runs, n, seeds))
    won, lost = helped & (u < 0.9), ~helped & (u < 0.9 / 19)
    total = np.full((runs, n), seeds)
    return Pairs(total, won.sum(axis=2), lost.sum(axis=2), total, seeds)


def rare_losses(
    rng: np.random.Generator, runs: int, n: int, seeds: int, loss: float, strength: float
) -> Pairs:
    """Δ = −loss, all of it on the few problems that lose `strength` each."""
    hit = rng.random((runs, n, 1)) < loss / strength
    lost = (rng.random((runs, n, seeds)) < np.where(hit, strength, 0.0)).sum(axis=2)
    total = np.full((runs, n), seeds)
    return Pairs(total, np.zeros_like(lost), lost, total, seeds)


def _flips(
    rng: np.random.Generator, losing: np.ndarray, shape: tuple[int, ...], share: float
) -> Pairs:
    differs, loses = rng.random(shape) < share, rng.random(shape) < losing
    total = np.full(shape[:2], shape[2])
    return Pairs(
        total, (differs & ~loses).sum(axis=2), (differs & loses).sum(axis=2), total, shape[2]
    )


MODELS: dict[str, Draw] = {"fork": forked, "grade": graded, "skewed": skewed}
