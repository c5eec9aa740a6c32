r"""Mathematical answers: one directional comparison of a response with its gold answer.

Three steps: the answer is found (`extract`), taken apart (`notation`, after the `rewrites`), and
compared (`compare`).

Nothing here limits time or memory; `knockout.grading.pool` does.
"""

from __future__ import annotations

import re

from knockout.grading.compare import same
from knockout.grading.extract import last_answer
from knockout.grading.grade import Grade, answer_part
from knockout.grading.notation import LONGEST, read
from knockout.grading.rewrites import clean

__all__ = ["check_gold", "grade_maths", "same_answer"]

# A whole number may be written with zeros behind the point.
_INTEGER = re.compile(r"([-+]?\d+)(?:\.0*)?")


def grade_maths(
    *,
    gold: str,
    response: str | None,
    integer: bool = False,
    think_end: str | None = "</think>",
    think_open: bool = False,
    finished: bool = True,
    as_text: bool = False,
) -> Grade:
    r"""Grades the answer part of a response.

    Args:
        gold: The reference answer: LaTeX without dollar signs, or plain text.
        response: The text as generated; None if generation failed.
        integer: Whether answers are whole numbers (AIME); anything else is then unparsed.
        think_end: See `answer_part`.
        think_open: See `answer_part`.
        finished: False if the response was cut by length.
        as_text: Whether the gold answer cannot be read (see `check_gold`), so that the two are
            compared as text.

    >>> grade_maths(gold="2", response=r"It is \boxed{2 2/3}").correct
    0
    >>> grade_maths(gold="073", response=r"\boxed{73}", integer=True).correct
    1
    """
    if response is None:
        return Grade(0, "error", "no response")
    text = answer_part(response, think_end=think_end, think_open=think_open)
    if text is None:
        return Grade(0, "incomplete")
    found = last_answer(text)
    if found is None:
        return Grade(0, "unparsed" if finished else "incomplete")
    if as_text or _plain(found) == _plain(_unboxed(gold)) != "":
        return Grade(int(_same_text(_unboxed(gold), found)), "ok", found)
    if integer:
        value = _whole_number(found)
        if value is None:
            return Grade(0, "unparsed", found)
        return Grade(int(value == _whole_number(gold)), "ok", str(value))
    answer = read(found)
    if answer is None:
        return Grade(0, "unparsed", found)
    gold_answer = read(_unboxed(gold))
    if gold_answer is None:
        return Grade(int(_same_text(_unboxed(gold), found)), "ok", found)
    try:
        right = same(gold_answer, answer)
        if not right and gold_answer.kind == "word":  # "June 20", of which a part may be a number
            right = _letters(_unboxed(gold)) == _letters(found)
        return Grade(int(right), "ok", found)
    except MemoryError:
        raise
    except Exception:
        # SymPy raises all kinds on text that reads like an expression and is none ("|p(15)| > 3").
        # The gold answer was compared with itself before, so the answer is at fault.
        return Grade(0, "unparsed", found)


def same_answer(*, gold: str, answer: str) -> bool:
    """Whether an answer (bare, without a box) means the gold answer. Not symmetric."""
    left, right = read(_unboxed(gold)), read(_unboxed(answer))
    return left is not None and right is not None and same(left, right)


def check_gold(gold: str, *, integer: bool = False) -> str | None:
    """Returns why a gold answer can be compared as text only, or None if it equals itself."""
    if integer:
        return None if _whole_number(gold) is not None else "it is not a whole number"
    answer = read(_unboxed(gold))
    if answer is None:
        return "it cannot be read as an answer"
    try:
        return None if same(answer, answer) else "it does not equal itself"
    except MemoryError:
        return "reading it takes too much memory"
    except Exception:  # SymPy raises all kinds
        return "it cannot be read as an answer"


def _plain(text: str) -> str:
    return "".join(clean(text).split()) if len(text) <= LONGEST else text.strip()


def _letters(text: str) -> str:
    return re.sub(r"\\(?:text[a-z]*|mathrm|mbox)\b|[\s{}~.]|\\[ ,;]", "", text).casefold()


def _same_text(gold: str, answer: str) -> bool:
    """Compares what cannot be read: without spaces, case, and what only changes the looks."""
    texts = [read(text, as_text=True) for text in (gold, answer)]
    words = [text.word if text else "" for text in texts]
    return bool(gold.strip()) and (
        _plain(gold).casefold() == _plain(answer).casefold() or "" != words[0] == words[1]
    )


def _unboxed(gold: str) -> str:
    return (last_answer(gold) or "") if r"\boxed" in gold else gold.strip().strip("$")


def _whole_number(text: str) -> int | None:
    answer = read(re.split(r"=|\\equiv(?![a-z])", text)[-1])
    if answer is None or answer.kind != "scalar":
        return None
    digits = _INTEGER.fullmatch(answer.text.replace(" ", ""))
    return int(digits[1]) if digits else None
