"""A check of every row of a ledger: checksums, and whether the tables fit together."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from typing import TYPE_CHECKING

from knockout.ledger import checksum
from knockout.ledger.codec import unpack_ids
from knockout.ledger.connection import speaking
from knockout.ledger.schema import FORK_TOTALS, upgrade

if TYPE_CHECKING:
    from knockout.ledger.ledger import Ledger

__all__ = ["faults", "wrong_checksums"]


def faults(ledger: Ledger) -> Iterator[str]:
    """Reads every page and every row; yields what does not fit together.

    Raises:
        KnockoutError: The file itself is damaged.
    """
    ledger.check()
    with speaking(ledger.path):
        yield from _schema(ledger)
        yield from wrong_checksums(ledger)
        yield from _contents(ledger)


def wrong_checksums(ledger: Ledger) -> Iterator[str]:
    """Yields the rows that are not as they were written."""
    for table in checksum.tables(ledger._db):
        names = checksum.columns(ledger._db, table)
        n = names.index("candidate") + 1 if "candidate" in names else _KEYS.get(table, 1)
        for row in checksum.wrong_rows(ledger._db, table):
            place = "/".join(_shown(value) for value in row[:n])
            yield f"{table} {place}: its checksum is not that of its values"


_KEYS = {"problem": 2, "cell": 3}


def _shown(value: object) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def _schema(ledger: Ledger) -> Iterator[str]:
    """Tables, columns and triggers, against those of a new ledger."""
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as new:
        checksum.install(new)
        upgrade(new, 0)
        wanted, found = _described(new), _described(ledger._db)
    for name in sorted(wanted.keys() | found.keys()):
        if wanted.get(name) != found.get(name):
            yield f"{name}: not as this program lays it out"


def _described(db: sqlite3.Connection) -> dict[str, object]:
    found: dict[str, object] = {}
    for kind, name, sql in db.execute("SELECT type, name, sql FROM sqlite_master"):
        if kind == "table":
            table = db.execute("SELECT * FROM pragma_table_info(?)", (name,)).fetchall()
            found[f"table {name}"] = [row[:4] for row in table]
        elif kind == "trigger":
            found[f"trigger {name}"] = " ".join(str(sql).split())
    return found


def _contents(ledger: Ledger) -> Iterator[str]:
    for table in ("generation", "audit", "problem"):
        column = "prompt_ids" if table == "problem" else "ids"
        for rows in ledger.chunks(f"SELECT {_place(table)}, {column} FROM {table}"):
            for place, blob in rows:
                try:
                    if blob is not None:
                        unpack_ids(blob)
                except (ValueError, TypeError) as error:
                    yield f"{table} {place}: {error}"
    width = 4 * len(ledger.candidates)
    for place, n in ledger.query(
        f"SELECT {_place('cell')}, length(steps) FROM cell"
        " WHERE length(steps) > ? OR length(steps) % 4",
        (width,),
    ):
        yield f"cell {place}: {n} bytes of steps for {len(ledger.candidates)} candidates"
    for place, n, there in ledger.query(
        f"SELECT {_place('cell')}, n_forks, (SELECT COUNT(*) FROM fork f WHERE f.benchmark ="
        " cell.benchmark AND f.problem = cell.problem AND f.seed = cell.seed) AS there"
        " FROM cell WHERE there > n_forks"
    ):
        yield f"cell {place}: {there} forks where {n} candidates diverge"
    for table, candidate in (("cell", "-1"), ("fork", "t.candidate")):
        sql = (
            f"SELECT {_place(table, 't.')} FROM {table} t LEFT JOIN generation g ON"
            " g.benchmark = t.benchmark AND g.problem = t.problem AND g.seed = t.seed"
            f" AND g.candidate = {candidate} WHERE g.ids IS NULL"
        )
        for (place,) in ledger.query(sql):
            yield f"{table} {place}: no trajectory"
    for table in ("cell", "fork"):
        sql = (
            f"SELECT {_place(table, 't.')} FROM {table} t LEFT JOIN problem p ON"
            " p.benchmark = t.benchmark AND p.problem = t.problem WHERE p.problem IS NULL"
        )
        for (place,) in ledger.query(sql):
            yield f"{table} {place}: no such problem"
    if not isinstance(ledger.meta_json("identity"), dict):
        yield "meta: no identity of the run"
    counted = ledger.query(f"SELECT {FORK_TOTALS} FROM fork GROUP BY 1, 2, 3, 4")
    if {tuple(row) for row in ledger.fork_totals()} != set(counted):
        yield "fork_total: its counts are not those of the forks"


def _place(table: str, of: str = "") -> str:
    """SQL for the key of a row, as text."""
    keys = ["benchmark", "problem"]
    keys += ["seed"] if table != "problem" else []
    keys += ["candidate"] if table in ("generation", "audit", "fork") else []
    return " || '/' || ".join(f"{of}{key}" for key in keys)
