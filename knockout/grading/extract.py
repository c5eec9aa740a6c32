"""Where the final answer of a mathematical response stands."""

from __future__ import annotations

import re

__all__ = ["last_answer"]

_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?:\{|(?P<bare>[0-9A-Za-z]))")
_BETWEEN_BOXES = re.compile(r"[\s$.]*(?:,|;|and|or|\\text\{\s*(?:and|or)\s*\})?(?:and|or|[\s$])*")
_MARKER = re.compile(
    r"(?:final\s+)?answer(?:\s+is|\s*[:=]|\s+(?:equals|to\s+[^.:\n]{1,60}?\s+is))\s*:?\s*",
    re.IGNORECASE,
)
_MATHS = re.compile(
    r"\$\$(.+?)\$\$|\\\[(.+?)\\\]|(?<!\\)\$((?:\\.|[^$\\\n])+)\$|\\\((.+?)\\\)", re.DOTALL
)
_CONCLUSION = re.compile(r"(?:\b(?:is|are|equals)\b|=|:)\s*(?P<value>[^=:\s][^=:]*)$")
# A sentence ends with a full stop that is not part of a decimal.
_SENTENCE_END = re.compile(r"\.(?=\s|$)|\n")
_WORD = re.compile(r"(?<!\\)\b[A-Za-z]{2,}\b")
_LONGEST = 400


def last_answer(text: str) -> str | None:
    r"""Returns the final answer as written, or None.

    The last `\boxed{}` decides alone, even if it is empty or was never closed: an unfinished
    answer is not replaced by an earlier one. Boxes that follow each other ("\boxed{1} and
    \boxed{2}") are one list. Without a box, what counts is, in this order: what follows the last
    "answer is" or "answer:"; the last piece of maths between dollar signs, brackets or `\(`; the
    end of the last line after "=", ":" or "is"; a last line that is nothing but an expression.
    A number somewhere in prose is not an answer.

    >>> last_answer(r"so \boxed{7}, no: \boxed{\frac{1}{2}}")
    '\\frac{1}{2}'
    >>> last_answer("12 apples and 7 pears") is None
    True
    """
    boxes = list(_BOX.finditer(text))
    found = _from_boxes(text, boxes) if boxes else _without_box(text)
    if found is None or not found.strip() or len(found) > _LONGEST:
        return None
    return found.strip()


def _from_boxes(text: str, boxes: list[re.Match[str]]) -> str | None:
    contents: list[str] = []
    begin_of_next = 0
    for match in reversed(boxes):
        content, end = _box_content(text, match)
        if not contents:
            if content is None:
                return None
        elif content is None or not _BETWEEN_BOXES.fullmatch(text[end:begin_of_next]):
            break
        if content is not None and content not in contents:
            contents.insert(0, content)
        begin_of_next = match.start()
    return ", ".join(contents)


def _box_content(text: str, match: re.Match[str]) -> tuple[str | None, int]:
    if match["bare"]:
        return match["bare"], match.end()
    depth = 1
    for i in range(match.end(), len(text)):
        if text[i - 1] == "\\":
            continue
        depth += {"{": 1, "}": -1}.get(text[i], 0)
        if depth == 0:
            return text[match.end() : i], i + 1
    return None, len(text)


def _without_box(text: str) -> str | None:
    text = text.replace("**", "").replace("__", "").strip()
    markers = list(_MARKER.finditer(text))
    if markers:
        rest = text[markers[-1].end() :]
        maths = _MATHS.match(rest.lstrip())
        if maths:
            return _right_side(_inside(maths))
        return _plain(_SENTENCE_END.split(rest, maxsplit=1)[0])
    maths_found = list(_MATHS.finditer(text))
    if maths_found:
        return _right_side(_inside(maths_found[-1]))
    last_line = text.splitlines()[-1].strip().removesuffix(".") if text else ""
    conclusion = _CONCLUSION.search(last_line)
    return _plain(conclusion["value"] if conclusion else last_line)


def _inside(match: re.Match[str]) -> str:
    return next(group for group in match.groups() if group is not None)


def _right_side(maths: str) -> str:
    return maths.rpartition("=")[2]


def _plain(words: str) -> str | None:
    """Keeps an expression, one word, or a number with its unit; refuses prose."""
    words = words.strip().strip("*").removesuffix(".")
    digits = re.search(r"\d", words)
    n_words = len(_WORD.findall(words))
    if digits and n_words > 2:
        return None
    if not digits and n_words > 1:
        return None
    if digits and n_words and not re.match(r"[-+$\d\\(.]", words):
        return None
    return words
