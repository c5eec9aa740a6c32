"""How often a score "predicts" harm on noise alone, when all candidates share one baseline.

    python -m bench orthogonality [RUNS]

Published token frequencies, 500 problems × 3 seeds; a ban that forks redraws the grade, so nothing
does anything. Every candidate is compared with the same baseline grades, as in a run.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.stats import norm

from bench.machine import DATA, write
from knockout.mining.orthogonality import auc, harm, kendall, spearman
from knockout.mining.shared_noise import noise_factors

__all__ = ["frequencies", "main", "null_run"]

PROBLEMS, SEEDS = 500, 3
_LISTED = DATA / "rock_vs_control_qwen3_4b.csv"


def frequencies(listed: str) -> NDArray[np.float64]:
    """Published occurrences in 500 outputs: of the 100 "rocks", or of "both" those and controls."""
    published = pd.read_csv(_LISTED)
    rocks = published["rock_freq"].to_numpy(dtype=float)
    if listed == "rocks":
        return rocks
    return np.r_[rocks, published["ctrl_freq"]].astype(float)


def null_run(rng: np.random.Generator, frequency: NDArray[np.float64]) -> NDArray[np.float64]:
    """One run in which no ban does anything: (C, P) differences of the problems' means."""
    chance = 1 - np.exp(-frequency / PROBLEMS)  # of a fork
    solves = rng.beta(0.5, 0.5, PROBLEMS)[:, None]
    baseline = rng.random((PROBLEMS, SEEDS)) < solves
    shape = (len(chance), PROBLEMS, SEEDS)
    forked = rng.random(shape, dtype=np.float32) < chance[:, None, None]
    again = rng.random(shape, dtype=np.float32) < solves
    moves = (np.where(forked, again, baseline).astype(int) - baseline).mean(axis=2)
    return np.asarray(moves, dtype=np.float64)


def rows_of(moves: NDArray[np.float64]) -> pd.DataFrame:
    """Δ and p-value of each candidate, (C, P) differences given."""
    error = np.sqrt(np.square(moves).sum(axis=1))
    z = np.divide(moves.sum(axis=1), error, out=np.zeros(len(moves)), where=error > 0)
    return pd.DataFrame({"delta": moves.mean(axis=1), "p_value": 2 * norm.sf(np.abs(z))})


def main(runs: str = "400") -> None:
    """Measures and writes bench/results/orthogonality.json."""
    found = {}
    for listed in ("rocks", "both"):
        frequency, rng = frequencies(listed), np.random.default_rng(3)
        hits: dict[str, list[bool]] = {}
        for _ in range(int(runs)):
            moves = null_run(rng, frequency)
            hurt = harm(rows_of(moves))
            n_pillars = len(moves) // 20
            pillars = np.zeros(len(moves), dtype=bool)
            pillars[np.argsort(hurt)[-n_pillars:]] = True
            factor, of_area = noise_factors(frequency, list(moves), n_pillars, draws=500)
            for name, estimate in (
                ("spearman, independent", spearman(frequency, hurt)),
                ("spearman", spearman(frequency, hurt, factor=factor)),
                ("kendall", kendall(frequency, hurt, factor=factor)),
                ("area, independent", auc(frequency, pillars)),
                ("area", auc(frequency, pillars, factor=of_area)),
            ):
                hits.setdefault(name, []).append(estimate.p_value < 0.05)
        found[listed] = {name: float(np.mean(values)) for name, values in hits.items()}
        print(listed, found[listed])
    write("orthogonality", {"command": f"python -m bench orthogonality {runs}", "runs": int(runs),
                            "share of runs with p < .05": found})  # fmt: skip
