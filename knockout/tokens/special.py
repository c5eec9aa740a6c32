"""Which ids of a tokenizer are special tokens."""

from __future__ import annotations

from typing import Any

__all__ = ["special_ids"]


def special_ids(tokenizer: Any) -> frozenset[int]:
    """Ids of a tokenizer's special tokens.

    `all_special_ids` has only those with a role (begin, end, padding, ...). The others, such as
    markers of tools, files or channels, are marked as special in the table of added tokens.

    Args:
        tokenizer: A Hugging Face tokenizer.

    Returns:
        The ids of both kinds, the tokenizer's own end of text included.
    """
    found = {int(token) for token in tokenizer.all_special_ids}
    added = getattr(tokenizer, "added_tokens_decoder", {})
    found.update(int(token) for token, entry in added.items() if getattr(entry, "special", False))
    if getattr(tokenizer, "eos_token_id", None) is not None:
        found.add(int(tokenizer.eos_token_id))
    return frozenset(found)
