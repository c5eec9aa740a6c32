"""Opening and writing the ledger. Exactly one process writes; any number may read."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from knockout.errors import KnockoutError, UsageError
from knockout.ledger.codec import pack_ids, pack_steps, safe_text, unpack_ids, unpack_steps
from knockout.ledger.connection import connect, set_journal, speaking, transaction
from knockout.ledger.rows import (
    INHERITED,
    AuditRow,
    BenchmarkRow,
    CellKey,
    CellRow,
    ForkRow,
    ForkTotal,
    ProblemRow,
)
from knockout.ledger.schema import FORK_TOTALS, SCHEMA_VERSION, statements
from knockout.tokens.candidates import Candidate

__all__ = ["Ledger"]

_BASELINE = -1
_LARGE_FILE = 1 << 30


class Ledger:
    """A run's `run.db`.

    Attributes:
        path: The file.
        candidates: The run's candidates; a candidate's index is its id in every table.
        benchmarks: The run's benchmarks, likewise.
        journal_mode: What SQLite answered: "wal", or "delete" on a network file system.
    """

    def __init__(self, path: Path, connection: sqlite3.Connection, journal_mode: str) -> None:
        self.path = path
        self.journal_mode = journal_mode
        self._db = connection
        self._read_plan()

    @classmethod
    def create(
        cls,
        path: Path,
        meta: dict[str, str],
        candidates: Sequence[Candidate],
        benchmarks: Sequence[BenchmarkRow],
        problems: Iterable[ProblemRow],
    ) -> Ledger:
        """Makes a new ledger, whole or not at all.

        Raises:
            KnockoutError: It cannot be written.
        """
        with speaking(path):
            db = connect(path)
            mode = set_journal(db, path)
            with transaction(db):
                for statement in statements():
                    db.execute(statement)
                db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
                db.executemany("INSERT INTO meta VALUES (?, ?)", sorted(meta.items()))
                db.executemany(
                    "INSERT INTO candidate VALUES (?, ?, ?, ?, ?)",
                    [
                        (i, c.name, json.dumps(c.token_ids), json.dumps(c.tokens), c.group)
                        for i, c in enumerate(candidates)
                    ],
                )
                db.executemany(
                    "INSERT INTO benchmark VALUES (?, ?, ?, ?, ?)",
                    [
                        (i, b.name, b.metric, b.n_seeds, b.fingerprint)
                        for i, b in enumerate(benchmarks)
                    ],
                )
                db.executemany(
                    "INSERT INTO problem VALUES (?, ?, ?, ?, ?)",
                    [
                        (
                            p.benchmark,
                            p.problem,
                            p.doc_id,
                            safe_text(p.prompt),
                            pack_ids(p.prompt_ids),
                        )
                        for p in problems
                    ],
                )
            return cls(path, db, mode)

    @staticmethod
    def is_begun(path: Path) -> bool:
        """Whether a ledger was made here; a process killed while making it leaves an empty file."""
        if not path.is_file():
            return False
        with speaking(path):
            db = connect(path, write=False)
            try:
                return bool(db.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()[0])
            finally:
                db.close()

    @classmethod
    def open(cls, path: Path, *, write: bool = False) -> Ledger:
        """Opens an existing ledger, to read it beside a running sweep or to go on writing it.

        Raises:
            UsageError: There is none, or another version of the program made it.
            KnockoutError: It is damaged.
        """
        if not path.is_file():
            raise UsageError(f"{path.parent}: no run here ({path.name} is missing)")
        with speaking(path):
            db = connect(path, write=write)
            found = db.execute("PRAGMA user_version").fetchone()[0]
            if found != SCHEMA_VERSION:
                db.close()
                raise UsageError(
                    f"{path}: the ledger has format {found}; this program reads {SCHEMA_VERSION}. "
                    "Use the version that wrote it, or another --out"
                )
            mode = set_journal(db, path) if write else ""
            ledger = cls(path, db, mode)
            if write and path.stat().st_size < _LARGE_FILE:
                ledger.check()
            return ledger

    def check(self) -> None:
        """Reads every page.

        Raises:
            KnockoutError: The file is damaged.
        """
        with speaking(self.path):
            answer = self._db.execute("PRAGMA integrity_check(3)").fetchall()
            if answer != [("ok",)]:
                raise sqlite3.DatabaseError("; ".join(str(row[0]) for row in answer))

    def close(self) -> None:
        """Closes the file. Harmless when called twice."""
        self._db.close()

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def commit(
        self,
        cells: Sequence[CellRow] = (),
        forks: Sequence[ForkRow] = (),
        audits: Sequence[AuditRow] = (),
    ) -> None:
        """Writes finished work in one transaction.

        Raises:
            KnockoutError: The disk is full or the file damaged; nothing of it is written then.
        """
        generations = [
            (*c.key, _BASELINE, pack_ids(c.tokens), safe_text(c.extracted), safe_text(c.error))
            for c in cells
        ]
        generations += [
            (*f.key, f.candidate, pack_ids(f.tokens), safe_text(f.extracted), safe_text(f.error))
            for f in forks
        ]
        with speaking(self.path), transaction(self._db) as db:
            db.executemany(
                f"INSERT INTO cell VALUES ({_marks(14)})", [_cell_values(c) for c in cells]
            )
            db.executemany(
                f"INSERT INTO fork VALUES ({_marks(10)})",
                [
                    (
                        *f.key, f.candidate, f.step, f.finish, f.step + len(f.tokens),
                        f.correct, f.grade, int(f.respelled),
                    )
                    for f in forks
                ],
            )  # fmt: skip
            db.executemany(f"INSERT INTO generation VALUES ({_marks(7)})", generations)
            db.executemany(
                f"INSERT INTO audit VALUES ({_marks(9)})",
                [
                    (
                        *a.key, a.candidate, a.differs_at, len(a.tokens), a.finish,
                        pack_ids(a.tokens) if a.differs_at >= 0 else None, safe_text(a.error),
                    )
                    for a in audits
                ],
            )  # fmt: skip

    def regrade(
        self, grades: Sequence[tuple[CellKey, int | None, int | None, str, str | None]]
    ) -> None:
        """Replaces grades: (cell, candidate or None for its baseline, correct, status, extracted)."""
        with speaking(self.path), transaction(self._db) as db:
            for key, candidate, correct, status, extracted in grades:
                table, where, place = "cell", "", tuple(key)
                if candidate is not None:
                    table, where, place = "fork", " AND candidate = ?", (*key, candidate)
                db.execute(
                    f"UPDATE {table} SET correct = ?, grade = ?"
                    f" WHERE benchmark = ? AND problem = ? AND seed = ?{where}",
                    (correct, status, *place),
                )
                db.execute(
                    "UPDATE generation SET extracted = ?"
                    " WHERE benchmark = ? AND problem = ? AND seed = ? AND candidate = ?",
                    (safe_text(extracted), *key, _BASELINE if candidate is None else candidate),
                )

    def forget_failures(self) -> int:
        """Deletes what the engine failed on, so that it is owed again; returns how many rows."""
        with speaking(self.path), transaction(self._db) as db:
            n = 0
            # A cell without a baseline has neither forks nor audits.
            for table in ("cell", "fork"):
                candidate = "-1" if table == "cell" else f"{table}.candidate"
                db.execute(
                    "DELETE FROM generation WHERE EXISTS (SELECT 1 FROM"
                    f" {table} WHERE finish = 'error' AND {table}.benchmark = generation.benchmark"
                    f" AND {table}.problem = generation.problem AND {table}.seed = generation.seed"
                    f" AND {candidate} = generation.candidate)"
                )
                n += db.execute(f"DELETE FROM {table} WHERE finish = 'error'").rowcount
            return n + db.execute("DELETE FROM audit WHERE finish = 'error'").rowcount

    def meta(self) -> dict[str, str]:
        """What the run was made with: its identity and other settings, as strings."""
        return dict(self.query("SELECT key, value FROM meta"))

    def note(self, key: str, value: str) -> None:
        """Writes a setting of the run, over one that is there."""
        with speaking(self.path), transaction(self._db) as db:
            db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, value))

    def add_session(self, started: str, host: str, pid: int) -> int:
        """Notes that a process begins to work; returns the session's number."""
        with speaking(self.path), transaction(self._db) as db:
            row = db.execute(
                "INSERT INTO session (started, wall_s, host, pid, record) VALUES (?, 0.0, ?, ?, '{}')",
                (started, host, pid),
            )
            return int(row.lastrowid or 0)

    def describe_session(self, session: int, record: dict[str, Any]) -> None:
        """Notes what a session runs with: versions, engine, settings."""
        with speaking(self.path), transaction(self._db) as db:
            text = json.dumps(record, sort_keys=True, default=str)
            db.execute("UPDATE session SET record = ? WHERE id = ?", (text, session))

    def set_wall(self, session: int, wall_s: float) -> None:
        """Notes how long a session has worked, in seconds."""
        with speaking(self.path), transaction(self._db) as db:
            db.execute("UPDATE session SET wall_s = ? WHERE id = ?", (wall_s, session))

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

    def decided(self) -> tuple[list[CellKey], NDArray[np.int32]]:
        """The cells that are there, and their candidates' steps (n, C)."""
        rows = self.query("SELECT benchmark, problem, seed, steps FROM cell ORDER BY 1, 2, 3")
        keys = [CellKey(*row[:3]) for row in rows]
        return keys, unpack_steps([row[3] for row in rows], len(self.candidates))

    def mean_tokens(self) -> dict[tuple[int, int], float]:
        """Tokens that a cell took on average, its forks' included, by (benchmark, problem)."""
        cells = self.query(
            "SELECT benchmark, problem, COUNT(*), SUM(n_tokens) FROM cell"
            " WHERE finish <> 'error' GROUP BY 1, 2"
        )
        forks = {
            (b, p): tokens
            for b, p, tokens in self.query(
                "SELECT benchmark, problem, SUM(n_tokens - step) FROM fork GROUP BY 1, 2"
            )
        }
        return {(b, p): (tokens + forks.get((b, p), 0)) / n for b, p, n, tokens in cells}

    def unfinished(self) -> dict[CellKey, set[int]]:
        """Cells with forks still owed, and the candidates whose forks are there."""
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

    def fork_totals(self) -> list[ForkTotal]:
        """Counts of the forks, without reading them."""
        sql = f"SELECT {FORK_TOTALS} FROM fork GROUP BY 1, 2, 3, 4"
        # Ledgers made before this table do not have it; there the forks are read after all.
        if self.query("SELECT 1 FROM sqlite_master WHERE name = 'fork_total'"):
            sql = "SELECT * FROM fork_total WHERE n > 0"
        return [ForkTotal(*row) for row in self.query(sql)]

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

    def audited(self) -> set[tuple[CellKey, int]]:
        """The audits that are there."""
        rows = self.query("SELECT benchmark, problem, seed, candidate FROM audit")
        return {(CellKey(b, p, s), c) for b, p, s, c in rows}

    def audits_of(self, key: CellKey) -> list[int]:
        """The candidates of a cell whose audit is there."""
        rows = self.query(
            "SELECT candidate FROM audit WHERE benchmark = ? AND problem = ? AND seed = ?", key
        )
        return [candidate for (candidate,) in rows]

    def trajectory(self, key: CellKey, candidate: int | None = None) -> NDArray[np.int32]:
        """The ids of a baseline, or of a knockout whether forked or inherited: (T,).

        Raises:
            KnockoutError: It is not there, or damaged.
        """
        with speaking(self.path):
            rows = self._db.execute(
                "SELECT g.candidate, g.ids, COALESCE(f.step, 0) FROM generation g LEFT JOIN fork f"
                " USING (benchmark, problem, seed, candidate)"
                " WHERE g.benchmark = ? AND g.problem = ? AND g.seed = ? AND g.candidate IN (-1, ?)",
                (*key, _BASELINE if candidate is None else candidate),
            ).fetchall()
        try:
            ids = {who: (step, unpack_ids(blob)) for who, blob, step in rows}
        except ValueError as error:
            raise KnockoutError(f"{self.path}: {key}: {error}") from None
        if _BASELINE not in ids:
            raise KnockoutError(f"{self.path}: no trajectory for {key}")
        baseline = ids[_BASELINE][1]
        if candidate is None or candidate not in ids:
            return baseline
        step, rest = ids[candidate]
        return np.concatenate([baseline[:step], rest])

    def _read_plan(self) -> None:
        rows = self.query('SELECT name, token_ids, tokens, "group" FROM candidate ORDER BY id')
        self.candidates = tuple(
            Candidate(name, tuple(json.loads(ids)), tuple(json.loads(texts)), group)
            for name, ids, texts, group in rows
        )
        rows = self.query("SELECT name, metric, n_seeds, fingerprint FROM benchmark ORDER BY id")
        self.benchmarks = tuple(BenchmarkRow(*row) for row in rows)


def _cell_values(cell: CellRow) -> tuple[Any, ...]:
    n_inherited = int((cell.steps == INHERITED).sum())
    n_forks = int((cell.steps >= 0).sum())
    return (
        *cell.key, cell.cell_seed, cell.finish, len(cell.tokens), cell.correct, cell.grade,
        n_inherited, n_forks, cell.n_early, cell.n_checked, cell.n_coupling_errors,
        pack_steps(cell.steps),
    )  # fmt: skip


def _marks(n: int) -> str:
    return ", ".join("?" * n)
