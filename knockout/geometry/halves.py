"""Choosing types on one half of a mining run's prompts, to measure them on the other.

A type chosen for a high KL has, in the rollouts that it was chosen on, a KL that is high by luck
too. Measured there after training its KL seems to have fallen (where it was chosen by the KL before)
or to have stayed (where by that after): regression to the mean. On other rollouts neither happens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from knockout.mining.ranking import rank_types
from knockout.mining.scores import ScoreSettings, score_types
from knockout.mining.shards import read_shard

__all__ = ["TypeMeans", "rank_rocks", "split", "type_means"]


@dataclass(frozen=True, slots=True)
class TypeMeans:
    """Means of each type over some rollouts.

    Attributes:
        count: (V,) int64 occurrences.
        kl: (V,) mean reverse KL in nats; NaN if there are none.
        kl_before: The same of the student before training; None if that was not scored.
    """

    count: NDArray[np.int64]
    kl: NDArray[np.float64]
    kl_before: NDArray[np.float64] | None


def split(shards: Sequence[Path]) -> tuple[list[Path], list[Path]]:
    """Every other prompt to choose on, and the rest to measure on."""
    return list(shards[::2]), list(shards[1::2])


def type_means(shards: Sequence[Path], width: int) -> TypeMeans:
    """Adds up the scores of shards by type.

    Args:
        shards: Files of scored rollouts.
        width: V.
    """
    count = np.zeros(width, dtype=np.int64)
    sums = {name: np.zeros(width) for name in ("reverse_kl", "before_reverse_kl")}
    found: set[str] = set()
    for path in shards:
        shard = read_shard(path)
        count += np.bincount(shard.tokens, minlength=width)
        for name, total in sums.items():
            if name in shard.scores:
                found.add(name)
                total += np.bincount(shard.tokens, weights=shard.scores[name], minlength=width)
    means = {
        name: np.divide(total, count, out=np.full(width, np.nan), where=count > 0)
        for name, total in sums.items()
    }
    before = means["before_reverse_kl"] if "before_reverse_kl" in found else None
    return TypeMeans(count, means["reverse_kl"], before)


def rank_rocks(
    shards: Sequence[Path], width: int, summary: dict[str, Any], exclude: Sequence[int]
) -> list[int]:
    """The list that a mining run would make of some of its shards, best first.

    Args:
        shards: Files of scored rollouts.
        width: V.
        summary: The run's `summary.json`, whose settings of the list are taken.
        exclude: Ids that are no candidates.
    """
    listing = summary["list"]
    by = str(listing["by"])
    settings = ScoreSettings(
        summary["quantile"], summary["window"], tuple(summary.get("scores", ()))
    )
    scores = score_types(lambda: (read_shard(path) for path in shards), width, str, settings)
    ranked = rank_types(
        scores.table,
        by=by,
        drop_most_frequent=listing["drop_most_frequent"],
        min_count=max(1, listing["min_count"] // 2),  # of half of the prompts
        exclude=() if listing["keep_special"] else exclude,
    )
    return [int(v) for v in ranked["token_id"].head(listing["top"])]
