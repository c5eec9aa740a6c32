"""The exact sign-flip test against enumeration of all signs, scipy and closed forms."""

from __future__ import annotations

import itertools
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from knockout.stats.paired import Tally
from knockout.stats.signflip import signflip_p, signflip_sizes_p


def tally_of(*rows: list[Fraction]) -> Tally:
    atoms = sorted({(f.denominator, f.numerator) for row in rows for f in row})
    counts = [[sum((f.denominator, f.numerator) == a for f in row) for a in atoms] for row in rows]
    return Tally(
        numerators=np.array([a[1] for a in atoms], dtype=np.int64),
        denominators=np.array([a[0] for a in atoms], dtype=np.int64),
        counts=np.array(counts, dtype=np.int64).reshape(len(rows), len(atoms)),
    )


def enumerated(values: list[Fraction]) -> float:
    observed = abs(sum(values))
    sums = [
        abs(sum(s * v for s, v in zip(signs, values, strict=True)))
        for signs in itertools.product((1, -1), repeat=len(values))
    ]
    return sum(x >= observed for x in sums) / len(sums)


fractions = st.builds(
    lambda n, d: Fraction(max(-d, min(d, n)), d), st.integers(-4, 4), st.integers(1, 4)
)


@settings(max_examples=150, deadline=None)
@given(st.lists(fractions, min_size=1, max_size=10))
def test_equals_enumeration_of_all_signs(values: list[Fraction]) -> None:
    assert signflip_p(tally_of(values))[0] == pytest.approx(enumerated(values), rel=1e-12)


def test_equals_scipys_exact_permutation_test() -> None:
    values = [Fraction(k, 3) for k in (-3, -2, -2, -1, 1, -1, 2, 0, -3, 0, -1)]
    oracle = stats.permutation_test(
        ([float(v) for v in values],),
        lambda x, axis: np.mean(x, axis=axis),
        permutation_type="samples",
        n_resamples=np.inf,
    )
    assert signflip_p(tally_of(values))[0] == pytest.approx(oracle.pvalue, rel=1e-12)


@pytest.mark.parametrize(("won", "lost"), [(0, 0), (0, 5), (6, 0), (3, 10), (200, 150), (800, 700)])
def test_one_seed_is_exact_mcnemar(won: int, lost: int) -> None:
    tally = Tally(
        np.array([-1, 0, 1]), np.array([1, 1, 1]), np.array([[lost, 40, won]], dtype=np.int64)
    )
    p = stats.binomtest(won, won + lost, 0.5).pvalue if won + lost else 1.0
    assert signflip_p(tally)[0] == pytest.approx(p, rel=1e-9)


def test_bonferroni_over_200_needs_thirteen_one_way_flips_of_thirty() -> None:
    p = [signflip_sizes_p(np.array([1]), np.array([k]), k) for k in (12, 13)]
    assert p[0] * 200 > 0.05 >= p[1] * 200


def test_large_and_extreme_cases_stay_exact_and_above_zero() -> None:
    # 1,131 problems that all lose by 1/16 … 16/16: only one sign pattern in 2^1131 is as extreme.
    sizes = np.arange(1, 17)
    counts = np.full(16, 70)
    p = signflip_sizes_p(sizes, counts, int(sizes @ counts))
    assert 0 < p <= np.finfo(float).tiny
    # Far out in the tail but representable: compare with a big-integer count.
    counts = np.full(4, 30)
    ways = [1]
    for size in (1, 2, 3, 4):
        for _ in range(30):
            grown = ways + [0] * size
            for i, w in enumerate(ways):
                grown[i + size] += w
            ways = grown
    total = 200
    room = (300 - total) // 2
    expected = Fraction(2 * sum(ways[: room + 1]), 2**120)
    got = signflip_sizes_p(np.arange(1, 5), counts, total)
    assert got == pytest.approx(float(expected), rel=1e-11)


def test_odd_patterns_of_missing_seeds_stay_near_the_exact_value() -> None:
    values = [Fraction(-a, b) for a, b in [(1, 16), (3, 13), (5, 11), (2, 7), (1, 9), (4, 15)]]
    values += [Fraction(2, 13), Fraction(1, 11)]
    p = signflip_p(tally_of(values))[0]
    assert p == pytest.approx(enumerated(values), abs=0.02)
    assert (p * 2**7) % 1 == 0  # still an exact count of sign patterns


def test_nothing_differs_and_nothing_there() -> None:
    p = signflip_p(tally_of([Fraction(0)] * 5, []))
    assert p[0] == 1.0
    assert np.isnan(p[1])


def test_keeps_its_level_on_a_null_with_uneven_problems() -> None:
    rng = np.random.default_rng(7)
    rejected = 0
    for _ in range(10):
        rate = rng.beta(0.5, 1.0, (200, 40, 1))
        cells = (rng.random((200, 40, 8)) < rate) * rng.choice([-1, 1], (200, 40, 8))
        sums = cells.sum(axis=2)
        counts = np.stack([(sums == k).sum(axis=1) for k in range(-8, 9)], axis=1)
        p = signflip_p(Tally(np.arange(-8, 9), np.full(17, 8), counts))
        rejected += int((p <= 0.05).sum())
    # 2,000 tests at a level just under .05: within four standard errors.
    assert 2000 * 0.03 < rejected < 2000 * (0.05 + 4 * 0.0049)
