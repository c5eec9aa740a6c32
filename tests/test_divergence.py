"""Trajectories that fork where the processor says follow the knockout policy exactly."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
import torch
from oracles import roll_many, support_plain
from scipy import stats
from test_changes import lay_out

from knockout.method.changes import pick_watched
from knockout.method.sampling import Rows, Sampling, cell_seed

PROMPT = 5


class RandomModel:
    """Logits that depend on the last token and the position, drawn once by seed."""

    def __init__(self, seed: int, width: int, spread: float) -> None:
        self.seed, self.width, self.spread = seed, width, spread
        self.rows: dict[tuple[int, int], np.ndarray] = {}

    def __call__(self, tokens: tuple[int, ...]) -> np.ndarray:
        key = (len(tokens), tokens[-1] if tokens else -1)
        if key not in self.rows:
            rng = np.random.default_rng([self.seed, key[0], key[1] + 1])
            self.rows[key] = rng.normal(0, self.spread, self.width)
        return self.rows[key]


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


def shared_prefixes(
    model: RandomModel,
    baselines: list[list[int]],
    sampling: Sampling,
    seeds: list[int],
    ban: tuple[int, ...],
) -> list[list[int]]:
    """The part of each baseline before the first step that the ban is said to change."""
    n = len(baselines)
    open_ = torch.ones(n, dtype=torch.bool)
    steps = torch.zeros(n, dtype=torch.int64)
    for t in range(len(baselines[0])):
        raw = np.array([model(tuple(b[:t])) for b in baselines], dtype=np.float32)
        rows, positions = Rows([sampling] * n, seeds), torch.full((n,), PROMPT + t)
        watched = lay_out([[(0, 0.0, list(ban))]] * n)
        picks, differ = pick_watched(torch.from_numpy(raw), rows, positions, watched)
        assert picks.tolist() == [b[t] for b in baselines]
        open_ &= ~differ
        steps += open_
    return [b[:step] for b, step in zip(baselines, steps.tolist(), strict=True)]


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
    prefixes = shared_prefixes(model, baselines, sampling, seeds, ban)
    forks = roll_many(model, prefixes, length, sampling, seeds, PROMPT, ban)
    # Neither late (the fork would not be the run from scratch) nor early (it would be longer).
    assert forks == roll_many(model, [()] * n, length, sampling, seeds, PROMPT, ban)
    for fork, baseline, prefix in zip(forks, baselines, prefixes, strict=True):
        assert fork[: len(prefix) + 1] != baseline[: len(prefix) + 1] or fork == baseline
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
