"""NaN rows in vLLM, whose engine may have a process of its own; started by test_engines.py.

The argument is a checkpoint folder in which all that follows token 123 is NaN. Writes what came of
single requests, and of a small run and its repetition, to the standard output.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from test_scheduler import a_ledger, work
from tiny import as_json, banning

from knockout.engines.base import Request, generate
from knockout.engines.vllm import VllmEngine
from knockout.ledger import totals
from knockout.method.interventions import Intervention, ban
from knockout.method.sampling import Sampling
from knockout.sweep.owed import Plan, PlannedBenchmark, PlannedProblem
from knockout.tokens.candidates import Candidate

NAN = 123
NUCLEUS = Sampling(temperature=0.8, top_p=0.95, top_k=20)
WATCH = tuple(ban((token,)) for token in range(5, 100))


def requests(first: int) -> list[Request]:
    """Good ones and bad ones; `first` is what the good one begins with."""
    good = Request("good", (5, 6, 7), 1, NUCLEUS, 12, watch=WATCH)
    swap = Intervention("replace", (first,), replacement=NAN)
    all_banned = banning(tuple(range(300)))
    return [
        good,
        Request("good fork", (5, 6, 7), 1, NUCLEUS, 12, intervention=banning((first,))),
        Request("watched", (5, NAN, 7), 1, NUCLEUS, 12, watch=WATCH),
        Request("unwatched", (5, NAN, 7), 1, NUCLEUS, 12, intervention=banning((8,))),
        Request("open", (5, NAN, 7), 1, Sampling(temperature=0.7), 12),
        Request("greedy", (5, NAN, 7), 1, Sampling(temperature=0), 12),
        Request("later", (5, 6, 7), 1, NUCLEUS, 12, intervention=swap, watch=WATCH[:2]),
        Request("later, unwatched", (5, 6, 7), 1, NUCLEUS, 12, intervention=swap),
        Request("all", (5, 6), 1, NUCLEUS, 12, intervention=all_banned),
        Request("all, watched", (5, 6), 1, NUCLEUS, 12, intervention=all_banned, watch=WATCH),
    ]


def a_run(engine: VllmEngine) -> list[dict[str, Any]]:
    """A small run with one bad prompt, and what resuming it gives."""
    prompts = ((5, 6, 7), (5, NAN, 7), (9, 10))
    problems = tuple(PlannedProblem(f"d{i}", p, (), 10) for i, p in enumerate(prompts))
    candidates = tuple(Candidate(f"w{i}", ban((i,)), (f'"{i}"',)) for i in range(5, 300, 3))
    plan = Plan(
        run_seed=3, benchmarks=(PlannedBenchmark("one", 2, NUCLEUS, problems),),
        candidates=candidates, audit=0.3,
    )  # fmt: skip
    said = []
    with tempfile.TemporaryDirectory() as name, a_ledger(plan, Path(name)) as ledger:
        for _ in range(2):
            work(plan, ledger, engine, engine.tokenizer)
            found = totals(ledger)
            said.append(
                {
                    "complete": found.complete,
                    "failed": [found.failed_cells, found.failed_forks, found.failed_audits],
                    "errors": ledger.query("SELECT error FROM generation WHERE error IS NOT NULL"),
                    "owed again": ledger.forget_failures(),
                }
            )
    return said


def main() -> None:
    folder = sys.argv[1]
    engine = VllmEngine(folder, max_model_len=64, max_num_seqs=16, kv_cache_gib=0.25)
    start = Request("start", (5, 6, 7), 1, NUCLEUS, 1)
    first = int(next(iter(generate(engine, [start]))).tokens[0])
    found = as_json(generate(engine, requests(first)))
    said = {
        "inside": hasattr(engine._engine, "model_executor"),
        "first": first,
        "found": found,
        "runs": a_run(engine),
    }
    engine.close()
    print("RESULT " + json.dumps(said))


if __name__ == "__main__":
    main()
