"""Connections to the ledger's SQLite file: how it is opened, and what its errors mean."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from knockout.errors import KnockoutError
from knockout.ledger.checksum import install
from knockout.ledger.lock import filesystem_of, is_network

__all__ = ["connect", "damaged", "set_journal", "speaking", "transaction"]


def connect(path: Path, *, write: bool = True) -> sqlite3.Connection:
    """Opens the file; transactions are begun by hand."""
    mode = "rwc" if write else "ro"
    # Quoted, since a path may contain characters with a meaning in a URI.
    uri = f"{path.resolve().as_uri()}?mode={mode}"
    db = sqlite3.connect(uri, uri=True, isolation_level=None, timeout=30.0)
    install(db)
    return db


def set_journal(db: sqlite3.Connection, path: Path) -> str:
    """Chooses the journal and checks the answer: SQLite may keep another mode without an error."""
    network = is_network(filesystem_of(path.parent))
    wanted = "delete" if network else "wal"
    mode = str(db.execute(f"PRAGMA journal_mode = {wanted}").fetchone()[0])
    # In WAL mode NORMAL can lose the last transactions at a power cut, never the file; they are
    # owed again then. The rollback journal needs FULL for the same promise.
    db.execute(f"PRAGMA synchronous = {'NORMAL' if mode == 'wal' else 'FULL'}")
    if mode not in {"wal", "delete", "truncate", "persist"}:
        raise KnockoutError(f"{path}: SQLite uses journal mode {mode}, which is not safe here")
    return mode


class transaction:
    """Writes all that is written inside, or nothing of it. Transactions do not nest.

    Not a generator: an interrupt between two of its lines would leave that suspended, and when it
    was collected it would undo whatever transaction was open by then.
    """

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    def __enter__(self) -> sqlite3.Connection:
        if self._db.in_transaction:  # begun when an interrupt came, before its body was entered
            self._db.execute("ROLLBACK")
        # IMMEDIATE takes the write lock at once; a deferred one can fail half-way despite a timeout.
        self._db.execute("BEGIN IMMEDIATE")
        return self._db

    def __exit__(self, kind: object, *error: object) -> None:
        try:
            if kind is None:
                self._db.execute("COMMIT")
        finally:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")


@contextmanager
def speaking(path: Path) -> Iterator[None]:
    """Turns SQLite's errors into ones that say what to do."""
    try:
        yield
    except (sqlite3.Error, UnicodeDecodeError) as error:  # its own messages quote what is damaged
        code = getattr(error, "sqlite_errorname", "") or ""
        text = str(error)
        if code.startswith("SQLITE_FULL") or "disk is full" in text:
            told = "the disk is full. What was committed is safe: free some space and run the same command again"
        elif code.startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB")) or type(error) in (
            sqlite3.DatabaseError,
            UnicodeDecodeError,
        ):
            told = (
                f"the ledger is damaged ({text}). Put back a copy of it, or run with another --out"
            )
        elif code.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
            told = "another process is writing to it; wait for it or stop it"
        else:
            told = f"{text}. What was committed is safe"
        raise KnockoutError(f"{path}: {told}") from error


@contextmanager
def damaged(path: Path) -> Iterator[None]:
    """Says of a stored value that cannot be read which file it is in."""
    try:
        yield
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise KnockoutError(
            f"{path}: the ledger is damaged ({error}). Put back a copy of it, or run with another "
            "--out"
        ) from None
