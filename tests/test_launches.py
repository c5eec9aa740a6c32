"""How many operations a step starts, and how often it waits: what counts on an accelerator."""

from __future__ import annotations

import pytest
import torch

from bench.launches import Counted
from knockout.method import sampling
from knockout.method.changes import Watched, pick_watched
from knockout.method.sampling import Rows, Sampling, pick

TRUNCATED = [
    Sampling(0.6, top_p=0.95, top_k=20),
    Sampling(1.0, top_p=0.9),
    Sampling(1.5, min_p=0.05),
]


def batch(n: int, width: int, s: Sampling) -> tuple[torch.Tensor, Rows, torch.Tensor]:
    logits = torch.randn(n, width, generator=torch.Generator().manual_seed(0)) * 8
    return logits, Rows([s] * n, list(range(n))), torch.arange(n)


def test_open_sampling_of_256_rows_starts_few_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    """With an accelerator's parts, over Qwen3's vocabulary."""
    monkeypatch.setattr(sampling, "_OPEN", sampling._OPEN[1:] * 2)
    args = batch(256, 151_936, Sampling(1.0))
    with Counted() as counted:
        pick(*args)
    assert counted.n < 200
    assert counted.waits == 1


@pytest.mark.parametrize("s", [Sampling(1.0), *TRUNCATED], ids=str)
def test_watching_twenty_bans_a_row_waits_once(s: Sampling) -> None:
    n, each = 64, 20
    bans = n * each
    ids = torch.randint(9000, (bans, 3), generator=torch.Generator().manual_seed(1))
    watched = Watched(
        torch.arange(n).repeat_interleave(each),
        torch.arange(each).repeat(n),
        torch.zeros(bans, dtype=torch.int64),
        torch.zeros(bans, dtype=torch.float64),
        torch.arange(bans).repeat_interleave(3),
        ids.sort(dim=1).values.reshape(-1),
        each,
        penalties=False,
    )
    args = batch(n, 9000, s)
    with Counted() as alone:
        pick(*args)
    with Counted() as counted:
        pick_watched(*args, watched)
    assert counted.n - alone.n < 300
    assert counted.waits == 1
