"""Whether the ledger's files are still where the run opened them."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

from knockout.errors import KnockoutError

__all__ = ["Place"]


class Place:
    """Remembers the files of a ledger that is open for writing.

    Deleting or moving a file that is open raises nothing: rows go on into a file that no name
    leads to, and are gone when the process ends.

    Args:
        path: `run.db`.
        journal_mode: What SQLite uses.
    """

    def __init__(self, path: Path, journal_mode: str) -> None:
        self._file = path
        self._journal = path.with_name(f"{path.name}-wal") if journal_mode == "wal" else None
        self._file_is = _identity(path)
        self._journal_is: tuple[int, int] | None = None

    def check(self, db: sqlite3.Connection) -> None:
        """Compares the files with those that were opened.

        Raises:
            KnockoutError: Something is gone; what was committed was saved first, if possible.
        """
        if _identity(self._file) != self._file_is:
            folder = self._file.parent
            if not folder.is_dir():
                if self._journal is not None:
                    db.execute("PRAGMA wal_checkpoint(FULL)").fetchall()
                raise KnockoutError(
                    f"{folder}: the run's folder was moved or deleted while the run worked, so it "
                    "stops. If it was moved, what was committed is in it: move it back and give "
                    "the same command again"
                )
            raise KnockoutError(
                f"{self._file}: the ledger was deleted, moved or replaced while the run worked, so "
                f"it stops. {self._rescue(db)}"
            )
        if self._journal is None:
            return
        journal_is = _identity(self._journal)
        if self._journal_is is None:
            self._journal_is = journal_is
        elif journal_is != self._journal_is:
            # The rows are still in the open file without a name; this brings them home.
            db.execute("PRAGMA wal_checkpoint(FULL)").fetchall()
            raise KnockoutError(
                f"{self._journal}: the ledger's journal was deleted or replaced while the run "
                f"worked, so it stops. What was committed was saved into {self._file.name}; the "
                "same command goes on from there"
            )

    def _rescue(self, db: sqlite3.Connection) -> str:
        saved = self._file.with_name(f"{self._file.stem}.rescued.db")
        try:
            saved.unlink(missing_ok=True)
            db.execute("VACUUM INTO ?", (str(saved),))
        except (OSError, sqlite3.Error) as error:
            return f"What it held could not be saved ({error})"
        return (
            f"What was committed was saved as {saved}: rename it to {self._file.name} and give the "
            "same command again"
        )


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino
