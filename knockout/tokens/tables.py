"""Tables in files, as columns of cells in words."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from knockout.errors import UsageError, shortened

__all__ = ["Table", "read_csv", "read_parquet"]

# What Excel and others put between cells besides a comma.
_DELIMITERS = (",", ";", "\t")


@dataclass(frozen=True, slots=True)
class Table:
    """A table whose cells are texts; a cell without a value is empty.

    Attributes:
        path: Its file.
        columns: Names in the file's order.
        rows: Where each row stands, for messages.
        values: Cells of each column, one a row.
        named: False if the file has no header.
    """

    path: Path
    columns: tuple[str, ...]
    rows: tuple[str, ...]
    values: Mapping[str, Sequence[str]]
    named: bool = True

    def cells(self, column: str) -> list[tuple[str, str]]:
        """Cells of a column, each with where it stands."""
        mark = f", column {column}" if self.named else ""
        values = self.values[column]
        return [(f"{row}{mark}", value) for row, value in zip(self.rows, values, strict=True)]


def read_csv(path: Path, text: str, delimiter: str = ",") -> Table:
    """Reads the text of a CSV or TSV file.

    The delimiter is a semicolon or a tab if the header has no comma. A file with a single
    column of whole numbers from its first line on has no header.
    """
    first = text.partition("\n")[0]
    if delimiter not in first:
        delimiter = next((d for d in _DELIMITERS if d in first), delimiter)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    found: list[tuple[int, list[str]]] = [(reader.line_num, row) for row in reader if any(row)]
    if not found:
        return Table(path, (), (), {})
    header = [name.strip() for name in found[0][1]]
    named = not (len(header) == 1 and header[0].removeprefix("-").isdecimal())
    if not named:
        header = ["ids"]
    body = found[1:] if named else found
    for line, row in body:
        if len(row) > len(header):
            raise UsageError(
                f"{path} line {line}: found {len(row)} cells under a header of {len(header)}; "
                f"a text that holds {delimiter!r} stands in quotes"
            )
    kept = [(n, name) for n, name in enumerate(header) if name]
    return Table(
        path,
        tuple(name for _, name in kept),
        tuple(f"{path} line {line}" for line, _ in body),
        {name: [row[n] if n < len(row) else "" for _, row in body] for n, name in kept},
        named,
    )


def read_parquet(path: Path) -> Table:
    """Reads a Parquet file; lists become JSON.

    Raises:
        UsageError: It is no Parquet file.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path)
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, FileNotFoundError):
            raise
        raise UsageError(f"{path}: not a Parquet file: {shortened(str(error))}") from None
    return Table(
        path,
        tuple(table.column_names),
        tuple(f"{path} row {row}" for row in range(1, table.num_rows + 1)),
        {
            name: [_cell(value) for value in table.column(name).to_pylist()]
            for name in table.column_names
        },
    )


def _cell(value: Any) -> str:
    if value is None or value != value:  # NaN
        return ""
    return json.dumps(value, default=str) if isinstance(value, list) else str(value)
