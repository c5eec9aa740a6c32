"""Corrections against statsmodels, with planned but missing candidates counted."""

from __future__ import annotations

import numpy as np
import pytest
from statsmodels.stats.multitest import multipletests

from knockout.stats.multiplicity import adjust_bh, adjust_by, adjust_holm, ebh


@pytest.mark.parametrize(
    ("ours", "theirs"), [(adjust_holm, "holm"), (adjust_bh, "fdr_bh"), (adjust_by, "fdr_by")]
)
@pytest.mark.parametrize("missing", [0, 17])
def test_equal_statsmodels(ours, theirs: str, missing: int) -> None:
    rng = np.random.default_rng(4)
    p = np.round(rng.random(60) ** 3, 3)  # with ties and zeros' neighbours
    p[p == 0] = 0.0005
    oracle = multipletests(np.concatenate([p, np.ones(missing)]), method=theirs)[1][:60]
    np.testing.assert_allclose(ours(p, 60 + missing), oracle, atol=1e-14)


def test_m_is_the_number_of_planned_candidates() -> None:
    p = [0.0003] + [0.5] * 149
    assert adjust_holm(p, 200)[0] == pytest.approx(0.06)
    assert adjust_holm(p)[0] == pytest.approx(0.045)


@pytest.mark.parametrize("ours", [adjust_holm, adjust_bh, adjust_by])
def test_no_p_value_stays_nan_and_counts(ours) -> None:
    got = ours([0.01, np.nan, 0.5])
    assert np.isnan(got[1])
    assert got[0] == pytest.approx(ours([0.01, 1.0, 0.5])[0])
    assert len(ours([])) == 0


def test_fewer_planned_than_present_is_refused() -> None:
    with pytest.raises(ValueError, match="1 candidates were planned but 2"):
        adjust_bh([0.1, 0.2], 1)


def test_ebh_by_hand() -> None:
    # m = 4, alpha = .05: one rejection needs 80, two need 40 each, three 26.7, four 20.
    assert ebh([79, 10, 1, 0], 0.05).tolist() == [False] * 4
    assert ebh([80, 10, 1, 0], 0.05).tolist() == [True, False, False, False]
    assert ebh([41, 10, 40, np.nan], 0.05).tolist() == [True, False, True, False]
    assert ebh([21, 20, 20, 25], 0.05).all()
    assert not ebh([21, 20, 20, 25], 0.05, m=8).any()
    assert ebh([np.inf, 0, 0, 0], 0.05).tolist() == [True, False, False, False]


def test_ebh_on_inverse_p_values_is_bh() -> None:
    rng = np.random.default_rng(9)
    for _ in range(50):
        p = rng.random(25) ** 4
        np.testing.assert_array_equal(ebh(1 / p, 0.05), adjust_bh(p) <= 0.05)
