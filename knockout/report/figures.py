"""Figures for papers: forest, volcano and cost, as PDF and PNG."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from knockout.errors import UsageError
from knockout.files import atomic_path
from knockout.report.data import VERDICTS, overview
from knockout.report.source import open_ledger, read_run
from knockout.report.trajectories import frequencies

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["write_figures"]

# Okabe and Ito's colours, which stay apart for colour-blind readers and in print.
_COLORS = dict(zip(VERDICTS, ("#0072B2", "#D55E00", "#009E73", "#7F7F7F"), strict=True))
_NAMES = dict(
    zip(
        VERDICTS,
        ("strong pillar", "strong stumbling block", "equivalent", "undetermined"),
        strict=True,
    )
)
_MARKERS = {"candidate": "o", "control": "D", "canary": "x"}
_STYLE: dict[Any, Any] = {
    "font.size": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "legend.frameon": False,
    # Text stays text in the PDF, and equal data give equal bytes.
    "pdf.fonttype": 42,
    "svg.hashsalt": "knockout",
    "savefig.dpi": 200,
    # A token may hold a dollar sign; it is no formula.
    "text.parse_math": False,
}
_MOST_ROWS = 40
_COLUMN_IN = 3.4


def write_figures(folder: Path, out: Path) -> list[Path]:
    """Writes figures of a run.

    Args:
        folder: The run directory.
        out: Folder for the files; made where it is missing.

    Returns:
        The files: `forest-<benchmark>` and `volcano-<benchmark>` for each benchmark, and `cost`,
        each as .pdf and .png.

    Raises:
        UsageError: matplotlib is not installed, or the run has no verdicts yet.
    """
    try:
        import matplotlib as mpl
    except ImportError:
        raise UsageError(
            "figures need matplotlib: `pip install 'knockout-harness[figures]'`"
        ) from None
    with open_ledger(folder) as ledger:
        data = overview(read_run(folder, ledger), ledger, *frequencies(ledger))
    if not data["rows"]:
        raise UsageError(f"{folder}: the run has no finished cell yet, so there is nothing to plot")
    written = []
    with mpl.rc_context(_STYLE):
        for name in dict.fromkeys(row["benchmark"] for row in data["rows"]):
            rows = [r for r in data["rows"] if r["benchmark"] == name and r["delta"] is not None]
            if not rows:
                continue
            file = "".join(c if c.isalnum() or c in "-_." else "_" for c in name)
            written += _save(_forest(rows, name), out / f"forest-{file}")
            written += _save(_volcano(rows, name, data["run"]["alpha"]), out / f"volcano-{file}")
        written += _save(_cost(data["benchmarks"]), out / "cost")
    return written


def _save(figure: Figure, stem: Path) -> list[Path]:
    paths = []
    for kind, extra in (("pdf", {"CreationDate": None}), ("png", {"Software": None})):
        path = stem.with_name(f"{stem.name}.{kind}")
        with atomic_path(path) as temporary, warnings.catch_warnings():
            # A token in a script that the font lacks becomes a box; the table has its text.
            warnings.filterwarnings("ignore", "Glyph .* missing from font")
            figure.savefig(temporary, format=kind, metadata=extra)
        paths.append(path)
    return paths


def _new(width: float, height: float) -> tuple[Figure, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots()


def _kinds(rows: list[dict[str, Any]]) -> list[tuple[str, str, list[dict[str, Any]]]]:
    found = []
    for key in VERDICTS:
        for group in _MARKERS:
            own = [row for row in rows if row["key"] == key and row["group"] == group]
            if own:
                found.append((key, group, own))
    return found


def _label(key: str, group: str) -> str:
    return _NAMES[key] if group == "candidate" else f"{_NAMES[key]} ({group})"


def _forest(rows: list[dict[str, Any]], name: str) -> Figure:
    largest = sorted(rows, key=lambda row: -abs(row["delta"]))[:_MOST_ROWS]
    shown = sorted(largest, key=lambda row: (-row["delta"], row["c"]))
    place = {row["c"]: index for index, row in enumerate(shown)}
    figure, axes = _new(_COLUMN_IN, 0.9 + 0.13 * len(shown))
    axes.axvline(0, color="black", linewidth=0.6)
    for key, group, own in _kinds(shown):
        x = np.array([row["delta"] for row in own])
        low, high = (
            np.array([row[end] if row[end] is not None else row["delta"] for row in own])
            for end in ("ci_low", "ci_high")
        )
        axes.errorbar(
            x, [place[row["c"]] for row in own], xerr=np.maximum([x - low, high - x], 0),
            fmt=_MARKERS[group], color=_COLORS[key], markersize=3.2, linewidth=0.8,
            markerfacecolor=_COLORS[key] if group == "candidate" else "white",
            label=_label(key, group),
        )  # fmt: skip
    axes.set_yticks(range(len(shown)), [_clip(row["candidate"]) for row in shown], fontsize=6.5)
    axes.set_ylim(-0.8, len(shown) - 0.2)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("Δ Pass@1 with its interval")
    axes.set_title(name, loc="left", fontsize=8)
    figure.legend(loc="outside lower center", ncols=2, fontsize=6.5)
    return figure


def _volcano(rows: list[dict[str, Any]], name: str, alpha: float) -> Figure:
    tested = [row for row in rows if row["p_value"]]
    figure, axes = _new(_COLUMN_IN, 2.6)
    axes.axvline(0, color="black", linewidth=0.6)
    axes.axhline(-np.log10(alpha), color="black", linewidth=0.6, linestyle=":")
    for key, group, own in _kinds(tested):
        marker = _MARKERS[group]
        axes.scatter(
            [row["delta"] for row in own], [-np.log10(row["p_value"]) for row in own],
            marker=marker, s=12, linewidths=0.8, label=_label(key, group),
            **({"color": _COLORS[key]} if marker == "x" else {
                "edgecolors": _COLORS[key],
                "facecolors": _COLORS[key] if group == "candidate" else "white",
            }),
        )  # fmt: skip
    strongest = sorted(tested, key=lambda row: row["p_value"])[:5]
    for row in strongest:
        if row["verdict"] != "neutral":
            axes.annotate(
                _clip(row["candidate"]), (row["delta"], -np.log10(row["p_value"])),
                xytext=(3, 2), textcoords="offset points", fontsize=6,
            )  # fmt: skip
    axes.set_ylim(bottom=0)
    axes.set_xlabel("Δ Pass@1")
    axes.set_ylabel("−log₁₀ p")
    axes.set_title(name, loc="left", fontsize=8)
    figure.legend(loc="outside lower center", ncols=2, fontsize=6.5)
    return figure


def _cost(benchmarks: list[dict[str, Any]]) -> Figure:
    figure, axes = _new(_COLUMN_IN, 0.8 + 0.42 * len(benchmarks))
    at = np.arange(len(benchmarks))[::-1]
    spent = np.array([b["tokens_generated"] for b in benchmarks]) / 1e6
    naive = np.array([b["tokens_naive"] for b in benchmarks]) / 1e6
    axes.barh(at - 0.19, naive, 0.36, color="#BBBBBB", label="full runs")
    axes.barh(at + 0.19, spent, 0.36, color="#0072B2", label="generated")
    for y, one, other in zip(at, spent, naive, strict=True):
        if one > 0:
            axes.annotate(
                f"{other / one:.1f}×", (other, y), xytext=(4, -3), textcoords="offset points"
            )
    axes.set_yticks(at, [b["name"] for b in benchmarks])
    axes.set_xlabel("tokens (millions)")
    axes.margins(x=0.12)
    figure.legend(loc="outside lower center", ncols=2, fontsize=6.5)
    return figure


def _clip(text: str, most: int = 24) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"
