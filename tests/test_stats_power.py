"""Smallest detectable effects against closed forms and against simulated sign-flip tests."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from knockout.stats.paired import Tally, pair
from knockout.stats.power import (
    Design,
    difficulty,
    expected_share,
    flips_needed,
    mde,
    mde_of_shares,
    plan_mde,
    power,
    reachable,
    seed_correlation,
)
from knockout.stats.signflip import signflip_approx, signflip_p, signflip_sizes_p


def test_flips_needed() -> None:
    assert flips_needed(0.05) == 6
    assert flips_needed(0.05 / 200) == 13
    assert flips_needed(0.0625) == 5  # exactly 2 · 2^−5


def test_one_seed_is_the_power_of_mcnemars_exact_test() -> None:
    """Against every outcome of 12 problems, and a design in which all differences are losses."""
    design = Design(12, 1, share=0.2, pass1=0.8)
    effect = 0.4
    up, _, down = design.differences(effect)
    assert down - up == pytest.approx(effect, abs=0.01)
    brute = sum(
        stats.multinomial.pmf([won, lost, 12 - won - lost], 12, [up, down, 1 - up - down])
        for won in range(13)
        for lost in range(won + 1, 13 - won)
        if stats.binomtest(lost, won + lost).pvalue <= 0.05
    )
    assert power(effect, design)[0] == pytest.approx(brute, abs=1e-9)
    assert stats.binom.sf(5, 30, mde(Design(30, 1, share=0.0))) == pytest.approx(0.8, abs=1e-4)


def test_impossible_losses_are_not_offered() -> None:
    assert np.isnan(plan_mde(12, [1, 16], m=200)).all()  # 13 flips do not fit
    assert np.isnan(mde(Design(5, 1)))
    assert np.isnan(plan_mde(30, [1, 3], pass1=0.05, m=200)).all()
    assert np.isnan(mde(Design(500, 3, pass1=0.0)))
    found = plan_mde(30, [1, 2, 4, 16], pass1=0.2, share=0.05)
    assert np.isnan(found[0])
    assert (found[2:] <= 0.2).all()


def test_more_seeds_and_more_problems_see_smaller_losses() -> None:
    table = plan_mde(30, range(1, 17), share=0.1)
    assert table[2] > 0.08
    assert table[-1] > 0.02
    assert (np.diff(table) < 0.004).all()
    assert (np.diff([plan_mde(n, [3], share=0.1)[0] for n in (30, 60, 120, 500)]) < 0).all()
    assert plan_mde(30, [4], m=200)[0] > plan_mde(30, [4])[0]
    assert plan_mde(100, [8], correlation=0.5)[0] > plan_mde(100, [8], correlation=0.0)[0]


def _sweep(
    rng: np.random.Generator, runs: int, n: int, seeds: int, rate: float, loss: float, lean: bool
) -> Tally:
    """Sweeps by another way than the formula's: each outcome is decided at a random step.

    A knockout leaves its baseline at an exponential time; left before the outcome was decided, it
    is drawn again, and `lean` lets half of the problems gain and half of them lose by that. The
    effect then spoils right answers.
    """
    b = rng.beta(0.3, 0.3, (runs, n, 1))
    baseline = rng.random((runs, n, seeds)) < b
    again = rng.exponential(1 / rate, (runs, n, seeds)) < rng.random((runs, n, seeds))
    side = np.where(rng.random((runs, n, 1)) < 0.5, 1, -1) * lean
    chance = b + side * np.minimum(b, 1 - b)
    grades = np.where(again, rng.random((runs, n, seeds)) < chance, baseline)
    grades &= rng.random((runs, n, seeds)) >= loss / 0.5
    net = grades.sum(axis=2) - baseline.sum(axis=2)
    grid = np.arange(-seeds, seeds + 1)
    counts = np.stack([(net == k).sum(axis=1) for k in grid], axis=1)
    return Tally(grid, np.full(len(grid), seeds), counts)


@pytest.mark.parametrize("m", [1, 200])
@pytest.mark.parametrize(
    ("n", "seeds"), [(30, 4), (30, 16), (100, 3), (500, 1), (500, 3), (541, 1)]
)
def test_power_at_the_smallest_effect_is_what_was_promised(n: int, seeds: int, m: int) -> None:
    """By an independent generator, with noise, uneven problems, and seeds that agree."""
    for rate, lean in ((0.1, False), (1.0, False), (1.0, True)):
        rng = np.random.default_rng([n, seeds, m, int(10 * rate), lean])
        idle = _sweep(rng, 60_000 // (n * seeds) + 40, n, seeds, rate, 0.0, lean)
        # Cells that differ, from the difference's own moments: one seed shows them directly.
        ones = _sweep(rng, 60_000 // n, n, 1, rate, 0.0, lean)
        share = float(ones.moments()[1].sum() / ones.n.sum())
        square = float(idle.moments()[2].sum() / idle.n.sum()) * seeds
        agree = max((square / share - 1) / max(seeds - 1, 1), 0.0)
        loss = float(plan_mde(n, [seeds], share=share, correlation=agree, m=m)[0])
        runs = 1200 if n * seeds < 1000 else 500
        p = signflip_p(_sweep(rng, runs, n, seeds, rate, loss, lean))
        seen = np.mean(p <= 0.05 / m)
        slack = 2 * (0.16 / runs) ** 0.5
        assert 0.75 - slack < seen < 0.87 + slack, (rate, lean, loss)


def test_approximate_p_values_against_exact_ones() -> None:
    rng = np.random.default_rng(0)
    for m, most in ((8, 0.5), (15, 0.3), (30, 0.1)):
        sizes = rng.integers(1, 5, (200, m))
        totals = (sizes * np.where(rng.random((200, m)) < 0.8, 1, -1)).sum(axis=1)
        counts = np.stack([(sizes == k).sum(axis=1) for k in range(1, 5)], axis=1)
        exact = [
            signflip_sizes_p(np.arange(1, 5), c, abs(int(t)))
            for c, t in zip(counts, totals, strict=True)
        ]
        found = signflip_approx(np.arange(1, 5), counts, totals)
        assert np.abs(np.log2(found / np.array(exact))).max() < most
    one_way = signflip_approx(np.arange(1, 3), np.array([[4, 3], [0, 0]]), np.array([10, 0]))
    assert one_way.tolist() == [2.0**-6, 1.0]


def test_many_shares_are_a_line_between_a_few() -> None:
    design = Design(100, 3)
    shares = np.array([0.0, 0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, np.nan])
    found = mde_of_shares(shares, design)
    exact = [plan_mde(100, [3], share=float(s))[0] for s in shares[:-1]]
    np.testing.assert_allclose(found[:-1], exact, rtol=0.06)
    assert np.isnan(found[-1])


def test_candidates_that_can_reach_the_level() -> None:
    # 150 that hardly ever differ, 50 that differ everywhere: .05 / 50 needs 11 of 30 problems.
    assert reachable([0.01] * 150 + [1.0] * 50, 30) == 50
    assert reachable([0.0] * 10, 30) == 1
    assert reachable([1.0] * 10, 5) == 1


def test_difficulty_is_found_again() -> None:
    rng = np.random.default_rng(2)
    for p, spread in ((0.5, 0.6), (0.2, 2.0)):
        b = rng.beta(p * spread, (1 - p) * spread, 20_000)
        assert difficulty(rng.binomial(4, b), 4) == pytest.approx((p, spread), rel=0.1)
    assert difficulty(np.array([1, 0]), 1) == (0.5, 0.6)
    assert difficulty(np.array([4, 4]), 4)[0] == 1.0


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


def test_expected_share_is_unbiased_for_two_draws_that_differ() -> None:
    rng = np.random.default_rng(5)
    b = rng.beta(0.6, 0.6, 20000)
    truth = np.mean(2 * b * (1 - b))
    assert expected_share(rng.binomial(3, b), 3, 1.0) == pytest.approx(truth, abs=0.01)
    assert expected_share(rng.binomial(1, b), 1, 0.5) > 0.5 * truth
    assert expected_share([0, 3, 3], 3, [0.2, 0.9]).tolist() == [0.0, 0.0]


@given(
    share=st.floats(0.0, 0.6),
    pass1=st.floats(0.02, 0.98),
    seeds=st.integers(1, 4),
    correlation=st.floats(0.0, 1.0),
    spread=st.floats(0.05, 50.0),
)
def test_noise_has_no_effect(
    share: float, pass1: float, seeds: int, correlation: float, spread: float
) -> None:
    """However large: a design that gains or loses by itself would promise a wrong power."""
    found = Design(100, seeds, share, correlation, pass1, spread).differences(0.0)
    assert found @ np.arange(-seeds, seeds + 1) == pytest.approx(0, abs=1e-9)
    assert found.sum() == pytest.approx(1)
    assert (found >= 0).all()


def test_a_token_that_forks_everywhere_on_problems_of_one_difficulty() -> None:
    """Both arms are coins: half of the cells differ, as a plan without data assumes."""
    rng = np.random.default_rng(5)
    n, seeds, runs = 400, 3, 1500
    loss = float(plan_mde(n, [seeds], share=0.5)[0])
    base = rng.random((runs, n, seeds)) < 0.5
    knockout = rng.random((runs, n, seeds)) < 0.5 - loss
    lost = (base & ~knockout).sum(axis=2) - (knockout & ~base).sum(axis=2)
    # Of large sweeps the t-test is as good as the sign-flip test, and shares nothing with it.
    power = float(np.mean(stats.ttest_1samp(lost, 0, axis=1).pvalue <= 0.05))
    assert 0.76 < power < 0.84
    assert loss < 2.9 * (0.5 / (n * seeds)) ** 0.5
