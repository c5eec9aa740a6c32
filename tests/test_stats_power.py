"""Smallest detectable effects against closed forms and against simulated sign-flip tests."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from knockout.stats.paired import Tally, pair
from knockout.stats.power import (
    design_trials,
    expected_share,
    flips_needed,
    mde,
    mde_of_tally,
    plan_mde,
    power,
    seed_correlation,
)
from knockout.stats.signflip import signflip_p


def test_flips_needed() -> None:
    assert flips_needed(0.05) == 6
    assert flips_needed(0.05 / 200) == 13
    assert flips_needed(0.0625) == 5  # exactly 2 · 2^−5


def test_thirty_problems_and_three_seeds_cannot_show_two_points() -> None:
    table = plan_mde(30, range(1, 17), share=0.1)
    assert table[2] > 0.08
    assert table[-1] > 0.02
    assert (np.diff(table) < 0).all()


def test_corrected_over_200_thirty_problems_need_thirteen_flips() -> None:
    one_way = plan_mde(30, [1], share=0.0, m=200)[0]
    assert stats.binom.sf(12, 30, one_way) > 0.8
    assert one_way > 13 / 30
    # At .05 six flips suffice, and counting them is the sharper of the two limits.
    assert stats.binom.sf(5, 30, plan_mde(30, [1], share=0.0)[0]) == pytest.approx(0.8, abs=1e-6)
    assert np.isnan(plan_mde(12, [1, 16], m=200)).all()
    assert np.isnan(mde(5, 0.0))


def test_mde_has_the_power_it_promises_and_power_inverts_it() -> None:
    trials, share = np.array([100.0, 1500.0, 4000.0]), np.array([0.05, 0.3, 0.02])
    found = mde(trials, share)
    np.testing.assert_allclose(power(found, trials, share), 0.8, atol=1e-6)


@pytest.mark.parametrize(
    ("n", "seeds", "share", "alpha"),
    [(30, 1, 0.1, 0.05), (30, 3, 0.1, 0.05), (100, 3, 0.3, 0.05), (500, 3, 0.1, 0.0005)],
)
def test_formula_against_simulation(n: int, seeds: int, share: float, alpha: float) -> None:
    """Within 8 points of power."""
    rng = np.random.default_rng(1)
    effect = float(plan_mde(n, [seeds], share=share, alpha=alpha)[0])
    differs = max(share, effect)
    u = rng.random((1500, n, seeds))
    lost, won = u < (differs + effect) / 2, (u >= (differs + effect) / 2) & (u < differs)
    sums = won.sum(axis=2) - lost.sum(axis=2)
    grid = np.arange(-seeds, seeds + 1)
    counts = np.stack([(sums == k).sum(axis=1) for k in grid], axis=1)
    tally = Tally(grid, np.full(len(grid), seeds), counts)
    assert np.mean(signflip_p(tally) <= alpha) == pytest.approx(0.8, abs=0.08)
    after = np.median(mde_of_tally(tally, alpha))
    assert 0.9 * effect < after < 1.6 * effect


def test_after_data_without_a_difference_problems_are_the_trials() -> None:
    nothing = Tally(np.array([0]), np.array([16]), np.array([[30], [5]]))
    found = mde_of_tally(nothing)
    assert found[0] == pytest.approx(plan_mde(30, [1], share=0.0)[0])
    assert np.isnan(found[1])


def test_seed_correlation_finds_what_was_put_in() -> None:
    rng = np.random.default_rng(3)
    rate = rng.beta(1, 1, (1, 4000, 1))
    baseline = np.ones((4000, 4), dtype=np.int8)
    knockout = (rng.random((1, 4000, 4)) >= rate).astype(np.int8)
    # Cells lose with a problem's own rate: E[rate²] / E[rate] = (1/3) / (1/2).
    assert seed_correlation(pair(baseline, knockout))[0] == pytest.approx(2 / 3, abs=0.02)
    noise = (rng.random((1, 4000, 4)) < 0.5).astype(np.int8)
    baseline = (rng.random((4000, 4)) < 0.5).astype(np.int8)
    assert seed_correlation(pair(baseline, noise))[0] == pytest.approx(0, abs=0.03)
    assert seed_correlation(pair(baseline, baseline[None].copy()))[0] == 0
    assert design_trials(100, 8, 1.0) == 100
    assert design_trials(100, 8, 0.0) == 800


def test_expected_share_is_unbiased_for_two_draws_that_differ() -> None:
    rng = np.random.default_rng(5)
    b = rng.beta(0.6, 0.6, 20000)
    truth = np.mean(2 * b * (1 - b))
    assert expected_share(rng.binomial(3, b), 3, 1.0) == pytest.approx(truth, abs=0.01)
    assert expected_share(rng.binomial(1, b), 1, 0.5) > 0.5 * truth
    assert expected_share([0, 3, 3], 3, [0.2, 0.9]).tolist() == [0.0, 0.0]
