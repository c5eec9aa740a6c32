r"""Splits the unit from a number. Units are compared, never converted."""

from __future__ import annotations

import re

__all__ = ["split_unit"]

_UNIT = re.compile(
    r"(?P<value>.*?[\d})!a-z])\s*(?:(?:\^\s*\{?\s*\\circ\s*\}?|\\degree)(?P<degree>)"
    r"|\\?%(?P<percent>)|\\text\s*\{(?P<text>[^{}]*)\}\s*(?P<power>\^\{?[23]\}?)?)\s*",
    re.DOTALL,
)
_PART = r"\\text\s*\{[^{}]*\}(?:\s*\^\s*(?:\d|\{\d\}))?"
_FRACTION = re.compile(rf"\\frac\s*\{{\s*({_PART})\s*\}}\s*\{{\s*({_PART})\s*\}}")
# Units such as m/s and kg·m² with each part in its own \text{}.
_COMPOUND = re.compile(
    rf"(?P<value>.*?[\d}})!])\s*\(?(?P<unit>{_FRACTION.pattern}"
    r"|\\text\s*\{[^{}]*\}(?:\s*(?:\^\s*\{?-?\d\}?|/|\\cdot|\\times|\\text\s*\{[^{}]*\}))+)\)?\s*",
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
_ALIASES["miles per hour"] = _ALIASES["mile/hour"] = "mph"


def split_unit(text: str) -> tuple[str, str]:
    """Returns the number and its canonical unit, or "" if it has none."""
    if text.startswith("\\$") or text.endswith("\\$"):
        return text.replace("\\$", "").strip(), "dollar"
    if match := _UNIT.fullmatch(text):
        if match["degree"] is not None:
            return match["value"].strip(), "degree"
        if match["percent"] is not None:
            return match["value"].strip(), "%"
        return match["value"].strip(), _canonical(match["text"], match["power"])
    if match := _COMPOUND.fullmatch(text):
        unit = _FRACTION.sub(r"\1/\2", match["unit"])
        unit = re.sub(r"\\text|\\cdot|\\times|[{}\s]", " ", unit)
        return match["value"].strip(), _canonical(unit, None)
    if (match := _PLAIN_UNIT.fullmatch(text)) and _known(match["unit"]):
        return match["value"].strip(), _canonical(match["unit"], match["power"])
    return text, ""


def _known(unit: str) -> bool:
    # One letter after a number may be a variable (5 m as 5 times m); a word is a unit.
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
    if raised := re.fullmatch(r"(.*[a-z])\s*\^\s*(\d)", name):
        name, exponent = raised.groups()
    parts = re.split(r"\s*/\s*|\s+per\s+", name)
    if len(parts) > 1:  # in m/s^2 the power belongs to the last part
        powers = [None] * (len(parts) - 1) + [exponent]
        joined = "/".join(_canonical(*part) for part in zip(parts, powers, strict=True))
        return _ALIASES.get(joined, joined)
    for form in (name, name.removesuffix("s"), name.removesuffix("es")):
        if form in _ALIASES:
            name = _ALIASES[form]
            break
    else:
        name = name.removesuffix("s")
    return f"{name}^{exponent}" if exponent else name
