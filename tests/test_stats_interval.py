"""The interval of Δ: agrees with the test, is never empty, and covers what it says."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from knockout.stats.interval import equivalence_interval, mean_interval, resolution
from knockout.stats.paired import Tally, wilson_interval
from knockout.stats.signflip import signflip_p


def flips(won: int, lost: int, n: int) -> Tally:
    counts = np.array([[lost, n - won - lost, won]], dtype=np.int64)
    return Tally(np.array([-1, 0, 1]), np.array([1, 1, 1]), counts)


def sums_tally(sums: np.ndarray, seeds: int) -> Tally:
    grid = np.arange(-seeds, seeds + 1)
    counts = np.stack([(sums == k).sum(axis=1) for k in grid], axis=1)
    return Tally(grid, np.full(len(grid), seeds), counts)


def test_nothing_differs_gives_wilsons_bound_over_problems() -> None:
    tally = flips(0, 0, 30)
    low, high = mean_interval(tally, signflip_p(tally))
    assert (low[0], high[0]) == pytest.approx((-0.1135, 0.1135), abs=5e-5)
    # However many seeds: problems are the units.
    many = Tally(np.array([0]), np.array([16]), np.array([[30]]))
    assert mean_interval(many, signflip_p(many))[1][0] == pytest.approx(high[0])


def test_equivalence_of_an_inherited_candidate_needs_160_problems_for_two_points() -> None:
    for n, inside in ((159, False), (160, True)):
        tally = flips(0, 0, n)
        assert bool(equivalence_interval(tally)[1][0] < 0.02) is inside
        assert resolution(n) == pytest.approx(equivalence_interval(tally)[1][0])
        # Not far from the rule of three, which is exact here: 1 − .05^(1/n).
        assert 1 <= resolution(n) / (1 - 0.05 ** (1 / n)) < 1.1


def test_equivalence_limits_are_close_to_the_exact_ones_for_rare_strong_losses() -> None:
    """Against Clopper-Pearson, one-sided: never closer to 0, and at most a tenth farther."""
    for n in (30, 100, 500, 1131):
        for lost in range(n // 5):
            tally = flips(0, lost, n)
            low = float(equivalence_interval(tally)[0][0])
            exact = -float(stats.beta.ppf(0.95, lost + 1, n - lost))
            assert exact * 1.1 - 0.002 < low <= exact + 0.0015


@pytest.mark.parametrize("size", [1, 2, 8, 16])
def test_more_differences_never_make_an_interval_tighter(size: int) -> None:
    """Gains and losses of the same size in turn, as many problems as there are."""
    sums = np.zeros((16, 30), dtype=np.int64)
    for row in range(16):
        sums[row, : 2 * row] = np.resize([size, -size], 2 * row)
    tally = sums_tally(sums, 16)
    for low, high in (
        mean_interval(tally, signflip_p(tally)),
        equivalence_interval(tally),
    ):
        assert (np.diff(high - low) >= -1e-12).all()


def test_false_equivalence_at_the_margin_under_rare_strong_effects() -> None:
    rng = np.random.default_rng(4)
    for n, seeds, margin in ((30, 4, 0.1), (100, 3, 0.1), (500, 3, 0.02), (541, 1, 0.02)):
        for strength in (1.0, 0.5):
            hit = rng.random((3000, n, 1)) < margin / strength
            lost = (rng.random((3000, n, seeds)) < np.where(hit, strength, 0.0)).sum(axis=2)
            low, high = equivalence_interval(sums_tally(-lost, seeds))
            assert np.mean((low > -margin) & (high < margin)) < 0.05 + 2 * 0.004


def test_all_flip_one_way() -> None:
    tally = flips(0, 30, 30)
    low, high = mean_interval(tally, signflip_p(tally))
    assert low[0] == -1.0
    # Wider than Wilson's .8865 alone: the direction is unsure too.
    assert -0.8865 <= high[0] < -0.75


def test_one_problem_has_no_interval() -> None:
    tally = flips(1, 0, 1)
    assert np.isnan(mean_interval(tally, signflip_p(tally))).all()


def test_excludes_zero_exactly_when_p_is_below_alpha() -> None:
    rng = np.random.default_rng(3)
    for n, seeds in ((8, 1), (30, 3), (100, 8), (60, 16)):
        rate = rng.beta(0.4, 1.5, (400, 1, 1))
        lost = rng.beta(2, 2, (400, 1, 1))
        cells = (rng.random((400, n, seeds)) < rate) * np.where(
            rng.random((400, n, seeds)) < lost, -1, 1
        )
        tally = sums_tally(cells.sum(axis=2), seeds)
        p = signflip_p(tally)
        for alpha in (0.01, 0.05, 0.2):
            low, high = mean_interval(tally, p, alpha)
            np.testing.assert_array_equal((low > 0) | (high < 0), p < alpha)
            delta = tally.mean()
            assert ((low <= delta + 1e-12) & (delta - 1e-12 <= high)).all()
            assert (high > low).all()
            assert (low >= -1).all()
            assert (high <= 1).all()


def test_mirrors_when_signs_swap() -> None:
    one, two = flips(3, 11, 50), flips(11, 3, 50)
    low, high = mean_interval(one, signflip_p(one))
    low2, high2 = mean_interval(two, signflip_p(two))
    assert (low[0], high[0]) == (-high2[0], -low2[0])


def test_approaches_the_normal_interval_where_data_are_many() -> None:
    rng = np.random.default_rng(5)
    sums = rng.binomial(8, 0.3, (1, 5000)) - rng.binomial(8, 0.25, (1, 5000))
    tally = sums_tally(sums, 8)
    low, high = mean_interval(tally, signflip_p(tally))
    d = sums[0] / 8
    half = stats.norm.isf(0.025) * d.std(ddof=1) / np.sqrt(len(d))
    assert (low[0], high[0]) == pytest.approx((d.mean() - half, d.mean() + half), abs=0.04 * half)


def test_narrower_at_a_larger_alpha() -> None:
    tally = flips(4, 9, 60)
    p = signflip_p(tally)
    widths = [np.ptp(mean_interval(tally, p, a)) for a in (0.01, 0.05, 0.1, 0.3)]
    assert widths == sorted(widths, reverse=True)


@pytest.mark.parametrize(
    ("n", "seeds", "differing", "effect"),
    [(30, 1, 0.3, 0.8), (30, 8, 1.0, 0.2), (100, 3, 0.3, 0.2), (500, 1, 0.05, 0.8)],
)
def test_covers(n: int, seeds: int, differing: float, effect: float) -> None:
    """95 % intervals with uneven problems; the full study is `python -m bench calibration`."""
    rng = np.random.default_rng(11)
    runs = 1500
    share = (1 + effect) / 2
    lost = rng.beta(4 * share, 4 * (1 - share), (runs, n, 1))
    cells = (rng.random((runs, n, seeds)) < differing) * np.where(
        rng.random((runs, n, seeds)) < lost, -1, 1
    )
    tally = sums_tally(cells.sum(axis=2), seeds)
    low, high = mean_interval(tally, signflip_p(tally))
    truth = -differing * effect
    coverage = np.mean((low <= truth) & (truth <= high))
    assert 0.95 - 2 * 0.0056 < coverage < 0.985


def test_the_bootstrap_would_not_do() -> None:
    """Why this interval: with 1.5 expected flips in 30, resampling covers about 78 %."""
    rng = np.random.default_rng(2)
    lost = rng.binomial(30, 0.05, 2000)
    upper = stats.binom.ppf(0.975, 30, lost / 30) / 30  # percentile bootstrap in closed form
    assert np.mean(upper >= 0.05) < 0.85
    assert np.mean(wilson_interval(lost / 30, 30)[1] >= 0.05) > 0.93


def test_a_few_differences_are_no_stronger_evidence_than_none() -> None:
    """One problem won and one lost by half must not make the interval narrower than no change."""
    for n, seeds in ((64, 2), (500, 8), (30, 1)):
        sums = np.zeros((3, n), dtype=np.int64)
        sums[1, :2] = 1, -1
        sums[2, :4] = 1, -1, 1, -1
        tally = sums_tally(sums, seeds)
        low, high = mean_interval(tally, signflip_p(tally))
        width = high - low
        assert (width[1:] >= width[0]).all()
