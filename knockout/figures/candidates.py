"""Figures with a mark for each candidate on one benchmark.

Rows are those of the verdict table, with `c` (the candidate's number), `per_1000` (how often the baselines
emit it), and for each rule R: `key_R` (the verdict), `low_R` and `high_R` (the interval that agrees with it)
and `level_R` (the p-value from which it calls).
"""

from __future__ import annotations

from collections.abc import Sequence

from knockout.figures.theme import Spec, color, shape

__all__ = ["agreement", "forest", "frequency", "p_values", "volcano"]

_DELTA = {"type": "quantitative", "title": "Δ Pass@1", "axis": {"format": "+.3~f"}}


def _prepared(rule: str) -> list[Spec]:
    """Gives the rows of one rule the names that the marks use."""
    numbers = (
        f"format(datum.delta, '+.3f') + (isValid(datum.low_{rule}) ? ' [' + "
        f"format(datum.low_{rule}, '+.3f') + ', ' + format(datum.high_{rule}, '+.3f') + ']' : '')"
    )
    return [
        {"filter": "isValid(datum.delta)"},
        *(
            {"calculate": f"datum.{name}_{rule}", "as": name}
            for name in ("key", "low", "high", "level")
        ),
        {"calculate": f"replace(datum.key_{rule}, /_/g, ' ')", "as": "said"},
        {"calculate": numbers, "as": "numbers"},
    ]


def _tooltip(*more: tuple[str, str]) -> list[Spec]:
    shown = (
        ("candidate", "candidate"),
        ("said", "verdict"),
        ("numbers", "Δ"),
        ("p_value", "p"),
        ("p_adjusted", "p adjusted"),
        ("lost", "lost"),
        ("won", "won"),
        *more,
    )
    return [
        {"field": field, "title": title, **({"format": ".3~g"} if field.startswith("p_") else {})}
        for field, title in shown
    ]


def _band(margin: float, channel: str) -> Spec:
    low, high = ("x", "x2") if channel == "x" else ("y", "y2")
    return {
        "data": {"values": [{}]},
        "mark": {"type": "rect", "style": "band"},
        "encoding": {low: {"datum": -margin}, high: {"datum": margin}},
    }


def _zero(channel: str) -> Spec:
    return {
        "data": {"values": [{}]},
        "mark": {"type": "rule", "strokeWidth": 1},
        "encoding": {channel: {"datum": 0}},
    }


def forest(rule: str, margin: float, level: str) -> Spec:
    """Δ with its interval, largest loss first, numbers beside the rows.

    Args:
        rule: Whose intervals and colours are drawn.
        margin: Half-width of the range that counts as no effect; drawn as a band.
        level: What the intervals and colours follow, in words; the axis says it.
    """
    row: Spec = {
        "field": "candidate",
        "type": "nominal",
        "sort": {"field": "delta", "op": "mean", "order": "ascending"},
        "title": None,
        "axis": {
            "labelFont": "ui-monospace, DejaVu Sans Mono, monospace",
            "labelLimit": 220,
            "domain": False,
            "ticks": False,
        },
    }
    # Three lines, because a phone is no wider than one of them.
    x = {**_DELTA, "title": ["Δ Pass@1", level, f"band: ± {margin:g}"]}
    controls = {
        "transform": [
            {"filter": "datum.group == 'control'"},
            {"aggregate": [
                {"op": "min", "field": "delta", "as": "lowest"},
                {"op": "max", "field": "delta", "as": "highest"},
            ]},
        ],
        "mark": {"type": "rect", "style": "band"},
        "encoding": {
            "x": {"field": "lowest", "type": "quantitative"},
            "x2": {"field": "highest"},
        },
    }  # fmt: skip
    point = {
        "mark": {"type": "point", "filled": True, "opacity": 1, "cursor": "pointer"},
        "encoding": {
            "x": {"field": "delta", **x},
            "y": row,
            "color": color("key"),
            "shape": shape(),
            "tooltip": _tooltip(),
        },
    }
    interval = {
        "mark": {"type": "rule", "strokeWidth": 1.4, "cursor": "pointer"},
        "encoding": {
            "x": {"field": "low", **x},
            "x2": {"field": "high"},
            "y": row,
            "color": color("key"),
            "tooltip": _tooltip(),
        },
    }
    numbers = {
        "mark": {"type": "text", "align": "left", "fontSize": 10.5, "cursor": "pointer"},
        "encoding": {"x": {"value": {"expr": "width + 8"}}, "y": row, "text": {"field": "numbers"}},
    }
    # A row can be clicked anywhere, not on its mark alone.
    whole_row = {
        "mark": {"type": "rect", "opacity": 0, "cursor": "pointer"},
        "encoding": {
            "x": {"value": 0},
            "x2": {"value": "width"},
            "y": row,
            "tooltip": _tooltip(),
        },
    }
    return {
        "data": {"name": "rows"},
        "transform": _prepared(rule),
        "height": {"step": 17},
        "padding": {"left": 4, "top": 4, "bottom": 4, "right": 150},
        "layer": [_band(margin, "x"), controls, _zero("x"), whole_row, interval, point, numbers],
    }


def volcano(rule: str, level: str) -> Spec:
    """Evidence against effect; the dotted line is the p-value at which the rule begins to call.

    Args:
        rule: Whose colours and line are drawn.
        level: The rule and its level in words; the axis says it.
    """
    x = {"field": "delta", **_DELTA, "scale": {"padding": 30}}
    y = {"field": "evidence", "type": "quantitative", "scale": {"domainMin": 0}}
    return {
        "data": {"name": "rows"},
        "height": 260,
        "transform": [
            *_prepared(rule),
            {"filter": "isValid(datum.p_value) && datum.p_value > 0"},
            {"calculate": "-log(datum.p_value) / LN10", "as": "evidence"},
            {"calculate": "-log(datum.level) / LN10", "as": "line"},
        ],
        "layer": [
            _zero("x"),
            {
                "mark": {"type": "rule", "strokeDash": [3, 3]},
                "encoding": {"y": {"aggregate": "min", "field": "line", "type": "quantitative"}},
            },
            {
                "mark": {"type": "point", "cursor": "pointer"},
                "encoding": {
                    "x": x,
                    "y": {**y, "title": f"−log₁₀ p · line: {level}"},
                    "color": color("key", legend=False),
                    "shape": shape(),
                    "tooltip": _tooltip(),
                },
            },
            {
                "transform": [{"filter": "indexof(datum.key, 'strong') == 0"}],
                "mark": {"type": "text", "dy": -9, "fontSize": 10, "limit": 110},
                "encoding": {"x": x, "y": y, "text": {"field": "candidate"}},
            },
        ],
    }


def frequency(rule: str, margin: float) -> Spec:
    """Effect against how often the baselines emit the candidate; those never emitted are left out."""
    return {
        "data": {"name": "rows"},
        "height": 260,
        "transform": [*_prepared(rule), {"filter": "datum.per_1000 > 0"}],
        "layer": [
            _band(margin, "y"),
            _zero("y"),
            {
                "mark": {"type": "point", "cursor": "pointer"},
                "encoding": {
                    "x": {
                        "field": "per_1000",
                        "type": "quantitative",
                        "scale": {"type": "log"},
                        "title": "occurrences in 1,000 baseline tokens",
                        "axis": {"tickCount": 5, "format": "~g"},
                    },
                    "y": {"field": "delta", **_DELTA},
                    "color": color("key", legend=False),
                    "shape": shape(),
                    "tooltip": _tooltip(("per_1000", "per 1,000 tokens")),
                },
            },
        ],
    }


def agreement(rule: str, names: Sequence[str], farthest: float) -> Spec:
    """Δ on one benchmark against Δ on another, on equal axes, with the diagonal.

    Args:
        rule: Whose verdicts on the first benchmark colour the points.
        names: Of the two benchmarks; rows have `delta` of the first and `other` of the second.
        farthest: Largest |Δ|, the end of both axes.
    """
    scale = {"domain": [-farthest, farthest], "nice": False}
    ends = [{"x": -farthest, "y": -farthest}, {"x": farthest, "y": farthest}]
    return {
        "data": {"name": "rows"},
        "transform": _prepared(rule),
        "height": 260,
        "layer": [
            _zero("x"),
            _zero("y"),
            {
                "data": {"values": ends},
                "mark": {"type": "line", "style": "quiet", "strokeDash": [2, 4], "strokeWidth": 1},
                "encoding": {
                    "x": {"field": "x", "type": "quantitative"},
                    "y": {"field": "y", "type": "quantitative"},
                },
            },
            {
                "mark": {"type": "point", "cursor": "pointer", "clip": True},
                "encoding": {
                    "x": {"field": "delta", **_DELTA, "scale": scale, "title": f"Δ on {names[0]}"},
                    "y": {"field": "other", **_DELTA, "scale": scale, "title": f"Δ on {names[1]}"},
                    "color": color("key", legend=False),
                    "shape": shape(),
                    "tooltip": _tooltip(("other", f"Δ on {names[1]}")),
                },
            },
        ],
    }


def p_values() -> Spec:
    """Histogram of p-values: bars for candidates, lines for controls; flat where nothing acts."""
    return {
        "data": {"name": "rows"},
        "height": 260,
        "transform": [
            {"filter": "datum.group != 'canary' && isValid(datum.p_value)"},
            {"bin": {"step": 0.05, "extent": [0, 1]}, "field": "p_value", "as": ["from", "to"]},
            {"aggregate": [{"op": "count", "as": "n"}], "groupby": ["group", "from", "to"]},
            {
                "joinaggregate": [{"op": "sum", "field": "n", "as": "all"}],
                "groupby": ["group"],
            },
            {"calculate": "datum.n / datum.all", "as": "share"},
        ],
        "encoding": {
            "x": {
                "field": "from",
                "type": "quantitative",
                "title": "p-value",
                "bin": "binned",
                "scale": {"domain": [0, 1]},
            },
            "x2": {"field": "to"},
            "y": {
                "field": "share",
                "type": "quantitative",
                "axis": {"format": ".0%"},
                "title": "share of the group",
            },
            "tooltip": [
                {"field": "group"},
                {"field": "n", "title": "rows"},
                {"field": "share", "format": ".1%"},
            ],
        },
        "layer": [
            {
                "transform": [{"filter": "datum.group == 'candidate'"}],
                "mark": {"type": "bar", "opacity": 0.7},
            },
            {
                "transform": [{"filter": "datum.group == 'control'"}],
                "mark": {"type": "rule", "strokeWidth": 2.5, "color": "#b84a08"},
            },
        ],
    }
