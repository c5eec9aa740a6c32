"""The grade of one response, and the part of a response that is graded."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from knockout.tokens.thinking import after_thinking

__all__ = ["Grade", "Status", "answer_part"]

Status = Literal["ok", "unparsed", "incomplete", "timeout", "error"]

_ENDS = re.compile(
    r"(?:<\|(?:im_end|endoftext|eot_id|end_of_text|end|eom_id)\|>|</s>|<eos>|<end_of_turn>)$"
)


@dataclass(frozen=True, slots=True)
class Grade:
    """The verdict on one response.

    Attributes:
        correct: 1 or 0; 1 only if `status` is "ok".
        status: "ok" (graded), "unparsed" (no answer could be read), "incomplete" (an unclosed
            think tag, or cut by length before an answer), "timeout" (the grader ran out of time:
            unknown, not wrong) or "error" (no response, or the grader failed on it).
        extracted: The answer as read from the response, or what went wrong; None if there is
            nothing to show.
    """

    correct: int
    status: Status
    extracted: str | None = None

    def __post_init__(self) -> None:
        if self.correct not in (0, 1) or (self.correct and self.status != "ok"):
            raise ValueError(f"a grade of {self.correct} with status {self.status!r}")


def answer_part(response: str, *, think_end: str | None, think_open: bool = False) -> str | None:
    """Returns what follows the thinking, without end-of-text markers; None if still thinking.

    Args:
        response: The text as generated.
        think_end: The closing tag, for example "</think>"; None if there is no thinking.
        think_open: Whether the prompt itself already opened the tag.

    >>> answer_part("<think>hm</think>\\n7<|im_end|>", think_end="</think>")
    '7'
    >>> answer_part("<think>hm", think_end="</think>") is None
    True
    """
    text = after_thinking(_without_ends(response), think_end, opened=think_open)
    return None if text is None else _without_ends(text)


def _without_ends(text: str) -> str:
    """The text without end-of-text markers behind it; the white space before them goes as well."""
    bare = text.rstrip()
    while match := _ENDS.search(bare, max(0, len(bare) - 32)):
        text = bare = bare[: match.start()].rstrip()
    return text
