"""A long run of a tiny random model: is memory flat and the rate constant, and what is overhead?

The scheduler, the ledger, the transformers engine and a real grading process work through many
cells. The model is so small that everything around it shows. What the scheduler takes, it takes
when a trajectory ends, so its share depends on how long those are.

    python -m bench soak [--cells 20000] [--max-tokens 96]
    python -m bench soak --model smollm2-135m --cells 128 --max-tokens 64   # the share beside a real model
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from bench.machine import write
from knockout.engines.base import Completion, Request
from knockout.engines.transformers import TransformersEngine
from knockout.grading.graders import IfevalGrader
from knockout.grading.pool import GraderPool
from knockout.ledger import BenchmarkRow, Ledger, ProblemRow, totals
from knockout.method.interventions import ban
from knockout.method.sampling import Sampling
from knockout.sweep.jobs import Snapshot
from knockout.sweep.owed import Plan, PlannedBenchmark, PlannedProblem
from knockout.sweep.scheduler import Scheduler
from knockout.tokens.candidates import Candidate
from knockout.tokens.checkpoint import resolve_model

N_SEEDS, N_RUNNING = 4, 64
POINTS = 20
"""How often memory and rate are noted."""


@dataclass(frozen=True)
class Graded:
    """What the pool wants: a benchmark's name and grader."""

    name: str
    grader: IfevalGrader


class Timed:
    """An engine whose time is added up, and that of its caller between two full steps."""

    def __init__(self, engine: TransformersEngine) -> None:
        self.engine, self.info = engine, engine.info
        self.seconds, self.steps = 0.0, 0
        self.between: list[tuple[float, float]] = []
        self.full_step_s: list[float] = []
        self._left: tuple[float, float] | None = None

    @property
    def n_open(self) -> int:
        """As the engine's."""
        return self.engine.n_open

    def add(self, request: Request) -> None:
        """As the engine's, timed."""
        began = time.perf_counter()
        self.engine.add(request)
        self.seconds += time.perf_counter() - began

    def step(self) -> list[Completion]:
        """As the engine's, timed."""
        began = time.perf_counter()
        full = self._left is not None and self.engine.n_open >= N_RUNNING
        if self._left is not None and full:
            wall, cpu = self._left
            self.between.append((began - wall, time.thread_time() - cpu))
        done = self.engine.step()
        ended = time.perf_counter()
        self.seconds += ended - began
        self.steps += 1
        if full:
            self.full_step_s.append(ended - began)
        self._left = (ended, time.thread_time()) if self.engine.n_open >= N_RUNNING // 2 else None
        return done

    def close(self) -> None:
        """As the engine's."""
        self.engine.close()


def a_plan(n_cells: int, max_tokens: int) -> Plan:
    """Prompts of random words; three candidates."""
    rng = np.random.default_rng(0)
    problems = tuple(
        PlannedProblem(str(i), tuple(rng.integers(1, 60, 6).tolist()), (), max_tokens)
        for i in range(n_cells // N_SEEDS)
    )
    return Plan(
        run_seed=0,
        benchmarks=(PlannedBenchmark("b", N_SEEDS, Sampling(0.9, 0.95, 12, 0.0), problems),),
        candidates=tuple(Candidate(f"w{i}", ban((i,)), (f'"w{i}"',)) for i in (3, 14, 25)),
        audit=0.02,
    )


def main(*arguments: str) -> None:
    """Runs it and writes what was seen."""
    parser = argparse.ArgumentParser(prog="python -m bench soak")
    parser.add_argument("--cells", type=int, default=20_000)
    parser.add_argument("--model", help="Instead of the tiny random one; writes soak_MODEL.json.")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--seconds", type=float, default=3600.0, help="Stop here; it is recorded.")
    given = parser.parse_args(arguments)
    import psutil

    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from words import word_model

    plan = a_plan(given.cells, given.max_tokens)
    record = {"prompt": "x", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}
    graded = Graded("b", IfevalGrader([record] * len(plan.benchmarks[0].problems)))
    points: list[dict[str, float]] = []
    me = psutil.Process()
    idle = 0.0
    with tempfile.TemporaryDirectory() as folder:
        model = resolve_model(given.model) if given.model else word_model(Path(folder) / "model")
        engine = Timed(TransformersEngine(str(model), dtype="float32", max_num_seqs=N_RUNNING))
        ledger = Ledger.create(
            Path(folder) / "run.db", {}, plan.candidates, [BenchmarkRow("b", "m", N_SEEDS, "f")],
            [
                ProblemRow(0, i, p.doc_id, "", np.array(p.prompt, dtype=np.int32))
                for i, p in enumerate(plan.benchmarks[0].problems)
            ],
        )  # fmt: skip
        began = last_turn = time.perf_counter()
        every = max(1, given.cells // POINTS)

        def observe(snapshot: Snapshot) -> None:
            nonlocal idle, last_turn
            now = time.perf_counter()
            if snapshot.running == 0 and snapshot.cells < given.cells - N_RUNNING:
                idle += now - last_turn  # nothing runs although there is work: graders hold it up
            last_turn = now
            if now - began > given.seconds:
                scheduler.stop()
            if snapshot.cells >= every * (len(points) + 1):
                workers = me.children()
                points.append(
                    {
                        "cells": snapshot.cells,
                        "forks": snapshot.forks,
                        "tokens": snapshot.tokens,
                        "seconds": round(now - began, 2),
                        "engine_seconds": round(engine.seconds, 2),
                        "rss_mib": round(me.memory_info().rss / 2**20, 1),
                        "grader_rss_mib": round(
                            sum(w.memory_info().rss for w in workers) / 2**20, 1
                        ),
                        "waiting_for_grades": snapshot.grading,
                    }
                )

        with GraderPool([graded], workers=1) as pool, ledger:
            scheduler = Scheduler(
                plan, ledger, engine, pool, engine.engine.tokenizer, N_RUNNING, observe
            )
            came_to_its_end = scheduler.run([plan.everything()])
            wall = time.perf_counter() - began
            state = totals(ledger)
    assert state.complete or not came_to_its_end
    half = len(points) // 2
    rates = [(b["cells"] - a["cells"]) / (b["seconds"] - a["seconds"]) for a, b in pairwise(points)]
    mid, end = points[half], points[-1]
    wall_s, cpu_s = np.mean(engine.between, axis=0).tolist()
    step_s = float(np.mean(engine.full_step_s))
    generated = state.cells + state.forks
    found: dict[str, Any] = {
        "cells": state.cells,
        "cells_planned": state.planned_cells,
        "came_to_its_end": came_to_its_end,
        "failed": state.failed_cells + state.failed_forks,
        "trajectories_generated": generated,
        "tokens": state.tokens_generated + state.tokens_audit,
        "tokens_a_trajectory": round((state.tokens_generated + state.tokens_audit) / generated, 1),
        "wall_s": round(wall, 1),
        "rss_growth_in_second_half_mib": round(end["rss_mib"] - mid["rss_mib"], 1),
        "bytes_per_cell_in_second_half": round(
            (end["rss_mib"] - mid["rss_mib"]) * 2**20 / (end["cells"] - mid["cells"])
        ),
        "cells_per_s_by_part": [round(rate) for rate in rates],
        "engine_steps": engine.steps,
        "engine_ms_a_step": round(1000 * engine.seconds / engine.steps, 2),
        "steps_with_64_running": len(engine.between),
        "engine_ms_a_step_with_64_running": round(1000 * step_s, 2),
        "scheduler_ms_a_step_with_64_running": round(1000 * wall_s, 3),
        "scheduler_cpu_ms_a_step_with_64_running": round(1000 * cpu_s, 3),
        "scheduler_share_of_wall_with_64_running": round(wall_s / (wall_s + step_s), 4),
        "idle_engine_s_while_grading": round(idle, 2),
        "points": points,
    }
    print({key: value for key, value in found.items() if key != "points"})
    write(f"soak_{given.model}" if given.model else "soak", found)


if __name__ == "__main__":
    main(*sys.argv[1:])
