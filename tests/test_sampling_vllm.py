"""The plain rules that `sampling.pick` is tested against are those of the installed vLLM."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from oracles import support_plain

from knockout.method.sampling import Sampling

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    sampler = pytest.importorskip("vllm.v1.sample.ops.topk_topp_sampler")


def vllm_support(logits: torch.Tensor, sampling: Sampling) -> set[int]:
    """Temperature, min_p as in vLLM's MinPLogitsProcessor, then its top_k and top_p."""
    x = (logits / sampling.temperature)[None].clone()
    if sampling.min_p:
        probabilities = x.softmax(dim=-1)
        x[probabilities < probabilities.amax() * sampling.min_p] = -torch.inf
    width = logits.shape[0]
    k = torch.tensor([min(sampling.top_k, width)]) if sampling.top_k else None
    p = torch.tensor([sampling.top_p]) if sampling.top_p < 1 else None
    x = sampler.apply_top_k_top_p_pytorch(x, k, p)
    return set(torch.isfinite(x[0]).nonzero()[:, 0].tolist())


@pytest.mark.parametrize("grid", [0.0, 0.5])
def test_support_is_vllms(grid: float) -> None:
    rng = np.random.default_rng(3)
    for _ in range(600):
        width = int(rng.integers(2, 60))
        logits = torch.tensor(rng.normal(0, 2, width), dtype=torch.float32)
        if grid:
            logits = (logits / grid).round() * grid
        sampling = Sampling(
            temperature=float(rng.choice([0.5, 1.0, 2.0])),
            top_p=float(rng.choice([1.0, 0.9, 0.5, 0.05])),
            top_k=int(rng.choice([0, 1, 3, 10, 100])),
            min_p=float(rng.choice([0.0, 0.1, 0.5])),
        )
        ours = set(support_plain(logits.tolist(), sampling))
        theirs = vllm_support(logits, sampling)
        if grid:  # among equal logits at the nucleus' edge vLLM keeps what its sort happens to
            assert sorted(logits[list(ours)].tolist()) == sorted(logits[list(theirs)].tolist())
        else:
            assert ours == theirs
