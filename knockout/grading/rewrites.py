r"""Rewrites different notations of the same answer into one: named steps, applied in order.

Each step takes and returns LaTeX text. Answers have at most a few hundred characters (see
`knockout.grading.extract`), so a pattern need not be fast but must not take exponential time.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from fractions import Fraction

from knockout.grading.environments import determinant
from knockout.grading.latex import group, restyle

__all__ = ["CLEAN_UP", "clean"]

_SYMBOLS = {
    "−": "-", "–": "-", "—": "-", "‐": "-", "‑": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ",
    "∙": r"\cdot ", "•": r"\cdot ", "∗": "*", "÷": "/", "∕": "/", "⁄": "/", "π": r"\pi ",
    "∞": r"\infty ", "≤": r"\leq ", "≥": r"\geq ", "⩽": r"\leq ", "⩾": r"\geq ", "≠": r"\neq ",
    "≈": r"\approx ", "≡": r"\equiv ", "∪": r"\cup ", "⋃": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "∅": r"\emptyset ",
    "∖": r"\setminus ", "±": r"\pm ", "∓": r"\mp ", "°": r"^\circ ", "º": r"^\circ ", "˚": r"^\circ ", "ℝ": r"\mathbb{R}",
    "ℤ": r"\mathbb{Z}", "ℕ": r"\mathbb{N}", "ℚ": r"\mathbb{Q}", "ℂ": r"\mathbb{C}", "∠": r"\angle ",
    "△": r"\triangle ", "€": r"\text{euros}", "£": r"\text{pounds}", "¥": r"\text{yen}",
    "₹": r"\text{rupees}", "¢": r"\text{cents}", "√": r"\sqrt ", "∛": r"\sqrt[3] ", "∜": r"\sqrt[4] ",
    "⟨": r"\langle ", "⟩": r"\rangle ", "〈": r"\langle ", "〉": r"\rangle ", "′": "'", "″": "''",
    "’": "'", "“": '"', "”": '"', "⌊": r"\lfloor ", "⌋": r"\rfloor ", "⌈": r"\lceil ", "⌉": r"\rceil ",
    "∣": "|", "…": r"\ldots ", "α": r"\alpha ", "β": r"\beta ", "γ": r"\gamma ", "δ": r"\delta ",
    "θ": r"\theta ", "λ": r"\lambda ", "μ": r"\mu ", "φ": r"\phi ", "ω": r"\omega ", "σ": r"\sigma ",
    "ℓ": r"\ell ", "ⅈ": "i", "ⅇ": "e", "\u200b": "", "\ufeff": "", "\u2061": "", "\u2062": "",
}  # fmt: skip
_RAISED = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿⁱ", "0123456789+-ni", strict=True))
_LOWERED = dict(zip("₀₁₂₃₄₅₆₇₈₉", "0123456789", strict=True))

_THOUSANDS = re.compile(
    r"(?<![\d.])\d{1,3}(?:(?:\s*,\\!\s*|\s*\\[,!:;]\s*|\{(?:,|\\[,!:; ])\}\s*)\d{3})+(?!\d)"
)
_BARE = r"\d|[A-Za-z]|\\(?:pi|alpha|beta|gamma|theta|phi|lambda|mu|omega|sigma)(?![A-Za-z])"
_FRACTION = re.compile(rf"\\frac\s*(?:\{{([^{{}}]*)\}}|({_BARE}))\s*(?:\{{([^{{}}]*)\}}|({_BARE}))")
_OVER = re.compile(r"\{([^{}]*)\\(over|choose)\b([^{}]*)\}")
_FUNCTION_NAMES = "exp|sqrt|cbrt|arcsin|arccos|arctan|sinh|cosh|tanh|sin|cos|tan|cot|sec|csc|log|ln"
_BARE_FUNCTION = re.compile(rf"(?<![\\A-Za-z])({_FUNCTION_NAMES})(?=\s*[({{\\]|_|\^|\s*\d)")
_OPERATOR_NAME = re.compile(rf"\\(?:operatorname\*?|text)\s*\{{\s*({_FUNCTION_NAMES})\s*\}}")
_GROUPED = re.compile(r"\\(?:sqrt(?:\[[^\[\]]*\])?|exp)\s*\(|\^\s*\(")
_LOGARITHM = re.compile(
    r"\\log\s*_\s*(?:\{([^{}]+)\}|(\\[A-Za-z]+|[0-9A-Za-z]))\s*"
    r"(?:\{([^{}]+)\}|(?=\()|(\d+(?:\.\d+)?|[A-Za-z](?![A-Za-z])))?"
)
_SCIENTIFIC = re.compile(r"(?<![\w.\\])(\d+\.?\d*|\.\d+)[eE]([-+]?\d+)(?![\w.])")
_TEXT = re.compile(r"\\text\s*(?=\{)")
# What precedes a unit: a number, or another part of the unit.
_COUNTED = re.compile(
    r"(?:[\d})]\s*(?:\\frac\s*\{)?|\\text\{[^{}]*\}(?:\^\{?-?\d\}?|\s|/|\\cdot|\\times|\}\s*\{)*)$"
)
_CLAUSE_WORDS = (
    "since|because|as|where|when|if|given|assuming|provided|by|from|using|note|for|with|which|i\\.e"
)
_CLAUSE = re.compile(
    r"(?<=[\w})\]!.'%$])\s*[,;.]?\s*[(\[]?\s*"
    rf"(?:\\text\s*\{{\s*[(\[]?\s*(?:{_CLAUSE_WORDS})\b|\b(?:{_CLAUSE_WORDS})\s+(?=[\\A-Za-z$])).*$",
    re.DOTALL | re.IGNORECASE,
)
_REMARK = re.compile(
    r"(?<=[\w})\]!.'%$])\s+\(\s*(?:\\text\s*\{[^{}]*\}|[^()]*(?:[<>]|\\(?:leq?|geq?|neq?|in)\b)[^()]*)\s*\)$"
)
_LEAD = re.compile(
    r"\s*\\text\s*\{(?P<words>[^{}]*[A-Za-z$][^{}]*?)\s*\}\s*(?::|=|\\colon)?\s*(?=\S)", re.DOTALL
)
_SENTENCE = re.compile(
    r"\s*(?:\\text\s*\{)?\s*(?:so|thus|hence|therefore)?,?\s*(?:the\s+|our\s+)?(?:[A-Za-z]+\s+){0,4}"
    r"(?:answer|value|result|solution|sum|area|total|number|length|volume|probability)"
    r"(?:\s+of\s+[\w $\\]{1,40}?)?\s*(?:is|are|equals|=|:)\s*:?\s*(?P<rest>[^{}]+?)\s*\}?\s*",
    re.IGNORECASE | re.DOTALL,
)
_CURRENCIES = {
    "$": r"\$",
    "usd": r"\$",
    "rs": r"\text{rupees}",
    "us$": r"\$",
    "eur": r"\text{euros}",
    "gbp": r"\text{pounds}",
}
_BASIS = re.compile(
    r"\\(?:mathbf|boldsymbol|bm|vec|hat|text|textbf|mathrm)\s*(?:\{\s*)*"
    r"(?:\\(?:hat|vec|mathbf)\s*\{?)?\s*((?<!\\)[ijk](?![A-Za-z])|\\[ij]math)\s*\}*"
)
_ANGLE = re.compile(
    r"\\(sin|cos|tan|cot|sec|csc)\s*(?:\\left\s*)?[({]?\s*(\d+(?:\.\d+)?)\s*"
    r"(?:\^\s*\{?\s*\\circ\s*\}?|\\degree)\s*(?:\\right\s*)?[)}]?"
)
_REPEATING = (
    re.compile(
        r"(?<![\d.])(\d*)\.(\d*)\\(?:overline|bar|overbar|widebar)\s*(?:\{\s*(\d+)\s*\}|(\d))"
    ),
    re.compile(r"(?<![\d.])(\d*)\.(\d*)\((\d+)\)()"),
    re.compile(r"(?<![\d.])(\d*)\.(\d*)\\dot\s*\{?\s*(\d)\s*\}?(?:(\d*)\\dot\s*\{?\s*(\d)\s*\}?)?"),
)
_GOES_ON = re.compile(r"(?<![\d.])(\d*)\.(\d+)\s*(?:\\ldots|\.\.\.)\s*")
_AND = re.compile(r"\s*(?:[,;]\s*)?(?:\\text\s*\{\s*(?:and|or)\s*\}|\b(?:and|or)\b)\s*")


def clean(latex: str) -> str:
    """Applies the rewrites of `CLEAN_UP` in order."""
    text = latex
    for _, rewrite in CLEAN_UP:
        text = rewrite(text)
    return text


def _unicode(text: str) -> str:
    text = re.sub(r"([√∛∜])\s*(\d+(?:\.\d+)?)", r"\1{\2}", text)
    parts: list[str] = []
    mark = ""
    for c in text:
        now = "^" if c in _RAISED else "_" if c in _LOWERED else ""
        if now != mark:
            parts.append(("}" if mark else "") + (now + "{" if now else ""))
            mark = now
        parts.append(_RAISED.get(c) or _LOWERED.get(c) or _compatible(c))
    return "".join(parts) + ("}" if mark else "")


def _compatible(c: str) -> str:
    """Replaces digits of any script, bold letters, odd spaces and fraction signs by ASCII."""
    if c.isascii() or c in _SYMBOLS:
        return _SYMBOLS.get(c, c)
    if (digit := unicodedata.decimal(c, None)) is not None:
        return str(digit)
    plain = unicodedata.normalize("NFKC", c)
    numerator, bar, denominator = plain.partition("\u2044")
    if bar:
        return rf"\frac{{{numerator}}}{{{denominator}}}"
    return plain if plain.isascii() else c


def _thousands(text: str) -> str:
    return _THOUSANDS.sub(lambda m: re.sub(r"\D", "", m[0]), text)


def _dollars(text: str) -> str:
    r"""Removes dollar signs that only delimit maths, as in `$32,348$`."""
    text = re.sub(r"\\text\s*\{\s*\\?\$\s*\}", r"\\$", text)
    text = re.sub(r"^\s*(?:US ?\\?\$|USD\b)\s*(?=[\d.])", r"\\$", text)
    text = re.sub(r"\\(?:pounds|euro)\b\s*([\d.,]*\d)", r"\1", text)
    return re.sub(r"(?<!\\)\$", "", text)


def _texts(text: str) -> str:
    r"""Unwraps maths from `\text{}`: numbers, e and i, terms, a letter that is not a unit."""
    parts: list[str] = []
    at = 0
    while match := _TEXT.search(text, at):
        found = group(text, match.end())
        if found is None:
            break
        inside, end = found
        before = text[at : match.start()]
        parts.append(before)
        counted = _COUNTED.search("".join(parts)[-60:])
        if _is_maths(inside.strip(), bool(counted)):
            parts.append(inside.strip())
        elif power := re.fullmatch(r"([^{}]*?)(\^\{?\d\}?)\s*", inside):
            parts.append(rf"\text{{{power[1]}}}{power[2]}")
        else:
            parts.append(rf"\text{{{inside}}}")
        at = end
    return "".join(parts) + text[at:]


def _is_maths(inside: str, counted: bool) -> bool:
    """Whether a text is maths; a letter or word after a number (`counted`) is a unit."""
    if inside in ("e", "i"):
        return True
    if inside and not re.search(r"[A-Za-z]", inside.replace(r"\circ", "")):
        return True
    if not inside or counted:
        return False
    if re.fullmatch(r"[A-Za-z]|[-+(]*\.?\d.*", inside, re.DOTALL):
        return True
    return bool(re.search(r"[=+^_\\/<>]", inside)) and not re.search(
        r"(?<!\\)\b[A-Za-z]{3,}", inside
    )


def _conjunctions(text: str) -> str:
    return _AND.sub(", ", text)


def _unit_vectors(text: str) -> str:
    r"""Renames the unit vectors of `2\mathbf{i} + 3\mathbf{j}`, so that i is not imaginary."""
    if len({match[1] for match in _BASIS.finditer(text)}) < 2:
        return text
    return _BASIS.sub(lambda m: f" u_{m[1][-5] if len(m[1]) > 1 else m[1]}", text)


def _over(text: str) -> str:
    return _OVER.sub(
        lambda m: rf"\{'frac' if m[2] == 'over' else 'binom'}{{{m[1]}}}{{{m[3]}}}", text
    )


def _fractions(text: str) -> str:
    text = re.sub(r"\\[dt]?binom\s*(\d|[A-Za-z])\s*(\d|[A-Za-z])", r"\\binom{\1}{\2}", text)
    return _FRACTION.sub(lambda m: rf"\frac{{{m[1] or m[2]}}}{{{m[3] or m[4]}}}", text)


def _functions(text: str) -> str:
    r"""Rewrites functions, powers and pi typed in plain text: `exp(16)`, `2*pi`, `x**2`."""
    text = _OPERATOR_NAME.sub(r"\\\1", text)
    text = _BARE_FUNCTION.sub(r"\\\1", text)
    text = text.replace(r"\cbrt", r"\sqrt[3]").replace(r"\lg", r"\log").replace("**", "^")
    text = re.sub(r"(?<![A-Za-z\\])pi\b", r"\\pi ", text)
    at = 0
    while match := _GROUPED.search(text, at):  # \sqrt(3) and x^(2) as \sqrt{3} and x^{2}
        end = _closing(text, match.end() - 1)
        at = match.end()
        if end is not None:
            text = text[: at - 1] + "{" + text[at:end] + "}" + text[end + 1 :]
    text = re.sub(r"(\\sqrt(?:\[[^\[\]]*\])?)\s*(\d|[A-Za-z])", r"\1{\2}", text)
    return re.sub(r"\^\s*([-+]\d+)", r"^{\1}", text)


def _products(text: str) -> str:
    """Marks the product in `2(3)`, which the SymPy parser reads as a mixed number."""
    return re.sub(r"(?<=[\d)])\s*\((?=-?[\d.]+\))", r"\\cdot(", text)


def _closing(text: str, begin: int) -> int | None:
    depth = 0
    for at in range(begin, len(text)):
        depth += (text[at] == "(") - (text[at] == ")")
        if depth == 0:
            return at
    return None


def _logarithms(text: str) -> str:
    r"""Puts braces around the base and a simple argument: `\log_2 3` is not a split number."""

    def braced(m: re.Match[str]) -> str:
        argument = m[3] or m[4]
        return rf"\log_{{{m[1] or m[2]}}}" + (rf"{{{argument}}}" if argument else "")

    return _LOGARITHM.sub(braced, text)


def _scientific(text: str) -> str:
    text = re.sub(r"(?<=\d)\s*[xX]\s*(?=10\s*\^)", r" \\times ", text)
    return _SCIENTIFIC.sub(lambda m: rf"{m[1]} \times 10^{{{int(m[2])}}}", text)


def _repeating(text: str) -> str:
    r"""Turns repeating decimals such as `0.1\overline{6}`, `0.(3)`, `0.333\ldots` into fractions."""
    if "." not in text:
        return text
    for pattern in _REPEATING:
        text = pattern.sub(
            lambda m: _fraction(m[1], m[2], "".join(g or "" for g in m.groups()[2:])), text
        )
    return _GOES_ON.sub(lambda m: _going_on(m[1], m[2]) or m[0], text)


def _going_on(whole: str, digits: str) -> str | None:
    for length in range(1, len(digits) // 2 + 1):
        block = digits[-length:]
        repeats = 2
        while digits.endswith(block * repeats):
            repeats += 1
        repeats -= 1
        if repeats >= (3 if length == 1 else 2):
            return _fraction(whole, digits[: len(digits) - repeats * length], block)
    return None


def _fraction(whole: str, fixed: str, block: str) -> str:
    value = Fraction(int((whole or "0") + fixed)) + Fraction(int(block), 10 ** len(block) - 1)
    value /= 10 ** len(fixed)
    return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


def _clauses(text: str) -> str:
    r"""Removes explanations: `12\ (\text{since } n>0)`, `\text{The answer is } 42`."""
    if r"\begin{cases}" in text:
        return text
    text = text.strip()
    shorter = _REMARK.sub("", _CLAUSE.sub("", text)).rstrip(" ,;")
    # Keep a unit in parentheses.
    unit = re.search(r"\(\s*(\\text\s*\{\s*[a-z]{1,12}[.]?\s*\})\s*\)$", text)
    if unit and shorter != text:
        shorter = f"{text[: unit.start()].rstrip()} {unit[1]}"
    text = shorter or text
    if (sentence := _SENTENCE.fullmatch(text)) and sentence["rest"].strip():
        return sentence["rest"]
    if (lead := _LEAD.match(text)) and re.search(r"[\dA-Za-z]", text[lead.end() :]):
        words = lead["words"].strip().rstrip(".:").lower()
        rest = text[lead.end() :]
        if words in _CURRENCIES:
            return f"{rest.strip()} {_CURRENCIES[words]}"
        says = re.search(r"(?:\b(?:is|are|be|equals?)|[:=])$", lead["words"].strip().lower())
        if says or re.search(r"\d", rest) or lead[0].rstrip().endswith("="):
            return rest if not rest.startswith(("^", "_")) else text
    return text


def _marks(text: str) -> str:
    r"""Rewrites `^o`, signs in braces, trigonometric functions of degrees, and determinants in bars."""
    text = re.sub(r"(?<=[\d)])\s*\^\s*(?:o\b|\{\s*o\s*\})", r"^\\circ ", text)
    text = re.sub(r"\{\s*([:/])\s*\}", r"\1", text).replace(r"\bigcup", r"\cup")
    return determinant(_ANGLE.sub(r"\\\1{\\frac{\2\\pi}{180}}", text))


def _ends(text: str) -> str:
    text = re.sub(r"(?:\s|(?<=[\w})\]%!'\s])[.,;])+$", "", text.strip())
    while (found := group(text, 0)) and found[1] == len(text) and found[0].strip():
        text = found[0].strip()
    return text


CLEAN_UP: tuple[tuple[str, Callable[[str], str]], ...] = (
    ("Unicode as LaTeX", _unicode),
    ("thousands with thin spaces", _thousands),
    ("unit vectors", _unit_vectors),
    ("fonts, colours, sizes, spaces", restyle),
    ("dollar signs that only mark maths", _dollars),
    ("maths inside text", _texts),
    ("a over b", _over),
    ("odd marks", _marks),
    ("ends and outer braces", _ends),
    ("explaining clauses", _clauses),
    ("and, or", _conjunctions),
    ("fractions", _fractions),
    ("functions as typed", _functions),
    ("logarithms", _logarithms),
    ("scientific notation", _scientific),
    ("repeating decimals", _repeating),
    ("products of numbers", _products),
    ("ends, again", _ends),
)
"""Name and function of each rewrite."""
