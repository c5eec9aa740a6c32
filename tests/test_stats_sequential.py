"""Racing: bets are fair under their hypotheses at every stopping time, and settle what they should."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from knockout.stats.multiplicity import ebh
from knockout.stats.paired import Tally, pair, tally_problems
from knockout.stats.sequential import (
    BETS,
    confidence_sequence,
    log_capital,
    log_sign_capital,
    settle,
)


def sweep(rng, n_candidates, p, rounds, forks, lost, won):
    """Grades whose differing cells are lost or won at the given rates, problem by problem."""
    u = rng.random((n_candidates, p, rounds))
    base = rng.random((p, rounds)) < 0.5
    forked = rng.random((n_candidates, p, rounds)) < forks
    flips = np.where(base, u < lost, u < won) & forked
    return base.astype(np.int8), (base ^ flips).astype(np.int8)


def test_capital_by_hand() -> None:
    tally = Tally(np.array([-1, 0, 1]), np.array([1, 1, 1]), np.array([[3, 5, 1]]))
    expected = np.mean((1 + BETS) ** 3 * (1 - BETS))
    assert np.exp(log_capital(tally, 0.0, "below"))[0] == pytest.approx(expected)
    # Against Δ ≥ .25 the largest bet is 1/.75, and zeros win.
    bets = BETS / 0.75
    expected = np.mean((1 + 1.25 * bets) ** 3 * (1 + 0.25 * bets) ** 5 * (1 - 0.75 * bets))
    assert np.exp(log_capital(tally, 0.25, "below"))[0] == pytest.approx(expected)
    mirrored = Tally(np.array([-1, 0, 1]), np.array([1, 1, 1]), np.array([[1, 5, 3]]))
    assert log_capital(mirrored, -0.25, "above")[0] == pytest.approx(np.log(expected))


def test_expected_capital_is_at_most_one_for_uneven_problems_with_mean_zero() -> None:
    """All outcomes of a tiny benchmark, enumerated: one problem gains what another loses."""
    rates = [(0.5, 0.0), (0.0, 0.3), (0.1, 0.3)]  # P(lost), P(won) per problem; Δ sums to 0
    expectation = 0.0
    for outcome in itertools.product((-1, 0, 1), repeat=3):
        chance = np.prod(
            [
                {-1: lost, 1: won, 0: 1 - lost - won}[d]
                for d, (lost, won) in zip(outcome, rates, strict=True)
            ]
        )
        counts = np.array([[outcome.count(d) for d in (-1, 0, 1)]])
        tally = Tally(np.array([-1, 0, 1]), np.array([1, 1, 1]), counts)
        expectation += chance * np.exp(log_capital(tally, 0.0, "below"))[0]
    assert expectation <= 1 + 1e-12
    assert expectation > 0.8


def test_bets_on_signs_are_exactly_fair_given_the_sizes() -> None:
    sizes = [1, 1, 2, 4, 4, 3, 0]  # quarters
    grid = np.arange(-4, 5)
    rows = [
        [sum(s * k == v for s, k in zip(signs, sizes, strict=True)) for v in grid]
        for signs in itertools.product((-1, 1), repeat=len(sizes))
    ]
    tally = Tally(grid, np.full(9, 4), np.array(rows))
    for side in ("below", "above"):
        assert np.exp(log_sign_capital(tally, side)).mean() == pytest.approx(1.0, abs=1e-12)
    assert log_sign_capital(Tally(grid, np.full(9, 4), np.array(rows) * 0), "below")[0] == 0
    one_way = Tally(np.array([-1]), np.array([8]), np.array([[30]]))
    assert log_sign_capital(one_way, "below")[0] > 15  # bounded bets: 30 · log(1 + 1/8) = 3.5
    assert log_capital(one_way, 0.0, "below")[0] < 3.6


@pytest.mark.parametrize("target", ["population", "benchmark"])
def test_errors_stay_below_alpha_with_a_peek_after_every_round(target: str) -> None:
    """Weak null: problems move, their mean does not. Any settled effect is an error."""
    rng = np.random.default_rng(8)
    p, rounds = 60, 8
    wrong = 0
    for _ in range(20):
        up = rng.random((100, p, 1)) < 0.5
        base, knockout = sweep(
            rng, 100, p, rounds, 0.6, np.where(up, 0.1, 0.4), np.where(up, 0.4, 0.1)
        )
        found = settle(base, knockout, rule="nominal", alpha=0.1, target=target, margin=0.01)
        wrong += sum(s in ("pillar", "stumbling_block") for s in found.status)
    if target == "population":
        assert wrong / 2000 <= 0.1 + 3 * np.sqrt(0.09 / 2000)
    else:  # 60 drawn problems do not average to 0 exactly, so most "errors" are true effects
        assert wrong < 2000


def test_benchmark_errors_with_a_mean_that_is_exactly_zero() -> None:
    rng = np.random.default_rng(9)
    up = np.repeat([True, False], 30)[None, :, None]
    base, knockout = sweep(rng, 2000, 60, 8, 0.6, np.where(up, 0.1, 0.4), np.where(up, 0.4, 0.1))
    found = settle(base, knockout, rule="nominal", alpha=0.1, target="benchmark", margin=0.01)
    wrong = sum(s in ("pillar", "stumbling_block") for s in found.status)
    assert wrong / 2000 <= 0.1 + 3 * np.sqrt(0.09 / 2000)


@pytest.mark.parametrize("target", ["population", "benchmark"])
def test_false_equivalence_at_the_margin(target: str) -> None:
    rng = np.random.default_rng(10)
    # Δ is exactly the margin: .5 · .4 · (.25 − .75) / …: half of the cells are right.
    base, knockout = sweep(rng, 1500, 200, 6, 0.4, 0.3, 0.1)
    truth = 0.4 * 0.5 * (0.1 - 0.3)
    found = settle(base, knockout, rule="nominal", alpha=0.1, target=target, margin=-truth)
    wrong = sum(s == "equivalent" for s in found.status)
    assert wrong / 1500 <= 0.1 + 3 * np.sqrt(0.09 / 1500)


@pytest.mark.parametrize("target", ["population", "benchmark"])
def test_settles_pillars_stumbling_blocks_and_equivalents(target: str) -> None:
    rng = np.random.default_rng(11)
    base, quiet = sweep(rng, 40, 400, 8, 0.02, 0.5, 0.5)
    _, knockout = np.zeros(0), quiet
    lost = (rng.random((2, 400, 8)) < 0.2) & (base == 1)
    won = (rng.random((2, 400, 8)) < 0.2) & (base == 0)
    knockout = knockout.copy()
    knockout[:2] = np.where(lost, 0, base)
    knockout[2:4] = np.where(won, 1, base)
    found = settle(base, knockout, target=target, margin=0.03, m=60)
    assert found.status[:4] == ("pillar", "pillar", "stumbling_block", "stumbling_block")
    assert found.status.count("equivalent") == 36
    assert (found.settled_round > 0).all()
    assert (found.rounds == found.settled_round).all()
    assert (found.p_values[:4] < 0.01).all()
    # What was looked at later changes nothing: a resumed run settles the same at the same round.
    noisy = knockout.copy()
    for c, r in enumerate(found.settled_round):
        noisy[c, :, r:] = rng.integers(-1, 2, noisy[c, :, r:].shape)
    again = settle(base, noisy, target=target, margin=0.03, m=60)
    assert again.status == found.status
    for name in ("settled_round", "log_pillar", "log_stumbling", "log_equivalent"):
        np.testing.assert_array_equal(getattr(again, name), getattr(found, name))


def test_stopping_early_and_going_on_equals_one_go() -> None:
    rng = np.random.default_rng(12)
    base, knockout = sweep(rng, 30, 150, 6, 0.2, 0.5, 0.3)
    for target in ("population", "benchmark"):
        whole = settle(base, knockout, target=target, max_rounds=6)
        for r in range(1, 7):
            part = settle(base[:, :r], knockout[:, :, :r], target=target, max_rounds=6)
            for c in range(30):
                if 0 < whole.settled_round[c] <= r:
                    assert part.status[c] == whole.status[c]
                    assert part.settled_round[c] == whole.settled_round[c]
                else:
                    assert part.status[c] == "open"


def test_order_of_problems_does_not_matter_and_planned_candidates_count() -> None:
    rng = np.random.default_rng(13)
    base, knockout = sweep(rng, 20, 300, 4, 0.15, 0.6, 0.3)
    one = settle(base, knockout)
    order = rng.permutation(300)
    two = settle(base[order], knockout[:, order])
    assert one.status == two.status
    assert one.log_pillar.tobytes() == two.log_pillar.tobytes()
    more = settle(base, knockout, m=2000)
    assert sum(s != "open" for s in more.status) <= sum(s != "open" for s in one.status)
    with pytest.raises(ValueError, match="5 candidates were planned but 20"):
        settle(base, knockout, m=5)
    with pytest.raises(ValueError, match="margin"):
        settle(base, knockout, margin=0.0)


def test_rows_that_are_no_hypotheses_stay_open() -> None:
    base = np.ones((200, 3), dtype=np.int8)
    knockout = np.zeros((2, 200, 3), dtype=np.int8)
    found = settle(base, knockout, counted=np.array([True, False]), m=1)
    assert found.status == ("pillar", "open")


def test_settled_effects_are_the_ebh_set_of_the_stopped_evidence() -> None:
    rng = np.random.default_rng(14)
    base, knockout = sweep(rng, 50, 200, 5, 0.3, np.linspace(0.3, 0.9, 50)[:, None, None], 0.3)
    found = settle(base, knockout, margin=0.005, target="benchmark")
    e = np.exp(np.concatenate([found.log_pillar, found.log_stumbling]))
    final = ebh(e, 0.05)[:50]
    settled = np.array([s == "pillar" for s in found.status])
    assert settled.any()
    np.testing.assert_array_equal(settled, final)


@pytest.mark.parametrize("target", ["population", "benchmark"])
def test_confidence_sequence_covers_at_the_worst_stopping_time(target: str) -> None:
    rng = np.random.default_rng(15)
    base, knockout = sweep(rng, 400, 80, 5, 0.5, 0.4, 0.2)
    truth = 0.5 * 0.5 * (0.2 - 0.4)
    missed = np.zeros(400, dtype=bool)
    for r in range(1, 6):
        low, high = confidence_sequence(
            base, knockout, np.full(400, r), alpha=0.1, target=target, max_rounds=5
        )
        delta = tally_problems(pair(base[:, :r], knockout[:, :, :r])).mean()
        assert ((low < delta) & (delta < high)).all()
        missed |= (truth < low) | (truth > high)
    assert missed.mean() <= 0.1 + 3 * np.sqrt(0.09 / 400)


def test_confidence_sequence_is_where_the_bets_are_lost() -> None:
    rng = np.random.default_rng(16)
    base, knockout = sweep(rng, 3, 100, 1, 0.5, 0.4, 0.2)
    low, high = confidence_sequence(base, knockout, np.ones(3, dtype=np.int64), max_rounds=1)
    tally = tally_problems(pair(base, knockout))
    np.testing.assert_allclose(log_capital(tally, high, "below"), np.log(40), atol=1e-3)
    np.testing.assert_allclose(log_capital(tally, low, "above"), np.log(40), atol=1e-3)
