"""The table of the arms: what came out, and how sure it is."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

Results = dict[str, list[dict[str, Any]]]


def report(
    args: argparse.Namespace,
    out: Path,
    results: Results,
    *,
    frozen: Sequence[int],
    decided: Sequence[int],
    pillars: Sequence[int],
) -> None:
    """Writes report.json and report.md: a row per arm.

    Arms share prompts, rollout seeds and training seeds, so an arm's difference from `all` is taken
    prompt by prompt, and its 95 % interval (Student's t over prompts) says how it would move with
    other prompts. How it would move with other training runs shows in the column of their range.
    """
    lines = [
        "| arm | runs | held-out KL (nats) | range over runs | minus `all` [95 %] | frozen | s a "
        "step | arithmetic | instructions |",
        "| --- " + "| ---: " * 8 + "|",
    ]
    table = [row(name, runs, results["all"]) for name, runs in results.items()]
    lines += ["| " + " | ".join(shown(r)) + " |" for r in table]
    settings = {
        k: str(v) if isinstance(v, Path) else v
        for k, v in vars(args).items()
        if k not in {"out", "prompts"}
    }
    lists = {"frozen": list(frozen), "decided": list(decided), "pillars": list(pillars)}
    stages = json.loads((out / "stages.json").read_text(encoding="utf-8"))
    whole = {"settings": settings, **lists, "seconds": stages, "table": table, "results": results}
    (out / "report.json").write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    told = f"{len(frozen)} of {args.rocks} rocks frozen, " + (
        "none of them a pillar or undetermined"
        if decided
        else "all of them undetermined, as the sweep decided on none"
    )
    if "freeze" in results:
        mean, half = difference(results["freeze"], results["random"])
        told += f"; `freeze` minus `random` {mean:+.3f} [{mean - half:+.3f}, {mean + half:+.3f}]"
    told += f"; {len(pillars)} pillars kept. Wall time {sum(stages.values()) / 60:.0f} minutes."
    text = "\n".join([*lines, "", told, "", f"Settings: `{json.dumps(settings)}`"])
    (out / "report.md").write_text(text + "\n", encoding="utf-8")


def row(name: str, runs: list[dict[str, Any]], reference: list[dict[str, Any]]) -> dict[str, Any]:
    """One arm's numbers; its differences from the arm `reference`."""
    kl = np.array([run["held_out_kl"] for run in runs])  # (runs, seeds, prompts)
    found: dict[str, Any] = {
        "arm": name,
        "runs": len(runs),
        "kl": float(kl.mean()),
        "kl_of_runs": kl.mean(axis=(1, 2)).round(4).tolist(),
        "pass1": {t: float(np.mean([r["pass1"][t] for r in runs])) for t in runs[0]["pass1"]},
    }
    if all("train_s" in run for run in runs):
        history = [run["history"] for run in runs]
        found["frozen_share"] = float(np.mean([h["frozen_share"] for h in history]))
        found["s_a_step"] = float(
            np.mean([r["train_s"] / len(r["history"]["frozen_share"]) for r in runs])
        )
    if runs is not reference:
        found["minus_all"] = difference(runs, reference)
    return found


def difference(runs: list[dict[str, Any]], others: list[dict[str, Any]]) -> list[float]:
    """Mean difference in held-out KL over prompts, and half the width of its 95 % interval."""
    kl, other = (
        np.array([run["held_out_kl"] for run in arm]).mean(axis=(0, 1)) for arm in (runs, others)
    )
    half = stats.sem(kl - other) * stats.t.ppf(0.975, len(kl) - 1)
    return [float((kl - other).mean()), float(half)]


def shown(row: dict[str, Any]) -> list[str]:
    """A row's cells in the report's table."""
    runs = row["kl_of_runs"]
    mean, half = row.get("minus_all", (None, None))
    return [
        row["arm"],
        str(row["runs"]),
        f"{row['kl']:.3f}",
        f"{min(runs):.3f} to {max(runs):.3f}" if len(runs) > 1 else "",
        "" if mean is None else f"{mean:+.3f} [{mean - half:+.3f}, {mean + half:+.3f}]",
        f"{row['frozen_share']:.0%}" if "frozen_share" in row else "",
        f"{row['s_a_step']:.1f}" if "s_a_step" in row else "",
        *(f"{value:.3f}" for value in row["pass1"].values()),
    ]
