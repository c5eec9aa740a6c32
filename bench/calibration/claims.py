"""The claims that the documents make, each checked against the study's files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pandas as pd

__all__ = ["CLAIMS", "check", "write_readme"]

Frame = pd.DataFrame
CLAIMS: tuple[tuple[str, str, Callable[[Frame], float], str, float], ...] = (
    # what is claimed, its file, the number, how it compares, the limit
    ("False positives of one candidate at .05", "coverage", lambda f: f[f.effect == 0].rejected.max(), "≤", 0.07),
    ("Coverage of the 95 % interval, worst setting", "coverage", lambda f: f.coverage.min(), "≥", 0.93),
    ("Coverage of the 95 % interval, 5 % quantile of settings", "coverage", lambda f: float(f.coverage.quantile(0.05)), "≥", 0.945),
    ("Intervals that exclude 0 where p ≥ .05, or hold it where p < .05", "coverage", lambda f: float(f.disagree_with_p.sum()), "≤", 0),
    ("Coverage at a Δ that few problems carry", "equivalence", lambda f: f.coverage.min(), "≥", 0.94),
    ("False equivalence of a Δ at the margin that few problems carry", "equivalence", lambda f: f.called_equivalent.max(), "≤", 0.055),
    ("Power at the smallest detectable loss, promised .80: lowest", "power", lambda f: f.power.min(), "≥", 0.75),
    ("Power at the smallest detectable loss, promised .80: highest", "power", lambda f: f.power.max(), "≤", 0.87),
    ("False positives for these very problems, nothing moves", "fixed_problems", lambda f: f[f.problems == "still"].rejected.max(), "≤", 0.07),
    ("False positives of the bounded test at Δ = 0 without symmetry", "skew", lambda f: f[f.loss.isna()].bounded.max(), "≤", 0.05),
    ("False discovery rate of fdr, no pillars and 3.5 % pillars", "discoveries", lambda f: f[f.rule == "fdr"].false_discoveries.max(), "≤", 0.05),
    ("Idle sweeps whose nominal calls exceed the 95 % quantile of luck, mean over designs", "luck", lambda f: f[f.pillars == 0].exceeds.mean(), "≤", 0.07),
    ("False positives with more draws of the baseline (seeds, controls)", "references", lambda f: f[f.reference.isin(["seeds", "controls"])].false_positives.max(), "≤", 0.06),
    ("Tokens without effect that a freeze list keeps, 3 seeds or more", "freezing", lambda f: f[f.n_seeds >= 3].kept.min(), "≥", 0.8),
    ("Pillars of a large benchmark (loss .05) that it freezes, any number of seeds", "freezing", lambda f: f[f.loss == 0.05].pillars_frozen.max(), "≤", 0.05),
    ("Pillars that it freezes, 3 seeds or more, mean over all kinds simulated", "freezing", lambda f: f[f.n_seeds >= 3].pillars_frozen.mean(), "≤", 0.02),
    ("Chance findings that a split confirms", "confirmation", lambda f: f[f.how == "split"].confirmed.max(), "≤", 0.05),
    ("Errors of racing with a look after each of 8 rounds, at .05", "peeking", lambda f: f.errors.max(), "≤", 0.05),
)  # fmt: skip


def check(folder: Path) -> list[dict[str, object]]:
    """One row for each claim: its number, its limit, and whether it holds."""
    rows: list[dict[str, object]] = []
    for claim, name, number, how, limit in CLAIMS:
        path = folder / f"{name}.csv"
        if path.exists():
            found = float(number(pd.read_csv(path)))
            holds = found <= limit + 1e-9 if how == "≤" else found >= limit - 1e-9
            rows.append(
                {
                    "claim": claim,
                    "file": name,
                    "found": found,
                    "limit": f"{how} {limit:g}",
                    "holds": holds,
                }
            )
    return rows


def write_readme(folder: Path) -> None:
    """Writes README.md from the files: claims first, then a table of each short section."""
    lines = [
        "# Calibration of tests, intervals, freeze lists and racing",
        "",
        "Made by `python -m bench calibration`; `bench/calibration/` describes the simulated sweeps.",
        "`settings.json` has the number of simulated sweeps of each section and its processor time.",
        "",
        "| claim | file | found | claimed | holds |",
        "| --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| {row['claim']} | `{row['file']}.csv` | {row['found']:.3f} | {row['limit']} | "
        f"{'yes' if row['holds'] else '**no**'} |"
        for row in check(folder)
    ]
    for name, title, columns in _TABLES:
        path = folder / f"{name}.csv"
        if path.exists():
            lines += ["", f"## {title} (`{name}.csv`)", ""]
            lines += _table(pd.read_csv(path), columns)
    (folder / "README.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


_TABLES = (
    ("discoveries", "Discoveries among 200 candidates", ["n_problems", "n_seeds", "pillars", "rule", "false_discoveries", "found"]),
    ("references", "More draws of the baseline", ["n_problems", "n_seeds", "candidates", "reference", "false_positives", "power"]),
    ("luck", "Nominal calls by luck, 200 candidates", ["n_problems", "n_seeds", "pillars", "calls_mean", "calls_median", "calls_quantile_95", "expected_mean", "expected_quantile_95", "exceeds"]),
    ("freezing", "Freeze lists over five benchmarks", ["n_seeds", "median_rate", "loss", "where", "kept", "kept_by_math500_alone", "pillars_frozen"]),
    ("confirmation", "Confirmation of chance findings", ["n_problems", "n_seeds", "how", "chosen", "confirmed"]),
    ("skew", "Δ = 0 without symmetry, and power of both tests", ["n_problems", "n_seeds", "loss", "sign_flip", "bounded"]),
    ("racing", "Racing", ["list", "n_problems", "n_seeds", "margin", "target", "futility", "forks_of_fixed", "tokens_of_naive", "tokens_of_naive_fixed", "pillars_found", "pillars_found_fixed", "equivalent", "futile"]),
)  # fmt: skip


def _table(frame: Frame, columns: list[str]) -> list[str]:
    def cell(value: object) -> str:
        if isinstance(value, float):
            return "" if value != value else f"{value:.3g}"
        return str(value)

    kept = [column for column in columns if column in frame]
    return [
        "| " + " | ".join(kept) + " |",
        "| " + " | ".join("---" for _ in kept) + " |",
        *(
            "| " + " | ".join(cell(v) for v in row) + " |"
            for row in frame[kept].itertuples(index=False)
        ),
    ]
