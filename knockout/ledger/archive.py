"""A run's ledger as Parquet files, one a table, and back."""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from knockout.errors import KnockoutError, UsageError, shortened
from knockout.files import atomic_path, write_text
from knockout.ledger.check import faults
from knockout.ledger.checksum import wrong_rows
from knockout.ledger.codec import pack_ids, pack_steps, unpack_ids
from knockout.ledger.connection import connect, speaking, transaction
from knockout.ledger.ledger import Ledger
from knockout.ledger.schema import COMPARED_TABLES, SCHEMA_VERSION, upgrade

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["TABLES", "export_run", "import_run"]

TABLES = ("meta", *COMPARED_TABLES, "session")
"""What is exported. The other tables are made from these."""

_ROWS = 20_000
_VERSION_KEY = b"knockout_ledger_format"


def export_run(directory: Path, folder: Path) -> dict[str, int]:
    """Writes a run as `FOLDER/TABLE.parquet` and `config.yaml`; token ids become lists.

    Returns:
        Rows of each table.

    Raises:
        UsageError: The folder is not empty.
        KnockoutError: The ledger is damaged.
    """
    import pyarrow.parquet as pq

    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder}: found files there; give a new or empty folder")
    counts = {}
    with Ledger.open(directory / "run.db") as ledger:
        for table in TABLES:
            schema = _schema(ledger, table)
            n = 0
            with (
                atomic_path(folder / f"{table}.parquet") as temporary,
                pq.ParquetWriter(
                    temporary, schema, compression="zstd", write_page_checksum=True
                ) as writer,
            ):
                for rows in ledger.chunks(f"SELECT * FROM {table}", size=_ROWS):
                    writer.write_table(_as_table(rows, schema, directory))
                    n += len(rows)
            counts[table] = n
    config = directory / "config.yaml"
    write_text(folder / "config.yaml", config.read_text(encoding="utf-8"))
    return counts


def import_run(folder: Path, directory: Path) -> dict[str, int]:
    """Makes a run directory of what `export_run` wrote; it can be resumed and judged as before.

    A run of an older version is upgraded. An import that fails leaves nothing behind.

    Raises:
        UsageError: The directory contains a run already, or the folder contains no export.
        KnockoutError: A file is damaged, or of another format.
    """
    for name in (*(f"{t}.parquet" for t in TABLES), "config.yaml"):
        if not (folder / name).is_file():
            raise UsageError(f"{folder}: no exported run ({name} is missing)")
        if (folder / name).is_symlink():
            raise UsageError(f"{folder / name}: a symbolic link; expected the exported file itself")
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise UsageError(f"{directory}: found files there; give a new or empty folder")
    config = _config(folder / "config.yaml")
    made = not directory.exists()
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "run.db"
    # The file gets its name when it is whole: a broken import leaves no run.
    begun = directory / "run.db.part"
    try:
        with speaking(path), closing(connect(begun)) as db:
            counts = _fill(db, folder)
        with Ledger.open(begun) as ledger:
            if found := next(faults(ledger), None):
                raise KnockoutError(
                    f"{folder}: the exported run is damaged: {shortened(found, 500)}"
                )
        os.replace(begun, path)
        write_text(directory / "config.yaml", config)
        made = False
    finally:
        begun.unlink(missing_ok=True)
        if made:
            directory.rmdir()
    return counts


def _config(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise KnockoutError(
            f"{path}: not UTF-8 text ({error.reason} at byte {error.start})"
        ) from None


def _fill(db: sqlite3.Connection, folder: Path) -> dict[str, int]:
    """Inserts every table as the version that exported it laid it out, then upgrades."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    counts: dict[str, int] = {}
    with transaction(db):
        version = 0
        for table in TABLES:
            file = folder / f"{table}.parquet"
            counts[table] = 0
            try:
                with pq.ParquetFile(file, page_checksum_verification=True) as parquet:
                    if not version:
                        version = _format(parquet.schema_arrow, file)
                        upgrade(db, 0, version)
                    _check_schema(parquet.schema_arrow, db, table, file, version)
                    for batch in parquet.iter_batches(batch_size=_ROWS):
                        counts[table] += _insert(db, table, batch)
                if version >= 2 and (row := next(wrong_rows(db, table), None)):
                    raise ValueError(f"a row's checksum is not that of its values: {row[:4]}")
            except (
                pa.ArrowException, sqlite3.IntegrityError, sqlite3.ProgrammingError, OSError,
                ValueError, TypeError, OverflowError,
            ) as error:  # fmt: skip
                raise KnockoutError(
                    f"{file}: cannot be read: {shortened(str(error), 500)}"
                ) from None
        upgrade(db, version)
    return counts


def _columns(db: sqlite3.Connection | Ledger, table: str) -> list[tuple[str, str]]:
    """Names and SQL types of a table's columns."""
    sql = "SELECT name, type FROM pragma_table_info(?)"
    rows = db.query(sql, (table,)) if isinstance(db, Ledger) else db.execute(sql, (table,))
    return [(str(name), str(kind)) for name, kind in rows]


def _schema(
    db: sqlite3.Connection | Ledger, table: str, version: int = SCHEMA_VERSION
) -> pa.Schema:
    import pyarrow as pa

    kinds = {
        "INTEGER": pa.int64(),
        "REAL": pa.float64(),
        "TEXT": pa.string(),
        "BLOB": pa.list_(pa.int32()),
    }
    fields = [pa.field(name, kinds[kind]) for name, kind in _columns(db, table)]
    return pa.schema(fields, metadata={_VERSION_KEY: str(version)})


def _format(schema: pa.Schema, file: Path) -> int:
    found = (schema.metadata or {}).get(_VERSION_KEY, b"").decode(errors="replace")
    if not found.isdecimal() or not 1 <= int(found) <= SCHEMA_VERSION:
        raise KnockoutError(
            f"{file}: found format {found or 'unknown'}; this program reads 1 to {SCHEMA_VERSION}"
        )
    return int(found)


def _check_schema(
    found: pa.Schema, db: sqlite3.Connection, table: str, file: Path, version: int
) -> None:
    wanted = _schema(db, table)
    if _format(found, file) != version or not found.equals(wanted, check_metadata=False):
        raise KnockoutError(
            f"{file}: found format {_format(found, file)} with columns {', '.join(found.names)}; "
            f"expected format {version} with {', '.join(wanted.names)}"
        )


def _as_table(rows: list[tuple[Any, ...]], schema: pa.Schema, directory: Path) -> pa.Table:
    import pyarrow as pa

    columns = [list(column) for column in zip(*rows, strict=True)]
    for i, name in enumerate(schema.names):
        if pa.types.is_list(schema.field(i).type):
            try:
                columns[i] = [_numbers(name, blob) for blob in columns[i]]
            except ValueError as error:
                raise KnockoutError(f"{directory}: the ledger is damaged ({error})") from None
    return pa.Table.from_arrays(
        [pa.array(c, f.type) for c, f in zip(columns, schema, strict=True)], schema=schema
    )


_RAW = ("steps", "watched")
"""Columns of numbers that are not compressed."""


def _numbers(column: str, blob: bytes | None) -> Any:
    if blob is None:
        return None
    return np.frombuffer(blob, dtype="<i4") if column in _RAW else unpack_ids(blob)


def _insert(db: sqlite3.Connection, table: str, batch: pa.RecordBatch) -> int:
    import pyarrow as pa

    columns = []
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        if pa.types.is_list(column.type):
            pack = pack_steps if name in _RAW else pack_ids
            columns.append([pack(v.values.to_numpy()) if v.is_valid else None for v in column])
        else:
            columns.append(column.to_pylist())
    marks = ", ".join("?" * len(columns))
    db.executemany(f"INSERT INTO {table} VALUES ({marks})", zip(*columns, strict=True))
    return int(batch.num_rows)
