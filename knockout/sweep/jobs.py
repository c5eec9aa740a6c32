"""The requests of a sweep while they wait, run or are graded, and the texts they become."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from knockout.ledger import AuditRow, CellKey, ForkRow
from knockout.sweep.owed import Owed

__all__ = ["Cell", "Divergences", "Job", "Snapshot", "first_difference"]

NO_TOKENS: NDArray[np.int32] = np.empty(0, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """How far this session is, for a display.

    Attributes:
        cells, forks: Done, earlier sessions included.
        waiting: Forks and audits that wait for a place.
        running, grading: Requests in the engine, answers in the grader.
        tokens: Generated in this session.
        leading: The candidates whose bans lost the most answers so far, net, with how many.
    """

    cells: int
    forks: int
    waiting: int
    running: int
    grading: int
    tokens: int
    leading: tuple[tuple[str, int], ...] = ()


class Standing:
    """Answers that each candidate's ban lost so far, less those it won."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._net = [0] * len(names)

    def count(self, candidate: int, baseline: int | None, knockout: int | None, n: int = 1) -> None:
        """Adds n pairs of grades; a pair with a missing one counts nothing."""
        if baseline is not None and knockout is not None:
            self._net[candidate] += n * (baseline - knockout)

    def leading(self, most: int = 3) -> tuple[tuple[str, int], ...]:
        """The candidates that lost the most, at least one answer each."""
        order = sorted(range(len(self._net)), key=lambda c: (-self._net[c], c))[:most]
        return tuple((self._names[c], self._net[c]) for c in order if self._net[c] > 0)


class Divergences(NamedTuple):
    """Where each candidate leaves a baseline: (C,) int32 steps, −1 for never; (C,) bool, early."""

    step: NDArray[np.int32]
    early: NDArray[np.bool_]


@dataclass(slots=True)
class Cell:
    """A cell that is being worked on; forks wait with their rows until its own is written.

    `early` says which of the steps could not be excluded for lack of room; None if that is no longer
    known (a cell of an earlier session).
    """

    key: CellKey
    asked: NDArray[np.bool_]
    audited: NDArray[np.bool_]
    tokens: NDArray[np.int32] = field(default_factory=lambda: NO_TOKENS)
    steps: NDArray[np.int32] = field(default_factory=lambda: NO_TOKENS)
    early: NDArray[np.bool_] | None = None
    correct: int | None = None
    written: bool = False
    owed: Owed | None = None  # what waits for a replay
    rows: list[ForkRow | AuditRow] = field(default_factory=list)
    pairs: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Pairs that wait for the fork of a member, by that member."""
    left: dict[int, dict[int, int]] = field(default_factory=dict)
    """By member, where its pairs leave its fork (−1: never), until that is written."""


@dataclass(frozen=True, slots=True)
class Job:
    """A request that waits, runs or is being graded.

    A pair may leave the fork of one of its members: then `parent` is that candidate and `prefix`
    the part of its trajectory that they share; `step` is still where it leaves the baseline.
    """

    cell: Cell
    kind: Literal["baseline", "replay", "fork", "audit"]
    candidate: int = -1
    step: int = 0
    reference: NDArray[np.int32] = field(default_factory=lambda: NO_TOKENS)
    parent: int = -1
    prefix: NDArray[np.int32] = field(default_factory=lambda: NO_TOKENS)

    @property
    def shared(self) -> NDArray[np.int32]:
        """The tokens that it does not have to generate."""
        return self.cell.tokens[: self.step] if self.parent < 0 else self.prefix

    @property
    def key(self) -> str:
        b, p, s = self.cell.key
        return f"{b}.{p}.{s}.{self.kind}.{self.candidate}"


def first_difference(one: NDArray[np.int32], other: NDArray[np.int32]) -> int:
    """First index at which two trajectories differ (a shorter one differs at its end), or −1."""
    n = min(len(one), len(other))
    differing = np.flatnonzero(one[:n] != other[:n])
    if len(differing):
        return int(differing[0])
    return -1 if len(one) == len(other) else n
