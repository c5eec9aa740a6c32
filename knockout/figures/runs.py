"""Figures of what a run generated: where forks begin, what they change, how a race went."""

from __future__ import annotations

from knockout.figures.theme import Spec

__all__ = ["by_seed", "length_change", "outcome_map", "racing", "replacements", "where_forks"]

# Lost, same, won: orange, neutral, blue, as the verdicts of a loss and a gain are drawn.
_OUTCOMES = {"domain": ["lost", "same", "won"], "range": ["#b84a08", "#9aa4af", "#0063a6"]}

_WHOLE = {"tickMinStep": 1, "format": "d"}


def racing() -> Spec:
    """Candidates still asked for in each round. Rows: `series`, `round`, `running`."""
    return {
        "data": {"name": "rows"},
        "height": 240,
        "mark": {"type": "line", "interpolate": "step-after", "point": {"filled": True}},
        "encoding": {
            "x": {
                "field": "round",
                "type": "ordinal",
                "title": "round (seed)",
                "axis": {"labelAngle": 0},
            },
            "y": {"field": "running", "type": "quantitative", "title": "candidates running"},
            "color": {"field": "series", "type": "nominal", "title": None},
            "tooltip": [{"field": "series"}, {"field": "round"}, {"field": "running"}],
        },
    }


def where_forks() -> Spec:
    """Forks by the tenth of the baseline in which they begin. Rows: `tenth` (0 to 9), `forks`."""
    return {
        "data": {"name": "rows"},
        "height": 120,
        "transform": [
            {"calculate": "10 * datum.tenth", "as": "from"},
            {"calculate": "10 * datum.tenth + 10", "as": "to"},
        ],
        "mark": {"type": "bar"},
        "encoding": {
            "x": {
                "field": "from",
                "type": "quantitative",
                "bin": "binned",
                "title": "% of the baseline",
            },
            "x2": {"field": "to"},
            "y": {"field": "forks", "type": "quantitative", "title": "forks", "axis": _WHOLE},
            "tooltip": [{"field": "from", "title": "from %"}, {"field": "forks"}],
        },
    }


def length_change() -> Spec:
    """Change of length after the fork, in tokens. Rows: `low`, `high` (of a bin), `forks`."""
    return {
        "data": {"name": "rows"},
        "height": 120,
        "mark": {"type": "bar"},
        "encoding": {
            "x": {
                "field": "low",
                "type": "quantitative",
                "bin": "binned",
                "title": "change of length, tokens",
                "axis": {"tickMinStep": 1, "format": "d"},
            },
            "x2": {"field": "high"},
            "y": {"field": "forks", "type": "quantitative", "title": "forks", "axis": _WHOLE},
            "tooltip": [
                {"field": "low", "title": "from"},
                {"field": "high", "title": "to"},
                {"field": "forks"},
            ],
        },
    }


def by_seed(margin: float) -> Spec:
    """Δ of one candidate in each seed. Rows: `benchmark`, `seed`, `delta`, `forks`."""
    return {
        "data": {"name": "rows"},
        "height": 120,
        "layer": [
            {
                "data": {"values": [{}]},
                "mark": {"type": "rect", "style": "band"},
                "encoding": {"y": {"datum": -margin}, "y2": {"datum": margin}},
            },
            {
                "mark": {"type": "point", "filled": True, "size": 50},
                "encoding": {
                    "x": {
                        "field": "seed",
                        "type": "ordinal",
                        "title": "seed",
                        "axis": {"labelAngle": 0},
                    },
                    "y": {
                        "field": "delta",
                        "type": "quantitative",
                        "title": "Δ Pass@1",
                        "axis": {"format": "+.3~f"},
                    },
                    "color": {"field": "benchmark", "type": "nominal", "title": None},
                    "tooltip": [
                        {"field": "benchmark"},
                        {"field": "seed"},
                        {"field": "delta", "format": "+.3f"},
                        {"field": "forks"},
                    ],
                },
            },
        ],
    }


def outcome_map() -> Spec:
    """Problem × candidate: what each ban won and lost, over seeds.

    Rows: `label`, `problem`, `net` (won minus lost), `lost`, `won`, `c`; pairs that changed nothing are absent.
    """
    return {
        "data": {"name": "rows"},
        "height": {"step": 14},
        "mark": {"type": "rect", "cursor": "pointer", "opacity": 1},
        "encoding": {
            "x": {
                "field": "problem",
                "type": "ordinal",
                "sort": {"field": "net", "op": "sum", "order": "ascending"},
                "title": "problem, most lost first",
                "axis": {"labels": False, "ticks": False},
            },
            "y": {
                "field": "label",
                "type": "nominal",
                "sort": {"field": "net", "op": "sum", "order": "ascending"},
                "title": None,
                "axis": {"labelLimit": 160, "labelFontSize": 10},
            },
            "color": {
                "field": "net",
                "type": "quantitative",
                "scale": {"domainMid": 0, "range": ["#b84a08", "#e8e8e8", "#0063a6"]},
                "title": "won − lost seeds",
            },
            "tooltip": [
                {"field": "label", "title": "candidate"},
                {"field": "problem"},
                {"field": "lost"},
                {"field": "won"},
            ],
        },
    }


def replacements() -> Spec:
    """What is picked in the banned token's place. Rows: `label`, `outcome`, `forks`."""
    return {
        "data": {"name": "rows"},
        "height": {"step": 17},
        "mark": {"type": "bar"},
        "encoding": {
            "x": {
                "field": "forks",
                "type": "quantitative",
                "title": "forks",
                "stack": True,
                "axis": _WHOLE,
            },
            "y": {
                "field": "label",
                "type": "nominal",
                "sort": {"field": "forks", "op": "sum", "order": "descending"},
                "title": None,
                "axis": {
                    "labelFont": "ui-monospace, DejaVu Sans Mono, monospace",
                    "labelLimit": 180,
                },
            },
            "color": {"field": "outcome", "type": "nominal", "scale": _OUTCOMES, "title": None},
            "order": {"field": "outcome"},
            "tooltip": [
                {"field": "label", "title": "picked"},
                {"field": "outcome"},
                {"field": "forks"},
            ],
        },
    }
