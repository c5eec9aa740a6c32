"""Which types to look at: rocks, rare types of high KL, random ones."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["GROUPS", "choose_types"]

GROUPS = ("rock", "rare_high_kl", "random")


def choose_types(
    counts: NDArray[np.int64],
    mean_kl: NDArray[np.float64],
    rocks: Sequence[int],
    n: int,
    seed: int,
    *,
    min_count: int = 5,
    excluded: Collection[int] = (),
) -> dict[str, list[int]]:
    """Chooses three groups of types that share none.

    * `rock`: the first n of the list that occur at least `min_count` times;
    * `rare_high_kl`: of the rarer half of the other types, those of the highest mean KL;
    * `random`: drawn from what is left, all types alike.

    Args:
        counts: (V,) occurrences.
        mean_kl: (V,) in nats, early in training if that is known; any value if a type does not occur.
        rocks: Token ids, best first.
        n: Most types of a group.
        seed: Of the random group.
        min_count: Fewer occurrences than these give no mean worth looking at.
        excluded: Ids that are in no group, such as special tokens.

    Returns:
        Group to token ids; shorter than n if there are no more.
    """
    usable = counts >= min_count
    usable[list(excluded)] = False
    group: dict[str, list[int]] = {}
    group["rock"] = [int(v) for v in rocks if v < len(counts) and usable[v]][:n]
    usable[[v for v in rocks if v < len(counts)]] = False
    pool = np.flatnonzero(usable)
    rare = pool[counts[pool] <= np.median(counts[pool])] if len(pool) else pool
    order = np.lexsort((rare, -mean_kl[rare]))
    group["rare_high_kl"] = [int(v) for v in rare[order][:n]]
    usable[group["rare_high_kl"]] = False
    pool = np.flatnonzero(usable)
    drawn = np.random.default_rng(seed).choice(pool, size=min(n, len(pool)), replace=False)
    group["random"] = sorted(int(v) for v in drawn)
    return group
