"""A checksum in every row, to find damage that SQLite cannot see."""

from __future__ import annotations

import sqlite3
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from knockout.ledger.codec import unpack_ids

__all__ = [
    "columns",
    "crc_sql",
    "insert",
    "install",
    "row_crc",
    "tables",
    "update",
    "wrong_rows",
]

PACKED = ("ids", "prompt_ids")
"""Columns of compressed token ids. The checksum covers their content: libraries compress differently."""

_ROWS = 5_000


def row_crc(*values: Any) -> int:
    """CRC-32 of a row's values. Text counts as its UTF-8 bytes."""
    found = 0
    for value in values:
        raw = value.encode() if isinstance(value, str) else value
        mark = b"b" if isinstance(raw, bytes) else b"n"
        if not isinstance(raw, bytes):
            raw = repr(raw).encode()
        found = zlib.crc32(raw, zlib.crc32(b"%s%d:" % (mark, len(raw)), found))
    return found


def install(db: sqlite3.Connection) -> None:
    """Lets SQL of this connection call `row_crc` and `ids_of`, for a migration.

    Elsewhere Python computes them: an interrupt inside such a function becomes an error.
    """
    db.create_function("row_crc", -1, row_crc, deterministic=True)
    db.create_function("ids_of", 1, _ids_of, deterministic=True)


def tables(db: sqlite3.Connection) -> list[str]:
    """The tables whose rows carry a checksum."""
    rows = db.execute(
        "SELECT m.name FROM sqlite_master m JOIN pragma_table_info(m.name) c"
        " WHERE m.type = 'table' AND c.name = 'crc' ORDER BY 1"
    )
    return [name for (name,) in rows]


def columns(db: sqlite3.Connection, table: str) -> list[str]:
    """A table's columns, in order."""
    return [name for (name,) in db.execute("SELECT name FROM pragma_table_info(?)", (table,))]


def crc_sql(db: sqlite3.Connection, table: str) -> str:
    """SQL for the checksum of an existing row."""
    names = [name for name in columns(db, table) if name != "crc"]
    return _call(names, [f'"{name}"' for name in names])


def insert(
    db: sqlite3.Connection, table: str, rows: Sequence[Sequence[Any]], *, replace: bool = False
) -> None:
    """Inserts rows without their checksums, which it adds."""
    if not rows:
        return
    packed = _packed(columns(db, table))
    marks = ", ".join("?" * (len(rows[0]) + 1))
    db.executemany(
        f"INSERT {'OR REPLACE ' if replace else ''}INTO {table} VALUES ({marks})",
        [(*row, row_crc(*_unpacked(row, packed))) for row in rows],
    )


def update(
    db: sqlite3.Connection, table: str, values: Mapping[str, Any], where: str, place: Sequence[Any]
) -> None:
    """Sets columns of existing rows, and their checksums.

    Args:
        db: A connection in a transaction.
        table: Its name.
        values: By column.
        where: A condition with a mark for each value of `place`; no column of `values` is in it.
        place: What the condition is for.
    """
    sets = ", ".join(f"{column} = ?" for column in values)
    db.execute(f"UPDATE {table} SET {sets} WHERE {where}", (*values.values(), *place))
    packed = _packed(columns(db, table))
    for row in db.execute(f"SELECT * FROM {table} WHERE {where}", place).fetchall():
        crc = row_crc(*_unpacked(row[:-1], packed))
        db.execute(f"UPDATE {table} SET crc = ? WHERE {where}", (crc, *place))


def wrong_rows(db: sqlite3.Connection, table: str) -> Iterator[tuple[Any, ...]]:
    """Yields the rows whose checksum is wrong, texts as bytes."""
    names = columns(db, table)
    packed = _packed(names)
    before, db.text_factory = db.text_factory, bytes
    try:
        cursor = db.execute(f"SELECT * FROM {table}")
        while rows := cursor.fetchmany(_ROWS):
            for row in rows:
                if row_crc(*_unpacked(row[:-1], packed)) != row[-1]:
                    yield row
    finally:
        db.text_factory = before


def _packed(names: Sequence[str]) -> list[int]:
    return [i for i, name in enumerate(names) if name in PACKED]


def _call(names: list[str], values: list[str]) -> str:
    inner = [
        f"ids_of({value})" if name in PACKED else value
        for name, value in zip(names, values, strict=True)
    ]
    return f"row_crc({', '.join(inner)})"


def _unpacked(row: Sequence[Any], packed: list[int]) -> list[Any]:
    values = list(row)
    for i in packed:
        values[i] = _ids_of(values[i])
    return values


def _ids_of(blob: Any) -> Any:
    """The ids' own bytes; unreadable values count as they are."""
    if not isinstance(blob, bytes):
        return blob
    try:
        return unpack_ids(blob).astype("<i4").tobytes()
    except ValueError:
        return blob
