"""Control tokens: what a list of candidates is compared with.

Three kinds, each in a column of its own beside the candidate it belongs to:

* `frequency`: a type that the student emits about as often (optimal assignment on log frequency);
* `position`: a type that it emits at about the same place of a response (the same on that place);
* `rank`: the types of rank K + 1 … 2K by the score that made the list.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["KINDS", "draw_controls", "match"]

KINDS = ("frequency", "position", "rank")


def match(
    wanted: NDArray[np.float64], pool: NDArray[np.float64], rng: np.random.Generator
) -> NDArray[np.int64]:
    """Gives each wanted value a partner of its own, all partners together as near as can be.

    The optimal assignment: no other choice of distinct partners has a smaller sum of distances.
    If several have the same, chance decides.

    Args:
        wanted: (n,) values to match.
        pool: (m,) values to choose from.
        rng: Chooses among equals.

    Returns:
        (n,) indices into the pool; −1 if it is used up.
    """
    from scipy.optimize import linear_sum_assignment

    chosen = np.full(len(wanted), -1)
    if not len(wanted) or not len(pool):
        return chosen
    order = rng.permutation(len(pool))
    rows, columns = linear_sum_assignment(np.abs(wanted[:, None] - pool[order][None, :]))
    chosen[rows] = order[columns]
    return chosen


def draw_controls(
    table: pd.DataFrame,
    ranked: pd.DataFrame,
    k: int,
    rng: np.random.Generator,
    *,
    exclude: Sequence[int] = (),
    min_count: int = 5,
) -> pd.DataFrame:
    """Draws one control of each kind for each of the K best types.

    No token is a candidate and a control, and none is a control twice, of whatever kind: any of
    the columns, or all, can stand beside the list in a sweep.

    Args:
        table: `TypeScores.table`.
        ranked: `rank_types(...)`; its first k rows are the candidates.
        k: How many candidates there are.
        rng: Draws the controls.
        exclude: Token ids that may not be drawn, for example special tokens.
        min_count: Least frequency of a drawn type.

    Returns:
        A row per candidate: `rock_id`, and for each kind `<kind>_id` (nullable integers: a
        pool can run out), `<kind>_token`, `<kind>_freq`, `<kind>_mean_kl`, `<kind>_freq_mean`,
        `<kind>_position` (mean place in the response, 0 to 1).
    """
    import pandas as pd

    rocks = ranked.head(k)
    columns: dict[str, object] = {"rock_id": rocks["token_id"].to_numpy()}
    by_rank = ranked.iloc[k : 2 * k]
    taken = {*exclude, *rocks["token_id"], *by_rank["token_id"]}
    for kind in KINDS:
        if kind == "rank":
            drawn = by_rank.reset_index(drop=True).reindex(range(len(rocks)))
        else:
            free = ~table["token_id"].isin(list(taken)) & (table["frequency"] >= min_count)
            pool = table[free].reset_index(drop=True)
            partners = match(_place(rocks, kind), _place(pool, kind), rng)
            drawn = pool.reindex(partners).reset_index(drop=True)
            taken |= set(drawn["token_id"].dropna().astype(int))
        columns[f"{kind}_id"] = drawn["token_id"].astype("Int64")
        columns[f"{kind}_token"] = drawn["token"]
        columns[f"{kind}_freq"] = drawn["frequency"].astype("Int64")
        columns[f"{kind}_mean_kl"] = drawn["mean_kl"]
        columns[f"{kind}_freq_mean"] = drawn["total_kl"]
        columns[f"{kind}_position"] = drawn["mean_position"]
    return pd.DataFrame(columns)


def _place(rows: pd.DataFrame, kind: str) -> NDArray[np.float64]:
    """What a kind is matched on: log frequency, or mean place in the response."""
    column = "frequency" if kind == "frequency" else "mean_position"
    values: NDArray[np.float64] = rows[column].to_numpy(dtype=np.float64)
    return np.log(values) if kind == "frequency" else values
