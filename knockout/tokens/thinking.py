r"""Where the thinking of a response ends and its answer begins.

Tags may be plain text (`<think>…</think>`), special tokens (`[THINK]…[/THINK]`), opened by the prompt,
or channels (`<|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…`).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Iterable
from typing import Any

__all__ = ["after_thinking", "answer_span", "known_end", "opened_by", "response_text"]

_CHANNEL = "<|channel|>"
_FINAL = "<|channel|>final"
_MESSAGE = "<|message|>"
_KNOWN_ENDS = (
    "</think>", "[/THINK]", "<|channel|>final<|message|>", "<|END_THINKING|>", "</seed:think>",
    "</thinking>", "</thought>", "</reasoning>", "<|end_of_thought|>", "◁/think▷",
)  # fmt: skip
_OTHER_OPENINGS = {
    "<|END_THINKING|>": "<|START_THINKING|>",
    "<|end_of_thought|>": "<|begin_of_thought|>",
}
_CHANNEL_TOKENS = frozenset(
    {_CHANNEL, _MESSAGE, "<|start|>", "<|end|>", "<|return|>", "<|call|>", "<|constrain|>"}
)
# Special tokens that open a turn: in the middle of a response, one that the model made up.
_TURN_STARTS = frozenset(
    {"<|im_start|>", "<|start_header_id|>", "<start_of_turn>", "<|user|>", "<|User|>", "<｜User｜>",
     "[INST]", "<|begin_of_text|>", "<s>", "<bos>", "<|startoftext|>", "<|im_user|>", "<|role_start|>"}
)  # fmt: skip
_SECOND_TURN = re.compile(
    r"<\|im_start\|>|<\|start_header_id\|>|<start_of_turn>|<\|start\|>(?!assistant)|\[INST\]|<｜User｜>"
    r"|(?:<\|im_end\|>|<\|eot_id\|>|<\|end\|>|<\|endoftext\|>)\s{0,3}<\|user\|>"
)


def opening(think_end: str) -> str:
    """The tag that opens what `think_end` closes; "" if there is none."""
    if think_end in _OTHER_OPENINGS:
        return _OTHER_OPENINGS[think_end]
    opened = think_end.replace("/", "", 1)
    return opened if opened != think_end else ""


def known_end(template: str) -> str | None:
    """The closing tag that a chat template speaks of, or None."""
    return next(
        (
            end
            for end in _KNOWN_ENDS
            if end in template or (end.startswith(_CHANNEL) and _CHANNEL in template)
        ),
        None,
    )


def opened_by(prompt: str, think_end: str) -> bool:
    """Whether a prompt ends inside an open thinking part."""
    end = prompt[-200:].rstrip()
    if end.endswith(_MESSAGE) and _CHANNEL in end:
        return not end[end.rindex(_CHANNEL) :].startswith(_FINAL)
    opened = opening(think_end)
    return bool(opened) and end.endswith(opened)


def answer_span(
    text: str, think_end: str | None, *, opened: bool = False
) -> tuple[int, int] | None:
    """Returns where the answer begins and ends in a response; None while it is thinking.

    A second turn that the model made up is no part of it.
    """
    begin = len(text) - len(text.lstrip())
    if (second := _SECOND_TURN.search(text, begin + 1)) is not None:
        text = text[: second.start()]
    if not think_end:
        return 0, len(text)
    if _CHANNEL in text:
        return _final_channel(text)
    at = text.rfind(think_end)
    if at >= 0:
        start = at + len(think_end)
        return start + len(text[start:]) - len(text[start:].lstrip()), len(text)
    if opened or ((tag := opening(think_end)) and tag in text):
        return None
    return 0, len(text)


def _final_channel(text: str) -> tuple[int, int] | None:
    end = text.find("<|return|>")
    text = text[: end if end >= 0 else len(text)]
    at = text.rfind(_FINAL)
    message = text.find(_MESSAGE, at) if at >= 0 else -1
    if message < 0:
        return None
    start = message + len(_MESSAGE)
    ends = [
        p for mark in ("<|end|>", "<|start|>", "<|call|>") if (p := text.find(mark, start)) >= 0
    ]
    return start, min(ends, default=len(text))


def after_thinking(text: str, think_end: str | None, *, opened: bool = False) -> str | None:
    r"""Returns the answer of a response; None if it is still thinking.

    >>> after_thinking("[THINK]hm[/THINK]\n7", "[/THINK]")
    '7'
    >>> after_thinking("<think>hm", "</think>") is None
    True
    """
    span = answer_span(text, think_end, opened=opened)
    return None if span is None else text[span[0] : span[1]]


def response_text(
    tokenizer: Any,
    tokens: Iterable[int],
    *,
    stop: Collection[str] = (),
    eos_ids: Collection[int] = (),
    think_end: str | None = None,
    opened: bool = False,
) -> str:
    """The text of a trajectory as graders get it.

    Without end-of-text tokens, without other special tokens, except those that mark the thinking,
    without a second turn that the model made up, and up to the first stop string of the answer.

    Args:
        tokenizer: A Hugging Face tokenizer.
        tokens: (T,) token ids.
        stop: Stop strings; they count in the answer only.
        eos_ids: Ids that end a trajectory.
        think_end: The closing tag; None if there is no thinking.
        opened: Whether the prompt itself opened the thinking.
    """
    ids = [int(i) for i in tokens]
    while ids and ids[-1] in eos_ids:
        ids.pop()
    special = _special_tokens(tokenizer)
    if special.keys() & set(ids):
        channels = any(special.get(i) == _CHANNEL for i in ids)
        marks = {think_end, opening(think_end or "")} | (_CHANNEL_TOKENS if channels else set())
        ids = _first_turn(ids, special, channels)
        ids = [
            i
            for i in ids
            if i not in special or special[i] in marks or _in_tag(special[i], think_end)
        ]
        text = str(tokenizer.decode(ids, skip_special_tokens=False))
    else:
        text = str(tokenizer.decode(ids, skip_special_tokens=True))
    span = answer_span(text, think_end, opened=opened) if stop else None
    if span is not None:
        found = [at for part in stop if part and (at := text.find(part, *span)) >= 0]
        if found:
            return text[: min(found)]
    return text


def _first_turn(ids: list[int], special: dict[int, str], channels: bool) -> list[int]:
    seen_text = False
    for n, i in enumerate(ids):
        if seen_text and special.get(i) in _TURN_STARTS:
            # A line's end may stand between the end of a turn and the next one's start.
            return ids[: next((m for m in range(n - 1, max(n - 4, 0), -1) if ids[m] in special), n)]
        if channels and special.get(i) == "<|return|>":
            return ids[: n + 1]
        seen_text = seen_text or i not in special
    return ids


def _in_tag(token: str, think_end: str | None) -> bool:
    """Whether a special token is a part of a closing tag of several."""
    return bool(think_end) and token in str(think_end)


@functools.lru_cache(maxsize=8)
def _special_tokens(tokenizer: Any) -> dict[int, str]:
    table = getattr(tokenizer, "added_tokens_decoder", None) or {}
    return {int(i): str(token) for i, token in table.items() if getattr(token, "special", False)}
