"""What needs the ledger's tokens: frequencies, replacements, and pairs of trajectories."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from knockout.ledger import CellKey, Ledger
from knockout.report.tables import LOST, SAME, UNGRADED, WON, ForkTable

__all__ = [
    "MOST_REPLACEMENTS",
    "PairKey",
    "frequencies",
    "most_common",
    "outcome_of",
    "pair",
    "replacements",
    "some_rows",
]

PairKey = tuple[int, int, int, int]
"""Benchmark, problem, seed, candidate."""

# Replacements are counted on at most this many forks of a candidate on a benchmark.
MOST_REPLACEMENTS = 200
_SHOWN_REPLACEMENTS = 12


def frequencies(ledger: Ledger, width: int = 0) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """How often each candidate occurs in the baselines.

    Args:
        ledger: The run's.
        width: At least as many ids are counted.

    Returns:
        (B, C) occurrences of a candidate's tokens, and (B,) tokens of all baselines.
    """
    ids = [np.array(c.token_ids, dtype=np.int64) for c in ledger.candidates]
    width = max([width, *(int(own.max()) + 1 for own in ids)])
    found = np.zeros((len(ledger.benchmarks), len(ids)), dtype=np.int64)
    total = np.zeros(len(ledger.benchmarks), dtype=np.int64)
    for b in range(len(ledger.benchmarks)):
        counts = np.zeros(width, dtype=np.int64)
        for chunk in ledger.baseline_tokens(b):
            tokens = np.concatenate(chunk)
            here = np.bincount(tokens, minlength=width)
            counts += here[:width]
            total[b] += len(tokens)
        found[b] = [counts[own].sum() for own in ids]
    return found, total


def outcome_of(baseline: int | None, knockout: int | None) -> str:
    """What a ban did to a grade: "lost", "same", "won", or "ungraded"."""
    if baseline is None or knockout is None:
        return "ungraded"
    return ("lost", "same", "won")[1 + knockout - baseline]


def some_rows(at: slice, most: int) -> NDArray[np.int64]:
    """At most so many row numbers of a slice, spread evenly."""
    n = at.stop - at.start
    chosen = min(n, most)
    return np.asarray(at.start + (np.arange(chosen) * n) // max(chosen, 1), dtype=np.int64)


def replacements(
    ledger: Ledger, forks: ForkTable, rows: Sequence[int] | NDArray[np.int64]
) -> dict[tuple[int, int], Counter[tuple[int, int, int]]]:
    """Which token stood at the fork, which one the knockout picked, and what became of the grade.

    Args:
        ledger: The run's.
        forks: Its forks.
        rows: Those that are looked at.

    Returns:
        By (benchmark, candidate): counts of (baseline's token, knockout's token, outcome as in
        `ForkTable`); token −1 is the end of the trajectory.
    """
    found: dict[tuple[int, int], Counter[tuple[int, int, int]]] = {}
    by_cell = sorted(rows, key=lambda row: (forks.key(int(row)), int(row)))
    at: CellKey | None = None
    baseline = np.empty(0, dtype=np.int32)
    for row in by_cell:
        key = forks.key(int(row))
        if key != at:
            at, baseline = key, ledger.own_tokens(key)
        candidate = int(forks.candidate[row])
        rest = ledger.own_tokens(key, candidate)
        step = int(forks.step[row])
        before = int(baseline[step]) if step < len(baseline) else -1
        after = int(rest[0]) if len(rest) else -1
        found.setdefault((key.benchmark, candidate), Counter())[
            before, after, int(forks.outcome[row])
        ] += 1
    return found


def most_common(counts: Counter[tuple[int, int, int]]) -> dict[str, Any]:
    """The most frequent replacements, with the number of forks that were looked at.

    Returns:
        `n`, and `top`: [before, after, count, lost, same, won, ungraded] for each.
    """
    totals: Counter[tuple[int, int]] = Counter()
    for (before, after, _), n in counts.items():
        totals[before, after] += n
    ranked = sorted(totals.items(), key=lambda item: (-item[1], item[0]))
    kinds = (LOST, SAME, WON, UNGRADED)
    return {
        "n": sum(counts.values()),
        "top": [
            [*pair, n, *(counts.get((*pair, kind), 0) for kind in kinds)]
            for pair, n in ranked[:_SHOWN_REPLACEMENTS]
        ],
    }


def side(ledger: Ledger, key: CellKey, candidate: int) -> dict[str, Any] | None:
    """One trajectory's own tokens, grade and end; `candidate` −1 is the baseline."""
    found = ledger.outcome(key, candidate)
    if found is None:
        return None
    values = found._asdict()
    return {"ids": values.pop("tokens").tolist(), **values}


def problem(ledger: Ledger, key: CellKey) -> dict[str, Any] | None:
    """A problem's id, prompt and right answer."""
    found = ledger.problem(key.benchmark, key.problem)
    if found is None:
        return None
    return {
        "doc_id": found.doc_id,
        "prompt": found.prompt,
        "ids": found.prompt_ids.tolist(),
        "gold": found.gold,
    }


def pair(ledger: Ledger, key: PairKey) -> dict[str, Any] | None:
    """A baseline and one of its knockouts, or None if the ledger lacks them.

    An inherited knockout has `knockout: None`; so has candidate −1, which asks for the baseline
    alone.
    """
    cell, candidate = CellKey(*key[:3]), key[3]
    baseline, about = side(ledger, cell, -1), problem(ledger, cell)
    if baseline is None or about is None:
        return None
    knockout = side(ledger, cell, candidate) if candidate >= 0 else None
    return {"key": list(key), "problem": about, "baseline": baseline, "knockout": knockout}
