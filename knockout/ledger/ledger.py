"""Opening and writing the ledger. Exactly one process writes; any number may read."""

from __future__ import annotations

import json
import os
import sqlite3
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

from knockout.errors import KnockoutError, UsageError
from knockout.ledger.check import wrong_checksums
from knockout.ledger.checksum import insert, install, update
from knockout.ledger.codec import (
    pack_candidate,
    pack_ids,
    pack_steps,
    pack_watched,
    safe_text,
)
from knockout.ledger.connection import connect, set_journal, speaking, transaction
from knockout.ledger.place import Place
from knockout.ledger.queries import BASELINE
from knockout.ledger.rows import (
    INHERITED,
    NO_ROOM,
    AuditRow,
    BenchmarkRow,
    CellKey,
    CellRow,
    ExtendedCell,
    ForkRow,
    ProblemRow,
)
from knockout.ledger.schema import SCHEMA_VERSION, upgrade
from knockout.ledger.whole_rows import WholeRows
from knockout.tokens.candidates import Candidate

__all__ = ["Ledger"]

_LARGE_FILE = 1 << 30
# A copy of `run.db` without its journal lacks at most what was written since.
_CHECKPOINT_EVERY_S = 10.0

Grading = tuple[CellKey, int | None, int | None, str, str | None]
"""Cell, candidate (None: its baseline), correct, status, extracted."""


class Ledger(WholeRows):
    """A run's `run.db`; its queries are in `Queries`.

    Attributes:
        journal_mode: What SQLite answered: "wal", or "delete" on a network file system; "" for
            a reader.
    """

    def __init__(self, path: Path, connection: sqlite3.Connection, journal_mode: str) -> None:
        self.path = path
        self.journal_mode = journal_mode
        self._db = connection
        self._place = Place(path, journal_mode) if journal_mode else None
        self._checkpointed = time.monotonic()
        self._read_plan()

    @classmethod
    def create(
        cls,
        path: Path,
        meta: Mapping[str, str],
        candidates: Sequence[Candidate],
        benchmarks: Sequence[BenchmarkRow],
        problems: Iterable[ProblemRow],
    ) -> Ledger:
        """Makes a new ledger, whole or not at all: it gets its name when its plan is in it.

        Raises:
            KnockoutError: It cannot be written.
        """
        begun = path.with_name(f"{path.name}.part")
        try:
            with speaking(path):
                begun.unlink(missing_ok=True)
                with closing(connect(begun)) as db, transaction(db):
                    upgrade(db, 0)
                    insert(db, "meta", sorted(meta.items()))
                    _add_plan(db, candidates, benchmarks, problems)
                os.replace(begun, path)
        except OSError as error:
            raise KnockoutError(f"{path}: cannot be written: {error.strerror}") from None
        finally:
            begun.unlink(missing_ok=True)
        return cls.open(path, write=True)

    @staticmethod
    def is_begun(path: Path) -> bool:
        """Whether a ledger lies here, whole or not.

        Raises:
            UsageError: Only its journal is left, so that beginning anew would hide a loss.
        """
        journal = path.with_name(f"{path.name}-wal")
        if not path.exists() and journal.is_file() and journal.stat().st_size:
            raise UsageError(
                f"{path}: the ledger is missing, but its {journal.name} is here. Put the ledger "
                "back, or give another --out"
            )
        return path.exists()

    @classmethod
    def open(cls, path: Path, *, write: bool = False) -> Ledger:
        """Opens an existing ledger, to read it during a sweep or to continue writing it.

        One of an older version is upgraded: in place by a writer, in a private copy by a reader.

        Raises:
            UsageError: There is none, or a later version of the program made it.
            KnockoutError: It is damaged.
        """
        if not path.is_file():
            raise UsageError(f"{path.parent}: no run here ({path.name} is missing)")
        with speaking(path):
            db = connect(path, write=write)
            try:
                found = _version(db, path)
                if found < SCHEMA_VERSION and not write:
                    db = _copy(db)
                mode = set_journal(db, path) if write else ""
                if write and path.stat().st_size < _LARGE_FILE:
                    _check(db)
                if found < SCHEMA_VERSION:
                    with transaction(db):
                        upgrade(db, found)
                return cls(path, db, mode)
            except BaseException:
                db.close()
                raise

    def check(self) -> None:
        """Reads every page.

        Raises:
            KnockoutError: The file is damaged.
        """
        with speaking(self.path):
            _check(self._db)

    def close(self) -> None:
        """Closes the file. Harmless when called twice."""
        self._db.close()

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            # What makes no sense to a reader may be a row that is not as it was written.
            if isinstance(error, ValueError | TypeError | LookupError | ArithmeticError):
                with speaking(self.path):
                    if found := next(wrong_checksums(self), None):
                        raise KnockoutError(
                            f"{self.path}: the ledger is damaged ({found}). Put back a copy of "
                            "it, or run with another --out"
                        ) from error
        finally:
            self.close()

    def in_place(self) -> None:
        """Makes sure that what is written here still reaches the file of this name.

        Raises:
            KnockoutError: The file, its journal or its folder was deleted, moved or replaced; the
                message says where what was committed is now.
        """
        if self._place is not None:
            self._place.check(self._db)

    def checkpoint(self) -> None:
        """Moves what is in the journal into the file, as far as readers let it."""
        if self.journal_mode == "wal":
            with speaking(self.path):
                self._db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
        self._checkpointed = time.monotonic()

    def commit(
        self,
        cells: Sequence[CellRow] = (),
        forks: Sequence[ForkRow] = (),
        audits: Sequence[AuditRow] = (),
        extended: Sequence[ExtendedCell] = (),
        checks: Mapping[CellKey, tuple[int, int]] | None = None,
    ) -> None:
        """Writes finished work in one transaction.

        Args:
            cells: Finished baselines.
            forks: Finished knockouts of stored cells or of `cells`.
            audits: Knockouts that were run again.
            extended: Cells that now ask more.
            checks: Forks checked since, and coupling errors found, to be added to their cells.

        Raises:
            KnockoutError: The disk is full, or the file damaged or gone; nothing of it is written
                then.
        """
        self.in_place()
        generations = [
            (*c.key, BASELINE, pack_ids(c.tokens), safe_text(c.extracted), safe_text(c.error))
            for c in cells
        ]
        generations += [
            (*f.key, f.candidate, pack_ids(f.tokens), safe_text(f.extracted), safe_text(f.error))
            for f in forks
        ]
        with speaking(self.path), transaction(self._db) as db:
            insert(db, "cell", [_cell_values(c) for c in cells])
            for row in extended:
                _extend_cell(db, row)
            for key, (checked, errors) in (checks or {}).items():
                _add_checks(db, key, checked, errors)
            insert(db, "fork",
                [
                    (
                        *f.key, f.candidate, f.step, f.finish, f.step + len(f.tokens),
                        f.correct, f.grade, int(f.respelled), f.parent,
                        f.step if f.shared is None else f.shared, pack_watched(f.watched),
                    )
                    for f in forks
                ],
            )  # fmt: skip
            insert(db, "generation", generations)
            insert(db, "audit",
                [
                    (
                        *a.key, a.candidate, a.differs_at, len(a.tokens), a.finish,
                        pack_ids(a.tokens) if a.differs_at >= 0 else None, safe_text(a.error),
                    )
                    for a in audits
                ],
            )  # fmt: skip
        if time.monotonic() - self._checkpointed >= _CHECKPOINT_EVERY_S:
            self.checkpoint()

    def extend(
        self,
        candidates: Sequence[Candidate] = (),
        benchmarks: Sequence[BenchmarkRow] = (),
        problems: Iterable[ProblemRow] = (),
        seeds: Mapping[int, int] | None = None,
        meta: Mapping[str, str] | None = None,
        replanned: Mapping[int, BenchmarkRow] | None = None,
        renamed: Mapping[int, Candidate] | None = None,
    ) -> None:
        """Appends to what the run asks; nothing stored changes its index.

        Args:
            candidates: New ones; stored cells have not asked them.
            benchmarks: New ones.
            problems: With the indices that they get.
            seeds: Planned repeats by index of the benchmark.
            meta: Settings of the run that change with it.
            replanned: Stored benchmarks that have other seeds or more problems now.
            renamed: Stored candidates that have another name, group or pair now.
        """
        with speaking(self.path), transaction(self._db) as db:
            at = (len(self.candidates), len(self.benchmarks))
            for index in renamed or {}:  # so that two of them can swap their names
                update(db, "candidate", {"name": f"\x00{index}"}, "id = ?", (index,))
            for index, candidate in (renamed or {}).items():
                names = ("name", "token_ids", "tokens", "group", "intervention")
                values = dict(zip(names, pack_candidate(candidate), strict=True))
                values = {f'"{name}"': value for name, value in values.items()}
                update(db, "candidate", values, "id = ?", (index,))
            for index, benchmark_row in (replanned or {}).items():
                update(db, "benchmark", asdict(benchmark_row), "id = ?", (index,))
            _add_plan(db, candidates, benchmarks, problems, at)
            for benchmark, n_seeds in (seeds or {}).items():
                update(db, "benchmark", {"n_seeds": n_seeds}, "id = ?", (benchmark,))
            insert(db, "meta", sorted((meta or {}).items()), replace=True)
        self._read_plan()

    def regrade(self, grades: Sequence[Grading]) -> None:
        """Replaces grades; nothing is generated anew."""
        with speaking(self.path), transaction(self._db) as db:
            cell = "benchmark = ? AND problem = ? AND seed = ?"
            fork = f"{cell} AND candidate = ?"
            for key, candidate, correct, status, extracted in grades:
                table, where, place = "cell", cell, tuple(key)
                if candidate is not None:
                    table, where, place = "fork", fork, (*key, candidate)
                update(db, table, {"correct": correct, "grade": status}, where, place)
                place = (*key, BASELINE if candidate is None else candidate)
                update(db, "generation", {"extracted": safe_text(extracted)}, fork, place)

    def forget_failures(self, *, last_seed_only: bool = False) -> int:
        """Deletes what the engine failed on, so that it is owed again; returns how many rows.

        A prompt that leaves no room for an answer was never given to the engine, and stays.

        Args:
            last_seed_only: Of the last seed that was begun alone.
        """
        failed = f"finish = 'error' AND grade <> '{NO_ROOM}'"
        if last_seed_only:
            failed += " AND seed = (SELECT MAX(seed) FROM cell)"
        with speaking(self.path), transaction(self._db) as db:
            n = 0
            # A cell without a baseline has neither forks nor audits.
            for table in ("cell", "fork"):
                candidate = "-1" if table == "cell" else f"{table}.candidate"
                db.execute(
                    "DELETE FROM generation WHERE EXISTS (SELECT 1 FROM"
                    f" {table} WHERE {failed} AND {table}.benchmark = generation.benchmark"
                    f" AND {table}.problem = generation.problem AND {table}.seed = generation.seed"
                    f" AND {candidate} = generation.candidate)"
                )
                n += db.execute(f"DELETE FROM {table} WHERE {failed}").rowcount
            return n + db.execute("DELETE FROM audit WHERE finish = 'error'").rowcount

    def forget_cell(self, key: CellKey) -> None:
        """Deletes a cell with its forks and audits, so that it is owed again."""
        with speaking(self.path), transaction(self._db) as db:
            for table in ("cell", "fork", "generation", "audit"):
                db.execute(
                    f"DELETE FROM {table} WHERE benchmark = ? AND problem = ? AND seed = ?", key
                )

    def note(self, key: str, value: str) -> None:
        """Writes a setting of the run; replaces an existing one."""
        with speaking(self.path), transaction(self._db) as db:
            insert(db, "meta", [(key, value)], replace=True)

    def add_session(self, started: str, host: str, pid: int) -> int:
        """Notes that a process begins to work; returns the session's number."""
        with speaking(self.path), transaction(self._db) as db:
            number = int(db.execute("SELECT COALESCE(MAX(id), 0) + 1 FROM session").fetchone()[0])
            insert(db, "session", [(number, started, 0.0, host, pid, "{}")])
            return number

    def copy_sessions(self, other: WholeRows) -> None:
        """Adds the sessions of another ledger."""
        rows = other.query("SELECT started, wall_s, host, pid, record FROM session ORDER BY id")
        with speaking(self.path), transaction(self._db) as db:
            there = int(db.execute("SELECT COALESCE(MAX(id), 0) FROM session").fetchone()[0])
            insert(db, "session", [(there + n, *row) for n, row in enumerate(rows, start=1)])

    def describe_session(self, session: int, record: dict[str, Any]) -> None:
        """Notes what a session runs with: versions, engine, settings."""
        self._set_session(session, "record", json.dumps(record, sort_keys=True, default=str))

    def set_wall(self, session: int, wall_s: float) -> None:
        """Notes how long a session has worked, in seconds."""
        self._set_session(session, "wall_s", float(wall_s))

    def _set_session(self, session: int, column: str, value: str | float) -> None:
        with speaking(self.path), transaction(self._db) as db:
            update(db, "session", {column: value}, "id = ?", (session,))


def _version(db: sqlite3.Connection, path: Path) -> int:
    """The format of a ledger that this program can read."""
    found = int(db.execute("PRAGMA user_version").fetchone()[0])
    if not db.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()[0]:
        raise KnockoutError(
            f"{path}: the ledger is empty: a copy made without its {path.name}-wal, or damaged. "
            "Put back a whole copy, or give another --out"
        )
    if not 1 <= found <= SCHEMA_VERSION:
        raise UsageError(
            f"{path}: the ledger has format {found}; this program reads 1 to {SCHEMA_VERSION}. "
            "Use the version that wrote it, or another --out"
        )
    return found


def _copy(db: sqlite3.Connection) -> sqlite3.Connection:
    """A private copy in a file without a name."""
    copy = sqlite3.connect("", isolation_level=None)
    install(copy)
    with closing(db):
        db.backup(copy)
    return copy


def _check(db: sqlite3.Connection) -> None:
    answer = db.execute("PRAGMA integrity_check(3)").fetchall()
    if answer != [("ok",)]:
        raise sqlite3.DatabaseError("; ".join(str(row[0]) for row in answer))


def _add_plan(
    db: sqlite3.Connection,
    candidates: Sequence[Candidate],
    benchmarks: Sequence[BenchmarkRow],
    problems: Iterable[ProblemRow],
    at: tuple[int, int] = (0, 0),
) -> None:
    insert(
        db,
        "candidate",
        [(at[0] + i, *pack_candidate(c)) for i, c in enumerate(candidates)],
    )
    insert(
        db,
        "benchmark",
        [(at[1] + i, *asdict(b).values()) for i, b in enumerate(benchmarks)],
    )
    insert(
        db,
        "problem",
        [
            (
                p.benchmark,
                p.problem,
                p.doc_id,
                safe_text(p.prompt),
                pack_ids(p.prompt_ids),
                safe_text(p.gold),
            )
            for p in problems
        ],
    )


def _extend_cell(db: sqlite3.Connection, row: ExtendedCell) -> None:
    where = "benchmark = ? AND problem = ? AND seed = ?"
    early = db.execute(f"SELECT n_early FROM cell WHERE {where}", row.key).fetchone()[0]
    values = {
        "steps": pack_steps(row.steps),
        "n_inherited": int((row.steps == INHERITED).sum()),
        "n_forks": int((row.steps >= 0).sum()),
        "n_early": early + row.n_early,
    }
    update(db, "cell", values, where, row.key)


def _add_checks(db: sqlite3.Connection, key: CellKey, checked: int, errors: int) -> None:
    where = "benchmark = ? AND problem = ? AND seed = ?"
    found = db.execute(f"SELECT n_checked, n_coupling_errors FROM cell WHERE {where}", key)
    before = found.fetchone()
    if before is not None:
        values = {"n_checked": before[0] + checked, "n_coupling_errors": before[1] + errors}
        update(db, "cell", values, where, key)


def _cell_values(cell: CellRow) -> tuple[Any, ...]:
    n_inherited = int((cell.steps == INHERITED).sum())
    n_forks = int((cell.steps >= 0).sum())
    return (
        *cell.key, cell.cell_seed, cell.finish, len(cell.tokens), cell.correct, cell.grade,
        n_inherited, n_forks, cell.n_early, cell.n_checked, cell.n_coupling_errors,
        pack_steps(cell.steps),
    )  # fmt: skip
