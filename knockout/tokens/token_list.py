"""The self-describing token list: what `knockout export --format json` writes and trainers read.

The schema is in docs/training.md. Its version is raised when a key changes its meaning; keys may be
added without that.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from knockout.errors import UsageError
from knockout.tokens.lists import read_list

__all__ = [
    "SCHEMA",
    "VERSION",
    "document",
    "read_scores",
    "read_token_list",
    "vocabulary_fingerprint",
]

SCHEMA = "knockout-token-list"
VERSION = 1


def vocabulary_fingerprint(tokenizer: Any) -> str:
    """Hash of what token ids mean: every piece of the vocabulary with its id.

    Chat templates and padding do not count, so a base model, its instructed version and a larger
    sibling share a fingerprint where they share their ids.
    """
    pairs = sorted(tokenizer.get_vocab().items(), key=lambda pair: (pair[1], pair[0]))
    text = json.dumps(pairs, ensure_ascii=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def document(
    chosen: Sequence[Mapping[str, Any]],
    *,
    model: str,
    vocabulary: str,
    run: Mapping[str, Any],
    rule: Mapping[str, Any],
    selection: Mapping[str, Any],
) -> dict[str, Any]:
    """A list as one JSON object.

    Args:
        chosen: Rows of `knockout.verdicts.export.selected`.
        model: Name of the model that was swept.
        vocabulary: Its `vocabulary_fingerprint`.
        run: What identifies the run.
        rule: How verdicts were reached.
        selection: How these rows were chosen.
    """
    return {
        "schema": SCHEMA,
        "version": VERSION,
        "model": model,
        "vocabulary": vocabulary,
        "run": dict(run),
        "rule": dict(rule),
        "selection": dict(selection),
        "token_ids": sorted({token for row in chosen for token in row["token_ids"]}),
        "candidates": [dict(row) for row in chosen],
    }


def read_token_list(
    path: Path, tokenizer: Any = None, *, force: bool = False, column: str | None = None
) -> tuple[int, ...]:
    """Reads a list of token ids for training.

    Args:
        path: What `knockout export` wrote: the self-describing JSON, a bare JSON list of ids, or a
            table with a column of ids.
        tokenizer: The tokenizer of the model to train. With it a self-describing list is refused
            where the ids mean something else, and so is any id beyond the vocabulary.
        force: Takes the list in spite of that.
        column: Column of the ids in a table.

    Returns:
        Token ids, rising.

    Raises:
        UsageError: The list cannot be read, or is for another tokenizer.
    """
    ids = _described(path, tokenizer, force) if path.suffix.lower() == ".json" else None
    if ids is None:
        items = read_list(path, column)
        for item in items:
            if not isinstance(item.value, int):
                raise UsageError(f"{item.where}: found {item.value!r}; expected a token id")
        ids = [int(item.value) for item in items]
    if tokenizer is not None and not force:
        size = max(tokenizer.get_vocab().values()) + 1
        if wrong := [i for i in ids if not 0 <= i < size]:
            raise UsageError(
                f"{path}: found token id {wrong[0]}; the tokenizer has 0 to {size - 1}"
            )
    return tuple(sorted(set(ids)))


def read_scores(path: Path, column: str) -> dict[int, float]:
    """Reads scores of token ids from a table of `knockout mine`, as CSV or Parquet.

    Raises:
        UsageError: The table cannot be read, has no such column or no column of token ids, or holds
            something else than numbers there. Rows without a score are left out.
    """
    import pandas as pd

    try:
        table = pd.read_parquet(path) if path.suffix == ".parquet" else pd.read_csv(path)
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: cannot be read: {error}") from None
    ids = next((name for name in ("token_id", "rock_id") if name in table), None)
    if ids is None or column not in table:
        have = ", ".join(map(str, table.columns))
        raise UsageError(f"{path}: no column {column if ids else 'token_id'!r}; it has {have}")
    known = table[table[ids].notna() & table[column].notna()]
    try:
        tokens, scores = known[ids].astype(int), known[column].astype(float)
    except ValueError as error:
        raise UsageError(
            f"{path}: expected whole numbers in {ids} and numbers in {column}: {error}"
        ) from None
    return dict(zip(tokens.tolist(), scores.tolist(), strict=True))


def _described(path: Path, tokenizer: Any, force: bool) -> list[int] | None:
    """Ids of a self-describing list; None for another kind of file."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None  # read_list says what is wrong
    if not isinstance(found, dict) or found.get("schema") != SCHEMA:
        return None
    if found.get("version") != VERSION:
        raise UsageError(
            f"{path}: {SCHEMA} version {found.get('version')}; this release reads {VERSION}"
        )
    ids = found.get("token_ids")
    if not isinstance(ids, list) or any(type(i) is not int for i in ids):
        raise UsageError(f"{path}: token_ids is no list of whole numbers")
    if tokenizer is not None and not force:
        here = vocabulary_fingerprint(tokenizer)
        if found.get("vocabulary") != here:
            raise UsageError(
                f"{path}: made for {found.get('model')!r} with vocabulary "
                f"{found.get('vocabulary')}, and this tokenizer's is {here}: the ids mean other "
                "tokens; make a list for this model, or force it"
            )
    return ids
