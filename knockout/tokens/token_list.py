"""The self-describing token list: what `knockout export --format json` writes and trainers read.

The schema is in docs/training.md. Its version is raised when a key changes its meaning; keys may be
added without that.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from knockout.errors import UsageError, shortened
from knockout.tokens.lists import read_list

if TYPE_CHECKING:
    import pandas as pd

__all__ = [
    "SCHEMA",
    "VERSION",
    "document",
    "read_score_table",
    "read_scores",
    "read_token_list",
    "vocabulary_fingerprint",
]

SCHEMA = "knockout-token-list"
VERSION = 1

# What published lists call our columns.
_OTHER_NAMES = {
    "token_id": ("rock_id",),
    "frequency": ("rock_freq",),
    "mean_kl": ("rock_mean_kl",),
    "rock_score": ("rock_freq_mean",),
}


def vocabulary_fingerprint(tokenizer: Any) -> str:
    """Hash of what token ids mean: every piece of the vocabulary with its id.

    Chat templates and padding do not count, so a base model, its instructed version and a larger
    sibling share a fingerprint if they share their ids.
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
            if the ids mean something else, and so is any id beyond the vocabulary.
        force: Takes the list in spite of that.
        column: Column of the ids in a table.

    Returns:
        Token ids, rising.

    Raises:
        UsageError: The list cannot be read, or is for another tokenizer.
    """
    ids = _described(path, tokenizer, force) if path.suffix.lower() == ".json" else None
    if ids is None:
        ids = []
        for item in read_list(path, column):
            if isinstance(item.value, str):
                found = shortened(repr(item.value))
                raise UsageError(f"{item.where}: found {found}; expected a token id")
            ids += [item.value] if isinstance(item.value, int) else item.value
    if tokenizer is not None and not force:
        size = max(tokenizer.get_vocab().values()) + 1
        if wrong := [i for i in ids if not 0 <= i < size]:
            raise UsageError(
                f"{path}: found token id {wrong[0]}; the tokenizer has 0 to {size - 1}"
            )
    return tuple(sorted(set(ids)))


def read_scores(path: Path, column: str) -> dict[int, float]:
    """One score of each token id in a table of scores, such as those of `knockout mine`.

    Args:
        path: See `read_score_table`.
        column: The score by our name or by the file's. Rows without it are left out.

    Raises:
        UsageError: The table cannot be read, has no such column or no column of token ids, or holds
            something else than numbers there.
    """
    table = read_score_table(path)
    if column not in table:  # the file's own name for it
        column = next((o for o, names in _OTHER_NAMES.items() if column in names), column)
    if column not in table:
        have = shortened(", ".join(map(str, table.columns)))
        raise UsageError(f"{path}: no column {column!r}; it has {have}")
    known = table[table[column].notna()]
    try:
        scores = known[column].astype(float)
    except ValueError as error:
        raise UsageError(f"{path}: expected numbers in {column}: {error}") from None
    return dict(zip(known["token_id"].tolist(), scores.tolist(), strict=True))


def read_score_table(path: Path) -> pd.DataFrame:
    """Reads a table of token scores: ours, a mined list, or a published rock list.

    Args:
        path: CSV or Parquet with the column `token_id` or `rock_id`.

    Returns:
        The table with our column names, one row per token id.

    Raises:
        UsageError: The file cannot be read, has no column of ids, or an id twice.
    """
    import pandas as pd

    try:
        table = pd.read_parquet(path) if path.suffix == ".parquet" else pd.read_csv(path)
    except (OSError, ValueError) as error:
        what = "no such file" if isinstance(error, FileNotFoundError) else shortened(str(error))
        raise UsageError(f"{path}: cannot be read as a table: {what}") from None
    table = table.rename(columns=_renamed(table.columns))
    if "token_id" not in table:
        have = shortened(", ".join(map(str, table.columns)))
        raise UsageError(f"{path}: no column token_id or rock_id; it has {have}")
    table = table[table["token_id"].notna()].reset_index(drop=True)
    try:
        ids = table["token_id"].astype(float)
        if (ids % 1 != 0).any():
            raise ValueError(f"found {ids[ids % 1 != 0].iloc[0]:g}")
        table["token_id"] = ids.astype(int)
    except (ValueError, OverflowError) as error:
        problem = shortened(str(error))
        raise UsageError(f"{path}: expected whole numbers in token_id: {problem}") from None
    twice = table["token_id"][table["token_id"].duplicated()]
    if len(twice):
        raise UsageError(
            f"{path}: token id {twice.iloc[0]} has two rows; expected one row for each id"
        )
    return table


def _renamed(columns: Iterable[Any]) -> dict[str, str]:
    """Our name for each column that another list calls differently."""
    there = set(map(str, columns))
    return {
        other: ours
        for ours, others in _OTHER_NAMES.items()
        for other in others
        if other in there and ours not in there
    }


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
