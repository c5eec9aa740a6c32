"""What a mining run is: the things that change its rollouts and scores."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from knockout.errors import KnockoutError, UsageError
from knockout.files import write_text
from knockout.sweep.identity import record_differences

__all__ = ["keep_identity", "require_same_tokenizer"]

_FORMAT = 2  # 2: positions have the length of their gradient


def require_same_tokenizer(named: Iterable[tuple[str, Any]]) -> None:
    """Demands that models share their token ids.

    Args:
        named: Pairs of what to call a model ("--teacher …") and its tokenizer; the first is the
            one that the others are compared with.

    Raises:
        UsageError: A vocabulary or the begin of text differs; the message shows an example. Ends
            of text may differ: `open_models` merges them.
    """
    (name, first), *others = named
    vocabulary = first.get_vocab()
    for other_name, other in others:
        between = f"{name} and {other_name} do not share a tokenizer"
        fix = "per-token scores need the same ids on both sides; take models of one family"
        if other.get_vocab() != vocabulary:
            theirs = other.get_vocab()
            differ = [t for t in vocabulary if theirs.get(t) != vocabulary[t]]
            differ = differ or [t for t in theirs if t not in vocabulary]
            token = min(differ, key=lambda t: (vocabulary.get(t, theirs.get(t)), t))
            raise UsageError(
                f"{between}: {len(differ)} tokens differ, for example {token!r} is id "
                f"{vocabulary.get(token)} in the first and {theirs.get(token)} in the second; {fix}"
            )
        for role in ("bos_token_id",):
            ours, theirs = getattr(first, role, None), getattr(other, role, None)
            if ours != theirs:
                raise UsageError(
                    f"{between}: {role} is {ours} in one and {theirs} in the other; {fix}"
                )


def keep_identity(path: Path, identity: dict[str, Any]) -> None:
    """Writes a run's identity, or compares it with the one that is there.

    Raises:
        UsageError: The folder contains another run; names the keys that differ.
        KnockoutError: The file is torn.
    """
    identity = {"format": _FORMAT, **identity}
    if not path.exists():
        write_text(path, json.dumps(identity, indent=2, ensure_ascii=False) + "\n")
        return
    try:
        there = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise KnockoutError(f"{path}: cannot be read ({error}); use another --out") from None
    if differ := record_differences(there, identity):
        raise UsageError(
            f"{path.parent} contains a mining run with other settings ({'; '.join(differ)}); give "
            "another --out, or delete the folder"
        )
