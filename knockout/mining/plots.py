"""Figures of mining and of `knockout orthogonality`, as HTML pages."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from knockout.files import write_text

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["cutoff_figure", "orthogonality_figure", "write_figure"]


def cutoff_figure(curve: pd.DataFrame, top: int) -> Any:
    """Share of KL and of tokens that the K best types hold, and the list's stability, by K."""
    import plotly.graph_objects as go

    figure = go.Figure()
    k = curve["k"].tolist()
    low, high = curve["stability_low"].tolist(), curve["stability_high"].tolist()
    figure.add_scatter(
        x=k + k[::-1],
        y=high + low[::-1],
        fill="toself",
        line={"width": 0},
        fillcolor="rgba(120,120,120,0.2)",
        hoverinfo="skip",
        name="stability, 95 % of resamples",
    )
    for column, name, dash in (
        ("stability", "stability (Jaccard)", "dot"),
        ("kl_share", "share of total KL", "solid"),
        ("token_share", "share of tokens", "dash"),
    ):
        figure.add_scatter(x=k, y=curve[column].tolist(), name=name, line={"dash": dash})
    figure.add_vline(
        x=min(top, len(k)), line={"width": 1}, annotation_text=f"K = {min(top, len(k))}"
    )
    figure.update_layout(
        title="Cut-off curve: what a list of K types covers",
        xaxis_title="K (types, by rank)",
        yaxis={"title": "share", "range": [0, 1.02]},
        template="plotly_white",
    )
    return figure


def orthogonality_figure(table: pd.DataFrame) -> Any:
    """Rank correlation with harm, and AUC for pillars, of each score: a panel per benchmark."""
    import plotly.graph_objects as go
    from plotly.subplots import make_subplots

    benchmarks = list(dict.fromkeys(table["benchmark"]))
    measures = (("spearman", "Spearman ρ with harm", 0.0), ("auc", "AUC for pillars", 0.5))
    figure = make_subplots(
        rows=len(benchmarks),
        cols=2,
        shared_yaxes=True,
        subplot_titles=[f"{b}: {title}" for b in benchmarks for _, title, _ in measures],
    )
    for row, benchmark in enumerate(benchmarks, start=1):
        part = table[table["benchmark"] == benchmark]
        for column, (name, _, chance) in enumerate(measures, start=1):
            value = part[name]
            figure.add_trace(
                go.Scatter(
                    x=value.tolist(),
                    y=part["score"].tolist(),
                    mode="markers",
                    error_x={
                        "type": "data",
                        "symmetric": False,
                        "array": (part[f"{name}_high"] - value).tolist(),
                        "arrayminus": (value - part[f"{name}_low"]).tolist(),
                    },
                    showlegend=False,
                ),
                row=row,
                col=column,
            )
            figure.add_vline(x=chance, line={"width": 1, "dash": "dot"}, row=row, col=column)
    figure.update_xaxes(range=[-1, 1], col=1)
    figure.update_xaxes(range=[0, 1], col=2)
    figure.update_layout(
        title="Does a cheap score predict what a knockout does?",
        template="plotly_white",
        height=160 + 240 * len(benchmarks),
    )
    return figure


def write_figure(figure: Any, path: Path, *, embed: bool = True) -> None:
    """Writes a figure as one HTML page.

    Args:
        figure: A Plotly figure.
        path: The page.
        embed: Whether Plotly's script (about 5 MB) is inside, so that the page needs no network.
    """
    write_text(path, figure.to_html(include_plotlyjs=True if embed else "cdn", full_html=True))
