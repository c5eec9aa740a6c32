r"""Matrices, cases and aligned lines, in any of their notations."""

from __future__ import annotations

import re

from knockout.grading.latex import tokens

__all__ = ["alignment", "determinant", "matrix"]

_ALIGNED = (
    "aligned|align|alignat|alignedat|gathered|gather|equation|split|multline|eqnarray|displaymath"
)
_ALIGNMENT = re.compile(
    rf"\\begin\s*\{{({_ALIGNED})(\*?)\}}(?:\[[a-z]\])?(?:\{{\d+\}})?(.*)\\end\s*\{{\1\2\}}",
    re.DOTALL,
)
_COLUMN = re.compile(r"\\begin\s*\{array\}\s*\{[^{}]*\}(.*)\\end\s*\{array\}", re.DOTALL)
_MATRIX = re.compile(
    r"(?P<factor>.*?)(?P<open>\(|\[|\\\{|\|)?\s*\\begin\s*\{(?P<name>[pbBvV]?matrix|smallmatrix"
    r"|[pb]smallmatrix|array|cases|dcases|rcases|bmatrix|pmatrix)(?P<star>\*?)\}"
    r"\s*(?:\[\w\])?(?P<body>.*)\\end\s*\{(?P=name)(?P=star)\}\s*(?P<close>\)|\]|\\\}|\|)?"
    r"\s*(?P<power>\^\s*\{?\s*(?:T|\\top|\\intercal|\\text\s*\{\s*T\s*\})\s*\}?)?",
    re.DOTALL,
)
_BARRED = re.compile(
    r"\|\s*\\begin\s*\{((?:small)?matrix|array)\}(?:\s*\{[lcr|]+\})?(.*?)\\end\s*\{\1\}\s*\|",
    re.DOTALL,
)
_PLAIN_TEX = re.compile(r"\\([pb]?matrix)\s*\{(.*)\}", re.DOTALL)
_CONDITION = re.compile(
    r"\\text\s*\{\s*(?:if|for|when|otherwise if|where)?\s*(otherwise|else)?[\s,:]*\}|\b(?:if|for|when)\b"
)


def alignment(text: str) -> str | None:
    r"""The lines of an alignment as one list, or None if the text is none.

    A line that begins with an equals sign goes on with the one before.

    >>> alignment(r"\begin{aligned} x &= 3+9 \\ &= 12 \end{aligned}")
    'x = 3+9 = 12'
    """
    match = _ALIGNMENT.fullmatch(text.strip())
    body = match[3] if match else ""
    if not match and (column := _COLUMN.fullmatch(text.strip())) and r"\\" not in column[1].strip():
        body = column[1]
    if not body:
        return None
    lines: list[str] = []
    for row in _rows(body):
        line = " ".join("".join(row).split()).rstrip(" ,;.")
        if lines and line.startswith("="):
            lines[-1] += f" {line}"
        elif line:
            lines.append(line)
    return ", ".join(lines)


def determinant(text: str) -> str:
    r"""Writes a matrix between bars as `vmatrix`."""
    return _BARRED.sub(r"\\begin{vmatrix}\2\\end{vmatrix}", text)


def matrix(text: str) -> list[list[str]] | None:
    r"""The cells of a matrix, row by row, or None if the text is none.

    Determinants (`vmatrix`) are numbers and are left alone. A factor in front is multiplied in, a
    transposition is carried out. Of `cases`, each row is a value and its condition.

    >>> matrix(r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}")
    [['1', '2'], ['3', '4']]
    """
    text = text.strip()
    if plain := _PLAIN_TEX.fullmatch(text):
        text = rf"\begin{{{plain[1]}}}{plain[2]}\end{{{plain[1]}}}"
    match = _MATRIX.fullmatch(text)
    if not match or match["body"].count(r"\begin") or match["name"][0] in "vV":
        return None
    if match["open"] == "|" or (match["factor"] and not _is_factor(match["factor"])):
        return None
    body = match["body"]
    if match["name"] == "array":
        body = re.sub(r"^\s*\{[^{}]*\}", "", body)
    rows = [[cell.strip() for cell in row] for row in _rows(body)]
    rows = [row for row in rows if any(row)]
    if not rows:
        return None
    if match["name"] == "array" and not match["open"] and len(rows) == len(rows[0]) == 1:
        return None
    if "cases" in match["name"] or match["open"] == r"\{":
        return sorted(_case(row) for row in rows)
    factor = (
        match["factor"].strip().rstrip("*").removesuffix(r"\cdot").removesuffix(r"\times").strip()
    )
    if factor:
        sign = "-1" if factor == "-" else factor
        rows = [[rf"({sign}) \cdot ({cell})" for cell in row] for row in rows]
    if match["power"] and len({len(row) for row in rows}) == 1:
        rows = [list(column) for column in zip(*rows, strict=True)]
    return rows


def _is_factor(text: str) -> bool:
    r"""Whether a text in front of a matrix multiplies it: `-3`, `\frac{1}{2}`, `x\cdot`."""
    return not re.search(r"[=<>,;]|\\det|[+-]\s*$(?<!^-)|\d\s+\d", text.strip())


def _case(row: list[str]) -> list[str]:
    value, *conditions = row
    condition = " ".join(conditions)
    condition = _CONDITION.sub(lambda m: "otherwise" if m[1] else "", condition).strip(" ,.")
    return [value.strip(" ,"), condition] if condition else [value.strip(" ,")]


def _rows(body: str) -> list[list[str]]:
    r"""Splits at `\\` and `&`, outside braces."""
    rows: list[list[str]] = [[""]]
    depth = 0
    for token in tokens(body):
        depth += (token == "{") - (token == "}")
        if depth == 0 and token == r"\\":
            rows.append([""])
        elif depth == 0 and token == "&":
            rows[-1].append("")
        else:
            rows[-1][-1] += token
    return rows
