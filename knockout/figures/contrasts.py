"""Figures that set knockouts side by side: doses, pairs, two runs."""

from __future__ import annotations

from collections.abc import Sequence

from knockout.figures.theme import Spec

__all__ = ["comparison", "dose_response", "interactions"]

_AXIS = {"format": "+.3~f"}


def dose_response(margin: float) -> Spec:
    """Δ against the strength of a penalty; the ban is the last point.

    Rows: `label` (the candidate without its strength), `strength` (text, "ban" last), `order`, `delta`, `low`,
    `high`.
    """
    x = {
        "field": "strength",
        "type": "ordinal",
        "sort": {"field": "order"},
        "title": "λ, logits",
        "axis": {"labelAngle": 0},
    }
    y = {"field": "delta", "type": "quantitative", "title": "Δ Pass@1", "axis": _AXIS}
    hue = {"field": "label", "type": "nominal", "title": None}
    return {
        "data": {"name": "rows"},
        "height": 260,
        "layer": [
            {
                "data": {"values": [{}]},
                "mark": {"type": "rect", "style": "band"},
                "encoding": {"y": {"datum": -margin}, "y2": {"datum": margin}},
            },
            {"mark": {"type": "line"}, "encoding": {"x": x, "y": y, "color": hue}},
            {
                "mark": {"type": "rule"},
                "encoding": {
                    "x": x,
                    "y": {**y, "field": "low"},
                    "y2": {"field": "high"},
                    "color": hue,
                },
            },
            {
                "mark": {"type": "point", "filled": True},
                "encoding": {
                    "x": x,
                    "y": y,
                    "color": hue,
                    "tooltip": [
                        {"field": "label", "title": "candidate"},
                        {"field": "strength", "title": "λ"},
                        {"field": "delta", "format": "+.3f"},
                        {"field": "low", "format": "+.3f"},
                        {"field": "high", "format": "+.3f"},
                    ],
                },
            },
        ],
    }


def interactions() -> Spec:
    """Interaction of every pair, Δ_AB − Δ_A − Δ_B. Rows: `one`, `other`, `interaction`, `low`, `high`."""
    place = {"type": "nominal", "title": None, "axis": {"labelLimit": 120, "labelFontSize": 10}}
    return {
        "data": {"name": "rows"},
        "height": {"step": 18},
        "mark": {"type": "rect"},
        "encoding": {
            "x": {"field": "one", **place},
            "y": {"field": "other", **place},
            "color": {
                "field": "interaction",
                "type": "quantitative",
                "scale": {"domainMid": 0, "range": ["#b84a08", "#e8e8e8", "#0063a6"]},
                "title": "interaction",
            },
            "tooltip": [
                {"field": "one"},
                {"field": "other"},
                {"field": "interaction", "format": "+.3f"},
                {"field": "low", "format": "+.3f"},
                {"field": "high", "format": "+.3f"},
            ],
        },
    }


def comparison(names: Sequence[str], farthest: float) -> Spec:
    """Δ in one run against Δ in another, on equal axes, with both intervals.

    Args:
        names: Of the two runs; rows hold `delta_a`, `delta_b`, `changed`, `candidate` and `numbers`.
        farthest: End of both axes.
    """
    scale = {"domain": [-farthest, farthest], "nice": False}
    ends = [{"x": -farthest, "y": -farthest}, {"x": farthest, "y": farthest}]
    x = {"type": "quantitative", "axis": _AXIS, "scale": scale}
    return {
        "data": {"name": "rows"},
        "height": 320,
        "layer": [
            {
                "data": {"values": ends},
                "mark": {"type": "line", "style": "quiet", "strokeDash": [2, 4], "strokeWidth": 1},
                "encoding": {"x": {"field": "x", **x}, "y": {"field": "y", **x}},
            },
            {
                "mark": {"type": "point", "filled": True, "clip": True},
                "encoding": {
                    "x": {"field": "delta_a", **x, "title": f"Δ in {names[0]}"},
                    "y": {"field": "delta_b", **x, "title": f"Δ in {names[1]}"},
                    "color": {"field": "changed", "type": "nominal", "title": None},
                    "tooltip": [
                        {"field": "candidate"},
                        {"field": "delta_a", "format": "+.3f"},
                        {"field": "delta_b", "format": "+.3f"},
                        {"field": "changed", "title": "verdicts"},
                    ],
                },
            },
        ],
    }
