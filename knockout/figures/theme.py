"""Colours, shapes and words that all figures share."""

from __future__ import annotations

from typing import Any

__all__ = ["GROUPS", "SHORT", "VERDICTS", "Spec", "color", "config", "shape"]

Spec = dict[str, Any]
"""A Vega-Lite specification, or a part of one."""

VERDICTS = ("strong_pillar", "strong_stumbling_block", "equivalent", "undetermined")
"""Keys of the verdicts that figures tell apart: neutral is split by its evidence."""
SHORT = ("pillar", "stumbling block", "equivalent", "undetermined")
GROUPS = ("candidate", "control", "canary")

# They stay apart for colour-blind readers, in print, and against both backgrounds.
_LIGHT = ("#0063a6", "#b84a08", "#17704f", "#5c646d")
_DARK = ("#62b5f5", "#f0914d", "#4cc29a", "#959fa9")


def config(*, dark: bool = False) -> Spec:
    """Vega-Lite's configuration: colours of the verdicts, fonts, quiet axes."""
    ink, dim, line = (
        ("#e4e7eb", "#9aa4af", "#343a42") if dark else ("#1b1f24", "#59636e", "#d9dee3")
    )
    return {
        "background": "transparent",
        "font": "system-ui, Segoe UI, DejaVu Sans, sans-serif",
        "range": {"category": list(_DARK if dark else _LIGHT)},
        "view": {"stroke": None},
        "axis": {
            "labelColor": ink,
            "titleColor": dim,
            "titleFontWeight": "normal",
            "gridColor": line,
            "domainColor": line,
            "tickColor": line,
            "labelFontSize": 11,
            "titleFontSize": 11.5,
        },
        "legend": {
            "labelColor": ink,
            "titleColor": dim,
            "titleFontWeight": "normal",
            "orient": "top",
            "labelFontSize": 11,
        },
        "text": {"color": ink, "fontSize": 11},
        "rule": {"color": dim},
        "rect": {"color": dim},
        "point": {"color": dim, "filled": False, "size": 42, "strokeWidth": 1.4},
        "bar": {"color": dim},
        "line": {"color": dim, "strokeWidth": 1.6},
        "style": {"quiet": {"color": dim}, "band": {"color": dim, "opacity": 0.12}},
    }


def color(field: str, *, legend: bool = True) -> Spec:
    """Colour by verdict; every colour is in the legend, also without a row."""
    names = "{" + ", ".join(f"{k}: '{n}'" for k, n in zip(VERDICTS, SHORT, strict=True)) + "}"
    return {
        "field": field,
        "type": "nominal",
        "scale": {"domain": list(VERDICTS)},
        "legend": {"title": None, "labelExpr": f"{names}[datum.value]"} if legend else None,
    }


def shape() -> Spec:
    """Shape by group."""
    return {
        "field": "group",
        "type": "nominal",
        "scale": {"domain": list(GROUPS), "range": ["circle", "diamond", "cross"]},
        "legend": None,
    }
