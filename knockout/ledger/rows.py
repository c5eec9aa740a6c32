"""The rows of the ledger, as the scheduler makes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "INHERITED",
    "NOT_ASKED",
    "NO_ROOM",
    "Asked",
    "AuditRow",
    "BenchmarkRow",
    "CellKey",
    "CellRow",
    "ExtendedCell",
    "ForkRow",
    "ForkTotal",
    "ProblemRow",
]

INHERITED = -1
"""Step of a knockout that is its baseline."""
NOT_ASKED = -2
"""Step of a candidate that was settled before the cell, came after it, or whose baseline failed."""


NO_ROOM = "no room"
"""Status of a cell whose prompt leaves no room for an answer."""


@dataclass(frozen=True, slots=True)
class Asked:
    """The part of a ledger that its sweep asks for now; the rest was asked for before and stays.

    Attributes:
        benchmarks: Indices, in the sweep's order.
        problems: How many problems of each of them; the first ones.
        candidates: Indices, in the sweep's order.
    """

    benchmarks: tuple[int, ...]
    problems: tuple[int, ...]
    candidates: tuple[int, ...]


class CellKey(NamedTuple):
    """A cell: indices of benchmark and problem, and the repeat."""

    benchmark: int
    problem: int
    seed: int


@dataclass(frozen=True, slots=True)
class BenchmarkRow:
    """A benchmark of the run.

    Attributes:
        name: Unique.
        metric: What the grade is.
        n_seeds: Planned repeats.
        fingerprint: Hash of its documents, prompts and metric.
    """

    name: str
    metric: str
    n_seeds: int
    fingerprint: str


@dataclass(frozen=True, slots=True)
class ProblemRow:
    """A problem: its place, the benchmark's own id for it, its prompt as text and as (n,) ids.

    `gold` is what a right answer is, for people to read; "" if the grader cannot say.
    """

    benchmark: int
    problem: int
    doc_id: str
    prompt: str
    prompt_ids: NDArray[np.int32]
    gold: str = ""


@dataclass(frozen=True, slots=True)
class CellRow:
    """A finished baseline, and what became of every candidate in its cell.

    Attributes:
        key: The cell.
        cell_seed: What keys its noise.
        tokens: (T,) the trajectory.
        finish: "stop", "length" or "error".
        correct: 1, 0, or None if it was not graded.
        grade: The grader's status.
        extracted: The answer that was graded.
        error: Why it failed.
        steps: (C,) int32 divergence steps, `INHERITED` or `NOT_ASKED`.
        n_early: Forks at a step where a difference could only not be excluded.
        n_checked: Forks whose first own token was compared with the baseline's.
        n_coupling_errors: Those that begin with the same token, so they left at the wrong step.
    """

    key: CellKey
    cell_seed: int
    tokens: NDArray[np.int32]
    finish: str
    correct: int | None
    grade: str
    extracted: str | None
    error: str | None
    steps: NDArray[np.int32]
    n_early: int = 0
    n_checked: int = 0
    n_coupling_errors: int = 0


@dataclass(frozen=True, slots=True)
class ExtendedCell:
    """A stored cell that has now asked more candidates.

    Attributes:
        key: The cell.
        steps: (C,) int32, of all candidates, old and new.
        n_early: Forks of the new ones at a step where a difference could only not be excluded.
    """

    key: CellKey
    steps: NDArray[np.int32]
    n_early: int = 0


@dataclass(frozen=True, slots=True)
class ForkRow:
    """A finished knockout trajectory; see `CellRow`.

    Attributes:
        candidate: Index of the candidate.
        step: Tokens shared with the baseline.
        tokens: (T − step,) the ids after the fork.
        respelled: Whether the decoded text encodes to ids with a banned one among them. The ban
            worked on ids, but a reader of the text may still see the token.
        parent: The candidate whose fork it left, for a pair; −1 for the baseline.
        shared: Tokens that it did not generate; None for `step`. A pair shares more with its
            parent than with the baseline, at most all of it.
        watched: Pairs of this candidate that it may be the parent of, and the step at which each
            leaves it; `INHERITED` if it never does.
    """

    key: CellKey
    candidate: int
    step: int
    tokens: NDArray[np.int32]
    finish: str
    correct: int | None
    grade: str
    extracted: str | None
    error: str | None
    respelled: bool = False
    parent: int = -1
    shared: int | None = None
    watched: Mapping[int, int] = field(default_factory=dict)


class ForkTotal(NamedTuple):
    """How many forks of a benchmark and seed ended one way and were graded one way.

    Attributes:
        benchmark, seed, finish, grade: Which forks.
        n: How many.
        n_tokens: Their tokens, with the shared prefix.
        n_shared: Of them those that were not generated for it.
        respelled: See `ForkRow`.
    """

    benchmark: int
    seed: int
    finish: str
    grade: str
    n: int
    n_tokens: int
    n_shared: int
    respelled: int


@dataclass(frozen=True, slots=True)
class AuditRow:
    """A knockout generated again from scratch.

    Attributes:
        differs_at: First step at which its ids differ from the fork's (or the baseline's, if
            it was inherited), −1 if all are equal.
        tokens: (T,) what came out.
        finish: "stop", "length" or "error".
        error: Why it failed.
    """

    key: CellKey
    candidate: int
    differs_at: int
    tokens: NDArray[np.int32]
    finish: str
    error: str | None
