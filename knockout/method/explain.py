"""Why a pick was what it was: probabilities, noise, and how close another token came."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from knockout.method.sampling import Rows, Sampling, gumbel
from knockout.method.support import Top

__all__ = ["Explained", "explain"]


@dataclass(frozen=True, slots=True)
class Explained:
    """One pick.

    Attributes:
        pick: The token that wins.
        best: The most probable tokens, as (id, probability) by falling probability.
        probability: Of the pick, after temperature and truncation.
        runner_up: The token that came second, or None if the support is one token.
        margin: By how much the pick's score ℓ/T + g exceeds the runner-up's; where greedy, in
            logits. Infinite without a runner-up.
        noise_free: Logit of the pick less the highest other logit of the support: below 0 if
            noise alone made it win. Infinite without another token.
    """

    pick: int
    best: tuple[tuple[int, float], ...]
    probability: float
    runner_up: int | None
    margin: float
    noise_free: float


def explain(
    logits: Tensor, sampling: Sampling, seed: int, position: int, most: int = 8
) -> Explained:
    """Explains the pick that `knockout.method.sampling.pick` makes from a row.

    Args:
        logits: (V,), with what intervenes applied.
        sampling: The settings.
        seed: Of the cell.
        position: Tokens that stand before the one to be picked.
        most: How many of the most probable tokens are named.
    """
    row = logits[None].to(torch.float32)
    width = row.shape[1]
    # At temperature 0 the probabilities are those at 1, and there is no noise.
    used = Sampling() if sampling.greedy else sampling
    top = Top(row, Rows([used], [seed], logits.device), torch.zeros(1, dtype=torch.int64), width)
    keep = top.support()[0] if used.truncates else top.x.isfinite()
    keep = keep & top.x.isfinite()
    ids, x = top.ids[0][keep[0]], top.x[0][keep[0]]
    probability = x.softmax(0)
    score = x
    if not sampling.greedy:
        seeds, positions = torch.tensor(seed), torch.tensor(position)
        score = x + gumbel(seeds, positions, ids.cpu()).to(x.device)
    order = score.argsort(descending=True, stable=True)
    if sampling.greedy:  # ties go to the lowest id
        tied = (x == x.max()).nonzero()[:, 0]
        first = tied[ids[tied].argmin()]
        order = torch.cat([first[None], order[order != first]])
    won = int(order[0])
    second = int(order[1]) if len(order) > 1 else None
    scale = used.temperature
    others = torch.cat([x[:won], x[won + 1 :]])
    return Explained(
        pick=int(ids[won]),
        best=tuple(
            (int(token), float(p)) for token, p in zip(ids[:most], probability[:most], strict=True)
        ),
        probability=float(probability[won]),
        runner_up=None if second is None else int(ids[second]),
        margin=math.inf if second is None else float(score[won] - score[second]),
        noise_free=float((x[won] - others.max()) * scale) if len(others) else math.inf,
    )
