"""`python -m bench truth`: the planted model's true effects, and the system judged against them.

    python -m bench truth                    # everything; an hour and a quarter on two cores
    python -m bench truth sample             # the true effects -> truth.csv
    python -m bench truth trial              # sweeps against them -> report.md, *.csv, figure.svg

Sampled cells are kept in runs/known-truth, so the same command goes on where it stopped; verdicts are
made anew by today's code.
"""

from __future__ import annotations

import argparse
import json
import math
import zlib
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from bench.planted.decode import Cells
from bench.planted.report import write_report
from bench.planted.sample import Job, candidate_sets, run
from bench.planted.trial import Size, Table, judge, seeds_compared
from knockout.planted import MODEL_FOLDER
from knockout.planted.language import Language, load_language

__all__ = ["main"]

RESULTS = Path("results/known-truth")
WORK = Path("runs/known-truth")
ERROR = 0.002
"""Standard error of the truth; a candidate above it gets more cells."""


def main(*arguments: str) -> None:
    """Runs the named stage, or all."""
    parser = argparse.ArgumentParser(prog="python -m bench truth", description=__doc__)
    parser.add_argument("stage", nargs="?", choices=("all", "sample", "trial"), default="all")
    parser.add_argument("--model", type=Path, default=MODEL_FOLDER)
    parser.add_argument("--work", type=Path, default=WORK)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--truth", type=int, default=24_000, help="problems of the truth")
    parser.add_argument("--alone", type=int, default=6_000)
    parser.add_argument("--wide", type=int, default=50_000, help="problems × 3 seeds")
    parser.add_argument("--deep", type=int, default=3_000, help="problems × 16 seeds; 0: none")
    parser.add_argument("--kinds", nargs="*", help="sweeps, confirmations, pairs, races")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--sweeps", type=int, default=100, help="of each size")
    given = parser.parse_args(arguments)
    given.out.mkdir(parents=True, exist_ok=True)
    if given.stage in ("all", "sample"):
        _truth(given)
    if given.stage in ("all", "trial"):
        _trial(given)


def _truth(given: argparse.Namespace) -> None:
    language = load_language(given.model / "language.json")
    sets = candidate_sets(language)
    cells = run(Job("truth", given.model, seed=1001, n=given.truth), given.work, given.processes)
    differences = {
        name: cells.knockout[i].astype(float) - cells.baseline for i, name in enumerate(sets)
    }
    _sharpen(differences, given)
    table = _effects(cells, language, differences)
    checks = []
    roles = language.roles()
    # Measured a second time, every trajectory from its first token.
    for name in (roles["marker"][0], roles["guess"][0], " + ".join(roles["finisher"][:2])):
        index = list(sets).index(name)
        slug = name.replace(" + ", "-")
        job = Job(f"alone-{slug}", given.model, seed=2001, n=given.alone, only=name)
        banned = run(job, given.work, given.processes).baseline.astype(float)
        delta = float(banned.mean() - cells.baseline.mean())
        row = table.iloc[index]
        error = math.hypot(
            float(banned.std(ddof=1)) / math.sqrt(len(banned)),
            float(cells.knockout[index].std(ddof=1)) / math.sqrt(given.truth),
        )
        checks.append(
            {
                "candidate": name,
                "delta": round(delta, 5),
                "truth": float(row["delta"]),
                "z": round((delta - float(row["delta"])) / error, 2),
            }
        )
    table.to_csv(given.out / "truth.csv", index=False)
    facts = {
        "cells": given.truth,
        "pass1": round(float(cells.baseline.mean()), 5),
        "tokens_a_trajectory": round(float(cells.baseline_tokens.mean()), 2),
        "largest_se": float(table["se"].max()),
        "alone": checks,
    }
    (given.out / "truth.json").write_text(json.dumps(facts, indent=1) + "\n", "utf-8")
    print(json.dumps(facts, indent=1))


def _sharpen(differences: dict[str, NDArray[np.float64]], given: argparse.Namespace) -> None:
    """Adds cells of further problems for the candidates that are not known well enough."""
    errors = {name: d.std(ddof=1) / math.sqrt(len(d)) for name, d in differences.items()}
    wanting = tuple(name for name, error in errors.items() if error > ERROR)
    if not wanting:
        return
    short = (max(errors[name] for name in wanting) / (0.97 * ERROR)) ** 2 - 1
    n = 600 * math.ceil(given.truth * short / 600)
    slug = f"more-{given.truth}-{zlib.crc32(' '.join(wanting).encode()):08x}"
    job = Job(slug, given.model, seed=1002, n=n, names=wanting)
    more = run(job, given.work, given.processes)
    for i, name in enumerate(wanting):
        own = more.knockout[i].astype(float) - more.baseline
        differences[name] = np.concatenate([differences[name], own])


def _effects(
    cells: Cells, language: Language, differences: dict[str, NDArray[np.float64]]
) -> pd.DataFrame:
    """Δ of every candidate; the standard error takes cells, each of its own problem, as units."""
    roles = {word: role for role, words in language.roles().items() for word in words}
    rows = []
    for i, (name, words) in enumerate(candidate_sets(language).items()):
        d = differences[name]
        rows.append(
            {
                "candidate": name,
                "role": roles.get(name, "pair" if " + " in name else "list"),
                "words": " ".join(words),
                "cells": len(d),
                "delta": round(float(d.mean()), 5),
                "se": round(float(d.std(ddof=1)) / math.sqrt(len(d)), 5),
                "share_of_trajectories": round(float(cells.forked[i].mean()), 5),
                "helped": round(float((d > 0).mean()), 5),
                "hurt": round(float((d < 0).mean()), 5),
            }
        )
    return pd.DataFrame(rows)


def _trial(given: argparse.Namespace) -> None:
    sets = candidate_sets(load_language(given.model / "language.json"))
    truth = pd.read_csv(given.out / "truth.csv")
    wide_job = Job("wide", given.model, seed=11, n=given.wide, repeats=3, coupled=True)
    wide = Table(run(wide_job, given.work, given.processes), 3, sets)
    tables = [(wide, [Size(100, 3), Size(500, 1), Size(500, 3)])]
    if given.deep:
        deep_job = Job("deep", given.model, seed=12, n=given.deep, repeats=16, coupled=True)
        tables.insert(
            0, (Table(run(deep_job, given.work, given.processes), 16, sets), [Size(30, 16)])
        )

    def judged(kind: str, chosen: dict[int, list[Size]]) -> pd.DataFrame:
        parts = [
            judge(kind, table, chosen[table.shape[1]], given.sweeps, given.processes)
            for table, _ in tables
            if chosen.get(table.shape[1])
        ]
        return pd.concat(parts, ignore_index=True)

    plans = {
        "sweeps": {table.shape[1]: sizes for table, sizes in tables},
        "confirmations": {3: [Size(500, 1)], 16: [Size(30, 8)]},
        "pairs": {3: [Size(500, 1)]},
        "races": {3: [Size(500, 3)], 16: [Size(30, 16)]},
    }
    kinds = given.kinds or list(plans)
    records = {kind: judged(kind, plans[kind]) for kind in kinds}
    write_report(given.out, truth, records, seeds_compared(wide))
