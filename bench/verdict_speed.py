"""How long a large ledger takes: to the verdict table, to `status`, and to what a resume owes.

A synthetic run of 200 candidates, 1,131 problems in five benchmarks and 16 seeds, of whose 3.6
million knockouts 2 million are forks, is written through the ledger itself. Each reading is done
in a process of its own, so that peak memory is its own too.

    python -m bench verdict_speed [--problems 1131] [--folder DIR]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from bench.machine import write
from knockout.config.sweep import Sweep, VerdictRule
from knockout.ledger import INHERITED, BenchmarkRow, CellKey, CellRow, ForkRow, Ledger, ProblemRow
from knockout.method.interventions import ban
from knockout.method.sampling import Sampling
from knockout.sweep.owed import Plan, PlannedBenchmark, PlannedProblem, owed
from knockout.tokens.candidates import Candidate

SIZES = {"math500": 500, "aime24": 30, "aime25": 30, "hmmt25": 30, "ifeval": 541}
N_CANDIDATES, N_SEEDS = 200, 16
SHARE = 0.55
"""Share of knockouts that fork: 2 million of 3.6 million."""


def a_plan(scale: float, n_seeds: int = N_SEEDS) -> Plan:
    """The run's plan; `scale` makes every benchmark smaller."""
    sampling = Sampling(0.6, 0.95, 20, 0.0)
    return Plan(
        run_seed=0,
        benchmarks=tuple(
            PlannedBenchmark(
                name,
                n_seeds,
                sampling,
                tuple(
                    PlannedProblem(str(i), (1, 2, 3), (), 100)
                    for i in range(max(2, round(n * scale)))
                ),
            )
            for name, n in SIZES.items()
        ),
        candidates=tuple(Candidate(f"t{i}", ban((i,)), (f'"t{i}"',)) for i in range(N_CANDIDATES)),
        audit=0.02,
    )


def write_ledger(plan: Plan, folder: Path, seed: int = 0) -> int:
    """Writes the ledger; returns the number of forks."""
    rng = np.random.default_rng(seed)
    identity = {"identity": json.dumps({"adaptive": None})}
    rows = [BenchmarkRow(b.name, "exact_match", b.n_seeds, "f") for b in plan.benchmarks]
    problems = [
        ProblemRow(b, i, problem.doc_id, "?", np.array(problem.prompt, dtype=np.int32))
        for b, benchmark in enumerate(plan.benchmarks)
        for i, problem in enumerate(benchmark.problems)
    ]
    n = 0
    shares = rng.beta(1, 1 / SHARE - 1, N_CANDIDATES)
    with Ledger.create(folder / "run.db", identity, plan.candidates, rows, problems) as ledger:
        for b, benchmark in enumerate(plan.benchmarks):
            ability = rng.random(len(benchmark.problems))
            for p in range(len(benchmark.problems)):
                cells, forks = [], []
                for s in range(benchmark.n_seeds):
                    key = CellKey(b, p, s)
                    tokens = rng.integers(0, 30000, rng.integers(20, 40)).astype(np.int32)
                    forked = rng.random(N_CANDIDATES) < shares
                    steps = np.where(forked, 7, INHERITED).astype(np.int32)
                    right = rng.random(N_CANDIDATES + 1) < ability[p]
                    cells.append(
                        CellRow(key, plan.seed(key), tokens, "stop", int(right[-1]), "ok", "x", None, steps)
                    )  # fmt: skip
                    forks += [
                        ForkRow(key, c, 7, tokens[7:], "stop", int(right[c]), "ok", "x", None)
                        for c in np.flatnonzero(forked).tolist()
                    ]
                ledger.commit(cells, forks)
                n += len(forks)
    return n


def to_verdicts(folder: Path, plan: Plan, raced: bool = False) -> None:
    """From the file to the written verdict table."""
    from knockout.sweep.results import verdict_table
    from knockout.verdicts.files import write_verdicts

    with Ledger.open(folder / "run.db") as ledger:
        frame = verdict_table(ledger, VerdictRule())
    assert len(frame) == N_CANDIDATES * (len(SIZES) + 1)
    write_verdicts(frame, folder / "verdicts.csv", folder / "verdicts.json")


def to_raced_verdicts(folder: Path, plan: Plan) -> None:
    """The same by racing's tests, as if nothing had settled before the last round."""
    from knockout.ledger import grade_cubes
    from knockout.verdicts.blocks import Race
    from knockout.verdicts.table import build_verdicts

    with Ledger.open(folder / "run.db") as ledger:
        rounds = {benchmark.name: N_SEEDS for benchmark in ledger.benchmarks}
        race = Race(VerdictRule(), rounds, rounds)
        build_verdicts(grade_cubes(ledger), VerdictRule(), race=race)


def to_status(folder: Path, plan: Plan) -> None:
    """What `knockout status` counts."""
    from knockout.sweep.summary import summarise

    sweep = Sweep.model_validate(
        {"model": "m", "benchmarks": list(SIZES), "candidates": {"ids": [1]}}
    )
    with Ledger.open(folder / "run.db") as ledger:
        assert summarise(ledger, sweep)["complete"]


def to_owed(folder: Path, plan: Plan) -> None:
    """Opening for a resume and looking for what is left: the audits, here."""
    with Ledger.open(folder / "run.db", write=True) as ledger:
        list(owed(plan, ledger, plan.everything()))


def measure(read: Callable[[Path, Plan], None], folder: Path, plan: Plan) -> dict[str, float]:
    """Wall time, processor time and peak memory of one reading."""
    receive, send = multiprocessing.get_context("fork").Pipe(duplex=False)

    def work() -> None:
        before = resource.getrusage(resource.RUSAGE_SELF)
        began = time.perf_counter()
        read(folder, plan)
        after = resource.getrusage(resource.RUSAGE_SELF)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        send.send((time.perf_counter() - began, cpu, after.ru_maxrss / 1024))

    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    if not receive.poll(600):
        raise RuntimeError(f"{read.__name__} did not end")
    wall, cpu, peak = receive.recv()
    process.join()
    return {"wall_s": round(wall, 2), "cpu_s": round(cpu, 2), "peak_mib": round(peak)}


def main(*arguments: str) -> None:
    """Writes the ledger, reads it in each way, and writes what that took."""
    parser = argparse.ArgumentParser(prog="python -m bench verdict_speed")
    parser.add_argument("--problems", type=int, default=sum(SIZES.values()))
    parser.add_argument("--folder", type=Path, help="Keep the ledger here, or use the one there.")
    given = parser.parse_args(arguments)
    plan = a_plan(given.problems / sum(SIZES.values()))
    with tempfile.TemporaryDirectory() as temporary:
        folder: Path = given.folder or Path(temporary)
        found: dict[str, Any] = {}
        if not (folder / "run.db").exists():
            began = time.perf_counter()
            write_ledger(plan, folder)
            found["written_in_s"] = round(time.perf_counter() - began, 1)
        with Ledger.open(folder / "run.db") as ledger:
            found["forks"] = sum(total.n for total in ledger.fork_totals())
            found["cells"] = ledger.query("SELECT COUNT(*) FROM cell")[0][0]
        found["results"] = found["cells"] * (1 + N_CANDIDATES)
        found["ledger_mib"] = round((folder / "run.db").stat().st_size / 2**20)
        import pandas  # noqa: F401
        import scipy.stats  # noqa: F401  imports are not what is measured

        for read in (to_verdicts, to_raced_verdicts, to_status, to_owed):
            found[read.__name__] = measure(read, folder, plan)
            print(read.__name__, found[read.__name__], flush=True)
    write("verdict_speed", found)


if __name__ == "__main__":
    import sys

    main(*sys.argv[1:])
