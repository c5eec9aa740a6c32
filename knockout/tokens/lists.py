"""Lists of tokens in files, in every common form; every error names file and row.

The file's ending decides the form, and the whole list decides what its entries are: a text file or
a column of nothing but whole numbers is a list of ids, any other a list of token texts.
`TokenFile.how` says in words how a file was read.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from knockout.config.yaml import read_yaml
from knockout.errors import UsageError, shortened, shown
from knockout.tokens.tables import Table, read_csv, read_parquet

__all__ = ["Item", "TokenFile", "open_list", "read_list"]

# Columns and keys with ids in the lists of this project and in published ones, best first.
_ID_COLUMNS = ("token_ids", "token_id", "rock_id", "id", "ids")
_LIST_KEYS = ("candidates", "token_ids", "ids", "strings", "freeze_list")

_WHOLE = re.compile(r"-?[0-9]+")
_WHOLE_OR_FLOAT = re.compile(r"(-?[0-9]+)(?:\.0+)?")
_ONLY_IDS = re.compile(r"[\s,;]*-?[0-9]+(?:[\s,;]+-?[0-9]+)*[\s,;]*")
_MOST_DIGITS = 9  # of a token id; more than any vocabulary needs


@dataclass(frozen=True, slots=True)
class Item:
    """An entry of a list, and where it stands.

    Attributes:
        value: A token id, a token's text, or the ids of a set that is banned together.
        where: File and row, for messages.
        name: A set's name; empty if the list gives none.
    """

    value: int | str | tuple[int, ...]
    where: str
    name: str = ""


@dataclass(frozen=True, slots=True)
class TokenFile:
    """A list as it was read.

    Attributes:
        items: Its entries, in the file's order.
        how: How it was read, such as "100 token ids from rocks.csv, column rock_id".
    """

    items: tuple[Item, ...]
    how: str


def read_list(path: Path, column: str | None = None) -> list[Item]:
    """The entries of a list; see `open_list`."""
    return list(open_list(path, column).items)


def open_list(path: Path, column: str | None = None) -> TokenFile:
    """Reads a list of token ids, of texts, or of sets of ids.

    Args:
        path: The file; its ending says how it is read. `.csv`, `.tsv` and `.parquet` are tables.
            `.json`, `.jsonl`, `.yaml` and `.yml` contain ids, texts (in quotes), or objects such as
            those of `knockout export`. Anything else is text: ids, or a text a line (quoted as in
            JSON if white space matters).
        column: Of a table, or a key of the objects in JSON; it may be left out if there is only
            one, or one with a name that is known (token_id, rock_id, ...).

    Raises:
        UsageError: The file is missing, malformed or empty, or contains something else.
    """
    kind = path.suffix.lower()
    readers: dict[str, Callable[[Path, str | None], TokenFile]] = {
        ".csv": _from_csv,
        ".tsv": _from_csv,
        ".parquet": _from_parquet,
        ".json": _from_json,
        ".jsonl": _from_json_lines,
        ".yaml": _from_yaml,
        ".yml": _from_yaml,
    }
    try:
        return readers.get(kind, _from_text)(path, column)
    except FileNotFoundError:
        raise UsageError(f"{path}: no such file") from None
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{path}: cannot be read: byte {error.start + 1} is not UTF-8; save it as UTF-8"
        ) from None
    except (OSError, csv.Error, ValueError) as error:
        raise UsageError(f"{path}: cannot be read: {shortened(str(error))}") from None
    except RecursionError:
        raise UsageError(f"{path}: cannot be read: nested too deep") from None


# Readers: each ends in `_finished`.


def _from_csv(path: Path, column: str | None) -> TokenFile:
    return _from_table(
        read_csv(path, _text_of(path), "\t" if path.suffix == ".tsv" else ","), column
    )


def _from_parquet(path: Path, column: str | None) -> TokenFile:
    return _from_table(read_parquet(path), column)


def _from_table(table: Table, column: str | None) -> TokenFile:
    chosen = _pick_column(table.path, column, table.columns)
    cells = _without_blank_end(table.path, table.cells(chosen))
    how = f"{table.path.name}, column {chosen}" if table.named else table.path.name
    names = [""] * len(cells)
    if chosen == "token_ids" and "candidate" in table.columns:
        names = [value for _, value in table.cells("candidate")]
    lists = [_ids_in(cell) for _, cell in cells]
    if all(found is not None for found in lists):
        rows = zip(cells, lists, names[: len(cells)], strict=True)
        items = _sets((where, found or (), name) for (where, _), found, name in rows)
    else:
        items = _typed(cells, _cell_text, ids_only=chosen.lower().endswith(("id", "ids")))
    return _finished(table.path, items, how)


def _from_json(path: Path, column: str | None) -> TokenFile:
    return _from_values(path, _json(path, _text_of(path)), column)


def _from_json_lines(path: Path, column: str | None) -> TokenFile:
    lines = [line for line in _text_of(path).split("\n") if line.strip()]
    return _from_values(path, [_json(path, line, n) for n, line in enumerate(lines, 1)], column)


def _from_yaml(path: Path, column: str | None) -> TokenFile:
    return _from_values(path, read_yaml(_text_of(path), str(path)).value, column)


def _from_text(path: Path, column: str | None) -> TokenFile:
    if column is not None:
        raise UsageError(
            f"{path}: found column: {column}; only CSV, TSV, Parquet and JSON have them"
        )
    text = _text_of(path)
    if text.lstrip().startswith("["):
        try:
            return _from_values(path, json.loads(text), None)
        except ValueError:
            pass  # lines of text whose first starts with a bracket
    # Not splitlines: a token may be one of its rarer line ends.
    lines = [
        (f"{path} line {number}", line)
        for number, line in enumerate(text.split("\n"), start=1)
        if line.strip()
    ]
    if _ONLY_IDS.fullmatch(text):
        items = [
            Item(_whole(part, where), where)
            for where, line in lines
            for part in re.split(r"[\s,;]+", line.strip(" \t,;"))
            if part
        ]
    else:
        items = _typed(lines, _line_text)
    return _finished(path, items, path.name)


def _from_values(path: Path, found: Any, column: str | None) -> TokenFile:
    """The entries of a JSON or YAML file."""
    how = path.name
    if isinstance(found, dict):
        if "token_ids" in found and "candidates" in found:
            key = "candidates"  # what `knockout export --format json` writes
        else:
            lists = [key for key, value in found.items() if isinstance(value, list)]
            known = [key for key in _LIST_KEYS if key in lists] or lists
            if len(lists) != 1 and len(known) != 1:
                keys = shortened(", ".join(map(str, found))) or "none"
                raise UsageError(f"{path}: found a mapping with keys {keys}; expected a list")
            key = known[0]
        how, found = f"{path.name}, key {key}", found[key]
    if not isinstance(found, list):
        raise UsageError(
            f"{path}: found a {type(found).__name__}; expected a list of token ids or texts"
        )
    cells: list[tuple[str, Any]] = [(f"{path} entry {n}", v) for n, v in enumerate(found, start=1)]
    names = [""] * len(cells)
    if found and all(isinstance(value, dict) for value in found):
        columns = list(dict.fromkeys(str(key) for value in found for key in value))
        chosen = _pick_column(path, column, columns)
        names = [str(value.get("candidate", value.get("name", ""))) for value in found]
        cells = [(f"{where}, key {chosen}", v.get(chosen)) for where, v in cells]
        how = f"{how}, key {chosen}"
    elif column is not None:
        raise UsageError(f"{path}: found column: {column}; the list's entries have no keys")
    if found and all(isinstance(value, list) for _, value in cells):
        rows = zip(cells, names, strict=True)
        return _finished(path, _sets((where, ids, name) for (where, ids), name in rows), how)
    items = []
    for where, value in cells:
        if isinstance(value, str):
            items.append(Item(_checked_text(value, where), where))
        elif isinstance(value, int) and not isinstance(value, bool) and abs(value) < 10**9:
            items.append(Item(value, where))
        else:
            found = "true" if value is True else shown(value)
            raise UsageError(f"{where}: found {found}; expected a token id or a text in quotes")
    return _finished(path, items, how)


# Shared by the readers.


def _finished(path: Path, items: Sequence[Item], how: str) -> TokenFile:
    if not items:
        raise UsageError(f"{path}: found no entries; expected at least one")
    values = [item.value for item in items]
    n_sets = sum(isinstance(value, tuple) for value in values)
    n_texts = sum(isinstance(value, str) for value in values)
    counts = [
        _counted(len(values) - n_sets - n_texts, "token id"),
        _counted(n_texts, "text"),
        _counted(n_sets, "set", " of token ids"),
    ]
    note = ""
    if n_texts == len(values) and all(_WHOLE.fullmatch(str(v)) for v in values):
        note = " (in quotes, so not ids)"
    return TokenFile(tuple(items), f"{' and '.join(filter(None, counts))} from {how}{note}")


def _counted(number: int, word: str, more: str = "") -> str:
    return f"{number} {word}{'' if number == 1 else 's'}{more}" if number else ""


def _typed(
    cells: Sequence[tuple[str, str]],
    to_text: Callable[[str, str], str],
    *,
    ids_only: bool = False,
) -> list[Item]:
    """Ids if every cell is a whole number, else texts."""
    whole = [_WHOLE_OR_FLOAT.fullmatch(cell.strip()) is not None for _, cell in cells]
    if all(whole):
        return [Item(_whole(cell, where), where) for where, cell in cells]
    where, odd = cells[whole.index(False)]
    # Short numbers may be texts too; longer ones are hardly ever tokens.
    ids = sum(
        is_whole and len(cell.strip()) > 1 for is_whole, (_, cell) in zip(whole, cells, strict=True)
    )
    if ids_only or 2 * ids > len(cells):
        raise UsageError(
            f"{where}: found {shortened(repr(odd))}; expected a token id (a whole number)"
            + (f", as {sum(whole)} others are" if any(whole) else "")
        )
    return [Item(to_text(where, cell), where) for where, cell in cells]


def _whole(cell: str, where: str) -> int:
    found = _WHOLE_OR_FLOAT.fullmatch(cell.strip())
    assert found is not None
    if len(found[1]) > _MOST_DIGITS:
        raise UsageError(f"{where}: found {shortened(cell)}; expected a token id")
    return int(found[1])


def _line_text(where: str, line: str) -> str:
    bare = line.strip()
    if len(bare) > 1 and bare[0] == bare[-1] == '"':
        try:
            text = json.loads(bare)
        except json.JSONDecodeError as error:
            raise UsageError(
                f"{where}: {shortened(bare)} is not a JSON string: {error.msg}"
            ) from None
    elif bare != line:
        raise UsageError(
            f"{where}: white space around {shortened(repr(bare))}; quote the string as in JSON to "
            f'keep it, for example "{shortened(line)}"'
        )
    else:
        text = line
    return _checked_text(text, where)


def _cell_text(where: str, cell: str) -> str:
    """A text of a table: as it stands, or quoted as `knockout mine` and our tables write it."""
    if len(cell) > 2 and cell[0] == cell[-1] == '"':
        try:
            return _checked_text(json.loads(cell), where)
        except json.JSONDecodeError:
            pass
    return _checked_text(cell, where)


def _checked_text(text: str, where: str) -> str:
    if not text:
        raise UsageError(f"{where}: found an empty string; expected a token's text")
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise UsageError(f"{where}: found half of a surrogate pair in {shortened(ascii(text))}")
    return text


def _ids_in(cell: str) -> list[Any] | None:
    """The JSON list in a cell; None if it is something else."""
    if not cell.startswith("["):
        return None
    try:
        found = json.loads(cell)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, list) else None


def _sets(rows: Iterable[tuple[str, Sequence[Any], str]]) -> list[Item]:
    """Sets of ids, each once: a table of verdicts has a row for each benchmark."""
    items: list[Item] = []
    seen = set()
    for where, ids, name in rows:
        if not ids or any(type(i) is not int or abs(i) >= 10**9 for i in ids):
            raise UsageError(f"{where}: found {shown(ids)}; expected a list of token ids")
        key = (name, tuple(ids))
        if key in seen:
            continue
        seen.add(key)
        items.append(Item(ids[0] if len(ids) == 1 else tuple(ids), where, name))
    return items


def _pick_column(path: Path, column: str | None, columns: Sequence[str]) -> str:
    have = shortened(", ".join(columns)) or "none"
    if column is not None:
        if columns.count(column) == 1:
            return column
        problem = "no column" if column not in columns else "more than one column"
        raise UsageError(f"{path}: {problem} {column!r}; it has {have}")
    if len(columns) == 1:
        return columns[0]
    known = [name for name in _ID_COLUMNS if name in columns]
    if len(known) == 1:
        return known[0]
    raise UsageError(f"{path}: which column? Name one with `column:`; it has {have}")


def _without_blank_end(path: Path, cells: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """A shorter column ends in blank cells; a blank one between others is an error."""
    end = max((n for n, (_, cell) in enumerate(cells, start=1) if cell), default=0)
    for where, cell in cells[:end]:
        if not cell:
            raise UsageError(f"{where}: found an empty cell; expected a token id or a text")
    return list(cells[:end])


def _text_of(path: Path) -> str:
    """The text of a file: UTF-8, or UTF-16 if it starts with that mark; \\n ends a line."""
    raw = path.read_bytes()
    encoding = "utf-16" if raw[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
    return raw.decode(encoding).replace("\r\n", "\n").replace("\r", "\n")


def _json(path: Path, text: str, line: int | None = None) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        at = line or error.lineno
        raise UsageError(f"{path} line {at}: not valid JSON: {error.msg}") from None
