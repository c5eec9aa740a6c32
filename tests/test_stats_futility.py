"""Stopping for futility: the chances are what simulation says, and no false positive is added."""

from __future__ import annotations

import numpy as np
import pytest

from knockout.stats.futility import chance_of_claim, needed_flips, progress
from knockout.stats.paired import Tally
from knockout.stats.sequential import BETS, log_capital, settle

EFFECTS = ("pillar", "stumbling_block")


def grades(rng, n_candidates, p, rounds, differs, loses=0.5):
    """A baseline of halves; a share of the cells differs, of which a share is lost."""
    base = rng.random((p, rounds)) < 0.5
    u = rng.random((n_candidates, p, rounds))
    flips = u < 2 * differs * np.where(base, loses, 1 - loses)
    return base.astype(np.int8), (base ^ flips).astype(np.int8)


def test_counts_by_hand() -> None:
    base = np.array([[1, 1, 0], [0, 0, 1], [1, -1, 1]], dtype=np.int8)
    knock = np.array([[[0, 0, 0], [1, 0, 0], [-1, 1, 1]]], dtype=np.int8)
    now = progress(base, knock, 2)
    assert [int(x[0]) for x in (now.problems, now.cells, now.differing)] == [2, 4, 3]
    assert [int(x[0]) for x in (now.net, now.sizes, now.squares)] == [-1, 3, 5]


def test_needed_flips_are_those_that_the_capital_asks_for() -> None:
    """Flips in whole numbers, one at a time, against the race's own capital."""
    for differing in (0, 10, 60, 400):
        needed = needed_flips(np.array([float(differing)]), np.log(40), BETS)[0]
        for net in range(differing % 2, 120, 2 if differing else 1):
            wrong = max(differing - net, 0) // 2
            tally = Tally(np.array([-1, 1]), np.array([1, 1]), np.array([[wrong + net, wrong]]))
            enough = log_capital(tally, 0.0, "below")[0] >= np.log(40)
            assert enough == (net >= needed - 1e-9)


@pytest.mark.parametrize("target", ["population", "benchmark"])
def test_a_chance_is_never_below_what_simulated_futures_give(target: str) -> None:
    """Futures drawn from the posterior of a flat prior, for which the chance is meant.

    The race's own evidence decides there, with its looks on the way, so this also checks that the
    price of looking and the threshold are not put too high.
    """
    rng = np.random.default_rng(3)
    p, r, last, differs = 200, 4, 12, 0.1
    base, knock = grades(rng, 40, p, r, differs)
    now = progress(base, knock, r)
    chances = chance_of_claim(now, r, last, np.log(40), BETS, by_problem=target == "population")
    for c in np.argsort(chances)[[2, 20, 30]]:
        delta = now.net[c] / now.cells[c] + rng.normal(size=400) * np.sqrt(differs / (p * r))
        losing = np.clip((1 - delta / differs) / 2, 0, 1)
        future = grades(rng, 400, p, last - r, differs, losing[:, None, None])
        whole_base = np.concatenate([base, future[0]], axis=1)
        past = np.repeat(knock[c : c + 1], 400, axis=0)
        whole = np.concatenate([past, future[1]], axis=2)
        found = settle(whole_base, whole, rule="nominal", target=target, margin=0.001)
        claimed = np.mean([s in EFFECTS for s in found.status])
        assert claimed <= chances[c] + 3 * np.sqrt(0.25 / 400)


def test_nothing_differs_yet() -> None:
    """An inert candidate is given a few rounds; where no outcome could count, none."""
    base = np.zeros((500, 16), dtype=np.int8)
    still = np.zeros((1, 500, 16), dtype=np.int8)
    options = {"rule": "nominal", "margin": 0.001, "futility": 0.05}
    found = settle(base, still, **options)
    assert found.status == ("futile",)
    assert 1 < found.settled_round[0] < 16
    assert found.chance[0] < 0.05
    # Eight problems cannot pay 2 · 100 / .05, whatever happens.
    few = settle(base[:8], still[:, :8], m=100, margin=0.001, futility=0.05)
    assert (few.status, few.settled_round[0], few.chance[0]) == (("futile",), 1, 0.0)
    # Without a single grade nothing is known.
    assert settle(base, still - 1, **options).status == ("open",)
    # No future is left after the last planned round.
    assert settle(base[:, :1], still[:, :, :1], max_rounds=1, **options).status == ("open",)


@pytest.mark.parametrize("target", ["population", "benchmark"])
def test_claims_are_a_subset_of_those_without_it_and_errors_stay_below_alpha(target: str) -> None:
    rng = np.random.default_rng(4)
    base, null = grades(rng, 1500, 100, 8, 0.2)
    lost = (rng.random((100, 100, 8)) < 0.25) & (base == 1)
    real = np.where(lost, np.int8(0), null[:100])
    knock = np.concatenate([null[100:], real])
    options = {"rule": "nominal", "alpha": 0.1, "margin": 0.001, "target": target}
    patient = settle(base, knock, **options)
    hasty = settle(base, knock, futility=0.05, **options)
    one, other = np.array(hasty.status), np.array(patient.status)
    claimed, before = np.isin(one, EFFECTS), np.isin(other, EFFECTS)
    assert (one[claimed] == other[claimed]).all()
    assert (hasty.settled_round[claimed] == patient.settled_round[claimed]).all()
    assert claimed[:1400].mean() <= 0.1 + 3 * np.sqrt(0.09 / 1400)
    # It does stop most of what does nothing, and loses few of the others.
    assert (one[:1400] == "futile").mean() > 0.5
    assert before[1400:].mean() > 0.3
    assert claimed[1400:].mean() >= before[1400:].mean() - 0.08
    assert (hasty.rounds <= patient.rounds).all()


@pytest.mark.parametrize("target", ["population", "benchmark"])
@pytest.mark.parametrize("rule", ["fdr", "nominal"])
def test_it_replays_and_ignores_what_came_later(target: str, rule: str) -> None:
    rng = np.random.default_rng(6)
    base, knock = grades(rng, 60, 200, 8, 0.15)
    knock[:4] = np.where(rng.random((4, 200, 8)) < 0.2, np.int8(0), base)
    options = {"rule": rule, "target": target, "futility": 0.05, "max_rounds": 8}
    found = settle(base, knock, **options)
    assert {"pillar", "futile"} <= set(found.status)
    for r in range(1, 8):
        part = settle(base[:, :r], knock[:, :, :r], **options)
        done = (found.settled_round > 0) & (found.settled_round <= r)
        assert (np.array(part.status)[done] == np.array(found.status)[done]).all()
        assert (np.array(part.status)[~done] == "open").all()
    noisy = knock.copy()
    for c, r in enumerate(found.settled_round):
        if r:
            noisy[c, :, r:] = rng.integers(-1, 2, noisy[c, :, r:].shape)
    order = rng.permutation(200)
    again = settle(base[order], noisy[:, order], **options)
    assert again.status == found.status
    for name in ("settled_round", "chance", "log_pillar"):
        np.testing.assert_array_equal(getattr(again, name), getattr(found, name))


def test_a_canary_is_never_dropped() -> None:
    base, knock = grades(np.random.default_rng(7), 3, 100, 8, 0.01)
    counted = np.array([True, True, False])
    found = settle(base, knock, counted=counted, futility=0.5, margin=0.001)
    assert found.status == ("futile", "futile", "open")
    assert np.isnan(found.chance[2])
