"""The cost model against counting by hand, numerical integration and simulation."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.integrate import trapezoid

from knockout.sweep.cost import (
    cost_from_frequency,
    cost_from_trajectories,
    rates_of,
    with_pairs,
)

RNG = np.random.default_rng(0)
TRAJECTORIES = [RNG.integers(0, 12, n) for n in (0, 1, 7, 30, 55, 80)]
BANS = [(3,), (0, 5), (11, 2, 7), (40,)]


def test_without_truncation_a_fork_starts_at_the_first_banned_token() -> None:
    forks, tokens = np.zeros(4), np.zeros(4)
    for trajectory in TRAJECTORIES:
        for c, ban in enumerate(BANS):
            for step, token in enumerate(trajectory.tolist()):
                if token in ban:
                    forks[c] += 1
                    tokens[c] += len(trajectory) - step
                    break
    for truncates, moves in ((False, 0.5), (True, 0.0)):
        cost = cost_from_trajectories(TRAJECTORIES, BANS, truncates=truncates, support_moves=moves)
        np.testing.assert_allclose(cost.forks, forks / 6)
        np.testing.assert_allclose(cost.tokens, tokens / 6)
        assert cost.length == pytest.approx((1 + 7 + 30 + 55 + 80) / 6)
    assert cost.forks[3] == cost.tokens[3] == 0


def test_moved_supports_come_at_a_constant_rate_before_the_first_pick() -> None:
    moves = 0.3
    cost = cost_from_trajectories(TRAJECTORIES, BANS, truncates=True, support_moves=moves)
    rates = rates_of(TRAJECTORIES, BANS)
    for c, ban in enumerate(BANS):
        forks = tokens = 0.0
        for trajectory in TRAJECTORIES:
            n = len(trajectory)
            where = np.flatnonzero(np.isin(trajectory, ban))
            first = float(where[0]) if len(where) else float(n)
            hazard = rates[c] * moves / max(n, 1)
            # The start's survival function, integrated numerically.
            t = np.linspace(0, first, 20001)
            start = trapezoid(np.exp(-hazard * t), t) if first else 0.0
            forks += 1.0 if len(where) else 1 - np.exp(-hazard * n)
            tokens += n - start
        assert cost.forks[c] == pytest.approx(forks / 6, abs=1e-9)
        assert cost.tokens[c] == pytest.approx(tokens / 6, abs=1e-6)


def test_rates_count_occurrences() -> None:
    rates = rates_of([np.array([1, 1, 2]), np.array([5])], [(1,), (2, 5), (9,)])
    assert rates.tolist() == [1.0, 1.0, 0.0]
    assert rates_of([], [(1,)]).tolist() == [0.0]


def test_frequencies_against_simulated_occurrences() -> None:
    rng = np.random.default_rng(1)
    length, n = 200.0, 40_000
    rates = np.array([0.0, 0.05, 1.0, 6.0])
    cost = cost_from_frequency(rates, length)
    for c, rate in enumerate(rates.tolist()):
        counts = rng.poisson(rate, n)
        # The smallest of k uniform places is 1 − U^(1/k).
        first = np.where(counts > 0, 1 - rng.random(n) ** (1 / np.maximum(counts, 1)), 1.0)
        left = (1 - first) * length
        error = 4 * left.std() / np.sqrt(n) + 1e-9
        assert abs(cost.tokens[c] - left.mean()) <= error
        assert abs(cost.forks[c] - (counts > 0).mean()) <= 4 * 0.5 / np.sqrt(n)
    assert (np.diff(cost.tokens) > 0).all()


def test_pairs_against_simulated_forks_of_forks() -> None:
    """A language of independent words: each fork draws its rest anew, without what it bans."""
    rng = np.random.default_rng(2)
    share = np.array([0.005, 0.0125, 0.0025, 0.001, 0.979])
    bans, pairs = [(0,), (1,), (2, 3)], {3: (0, 1), 4: (0, 2), 5: (1, 2)}
    n, length = 2000, 200
    baselines = [rng.choice(5, length, p=share) for _ in range(n)]
    generated = dict.fromkeys(pairs, 0.0)
    for baseline in baselines:
        first = [next(iter(np.flatnonzero(np.isin(baseline, ban))), length) for ban in bans]
        for pair, (one, other) in pairs.items():
            banned, later = (one, other) if first[one] < first[other] else (other, one)
            start = first[banned]
            left = np.where(np.isin(np.arange(5), bans[banned]), 0, share)
            rest = rng.choice(5, length - start, p=left / left.sum())
            at = np.flatnonzero(np.isin(rest, bans[later]))
            generated[pair] += (len(rest) - at[0]) / n if len(at) else 0.0
    unions = [tuple(bans[a] + bans[b]) for a, b in pairs.values()]
    alone = cost_from_trajectories(baselines, [*bans, *unions], truncates=False)
    found = with_pairs(alone, pairs)
    assert found.tokens[:3].tolist() == alone.tokens[:3].tolist()
    assert found.forks.tolist() == alone.forks.tolist()
    rates = rates_of(baselines, [*bans, *unions])
    frequencies = with_pairs(cost_from_frequency(rates, length), pairs)
    for pair, tokens in generated.items():
        assert found.tokens[pair] == pytest.approx(tokens, rel=0.1)
        assert frequencies.tokens[pair] == pytest.approx(tokens, rel=0.1)
        assert alone.tokens[pair] > 1.5 * tokens
