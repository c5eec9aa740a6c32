"""Everything that is read from the ledger, by name: nothing above writes SQL."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from knockout.errors import KnockoutError
from knockout.ledger.codec import unpack_candidate, unpack_ids, unpack_steps
from knockout.ledger.connection import damaged, speaking
from knockout.ledger.rows import Asked, BenchmarkRow, CellKey, ForkTotal
from knockout.tokens.candidates import Candidate

__all__ = ["CellOutcome", "ForkOutcome", "Outcome", "Queries", "Session", "StoredProblem"]

BASELINE = -1


class CellOutcome(NamedTuple):
    """A baseline and its candidates' steps (C,); see `CellRow`."""

    problem: int
    seed: int
    finish: str
    correct: int | None
    grade: str
    n_tokens: int
    steps: NDArray[np.int32]


class ForkOutcome(NamedTuple):
    """A fork without its tokens; `n_tokens` counts the shared prefix."""

    problem: int
    seed: int
    candidate: int
    step: int
    n_tokens: int
    finish: str
    correct: int | None
    grade: str


class Outcome(NamedTuple):
    """One trajectory whole: its own tokens (those after the fork) and what became of it."""

    tokens: NDArray[np.int32]
    step: int
    finish: str
    correct: int | None
    grade: str
    extracted: str | None
    error: str | None


class StoredProblem(NamedTuple):
    """A problem as it was asked: its id, its prompt as text and as ids, and a right answer."""

    doc_id: str
    prompt: str
    prompt_ids: NDArray[np.int32]
    gold: str = ""


class Session(NamedTuple):
    """A process that worked on the run.

    Attributes:
        started: UTC, in ISO form.
        wall_s: Seconds that it worked.
        record: Versions, engine and settings.
    """

    started: str
    wall_s: float
    record: dict[str, Any]


class Queries:
    """The reading half of `Ledger`.

    Attributes:
        path: The file.
        candidates: The run's candidates; a candidate's index is its id in every table.
        benchmarks: The run's benchmarks, likewise.
    """

    path: Path
    candidates: tuple[Candidate, ...]
    benchmarks: tuple[BenchmarkRow, ...]
    _db: sqlite3.Connection

    def query(self, sql: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Runs a SELECT and returns its rows."""
        with speaking(self.path):
            return self._db.execute(sql, parameters).fetchall()

    def chunks(
        self, sql: str, parameters: Sequence[Any] = (), size: int = 100_000
    ) -> Iterator[list[tuple[Any, ...]]]:
        """Runs a SELECT and yields its rows in lists, for tables that may be large."""
        with speaking(self.path):
            cursor = self._db.execute(sql, parameters)
            while rows := cursor.fetchmany(size):
                yield rows

    def meta(self) -> dict[str, str]:
        """What the run was made with: its identity and other settings, as strings."""
        return dict(self.query("SELECT key, value FROM meta"))

    def meta_json(self, key: str, default: Any = None) -> Any:
        """A setting of the run that was written as JSON.

        Raises:
            KnockoutError: It is damaged.
        """
        text = self.meta().get(key)
        if text is None:
            return default
        with damaged(self.path):
            return json.loads(text)

    def asked(self) -> Asked:
        """What the sweep asks for now; everything unless it asks for less than it once did."""
        record = self.meta_json("asked")
        if record is None:
            problems = self.n_problems()
            return Asked(
                tuple(range(len(self.benchmarks))),
                tuple(problems.get(b, 0) for b in range(len(self.benchmarks))),
                tuple(range(len(self.candidates))),
            )
        with damaged(self.path):
            return Asked(**{key: tuple(value) for key, value in record.items()})

    # Problems.

    def doc_ids(self, benchmark: int) -> tuple[str, ...]:
        """The benchmark's own ids of its problems, in order."""
        sql = "SELECT doc_id FROM problem WHERE benchmark = ? ORDER BY problem"
        return tuple(doc_id for (doc_id,) in self.query(sql, (benchmark,)))

    def n_problems(self) -> dict[int, int]:
        """Problems of each benchmark."""
        return dict(self.query("SELECT benchmark, COUNT(*) FROM problem GROUP BY benchmark"))

    def problem(self, benchmark: int, problem: int) -> StoredProblem | None:
        """A problem, or None."""
        rows = self.query(
            "SELECT doc_id, prompt, prompt_ids, gold FROM problem"
            " WHERE benchmark = ? AND problem = ?",
            (benchmark, problem),
        )
        if not rows:
            return None
        with damaged(self.path):
            return StoredProblem(rows[0][0], rows[0][1], unpack_ids(rows[0][2]), rows[0][3])

    # Cells.

    def n_cells(self, seed: int | None = None) -> int:
        """Number of stored baselines, of all seeds or of one."""
        sql = "SELECT COUNT(*) FROM cell WHERE ?1 IS NULL OR seed = ?1"
        return int(self.query(sql, (seed,))[0][0])

    def cell_seeds(self) -> set[int]:
        """What keyed the noise of the stored cells."""
        return {seed for (seed,) in self.query("SELECT cell_seed FROM cell")}

    def cell_seed(self, key: CellKey) -> int | None:
        """What keyed the noise of a cell, or None if it is not stored."""
        return self._of_cell("cell_seed", key)

    def cell_grade(self, key: CellKey) -> int | None:
        """Whether a baseline was right; None if it is missing or was not graded."""
        return self._of_cell("correct", key)

    def has_early(self, key: CellKey) -> bool:
        """Whether any fork of a cell left early because its step could not name all interventions."""
        return bool(self._of_cell("n_early", key))

    def _of_cell(self, column: str, key: CellKey) -> int | None:
        sql = f"SELECT {column} FROM cell WHERE benchmark = ? AND problem = ? AND seed = ?"
        rows = self.query(sql, key)
        return None if not rows or rows[0][0] is None else int(rows[0][0])

    def cells(self, benchmark: int, *, failed: bool = True) -> list[CellOutcome]:
        """The cells of a benchmark, in order of problem and seed."""
        rows = self.query(
            "SELECT problem, seed, finish, correct, grade, n_tokens, steps FROM cell"
            f" WHERE benchmark = ? {'' if failed else EXCEPT_FAILED} ORDER BY problem, seed",
            (benchmark,),
        )
        steps = self._steps([row[-1] for row in rows])
        return [CellOutcome._make((*row[:-1], s)) for row, s in zip(rows, steps, strict=True)]

    def decided(self) -> tuple[list[CellKey], NDArray[np.int32]]:
        """The stored cells, and their candidates' steps (n, C)."""
        rows = self.query("SELECT benchmark, problem, seed, steps FROM cell ORDER BY 1, 2, 3")
        return [CellKey(*row[:3]) for row in rows], self._steps([row[3] for row in rows])

    def failed_cells(self) -> set[CellKey]:
        """Cells on whose baseline the engine failed."""
        rows = self.query("SELECT benchmark, problem, seed FROM cell WHERE finish = 'error'")
        return {CellKey(*row) for row in rows}

    def _steps(self, blobs: list[bytes]) -> NDArray[np.int32]:
        with damaged(self.path):
            return unpack_steps(blobs, len(self.candidates))

    def mean_tokens(self) -> dict[tuple[int, int], float]:
        """Tokens that a cell took on average, its forks' included, by (benchmark, problem)."""
        cells = self.query(
            "SELECT benchmark, problem, COUNT(*), SUM(n_tokens) FROM cell"
            " WHERE finish <> 'error' GROUP BY 1, 2"
        )
        forks = {
            (b, p): tokens
            for b, p, tokens in self.query(
                "SELECT benchmark, problem, SUM(n_tokens - shared) FROM fork GROUP BY 1, 2"
            )
        }
        return {(b, p): (tokens + forks.get((b, p), 0)) / n for b, p, n, tokens in cells}

    def cell_grades(self, benchmark: int) -> dict[str, int]:
        """Number of a benchmark's baselines by status of their grade."""
        sql = "SELECT grade, COUNT(*) FROM cell WHERE benchmark = ? GROUP BY grade ORDER BY grade"
        return dict(self.query(sql, (benchmark,)))

    def cell_sums(self, benchmark: int) -> tuple[int, int, int]:
        """Steps checked, coupling errors, and tokens of inherited knockouts of a benchmark."""
        checked, errors, inherited = self.query(
            "SELECT COALESCE(SUM(n_checked), 0), COALESCE(SUM(n_coupling_errors), 0),"
            " COALESCE(SUM(n_tokens * n_inherited), 0) FROM cell WHERE benchmark = ?",
            (benchmark,),
        )[0]
        return checked, errors, inherited

    def forked_cells(self, candidate: int) -> int:
        """Cells in which a candidate diverges, from the cells alone: forks may be millions."""
        return int(
            self.query(
                "SELECT COUNT(*) FROM cell WHERE length(steps) >= ?1 + 3"
                " AND substr(steps, ?1, 4) NOT IN (x'ffffffff', x'feffffff')",
                (4 * candidate + 1,),
            )[0][0]
        )

    def cells_by_seed(self) -> list[tuple[int, int, int, int]]:
        """(benchmark, seed, stored cells, their forks stored or owed)."""
        sql = "SELECT benchmark, seed, COUNT(*), SUM(n_forks) FROM cell GROUP BY benchmark, seed"
        return [(b, s, n, forks) for b, s, n, forks in self.query(sql)]

    def repeats_equal(self, benchmark: int) -> bool:
        """Whether each problem with several repeats has the same baseline in all of them.

        Lengths nearly always suffice; tokens are read only if all lengths agree, and only up to
        the first problem whose repeats differ.
        """
        repeated = self.query(
            "SELECT problem, MIN(n_tokens), MAX(n_tokens) FROM cell WHERE benchmark = ?"
            " GROUP BY problem HAVING COUNT(*) > 1",
            (benchmark,),
        )
        if not repeated or any(low != high for _, low, high in repeated):
            return False
        for problem, _, _ in repeated:
            kinds = self.query(
                "SELECT COUNT(DISTINCT ids) FROM cell"
                " JOIN generation USING (benchmark, problem, seed)"
                " WHERE benchmark = ? AND problem = ? AND candidate = -1",
                (benchmark, problem),
            )
            if kinds[0][0] > 1:
                return False
        return True

    # Forks.

    def n_forks(self) -> int:
        """Number of stored forks, failed ones included."""
        return sum(total.n for total in self.fork_totals())

    def fork_totals(self) -> list[ForkTotal]:
        """Counts of the forks, without reading them."""
        return [ForkTotal(*row) for row in self.query("SELECT * FROM fork_total WHERE n > 0")]

    def forks(self, benchmark: int, candidate: int | None = None) -> list[ForkOutcome]:
        """The forks of a benchmark, of all candidates or of one."""
        rows = self.query(
            "SELECT problem, seed, candidate, step, n_tokens, finish, correct, grade FROM fork"
            " WHERE benchmark = ?1 AND (?2 IS NULL OR candidate = ?2)",
            (benchmark, candidate),
        )
        return [ForkOutcome(*row) for row in rows]

    def fork_array(self) -> tuple[NDArray[np.int32], tuple[str, ...]]:
        """Every fork that did not fail, as numbers.

        Returns:
            (n, 9): benchmark, candidate, problem, seed, step, tokens, whether it ran into
            max_tokens, correct (−1: not graded), and the place of its status among the second
            value, all statuses.
        """
        found = self.query("SELECT DISTINCT grade FROM fork ORDER BY grade")
        statuses = tuple(status for (status,) in found)
        cases = " ".join(f"WHEN ? THEN {i}" for i in range(len(statuses)))
        sql = (
            "SELECT benchmark, candidate, problem, seed, step, n_tokens, finish = 'length',"
            f" COALESCE(correct, -1), {f'CASE grade {cases} END' if statuses else '0'}"
            " FROM fork WHERE finish <> 'error'"
        )
        parts = [np.array(chunk, dtype=np.int32) for chunk in self.chunks(sql, statuses)]
        return (np.concatenate(parts) if parts else np.empty((0, 9), dtype=np.int32)), statuses

    def unfinished(self) -> dict[CellKey, set[int]]:
        """Cells with forks still owed, and the candidates whose forks are stored."""
        rows = self.query(
            "SELECT benchmark, problem, seed FROM cell WHERE n_forks > (SELECT COUNT(*) FROM fork"
            " WHERE fork.benchmark = cell.benchmark AND fork.problem = cell.problem"
            " AND fork.seed = cell.seed)"
        )
        found = {}
        for row in rows:
            key = CellKey(*row)
            have = self.query(
                "SELECT candidate FROM fork WHERE benchmark = ? AND problem = ? AND seed = ?", key
            )
            found[key] = {candidate for (candidate,) in have}
        return found

    def failed_forks(self) -> dict[CellKey, set[int]]:
        """Forks that the engine failed on."""
        found: dict[CellKey, set[int]] = {}
        if not any(total.finish == "error" for total in self.fork_totals()):
            return found
        for *key, candidate in self.query(
            "SELECT benchmark, problem, seed, candidate FROM fork WHERE finish = 'error'"
        ):
            found.setdefault(CellKey(*key), set()).add(candidate)
        return found

    def failed_before_last_seed(self) -> int:
        """Baselines and forks that failed in seeds before the last one that was begun."""
        sql = (
            "SELECT COUNT(*) FROM {} WHERE finish = 'error' AND seed < (SELECT MAX(seed) FROM cell)"
        )
        return sum(int(self.query(sql.format(table))[0][0]) for table in ("cell", "fork"))

    def changed_grades(self) -> list[tuple[int, int, int, int]]:
        """(candidate, baseline's grade, fork's grade, how many) if the two differ."""
        return [
            (c, before, after, n)
            for c, before, after, n in self.query(
                "SELECT f.candidate, c.correct, f.correct, COUNT(*) FROM fork f"
                " JOIN cell c USING (benchmark, problem, seed)"
                " WHERE c.correct <> f.correct GROUP BY 1, 2, 3"
            )
        ]

    # Audits.

    def audited(self) -> set[tuple[CellKey, int]]:
        """The stored audits."""
        rows = self.query("SELECT benchmark, problem, seed, candidate FROM audit")
        return {(CellKey(b, p, s), c) for b, p, s, c in rows}

    def audits_of(self, key: CellKey) -> list[int]:
        """The candidates of a cell whose audit is stored."""
        rows = self.query(
            "SELECT candidate FROM audit WHERE benchmark = ? AND problem = ? AND seed = ?", key
        )
        return [candidate for (candidate,) in rows]

    def audit_counts(self, candidate: int) -> tuple[int, int]:
        """Audits of a candidate that did not fail, and those of them that differ."""
        n, differ = self.query(
            "SELECT COUNT(*), COALESCE(SUM(differs_at >= 0), 0) FROM audit"
            " WHERE candidate = ? AND finish <> 'error'",
            (candidate,),
        )[0]
        return n, differ

    # Trajectories.

    def trajectory(self, key: CellKey, candidate: int | None = None) -> NDArray[np.int32]:
        """The ids of a baseline, or of a forked or inherited knockout: (T,).

        Raises:
            KnockoutError: It is missing or damaged.
        """
        rows = self.query(
            "SELECT g.candidate, g.ids, COALESCE(f.step, 0) FROM generation g LEFT JOIN fork f"
            " USING (benchmark, problem, seed, candidate)"
            " WHERE g.benchmark = ? AND g.problem = ? AND g.seed = ? AND g.candidate IN (-1, ?)",
            (*key, BASELINE if candidate is None else candidate),
        )
        with damaged(self.path):
            ids = {who: (step, unpack_ids(blob)) for who, blob, step in rows}
        if BASELINE not in ids:
            raise KnockoutError(f"{self.path}: no trajectory for {key}")
        baseline = ids[BASELINE][1]
        if candidate is None or candidate not in ids:
            return baseline
        step, rest = ids[candidate]
        return np.concatenate([baseline[:step], rest])

    def outcome(self, key: CellKey, candidate: int = BASELINE) -> Outcome | None:
        """A whole baseline or fork, or None if it is not stored."""
        fork = candidate != BASELINE
        table, step = ("fork", "t.step") if fork else ("cell", "0")
        also = " AND t.candidate = g.candidate" if fork else ""
        rows = self.query(
            f"SELECT g.ids, {step}, t.finish, t.correct, t.grade, g.extracted, g.error"
            f" FROM generation g JOIN {table} t ON t.benchmark = g.benchmark"
            f" AND t.problem = g.problem AND t.seed = g.seed{also}"
            " WHERE g.benchmark = ? AND g.problem = ? AND g.seed = ? AND g.candidate = ?",
            (*key, candidate),
        )
        if not rows:
            return None
        with damaged(self.path):
            return Outcome._make((unpack_ids(rows[0][0]), *rows[0][1:]))

    def own_tokens(self, key: CellKey, candidate: int = BASELINE) -> NDArray[np.int32]:
        """The ids of a baseline, or of a fork after it left its baseline."""
        rows = self.query(
            "SELECT ids FROM generation"
            " WHERE benchmark = ? AND problem = ? AND seed = ? AND candidate = ?",
            (*key, candidate),
        )
        if not rows:
            raise KnockoutError(f"{self.path}: no trajectory for {key}, candidate {candidate}")
        with damaged(self.path):
            return unpack_ids(rows[0][0])

    def baseline_tokens(self, benchmark: int) -> Iterator[list[NDArray[np.int32]]]:
        """The ids of all baselines of a benchmark, some hundred at a time."""
        sql = "SELECT ids FROM generation WHERE benchmark = ? AND candidate = -1"
        for rows in self.chunks(sql, (benchmark,), size=256):
            with damaged(self.path):
                yield [unpack_ids(blob) for (blob,) in rows]

    # Sessions.

    def sessions(self) -> list[Session]:
        """The processes that worked on the run, in order."""
        rows = self.query("SELECT started, wall_s, record FROM session ORDER BY id")
        with damaged(self.path):
            return [
                Session(started, wall_s, json.loads(record)) for started, wall_s, record in rows
            ]

    def wall_s(self) -> float:
        """Seconds that all sessions worked."""
        return float(self.query("SELECT COALESCE(SUM(wall_s), 0.0) FROM session")[0][0])

    def _read_plan(self) -> None:
        with damaged(self.path):
            rows = self.query(
                'SELECT name, token_ids, tokens, "group", intervention FROM candidate ORDER BY id'
            )
            self.candidates = tuple(unpack_candidate(*row) for row in rows)
        rows = self.query("SELECT name, metric, n_seeds, fingerprint FROM benchmark ORDER BY id")
        self.benchmarks = tuple(BenchmarkRow(*row) for row in rows)


EXCEPT_FAILED = "AND finish <> 'error'"
