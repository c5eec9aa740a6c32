"""Ranks of token types, and how far down a list is worth taking (the cut-off curve)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from knockout.mining.scores import TypeScores

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["cutoff_curve", "overlap_of_ranks", "rank_types"]

_REPEATS_AT_ONCE = 16


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
        by: The column to rank by; higher is better, ties go to the lower id.
        drop_most_frequent: Leave out this many of the most frequent types.
        min_count: Leave out types with fewer persistent occurrences.
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
    kept = table[~table["token_id"].isin(list(dropped)) & (table["n_persistent"] >= min_count)]
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
    k_max: int = 500,
    repeats: int = 200,
    min_count: int = 5,
) -> pd.DataFrame:
    """What a list of the K best types covers, and how stable it is, for every K.

    Stability is the mean Jaccard index of the list with the list from prompts drawn with
    replacement. A resample counts persistent occurrences and their KL anew and ranks by R_ctx; the
    context consistency of a type is held at its value in the whole sample.

    Args:
        scores: Scores of all types.
        ranked: `rank_types(scores.table, by="rock_score_ctx", ...)`.
        rng: Draws the prompts.
        k_max: Largest K.
        repeats: Resamples.
        min_count: As given to `rank_types`.

    Returns:
        Columns `k`, `token_id` (the K-th type), `kl_share` (of the total KL of all positions),
        `token_share` (of all positions), `stability`, `stability_low`, `stability_high` (2.5 %
        and 97.5 % of the resamples). Stability is NaN with fewer than two prompts.
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
        }
    )
    n_prompts = scores.prompt_kl.shape[0]
    values = np.full((repeats, k_max), np.nan)
    if n_prompts >= 2 and k_max:
        ids = ranked["token_id"].to_numpy()
        kl: Any = scores.prompt_kl[:, ids]
        count: Any = scores.prompt_count[:, ids]
        consistency = np.nan_to_num(ranked["consistency"].to_numpy())
        ranks = np.arange(1, len(ids) + 1)
        for start in range(0, repeats, _REPEATS_AT_ONCE):
            n = min(_REPEATS_AT_ONCE, repeats - start)
            weights = rng.multinomial(n_prompts, np.full(n_prompts, 1 / n_prompts), size=n)
            # (n, types): the resampled R_ctx; types that fall below the least count go last.
            again = (kl.T @ weights.T).T * consistency
            seen = (count.T @ weights.T).T
            again = np.where(seen >= min_count, again, -1.0)
            for row, score in enumerate(again):
                other = np.empty(len(ids), dtype=np.int64)
                other[np.lexsort((ids, -score))] = ranks
                values[start + row] = overlap_of_ranks(ranks, other, k_max)
    if n_prompts >= 2 and k_max:
        low, high = np.quantile(values, [0.025, 0.975], axis=0)
        frame["stability"], frame["stability_low"], frame["stability_high"] = (
            values.mean(axis=0),
            low,
            high,
        )
    else:
        frame["stability"] = frame["stability_low"] = frame["stability_high"] = np.nan
    return frame
