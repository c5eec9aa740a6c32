"""Rows that compare knockouts: doses of a penalty, and pairs with their members."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from knockout.ledger import Ledger, grade_cubes
from knockout.report.plain import plain
from knockout.verdicts.interactions import build_interactions

__all__ = ["doses", "pairs"]


def pairs(ledger: Ledger, alpha: float) -> list[dict[str, Any]]:
    """Rows of `Run.interactions`, with the candidate's number `c`; none if a run has no pairs.

    Args:
        ledger: The run's.
        alpha: 1 − the confidence level of the intervals.
    """
    if not any(candidate.members for candidate in ledger.candidates):
        return []
    frame = build_interactions(grade_cubes(ledger), alpha)
    at = {candidate.name: index for index, candidate in enumerate(ledger.candidates)}
    return [
        {**{str(key): plain(value) for key, value in row.items()}, "c": at[row["pair"]]}
        for row in frame.to_dict("records")
    ]


def doses(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of the dose-response figure: the penalties of each set of ids, and its ban last."""
    by_ids: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        by_ids.setdefault((row["benchmark"], *row["token_ids"]), []).append(row)
    out = []
    for own in by_ids.values():
        strengths = [row for row in own if (row.get("strength") or 0) == (row.get("strength") or 0)]
        if not any(row.get("strength") for row in strengths):
            continue
        strengths.sort(key=lambda row: row.get("strength") or math.inf)
        label = next((r["candidate"] for r in own if not r.get("strength")), own[0]["candidate"])
        for order, row in enumerate(strengths):
            strength = row.get("strength")
            out.append(
                {
                    "benchmark": row["benchmark"],
                    "label": label,
                    "strength": f"{strength:g}" if strength else "ban",
                    "order": order,
                    "delta": plain(row["delta"]),
                    "low": plain(row["ci_low"]),
                    "high": plain(row["ci_high"]),
                }
            )
    return out
