"""Which trajectories go into the report's one file: as many as fit, the informative ones first."""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from knockout.ledger import Ledger
from knockout.report.source import RunView
from knockout.report.tables import LOST, SAME, WON
from knockout.report.trajectories import PairKey, outcome_of, pair

__all__ = ["Sample", "pack", "sample_pairs"]


_SAME_TURNS = 2


@dataclass(slots=True)
class Sample:
    """Trajectories chosen for the file.

    Attributes:
        baselines: "b.p.s" to the problem and its baseline.
        knockouts: Candidate to its pairs' knockouts.
        tokens: All ids that occur.
        n_forks: Forks that the run has.
        size: Bytes that the pairs take in the file.
    """

    baselines: dict[str, dict[str, Any]] = field(default_factory=dict)
    knockouts: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    tokens: set[int] = field(default_factory=set)
    n_forks: int = 0
    size: int = 0

    @property
    def n_pairs(self) -> int:
        """How many pairs were chosen."""
        return sum(len(pairs) for pairs in self.knockouts.values())


def pack(value: Any) -> str:
    """A value as JSON, compressed, in base64: about a fifth of its size.

    Contains no markup characters and no time stamp, so equal data give equal bytes.
    """
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    raw = gzip.compress(text.encode("utf-8", "backslashreplace"), compresslevel=6, mtime=0)
    return base64.b64encode(raw).decode("ascii")


def sample_pairs(run: RunView, ledger: Ledger, budget: int) -> Sample:
    """Chooses pairs until their packed size reaches a budget.

    In turns: each turn gives every row of the verdict table its next lost pair, its next won one
    and, in the first turns and once no changed ones are left, one where nothing changed; rows
    with small p-values come first.

    Args:
        run: The run.
        ledger: Its ledger.
        budget: Bytes in the file.
    """
    sample = Sample(n_forks=len(run.forks.step))
    queues = [queue for row in _order(run, ledger) if (queue := _queue(run, *row))]
    turn = 0
    while queues and sample.size < budget:
        changes_left = any(queue[LOST] or queue[WON] for queue in queues)
        for queue in queues:
            for key in _turn(queue, turn < _SAME_TURNS or not changes_left):
                if sample.size < budget:
                    _take(sample, ledger, key)
        queues = [queue for queue in queues if any(queue.values())]
        turn += 1
    return sample


def _order(run: RunView, ledger: Ledger) -> Iterator[tuple[int, int]]:
    """(benchmark, candidate) by rising p-value."""
    forks = run.forks
    names = {benchmark.name: index for index, benchmark in enumerate(ledger.benchmarks)}
    by_name = {candidate.name: index for index, candidate in enumerate(ledger.candidates)}
    rows = [row for row in run.rows if row["benchmark"] in names]
    rows.sort(key=lambda row: (np.nan_to_num(row["p_value"], nan=2.0), row["delta"]))
    for row in rows:
        b, c = names[row["benchmark"]], by_name[row["candidate"]]
        if (at := forks.rows(b, c)).stop > at.start:
            yield b, c


def _queue(run: RunView, benchmark: int, candidate: int) -> dict[int, list[PairKey]]:
    """The pairs of a row by outcome, the next one last; first those in the lowest problems."""
    forks = run.forks
    at = forks.rows(benchmark, candidate)
    queue: dict[int, list[PairKey]] = {}
    for outcome in (LOST, WON, SAME):
        rows = at.start + np.flatnonzero(forks.outcome[at] == outcome)
        # The same few cells for all candidates: their baselines are then stored once.
        rows = rows[np.lexsort((forks.problem[rows], forks.seed[rows]))]
        queue[outcome] = [(*forks.key(int(row)), candidate) for row in rows[::-1]]
    return queue


def _turn(queue: dict[int, list[PairKey]], take_same: bool) -> Iterator[PairKey]:
    for outcome in (LOST, WON, SAME):
        if queue[outcome] and (outcome != SAME or take_same):
            yield queue[outcome].pop()


def _take(sample: Sample, ledger: Ledger, key: PairKey) -> None:
    found = pair(ledger, key)
    if found is None or found["knockout"] is None:
        return
    name = ".".join(map(str, key[:3]))
    if name not in sample.baselines:
        cell = {"problem": found["problem"], "baseline": found["baseline"]}
        sample.baselines[name] = cell
        sample.size += len(pack(cell))
        sample.tokens.update(cell["baseline"]["ids"], cell["problem"]["ids"])
    knockout = found["knockout"]
    right = found["baseline"]["correct"], knockout["correct"]
    entry = {"key": list(key), "outcome": outcome_of(*right), **knockout}
    sample.knockouts.setdefault(key[3], []).append(entry)
    # It takes less together with similar ones: this is an upper bound.
    sample.size += len(pack(knockout))
    sample.tokens.update(knockout["ids"])
