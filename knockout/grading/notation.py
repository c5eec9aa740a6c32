r"""Parses an answer into its structure: lists, sets, tuples, matrices, ratios, bases, units."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from knockout.grading.environments import alignment, matrix
from knockout.grading.latex import top_level
from knockout.grading.rewrites import clean
from knockout.grading.units import split_unit

__all__ = ["LONGEST", "Answer", "read"]

Kind = Literal[
    "scalar",
    "word",
    "base",
    "ratio",
    "time",
    "list",
    "set",
    "matrix",
    "row",
    "()",
    "(]",
    "[)",
    "[]",
]
LONGEST = 400
"""Longest answer in characters; anything longer is rejected."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A parsed answer, not yet evaluated.

    Attributes:
        kind: "scalar" (one expression), "word", "base" (a number in a named base), "ratio"
            (a : b), "time" (of day), "list" (members without brackets), "set" (members in
            braces), "matrix" (of "row"s), or a pair of brackets, in which order matters.
        text: The expression; for "base", the digits and the base.
        word: The answer in lower case, for comparison with an answer that is a word.
        items: The members of a list, set, tuple, ratio, matrix or row.
        unit: Canonical unit, or "".
        name: Left side of "x = ...", or "".
        relation: The whole "left = right" if the answer is an equation, or "".
    """

    kind: Kind
    text: str = ""
    word: str = ""
    items: tuple[Answer, ...] = ()
    unit: str = ""
    name: str = ""
    relation: str = ""


_PLAIN_WORD = re.compile(r"[A-Za-z]{3,}(?:[ '-][A-Za-z]+)*")
_TEXT_WORD = re.compile(r"\\text\s*\{([^{}]*[A-Za-z][^{}]*)\}")
_COMMA_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:(?:,\d{3})+|(?: \d{3})+)(?![\d,]| \d)")
_MIXED = re.compile(r"(?<![\d.^_{])(\d+)\s*\\frac\{(\d+)\}\{(\d+)\}")
_MIXED_PLAIN = re.compile(r"(?<![\d.])(\d+)\s+(\d+)\s*/\s*(\d+)(?![\d.])")
_SPLIT_NUMBER = re.compile(r"[\d.]\s+\.?\d")
_NAME = re.compile(
    r"\s*((?:[A-Za-z]\w{0,2}|\\[a-z]+)(?:_\{?\w+\}?)?'?(?:\([a-z]\))?)\s*(?:=|\\in\b|\\equiv\b)"
    r"\s*(?!=)(.+)",
    re.DOTALL,
)
# Ways to say that there is no solution.
_NOTHING = frozenset(
    f"{no}{real}{what}"
    for no in ("no ", "no such ", "there are no ", "there is no ")
    for real in ("", "real ")
    for what in ("solution", "solutions")
) | {"none", "empty set", "the empty set", "emptyset", "varnothing"}
# Left sides that label a value but are not variables, such as an angle or a length.
_LABEL = re.compile(
    r"\s*(?:(?:m\s*)?\\angle.*|\\text\s*\{.*|\\(?:overline|overrightarrow|vec|triangle|hat)\b.*"
    r"|\|\s*[A-Z]{2}\s*\||\[\s*[A-Z]{3,}\s*\]|\(\s*[a-z](?:\s*,\s*[a-z])+\s*\)|P\s*\(.*\)"
    r"|\\Pr\s*\(.*\)|[A-Z]{3,}|[A-Za-z]\s*\(\s*-?\d+\s*\)|\\(?:vec|mathbf)\s*\{\w\})\s*"
)
_BASES = {
    "two": 2, "binary": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8,
    "octal": 8, "nine": 9, "ten": 10, "decimal": 10, "eleven": 11, "twelve": 12, "thirteen": 13,
    "fourteen": 14, "fifteen": 15, "sixteen": 16, "hexadecimal": 16, "hex": 16,
}  # fmt: skip
_DIGITS = r"(-?)\s*\(?\s*(?:\\text\s*\{\s*)?([0-9A-Za-z]*\d[0-9A-Za-z]*)\s*\}?\s*\)?"
_NUMERAL = (
    rf"(?:\\text\s*\{{)?\s*\(?\s*(?:base\s*-?\s*\}}?\s*)?(\d+|{'|'.join(_BASES)})\s*\)?\s*\}}?"
)
_BASE = re.compile(
    rf"{_DIGITS}\s*(?:_\s*\{{?\s*{_NUMERAL}\s*\}}?"
    rf"|[,\s]*\(?\s*(?:\\text\s*\{{)?\s*[,(]?\s*(?:in\s+)?base[\s-]*\}}?\s*{_NUMERAL}\s*\)?)",
    re.IGNORECASE,
)
_TIME = re.compile(
    r"\s*(\d{1,2})(?:\s*:\s*(\d\d))?\s*(?:\\text\s*\{\s*)?([ap])\.?\s?m\.?\s*\}?\s*", re.IGNORECASE
)
_CHOICE = re.compile(r"\s*\\(?:text|textbf|mathbf|mathrm|textrm)\s*\{\s*\(?([A-Z])\)")
_MODULUS = re.compile(
    r"(.*?[\w})])\s*\(?\s*(?:\\pmod|\\bmod|\\mod|\\text\s*\{\s*\(?\s*mod\s*\}|\bmod)(?![a-z])\s*"
    r"\{?\s*(\\?\w+)\s*\}?\s*\)?",
    re.DOTALL,
)


def read(latex: str, *, as_text: bool = False) -> Answer | None:
    r"""Parses an answer; returns None if it cannot be one.

    Args:
        latex: The answer, without dollar signs.
        as_text: Whether to return a word rather than None if parsing fails.

    >>> read(r"1\,000\,000").text, read(r"2 1/2").text, read("3 hours").unit
    ('1000000', '(2+\\frac{1}{2})', 'hour')
    >>> read(r"\{1,2\}").kind, read("(1,2)").kind, read("1, 2").kind
    ('set', '()', 'list')
    """
    text = clean(latex) if len(latex) <= LONGEST else ""
    found = _read(text) if text else None
    if found and (choice := _CHOICE.match(latex)):  # "(C) 12" may be given as either part
        found = replace(found, word=choice[1].lower())
    if found is None and as_text and latex.strip():
        return Answer("word", word=_as_word(text or latex))
    return found


def _read(text: str) -> Answer | None:
    text = text.strip()
    if text.replace(r"\{", "").count("{") != text.replace(r"\}", "").count("}"):
        return None
    if (aligned := alignment(text)) is not None:
        return _read(aligned)
    for form in _FORMS:
        found = form(text)
        if found is not None:
            return found
    return _terms(text)


def _related(text: str) -> Answer | None:
    r"""Reads `x = ...`, `a = b = ...` and `... \approx ...`: the value and its name."""
    signs = [(at, t) for at, t in top_level(text) if t in ("=", r"\approx", r"\in", r"\equiv")]
    if not signs or len(_split(text)) > 1:
        return None
    if (about := next((at for at, t in signs if t == r"\approx"), None)) is not None:
        left, right = text[:about].strip(), text[about + len(r"\approx") :].strip()
        of_a_name = not left or ("=" not in left and _NAME.fullmatch(f"{left}=1"))
        return _read(right if of_a_name else left)
    equals = [at for at, t in signs if t == "="]
    named = _NAME.fullmatch(text)
    if len(equals) > 1 and not re.search(r"[<>]|\\[lg]eq?\b", text):
        value = _read(text[equals[-1] + 1 :])
        name = named[1].replace(" ", "") if named else ""
        return replace(value, name=name) if value and name else value
    if named:
        value = _read(named[2])
        relation = text if equals else ""
        name = named[1].replace(" ", "")
        return replace(value, name=name, relation=relation) if value and not value.name else value
    if equals and _LABEL.fullmatch(text[: equals[0]]):
        return _read(text[equals[0] + 1 :])
    return None


def _word(text: str) -> Answer | None:
    if text.strip() in (r"\emptyset", r"\varnothing") or _as_word(text) in _NOTHING:
        return Answer("word", word="no solution")
    if _TEXT_WORD.fullmatch(text) or _PLAIN_WORD.fullmatch(text):
        # In "The function is even", only "even" is the answer.
        said = re.fullmatch(r"(?:the|this|it)\b.*\b(?:is|are)\s+(.+)", _as_word(text))
        word = said[1] if said else _as_word(text)
        return Answer("word", word="does not exist" if word == "dne" else word)
    return None


def _time(text: str) -> Answer | None:
    """Reads a time of day with a.m. or p.m.; `text` becomes minutes after midnight."""
    if not (match := _TIME.fullmatch(text)):
        return None
    hour, minute = int(match[1]), int(match[2] or 0)
    if not 1 <= hour <= 12 or minute > 59:
        return None
    of_day = hour % 12 + (12 if match[3].lower() == "p" else 0)
    return Answer("time", str(60 * of_day + minute), _as_word(text))


def _modulus(text: str) -> Answer | None:
    r"""Reads `25 \pmod{1000}`; the modulus is a unit, which may be omitted but not differ."""
    if not (match := _MODULUS.fullmatch(text)):
        return None
    value = _read(match[1])
    return replace(value, unit=f"mod {match[2]}") if value and value.kind == "scalar" else None


def _base(text: str) -> Answer | None:
    if not (match := _BASE.fullmatch(text)):
        return None
    sign, digits, *named = match.groups()
    base = next(name for name in named if name).lower()
    base = str(_BASES.get(base, base))
    if base == "10":
        return _read(sign + digits)
    if not digits.isdecimal() and not digits.isupper() and text.count("(") == 0:
        digits = digits.upper() if base == "16" else digits
    return Answer("base", f"{sign}{digits.lstrip('0').upper() or '0'}_{base}", _as_word(text))


def _ratio(text: str) -> Answer | None:
    places = [at for at, token in top_level(text) if token == ":"]
    if not places:
        to = re.fullmatch(r"(\d+)\s*(?:\\text\s*\{\s*to\s*\}|to)\s*(\d+)", text)
        return _ratio(f"{to[1]}:{to[2]}") if to else None
    ends = [-1, *places, len(text)]
    parts = [text[a + 1 : b] for a, b in itertools.pairwise(ends)]
    items = [_read(part) for part in parts]
    if any(item is None or item.kind != "scalar" for item in items):
        return None
    return Answer("ratio", text.replace(" ", ""), _as_word(text), tuple(i for i in items if i))


def _matrix(text: str) -> Answer | None:
    cells = matrix(text)
    if cells is None:
        return None
    rows = [[_read(cell) for cell in row] for row in cells]
    if any(cell is None for row in rows for cell in row):
        return None
    made = tuple(Answer("row", items=tuple(c for c in row if c)) for row in rows)
    return Answer("matrix", text, _as_word(text), made)


def _bracketed(text: str) -> Answer | None:
    brackets = _brackets(text)
    if not brackets:
        return None
    kind, inner = brackets
    parts = _split(inner)
    if kind == "set" and not inner.strip():
        return Answer("word", word="no solution")
    builder = re.match(r"\s*([a-z])\s*(?:\\mid|\||:)\s*(.+)", inner, re.DOTALL)
    if kind == "set" and builder and len(parts) == 1:  # {x | x > 3} is x > 3
        return _read(builder[2])
    if len(parts) > 1 or kind == "set":
        return _sequence(kind, parts, _as_word(text), text)
    if kind == "()" and not re.search(r"[-+]", inner):
        return _read(inner)
    return None


_FORMS: tuple[Callable[[str], Answer | None], ...] = (
    _word,
    _base,
    _time,
    _modulus,
    _related,
    _matrix,
    _bracketed,
    _ratio,
)


def _terms(text: str) -> Answer | None:
    """Reads a list without brackets, or one expression with its unit."""
    word = _as_word(text)
    if not _brackets(text):
        text = _COMMA_THOUSANDS.sub(lambda m: re.sub(r"\D", "", m[0]), text)
    parts = _split(text)
    if len(parts) > 1:
        return _sequence("list", parts, word, text)
    text, unit = split_unit(text)
    text = _MIXED.sub(_proper, _MIXED_PLAIN.sub(_proper, text))
    if not text or _SPLIT_NUMBER.search(text):
        return None
    if r"\pm" in text:
        other = text.replace(r"\mp", r"\PM")
        signs = (
            other.replace(r"\pm", "+").replace(r"\PM", "-"),
            other.replace(r"\pm", "-").replace(r"\PM", "+"),
        )
        return _sequence("list", list(signs), word, text)
    relation = text if any(token == "=" for _, token in top_level(text)) else ""
    return Answer("scalar", text, word, unit=unit, relation=relation)


def _sequence(kind: Kind, parts: list[str], word: str, text: str) -> Answer | None:
    items: list[Answer] = []
    for part in parts:
        item = _read(part)
        if item is None:
            return None
        left = part.partition("=")[0]
        if left != part and not item.name and _LABEL.fullmatch(left):
            item = replace(
                item, name="".join(left.split())
            )  # each of several values keeps its label
        items += item.items if item.kind == "list" else (item,)
    if kind == "set" and len(items) == 1:
        return items[0]
    return Answer(kind, text, word, tuple(items))


def _proper(match: re.Match[str]) -> str:
    whole, numerator, denominator = match.groups()
    if int(numerator) >= int(denominator):
        return match[0]
    return rf"({whole}+\frac{{{numerator}}}{{{denominator}}})"


def _as_word(text: str) -> str:
    inside = re.sub(r"\\text\s*|[{}()\[\].,!?*\"\\]", "", text)
    return " ".join(inside.lower().split())


def _split(text: str) -> list[str]:
    """Splits at commas and semicolons outside all brackets."""
    places = [at for at, token in top_level(text) if token in ",;"]
    ends = [-1, *places, len(text)]
    parts = [text[a + 1 : b].strip() for a, b in itertools.pairwise(ends)]
    return [part for part in parts if part]


def _brackets(text: str) -> tuple[Kind, str] | None:
    """Returns the kind and the contents if one pair of brackets encloses everything."""
    for opening, closing in ((r"\{", r"\}"), (r"\langle", r"\rangle")):
        if text.startswith(opening) and text.endswith(closing):
            inside = text[len(opening) : len(text) - len(closing)]
            if _encloses(text):
                return ("set" if opening == r"\{" else "()"), inside.strip()
    if len(text) < 2 or text[0] not in "([" or text[-1] not in ")]" or not _encloses(text):
        return None
    pairs: dict[str, Kind] = {"()": "()", "(]": "(]", "[)": "[)", "[]": "[]"}
    return pairs[text[0] + text[-1]], text[1:-1].strip()


def _encloses(text: str) -> bool:
    """Whether the first pair of brackets encloses the whole text."""
    return next(iter(top_level(text)), None) is None and not re.search(r"[)\]}][([{]", _flat(text))


def _flat(text: str) -> str:
    """Returns only the outermost brackets."""
    depth, kept = 0, []
    for token in re.findall(r"\\[A-Za-z]+|\\.|.", text, re.DOTALL):
        if token in ("(", "[", "{", r"\{", r"\langle", r"\begin"):
            kept.append(
                token[-1] if depth == 0 and token[-1] in "([{" else "(" if depth == 0 else ""
            )
            depth += 1
        elif token in (")", "]", "}", r"\}", r"\rangle", r"\end"):
            depth -= 1
            kept.append(
                token[-1] if depth == 0 and token[-1] in ")]}" else ")" if depth == 0 else ""
            )
    return "".join(kept)
