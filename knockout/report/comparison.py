"""What the report shows of two runs side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from knockout.report.plain import plain
from knockout.sweep.compare import agreement, compare_runs, setting_differences

__all__ = ["comparison_of"]

_CHANGES = ("reversed", "appeared", "went away", "same", "only in a", "only in b")


def comparison_of(a: Path, b: Path, alpha: float = 0.05) -> dict[str, Any]:
    """Compares a run with another for its report.

    Args:
        a: The run whose report it is.
        b: The other one.
        alpha: Level of intervals and of `supported`.

    Returns:
        `names` of both; `settings` that differ, a line each; `alpha`; `rows` as of `compare_runs`, significant differences first;
        `counts` of each change by benchmark; and `farthest`, the end of both axes.

    Raises:
        UsageError: One is no run, or they have nothing in common.
    """
    names = [folder.resolve().name for folder in (a, b)]
    if names[0] == names[1]:
        names = [f"{name} ({side})" for name, side in zip(names, "AB", strict=True)]
    frame = compare_runs(a, b, alpha=alpha)
    rows = [
        {str(key): plain(value) for key, value in row.items()} for row in frame.to_dict("records")
    ]
    for row in rows:
        row["candidate"] = row["candidate"] or row["candidate_b"]
    rows.sort(
        key=lambda row: (
            not row["supported"],
            _CHANGES.index(row["change"]),
            -abs(row["difference"] or 0.0),
        )
    )
    deltas = [abs(row[key]) for row in rows for key in ("delta_a", "delta_b") if row[key]]
    return {
        "names": names,
        "settings": setting_differences(a, b),
        "alpha": alpha,
        "rows": rows,
        "counts": agreement(frame),
        "farthest": round(1.1 * max(deltas, default=0.01), 4),
    }
