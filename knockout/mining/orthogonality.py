"""Does any cheap score predict a pillar? Rank correlations and AUC, with intervals."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from knockout.errors import UsageError, shortened
from knockout.mining.shared_noise import Moves, noise_factors

if TYPE_CHECKING:
    import pandas as pd

__all__ = [
    "SCORES",
    "Estimate",
    "auc",
    "harm",
    "join_scores",
    "kendall",
    "orthogonality",
    "read_verdicts",
    "spearman",
]

SCORES = (
    "frequency",
    "entropy",
    "mean_kl",
    "rock_score",
    "rock_score_ctx",
    "teacher_gap",
    "efficiency_ratio",
)
"""Scores that are looked at by default, if the file has them."""

_SUMS = {"frequency", "rock_score", "rock_score_ctx", "total_kl", "persistent_kl"}


class Estimate(NamedTuple):
    """A statistic and its interval; NaN if the data say nothing."""

    value: float
    low: float
    high: float
    p_value: float


_NOTHING = Estimate(math.nan, math.nan, math.nan, math.nan)


def spearman(
    x: NDArray[np.float64], y: NDArray[np.float64], level: float = 0.95, factor: float = 1.0
) -> Estimate:
    """Spearman's ρ with an interval on Fisher's z scale.

    The standard error is √((1 + ρ²/2) / (n − 3)) (Bonett and Wright, Psychometrika 65, 2000).

    Args:
        x: (n,).
        y: (n,); pairs with a NaN are left out.
        level: Of the interval.
        factor: How much wider noise scatters than with independent pairs (`noise_factors`); the
            standard error is that many times as large, and the p-value follows it.

    Returns:
        NaN with fewer than 4 pairs, or if one side is constant.
    """
    from scipy.stats import spearmanr

    def error(r: float, n: int) -> float:
        return factor * math.sqrt((1 + r * r / 2) / (n - 3))

    return _correlation(spearmanr, x, y, level, error, 4, factor)


def kendall(
    x: NDArray[np.float64], y: NDArray[np.float64], level: float = 0.95, factor: float = 1.0
) -> Estimate:
    """Kendall's τ_b with an interval on Fisher's z scale.

    The standard error is √(0.437 / (n − 4)) (Fieller, Hartley and Pearson, Biometrika 44, 1957).

    Arguments as for `spearman`.

    Returns:
        NaN with fewer than 5 pairs, or if one side is constant.
    """
    from scipy.stats import kendalltau

    return _correlation(
        kendalltau, x, y, level, lambda _, n: factor * math.sqrt(0.437 / (n - 4)), 5, factor
    )


def _correlation(
    measure: Any, x: Any, y: Any, level: float, error: Any, least: int, factor: float
) -> Estimate:
    from scipy.stats import norm

    x, y = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    known = ~(np.isnan(x) | np.isnan(y))
    x, y = x[known], y[known]
    n = len(x)
    if n < least or (x == x[0]).all() or (y == y[0]).all():
        return _NOTHING
    found = measure(x, y)
    value = float(found.statistic)
    # At ±1 the z scale ends; half a rank's step inside keeps a width.
    bounded = max(-1 + 1 / n**2, min(1 - 1 / n**2, value))
    half = float(norm.ppf((1 + level) / 2)) * error(bounded, n)
    z = math.atanh(bounded)
    low, high = min(math.tanh(z - half), value), max(math.tanh(z + half), value)
    return Estimate(value, low, high, _widened(float(found.pvalue), factor))


def _widened(p_value: float, factor: float) -> float:
    """A two-sided p-value where the standard error is `factor` times as large."""
    from scipy.stats import norm

    return p_value if factor == 1 else float(2 * norm.sf(norm.isf(p_value / 2) / factor))


def auc(
    score: NDArray[np.float64],
    positive: NDArray[np.bool_],
    level: float = 0.95,
    factor: float = 1.0,
) -> Estimate:
    """Area under the ROC curve: the chance that a positive scores higher than a negative.

    The interval is Newcombe's fifth method (Statistics in Medicine 25, 2006, "Confidence intervals
    for an effect size measure based on the Mann-Whitney statistic, part 2"): the areas θ with
    |AUC − θ| ≤ z √V(θ), where V is Hanley and McNeil's variance. It stays inside [0, 1] and keeps a
    width at 0 and 1, where an interval around the estimate has none. The p-value is
    Mann-Whitney's, exact for small samples without ties.

    Args:
        score: (n,); NaN are left out.
        positive: (n,).
        level: Of the interval.
        factor: As in `spearman`.

    Returns:
        NaN if there is no positive or no negative.
    """
    from scipy.optimize import brentq
    from scipy.stats import mannwhitneyu, norm

    score = np.asarray(score, dtype=np.float64)
    known = ~np.isnan(score)
    score, positive = score[known], np.asarray(positive, dtype=bool)[known]
    m, n = int(positive.sum()), int((~positive).sum())
    if not m or not n:
        return _NOTHING
    found = mannwhitneyu(score[positive], score[~positive])
    area = float(found.statistic) / (m * n)
    z2 = (float(norm.ppf((1 + level) / 2)) * factor) ** 2
    half = (m + n) / 2 - 1

    def excess(theta: float) -> float:
        """(AUC − θ)² − z² V(θ): below 0 inside the interval."""
        variance = (
            theta
            * (1 - theta)
            * (1 + half * (1 - theta) / (2 - theta) + half * theta / (1 + theta))
            / (m * n)
        )
        return (area - theta) ** 2 - z2 * variance

    # At an end of [0, 1] the equation has a root at the end itself; the inner one is wanted.
    inside = 1e-12
    low = brentq(excess, 0.0 if area < 1 else inside, min(area, 1 - inside)) if area > 0 else 0.0
    high = brentq(excess, max(area, inside), 1.0 if area > 0 else 1 - inside) if area < 1 else 1.0
    return Estimate(area, float(low), float(high), _widened(float(found.pvalue), factor))


def read_verdicts(folder: Path) -> pd.DataFrame:
    """Reads the verdicts of a run directory.

    Returns:
        The rows of `verdicts.json`, or of `verdicts.csv` if that is missing; `token_ids` as
        lists of ids.

    Raises:
        UsageError: Neither file is there, or it has no verdict.
    """
    import pandas as pd

    try:
        if (folder / "verdicts.json").is_file():
            rows = json.loads((folder / "verdicts.json").read_text(encoding="utf-8"))
            table = pd.DataFrame(rows)
        else:
            table = pd.read_csv(folder / "verdicts.csv")
            ids = table["token_ids"].astype(str).map(lambda text: re.findall(r"\d+", text))
            table["token_ids"] = ids.map(lambda found: [int(i) for i in found])
    except FileNotFoundError:
        raise UsageError(
            f"{folder}: no verdicts.json and no verdicts.csv; expected the directory of a run"
        ) from None
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(f"{folder}: its verdicts cannot be read: {error}") from None
    lacking = {"benchmark", "token_ids", "delta", "verdict"} - set(table.columns)
    if lacking or table.empty:
        found = f"no {', '.join(sorted(lacking))}" if lacking else "no verdict"
        raise UsageError(f"{folder}: found {found} in its verdicts")
    return table


def join_scores(verdicts: pd.DataFrame, scores: pd.DataFrame, names: Sequence[str]) -> pd.DataFrame:
    """Gives each verdict row the scores of its tokens.

    A candidate of several tokens gets the sum of their sums (frequency, rock scores) and the
    frequency-weighted mean of the rest. A token without a row has no score: NaN.

    Args:
        verdicts: Rows of `verdicts.csv`, with `token_ids` as lists of ids.
        scores: `read_scores(...)`.
        names: Columns of `scores` to join.

    Returns:
        A copy of verdicts with those columns.
    """
    table = scores.set_index("token_id")
    joined = verdicts.copy()
    parts = [table.reindex(list(ids)) for ids in verdicts["token_ids"]]
    for name in names:
        values = []
        for part in parts:
            column = part[name].to_numpy(dtype=np.float64)
            if name in _SUMS or len(column) == 1:
                values.append(float(column.sum()))
            elif "frequency" in part:
                weight = part["frequency"].to_numpy(dtype=np.float64)
                values.append(float((column * weight).sum() / weight.sum()))
            else:
                values.append(float(column.mean()))
        joined[name] = values
    return joined


def harm(rows: pd.DataFrame) -> NDArray[np.float64]:
    """How much a ban hurt, in units of its own noise: −sign(Δ) z, z the two-sided p-value's.

    |Δ| must not be ranked: knockouts share their baseline's noise, so |Δ| grows with the number of
    forks, thus with frequency, even if no ban does anything at all. Nor is Δ itself quite safe: its
    spread grows too. In units of its spread all candidates are alike under the null.

    Args:
        rows: With `delta` and `p_value`; −Δ is taken if there are no p-values.

    Returns:
        (n,); NaN if the p-value is missing.
    """
    from scipy.stats import norm

    delta = rows["delta"].to_numpy(dtype=np.float64)
    if "p_value" not in rows:
        return -delta
    p = rows["p_value"].to_numpy(dtype=np.float64)
    z: NDArray[np.float64] = norm.isf(np.clip(p, 1e-300, 1.0) / 2)
    signed: NDArray[np.float64] = -np.sign(delta) * z
    return signed


def orthogonality(
    joined: pd.DataFrame,
    names: Sequence[str],
    *,
    moves: Moves | None = None,
    verdict: str = "verdict",
    level: float = 0.95,
) -> pd.DataFrame:
    """Relates every score to the harm of a ban and to pillarhood, benchmark by benchmark.

    Controls and the A/A row are left out if a column `group` marks them: they were not chosen
    by a score.

    Args:
        joined: `join_scores(...)`.
        names: Scores to look at.
        moves: `read_moves` of the run, to learn what its candidates share of their noise. Without
            it they are taken as independent, which makes the intervals too short.
        verdict: Column that says `strong_pillar`.
        level: Of the intervals.

    Returns:
        A row per benchmark and score: `benchmark`, `score`, `n` (candidates with that score),
        `n_pillars`, `noise_factor` (by which the correlations' intervals are wider than
        those of independent candidates; NaN if unknown); for `spearman` and `kendall` (with
        `harm`: positive if the ban of tokens with a high score hurts) and `auc` (of pillars
        against the rest) the value, `_low`, `_high`, `_p` and `_p_adjusted` (Benjamini-Hochberg over all rows).
        NaN if there is too little to say it, for example no pillar.

    Raises:
        UsageError: A candidate of the verdicts is not in `moves`.
    """
    import pandas as pd

    if "group" in joined:
        joined = joined[joined["group"] == "candidate"]
    rows = []
    for benchmark, part in joined.groupby("benchmark", sort=False):
        effect = harm(part)
        pillar = (part[verdict] == "strong_pillar").to_numpy()
        for name in names:
            score = part[name].to_numpy(dtype=np.float64)
            known = ~np.isnan(score)
            row: dict[str, Any] = {
                "benchmark": benchmark,
                "score": name,
                "n": int(known.sum()),
                "n_pillars": int(pillar[known].sum()),
                "noise_factor": math.nan,
            }
            factor, of_area, own = 1.0, 1.0, (moves or {}).get(str(benchmark))
            if own is not None:
                chosen = part["candidate"][known].astype(str)
                if lacking := sorted(set(chosen) - set(own)):
                    raise UsageError(
                        f"the verdicts name {shortened(', '.join(lacking))} on {benchmark}, which the run's "
                        "ledger does not have; make the verdicts anew with `knockout verdicts`"
                    )
                shared = [own[one] for one in chosen]
                factor, of_area = noise_factors(score[known], shared, row["n_pillars"])
                row["noise_factor"] = factor
            for label, found in (
                ("spearman", spearman(score, effect, level, factor)),
                ("kendall", kendall(score, effect, level, factor)),
                ("auc", auc(score, pillar, level, of_area)),
            ):
                row |= {
                    label: found.value,
                    f"{label}_low": found.low,
                    f"{label}_high": found.high,
                    f"{label}_p": found.p_value,
                }
            rows.append(row)
    table = pd.DataFrame(rows)
    for label in ("spearman", "kendall", "auc") if rows else ():
        place = table.columns.get_loc(f"{label}_p")
        table.insert(int(place) + 1, f"{label}_p_adjusted", _adjusted(table[f"{label}_p"]))  # type: ignore[arg-type]
    return table


def _adjusted(p_values: Any) -> NDArray[np.float64]:
    """Benjamini-Hochberg over the p-values that exist."""
    from scipy.stats import false_discovery_control

    p = np.asarray(p_values, dtype=np.float64)
    known = ~np.isnan(p)
    adjusted = np.full(len(p), np.nan)
    if known.any():
        adjusted[known] = false_discovery_control(p[known])
    return adjusted
