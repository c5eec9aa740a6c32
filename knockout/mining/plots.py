"""Figures of mining, of `knockout orthogonality` and of `knockout geometry`: specifications only."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["cutoff_figure", "geometry_figure", "orthogonality_figure", "rows_of"]

_NAMES = {
    "kl_share": "of the total KL",
    "token_share": "of all tokens",
    "output_share": "of an output",
    "grad_share": "of the gradient norm",
    "stability": "stability (Jaccard)",
}
_LINES = ("kl_share", "output_share", "grad_share", "stability")
_COLOURS = ["#c23b22", "#e0a100", "#4477aa"]


def rows_of(table: pd.DataFrame) -> list[dict[str, Any]]:
    """A table as records that JSON can hold; what is missing is None."""
    rows: list[dict[str, Any]] = json.loads(table.to_json(orient="records", double_precision=15))
    return rows


def cutoff_figure(top: int, knee: int | None, lines: Sequence[str] = _LINES) -> dict[str, Any]:
    """What a list of K types covers, and its stability with 95 % of resamples. Rows: `cutoff_curve`."""
    k = {"field": "k", "type": "quantitative", "title": "K (types, by rank)"}
    share = {"type": "quantitative", "title": "share", "scale": {"domain": [0, 1]}}
    names = "{" + ", ".join(f"{key}: '{name}'" for key, name in _NAMES.items()) + "}"
    marks = [{"k": top, "name": f"K = {top}"}]
    if knee is not None and knee != top:
        marks.append({"k": knee, "name": f"knee {knee}"})
    return {
        "data": {"name": "rows"},
        "height": 300,
        "layer": [
            {
                "mark": {"type": "area", "opacity": 0.15},
                "encoding": {
                    "x": k,
                    "y": {"field": "stability_low", **share},
                    "y2": {"field": "stability_high"},
                },
            },
            {
                "transform": [{"fold": list(lines), "as": ["what", "value"]}],
                "mark": {"type": "line"},
                "encoding": {
                    "x": k,
                    "y": {"field": "value", **share},
                    "color": {
                        "field": "what",
                        "type": "nominal",
                        "legend": {"title": None, "labelExpr": f"{names}[datum.value]"},
                    },
                    "strokeDash": {"field": "what", "type": "nominal", "legend": None},
                },
            },
            {
                "data": {"values": marks},
                "mark": {"type": "rule", "strokeDash": [3, 3]},
                "encoding": {"x": {**k, "field": "k"}},
            },
            {
                "data": {"values": marks},
                "mark": {"type": "text", "align": "left", "dx": 4, "dy": -4, "baseline": "bottom"},
                "encoding": {
                    "x": {**k, "field": "k"},
                    "y": {"value": 14},
                    "text": {"field": "name"},
                },
            },
        ],
    }


def orthogonality_figure(benchmarks: list[str]) -> dict[str, Any]:
    """Rank correlation with harm, and area for pillars: a line of panels per benchmark.

    Rows: `orthogonality`.
    """
    measures: tuple[tuple[str, str, float, list[float]], ...] = (
        ("spearman", "Spearman ρ with harm", 0.0, [-1, 1]),
        ("auc", "area for pillars", 0.5, [0, 1]),
    )

    def panel(benchmark: str, measure: str, title: str, chance: float, domain: list[float]) -> Any:
        x = {"type": "quantitative", "title": title, "scale": {"domain": domain}}
        score = {"field": "score", "type": "nominal", "title": None, "sort": None}
        return {
            "title": benchmark,
            "width": 230,
            "transform": [{"filter": {"field": "benchmark", "equal": benchmark}}],
            "layer": [
                {
                    "data": {"values": [{}]},
                    "mark": {"type": "rule", "strokeDash": [3, 3]},
                    "encoding": {"x": {"datum": chance, **x}},
                },
                {
                    "mark": {"type": "rule"},
                    "encoding": {
                        "x": {"field": f"{measure}_low", **x},
                        "x2": {"field": f"{measure}_high"},
                        "y": score,
                    },
                },
                {
                    "mark": {"type": "point", "filled": True},
                    "encoding": {
                        "x": {"field": measure, **x},
                        "y": score,
                        "tooltip": [
                            {"field": "score"},
                            {"field": measure, "format": "+.2f"},
                            {"field": f"{measure}_low", "format": "+.2f"},
                            {"field": f"{measure}_high", "format": "+.2f"},
                            {"field": f"{measure}_p_adjusted", "format": ".2g"},
                        ],
                    },
                },
            ],
        }

    return {
        "data": {"name": "rows"},
        "vconcat": [
            {"hconcat": [panel(benchmark, *measure) for measure in measures]}
            for benchmark in benchmarks
        ],
    }


def geometry_figure(groups: tuple[str, ...], stagnation: bool) -> dict[str, Any]:
    """Norm against cosine, the two cosines, and stagnation, with a colour per group.

    Rows: the table of `knockout geometry`.
    """
    panels = [
        ("mean_norm", "cos_global_rest", "mean length of g", "cosine with G_global of the rest"),
        ("count", "norm", "positions", "length of G_v"),
        ("cos_global_rest", "cos_balanced_rest", "cosine with G_global", "with G_balanced"),
        ("mean_kl_before", "remaining_kl", "KL before (nats)", "KL left, share")
        if stagnation
        else ("mean_kl", "coherence", "mean KL (nats)", "coherence"),
    ]

    def panel(x: str, y: str, x_title: str, y_title: str) -> Any:
        log = {"scale": {"type": "log"}}
        return {
            "width": 260,
            "height": 220,
            "transform": [{"filter": f"isValid(datum.{x}) && isValid(datum.{y})"}],
            "mark": {"type": "point", "filled": True, "opacity": 0.75},
            "encoding": {
                "x": {
                    "field": x,
                    "type": "quantitative",
                    "title": x_title,
                    **(log if x in ("count", "mean_norm") else {"scale": {"zero": False}}),
                },
                "y": {
                    "field": y,
                    "type": "quantitative",
                    "title": y_title,
                    **(log if y == "norm" else {"scale": {"zero": False}}),
                },
                "color": {
                    "field": "group",
                    "type": "nominal",
                    "title": None,
                    "scale": {"domain": list(groups), "range": _COLOURS},
                },
                "tooltip": [{"field": "token"}, {"field": "group"}, {"field": x}, {"field": y}],
            },
        }

    made = [panel(*one) for one in panels]
    return {
        "data": {"name": "rows"},
        "vconcat": [{"hconcat": made[:2]}, {"hconcat": made[2:]}],
    }
