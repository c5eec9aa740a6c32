"""The ledger at 2 million trajectories: how fast it is written, asked and resumed, and how large.

10,000 cells of 200 candidates, half of whose knockouts are forks; the others are inherited and have
no row. Trajectories draw their ids by a Zipf law and repeat phrases of their own, so that they
compress about as text does: at 768 and 3,072 tokens to 1.18 and 1.14 bytes a token, where solutions
of MATH-500, their ids spread over a vocabulary as large, take 1.24 and 1.06. Rows are committed as
the scheduler does, 256 at a time.

Rates are by the clock, and beside it by the processor time of the writing thread, which other
programs on the machine change less.

    python -m bench ledger_scale [--cells 10000] [--tokens 128]
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.machine import write
from knockout.ledger import (
    INHERITED,
    BenchmarkRow,
    CellKey,
    CellRow,
    ForkRow,
    Ledger,
    ProblemRow,
    totals,
)
from knockout.method.interventions import ban
from knockout.method.sampling import Sampling
from knockout.sweep.owed import Plan, PlannedBenchmark, PlannedProblem, owed
from knockout.tokens.candidates import Candidate

N_CANDIDATES, N_SEEDS = 200, 8
ROWS = 256
"""Rows of one transaction, as in the scheduler."""
LENGTHS = (128, 1024, 4096)
"""Lengths of trajectories, in tokens, whose size and rate are measured apart."""
CELLS = 64
"""Cells of each of those."""
VOCABULARY = 150_000
REPEATED, PHRASE = 0.3, 3
"""How often a phrase comes again, and its mean length in tokens."""


def a_plan(n_cells: int) -> Plan:
    """Problems of eight seeds each."""
    problems = tuple(
        PlannedProblem(str(i), (1, 2, 3), (), 16384) for i in range(max(1, n_cells // N_SEEDS))
    )
    return Plan(
        run_seed=0,
        benchmarks=(PlannedBenchmark("b", N_SEEDS, Sampling(0.6, 0.95, 20, 0.0), problems),),
        candidates=tuple(Candidate(f"t{i}", ban((i,)), (f'"t{i}"',)) for i in range(N_CANDIDATES)),
    )


def tokens_of(rng: np.random.Generator, length: int) -> NDArray[np.int32]:
    """Ids of a trajectory (length,): new tokens, and phrases that occurred before."""
    fresh = iter(rng.zipf(1.1, 8 * length).tolist())
    ids: list[int] = []
    while len(ids) < length:
        if ids and rng.random() < REPEATED:
            at = int(rng.integers(len(ids)))
            ids += ids[at : at + int(rng.geometric(1 / PHRASE))]
        else:
            ids.append(next(token for token in fresh if token < VOCABULARY))
    return np.array(ids[:length], dtype=np.int32)


def fill(plan: Plan, path: Path, length: int, leave: int = 0) -> dict[str, Any]:
    """Writes the ledger; the last `leave` forks stay owed. Returns counts and seconds."""
    rng = np.random.default_rng(0)
    pool = [tokens_of(rng, length) for _ in range(512)]
    rows = [BenchmarkRow(b.name, "exact_match", b.n_seeds, "f") for b in plan.benchmarks]
    problems = [
        ProblemRow(0, i, p.doc_id, "?", np.array(p.prompt, dtype=np.int32))
        for i, p in enumerate(plan.benchmarks[0].problems)
    ]
    n_cells = n_forks = 0
    seconds = busy = 0.0
    with Ledger.create(path, {}, plan.candidates, rows, problems) as ledger:
        cells: list[CellRow] = []
        forks: list[ForkRow] = []

        def commit() -> None:
            nonlocal n_cells, n_forks, seconds, busy
            n_cells, n_forks = n_cells + len(cells), n_forks + len(forks)
            began, worked = time.perf_counter(), time.thread_time()
            ledger.commit(cells, forks)
            seconds += time.perf_counter() - began
            busy += time.thread_time() - worked
            cells.clear()
            forks.clear()

        last = CellKey(0, len(problems) - 1, N_SEEDS - 1)
        for p in range(len(problems)):
            for s in range(N_SEEDS):
                key = CellKey(0, p, s)
                step = int(rng.integers(0, length // 2))
                steps = np.where(rng.random(N_CANDIDATES) < 0.5, step, INHERITED).astype(np.int32)
                own = pool[int(rng.integers(512))]
                cells.append(CellRow(key, plan.seed(key), own, "stop", 1, "ok", "42", None, steps))
                for c in np.flatnonzero(steps >= 0).tolist()[leave if key == last else 0 :]:
                    tail = pool[(c + p) % 512][step:]
                    forks.append(ForkRow(key, c, step, tail, "stop", c % 2, "ok", "41", None))
                    if len(cells) + len(forks) >= ROWS:
                        commit()
        commit()
        total = n_cells * (1 + N_CANDIDATES)
    size = path.stat().st_size
    return {
        "trajectories": total,
        "cells": n_cells,
        "forks": n_forks,
        "mean_tokens_of_a_fork_after_its_prefix": round(length * 0.75),
        "seconds_in_commits": round(seconds, 2),
        "rows_per_s": round((n_cells + n_forks) / seconds),
        "results_per_s": round(total / seconds),
        "rows_per_cpu_s": round((n_cells + n_forks) / busy),
        "results_per_cpu_s": round(total / busy),
        "file_mib": round(size / 2**20, 1),
        "bytes_per_trajectory": round(size / total, 1),
        "bytes_per_row": round(size / (n_cells + n_forks), 1),
    }


def main(*arguments: str) -> None:
    """Writes a ledger of the full size, asks it, and smaller ones of longer trajectories."""
    parser = argparse.ArgumentParser(prog="python -m bench ledger_scale")
    parser.add_argument("--cells", type=int, default=10_000)
    parser.add_argument("--tokens", type=int, default=LENGTHS[0])
    given = parser.parse_args(arguments)
    plan = a_plan(given.cells)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.db"
        found: dict[str, Any] = {
            "tokens": given.tokens, **fill(plan, path, given.tokens, leave=3)
        }  # fmt: skip
        print(found, flush=True)
        began = time.perf_counter()
        with Ledger.open(path) as ledger:
            state = totals(ledger)
        found["status_s"] = round(time.perf_counter() - began, 3)
        assert state.owed_forks == 3
        began = time.perf_counter()
        with Ledger.open(path, write=True) as ledger:
            left = list(owed(plan, ledger, plan.everything()))
            found["resume_scan_s"] = round(time.perf_counter() - began, 2)
            assert [len(item.forks) for item in left] == [3]
            began = time.perf_counter()
            ledger.check()
            found["integrity_check_s"] = round(time.perf_counter() - began, 2)
    found["by_length"] = []
    for length in LENGTHS:
        with tempfile.TemporaryDirectory() as folder:
            small = fill(a_plan(CELLS), Path(folder) / "run.db", length)
        keys = (
            "forks", "rows_per_s", "results_per_s", "rows_per_cpu_s", "results_per_cpu_s",
            "bytes_per_trajectory", "bytes_per_row",
        )  # fmt: skip
        found["by_length"].append({"tokens": length, **{key: small[key] for key in keys}})
    write("ledger_scale", found)


if __name__ == "__main__":
    import sys

    main(*sys.argv[1:])
