"""Two studies on a finished run: how much coupling narrows differences, and the cost model's error.

python -m bench from_run RUN_DIRECTORY
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from bench.machine import write
from knockout.ledger import CellKey, Ledger, grade_cubes
from knockout.sweep.cost import cost_from_frequency, cost_from_trajectories, rates_of


def main(directory: str) -> None:
    """Writes bench/results/variance.json and bench/results/cost_model.json."""
    with Ledger.open(Path(directory) / "run.db") as ledger:
        write("variance", variance(ledger))
        write("cost_model", cost_model(ledger))


def variance(ledger: Ledger) -> dict[str, Any]:
    """Variance of a cell's difference with coupled and with independent seeds.

    Coupled: knockout and baseline of the same cell. Independent: knockout of one seed, baseline
    of another, on the same problem; every ordered pair of seeds is used. Both estimate the same Δ.
    Their ratio is how many more independent seeds give the same interval width for the sampling
    noise part (problems fixed).
    """
    rows = []
    for cube in grade_cubes(ledger):
        if cube.baseline.shape[1] < 2:
            raise SystemExit("this study needs a run with at least two seeds")
        base = np.where(cube.baseline >= 0, cube.baseline, np.nan).astype(float)
        for c, candidate in enumerate(cube.candidates):
            knock = np.where(cube.knockout[c] >= 0, cube.knockout[c], np.nan).astype(float)
            coupled = _between_seeds(knock - base)
            independent = _between_seeds(knock) + _between_seeds(base)
            n = base.shape[1]
            pairs = [knock[:, i] - base[:, j] for i in range(n) for j in range(n) if i != j]
            rows.append(
                {
                    "benchmark": cube.benchmark,
                    "candidate": candidate.name,
                    "share_forked": round(float(cube.forked[c].mean()), 3),
                    "differing_coupled": round(float(np.nanmean(knock != base)), 4),
                    "differing_independent": round(float(np.nanmean(np.abs(np.array(pairs)))), 4),
                    "variance_coupled": round(coupled, 5),
                    "variance_independent": round(independent, 5),
                }
            )
    both = [r for r in rows if r["variance_independent"] > 0]
    ratios = [r["variance_coupled"] / r["variance_independent"] for r in both]
    cells = [
        r["differing_coupled"] / r["differing_independent"]
        for r in rows
        if r["differing_independent"]
    ]
    return {
        "median_variance_ratio": round(float(np.median(ratios)), 3) if ratios else None,
        "median_differing_ratio": round(float(np.median(cells)), 3) if cells else None,
        "meaning": "seeds needed with coupling, per seed needed without, for one interval width",
        "rows": rows,
    }


def _between_seeds(values: np.ndarray) -> float:
    """Mean over problems of the variance between seeds, of (P, S)."""
    return float(np.nanmean(np.nanvar(values, axis=1, ddof=1)))


def cost_model(ledger: Ledger) -> dict[str, Any]:
    """Predicted against counted forks and generated tokens, per benchmark and candidate."""
    keys, steps = ledger.decided()
    rows, totals = [], {}
    for b, cube in enumerate(grade_cubes(ledger)):
        bans = [c.token_ids for c in cube.candidates]
        mine = [i for i, key in enumerate(keys) if key.benchmark == b]
        truth_forks = np.zeros(len(bans))
        truth_tokens = np.zeros(len(bans))
        moves = np.zeros(len(bans))
        by_seed: dict[int, list[np.ndarray]] = {}
        lengths: dict[tuple[CellKey, int], int] = {}
        for row in ledger.query(
            "SELECT problem, seed, candidate, n_tokens FROM fork WHERE benchmark = ?", (b,)
        ):
            lengths[CellKey(b, row[0], row[1]), row[2]] = row[3]
        for i in mine:
            tokens = ledger.trajectory(keys[i])
            by_seed.setdefault(keys[i].seed, []).append(tokens)
            for c in np.flatnonzero(steps[i] >= 0):
                truth_forks[c] += 1
                truth_tokens[c] += lengths[keys[i], int(c)] - steps[i][c]
                moves[c] += tokens[steps[i][c]] not in bans[c]
        all_tokens = [t for group in by_seed.values() for t in group]
        own = cost_from_trajectories(all_tokens, bans, truncates=False)
        seeds = sorted(by_seed)
        other = cost_from_trajectories(by_seed[seeds[0]], bans, truncates=False)
        uniform = cost_from_frequency(rates_of(all_tokens, bans), own.length)
        n = len(all_tokens)
        occurrences = rates_of(all_tokens, bans) * n
        totals[cube.benchmark] = {
            "cells": n,
            "forks": int(truth_forks.sum()),
            "forks_by_moved_support": int(moves.sum()),
            "moved_support_per_occurrence": round(float(moves.sum() / occurrences.sum()), 4),
            "generated_tokens_of_forks": int(truth_tokens.sum()),
            "predicted_from_own_baselines": round(float(own.tokens.sum() * n)),
            "predicted_from_first_seed": round(float(other.tokens.sum() * n)),
            "predicted_from_frequencies": round(float(uniform.tokens.sum() * n)),
        }
        rows += [
            {
                "benchmark": cube.benchmark,
                "candidate": candidate.name,
                "per_trajectory": round(float(occurrences[c] / n), 3),
                "forks": int(truth_forks[c]),
                "forks_by_moved_support": int(moves[c]),
                "predicted_forks": round(float(own.forks[c] * n), 1),
                "tokens": int(truth_tokens[c]),
                "predicted_tokens": round(float(own.tokens[c] * n)),
            }
            for c, candidate in enumerate(cube.candidates)
        ]
    return {"benchmarks": totals, "rows": rows}
