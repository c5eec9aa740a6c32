from __future__ import annotations

import itertools
import math
from collections import Counter

import numpy as np
import pytest
import torch
from divergence_oracle import find_divergences, logprobs_needed
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import roll, roll_many, support_plain, top_lists
from scipy import stats
from test_sampling import samplings

from knockout.method.sampling import Sampling, cell_seed, gumbel

PROMPT = 5


class RandomModel:
    """Logits that depend on the last token and the position, drawn once by seed."""

    def __init__(self, seed: int, width: int, spread: float, grid: float = 0.0) -> None:
        self.seed, self.width, self.spread, self.grid = seed, width, spread, grid

        self.rows: dict[tuple[int, int], np.ndarray] = {}

    def __call__(self, tokens: tuple[int, ...]) -> np.ndarray:
        key = (len(tokens), tokens[-1] if tokens else -1)
        if key not in self.rows:
            rng = np.random.default_rng([self.seed, key[0], key[1] + 1])
            logits = rng.normal(0, self.spread, self.width)
            self.rows[key] = np.round(logits / self.grid) * self.grid if self.grid else logits
        return self.rows[key]


def check_forks(
    model: RandomModel,
    sampling: Sampling,
    seed: int,
    bans: list[tuple[int, ...]],
    length: int,
    listed: int | None = None,
) -> tuple[int, int]:
    """Every fork equals a run from scratch; returns (early forks, forks)."""
    baseline = roll(model, (), length, sampling, seed, PROMPT)
    n = logprobs_needed(sampling, max(map(len, bans))) if listed is None else listed
    ids, values = top_lists(model, baseline, n) if n else (None, None)
    found = find_divergences(
        np.array(baseline), ids, values, bans, sampling,
        seed=seed, first_position=PROMPT, vocab_size=model.width,
    )  # fmt: skip
    assert found.n_coupling_errors == 0
    for ban, step, early in zip(bans, found.step, found.early, strict=True):
        scratch = roll(model, (), length, sampling, seed, PROMPT, ban)
        truth = next((t for t in range(length) if scratch[t] != baseline[t]), None)
        if step < 0:
            assert truth is None, f"ban {ban} is called inherited but differs at {truth}"
            continue
        assert truth is None or truth >= step, f"ban {ban} forks at {step}, after {truth}"
        if not early:
            assert truth == step, f"ban {ban} is called sure at {step}; it differs at {truth}"
        fork = roll(model, baseline[:step], length, sampling, seed, PROMPT, ban)
        assert fork == scratch
    return int(found.early.sum()), int((found.step >= 0).sum())


@settings(max_examples=250, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.integers(3, 60),
    samplings,
    st.sampled_from([0.3, 1.0, 3.0]),
    st.sampled_from([0.0, 0.5]),
    st.sampled_from([None, 1, 2, 4]),
)
def test_fork_equals_full_rerun(
    seed: int, width: int, sampling: Sampling, spread: float, grid: float, listed: int | None
) -> None:
    """Random logits, settings and bans; ties (grid) and lists that are too short (listed) too."""
    rng = np.random.default_rng(seed)
    bans = [(int(token),) for token in rng.permutation(width)[:6]]
    bans += [tuple(map(int, rng.permutation(width)[:size])) for size in (2, 3) if width > size]
    model = RandomModel(seed, width, spread, grid)
    check_forks(model, sampling, int(rng.integers(2**62)), bans, 10, listed)


def test_lists_of_the_asked_length_decide_nearly_every_step_exactly() -> None:
    """The published settings: early forks are the exception, not the method."""
    early = forks = 0
    for seed in range(10):
        model = RandomModel(seed, 80, 2.0)
        sampling = Sampling(temperature=0.6, top_p=0.95, top_k=20)
        bans = [(token,) for token in range(0, 80, 3)]
        e, n = check_forks(model, sampling, cell_seed(0, "x", "y", seed), bans, 20)
        early, forks = early + e, forks + n
    assert forks > 50
    assert early == 0


def test_a_ban_that_only_moves_the_support_is_seen() -> None:
    """Banning the never-picked second token frees a place in top_k for the one that wins."""

    class Fixed:
        width = 4

        def __call__(self, tokens: tuple[int, ...]) -> np.ndarray:
            return np.array([2.0, 1.9, 1.8, -5.0])

    model, sampling = Fixed(), Sampling(temperature=1.0, top_k=2)
    moved = 0
    for repeat in range(200):
        seed = cell_seed(3, "support", "p", repeat)
        baseline = roll(model, (), 1, sampling, seed, PROMPT)
        ids, values = top_lists(model, baseline, 4)
        found = find_divergences(
            np.array(baseline), ids, values, [(1,)], sampling,
            seed=seed, first_position=PROMPT, vocab_size=4,
        )  # fmt: skip
        scratch = roll(model, (), 1, sampling, seed, PROMPT, (1,))
        assert (found.step[0] == 0) == (scratch != baseline)
        moved += baseline == [0] and scratch == [2]
    assert moved > 10


def enumerate_trajectories(
    model: RandomModel, sampling: Sampling, length: int, banned: tuple[int, ...]
) -> dict[tuple[int, ...], float]:
    """Probability of every whole trajectory of the (knocked-out) policy, by the plain rules."""
    out: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        longer: dict[tuple[int, ...], float] = {}
        for tokens, p in out.items():
            logits = np.asarray(model(tokens), dtype=np.float32).astype(float)
            logits[list(banned)] = -math.inf
            for token, q in support_plain(list(logits), sampling).items():
                longer[(*tokens, token)] = longer.get((*tokens, token), 0.0) + p * q
        out = longer
    return out


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=1.0),
        Sampling(temperature=0.7, top_k=2),
        Sampling(temperature=1.0, top_p=0.75),
        Sampling(temperature=1.2, min_p=0.3),
        Sampling(temperature=0.8, top_k=3, top_p=0.9),
    ],
    ids=str,
)
@pytest.mark.parametrize("ban", [(0,), (1, 3)])
def test_forks_sample_the_knockout_policy_exactly(sampling: Sampling, ban: tuple[int, ...]) -> None:
    """Distribution over whole knockout trajectories, made by forking, against enumeration."""
    model, length, n = RandomModel(7, 5, 1.2), 3, 2000
    seeds = [cell_seed(11, "enumerate", "p", repeat) for repeat in range(n)]
    baselines = roll_many(model, [()] * n, length, sampling, seeds, PROMPT)
    prefixes = []
    for seed, baseline in zip(seeds, baselines, strict=True):
        ids, values = top_lists(model, baseline, logprobs_needed(sampling, len(ban)) or 1)
        found = find_divergences(
            np.array(baseline), ids, values, [ban], sampling,
            seed=seed, first_position=PROMPT, vocab_size=model.width,
        )  # fmt: skip
        step = int(found.step[0])
        prefixes.append(baseline if step < 0 else baseline[:step])
    forks = roll_many(model, prefixes, length, sampling, seeds, PROMPT, ban)
    counts = Counter(map(tuple, forks))
    truth = enumerate_trajectories(model, sampling, length, ban)
    assert set(counts) <= set(truth)
    expected = np.array([truth[k] * n for k in truth])
    observed = np.array([counts[k] for k in truth])
    common = expected >= 5
    expected = np.append(expected[common], expected[~common].sum())
    observed = np.append(observed[common], observed[~common].sum())
    keep = expected > 0
    assert stats.chisquare(observed[keep], expected[keep]).pvalue > 1e-4


def test_without_truncation_only_picks_count_and_no_lists_are_asked_for() -> None:
    assert logprobs_needed(Sampling(temperature=0.6)) == 0
    assert logprobs_needed(Sampling(temperature=0, top_k=20)) == 0
    assert logprobs_needed(Sampling(temperature=0.6, top_k=20)) > 20
    found = find_divergences(
        np.array([4, 9, 4, 2]), None, None, [(9,), (2, 4), (7,), (2,)], Sampling(),
        seed=1, first_position=3, vocab_size=10,
    )  # fmt: skip
    assert found.step.tolist() == [1, 0, -1, 3]
    assert found.n_checked == 0


def test_an_engine_that_does_not_take_our_pick_is_counted() -> None:
    model, sampling = RandomModel(3, 40, 2.0), Sampling(temperature=0.6, top_k=10, top_p=0.95)
    seed = 99
    baseline = roll(model, (), 20, sampling, seed, PROMPT)
    ids, values = top_lists(model, baseline, logprobs_needed(sampling))
    wrong = list(baseline)
    wrong[-1] = int(ids[-1][0] if ids[-1][0] != baseline[-1] else ids[-1][1])
    for tokens, errors in ((baseline, 0), (wrong, 1)):
        found = find_divergences(
            np.array(tokens), ids, values, [(0,)], sampling,
            seed=seed, first_position=PROMPT, vocab_size=40,
        )  # fmt: skip
        assert found.n_coupling_errors == errors
        assert found.n_checked >= 19


def test_a_near_tie_with_a_token_of_the_support_forks_nobody() -> None:
    """Rounding could swap the two best scores on the host; the device has decided already."""
    sampling, seed = Sampling(temperature=1.0, top_k=3), 5
    noise = gumbel(torch.tensor(seed), torch.tensor(PROMPT), torch.arange(9)).numpy()
    logits = np.full(9, -40.0)
    logits[:3] = -noise[:3]
    logits[1] += 2e-6
    logits[2] -= 1.0
    ids, values = top_lists(lambda _: logits, [1], logprobs_needed(sampling))
    found = find_divergences(
        np.array([1]), ids, values, [(0,), (1,), (2,), (8,), (5,)], sampling,
        seed=seed, first_position=PROMPT, vocab_size=100,
    )  # fmt: skip
    assert found.step.tolist() == [-1, 0, -1, -1, -1]
    assert found.n_checked == 0


def test_same_id_twice_gives_the_same_step() -> None:
    model, sampling = RandomModel(5, 30, 1.0), Sampling(temperature=1.0, top_k=5)
    baseline = roll(model, (), 30, sampling, 1, PROMPT)
    ids, values = top_lists(model, baseline, logprobs_needed(sampling))
    found = find_divergences(
        np.array(baseline), ids, values, [(2,), (2,), (3,), (2,)], sampling,
        seed=1, first_position=PROMPT, vocab_size=30,
    )  # fmt: skip
    assert len(set(found.step[[0, 1, 3]])) == 1


def test_empty_trajectory_and_no_bans() -> None:
    sampling = Sampling(temperature=1.0, top_k=5)
    empty = np.empty(0, dtype=np.int64)
    lists = np.empty((0, 10))
    found = find_divergences(
        empty, lists.astype(np.int64), lists, [(1,)], sampling,
        seed=1, first_position=0, vocab_size=30,
    )  # fmt: skip
    assert found.step.tolist() == [-1]
    found = find_divergences(
        np.array([1]), np.array([[1, 2]]), np.array([[-0.1, -3.0]]), [], sampling,
        seed=1, first_position=0, vocab_size=2,
    )  # fmt: skip
    assert found.step.shape == (0,)


def test_missing_lists_are_refused() -> None:
    with pytest.raises(ValueError, match="log-probabilities"):
        find_divergences(
            np.array([1]), None, None, [(1,)], Sampling(top_k=3),
            seed=1, first_position=0, vocab_size=9,
        )  # fmt: skip


def test_unlisted_ties_at_the_edge_of_top_k_may_be_many() -> None:
    """Found by the property test: ties are all kept, so top_k does not bound their number."""
    for seed in range(40):
        check_forks(RandomModel(seed, 5, 0.3, 0.5), Sampling(1.0, 0.3, 2), 7, [(0,), (3,)], 6, 2)


def test_exhaustive_small_bans() -> None:
    """Every ban of one or two of five tokens, under several settings, over many seeds."""
    bans = [*((t,) for t in range(5)), *itertools.combinations(range(5), 2)]
    for sampling in (Sampling(1.0, 0.7), Sampling(0.6, 1.0, 2), Sampling(1.5, 0.9, 3, 0.1)):
        for seed in range(60):
            check_forks(RandomModel(seed % 7, 5, 1.0), sampling, seed, list(bans), 4)
