"""Forked against naive: generated tokens, wall time, and whether the results are the same.

    python -m bench forks

One list, one set of prompts, two strategies. Where a fork and its full re-run differ, the two
picks' scores at the first difference are computed with transformers, to show whether rounding
explains it.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.machine import local_data, write
from knockout.ledger import CellKey, Ledger
from knockout.method.sampling import Sampling, cell_seed, gumbel

SWEEP = """
model: smollm2-135m
engine: {{kind: vllm, dtype: float32, max_model_len: 1024, max_num_seqs: 64}}
benchmarks:
  - {{name: knockout_ifeval, limit: 15}}
  - {{name: knockout_math500, limit: 15}}
data_dir: {data}
seeds: 1
sampling: {{temperature: 0.6, top_p: 0.95, top_k: 20, max_tokens: 128}}
candidates: {{ids: [260, 284, 281, 219, 365, 90, 429, 67, 40001]}}
audit: 0
strategy: {strategy}
"""
SAMPLING = Sampling(temperature=0.6, top_p=0.95, top_k=20)


def main() -> None:
    """Runs both strategies and writes bench/results/forks.json."""
    from knockout.config.file import parse_sweep
    from knockout.sweep.run import run_sweep, start_engine

    with tempfile.TemporaryDirectory() as folder:
        walls, summaries = {}, {}
        for strategy in ("fork", "naive"):
            sweep = parse_sweep(
                SWEEP.format(data=json.dumps(str(local_data())), strategy=strategy),
                "bench", Path(), [],
            )  # fmt: skip
            start = time.perf_counter()
            run_sweep(sweep, Path(folder) / strategy)
            walls[strategy] = time.perf_counter() - start
            path = Path(folder) / strategy / "summary.json"
            summaries[strategy] = json.loads(path.read_text())
        start = time.perf_counter()
        start_engine(sweep).close()
        engine_start = time.perf_counter() - start
        with (
            Ledger.open(Path(folder) / "fork" / "run.db") as fork,
            Ledger.open(Path(folder) / "naive" / "run.db") as naive,
        ):
            compared = compare(fork, naive)
    tokens = {name: summary["tokens_generated"] for name, summary in summaries.items()}
    write(
        "forks",
        {
            "sweep": SWEEP.format(data="DATA", strategy="fork | naive").strip().splitlines(),
            "tokens_generated": tokens,
            "tokens_ratio": round(tokens["naive"] / tokens["fork"], 2),
            "wall_s_with_engine_start": {k: round(v, 1) for k, v in walls.items()},
            "wall_ratio_with_engine_start": round(walls["naive"] / walls["fork"], 2),
            "engine_start_s": round(engine_start, 1),
            "wall_ratio": round(
                (walls["naive"] - engine_start) / (walls["fork"] - engine_start), 2
            ),
            "coupling_errors": summaries["fork"]["coupling_errors"],
            "steps_checked": summaries["fork"]["steps_checked"],
            **compared,
        },
    )


def compare(fork: Ledger, naive: Ledger) -> dict[str, Any]:
    """Counts cells whose token ids or grades differ between the strategies."""
    keys, _ = fork.decided()
    n_candidates = int(fork.query("SELECT COUNT(*) FROM candidate")[0][0])
    grades = [
        {tuple(row[:4]): row[4] for row in ledger.query(
            "SELECT benchmark, problem, seed, candidate, correct FROM fork")}
        | {(*row[:3], -1): row[3] for row in ledger.query(
            "SELECT benchmark, problem, seed, correct FROM cell")}
        for ledger in (fork, naive)
    ]  # fmt: skip
    knockouts = differing = grade_differs = baselines_differ = 0
    shown = []
    for key in keys:
        baselines_differ += not np.array_equal(fork.trajectory(key), naive.trajectory(key))
        for c in range(n_candidates):
            a, b = fork.trajectory(key, c), naive.trajectory(key, c)
            knockouts += 1
            of_fork = grades[0].get((*key, c), grades[0][(*key, -1)])
            grade_differs += of_fork != grades[1][(*key, c)]
            if not np.array_equal(a, b):
                differing += 1
                shown.append(explain(fork, key, c, a, b))
    return {
        "knockouts": knockouts,
        "token_ids_differ": differing,
        "grades_differ": grade_differs,
        "baselines_differ": baselines_differ,
        "differences": shown,
    }


def explain(ledger: Ledger, key: CellKey, c: int, a: np.ndarray, b: np.ndarray) -> dict[str, Any]:
    """The two picks at the first difference: their logits and perturbed scores."""
    from transformers import AutoModelForCausalLM

    from knockout.ledger.codec import unpack_ids
    from knockout.tokens.checkpoint import resolve_model

    n = min(len(a), len(b))
    different = np.flatnonzero(a[:n] != b[:n])
    if not len(different):
        return {"cell": list(key), "candidate": c, "note": "one is a prefix of the other"}
    t = int(different[0])
    blob, doc_id = ledger.query(
        "SELECT prompt_ids, doc_id FROM problem WHERE benchmark = ? AND problem = ?", key[:2]
    )[0]
    prompt = unpack_ids(blob)
    name = ledger.query("SELECT name FROM benchmark WHERE id = ?", (key.benchmark,))[0][0]
    model = AutoModelForCausalLM.from_pretrained(resolve_model("smollm2-135m"), dtype=torch.float32)
    ids = torch.tensor([[*prompt.tolist(), *a[:t].tolist()]])
    with torch.inference_mode():
        logits = model(ids, logits_to_keep=1).logits[0, -1].double()
    picks = torch.tensor([int(a[t]), int(b[t])])
    seed = cell_seed(0, name, doc_id, key.seed)
    noise = gumbel(torch.tensor(seed), torch.tensor(ids.shape[1]), picks)
    score = logits[picks] / SAMPLING.temperature + noise
    return {
        "cell": list(key),
        "candidate": c,
        "step": t,
        "picks": picks.tolist(),
        "logits": [round(float(x), 6) for x in logits[picks]],
        "scores": [round(float(x), 6) for x in score],
    }
