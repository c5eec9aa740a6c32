"""Slow, plain implementations that the tests compare with: one row, python numbers, no tricks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch

from knockout.method.sampling import Rows, Sampling, ban_, pick

MASK = (1 << 64) - 1


def splitmix_finish(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def gumbel_plain(seed: int, position: int, token: int) -> float:
    """The documented noise, in python's own whole numbers."""
    weyl = 0x9E3779B97F4A7C15
    start = splitmix_finish((seed + weyl) & MASK) ^ (((position + 1) * weyl) & MASK)
    key = splitmix_finish(start)
    bits = splitmix_finish((key + (token + 1) * weyl) & MASK) >> 12
    return -math.log(-math.log1p(-(bits + 0.5) * 2.0**-52))


def support_plain(logits: Sequence[float], sampling: Sampling) -> dict[int, float]:
    """Support and probabilities of one row, by the rules written out: min_p, top_k, top_p."""
    alive = {j: x for j, x in enumerate(logits) if x > -math.inf}
    if sampling.greedy:
        best = max(alive.values())
        return {min(j for j, x in alive.items() if x == best): 1.0}
    x = {j: v / sampling.temperature for j, v in alive.items()}
    if sampling.min_p > 0:
        bar = max(x.values()) + math.log(sampling.min_p)
        x = {j: v for j, v in x.items() if v >= bar}
    if 0 < sampling.top_k < len(logits):
        edge = sorted(x.values(), reverse=True)[: sampling.top_k][-1]
        x = {j: v for j, v in x.items() if v >= edge}
    best = max(x.values())
    weight = {j: math.exp(v - best) for j, v in x.items()}
    if sampling.top_p < 1:
        total, before, kept = sum(weight.values()), 0.0, {}
        for j in sorted(weight, key=lambda j: (-x[j], -j)):
            if before < sampling.top_p * total or not kept:
                kept[j] = weight[j]
            before += weight[j]
        weight = kept
    total = sum(weight.values())
    return {j: w / total for j, w in weight.items()}


def pick_plain(logits: Sequence[float], sampling: Sampling, seed: int, position: int) -> int:
    support = support_plain(logits, sampling)
    if sampling.greedy:
        return next(iter(support))
    return max(
        support,
        key=lambda j: logits[j] / sampling.temperature + gumbel_plain(seed, position, j),
    )


def roll_many(
    model: Callable[[tuple[int, ...]], np.ndarray],
    prefixes: Sequence[Sequence[int]],
    length: int,
    sampling: Sampling,
    seeds: Sequence[int],
    first_position: int,
    banned: Sequence[int] = (),
) -> list[list[int]]:
    """Generates up to `length` tokens after each prefix with a model that maps ids to logits."""
    done = [list(prefix) for prefix in prefixes]
    while open_ := [i for i, tokens in enumerate(done) if len(tokens) < length]:
        raw = np.array([model(tuple(done[i])) for i in open_], dtype=np.float32)
        logits = torch.from_numpy(raw)
        n = torch.arange(len(open_))
        for token in banned:
            ban_(logits, n, torch.full_like(n, token))
        positions = torch.tensor([first_position + len(done[i]) for i in open_])
        rows = Rows([sampling] * len(open_), [seeds[i] for i in open_])
        for i, token in zip(open_, pick(logits, rows, positions).tolist(), strict=True):
            done[i].append(token)
    return done
