"""From what a notebook has at hand to the plain values of a sweep file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from knockout.errors import UsageError, shortened, shown

__all__ = ["plain_values"]

_ID_COLUMNS = ("token_id", "rock_id", "token_ids", "id", "ids")


def plain_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a sweep, with NumPy's and pandas' values made plain.

    Args:
        values: Keys and values. `candidates` may be a path, a list, array or column of token ids
            or texts, or a table; `benchmarks` one name.

    Raises:
        UsageError: A table has no column of ids, or a list contains something else.
    """
    found = {key: _plain(value) for key, value in values.items() if key != "candidates"}
    if isinstance(found.get("benchmarks"), str):
        found["benchmarks"] = [found["benchmarks"]]
    if "candidates" in values:
        found["candidates"] = _candidates(values["candidates"])
    return found


def _candidates(value: Any) -> Any:
    if isinstance(value, str | os.PathLike):
        return {"file": os.fspath(value)}
    if hasattr(value, "columns"):
        return _listed(_column(value))
    if hasattr(value, "tolist") or isinstance(value, list | tuple | set | frozenset | range):
        items = _plain(sorted(value) if isinstance(value, set | frozenset) else value)
        return _listed(items if isinstance(items, list) else [items])
    return _plain(value)


def _column(table: Any) -> list[Any]:
    names = [str(name) for name in table.columns]
    known = [name for name in _ID_COLUMNS if name in names]
    if len(names) != 1 and not known:
        have = shortened(", ".join(names)) or "none"
        raise UsageError(
            f"Sweep(...): `candidates`: a table with columns {have}; expected one called token_id, "
            "or give the column itself"
        )
    column = table[table.columns[names.index(known[0])] if known else table.columns[0]]
    found: list[Any] = _plain(column.dropna().tolist())
    return found


def _listed(items: list[Any]) -> dict[str, Any]:
    """Ids, texts and sets of ids by kind."""
    ids: list[int] = []
    texts: list[str] = []
    sets: dict[str, list[Any]] = {}
    for item in items:
        if isinstance(item, float) and item.is_integer():
            item = int(item)  # a column with gaps is one of floats
        if isinstance(item, bool) or not isinstance(item, int | str | list):
            raise UsageError(
                f"Sweep(...): `candidates`: found {shown(item)}; expected token ids or texts"
            )
        if isinstance(item, list) and len(item) == 1 and isinstance(item[0], int):
            item = item[0]
        if isinstance(item, list):
            sets[" + ".join(map(str, item))] = item
        elif isinstance(item, str):
            texts.append(item)
        else:
            ids.append(item)
    given = {"ids": ids, "strings": texts, "sets": sets}
    return {key: value for key, value in given.items() if value} or {"ids": []}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | range):
        return [_plain(item) for item in value]
    if type(value).__module__.split(".")[0] in ("numpy", "pandas") and hasattr(value, "tolist"):
        return _plain(value.tolist())
    return value
