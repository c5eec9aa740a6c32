from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import gumbel_plain, pick_plain, support_plain
from scipy import stats

from knockout.method.sampling import (
    BadLogits,
    Rows,
    Sampling,
    ban_,
    cell_seed,
    gumbel,
    one_hot_,
    pick,
)

SETTINGS = [
    Sampling(temperature=0),
    Sampling(temperature=1),
    Sampling(temperature=0.6, top_k=3),
    Sampling(temperature=0.6, top_p=0.8),
    Sampling(temperature=1.3, min_p=0.15),
    Sampling(temperature=0.6, top_p=0.9, top_k=4, min_p=0.02),
]
samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0, 0.3, 0.6, 1.0, 1.7]),
    top_p=st.sampled_from([1.0, 0.95, 0.7, 0.3, 0.01]),
    top_k=st.sampled_from([0, 1, 2, 3, 5, 50]),
    min_p=st.sampled_from([0.0, 0.05, 0.3, 0.9]),
)


@given(
    st.integers(0, (1 << 63) - 1),
    st.integers(0, 1 << 40),
    st.lists(st.integers(0, 300_000), min_size=1, max_size=4),
)
def test_noise_is_the_documented_function(seed: int, position: int, tokens: list[int]) -> None:
    noise = gumbel(torch.tensor(seed), torch.tensor(position), torch.tensor(tokens))
    expected = [gumbel_plain(seed, position, token) for token in tokens]
    np.testing.assert_allclose(noise.numpy(), expected, rtol=1e-12, atol=1e-12)


def test_noise_is_pinned() -> None:
    """A change of these numbers changes every run's samples: it must be a decision."""
    noise = gumbel(
        torch.tensor([0, 1, 2**62]), torch.tensor([0, 7, 16384]), torch.tensor([0, 5, 151935])
    )
    np.testing.assert_allclose(
        noise.numpy(),
        [gumbel_plain(0, 0, 0), gumbel_plain(1, 7, 5), gumbel_plain(2**62, 16384, 151935)],
        rtol=1e-13,
    )
    np.testing.assert_allclose(noise.numpy(), PINNED, rtol=1e-12)


PINNED = [2.124773005340047, 0.6906748343141529, 0.057203862450399594]


def uniform(noise: torch.Tensor) -> np.ndarray:
    return np.asarray(torch.exp(-torch.exp(-noise)).numpy()).ravel()


@pytest.mark.parametrize("axis", ["seeds", "positions", "tokens", "cell seeds"])
def test_noise_is_uniform_and_independent_along_each_key(axis: str) -> None:
    n = 200_000
    run = torch.arange(n)
    fixed = torch.tensor(12345)
    noise = {
        "seeds": lambda: gumbel(run, fixed, fixed),
        "positions": lambda: gumbel(fixed, run, fixed),
        "tokens": lambda: gumbel(fixed, fixed, run),
        "cell seeds": lambda: gumbel(
            torch.tensor([cell_seed(0, "b", str(i), 0) for i in range(n)]), fixed, fixed
        ),
    }[axis]()
    u = uniform(noise)
    assert stats.kstest(u, "uniform").pvalue > 1e-4
    for lag in (1, 2, 64):
        # Pairs on a 16 × 16 grid: catches dependence that a correlation would miss.
        grid = np.histogram2d(u[:-lag], u[lag:], bins=16, range=[[0, 1], [0, 1]])[0]
        assert stats.chisquare(grid.ravel()).pvalue > 1e-4
    # Runs test: as many rises as chance would make (mean (2n−1)/3, variance (16n−29)/90 turns).
    turns = np.sum(np.diff(np.sign(np.diff(u))) != 0)
    z = (turns - (2 * n - 4) / 3) / math.sqrt((16 * n - 29) / 90)
    assert abs(z) < 4.5


def test_noise_is_independent_across_keys_that_differ_in_one_place() -> None:
    seeds, tokens = torch.arange(64)[:, None, None], torch.arange(64)[None, None, :]
    positions = torch.arange(64)[None, :, None]
    u = uniform(gumbel(seeds, positions, tokens)).reshape(64, 64, 64)
    for other in (u[1:], u[:, 1:], u[:, :, 1:]):
        same = u[tuple(slice(0, s) for s in other.shape)]
        grid = np.histogram2d(same.ravel(), other.ravel(), bins=12, range=[[0, 1]] * 2)[0]
        assert stats.chisquare(grid.ravel()).pvalue > 1e-4
    bits = (u.ravel() * 2**20).astype(np.int64)
    counts = np.bincount(bits % 1024, minlength=1024)  # low bits too
    assert stats.chisquare(counts).pvalue > 1e-4


def test_seed_of_a_cell_is_stable_and_63_bit() -> None:
    seeds = {
        cell_seed(r, b, p, k)
        for r in (0, 1)
        for b in ("a", "ab")
        for p in ("1", "b1")
        for k in (0, 1)
    }
    assert len(seeds) == 16
    assert all(0 <= seed < 1 << 63 for seed in seeds)
    assert cell_seed(0, "knockout_math500", "test/algebra/1.json", 2) == 6068873304385513078


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_pick_is_the_plain_rule_row_by_row(data: st.DataObject) -> None:
    """Any mix of settings in one batch, ties included (logits on a coarse grid), bans included."""
    width = data.draw(st.integers(2, 40))
    n = data.draw(st.integers(1, 6))
    mix = data.draw(st.lists(samplings, min_size=n, max_size=n))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    grid = data.draw(st.sampled_from([0.5, 0.0]))
    logits = torch.tensor(rng.normal(0, 2, (n, width)), dtype=torch.float32)
    if grid:
        logits = (logits / grid).round() * grid
    banned = rng.random((n, width)) < 0.2
    banned[np.arange(n), rng.integers(0, width, n)] = False
    seeds = [int(s) for s in rng.integers(0, 2**63 - 1, n)]
    positions = rng.integers(0, 50_000, n)
    row, token = np.nonzero(banned)
    ban_(logits, torch.from_numpy(row), torch.from_numpy(token))
    before = logits.clone()
    picks = pick(logits, Rows(mix, seeds), torch.from_numpy(positions))
    assert torch.equal(logits, before)
    for i in range(n):
        expected = pick_plain(logits[i].tolist(), mix[i], seeds[i], int(positions[i]))
        assert int(picks[i]) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_many_ties_at_the_edge_of_top_k_are_all_kept(dtype: torch.dtype) -> None:
    """With 100 tokens level at the k-th place, more than the list first looked at."""
    logits = torch.full((1, 300), -5.0, dtype=dtype)
    logits[0, 100:200] = 2.0
    sampling = Sampling(temperature=1.0, top_k=5)
    seen = {
        int(pick(logits, Rows([sampling], [seed]), torch.tensor([3]))[0]) for seed in range(1500)
    }
    assert seen == set(range(100, 200))


def test_wide_nucleus_falls_back_to_the_whole_row() -> None:
    rng = np.random.default_rng(0)
    logits = torch.tensor(rng.normal(0, 0.5, (4, 3000)), dtype=torch.float32)
    sampling = Sampling(temperature=1.0, top_p=0.95)
    seeds = [3, 4, 5, 6]
    picks = pick(logits, Rows([sampling] * 4, seeds), torch.tensor([9, 9, 9, 9]))
    assert picks.tolist() == [
        pick_plain(logits[i].tolist(), sampling, seeds[i], 9) for i in range(4)
    ]


@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
@pytest.mark.parametrize("banned", [(), (2,), (0, 5)])
def test_picks_follow_the_right_distribution(sampling: Sampling, banned: tuple[int, ...]) -> None:
    n = 40_000
    logits = torch.tensor([1.5, -0.3, 1.2, 0.4, -2.0, 0.9, 0.1, -0.7])
    batch = logits.repeat(n, 1)
    for token in banned:
        batch[:, token] = -math.inf
    seeds = [cell_seed(1, "distribution", "x", i) for i in range(n)]
    picks = pick(batch, Rows([sampling] * n, seeds), torch.full((n,), 11))
    expected = support_plain(batch[0].tolist(), sampling)
    counts = np.bincount(picks.numpy(), minlength=8)
    assert set(np.flatnonzero(counts)) <= set(expected)
    if len(expected) > 1:
        ids = sorted(expected)
        result = stats.chisquare(counts[ids], [expected[j] * n for j in ids])
        assert result.pvalue > 1e-4


def test_a_ban_changes_nothing_but_the_banned_winner_without_truncation() -> None:
    rng = np.random.default_rng(1)
    logits = torch.tensor(rng.normal(0, 1, (500, 30)), dtype=torch.float32)
    rows = Rows([Sampling(temperature=0.8)] * 500, list(range(500)))
    positions = torch.arange(500)
    free = pick(logits, rows, positions)
    logits[:, 7] = -math.inf
    bound = pick(logits, rows, positions)
    assert (free == 7).any()
    assert torch.equal(free[free != 7], bound[free != 7])
    assert not (bound == 7).any()


@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
@pytest.mark.parametrize("value", [math.nan, -math.inf, math.inf])
def test_rows_that_cannot_be_sampled_are_named(sampling: Sampling, value: float) -> None:
    logits = torch.zeros(3, 50)
    logits[1] = value
    with pytest.raises(BadLogits, match="row 1") as caught:
        pick(logits, Rows([sampling] * 3, [1, 2, 3]), torch.tensor([0, 0, 0]))
    assert caught.value.row == 1


def test_one_nan_among_good_logits_is_an_error() -> None:
    logits = torch.zeros(1, 50)
    logits[0, 17] = math.nan
    for sampling in SETTINGS:
        with pytest.raises(BadLogits):
            pick(logits, Rows([sampling], [1]), torch.tensor([0]))


def test_one_hot_leaves_other_rows_alone() -> None:
    logits = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    before = logits.clone()
    one_hot_(logits, torch.tensor([0, 2]), torch.tensor([1, 3]))
    assert torch.equal(logits[1], before[1])
    assert logits.argmax(dim=1).tolist() == [1, 3, 3]
    assert torch.isneginf(logits[0, [0, 2, 3]]).all()


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": -1.0},
        {"temperature": 0.001},
        {"temperature": math.nan},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"top_k": -1},
        {"top_k": True},
        {"min_p": 1.0},
        {"min_p": -0.1},
    ],
)
def test_settings_out_of_range_are_named(values: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(values))):
        Sampling(**values)  # type: ignore[arg-type]


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="2 rows"):
        pick(torch.zeros(3, 5), Rows([Sampling()] * 2, [1, 2]), torch.tensor([0, 0]))
    with pytest.raises(ValueError, match="1 settings"):
        Rows([Sampling()], [1, 2])
