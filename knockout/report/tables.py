"""The ledger's small rows as arrays, and summaries of them. No token is read here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from knockout.ledger import INHERITED, NOT_ASKED, CellKey, Ledger

__all__ = [
    "LOST",
    "SAME",
    "UNGRADED",
    "WON",
    "CellTable",
    "ForkTable",
    "cell_tables",
    "describe_forks",
    "fork_table",
]

LOST, SAME, WON, UNGRADED = -1, 0, 1, 2
"""What a ban did to a grade: right to wrong, nothing, wrong to right, unknown."""

Ints = NDArray[np.int32]
Small = NDArray[np.int8]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class CellTable:
    """The baselines of one benchmark: P problems, S seeds.

    Attributes:
        doc_ids: P of them.
        correct: (P, S) int8, −1 if not graded or missing.
        n_tokens: (P, S) int32, −1 if missing.
        unfinished: (P, S) bool, ran into max_tokens.
        n_asked: (C, S) int32, cells in which a candidate was asked for, by seed.
        n_inherited: (C,) int32.
        inherited_tokens: Lengths of all inherited knockouts added up.
        grades: Number of baselines by the grader's status.
        n_checked, n_coupling_errors: The coupling's self-check.
    """

    doc_ids: tuple[str, ...]
    correct: Small
    n_tokens: Ints
    unfinished: Bools
    n_asked: Ints
    n_inherited: Ints
    inherited_tokens: int
    grades: dict[str, int]
    n_checked: int
    n_coupling_errors: int

    @property
    def there(self) -> Bools:
        """(P, S) which cells are in the ledger and did not fail."""
        return self.n_tokens >= 0


@dataclass(frozen=True, slots=True)
class ForkTable:
    """All forks, sorted by benchmark, candidate, problem, seed: n of them, one array a column.

    Attributes:
        benchmark, candidate, problem, seed: (n,) int32 indices.
        step: (n,) int32, tokens shared with the baseline.
        n_tokens: (n,) int32, of the whole trajectory.
        unfinished: (n,) bool.
        correct: (n,) int8, −1 if not graded.
        grade: (n,) int16 index into `statuses`.
        base_tokens: (n,) int32, the baseline's length.
        base_unfinished: (n,) bool.
        place: (n,) int64, rising, one number for each benchmark and candidate.
        outcome: (n,) int8, `LOST`, `SAME`, `WON` or `UNGRADED`.
        statuses: The grader's statuses.
    """

    benchmark: Ints
    candidate: Ints
    problem: Ints
    seed: Ints
    step: Ints
    n_tokens: Ints
    unfinished: Bools
    correct: Small
    grade: NDArray[np.int16]
    base_tokens: Ints
    base_unfinished: Bools
    place: NDArray[np.int64]
    outcome: Small
    statuses: tuple[str, ...]

    def rows(self, benchmark: int, candidate: int) -> slice:
        """The rows of one candidate's forks on one benchmark."""
        first, last = np.searchsorted(self.place, _place(benchmark, candidate) + np.arange(2))
        return slice(int(first), int(last))

    def key(self, row: int) -> CellKey:
        """The cell of a fork."""
        return CellKey(int(self.benchmark[row]), int(self.problem[row]), int(self.seed[row]))


def cell_tables(ledger: Ledger) -> list[CellTable]:
    """Reads the baselines of every benchmark."""
    n_candidates = len(ledger.candidates)
    tables = []
    for index, benchmark in enumerate(ledger.benchmarks):
        docs = ledger.doc_ids(index)
        rows = ledger.cells(index, failed=False)
        # A run that asks for fewer seeds than before still has the others.
        n_seeds = max([benchmark.n_seeds, *(row.seed + 1 for row in rows)])
        shape = (len(docs), n_seeds)
        correct = np.full(shape, -1, dtype=np.int8)
        n_tokens = np.full(shape, -1, dtype=np.int32)
        unfinished = np.zeros(shape, dtype=bool)
        n_asked = np.zeros((n_candidates, n_seeds), dtype=np.int32)
        n_inherited = np.zeros(n_candidates, dtype=np.int32)
        if rows:
            p, s, finish, right, _, length, own = zip(*rows, strict=True)
            correct[p, s] = [-1 if one is None else one for one in right]
            n_tokens[p, s] = length
            unfinished[p, s] = np.array(finish) == "length"
            steps = np.stack(own)
            for seed in range(n_seeds):
                n_asked[:, seed] = (steps[np.array(s) == seed] != NOT_ASKED).sum(axis=0)
            n_inherited[:] = (steps == INHERITED).sum(axis=0)
        checked, errors, inherited_tokens = ledger.cell_sums(index)
        tables.append(
            CellTable(
                doc_ids=docs,
                correct=correct,
                n_tokens=n_tokens,
                unfinished=unfinished,
                n_asked=n_asked,
                n_inherited=n_inherited,
                inherited_tokens=inherited_tokens,
                grades=ledger.cell_grades(index),
                n_checked=checked,
                n_coupling_errors=errors,
            )
        )
    return tables


def fork_table(ledger: Ledger, cells: list[CellTable]) -> ForkTable:
    """Reads every fork that did not fail."""
    flat, statuses = ledger.fork_array()
    # The ledger's own order has the candidate last; here its forks stand together.
    flat = flat[np.lexsort((flat[:, 3], flat[:, 2], flat[:, 1], flat[:, 0]))]
    b, c, p, s, step, n_tokens, unfinished, correct, grade = flat.T
    base_correct = np.full(len(flat), -1, dtype=np.int8)
    base_tokens = np.zeros(len(flat), dtype=np.int32)
    base_unfinished = np.zeros(len(flat), dtype=bool)
    for index, cell in enumerate(cells):
        own = b == index
        base_correct[own] = cell.correct[p[own], s[own]]
        base_tokens[own] = cell.n_tokens[p[own], s[own]]
        base_unfinished[own] = cell.unfinished[p[own], s[own]]
    graded = (base_correct >= 0) & (correct >= 0)
    outcome = np.where(graded, np.sign(correct - base_correct), UNGRADED).astype(np.int8)
    return ForkTable(
        benchmark=b,
        candidate=c,
        problem=p,
        seed=s,
        step=step,
        n_tokens=n_tokens,
        unfinished=unfinished.astype(bool),
        correct=correct.astype(np.int8),
        grade=grade.astype(np.int16),
        base_tokens=base_tokens,
        base_unfinished=base_unfinished,
        place=_place(b.astype(np.int64), c),
        outcome=outcome,
        statuses=statuses,
    )


def describe_forks(forks: ForkTable, at: slice) -> dict[str, Any]:
    """What the forks of one candidate on one benchmark look like, without their tokens.

    Returns:
        `where`: forks by tenth of the baseline at which they leave it; `step`: quartiles of the
        divergence step; `length`: mean length of baseline and knockout and quartiles of the
        change, in tokens; `unfinished`: of baselines and knockouts; `outcomes`: lost, same, won,
        ungraded; `grades`: knockouts by the grader's status; `lost` and `won`: [problem, seed];
        `lengths`: forks by bins of the change of length.
    """
    step, base = forks.step[at], forks.base_tokens[at]
    n = len(step)
    outcome = forks.outcome[at]
    counts = [int((outcome == kind).sum()) for kind in (LOST, SAME, WON, UNGRADED)]
    tenth = np.minimum((10 * step) // np.maximum(base, 1), 9)
    change = forks.n_tokens[at] - base
    status = np.bincount(forks.grade[at], minlength=len(forks.statuses))
    cells = np.stack([forks.problem[at], forks.seed[at]], axis=1)
    return {
        "n": n,
        "where": np.bincount(tenth, minlength=10).tolist(),
        "step": _quartiles(step),
        "length": {
            "baseline": round(float(base.mean()), 1) if n else None,
            "knockout": round(float(forks.n_tokens[at].mean()), 1) if n else None,
            "change": _quartiles(change),
        },
        "unfinished": [int(forks.base_unfinished[at].sum()), int(forks.unfinished[at].sum())],
        "outcomes": counts,
        "grades": {s: int(k) for s, k in zip(forks.statuses, status, strict=True) if k},
        "lengths": _bins(change),
        "lost": cells[outcome == LOST].tolist(),
        "won": cells[outcome == WON].tolist(),
    }


def _place(benchmark: Any, candidate: Any) -> Any:
    return (benchmark << 32) + candidate


def _bins(values: Ints, most: int = 12) -> list[dict[str, int]]:
    """Counts in at most about `most` bins of a round width, as rows of a figure."""
    if not len(values):
        return []
    spread = max(int(values.max()) - int(values.min()), 1)
    width = next(w * 10**e for e in range(9) for w in (1, 2, 5) if spread / (w * 10**e) <= most)
    places, counts = np.unique(np.floor_divide(values, width), return_counts=True)
    return [
        {"low": int(at) * width, "high": (int(at) + 1) * width, "forks": int(n)}
        for at, n in zip(places, counts, strict=True)
    ]


def _quartiles(values: Ints) -> list[float] | None:
    if not len(values):
        return None
    return [round(float(q), 1) for q in np.quantile(values, [0.25, 0.5, 0.75])]
