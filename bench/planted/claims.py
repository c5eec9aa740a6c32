"""What the loop says about the published claims, each with its number and interval."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy import stats

__all__ = ["MARGIN", "answer", "paired", "write_claims"]

MARGIN = 0.02
"""Loss of Pass@1 that counts as nothing."""

_RESAMPLES = 2000
_MEASURES = ("pass1", "kl", "kl_not_ever_frozen")


def answer(low: float, high: float, *, holds_above: float, fails_below: float) -> str:
    """Yes if the whole interval is above the one, no if below the other, else undecided."""
    if low > holds_above:
        return "yes"
    return "no" if high < fails_below else "undecided"


def paired(arms: pd.DataFrame, arm: str, other: str, measure: str) -> tuple[float, float, float]:
    """Mean difference between two arms over their common seeds, with its 95 % t interval.

    Args:
        arms: Columns `arm`, `seed` and the measure.
        arm: The one.
        other: What is taken off.
        measure: Column.

    Returns:
        Mean, lower and upper end; the ends are NaN with fewer than two seeds.
    """
    table = arms.pivot_table(index="seed", columns="arm", values=measure)
    if arm not in table or other not in table:
        return math.nan, math.nan, math.nan
    d = (table[arm] - table[other]).dropna()
    if len(d) < 2:
        return (float(d.mean()) if len(d) else math.nan), math.nan, math.nan
    half = float(stats.sem(d) * stats.t.ppf(0.975, len(d) - 1))
    return float(d.mean()), float(d.mean()) - half, float(d.mean()) + half


def _over_types(
    table: pd.DataFrame, statistic: Callable[[pd.DataFrame], float]
) -> tuple[float, float, float]:
    """A statistic of a table of types, with a 95 % bootstrap interval over types."""
    rng = np.random.default_rng(0)
    draws = (rng.integers(len(table), size=len(table)) for _ in range(_RESAMPLES))
    values = [statistic(table.iloc[chosen]) for chosen in draws]
    finite: NDArray[np.float64] = np.array([v for v in values if math.isfinite(v)])
    low, high = np.quantile(finite, [0.025, 0.975]) if len(finite) else (math.nan, math.nan)
    return statistic(table), float(low), float(high)


def _rank_correlation(table: pd.DataFrame) -> float:
    if table["score"].nunique() < 2 or table["delta"].nunique() < 2:
        return math.nan
    return float(stats.spearmanr(table["score"], -table["delta"]).statistic)


def _stays(table: pd.DataFrame) -> float:
    """How much more of their early KL the rocks keep, in log: rocks minus other types."""
    kept = np.log(table["kl"] / table["kl_before"])
    return float(kept[table["rock"]].mean() - kept[~table["rock"]].mean())


def _types(work: Path) -> pd.DataFrame:
    """A row per type that was swept: its score, its loss early and late, and its verdict."""
    rows = json.loads((work / "sweep" / "verdicts.json").read_text("utf-8"))
    swept = pd.DataFrame(
        {
            "id": row["token_ids"][0],
            "token": row["candidate"],
            "delta": row["delta"],
            "low": row["ci_low"],
            "high": row["ci_high"],
            "verdict": row["verdict"],
            "evidence": row["evidence"],
        }
        for row in rows
        if row["benchmark"] != "pooled"
    )
    mined = pd.read_csv(work / "mined" / "token_scores.csv")
    scores = pd.DataFrame(
        {
            "id": mined["token_id"],
            "frequency": mined["frequency"],
            "score": mined["rock_score_ctx"].fillna(0.0),
            "kl": mined["mean_kl"],
            "kl_before": mined["mean_kl_before"],
        }
    )
    table = swept.merge(scores, on="id", how="left")
    rocks = pd.read_csv(work / "mined" / "rocks.csv")["rock_id"]
    table.insert(2, "rock", table["id"].isin(rocks))
    return table.sort_values(["rock", "delta"], ascending=[False, True], ignore_index=True)


def _claims(types: pd.DataFrame, arms: pd.DataFrame) -> list[tuple[str, str, str]]:
    """(claim, answer, number) of each."""
    rocks = types[types["rock"]]
    called = int(rocks["verdict"].isin(["strong_pillar", "strong_stumbling_block"]).sum())
    neutral = int((rocks["evidence"] == "equivalent").sum())
    most = "undecided"
    if 2 * neutral > len(rocks):
        most = "yes"
    elif 2 * called > len(rocks):
        most = "no"
    kinds = rocks["verdict"].value_counts()
    told = (
        f"of {len(rocks)}: {kinds.get('strong_pillar', 0)} pillars, "
        f"{kinds.get('strong_stumbling_block', 0)} stumbling blocks, {neutral} shown within "
        f"±{MARGIN}, {len(rocks) - called - neutral} undetermined"
    )
    found = [("Most rocks are neutral", most, told)]
    mean, low, high = paired(arms, "rocks", "all", "pass1")
    free = answer(low, high, holds_above=-MARGIN, fails_below=0.0)
    found.append(
        ("Freezing them costs nothing (Pass@1)", free, f"{mean:+.3f} [{low:+.3f}, {high:+.3f}]")
    )
    mean, low, high = paired(arms, "rocks", "all", "kl_not_ever_frozen")
    free = answer(-high, -low, holds_above=-0.02, fails_below=0.0)
    found.append(
        (
            "Freezing them costs nothing (KL of tokens that no arm froze, margin .02 nats)",
            free,
            f"{mean:+.4f} [{low:+.4f}, {high:+.4f}]",
        )
    )
    known = types.dropna(subset=["score", "delta"])
    r, low, high = _over_types(known, _rank_correlation)
    blind = "undecided"
    if low > 0 or high < 0:
        blind = "no"
    elif low > -0.3 and high < 0.3:
        blind = "yes"
    found.append(
        (
            "Scores do not predict pillars",
            blind,
            f"Spearman of score and −Δ over {len(known)} types {r:+.2f} [{low:+.2f}, {high:+.2f}]",
        )
    )
    both = types[(types["kl"] > 0) & (types["kl_before"] > 0)]
    ratio, low, high = _over_types(both, _stays)
    stay = answer(low, high, holds_above=0.0, fails_below=0.0)
    found.append(
        (
            "Rocks stagnate: their KL falls by a smaller factor than that of other types",
            stay,
            f"factor {math.exp(ratio):.2f} [{math.exp(low):.2f}, {math.exp(high):.2f}] of theirs",
        )
    )
    return found


def write_claims(work: Path, out: Path, arms: pd.DataFrame, settings: dict[str, Any]) -> None:
    """Writes report.md, loop.json, types.csv and arms.csv."""
    types = _types(work)
    types.round(5).to_csv(out / "types.csv", index=False)
    arms.round(5).to_csv(out / "arms.csv", index=False)
    lists = json.loads((work / "lists.json").read_text("utf-8"))
    names = dict(zip(types["id"], types["token"], strict=True))
    claims = _claims(types, arms)
    lines = ["| claim | answer | number [95 %] |", "| --- | --- | --- |"]
    lines += [f"| {claim} | {said} | {number} |" for claim, said, number in claims]
    lines += [
        "",
        "| arm | seeds | frozen | Pass@1 | minus `all` | KL | minus `all` | KL, never frozen | "
        "minus `all` |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for arm, rows in arms.groupby("arm", sort=False):
        cells = [str(arm), str(len(rows))]
        listed = "rocks" if arm == "random" else str(arm)
        share = arms.get(f"share_{listed}")
        reference = arms["arm"] == "all"
        cells.append("" if share is None else f"{share[reference].mean():.0%}")
        for measure in _MEASURES:
            cells.append(f"{rows[measure].mean():.3f}")
            mean, low, high = paired(arms, str(arm), "all", measure)
            known = arm != "all" and math.isfinite(low)
            cells.append(f"{mean:+.3f} [{low:+.3f}, {high:+.3f}]" if known else "")
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", "Frozen types:", ""]
    for name, ids in lists.items():
        lines.append(f"* {name}: {' '.join(str(names.get(i, i)) for i in ids) or 'none'}")
    kl = json.loads((work / "opd" / "history.json").read_text("utf-8"))["kl"]
    tenth = max(1, len(kl) // 8)
    course = [round(float(np.mean(kl[i : i + tenth])), 3) for i in range(0, len(kl), tenth)]
    lines += ["", f"KL while distilling, means of {tenth} steps: {course}"]
    (out / "report.md").write_text("\n".join(lines) + "\n", "utf-8")
    facts = {
        "settings": settings,
        "seconds": json.loads((work / "stages.json").read_text("utf-8")),
        "lists": lists,
        "claims": [{"claim": c, "answer": a, "number": n} for c, a, n in claims],
        "kl_of_steps": course,
    }
    (out / "loop.json").write_text(json.dumps(facts, indent=1) + "\n", "utf-8")
