"""Lists of token ids or strings in files; every complaint names the file and the row."""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from knockout.errors import UsageError

__all__ = ["Item", "read_list"]


@dataclass(frozen=True, slots=True)
class Item:
    """An entry of a list: a token id or a string, and where it stands."""

    value: int | str
    where: str


def read_list(path: Path, column: str | None = None) -> list[Item]:
    """Reads a list; the file's ending says how.

    `.csv`, `.tsv` and `.parquet` hold ids in a named column, `.json` a bare list of ids, anything
    else is text with a string a line (quoted as in JSON where white space matters).

    Raises:
        UsageError: The file is missing, malformed or empty, or holds something else.
    """
    kind = path.suffix.lower()
    tabular = kind in {".csv", ".tsv", ".parquet"}
    if column is not None and not tabular:
        raise UsageError(f"{path}: found column: {column}; only CSV and Parquet have columns")
    try:
        if kind in {".csv", ".tsv"}:
            items = _read_csv(path, column, "\t" if kind == ".tsv" else ",")
        elif kind == ".parquet":
            items = _read_parquet(path, column)
        elif kind == ".json":
            items = _read_json(path)
        else:
            items = _read_text(path)
    except FileNotFoundError:
        raise UsageError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UsageError(f"{path}: cannot be read: {error}") from None
    if not items:
        raise UsageError(f"{path}: found no entries; expected at least one")
    return items


def _pick_column(path: Path, column: str | None, columns: list[str]) -> str:
    if column in columns:
        return str(column)
    have = ", ".join(columns) or "none"
    if column is None:
        raise UsageError(f"{path}: which column? Name one with `column:`; it has {have}")
    raise UsageError(f"{path}: no column {column!r}; it has {have}")


def _read_csv(path: Path, column: str | None, delimiter: str) -> list[Item]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, delimiter=delimiter, strict=True)
        chosen = _pick_column(path, column, [name for name in reader.fieldnames or [] if name])
        cells = [(reader.line_num, (row[chosen] or "").strip()) for row in reader]
    items = []
    for line, cell in _without_blank_end(path, cells):
        where = f"{path} line {line}, column {chosen}"
        if not cell.removeprefix("-").isdecimal() or not cell.isascii():
            raise UsageError(f"{where}: found {cell!r}; expected a token id (a whole number)")
        items.append(Item(int(cell), where))
    return items


def _without_blank_end(path: Path, cells: list[tuple[int, str]]) -> list[tuple[int, str]]:
    """A shorter column ends in blank cells; a blank one between others is an error."""
    end = max((n for n, (_, cell) in enumerate(cells, start=1) if cell), default=0)
    for line, cell in cells[:end]:
        if not cell:
            raise UsageError(f"{path} line {line}: found an empty cell; expected a token id")
    return cells[:end]


def _read_parquet(path: Path, column: str | None) -> list[Item]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        schema = pq.read_schema(path)
        chosen = _pick_column(path, column, list(schema.names))
        if not pa.types.is_integer(schema.field(chosen).type):
            raise UsageError(
                f"{path}: column {chosen} holds {schema.field(chosen).type}; expected whole numbers"
            )
        values = pq.read_table(path, columns=[chosen]).column(chosen).to_pylist()
    except pa.ArrowInvalid as error:
        raise UsageError(f"{path}: not a Parquet file: {error}") from None
    items = []
    while values and values[-1] is None:
        values.pop()
    for row, value in enumerate(values, start=1):
        where = f"{path} row {row}, column {chosen}"
        if value is None:
            raise UsageError(f"{where}: found an empty cell; expected a token id")
        items.append(Item(value, where))
    return items


def _read_json(path: Path) -> list[Item]:
    try:
        values: Any = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise UsageError(f"{path} line {error.lineno}: not valid JSON: {error.msg}") from None
    if not isinstance(values, list):
        raise UsageError(f"{path}: found a {type(values).__name__}; expected a list of token ids")
    items = []
    for row, value in enumerate(values, start=1):
        where = f"{path} entry {row}"
        if isinstance(value, bool) or not isinstance(value, int):
            found = json.dumps(value)[:40]
            raise UsageError(f"{where}: found {found}; expected a token id (a whole number)")
        items.append(Item(value, where))
    return items


def _read_text(path: Path) -> list[Item]:
    items = []
    # Not splitlines: a token may well be one of its rarer line ends. read_text makes \r\n a \n.
    lines = path.read_text(encoding="utf-8-sig").split("\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{path} line {number}"
        bare = line.strip()
        if len(bare) > 1 and bare[0] == bare[-1] == '"':
            try:
                text = json.loads(bare)
            except json.JSONDecodeError as error:
                raise UsageError(f"{where}: {bare} is not a JSON string: {error.msg}") from None
            if not text:
                raise UsageError(f"{where}: found an empty string; expected a token's text")
        elif bare != line:
            raise UsageError(
                f"{where}: white space around {bare!r}; quote the string as in JSON to keep it, "
                f'for example "{line}"'
            )
        else:
            text = line
        items.append(Item(text, where))
    return items
