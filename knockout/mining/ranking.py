"""Ranks of token types, and how far down a list is worth taking (the cut-off curve)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from knockout.mining.scores import TypeScores

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["cutoff_curve", "knee", "overlap_of_ranks", "rank_types"]

_REPEATS_AT_ONCE = 16

# Scores that are sums over prompts: whether over persistent occurrences only, and whether times
# the context consistency.
_RESAMPLED = {
    "rock_score_ctx": (True, True),
    "persistent_kl": (True, False),
    "rock_score": (False, False),
    "total_kl": (False, False),
}

PERSISTENT = {"n_high", "n_persistent", "persistence", "persistent_kl", "consistency"} | {
    "rock_score_ctx"
}
"""Scores that are about persistent occurrences only."""


def rank_types(
    table: pd.DataFrame,
    *,
    by: str = "rock_score_ctx",
    drop_most_frequent: int = 0,
    min_count: int = 5,
    exclude: Sequence[int] = (),
) -> pd.DataFrame:
    """The rows that may be candidates, best first.

    Args:
        table: `TypeScores.table`, or any table with the columns used here.
        by: The column to rank by; higher is better, ties go to the lower id. Types without
            that score (NaN) are left out.
        drop_most_frequent: Leave out this many of the most frequent types.
        min_count: Leave out types with fewer occurrences: persistent ones if the score adds up
            persistent losses, all of them for any other score. (Else "forking tokens", ranked by
            entropy, would be those among the persistently bad.)
        exclude: Token ids to leave out, for example special tokens.

    Returns:
        The rows that remain, with the column `rank` (1 is best) in front.

    Raises:
        ValueError: The column does not exist or is no number.
    """
    if by not in table or table[by].dtype.kind not in "iuf":
        numbers = [str(c) for c in table.columns if table[c].dtype.kind in "iuf"]
        raise ValueError(f"no score {by!r} to rank by; there are: {', '.join(numbers)}")
    common = table.sort_values(["frequency", "token_id"], ascending=[False, True])
    dropped = set(common["token_id"].head(drop_most_frequent)) | set(exclude)
    counted = "n_persistent" if by in PERSISTENT else "frequency"
    kept = table[~table["token_id"].isin(list(dropped)) & (table[counted] >= min_count)]
    kept = kept[kept[by].notna()]
    kept = kept.sort_values([by, "token_id"], ascending=[False, True], ignore_index=True)
    kept.insert(0, "rank", np.arange(1, len(kept) + 1))
    return kept


def overlap_of_ranks(
    ranks: NDArray[np.int64], other: NDArray[np.int64], k_max: int
) -> NDArray[np.float64]:
    """Jaccard index of the two top-K lists, for K = 1 … k_max.

    Args:
        ranks: (n,) rank of each item, from 1.
        other: (n,) its rank in the other list.
        k_max: Largest K.

    Returns:
        (k_max,): an item is in both lists from K = max(rank, other rank) on.
    """
    both = np.maximum(ranks, other)
    shared = np.bincount(both[both <= k_max], minlength=k_max + 1)[1:].cumsum()
    # The lists hold K items each, or all there are.
    size = np.minimum(np.arange(1, k_max + 1), len(ranks))
    overlap: NDArray[np.float64] = shared / (2 * size - shared)
    return overlap


def cutoff_curve(
    scores: TypeScores,
    ranked: pd.DataFrame,
    rng: np.random.Generator,
    *,
    by: str = "rock_score_ctx",
    k_max: int = 500,
    repeats: int = 200,
    min_count: int = 5,
) -> pd.DataFrame:
    """What a list of the K best types covers, and how stable it is, for every K.

    Stability is the mean Jaccard index of the list with the list from prompts drawn with
    replacement. A resample adds up losses and persistent occurrences anew among the types of
    `ranked`, and ranks by the same score; the context consistency of a type is held at its value
    in the whole sample.

    Args:
        scores: Scores of all types.
        ranked: `rank_types(scores.table, by=by, ...)`.
        rng: Draws the prompts.
        by: The score that made the ranks. Stability is only known for sums of losses:
            `rock_score_ctx`, `persistent_kl`, `rock_score` and `total_kl`.
        k_max: Largest K.
        repeats: Resamples.
        min_count: As given to `rank_types`.

    Returns:
        Columns `k`, `token_id` (the K-th type), `kl_share` (of the total KL of all positions),
        `token_share` (of all positions), `output_share` (the mean over outputs of the share of
        each), `grad_share` (of the summed lengths of ∂KL/∂logits), `stability`, `stability_low`, `stability_high` (2.5 %
        and 97.5 % of the resamples). Stability is NaN if it is not known, and with fewer than
        two prompts.
    """
    import pandas as pd

    k_max = min(k_max, len(ranked))
    top = ranked.head(k_max)
    frame = pd.DataFrame(
        {
            "k": np.arange(1, k_max + 1),
            "token_id": top["token_id"].to_numpy(),
            "kl_share": top["total_kl"].cumsum().to_numpy() / scores.table["total_kl"].sum(),
            "token_share": top["share"].cumsum().to_numpy(),
            "output_share": top["output_share"].cumsum().to_numpy(),
            "grad_share": top["grad_share"].cumsum().to_numpy(),
            "stability": np.nan,
            "stability_low": np.nan,
            "stability_high": np.nan,
        }
    )
    if scores.prompt_kl.shape[0] >= 2 and k_max and by in _RESAMPLED:
        values = _resampled(scores, ranked, rng, by, k_max, repeats, min_count)
        frame["stability"] = values.mean(axis=0)
        frame["stability_low"], frame["stability_high"] = np.quantile(
            values, [0.025, 0.975], axis=0
        )
    return frame


def knee(curve: pd.DataFrame) -> int | None:
    """The K after which more types add little: the knee of `kl_share`.

    Where the curve is furthest above the straight line from K = 0 to its end (Satopää et al., "Finding
    a Kneedle in a Haystack", 2011, without smoothing).

    Args:
        curve: `cutoff_curve(...)`.

    Returns:
        K; None if fewer than three types are ranked, or the curve is nowhere above the line (a
        list that is not ranked by its share).
    """
    share = curve["kl_share"].to_numpy(dtype=np.float64)
    if len(share) < 3 or share[-1] <= 0:
        return None
    above = share / share[-1] - curve["k"].to_numpy() / len(share)
    best = int(np.argmax(above))
    return int(curve["k"].iloc[best]) if above[best] > 1e-12 else None


def _resampled(
    scores: TypeScores,
    ranked: pd.DataFrame,
    rng: np.random.Generator,
    by: str,
    k_max: int,
    repeats: int,
    min_count: int,
) -> NDArray[np.float64]:
    """Jaccard index of the top-K lists with those of each resample. (repeats, k_max)."""
    n_prompts = scores.prompt_kl.shape[0]
    ids = ranked["token_id"].to_numpy()
    persistent, with_context = _RESAMPLED[by]
    loss: Any = (scores.prompt_kl if persistent else scores.prompt_total)[:, ids]
    count: Any = (scores.prompt_count if persistent else scores.prompt_seen)[:, ids]
    factor = np.nan_to_num(ranked["consistency"].to_numpy()) if with_context else np.ones(len(ids))
    ranks = np.arange(1, len(ids) + 1)
    values = np.empty((repeats, k_max))
    for start in range(0, repeats, _REPEATS_AT_ONCE):
        n = min(_REPEATS_AT_ONCE, repeats - start)
        weights = rng.multinomial(n_prompts, np.full(n_prompts, 1 / n_prompts), size=n)
        # (n, types); types that fall below the least count go last.
        again = (loss.T @ weights.T).T * factor
        seen = (count.T @ weights.T).T
        again[seen < min_count] = -1.0
        for row, score in enumerate(again):
            other = np.empty(len(ids), dtype=np.int64)
            other[np.lexsort((ids, -score))] = ranks
            values[start + row] = overlap_of_ranks(ranks, other, k_max)
    return values
