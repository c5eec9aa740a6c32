"""Calls by luck: joint sign flips against all of them, and the test that needs no symmetry."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from knockout.stats.luck import expected_calls
from knockout.stats.paired import pair, tally_problems
from knockout.stats.sequential import bounded_p
from knockout.stats.signflip import signflip_p


def test_against_every_flip_of_twelve_problems() -> None:
    rng = np.random.default_rng(1)
    moves = rng.integers(-2, 3, (5, 12)) / 2
    moves[3] = moves[2]  # two candidates that always go together
    signs = np.array(list(itertools.product((-1, 1), repeat=12)))
    sums = signs @ moves.T
    # A call is what the exact sign-flip test calls.
    size = np.abs(sums)
    p = np.stack([(size[None, :, c] >= size[:, None, c] - 1e-9).mean(axis=1) for c in range(5)], 1)
    calls = (p <= 0.1).sum(axis=1)
    found = expected_calls(moves, 0.1, draws=8000)
    assert found.mean == pytest.approx(calls.mean(), abs=0.05)
    assert found.pillars_mean == pytest.approx(((p <= 0.1) & (sums < 0)).sum(1).mean(), abs=0.05)
    assert found.quantile == np.quantile(calls, 0.95, method="higher")
    assert found.chance(2) == pytest.approx((calls >= 2).mean(), abs=0.02)


def test_order_and_overall_sign_change_nothing_and_nothing_is_no_call() -> None:
    rng = np.random.default_rng(2)
    moves = rng.integers(-1, 2, (6, 40)).astype(float)
    one = expected_calls(moves, draws=300)
    other = expected_calls(moves[:, rng.permutation(40)], draws=300)
    assert (one.counts == other.counts).all()
    nothing = expected_calls(np.zeros((4, 30)), draws=50)
    assert (nothing.mean, nothing.quantile, nothing.chance(0)) == (0.0, 0, 1.0)


def test_shared_baselines_make_flocks() -> None:
    """Idle candidates that fork everywhere: the 95 % quantile of calls is far above 5 %."""
    rng = np.random.default_rng(3)
    b = rng.beta(0.3, 0.3, (541, 1))
    base = (rng.random((541, 1)) < b).astype(np.int8)
    knock = (rng.random((100, 541, 1)) < b).astype(np.int8)
    pairs = pair(base, knock)
    found = expected_calls((pairs.won - pairs.lost).astype(float))
    assert 2 < found.mean < 8
    assert found.quantile > 15


def test_bounded_p_holds_where_a_mean_of_zero_has_no_symmetry() -> None:
    rng = np.random.default_rng(4)
    helped = rng.random((1500, 30, 1)) < 0.05
    u = rng.random((1500, 30, 16))
    knock = np.where(helped, u < 0.9, u >= 0.9 / 19).astype(np.int8)
    base = np.where(helped, 0, 1).astype(np.int8)
    won = (knock > base).sum(axis=2)
    lost = (knock < base).sum(axis=2)
    assert (won - lost).mean() == pytest.approx(0, abs=0.1)
    pairs = pair(np.zeros((30, 16), np.int8), np.zeros((1500, 30, 16), np.int8))
    tally = tally_problems(type(pairs)(pairs.n, won, lost, pairs.base, 16))
    assert np.mean(signflip_p(tally) <= 0.05) > 0.15
    assert np.mean(bounded_p(tally) <= 0.05) <= 0.05
    # It does see a plain loss.
    sure = pair(np.ones((30, 1), np.int8), np.zeros((1, 30, 1), np.int8))
    assert bounded_p(tally_problems(sure))[0] < 1e-4
    assert (
        bounded_p(tally_problems(pair(np.ones((30, 1), np.int8), np.ones((1, 30, 1), np.int8))))[0]
        == 1
    )
