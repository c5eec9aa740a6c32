"""A figure as a file, with a CSV of its data."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from knockout.errors import UsageError
from knockout.figures.theme import Spec, config
from knockout.files import atomic_path, write_text

__all__ = ["SUFFIXES", "complete", "licence", "scripts", "write_figure"]

SUFFIXES = (".svg", ".pdf", ".png", ".html")
_SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"
_SCRIPTS = ("vega.min", "vega-lite.min", "vega-interpreter")
_VERSION = "6.4"


def complete(
    spec: Spec, rows: Sequence[Mapping[str, Any]], *, dark: bool = False, width: int = 480
) -> Spec:
    """A complete specification: with its rows, colours and width.

    Args:
        spec: One that names its data "rows".
        rows: What is drawn; they can be written as JSON.
        dark: Whether it is drawn on a dark background.
        width: Of the plotting area, in pixels.
    """
    return {
        "$schema": _SCHEMA,
        "width": width,
        "config": config(dark=dark),
        **spec,
        "datasets": {"rows": [dict(row) for row in rows]},
    }


def scripts() -> dict[str, str]:
    """The JavaScript that draws figures, by name, in the order in which it is loaded."""
    vendor = files("knockout.figures") / "vendor"
    return {name: (vendor / f"{name}.js").read_text(encoding="utf-8") for name in _SCRIPTS}


def licence() -> str:
    """The licence of what `scripts` returns."""
    return (files("knockout.figures") / "vendor" / "LICENSE.txt").read_text(encoding="utf-8")


def write_figure(spec: Spec, rows: Sequence[Mapping[str, Any]], path: Path) -> list[Path]:
    """Writes a figure and its data.

    Args:
        spec: One that names its data "rows".
        rows: What is drawn.
        path: Its suffix decides: .svg, .pdf, .png (200 dpi), or .html, which needs no network.

    Returns:
        The file and its .csv.

    Raises:
        UsageError: Another suffix, or vl-convert-python is missing.
    """
    if path.suffix not in SUFFIXES:
        raise UsageError(
            f"{path}: found the ending {path.suffix!r}; expected one of {', '.join(SUFFIXES)}"
        )
    whole = complete(spec, rows)
    table = path.with_suffix(".csv")
    write_text(table, _csv(rows))
    if path.suffix == ".html":
        write_text(path, _page(whole, path.stem))
        return [path, table]
    try:
        import vl_convert
    except ImportError:
        raise UsageError(
            f"{path}: needs vl-convert-python: `pip install 'knockout-harness[figures]'`; "
            "a .html file needs nothing"
        ) from None
    whole["background"] = "white"
    if path.suffix == ".svg":
        made = vl_convert.vegalite_to_svg(whole, vl_version=_VERSION).encode()
    elif path.suffix == ".pdf":
        made = vl_convert.vegalite_to_pdf(whole, vl_version=_VERSION)
    else:
        made = vl_convert.vegalite_to_png(whole, vl_version=_VERSION, ppi=200)
    with atomic_path(path) as temporary:
        temporary.write_bytes(made)
    return [path, table]


def _csv(rows: Sequence[Mapping[str, Any]]) -> str:
    text = io.StringIO(newline="")
    columns = list(dict.fromkeys(key for row in rows for key in row))
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _page(spec: Spec, title: str) -> str:
    from html import escape

    inside = json.dumps(spec, ensure_ascii=True).replace("<", "\\u003c")
    loaded = "".join(f"<script>{source}</script>\n" for source in scripts().values())
    return (
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{escape(title)}</title>\n'
        f'<body style="background:#fff;margin:1.5rem"><div id="figure"></div>\n{loaded}'
        f'<script type="application/json" id="spec">{inside}</script>\n'
        "<script>const parsed = vega.parse(vegaLite.compile(JSON.parse("
        'document.getElementById("spec").textContent)).spec, null, {ast: true});\n'
        'new vega.View(parsed, {expr: vega.expressionInterpreter, renderer: "svg", '
        'container: "#figure", hover: true}).runAsync();</script></body></html>\n'
    )
