"""From type scores to the files of a mining run: the list, its controls, the cut-off curve."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from knockout.errors import KnockoutError, UsageError
from knockout.files import atomic_path, write_text
from knockout.mining.controls import draw_controls
from knockout.mining.ranking import PERSISTENT, cutoff_curve, knee, rank_types
from knockout.mining.scores import TypeScores

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["PUBLISHED", "ListSettings", "make_lists", "write_table"]

PUBLISHED = {
    "rock_id": "token_id",
    "rock_token": "token",
    "rock_freq": "frequency",
    "rock_mean_kl": "mean_kl",
    "rock_freq_mean": "rock_score",
}
"""Columns of published rock lists, and ours that they hold. `rock_freq_mean` is the product of
frequency and mean KL. The same with `ctrl_` are the frequency-matched control beside it."""


@dataclass(frozen=True, slots=True)
class ListSettings:
    """What turns type scores into a list; changing it repeats no forward pass.

    Attributes:
        top: Length of the list, K.
        by: Score to rank by.
        drop_most_frequent: Leave out this many of the most frequent types.
        min_count: Least number of occurrences of a listed type, persistent ones if the score is
            about those.
        seed: Draws the controls and the resamples.
        keep_special: Whether special tokens may be listed.
    """

    top: int = 100
    by: str = "rock_score_ctx"
    drop_most_frequent: int = 0
    min_count: int = 5
    seed: int = 0
    keep_special: bool = False

    def __post_init__(self) -> None:
        if self.top < 1:
            raise UsageError(f"top is {self.top}; expected 1 or more")
        if self.drop_most_frequent < 0 or self.min_count < 1:
            raise UsageError(
                f"drop_most_frequent is {self.drop_most_frequent} and min_count {self.min_count}; "
                "expected 0 or more and 1 or more"
            )


def make_lists(
    out: Path,
    scores: TypeScores,
    settings: ListSettings,
    special_ids: Sequence[int],
    summary: dict[str, Any],
) -> pd.DataFrame:
    """Writes scores, list, controls, cut-off curve and summary into a run's folder.

    Args:
        out: The folder.
        scores: Scores of all types.
        settings: How to rank.
        special_ids: Special tokens; neither candidates nor controls unless wanted.
        summary: What else `summary.json` says.

    Returns:
        The list, as in `rocks.csv`.

    Raises:
        UsageError: There is no such score.
        KnockoutError: No type is left to list.
    """
    from knockout.figures.write import write_figure
    from knockout.mining.plots import cutoff_figure, rows_of

    exclude = [] if settings.keep_special else list(special_ids)
    # First of all, so that a run in which nothing qualifies shows why.
    write_table(out / "token_scores", scores.table)
    try:
        ranked = rank_types(
            scores.table,
            by=settings.by,
            drop_most_frequent=settings.drop_most_frequent,
            min_count=settings.min_count,
            exclude=exclude,
        )
    except ValueError as error:
        raise UsageError(f"list.by: {error}") from None
    if ranked.empty:
        kind = "occurrences of high loss" if settings.by in PERSISTENT else "occurrences"
        raise KnockoutError(
            f"no token type has {settings.by} and {settings.min_count} {kind} (rock_score_ctx "
            "needs them in two prompts): give more prompts or rollouts, or a smaller "
            f"list.min_count; what every type has is in {out / 'token_scores.csv'}"
        )
    controls_rng, resample_rng = np.random.default_rng(settings.seed).spawn(2)
    controls = draw_controls(
        scores.table,
        ranked,
        settings.top,
        controls_rng,
        exclude=exclude,
        min_count=settings.min_count,
    )
    curve = cutoff_curve(scores, ranked, resample_rng, by=settings.by, min_count=settings.min_count)
    rocks = _published(ranked.head(settings.top), controls)
    write_table(out / "rocks", rocks)
    write_table(out / "controls", controls)
    top = min(settings.top, len(curve))
    write_figure(cutoff_figure(top, knee(curve)), rows_of(curve), out / "cutoff.html")
    _summarise(out / "summary.json", scores, settings, ranked, rocks, curve, summary)
    return rocks


def _published(rocks: pd.DataFrame, controls: pd.DataFrame) -> pd.DataFrame:
    """The list with published column names in front, the frequency-matched control beside it."""
    import pandas as pd

    ours = {value: name for name, value in PUBLISHED.items()}
    front = rocks[list(ours)].rename(columns=ours)
    beside = controls[[f"frequency_{x}" for x in ("id", "token", "freq", "mean_kl", "freq_mean")]]
    beside = beside.rename(columns=lambda name: name.replace("frequency_", "ctrl_", 1))
    rest = rocks.drop(columns=list(ours))
    return pd.concat([front, beside, rest], axis=1)


def write_table(stem: Path, table: pd.DataFrame) -> None:
    """Writes a table as CSV and as Parquet, each whole or not at all."""
    write_text(stem.with_suffix(".csv"), table.to_csv(index=False))
    with atomic_path(stem.with_suffix(".parquet")) as partial:
        table.to_parquet(partial, index=False)


def _summarise(
    path: Path,
    scores: TypeScores,
    settings: ListSettings,
    ranked: pd.DataFrame,
    rocks: pd.DataFrame,
    curve: pd.DataFrame,
    summary: dict[str, Any],
) -> None:
    """Writes what a reader wants to know first, as JSON."""
    table = scores.table
    n = int(table["frequency"].sum())
    last = curve.iloc[min(settings.top, len(curve)) - 1]

    def mean(column: str) -> float:
        return float((table[column] * table["frequency"]).sum() / n)

    facts: dict[str, Any] = {
        **summary,
        "list": asdict(settings),
        "n_positions": n,
        "n_types": len(table),
        "n_rankable": len(ranked),
        "n_listed": len(rocks),
        "threshold_kl": scores.threshold,
        "threshold_kl_before": scores.threshold_before,
        "mean_kl": mean("mean_kl"),
        "mean_kl_before": mean("mean_kl_before") if "mean_kl_before" in table else None,
        "mean_entropy": mean("entropy"),
        "agreement": mean("agreement"),
        "listed_share_of_kl": float(last["kl_share"]),
        "listed_share_of_tokens": float(last["token_share"]),
        "listed_share_of_an_output": float(last["output_share"]),
        "listed_share_of_gradient_norm": float(last["grad_share"]),
        "knee": knee(curve),
        "list_stability": None if np.isnan(last["stability"]) else float(last["stability"]),
    }
    write_text(path, json.dumps(facts, indent=2, ensure_ascii=False) + "\n")
