"""Paired differences, standard errors and tallies against hand-worked values."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from knockout.stats.paired import (
    pair,
    tally_cells,
    tally_problems,
    wilson_interval,
)


@pytest.mark.parametrize(
    ("k", "n", "low", "high"), [(0, 30, 0.0, 0.1135), (30, 30, 0.8865, 1.0), (7, 23, None, None)]
)
def test_wilson(k: int, n: int, low: float | None, high: float | None) -> None:
    got = wilson_interval(k / n, n)
    oracle = stats.binomtest(k, n).proportion_ci(method="wilson")
    assert got == pytest.approx((oracle.low, oracle.high), abs=1e-12)
    if low is not None:
        assert got == pytest.approx((low, high), abs=5e-5)


def test_wilson_without_trials_or_without_spread() -> None:
    assert wilson_interval(0.0, 0) == (0.0, 1.0)
    assert wilson_interval(0.3, 10, 0.0) == pytest.approx((0.3, 0.3))


def test_pairs_need_both_grades() -> None:
    baseline = np.array([[1, 0, -1], [1, 1, 0]], dtype=np.int8)
    knockout = np.array([[[0, -1, 1], [1, 0, 1]], [[1, 0, 1], [-1, -1, -1]]], dtype=np.int8)
    pairs = pair(baseline, knockout)
    assert pairs.n.tolist() == [[1, 3], [2, 0]]
    assert pairs.won.tolist() == [[0, 1], [0, 0]]
    assert pairs.lost.tolist() == [[1, 1], [0, 0]]
    assert pairs.base.tolist() == [[1, 2], [1, 0]]
    problems = tally_problems(pairs)
    assert problems.n.tolist() == [2, 1]  # the second problem of the second candidate says nothing
    assert problems.mean().tolist() == [-0.5, 0.0]
    cells = tally_cells(pairs)
    assert cells.n.tolist() == [4, 2]
    assert cells.mean().tolist() == [-0.25, 0.0]


def test_no_pairs_is_nan_not_zero() -> None:
    pairs = pair(np.full((2, 1), -1, dtype=np.int8), np.ones((1, 2, 1), dtype=np.int8))
    assert np.isnan(tally_problems(pairs).mean()).all()


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="does not fit"):
        pair(np.zeros((3, 2), dtype=np.int8), np.zeros((1, 2, 3), dtype=np.int8))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 5), st.integers(1, 9), st.integers(1, 4))
def test_tally_mean_is_the_plain_mean_in_any_order(seed: int, c: int, p: int, s: int) -> None:
    rng = np.random.default_rng(seed)
    baseline = rng.integers(-1, 2, (p, s)).astype(np.int8)
    knockout = rng.integers(-1, 2, (c, p, s)).astype(np.int8)
    tally = tally_problems(pair(baseline, knockout))
    for i in range(c):
        per_problem = [
            np.mean([int(knockout[i, j, k]) - int(baseline[j, k]) for k in range(s) if ok[k]])
            for j in range(p)
            if (ok := (knockout[i, j] >= 0) & (baseline[j] >= 0)).any()
        ]
        expected = np.mean(per_problem) if per_problem else np.nan
        np.testing.assert_allclose(tally.mean()[i], expected, atol=1e-12)
    order = rng.permutation(p)
    again = tally_problems(pair(baseline[order], knockout[:, order]))
    assert again.counts.tobytes() == tally.counts.tobytes()


def test_merge_puts_two_benchmarks_together() -> None:
    rng = np.random.default_rng(1)
    one, two = (
        tally_problems(
            pair(
                rng.integers(0, 2, (p, s)).astype(np.int8),
                rng.integers(0, 2, (3, p, s)).astype(np.int8),
            )
        )
        for p, s in ((20, 3), (7, 16))
    )
    both = one.merge(two)
    assert both.n.tolist() == [27] * 3
    np.testing.assert_allclose(both.mean(), (20 * one.mean() + 7 * two.mean()) / 27)
    assert len({*zip(both.numerators, both.denominators, strict=True)}) == len(both.numerators)
