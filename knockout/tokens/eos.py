"""Functionally equal end-of-text tokens: several ids, one action (to stop).

A model may have several ids that end its answer, for example `<|im_end|>` and `<|endoftext|>`.
Banning one of them only moves the stop to its twin and says nothing about stopping, so a ban of
one is widened to all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from knockout.tokens.special import special_ids

__all__ = ["chat_end_ids", "stop_ids", "widen_stop_ban"]

_MARK = "knockout"


def chat_end_ids(tokenizer: Any) -> tuple[int, ...]:
    """Special ids that the chat template puts right after an assistant's message.

    Args:
        tokenizer: A Hugging Face tokenizer.

    Returns:
        At most one id; empty without a template, or if no special token follows the message.
    """
    if not getattr(tokenizer, "chat_template", None):
        return ()
    from jinja2 import TemplateError

    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _MARK}]
    try:
        text = str(tokenizer.apply_chat_template(turns, tokenize=False))
    except (TemplateError, TypeError, ValueError):
        return ()  # the template needs more than messages; the generation config has to tell
    after = tokenizer.encode(text.rpartition(_MARK)[2], add_special_tokens=False)
    special = special_ids(tokenizer)
    return (int(after[0]),) if after and int(after[0]) in special else ()


def stop_ids(tokenizer: Any, path: str | Path | None = None) -> tuple[int, ...]:
    """All ids that mean "stop" for a model, rising.

    They are the tokenizer's end-of-text token, every `eos_token_id` of the checkpoint's generation
    config (or of its config, if it has none), and the token that ends an assistant's turn in
    the chat template.

    Args:
        tokenizer: A Hugging Face tokenizer.
        path: The checkpoint's folder; None leaves its configuration out.

    Returns:
        Token ids; empty if the model never stops by itself.
    """
    found = set(chat_end_ids(tokenizer))
    if path is not None:
        from knockout.tokens.checkpoint import eos_token_ids

        found.update(eos_token_ids(path, tokenizer))
    elif tokenizer.eos_token_id is not None:
        found.add(int(tokenizer.eos_token_id))
    return tuple(sorted(found))


def widen_stop_ban(
    banned: Iterable[int], stops: Sequence[int]
) -> tuple[tuple[int, ...], str | None]:
    """Makes a ban of one stop token a ban of all of them.

    Args:
        banned: Token ids of a candidate.
        stops: `stop_ids` of its model.

    Returns:
        The ids to ban, rising, and a note for the user if ids were added; a ban without any
        stop token, or with all of them, comes back as it is, without a note.

    Example:
        >>> widen_stop_ban([7, 2], [0, 2])
        ((0, 2, 7), 'token id 0 ends the text as token id 2 does; both are banned as one action')
        >>> widen_stop_ban([7], [0, 2])
        ((7,), None)
    """
    wanted = set(banned)
    named = sorted(wanted & set(stops))
    added = sorted(set(stops) - wanted)
    if not named or not added:
        return tuple(sorted(wanted)), None
    note = (
        f"{_ids(added)} {'ends' if len(added) == 1 else 'end'} the text as {_ids(named)} "
        f"{'does' if len(named) == 1 else 'do'}; "
        f"{'both' if len(added) + len(named) == 2 else 'all'} are banned as one action"
    )
    return tuple(sorted(wanted | set(stops))), note


def _ids(ids: Sequence[int]) -> str:
    return f"token id{'s' if len(ids) > 1 else ''} {', '.join(map(str, ids))}"
