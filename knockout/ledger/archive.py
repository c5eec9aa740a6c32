"""A run's ledger as Parquet files, one a table, and back; and a check of every row."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from knockout.errors import KnockoutError, UsageError
from knockout.files import atomic_path, write_text
from knockout.ledger.codec import pack_ids, pack_steps, unpack_ids
from knockout.ledger.connection import connect, set_journal, speaking, transaction
from knockout.ledger.ledger import Ledger
from knockout.ledger.schema import COMPARED_TABLES, FORK_TOTALS, SCHEMA_VERSION, statements

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["TABLES", "export_run", "faults", "import_run"]

TABLES = ("meta", *COMPARED_TABLES, "session")
"""What is exported. The other tables are made from these."""

_ROWS = 20_000
_VERSION_KEY = b"knockout_ledger_format"


def export_run(directory: Path, folder: Path) -> dict[str, int]:
    """Writes a run as `FOLDER/TABLE.parquet` and `config.yaml`; token ids become lists.

    Returns:
        Rows of each table.

    Raises:
        UsageError: The folder holds something already.
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
                pq.ParquetWriter(temporary, schema, compression="zstd") as writer,
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

    Raises:
        UsageError: The directory holds a run already, or the folder no export.
        KnockoutError: A file is damaged, or of another format.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = directory / "run.db"
    missing = [
        n for n in (*(f"{t}.parquet" for t in TABLES), "config.yaml") if not (folder / n).is_file()
    ]
    if missing:
        raise UsageError(f"{folder}: no exported run ({missing[0]} is missing)")
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise UsageError(f"{directory}: found files there; give a new or empty folder")
    directory.mkdir(parents=True, exist_ok=True)
    counts = {}
    # The file gets its name when it is whole: a broken import leaves no run.
    begun = directory / "run.db.part"
    try:
        with speaking(path), closing(connect(begun)) as db:
            with transaction(db):
                for statement in statements():
                    db.execute(statement)
                db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
                for table in TABLES:
                    file = folder / f"{table}.parquet"
                    counts[table] = 0
                    try:
                        with pq.ParquetFile(file) as parquet:
                            _check_schema(parquet.schema_arrow, db, table, file)
                            for batch in parquet.iter_batches(batch_size=_ROWS):
                                counts[table] += _insert(db, table, batch)
                    except pa.ArrowException as error:
                        raise KnockoutError(f"{file}: cannot be read: {error}") from None
            set_journal(db, begun)
            # Back to one file without a journal of its own, so that it can be renamed.
            db.execute("PRAGMA journal_mode = delete")
        os.replace(begun, path)
    finally:
        begun.unlink(missing_ok=True)
    write_text(directory / "config.yaml", (folder / "config.yaml").read_text(encoding="utf-8"))
    return counts


def faults(ledger: Ledger) -> Iterator[str]:
    """Reads every page and every row; yields what does not fit together.

    Raises:
        KnockoutError: The file itself is damaged.
    """
    ledger.check()
    for table in ("generation", "audit", "problem"):
        column = "prompt_ids" if table == "problem" else "ids"
        for rows in ledger.chunks(
            f"SELECT rowid_, {column} FROM (SELECT {_place(table)} AS rowid_, {column} FROM {table})"
        ):
            for place, blob in rows:
                try:
                    if blob is not None:
                        unpack_ids(blob)
                except ValueError as error:
                    yield f"{table} {place}: {error}"
    width = 4 * len(ledger.candidates)
    for place, n in ledger.query(
        f"SELECT {_place('cell')}, length(steps) FROM cell WHERE length(steps) <> ?", (width,)
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
    counted = ledger.query(
        f"SELECT {FORK_TOTALS} FROM fork GROUP BY 1, 2, 3, 4 ORDER BY 1, 2, 3, 4"
    )
    if sorted(map(tuple, ledger.fork_totals())) != sorted(counted):
        yield "fork_total: its counts are not those of the forks"


def _place(table: str, of: str = "") -> str:
    """SQL for the key of a row, as text."""
    keys = ["benchmark", "problem"]
    keys += ["seed"] if table != "problem" else []
    keys += ["candidate"] if table in ("generation", "audit", "fork") else []
    return " || '/' || ".join(f"{of}{key}" for key in keys)


def _columns(db: sqlite3.Connection | Ledger, table: str) -> list[tuple[str, str]]:
    """Names and SQL types of a table's columns."""
    sql = "SELECT name, type FROM pragma_table_info(?)"
    rows = db.query(sql, (table,)) if isinstance(db, Ledger) else db.execute(sql, (table,))
    return [(str(name), str(kind)) for name, kind in rows]


def _schema(db: sqlite3.Connection | Ledger, table: str) -> pa.Schema:
    import pyarrow as pa

    kinds = {
        "INTEGER": pa.int64(),
        "REAL": pa.float64(),
        "TEXT": pa.string(),
        "BLOB": pa.list_(pa.int32()),
    }
    fields = [pa.field(name, kinds[kind]) for name, kind in _columns(db, table)]
    return pa.schema(fields, metadata={_VERSION_KEY: str(SCHEMA_VERSION)})


def _check_schema(found: pa.Schema, db: sqlite3.Connection, table: str, file: Path) -> None:
    wanted = _schema(db, table)
    version = (found.metadata or {}).get(_VERSION_KEY, b"").decode(errors="replace")
    if version != str(SCHEMA_VERSION) or not found.equals(wanted, check_metadata=False):
        raise KnockoutError(
            f"{file}: found format {version or 'unknown'} with columns {', '.join(found.names)}; "
            f"expected format {SCHEMA_VERSION} with {', '.join(wanted.names)}"
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


def _numbers(column: str, blob: bytes | None) -> Any:
    if blob is None:
        return None
    return np.frombuffer(blob, dtype="<i4") if column == "steps" else unpack_ids(blob)


def _insert(db: sqlite3.Connection, table: str, batch: pa.RecordBatch) -> int:
    import pyarrow as pa

    columns = []
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        if pa.types.is_list(column.type):
            pack = pack_steps if name == "steps" else pack_ids
            columns.append([pack(v.values.to_numpy()) if v.is_valid else None for v in column])
        else:
            columns.append(column.to_pylist())
    marks = ", ".join("?" * len(columns))
    db.executemany(f"INSERT INTO {table} VALUES ({marks})", zip(*columns, strict=True))
    return int(batch.num_rows)
