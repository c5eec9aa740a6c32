"""Which figures a run has, with their rows: for the page, for notebooks and for files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from knockout.errors import UsageError
from knockout.figures import candidates, contrasts, runs
from knockout.figures.theme import Spec
from knockout.figures.write import complete, write_figure
from knockout.report.comparison import comparison_of
from knockout.report.data import overview
from knockout.report.source import open_ledger, read_run
from knockout.report.trajectories import frequencies

__all__ = ["Plots", "level_words", "page_specs", "write_figures"]

RULES = ("nominal", "fdr")
_MOST_ROWS = 40
_OWN_ROWS = {
    "dose": ("doses", "penalties"),
    "interactions": ("pairs", "pairs (`candidates.pairs` asks for them)"),
    "comparison": ("comparison", "candidates in common"),
}

Rows = list[dict[str, Any]]


def level_words(rule: str, alpha: float) -> str:
    """What a figure's intervals and colours follow, in words."""
    if rule == "nominal":
        return f"{100 * (1 - alpha):g} % intervals, rule nominal, not corrected"
    return f"intervals corrected by rule fdr at {alpha:g}"


def page_specs(data: dict[str, Any]) -> dict[str, Spec]:
    """Every specification that the page may draw, by name; it puts the rows in."""
    about, rows = data["run"], data["rows"]
    margin, alpha = about["margin"], about["alpha"]
    names = list(dict.fromkeys(row["benchmark"] for row in rows))
    found: dict[str, Spec] = {
        "p_values": candidates.p_values(),
        "racing": runs.racing(),
        "where": runs.where_forks(),
        "length": runs.length_change(),
        "seeds": runs.by_seed(margin),
        "map": runs.outcome_map(),
        "replacements": runs.replacements(),
        "dose": contrasts.dose_response(margin),
        "interactions": contrasts.interactions(level_words("nominal", alpha)),
        "interaction_map": contrasts.interaction_map(),
    }
    if compared := data.get("comparison"):
        found["comparison"] = contrasts.comparison(compared["names"], compared["farthest"])
    for rule in RULES:
        found[f"forest/{rule}"] = candidates.forest(rule, margin, level_words(rule, alpha))
        line = f"p < {alpha:g}" if rule == "nominal" else f"fdr at {alpha:g}"
        found[f"volcano/{rule}"] = candidates.volcano(rule, line)
        found[f"frequency/{rule}"] = candidates.frequency(rule, margin)
        for one in names:
            for other in names:
                if one != other:
                    spec = candidates.agreement(rule, (one, other), _farthest(rows))
                    found[f"agreement/{one}/{other}/{rule}"] = spec
    return found


def _farthest(rows: Rows) -> float:
    largest = max((abs(row["delta"]) for row in rows if row["delta"] is not None), default=0.0)
    return round(1.1 * max(largest, 0.01), 4)


class Plots:
    """The figures of a run; each method returns an Altair chart, which a notebook shows.

    Args:
        folder: The run directory. It is read once, when the first figure is asked for.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._data: dict[str, Any] | None = None

    @property
    def data(self) -> dict[str, Any]:
        """The data of the report's first page."""
        if self._data is None:
            with open_ledger(self._folder) as ledger:
                self._data = overview(read_run(self._folder, ledger), ledger, *frequencies(ledger))
            if not self._data["rows"]:
                raise UsageError(f"{self._folder}: no cell has finished yet; nothing to plot")
        return self._data

    @property
    def benchmarks(self) -> list[str]:
        """Names of the benchmarks that have rows, in order."""
        return list(dict.fromkeys(row["benchmark"] for row in self.data["rows"]))

    def forest(self, benchmark: str | None = None, *, rule: str | None = None) -> Any:
        """Δ of the 40 candidates with the largest |Δ|, each with its interval.

        Args:
            benchmark: The first one if not given.
            rule: "nominal" or "fdr"; the run's own if not given.

        Raises:
            UsageError: No such benchmark, no finished cell, or altair is not installed.
        """
        return self._chart("forest", benchmark, rule)

    def volcano(self, benchmark: str | None = None, *, rule: str | None = None) -> Any:
        """Evidence against effect; arguments as for `forest`."""
        return self._chart("volcano", benchmark, rule)

    def frequency(self, benchmark: str | None = None, *, rule: str | None = None) -> Any:
        """Effect against frequency in the baselines; arguments as for `forest`."""
        return self._chart("frequency", benchmark, rule)

    def p_values(self, benchmark: str | None = None) -> Any:
        """Histogram of p-values; `benchmark` as for `forest`."""
        return self._chart("p_values", benchmark, None)

    def agreement(self, one: str, other: str, *, rule: str | None = None) -> Any:
        """Δ on one benchmark against Δ on another."""
        return self._chart("agreement", one, rule, other)

    def dose(self, benchmark: str | None = None) -> Any:
        """Δ against the strength of penalties, the ban last; `benchmark` as for `forest`.

        Raises:
            UsageError: The run has no penalties, or as for `forest`.
        """
        return self._chart("dose", benchmark, None)

    def interactions(self, benchmark: str | None = None) -> Any:
        """What each pair of `candidates.pairs` does beyond its members, Δ_AB − Δ_A − Δ_B.

        The 40 pairs with the largest interaction, each with its 1 − α interval; `benchmark` as for
        `forest`.

        Raises:
            UsageError: The run has no pairs, or as for `forest`.
        """
        return self._chart("interactions", benchmark, None)

    def comparison(self, other: Any, benchmark: str | None = None) -> Any:
        """Δ in this run against Δ in another; significant differences are named.

        Args:
            other: The other `Run`, or its directory.
            benchmark: The first one if not given.

        Raises:
            UsageError: The runs have nothing in common, or as for `forest`.
        """
        self.data["comparison"] = comparison_of(
            self._folder, Path(getattr(other, "folder", other)), self.data["run"]["alpha"]
        )
        return self._chart("comparison", benchmark, None)

    def _chart(self, kind: str, benchmark: str | None, rule: str | None, other: str = "") -> Any:
        try:
            import altair
        except ImportError:
            raise UsageError(
                "figures in notebooks need altair: `pip install 'knockout-harness[figures]'`"
            ) from None
        spec, rows = self.figure(kind, benchmark, rule=rule, other=other)
        return altair.Chart.from_dict(complete(spec, rows))

    def figure(
        self, kind: str, benchmark: str | None = None, *, rule: str | None = None, other: str = ""
    ) -> tuple[Spec, Rows]:
        """A figure's specification and its rows.

        Raises:
            UsageError: No such benchmark or rule.
        """
        name = benchmark or self.benchmarks[0]
        rule = rule or self.data["run"]["rule"]
        for what, given, known in (
            ("benchmark", name, self.benchmarks),
            ("rule", rule, RULES),
            ("benchmark", other or name, self.benchmarks),
        ):
            if given not in known:
                raise UsageError(f"{what}: found {given!r}; expected one of {', '.join(known)}")
        specs = page_specs(self.data)
        if kind in _OWN_ROWS:
            return specs[kind], self._own_rows(kind, name)
        rows = [r for r in self.data["rows"] if r["benchmark"] == name and r["delta"] is not None]
        if kind == "forest":
            rows = sorted(rows, key=lambda row: -abs(row["delta"]))[:_MOST_ROWS]
        if kind == "agreement":
            there = {r["c"]: r["delta"] for r in self.data["rows"] if r["benchmark"] == other}
            rows = [{**r, "other": there[r["c"]]} for r in rows if there.get(r["c"]) is not None]
            return specs[f"agreement/{name}/{other}/{rule}"], rows
        return specs.get(f"{kind}/{rule}") or specs[kind], rows

    def _own_rows(self, kind: str, benchmark: str) -> Rows:
        """Rows of a figure that does not draw the verdict table."""
        key, what = _OWN_ROWS[kind]
        found = self.data[key]["rows"] if kind == "comparison" else self.data[key]
        rows = [row for row in found if row["benchmark"] == benchmark]
        if not rows:
            raise UsageError(f"{self._folder}: {benchmark} has no {what}; nothing to plot")
        if kind == "interactions":
            rows = sorted(rows, key=lambda row: -abs(row["interaction"] or 0.0))[:_MOST_ROWS]
        return rows


def write_figures(folder: Path, out: Path, kinds: Sequence[str] = ("pdf", "svg")) -> list[Path]:
    """Writes a run's figures.

    Args:
        folder: The run directory.
        out: Folder for the files; created if it does not exist.
        kinds: Endings: "pdf", "svg", "png", "html".

    Returns:
        For each benchmark `forest-`, `volcano-`, `frequency-` and `p_values-<benchmark>`, and if the
        run has them `dose-` and `interactions-`, in each of the kinds and as CSV.

    Raises:
        UsageError: vl-convert-python is not installed, or the run has no finished cell.
    """
    plots = Plots(folder)
    written: list[Path] = []
    for name in plots.benchmarks:
        file = "".join(c if c.isalnum() or c in "-_." else "_" for c in name)
        more = [
            kind
            for kind in ("dose", "interactions")
            if any(row["benchmark"] == name for row in plots.data[_OWN_ROWS[kind][0]])
        ]
        for kind in ("forest", "volcano", "frequency", "p_values", *more):
            spec, rows = plots.figure(kind, name)
            for ending in kinds:
                written += write_figure(spec, rows, out / f"{kind}-{file}.{ending}")
    return list(dict.fromkeys(written))
