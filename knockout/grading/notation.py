r"""How an answer is written: separators, mixed numbers, units, bases, words and brackets."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from typing import Literal

__all__ = ["Answer", "read"]

Kind = Literal["scalar", "word", "base", "list", "set", "()", "(]", "[)", "[]"]


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer taken apart, not yet computed.

    Attributes:
        kind: "scalar" (one expression), "word", "base" (a number in a named base), "list" (members
            without brackets), "set" (members in braces), or a pair of brackets, where order counts.
        text: The expression; for a base, its digits and the base.
        word: The answer as a lower-case word, for comparison with an answer that is a word.
        items: The members of a list, set or tuple.
        unit: Canonical unit, or "".
        name: Left side of "x = ...", or "".
    """

    kind: Kind
    text: str = ""
    word: str = ""
    items: tuple[Answer, ...] = ()
    unit: str = ""
    name: str = ""


_SYMBOLS = {
    "−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "÷": "/", "π": r"\pi ", "∞": r"\infty ",
    "≤": r"\leq ", "≥": r"\geq ", "∪": r"\cup ", "∈": r"\in ", "±": r"\pm ", "°": r"^\circ ",
    "²": "^2", "³": "^3", "€": r"\text{euros}", "√": r"\sqrt ", "\xa0": " ", "\u202f": " ",
}  # fmt: skip
_SPACES = re.compile(r"\\(?:quad|qquad|[;:> ])|~|\n")
_WRAPPERS = re.compile(r"\\(?:text(?:bf|it|rm|normal|sf)?|mbox|mathrm|mathbf|mathit)\b")
# Text that is mathematics: a number, the constants e and i, a letter that is no unit.
_TEXT_MATHS = re.compile(
    r"(?<![\d})])(?<![\d})]\s)\\text\s*\{\s*([A-Za-z]|[-+]?\d[^{}]*)\s*\}|\\text\s*\{\s*([ei])\s*\}"
)
_MARKED_THOUSANDS = re.compile(
    r"(?<![\d.])\d{1,3}(?:(?:\s*,\\!\s*|\s*\\[,!]\s*|\{,\})\d{3})+(?!\d)"
)
_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:(?:,\d{3})+|(?: \d{3})+)(?![\d,]| \d)")
_FRACTION = re.compile(r"\\frac\s*(?:\{([^{}]*)\}|(\d))\s*(?:\{([^{}]*)\}|(\d))")
_MIXED = re.compile(r"(?<![\d.^_{])(\d+)\s*\\frac\{(\d+)\}\{(\d+)\}")
_MIXED_PLAIN = re.compile(r"(?<![\d.])(\d+)\s+(\d+)\s*/\s*(\d+)(?![\d.])")
_SPLIT_NUMBER = re.compile(r"[\d.]\s+\.?\d")
_BASE = re.compile(r"(-?)([0-9A-Za-z]*\d[0-9A-Za-z]*)_\{?(\d+)\}?")
_NAME = re.compile(r"\s*([A-Za-z]\w{0,2}(?:\([a-z]\))?)\s*(?:=|\\in\b)\s*(?!=)(.+)", re.DOTALL)
_PLAIN_WORD = re.compile(r"[A-Za-z]{3,}(?:[ '-][A-Za-z]+)*")
_TEXT_WORD = re.compile(r"\\text\s*\{([^{}]*[A-Za-z][^{}]*)\}")
_UNIT = re.compile(
    r"(?P<value>.*?[\d})!a-z])\s*(?:(?:\^\s*\{?\s*\\circ\s*\}?|\\degree)(?P<degree>)"
    r"|\\?%(?P<percent>)|\\text\s*\{(?P<text>[^{}]*)\}\s*(?P<power>\^\{?[23]\}?)?)\s*",
    re.DOTALL,
)
_PLAIN_UNIT = re.compile(
    r"(?P<value>.*[\d})])\s*(?P<unit>[A-Za-z]{1,12}(?: [a-z]+)*)(?P<power>\^\{?[23]\}?)?"
)
_FUNCTION = re.compile(r"(?:sin|cos|tan|cot|sec|csc|log|exp|sqrt|mod|gcd|lcm)\b")
_UNITS = {
    "degree": "degree deg", "%": "percent percentage pct", "dollar": "usd", "cent": "¢", "euro": "",
    "hour": "hr h", "minute": "min", "second": "sec s", "day": "", "week": "", "month": "",
    "year": "yr", "mm": "millimeter millimetre", "cm": "centimeter centimetre", "m": "meter metre",
    "km": "kilometer kilometre", "inch": "inche in", "foot": "feet ft", "yard": "yd", "mile": "mi",
    "g": "gram", "kg": "kilogram", "pound": "lb", "liter": "litre l", "mph": "",
    "unit": "", "square unit": "",
}  # fmt: skip
_ALIASES = {name: unit for unit, names in _UNITS.items() for name in (unit, *names.split())}
_ALIASES["miles per hour"] = "mph"


def read(latex: str) -> Answer | None:
    r"""Takes an answer apart; None where it cannot be an answer.

    >>> read(r"1\,000\,000").text, read(r"2 1/2").text, read("3 hours").unit
    ('1000000', '(2+\\frac{1}{2})', 'hour')
    >>> read(r"\{1,2\}").kind, read("(1,2)").kind, read("1, 2").kind
    ('set', '()', 'list')
    """
    text = _clean(latex)
    return _read(text) if text else None


def _clean(latex: str) -> str:
    text = "".join(_SYMBOLS.get(c) or _vulgar(c) for c in latex)
    text = re.sub(r"\\(?:left|right|displaystyle|bigl?|bigr?)(?![a-z])", "", text)
    text = _WRAPPERS.sub(r"\\text", text)
    text = re.sub(r"\\(?:d|t|c)frac", r"\\frac", text)
    text = re.sub(r"\s*(?:,\s*)?(?:\\text\s*\{\s*(?:and|or)\s*\}|\b(?:and|or)\b)\s*", ", ", text)
    text = _MARKED_THOUSANDS.sub(lambda m: re.sub(r"\D", "", m[0]), text)
    text = _SPACES.sub(" ", text)
    text = re.sub(r"\\[,!]|(?<!\\)\$", "", text)
    text = _TEXT_MATHS.sub(lambda m: m[1] or m[2], text)
    text = _FRACTION.sub(lambda m: rf"\frac{{{m[1] or m[2]}}}{{{m[3] or m[4]}}}", text)
    text = re.sub(r"\bpi\b(?<!\\pi)", r"\\pi ", text)
    return re.sub(r"(?:\s|(?<=[\d\w})])\.)+$", "", text.strip())


def _vulgar(character: str) -> str:
    if unicodedata.category(character) != "No":
        return character
    numerator, bar, denominator = unicodedata.normalize("NFKC", character).partition("\u2044")
    return rf"\frac{{{numerator}}}{{{denominator}}}" if bar else character


def _read(text: str) -> Answer | None:
    if text.count("{") != text.count("}"):
        return None
    name = ""
    if (named := _NAME.fullmatch(text)) and len(_split(text)) == 1 and "=" not in named[2]:
        name, text = named[1].replace(" ", ""), named[2].strip()
    word = _as_word(text)
    if _TEXT_WORD.fullmatch(text) or _PLAIN_WORD.fullmatch(text):
        return Answer("word", word=word)
    if based := _BASE.fullmatch(text):
        sign, digits, base = based.groups()
        if base != "10":
            return Answer("base", f"{sign}{digits.lstrip('0').upper()}_{base}", word, name=name)
        text = sign + digits
    brackets = _brackets(text)
    if brackets:
        kind, inner = brackets
        parts = _split(inner)
        if len(parts) > 1 or kind == "set":
            return _sequence(kind, parts, word, name, text)
        if kind == "()" and not re.search(r"[-+]", inner):
            return _read(inner)
    text = _THOUSANDS.sub(lambda m: re.sub(r"\D", "", m[0]), text) if not brackets else text
    parts = _split(text)
    if len(parts) > 1:
        return _sequence("list", parts, word, name, text)
    text, unit = _split_unit(text)
    text = _MIXED.sub(_proper, _MIXED_PLAIN.sub(_proper, text))
    if not text or _SPLIT_NUMBER.search(text):
        return None
    if r"\pm" in text:
        return _sequence("list", [text.replace(r"\pm", sign, 1) for sign in "+-"], word, name, text)
    return Answer("scalar", text, word, unit=unit, name=name)


def _sequence(kind: Kind, parts: list[str], word: str, name: str, text: str) -> Answer | None:
    items: list[Answer] = []
    for part in parts:
        item = _read(part)
        if item is None:
            return None
        items += item.items if item.kind == "list" else (item,)
    if kind == "set" and len(items) == 1:
        return items[0]
    return Answer(kind, text, word, tuple(items), name=name)


def _proper(match: re.Match[str]) -> str:
    whole, numerator, denominator = match.groups()
    if int(numerator) >= int(denominator):
        return match[0]
    return rf"({whole}+\frac{{{numerator}}}{{{denominator}}})"


def _as_word(text: str) -> str:
    inside = re.sub(r"\\text\s*|[{}()\[\].,!?*\"\\]", "", text)
    return " ".join(inside.lower().split())


def _split(text: str) -> list[str]:
    """Splits at the commas and semicolons that stand outside all brackets."""
    parts, depth = [""], 0
    for c in text:
        depth += (c in "([{") - (c in ")]}")
        if c in ",;" and depth == 0:
            parts.append("")
        else:
            parts[-1] += c
    return [part.strip() for part in parts if part.strip()]


def _brackets(text: str) -> tuple[Kind, str] | None:
    """Returns the kind and the inside, where one pair of brackets encloses everything."""
    braces = text.startswith(r"\{") and text.endswith(r"\}")
    body = text.replace(r"\{", "{").replace(r"\}", "}") if braces else text
    if len(body) < 2 or body[0] not in ("{" if braces else "([") or body[-1] not in ")]}":
        return None
    depth = 0
    for i, c in enumerate(body):
        depth += (c in "([{") - (c in ")]}")
        if depth == 0 and i < len(body) - 1:
            return None
    pairs: dict[str, Kind] = {"()": "()", "(]": "(]", "[)": "[)", "[]": "[]", "{}": "set"}
    kind = pairs.get(body[0] + body[-1])
    return (kind, body[1:-1].strip()) if kind else None


def _split_unit(text: str) -> tuple[str, str]:
    if text.startswith("\\$") or text.endswith("\\$"):
        return text.replace("\\$", "").strip(), "dollar"
    if match := _UNIT.fullmatch(text):
        if match["degree"] is not None:
            return match["value"].strip(), "degree"
        if match["percent"] is not None:
            return match["value"].strip(), "%"
        return match["value"].strip(), _canonical(match["text"], match["power"])
    if (match := _PLAIN_UNIT.fullmatch(text)) and _known(match["unit"]):
        return match["value"].strip(), _canonical(match["unit"], match["power"])
    return text, ""


def _known(unit: str) -> bool:
    # After a number, one letter is a variable (5 m may be 5 times m), but a word is what is counted.
    if _canonical(unit, None).rstrip("^23") in _UNITS:
        return len(unit) > 1
    return len(unit.split()[0]) > 2 and not _FUNCTION.match(unit)


def _canonical(unit: str, power: str | None) -> str:
    words = unit.lower().replace(".", "").split()
    exponent = re.sub(r"\D", "", power or "")
    for word, value in (("square", "2"), ("sq", "2"), ("cubic", "3"), ("cu", "3")):
        if word in words and len(words) > 1:
            words.remove(word)
            exponent = value
    name = " ".join(words)
    for form in (name, name.removesuffix("s"), name.removesuffix("es")):
        if form in _ALIASES:
            name = _ALIASES[form]
            break
    else:
        name = name.removesuffix("s")
    return f"{name}^{exponent}" if exponent else name
