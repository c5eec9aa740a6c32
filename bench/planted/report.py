"""Tables, figure and report.md of the trial."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from bench.planted.trial import MARGIN
from knockout.files import write_text

__all__ = ["write_report"]

_NEUTRAL = ("filler", "unused")
_CLASSES = (
    ("Δ ≤ −.05", lambda t: t.delta <= -0.05),
    ("−.05 < Δ ≤ −.015", lambda t: (t.delta > -0.05) & (t.delta <= -0.015)),
    ("−.015 < Δ ≤ −.005", lambda t: (t.delta > -0.015) & (t.delta <= -0.005)),
    (".005 ≤ Δ < .05", lambda t: (t.delta >= 0.005) & (t.delta < 0.05)),
    ("Δ ≥ .05", lambda t: t.delta >= 0.05),
)


def write_report(
    out: Path, truth: pd.DataFrame, records: Mapping[str, pd.DataFrame], compared: pd.DataFrame
) -> None:
    """Writes report.md, figure.svg and the tables as CSV, of the kinds of records that are there."""
    seeds = compared.merge(truth[["candidate", "role", "delta"]], on="candidate")
    ratio = (seeds.sd_independent / seeds.sd_coupled) ** 2
    seeds["variance_ratio"] = ratio.replace(np.inf, np.nan)
    tables = {"seeds": ("Seeds: coupled against independent", seeds[seeds.role != "pair"])}
    if "sweeps" in records:
        judged = records["sweeps"].merge(
            truth[["candidate", "role", "delta", "se"]], on="candidate", suffixes=("", "_true")
        )
        each = _by_candidate(judged)
        tables["sizes"] = ("Sweeps by size and arm", _by_size(judged, truth))
        each.round(5).to_csv(out / "found.csv", index=False)
        write_text(out / "figure.svg", _figure(each))
    if "races" in records:
        tables["racing"] = ("Racing", _racing(records["races"], truth))
    if "confirmations" in records:
        tables["confirm"] = (
            "Confirmation on fresh seeds",
            _confirm(records["confirmations"], truth),
        )
    if "pairs" in records:
        shares = ["pillar", "pillar_members_neutral", "interaction_seen"]
        pairs = records["pairs"].groupby(["size", "pair"], sort=False)[shares].mean().reset_index()
        true = truth[["candidate", "delta", "se"]].rename(columns={"candidate": "pair"})
        tables["pairs"] = ("Pairs", pairs.merge(true, on="pair"))
    parts = ["# Report of `python -m bench truth trial`", "Made by the command; see README.md."]
    for name, (title, table) in tables.items():
        table.round(5).to_csv(out / f"{name}.csv", index=False)
        parts += [f"## {title}", _markdown(table)]
    write_text(out / "report.md", "\n\n".join(parts) + "\n")


def _by_candidate(judged: pd.DataFrame) -> pd.DataFrame:
    rows = []
    for (size, arm, name), part in judged.groupby(["size", "arm", "candidate"], sort=False):
        true = float(part.delta_true.iloc[0])
        rows.append(
            {
                "size": size, "arm": arm, "candidate": name, "role": part.role.iloc[0],
                "delta_true": true,
                "pillar_fdr": float((part.verdict_fdr == "strong_pillar").mean()),
                "block_fdr": float((part.verdict_fdr == "strong_stumbling_block").mean()),
                "pillar_nominal": float((part.verdict_nominal == "strong_pillar").mean()),
                "block_nominal": float((part.verdict_nominal == "strong_stumbling_block").mean()),
                "mean_delta": float(part.delta.mean()), "sd_delta": float(part.delta.std(ddof=1)),
                "coverage": float(((part.ci_low <= true) & (true <= part.ci_high)).mean()),
                "equivalent": float((part.evidence == "equivalent").mean()),
            }
        )  # fmt: skip
    return pd.DataFrame(rows)


def _rule(arm: str) -> str:
    return "fdr" if arm == "ours" else "nominal"


def _by_size(judged: pd.DataFrame, truth: pd.DataFrame) -> pd.DataFrame:
    """Our arm by `fdr` and by `nominal`, the published one by `nominal`."""
    rows = []
    null = set(truth[truth.role.isin(_NEUTRAL)].candidate)
    for size in judged["size"].unique():
        for arm, rule in (("ours", "fdr"), ("ours", "nominal"), ("published", "nominal")):
            part = judged[(judged["size"] == size) & (judged.arm == arm)]
            verdict = part[f"verdict_{rule}"]
            called = verdict != "neutral"
            right = ((verdict == "strong_pillar") & (part.delta_true < 0)) | (
                (verdict == "strong_stumbling_block") & (part.delta_true > 0)
            )
            row: dict[str, Any] = {
                "size": size, "arm": arm, "rule": rule,
                "cells": int(part.cells.median()), "tokens": round(float(part.tokens.mean())),
            }  # fmt: skip
            effects = part[~part.candidate.isin(null)]
            for name, chosen in _CLASSES:
                inside = chosen(effects.assign(delta=effects.delta_true))
                row[f"found {name}"] = float(right[effects.index][inside].mean())
            no_effect = part.candidate.isin(null)
            row["called without effect"] = float(called[no_effect].mean())
            wrong = (called & (no_effect | ~right)).groupby(part.sweep).sum()
            total = called.groupby(part.sweep).sum()
            row["false discovery rate"] = float((wrong / total.clip(lower=1)).mean())
            inside = (part.ci_low <= part.delta_true) & (part.delta_true <= part.ci_high)
            row["coverage"] = float(inside.mean())
            row["coverage with effect"] = float(inside[~no_effect].mean())
            same = part.evidence == "equivalent"
            row["called equivalent"] = float(same.mean())
            row["equivalent in error"] = float(same[part.delta_true.abs() >= MARGIN].mean())
            rows.append(row)
    return pd.DataFrame(rows)


def _racing(raced: pd.DataFrame, truth: pd.DataFrame) -> pd.DataFrame:
    judged = raced.merge(truth[["candidate", "role", "delta"]], on="candidate")
    rows = []
    for size, part in judged.groupby("size", sort=False):
        effect = ~part.role.isin(_NEUTRAL)
        right = ((part.status == "pillar") & (part.delta < 0)) | (
            (part.status == "stumbling_block") & (part.delta > 0)
        )
        claimed = part.status.isin(("pillar", "stumbling_block"))
        once = part.groupby("sweep").first()
        rows.append(
            {
                "size": size,
                "tokens": float(once.tokens.mean() / once.tokens_fixed.mean()),
                "found |Δ| ≥ .05": float(right[effect & (part.delta.abs() >= 0.05)].mean()),
                "found .015 ≤ |Δ| < .05": float(
                    right[effect & part.delta.abs().between(0.015, 0.05)].mean()
                ),
                "claimed without effect": float(claimed[~effect].mean()),
                "equivalent": float((part.status == "equivalent").mean()),
                "equivalent in error": float(
                    (part.status == "equivalent")[part.delta.abs() >= MARGIN].mean()
                ),
                "futile": float((part.status == "futile").mean()),
            }
        )
    return pd.DataFrame(rows)


def _confirm(again: pd.DataFrame, truth: pd.DataFrame) -> pd.DataFrame:
    judged = again.merge(truth[["candidate", "delta"]], on="candidate")
    rows = []
    for (size, rule), part in judged.groupby(["size", "rule"], sort=False):
        sign = np.sign(part["first"])
        first = float(part["first"].abs().sum())
        rows.append(
            {
                "size": size, "rule": rule, "called": len(part),
                "confirmed": float(part.confirmed.mean()),
                "fresh over first": float((part.fresh * sign).sum()) / first,
                "true over first": float((part.delta * sign).sum()) / first,
                "true over fresh": float((part.delta * sign).sum() / (part.fresh * sign).sum()),
            }
        )  # fmt: skip
    return pd.DataFrame(rows)


def _markdown(table: pd.DataFrame) -> str:
    def cell(value: Any) -> str:
        if isinstance(value, float):
            return "–" if math.isnan(value) else f"{value:.4g}"
        return str(value)

    lines = ["| " + " | ".join(map(str, table.columns)) + " |", "|" + " --- |" * table.shape[1]]
    lines += ["| " + " | ".join(map(cell, row)) + " |" for row in table.itertuples(index=False)]
    return "\n".join(lines)


def _figure(each: pd.DataFrame) -> str:
    """Share of sweeps that find a candidate by its true effect, one panel a size."""
    sizes = list(each["size"].unique())
    wide, high, left, top = 250, 190, 60, 56
    parts = []
    for panel, size in enumerate(sizes):
        x0 = left + panel * (wide + 26)
        parts.append(
            f'<text x="{x0 + wide / 2}" y="{top - 12}" text-anchor="middle" font-weight="600">'
            f"{size}</text>"
        )
        for share in (0, 0.5, 1):
            y = top + high * (1 - share)
            parts.append(f'<path d="M{x0} {y}h{wide}" stroke="#ddd"/>')
            if not panel:
                parts.append(f'<text x="{x0 - 8}" y="{y + 4}" text-anchor="end">{share:g}</text>')
        for effect in (0.003, 0.01, 0.03, 0.1):
            x = x0 + _along(effect) * wide
            label = f"{effect:g}".lstrip("0")
            parts.append(
                f'<path d="M{x:.1f} {top + high}v4" stroke="#888"/>'
                f'<text x="{x:.1f}" y="{top + high + 18}" text-anchor="middle">{label}</text>'
            )
        for arm, colour in (("published", "#d97706"), ("ours", "#1d4ed8")):
            part = each[(each["size"] == size) & (each.arm == arm)]
            for row in part.itertuples():
                rule = _rule(arm)
                towards = "pillar" if row.delta_true < 0 else "block"
                share = getattr(row, f"{towards}_{rule}")
                hollow = row.role in _NEUTRAL
                if hollow:
                    share = getattr(row, f"pillar_{rule}") + getattr(row, f"block_{rule}")
                x = x0 + _along(max(abs(row.delta_true), 0.001)) * wide
                y = top + high * (1 - share)
                fill = "none" if hollow else colour
                parts.append(
                    f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.6" fill="{fill}" stroke="{colour}" '
                    f'stroke-width="1.2"><title>{row.candidate}: true Δ {row.delta_true:+.4f}, '
                    f"{share:.2f}</title></circle>"
                )
    width = left + len(sizes) * (wide + 26)
    key = top + high + 46
    legend = (
        f'<circle cx="{left}" cy="{key}" r="4" fill="#1d4ed8"/>'
        f'<text x="{left + 10}" y="{key + 4}">knockout (forks, rule fdr)</text>'
        f'<circle cx="{left + 220}" cy="{key}" r="4" fill="#d97706"/>'
        f'<text x="{left + 230}" y="{key + 4}">published protocol (independent full re-runs, '
        "nominal rule), same generated tokens</text>"
        f'<circle cx="{left + 800}" cy="{key}" r="4" fill="none" stroke="#444"/>'
        f'<text x="{left + 810}" y="{key + 4}">no effect by construction</text>'
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {key + 20}" '
        f'font-family="system-ui, sans-serif" font-size="12" fill="#222">'
        f'<rect width="{width}" height="{key + 20}" fill="#fff"/>'
        f'<text x="{left}" y="20" font-size="14" font-weight="600">Share of sweeps that call a '
        f"token, by the size of its true |Δ| (problems × seeds above each panel)</text>"
        + "".join(parts)
        + legend
        + "</svg>\n"
    )


def _along(effect: float) -> float:
    """Place of an effect on the logarithmic axis from .001 to .3."""
    return min(1.0, math.log(effect / 0.001) / math.log(300))
