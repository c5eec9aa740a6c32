r"""Decides whether an answer means the same as the gold answer.

math-verify turns LaTeX into SymPy expressions and compares relations, sets and terms with
variables. This module compares what math-verify gets wrong: constants (exactly), equations (up to
a factor), real functions (at sample points), ratios, times, bases, percentages, matrices and
brackets.
"""

from __future__ import annotations

import functools
import logging
import re
from dataclasses import replace
from typing import Any

from knockout.grading.notation import Answer

__all__ = ["same"]

_DECIMAL_TOLERANCE = 1e-6
_DIGITS = 60
# Functions are compared at these points: none is special, both signs, inside and outside (-1, 1).
_POINTS = ("17/37", "-13/41", "89/71", "-97/53", "251/67", "-307/59", "5/113", "1013/89")
_FEWEST_POINTS = 3


def same(gold: Answer, answer: Answer) -> bool:
    """Whether `answer` means `gold`. Not symmetric: a relation does not answer an interval."""
    if _is_choice(gold, answer):
        return True
    if _is_graph(gold.name, answer.name) or _is_graph(answer.name, gold.name):
        return _same_parts(gold, answer)
    if gold.relation and answer.relation and (gold.name, gold.text) != (answer.name, answer.text):
        by_name = bool(gold.name) and gold.name == answer.name
        return (by_name and _same_parts(gold, answer)) or _same_equation(gold, answer)
    if gold.name and answer.name and gold.name != answer.name:
        return False
    return _same_parts(gold, answer)


def _is_choice(gold: Answer, answer: Answer) -> bool:
    """Whether the answer is only the letter of a gold answer such as "(C) 12"."""
    letter = gold.word
    return (
        len(letter) == 1
        and letter.isalpha()
        and gold.text.strip().lower() != letter
        and answer.text.strip().lower() == letter
    )


def _is_graph(name: str, other: str) -> bool:
    """Whether both names can stand for the same function, as in y = ... and f(x) = ..."""
    return name == "y" and bool(re.fullmatch(r"[A-Za-z]\([a-xz]\)", other))


def _same_parts(gold: Answer, answer: Answer) -> bool:
    if gold.unit and answer.unit and gold.unit != answer.unit:
        return False
    kinds = {gold.kind, answer.kind}
    if "word" in kinds:
        return bool(gold.word) and gold.word == answer.word
    if "base" in kinds:
        return gold.kind == answer.kind and gold.text == answer.text
    if "time" in kinds:
        return _same_time(gold, answer)
    if "ratio" in kinds:
        return _same_ratio(gold, answer)
    if kinds == {"list", "()"}:
        gold, answer = _as_point(gold), _as_point(answer)
    if kinds <= {"list", "set"}:
        return _same_members(gold.items, answer.items)
    if "matrix" in kinds:
        gold, answer = _as_rows(gold), _as_rows(answer)
    if gold.kind == answer.kind and gold.kind != "scalar":  # the same pair of brackets
        return len(gold.items) == len(answer.items) and all(
            same(a, b) for a, b in zip(gold.items, answer.items, strict=True)
        )
    if "scalar" not in (gold.kind, answer.kind):
        return False
    return _same_value(gold, answer)


def _same_members(gold: tuple[Answer, ...], answer: tuple[Answer, ...]) -> bool:
    rest = list(answer)
    for item in gold:
        match = next((i for i, other in enumerate(rest) if same(item, other)), None)
        if match is None:
            return False
        del rest[match]
    return not rest


def _as_point(answer: Answer) -> Answer:
    """Turns `x = -1, y = 6` into (-1, 6)."""
    names = [item.name for item in answer.items]
    if answer.kind != "list" or len(names) < 2 or names != ["x", "y", "z"][: len(names)]:
        return answer
    return replace(
        answer, kind="()", items=tuple(replace(i, name="", relation="") for i in answer.items)
    )


def _as_rows(answer: Answer) -> Answer:
    """Turns a tuple into a column and [[1, 2], [3, 4]] into a matrix."""
    if answer.kind not in ("()", "[]"):
        return answer
    nested = answer.kind == "[]" and all(item.kind == "[]" for item in answer.items)
    rows = [item.items if nested else (item,) for item in answer.items]
    return Answer("matrix", answer.text, items=tuple(Answer("row", items=row) for row in rows))


# Ratios and times -------------------------------------------------------------------------------


def _same_time(gold: Answer, answer: Answer) -> bool:
    """6:00 p.m. equals 6:00 (a.m. or p.m. omitted) and 18:00, but not 6:00 a.m."""
    if gold.kind == answer.kind:
        return gold.text == answer.text
    time, other = (gold, answer) if gold.kind == "time" else (answer, gold)
    clock = _clock(other)
    if other.kind == "scalar" and re.fullmatch(r"\d+", other.text):
        clock = 60 * int(other.text)
    return clock is not None and clock in (int(time.text), int(time.text) - 720)


def _clock(answer: Answer) -> int | None:
    """Minutes after midnight if the answer is written as a time of day, else None."""
    match = re.fullmatch(r"(\d{1,2}):(\d\d)", answer.text) if answer.kind == "ratio" else None
    if not match or int(match[1]) > 24 or int(match[2]) > 59:
        return None
    return 60 * int(match[1]) + int(match[2])


def _same_ratio(gold: Answer, answer: Answer) -> bool:
    """Compares ratios up to a factor, or exactly if a part is zero; times of day as times."""
    clocks = _clock(gold), _clock(answer)
    if clocks[0] is not None and clocks[1] is not None:
        return clocks[0] == clocks[1]
    a, b = _parts_of_ratio(gold), _parts_of_ratio(answer)
    if a is None or b is None or len(a) != len(b):
        return False
    if any(x.is_zero for x in (*a, *b)):
        return all(_same_constant(x, y) for x, y in zip(a, b, strict=True))
    return all(_same_term(x * b[0], y * a[0]) for x, y in zip(a, b, strict=True))


def _parts_of_ratio(answer: Answer) -> list[Any] | None:
    if answer.kind == "ratio":
        parts = [_expression(item.text) for item in answer.items]
        return None if any(not _is_term(p) for p in parts) else parts
    if answer.kind != "scalar":
        return None
    value = _expression(answer.text)
    import sympy

    return [value, sympy.Integer(1)] if _is_term(value) else None


# Equations ---------------------------------------------------------------------------------------


def _same_equation(gold: Answer, answer: Answer) -> bool:
    """Whether left − right differs only by a constant factor, after clearing denominators."""
    import sympy

    sides = [_equation(a.relation) for a in (gold, answer)]
    if sides[0] is None or sides[1] is None:
        return False
    a, b = (sympy.fraction(sympy.together(_exact(side)))[0] for side in sides)
    if a.free_symbols != b.free_symbols or not a.free_symbols:
        return bool(sympy.expand(a) == 0 and sympy.expand(b) == 0)
    if sympy.expand(b) == 0:
        return False
    ratio = sympy.simplify(sympy.cancel(sympy.expand(a) / sympy.expand(b)))
    return bool(not ratio.free_symbols and ratio != 0)


def _equation(relation: str) -> Any:
    import sympy

    found = _expression(relation)
    if isinstance(found, sympy.Eq):
        return found.lhs - found.rhs
    left, _, right = relation.partition("=")
    sides = _expression(left), _expression(right)
    return sides[0] - sides[1] if all(_is_term(side) for side in sides) else None


# Values ------------------------------------------------------------------------------------------


def _same_value(gold: Answer, answer: Answer) -> bool:
    import sympy

    a, b = (_expression(side.relation if _compound(side) else side.text) for side in (gold, answer))
    if a is None or b is None:
        return False
    if _is_constant(a) and _is_constant(b):
        return _same_share(gold, answer, a, b)
    from math_verify import verify

    if isinstance(a, sympy.And) and isinstance(b, sympy.And):  # 0 < x < 1 and 1 > x > 0
        return {part.canonical for part in a.args} == {part.canonical for part in b.args} or bool(
            verify(a, b, timeout_seconds=None)
        )
    return bool(verify(a, b, timeout_seconds=None)) or (
        _is_term(a) and _is_term(b) and _same_function(a, b)
    )


def _compound(answer: Answer) -> bool:
    """Whether this is an equation other than "name = value"."""
    return bool(answer.relation) and not answer.name and "=" in answer.text


def _same_share(gold: Answer, answer: Answer, a: Any, b: Any) -> bool:
    """Compares constants, either of which may have a percent sign.

    If only one has the sign, 50% equals 0.5. It also equals 50, because people omit or add the
    sign; but a number below 1 is already a proportion, so 0.5% does not equal 0.5.
    """
    import sympy

    if "%" not in (gold.unit, answer.unit) or gold.unit == answer.unit:
        return _same_constant(a, b)
    hundredth = sympy.Rational(1, 100)
    shares = (a * hundredth, b) if gold.unit == "%" else (a, b * hundredth)
    if _same_constant(*shares):
        return True
    return _same_constant(a, b) and bool(sympy.Abs(a) >= 1)


def _is_term(expression: Any) -> bool:
    import sympy

    return isinstance(expression, sympy.Expr)


def _is_constant(expression: Any) -> bool:
    return _is_term(expression) and not expression.free_symbols


def _exact(expression: Any) -> Any:
    """Turns decimals into fractions and drops the assumptions of symbols, such as real."""
    import sympy

    exact = {f: sympy.Rational(str(f)) for f in expression.atoms(sympy.Float)}
    plain = {s: sympy.Symbol(s.name) for s in expression.free_symbols}
    return expression.xreplace({**exact, **plain}).doit()


def _same_term(a: Any, b: Any) -> bool:
    return _same_constant(a, b) if _is_constant(a) and _is_constant(b) else _same_function(a, b)


def _same_constant(gold: Any, answer: Any) -> bool:
    """Compares exactly, but a decimal may round a number that has no finite decimal.

    Such a decimal must agree to 1e-6, or to 1e-5 of the value for small numbers: 0.333333 equals
    1/3, but 0.00006 does not equal 1/15000. An undefined value such as 1/0 equals nothing.
    """
    import sympy

    decimals = [bool(x.atoms(sympy.Float)) for x in (gold, answer)]
    gold, answer = _exact(gold), _exact(answer)
    if any(x.has(sympy.nan, sympy.zoo) for x in (gold, answer)):
        return False
    if gold == answer:
        return True
    if any(x.has(sympy.oo, -sympy.oo) for x in (gold, answer)):
        return False
    both_rational = gold.is_Rational and answer.is_Rational
    if both_rational and not any(decimals):
        return False
    a, b = gold.evalf(_DIGITS), answer.evalf(_DIGITS)
    difference, size = abs(a - b), abs(a)
    if not any(decimals):
        return bool(difference <= sympy.Float(10) ** (20 - _DIGITS) * max(size, abs(b)))
    if all(decimals) or (both_rational and (gold.is_Integer or answer.is_Integer)):
        return False
    return bool(difference <= _DECIMAL_TOLERANCE * min(1, 10 * size))


def _same_function(a: Any, b: Any) -> bool:
    r"""Whether two terms have the same values at fixed real points.

    SymPy does not equate 1/√n and √(1/n), which are equal only for n > 0, so points at which
    neither term is real are skipped.
    """
    import sympy

    a, b = _exact(a), _exact(b)
    symbols = sorted(a.free_symbols, key=str)
    if set(symbols) != b.free_symbols or a.has(sympy.zoo, sympy.nan) or b.has(sympy.zoo, sympy.nan):
        return False
    compared = 0
    for shift in range(len(_POINTS)):
        at = {
            s: sympy.Rational(_POINTS[(shift + 3 * n) % len(_POINTS)]) + n
            for n, s in enumerate(symbols)
        }
        values = [x.xreplace(at).evalf(30) for x in (a, b)]
        if not all(v.is_number and v.is_finite for v in values):
            continue
        real = [abs(sympy.im(v)) <= 1e-20 * (1 + abs(v)) for v in values]
        if not any(real) and not a.has(sympy.I):
            continue
        if abs(values[0] - values[1]) > 1e-18 * (1 + abs(values[0])):
            return False
        compared += 1
    return compared >= _FEWEST_POINTS


@functools.lru_cache(maxsize=256)
def _expression(latex: str) -> Any:
    """Parses LaTeX without units into a SymPy object; None if that fails."""
    import sympy
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse

    # It warns that its own time limit is off. That limit uses signals; ours kills the worker.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    how = NormalizationConfig(
        basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none"
    )
    found = parse(
        f"${latex}$",
        [LatexExtractionConfig(normalization_config=how)],
        fallback_mode="no_fallback",
        parsing_timeout=None,
    )
    if not found:
        return None
    if not _is_term(found[0]):
        if isinstance(found[0], sympy.Rel | sympy.And | sympy.Or):  # 12.5 equals 25/2 here too
            floats = found[0].atoms(sympy.Float)
            return found[0].xreplace({f: sympy.Rational(str(f)) for f in floats})
        return found[0]
    # math-verify reads i as an ordinary symbol.
    return found[0].xreplace({s: sympy.I for s in found[0].free_symbols if s.name == "i"})
