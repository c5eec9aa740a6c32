r"""LaTeX as tokens: groups in braces, and commands that change only how an answer looks."""

from __future__ import annotations

import re
from collections.abc import Iterator

__all__ = ["group", "restyle", "tokens", "top_level"]

_TOKEN = re.compile(r"\\[A-Za-z]+\*?|\\.|.", re.DOTALL)


def _names(*groups: str) -> frozenset[str]:
    return frozenset("\\" + name for group in groups for name in group.split())


# Commands without an argument that say only how something looks.
_DROPPED = _names(
    "displaystyle textstyle scriptstyle scriptscriptstyle limits nolimits notag nonumber hline",
    "bf it rm sf tt sc sl em bfseries itshape rmfamily mdseries upshape normalfont boldmath",
    "tiny scriptsize footnotesize small normalsize large Large LARGE huge Huge strut mathstrut",
    "big Big bigg Bigg bigl Bigl biggl Biggl bigr Bigr biggr Biggr bigm Bigm biggm middle",
    "relax null centering noindent protect allowbreak nobreak",
)
# Commands that vanish together with their argument: \color{blue}, \hspace{1cm}.
_DROPPED_WITH_ARGUMENT = _names(
    "color hspace hspace* vspace phantom hphantom vphantom label tag tag* pagecolor kern"
)
# Commands of which the last of n arguments remains.
_UNWRAPPED = {
    **dict.fromkeys(
        _names(
            "boldsymbol bm pmb underline uline ensuremath mathop mathord mathstrut smash boxed fbox",
            "framebox mathclap mathrel mathbin mathopen mathclose underset",
        ),
        1,
    ),
    **dict.fromkeys(_names("textcolor colorbox"), 2),
    "\\fcolorbox": 3,
}
_RENAMED = {
    **dict.fromkeys(
        _names(
            "text textbf textit textrm textnormal textsf texttt textsc textsl textup textmd emph",
            "mbox hbox mathrm mathbf mathit mathsf mathtt mathnormal bold",
        ),
        "\\text",
    ),
    **dict.fromkeys(_names("dfrac tfrac cfrac nicefrac sfrac xfrac flatfrac"), "\\frac"),
    **dict.fromkeys(_names("dbinom tbinom"), "\\binom"),
    **dict.fromkeys(_names("cr newline tabularnewline") | {"\\\\*"}, "\\\\"),
    **dict.fromkeys(_names("quad qquad enspace thinspace medspace thickspace hfill space"), " "),
    **dict.fromkeys(("\\;", "\\:", "\\>", "\\ ", "\\\n", "\\\t"), " "),
    **dict.fromkeys(("\\,", "\\!", "\\/", "\\-"), ""),
    **dict.fromkeys(_names("lvert rvert vert mvert"), "|"),
    **dict.fromkeys(_names("lbrace"), r"\{"),
    **dict.fromkeys(_names("rbrace"), r"\}"),
    **dict.fromkeys(_names("lparen"), "("),
    **dict.fromkeys(_names("rparen"), ")"),
    **dict.fromkeys(_names("lbrack"), "["),
    **dict.fromkeys(_names("rbrack"), "]"),
    **dict.fromkeys(_names("textdollar mathdollar"), r"\$"),
    "\\degree": r"^\circ ",
    "\\textdegree": r"^\circ ",
    "\\percent": r"\%",
    "\\colon": ":",
    "\\ratio": ":",
    "\\mathbin:": ":",
    "\\varnothing": r"\emptyset ",
    "\\dots": r"\ldots ",
    "\\dotsc": r"\ldots ",
    "\\cdots": r"\ldots ",
    "\\R": r"\mathbb{R}",
    "\\Re": r"\mathbb{R}",
    "\\lt": "<",
    "\\gt": ">",
    "~": " ",
}


def tokens(text: str) -> list[str]:
    r"""Splits into commands (`\frac`), escaped characters (`\\`, `\{`) and single characters."""
    return _TOKEN.findall(text)


def group(text: str, begin: int) -> tuple[str, int] | None:
    r"""Returns the inside and the end of the group in braces that opens at `begin`, or None.

    >>> group(r"{a{b}\}}c", 0)
    ('a{b}\\}', 8)
    """
    if begin >= len(text) or text[begin] != "{":
        return None
    depth, at = 0, begin
    while at < len(text):
        if text[at] == "\\":
            at += 2
            continue
        depth += (text[at] == "{") - (text[at] == "}")
        at += 1
        if depth == 0:
            return text[begin + 1 : at - 1], at
    return None


def top_level(text: str) -> Iterator[tuple[int, str]]:
    r"""Yields (position, token) of all that stands outside brackets and environments."""
    depth = at = 0
    for token in tokens(text):
        closes = token in (")", "]", "}", r"\}", r"\rangle", r"\end")
        depth -= closes
        opens = token in ("(", "[", "{", r"\{", r"\langle", r"\begin")
        if depth == 0 and not opens and not closes:
            yield at, token
        depth += opens
        at += len(token)


def restyle(text: str) -> str:
    r"""Drops what only changes the looks: fonts, colours, sizes, spaces; one name for one idea.

    >>> restyle(r"\color{blue}{\bf 12}\,\mathrm{cm}")
    '{ 12}\\text{cm}'
    """
    parts: list[str] = []
    at = 0
    while match := _TOKEN.match(text, at):
        token, at = match[0], match.end()
        if token in (r"\left", r"\right"):
            at += text.startswith(".", at)
        elif token == r"\color" or token in _DROPPED_WITH_ARGUMENT:
            at = _after_argument(text, at)
        elif token in _UNWRAPPED:
            for _ in range(_UNWRAPPED[token] - 1):
                at = _after_argument(text, at)
        elif token in _DROPPED:
            parts.append(" ")
        else:
            named = _RENAMED.get(token, token)
            # A name must not run into the letter that follows its longer form.
            parts.append(named)
            if named == r"\\":
                at = _after_row_space(text, at)
    return "".join(parts)


def _after_argument(text: str, at: int) -> int:
    r"""The end of `[...]{...}` at a place, if it is there."""
    while at < len(text) and text[at].isspace():
        at += 1
    if text.startswith("[", at) and "]" in text[at:]:
        at = text.index("]", at) + 1
    found = group(text, at)
    return found[1] if found else at


def _after_row_space(text: str, at: int) -> int:
    r"""The end of `[4pt]` after a row's end."""
    match = re.compile(r"\*?[ ]?\[\s{0,2}-?[\d.]+\s{0,2}(?:pt|em|ex|mm|cm|in|mu)\s{0,2}\]").match(
        text, at
    )
    return match.end() if match else at
