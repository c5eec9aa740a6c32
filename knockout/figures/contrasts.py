"""Figures that set knockouts side by side: doses, pairs, two runs."""

from __future__ import annotations

from collections.abc import Sequence

from knockout.figures.theme import Spec

__all__ = ["comparison", "dose_response", "interaction_map", "interactions"]

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


def interactions(level: str) -> Spec:
    """Interaction of every pair, Δ_AB − Δ_A − Δ_B, with its interval, lowest first.

    Rows: `pair`, `first`, `second`, `delta_first`, `delta_second`, `delta_pair`, `interaction`, `ci_low`,
    `ci_high`, `p_adjusted`.

    Args:
        level: What the intervals and colours follow, in words; the axis says it.
    """
    row: Spec = {
        "field": "pair",
        "type": "nominal",
        "sort": {"field": "interaction", "op": "mean", "order": "ascending"},
        "title": None,
        "axis": {"labelLimit": 220, "domain": False, "ticks": False},
    }
    x = {
        "type": "quantitative",
        "axis": _AXIS,
        "title": f"Δ of the pair − Δ of both · {level}",
    }
    # The interval says it, as on every figure: it is on one side of 0 or it is not.
    hue: Spec = {
        "condition": [
            {"test": "datum.ci_high < 0", "value": "#0063a6"},
            {"test": "datum.ci_low > 0", "value": "#b84a08"},
        ],
        "value": "#7a838c",
    }
    tooltip = [
        {"field": "pair"},
        {"field": "delta_first", "title": "Δ first", "format": "+.3f"},
        {"field": "delta_second", "title": "Δ second", "format": "+.3f"},
        {"field": "delta_pair", "title": "Δ pair", "format": "+.3f"},
        {"field": "interaction", "format": "+.3f"},
        {"field": "p_adjusted", "title": "p adjusted", "format": ".3~g"},
    ]
    return {
        "data": {"name": "rows"},
        "transform": [{"filter": "isValid(datum.interaction)"}],
        "height": {"step": 18},
        "layer": [
            {
                "data": {"values": [{}]},
                "mark": {"type": "rule", "strokeWidth": 1},
                "encoding": {"x": {"datum": 0}},
            },
            {
                "mark": {"type": "rule", "strokeWidth": 1.4},
                "encoding": {
                    "x": {"field": "ci_low", **x},
                    "x2": {"field": "ci_high"},
                    "y": row,
                    "color": hue,
                    "tooltip": tooltip,
                },
            },
            {
                "mark": {"type": "point", "filled": True, "opacity": 1, "cursor": "pointer"},
                "encoding": {
                    "x": {"field": "interaction", **x},
                    "y": row,
                    "color": hue,
                    "tooltip": tooltip,
                },
            },
        ],
    }


def interaction_map() -> Spec:
    """Which token stands in for which: the interaction of every pair as a matrix of its members.

    Rows: `first`, `second`, `interaction`, `ci_low`, `ci_high`.
    """
    place = {"type": "nominal", "title": None, "axis": {"labelLimit": 120, "labelFontSize": 10}}
    return {
        "data": {"name": "rows"},
        "transform": [{"filter": "isValid(datum.interaction)"}],
        "height": {"step": 18},
        "mark": {"type": "rect"},
        "encoding": {
            "x": {"field": "first", **place},
            "y": {"field": "second", **place},
            "color": {
                "field": "interaction",
                "type": "quantitative",
                "scale": {"domainMid": 0, "range": ["#0063a6", "#e8e8e8", "#b84a08"]},
                "title": "interaction",
            },
            "tooltip": [
                {"field": "first"},
                {"field": "second"},
                {"field": "interaction", "format": "+.3f"},
                {"field": "ci_low", "format": "+.3f"},
                {"field": "ci_high", "format": "+.3f"},
            ],
        },
    }


def comparison(names: Sequence[str], farthest: float) -> Spec:
    """Δ in one run against Δ in another, on equal axes; significant differences are named.

    Args:
        names: Of the two runs; rows have `candidate`, `delta_a`, `delta_b`, `difference`, `ci_low`,
            `ci_high`, `change` and `supported`.
        farthest: End of both axes.
    """
    scale = {"domain": [-farthest, farthest], "nice": False}
    ends = [{"x": -farthest, "y": -farthest}, {"x": farthest, "y": farthest}]
    x = {"type": "quantitative", "axis": _AXIS, "scale": scale}
    zero = {"data": {"values": [{}]}, "mark": {"type": "rule", "strokeWidth": 1}}
    place = {
        "x": {"field": "delta_a", **x, "title": f"Δ in {names[0]}"},
        "y": {"field": "delta_b", **x, "title": f"Δ in {names[1]}"},
    }
    return {
        "data": {"name": "rows"},
        "transform": [{"filter": "isValid(datum.delta_a) && isValid(datum.delta_b)"}],
        "height": 440,
        "layer": [
            {**zero, "encoding": {"x": {"datum": 0}}},
            {**zero, "encoding": {"y": {"datum": 0}}},
            {
                "data": {"values": ends},
                "mark": {"type": "line", "style": "quiet", "strokeDash": [2, 4], "strokeWidth": 1},
                "encoding": {"x": {"field": "x", **x}, "y": {"field": "y", **x}},
            },
            {
                "mark": {"type": "point", "clip": True, "opacity": 1},
                "encoding": {
                    **place,
                    "color": {
                        "field": "change",
                        "type": "nominal",
                        "title": "verdict",
                        "scale": {
                            "domain": ["same", "appeared", "went away", "reversed"],
                            "range": ["#7a838c", "#0063a6", "#17704f", "#b84a08"],
                        },
                    },
                    "shape": {
                        "field": "supported",
                        "type": "nominal",
                        "title": None,
                        "scale": {"domain": [True, False], "range": ["diamond", "circle"]},
                        "legend": {
                            "labelExpr": "datum.value ? 'difference significant' : 'not significant'"
                        },
                    },
                    "tooltip": [
                        {"field": "candidate"},
                        {"field": "delta_a", "title": f"Δ in {names[0]}", "format": "+.3f"},
                        {"field": "delta_b", "title": f"Δ in {names[1]}", "format": "+.3f"},
                        {"field": "difference", "format": "+.3f"},
                        {"field": "p_adjusted", "title": "p adjusted", "format": ".3~g"},
                        {"field": "change", "title": "verdict"},
                    ],
                },
            },
            {
                "transform": [{"filter": "datum.supported"}],
                "mark": {"type": "text", "dy": -9, "fontSize": 10, "limit": 110},
                "encoding": {**place, "text": {"field": "candidate"}},
            },
        ],
    }
