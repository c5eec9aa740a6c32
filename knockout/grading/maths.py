r"""Mathematical answers: one directional comparison of a response with its gold answer.

math-verify turns LaTeX into SymPy expressions and compares relations, sets and terms with
variables. What it gets wrong is done here: mixed numbers, separators, units, number bases, words,
the kind of brackets, and the comparison of constants, which is exact.

Nothing here limits time or memory; `knockout.grading.pool` does.
"""

from __future__ import annotations

import functools
import logging
import re
from typing import Any

from knockout.grading.extract import last_answer
from knockout.grading.grade import Grade, answer_part
from knockout.grading.notation import Answer, read

__all__ = ["check_gold", "grade_maths", "same_answer"]

_INTEGER = re.compile(r"[-+]?\d+")
_DECIMAL_TOLERANCE = 1e-6
_DIGITS = 60


def grade_maths(
    *,
    gold: str,
    response: str | None,
    integer: bool = False,
    think_end: str | None = "</think>",
    think_open: bool = False,
    finished: bool = True,
) -> Grade:
    r"""Grades the answer part of a response.

    Args:
        gold: The reference answer: LaTeX without dollar signs, or plain text.
        response: The text as generated; None where generation failed.
        integer: Whether answers are whole numbers (AIME); anything else is then unparsed.
        think_end: See `answer_part`.
        think_open: See `answer_part`.
        finished: False where the response was cut by length.

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
        return Grade(0, "error", f"the gold answer {gold!r} cannot be read")
    try:
        return Grade(int(_same(gold_answer, answer)), "ok", found)
    except MemoryError:
        raise
    except Exception:
        # SymPy raises all kinds on text that reads like an expression and is none ("|p(15)| > 3").
        # The gold answer has been compared with itself at load, so the answer is at fault.
        return Grade(0, "unparsed", found)


def same_answer(*, gold: str, answer: str) -> bool:
    """Whether an answer (bare, without a box) means the gold answer. Not symmetric."""
    left, right = read(_unboxed(gold)), read(_unboxed(answer))
    return left is not None and right is not None and _same(left, right)


def check_gold(gold: str, *, integer: bool = False) -> str | None:
    """Returns why a gold answer is unusable, or None where it is equal to itself."""
    if integer:
        return None if _whole_number(gold) is not None else "it is not a whole number"
    grade = grade_maths(gold=gold, response=rf"\boxed{{{_unboxed(gold)}}}", think_end=None)
    if grade.status != "ok":
        return "it cannot be read as an answer"
    return None if grade.correct else "it does not equal itself"


def _unboxed(gold: str) -> str:
    return (last_answer(gold) or "") if r"\boxed" in gold else gold.strip().strip("$")


def _whole_number(text: str) -> int | None:
    answer = read(text.rpartition("=")[2])
    if answer is None or answer.kind != "scalar":
        return None
    digits = answer.text.replace(" ", "")
    return int(digits) if _INTEGER.fullmatch(digits) else None


def _same(gold: Answer, answer: Answer) -> bool:
    if gold.name and answer.name and gold.name != answer.name:
        return False
    if gold.unit and answer.unit and gold.unit != answer.unit:
        return False
    if gold.kind == "word" or answer.kind == "word":
        return gold.word == answer.word
    if gold.kind == "base" or answer.kind == "base":
        return gold.kind == answer.kind and gold.text == answer.text
    if gold.kind in ("list", "set") and answer.kind in ("list", "set"):
        return _same_members(gold.items, answer.items)
    if gold.kind == answer.kind and gold.kind != "scalar":  # the same pair of brackets
        return len(gold.items) == len(answer.items) and all(
            _same(a, b) for a, b in zip(gold.items, answer.items, strict=True)
        )
    if "scalar" not in (gold.kind, answer.kind):
        return False
    return _same_value(gold, answer)


def _same_members(gold: tuple[Answer, ...], answer: tuple[Answer, ...]) -> bool:
    rest = list(answer)
    for item in gold:
        match = next((i for i, other in enumerate(rest) if _same(item, other)), None)
        if match is None:
            return False
        del rest[match]
    return not rest


def _same_value(gold: Answer, answer: Answer) -> bool:
    import sympy

    a, b = _expression(gold.text), _expression(answer.text)
    if a is None or b is None:
        return False
    if _is_constant(a) and _is_constant(b):
        if "%" in (gold.unit, answer.unit) and gold.unit != answer.unit:
            hundredth = sympy.Rational(1, 100)
            as_shares = (a * hundredth, b) if gold.unit == "%" else (a, b * hundredth)
            return _same_constant(a, b) or _same_constant(*as_shares)
        return _same_constant(a, b)
    from math_verify import verify

    return bool(verify(a, b, timeout_seconds=None))


def _is_constant(expression: Any) -> bool:
    import sympy

    return isinstance(expression, sympy.Expr) and not expression.free_symbols


def _same_constant(gold: Any, answer: Any) -> bool:
    """Compares exactly; a decimal may stand for a number that has no finite decimal.

    Such a decimal must agree to 1e-6, and for small numbers to 1e-5 of the value, so that
    0.333333 is 1/3, but 0.00006 is not 1/15000.
    """
    import sympy

    decimals = [bool(x.atoms(sympy.Float)) for x in (gold, answer)]
    gold, answer = (
        x.xreplace({f: sympy.Rational(str(f)) for f in x.atoms(sympy.Float)}).doit()
        for x in (gold, answer)
    )
    if gold == answer:
        return True
    if any(x.has(sympy.nan, sympy.zoo, sympy.oo, -sympy.oo) for x in (gold, answer)):
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


@functools.lru_cache(maxsize=256)
def _expression(latex: str) -> Any:
    """Reads LaTeX into a SymPy object; None where that fails. Units are already split off."""
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse

    # It warns at each start that its own limit is off; that limit uses signals, ours kills.
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
    return found[0] if found else None
