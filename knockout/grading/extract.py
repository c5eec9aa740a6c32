"""Finds the final answer of a mathematical response."""

from __future__ import annotations

import bisect
import re

from knockout.grading.latex import group

__all__ = ["last_answer"]

_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?:\{|(?P<bare>[0-9A-Za-z]))")
_BETWEEN_BOXES = re.compile(r"[\s$.]*(?:,|;|and|or|\\text\{\s*(?:and|or)\s*\})?(?:and|or|[\s$])*")
_MARKER = re.compile(
    r"(?:final\s+)?answer(?:\s+is|\s*[:=]|\s+(?:equals|to\s+[^.:\n]{1,60}?\s+is))\s*:?\s*",
    re.IGNORECASE,
)
_DELIMITER = re.compile(r"\$\$|\\\[|\\\]|\\\(|\\\)|\\.|\$|\n", re.DOTALL)
_CLOSING = {"$$": "$$", r"\[": r"\]", r"\(": r"\)", "$": "$"}
_CONCLUSION = re.compile(r"(?:\b(?:is|are|equals)\b|=|:)\s*(?P<value>[^=:\s][^=:]*)$")
# A sentence ends with a full stop that is not part of a decimal.
_SENTENCE_END = re.compile(r"\.(?=\s|$)|\n")
_WORD = re.compile(r"(?<!\\)\b[A-Za-z]{2,}\b")
_LONGEST = 400
# Patterns with two runs of white space, or two searches for one end, would be quadratic in a
# response that degenerates into blanks: long runs are shortened, and searches have an end.
_BLANKS = re.compile(r"\s{3,}")
_LONGEST_LINE = 1_000
_LONGEST_BOX = 2_000
_LONGEST_GAP = 60
_MOST_BOXES = 60


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
    text = _BLANKS.sub(lambda m: "\n\n" if "\n" in m[0] else " ", text)
    boxes = list(_BOX.finditer(text))
    found = _from_boxes(text, boxes[-_MOST_BOXES:]) if boxes else _without_box(text)
    if found is None or not found.strip() or len(found) > _LONGEST:
        return None
    return found.strip()


def _from_boxes(text: str, boxes: list[re.Match[str]]) -> str | None:
    """The contents of the boxes that end the text's last row of boxes, outer ones only."""
    contents: list[str] = []
    begin_of_next = 0
    for match in reversed(boxes):
        content, end = _box_content(text, match)
        if not contents:
            if content is None:
                return None
        elif content is not None and end > begin_of_next:  # the boxes so far stand inside of it
            contents = []
        elif (
            content is None
            or begin_of_next - end > _LONGEST_GAP
            or not _BETWEEN_BOXES.fullmatch(text[end:begin_of_next])
        ):
            break
        if content is not None and content not in contents:
            contents.insert(0, content)
        begin_of_next = match.start()
    return ", ".join(contents)


def _box_content(text: str, match: re.Match[str]) -> tuple[str | None, int]:
    if match["bare"]:
        return match["bare"], match.end()
    begin = match.end() - 1
    found = group(text[begin : begin + _LONGEST_BOX], 0)
    return (found[0], begin + found[1]) if found else (None, len(text))


def _without_box(text: str) -> str | None:
    text = text.replace("**", "").replace("__", "").strip()
    markers = list(_MARKER.finditer(text))
    if markers:
        rest = text[markers[-1].end() :].lstrip()
        maths = _maths(rest)
        if maths and maths[0][0] == 0:
            return _right_side(maths[0][1])
        return _plain(_SENTENCE_END.split(rest, maxsplit=1)[0])
    maths = _maths(text)
    if maths:
        return _right_side(maths[-1][1])
    last_line = text.splitlines()[-1].strip().removesuffix(".") if text else ""
    last_line = last_line.removeprefix("####").lstrip()
    conclusion = _CONCLUSION.search(last_line[-_LONGEST_LINE:])
    return _plain(conclusion["value"] if conclusion else last_line)


def _maths(text: str) -> list[tuple[int, str]]:
    r"""Where maths between `$$`, `\[`, `\(` or `$` (within a line) begins, and what it says."""
    marks = [(match.start(), match[0]) for match in _DELIMITER.finditer(text)]
    ends: dict[str, list[int]] = {}
    for n, (_, mark) in enumerate(marks):
        ends.setdefault(mark, []).append(n)
    found: list[tuple[int, str]] = []
    n = 0
    while n < len(marks):
        at, mark = marks[n]
        closing = ends.get(_CLOSING.get(mark, ""), [])
        place = bisect.bisect_right(closing, n)
        n += 1
        if place == len(closing):
            continue
        begin, end = at + len(mark), marks[closing[place]][0]
        if mark == "$":
            lines = ends.get("\n", [])
            line = bisect.bisect_right(lines, n - 1)
            if line < len(lines) and marks[lines[line]][0] < end:
                continue
        if begin < end:
            found.append((at, text[begin:end]))
            n = closing[place] + 1
    return found


def _right_side(maths: str) -> str:
    return maths.rpartition("=")[2]


def _plain(words: str) -> str | None:
    """Keeps an expression, one word, or a number with its unit; refuses prose."""
    if len(words) > _LONGEST_LINE:
        return None
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
