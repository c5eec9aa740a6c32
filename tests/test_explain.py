"""Why a pick was what it was, against the pick itself and arithmetic by hand."""

from __future__ import annotations

import math

import pytest
import torch

from knockout.method.explain import explain
from knockout.method.sampling import Rows, Sampling, gumbel, pick

SETTINGS = (
    Sampling(0.0),
    Sampling(1.0),
    Sampling(0.6, 0.95, 20),
    Sampling(0.8, 1.0, 5),
    Sampling(1.3, 0.7),
    Sampling(0.6, 1.0, 0, 0.1),
)


@pytest.mark.parametrize("sampling", SETTINGS)
def test_the_pick_is_the_samplers(sampling: Sampling) -> None:
    generator = torch.Generator().manual_seed(3)
    for seed in range(60):
        logits = 3 * torch.randn(200, generator=generator)
        logits[seed % 200] = -math.inf
        position = 7 * seed
        rows = Rows([sampling], [seed])
        wanted = int(pick(logits[None], rows, torch.tensor([position]))[0])
        found = explain(logits, sampling, seed, position)
        assert found.pick == wanted
        # Without the runner-up's lead the pick would be the runner-up: ban the pick.
        if found.runner_up is not None and not sampling.truncates:
            banned = logits.clone()
            banned[wanted] = -math.inf
            again = int(pick(banned[None], rows, torch.tensor([position]))[0])
            assert again == found.runner_up
        assert found.margin >= 0


def test_numbers_by_hand() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -math.inf])
    found = explain(logits, Sampling(0.5, 1.0, 2), 11, 4)
    weights = [math.exp(2 / 0.5), math.exp(1 / 0.5)]
    assert [token for token, _ in found.best] == [0, 1]
    assert [p for _, p in found.best] == pytest.approx([w / sum(weights) for w in weights])
    noise = gumbel(torch.tensor(11), torch.tensor(4), torch.arange(2)).tolist()
    scores = [2 / 0.5 + noise[0], 1 / 0.5 + noise[1]]
    assert found.pick == scores.index(max(scores))
    assert found.margin == pytest.approx(abs(scores[0] - scores[1]))
    assert found.noise_free == pytest.approx(1.0 if found.pick == 0 else -1.0)
    alone = explain(logits, Sampling(0.5, 1.0, 1), 11, 4)
    assert (alone.pick, alone.runner_up, alone.margin) == (0, None, math.inf)
    greedy = explain(torch.tensor([1.0, 3.0, 3.0]), Sampling(0.0), 0, 0)
    assert (greedy.pick, greedy.runner_up, greedy.margin, greedy.noise_free) == (1, 2, 0.0, 0.0)
