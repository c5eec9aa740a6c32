"""Grades of one benchmark as arrays: what the ledger hands to the statistics."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from knockout.tokens.candidates import Candidate

__all__ = ["GradeCube"]


@dataclass(frozen=True, slots=True)
class GradeCube:
    """0/1 grades of one benchmark: P problems, S seeds, C candidates.

    Attributes:
        benchmark: Its name.
        candidates: C of them; the order is the order of the table.
        problem_ids: P of them.
        seeds: S repeats. Their order is the order of the rounds when the sweep is adaptive.
        baseline: (P, S) int8, 1 right, 0 wrong, −1 missing.
        knockout: (C, P, S) int8, the same; an inherited cell carries its baseline's grade.
        forked: (C, P, S) bool, True if a knockout trajectory was generated, False if it
            was inherited. Only read if there is a knockout grade.

    Raises:
        ValueError: if shapes or values do not fit; the message names the array.
    """

    benchmark: str
    candidates: tuple[Candidate, ...]
    problem_ids: tuple[str, ...]
    seeds: tuple[int, ...]
    baseline: NDArray[np.int8]
    knockout: NDArray[np.int8]
    forked: NDArray[np.bool_]

    def __post_init__(self) -> None:
        c, p, s = len(self.candidates), len(self.problem_ids), len(self.seeds)
        for name, array, shape in (
            ("baseline", self.baseline, (p, s)),
            ("knockout", self.knockout, (c, p, s)),
            ("forked", self.forked, (c, p, s)),
        ):
            if array.shape != shape:
                raise ValueError(
                    f"{self.benchmark}: {name} has shape {array.shape}; "
                    f"candidates, problems and seeds make {shape}"
                )
        for name, grades in (("baseline", self.baseline), ("knockout", self.knockout)):
            if grades.dtype != np.int8:
                raise ValueError(f"{self.benchmark}: {name} is {grades.dtype}, expected int8")
            if grades.size and (grades.min() < -1 or grades.max() > 1):
                raise ValueError(f"{self.benchmark}: {name} has a grade other than 0, 1 and −1")
        if self.forked.dtype != np.bool_:
            raise ValueError(f"{self.benchmark}: forked is {self.forked.dtype}, expected bool")
        names = [candidate.name for candidate in self.candidates]
        if len(set(names)) < len(names):
            twice = sorted({name for name in names if names.count(name) > 1})
            raise ValueError(f"{self.benchmark}: candidate names occur twice: {', '.join(twice)}")
