"""What a user would do today: one `lm_eval --model vllm` run per candidate, its token banned.

    python -m bench lm_eval_runs     (after `python -m bench forks`, whose prompts it repeats)

A run on one document a task gives the cost of starting; the rest is generation.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

from bench.machine import RESULTS, local_data, write

TASKS = ("ifeval", "math500")
LIMIT = 15
CANDIDATES = (260, 67)


def main() -> None:
    """Times the runs and writes bench/results/lm_eval_runs.json."""
    from knockout.benchmarks.find import own_tasks
    from knockout.integrations.vllm_name import write_vllm_name
    from knockout.tokens.checkpoint import resolve_model

    forks = json.loads((RESULTS / "forks.json").read_text())
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        names = [_local_task(folder, own_tasks(), name) for name in TASKS]
        environment = {**os.environ, **QUIET}
        if name := write_vllm_name(folder / "names"):
            environment["PYTHONPATH"] = str(name)
        start = _run(folder, names, resolve_model("smollm2-135m"), CANDIDATES[0], 1, environment)
        runs = [
            _run(folder, names, resolve_model("smollm2-135m"), token, LIMIT, environment)
            for token in CANDIDATES
        ]
    run, n = statistics.mean(runs), 9
    ours = forks["wall_s_with_engine_start"]["fork"]
    write(
        "lm_eval_runs",
        {
            "wall_s_of_a_run": [round(r, 1) for r in runs],
            "wall_s_of_a_run_on_one_document_per_task": round(start, 1),
            "candidates": n,
            "wall_s_for_all_candidates_and_the_baseline": round(run * (n + 1), 1),
            "without_starting": round((run - start) * (n + 1), 1),
            "forked_sweep_wall_s": ours,
            "ratio": round(run * (n + 1) / ours, 2),
            "ratio_without_starting_theirs": round((run - start) * (n + 1) / ours, 2),
            "note": "mean of the measured runs times the 9 candidates of bench/forks.py and the "
            "baseline; the forked sweep's time includes its one engine start and its grading",
        },
    )


QUIET = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "4",
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def _local_task(folder: Path, tasks: Path, name: str) -> str:
    """Writes a task file that reads the local records."""
    split = "train" if name == "ifeval" else "test"
    config: dict[str, Any] = {
        "include": str(tasks / f"knockout_{name}.yaml"),
        "task": f"bench_{name}",
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": {split: str(local_data() / f"{name}.jsonl")}},
    }
    (folder / f"bench_{name}.yaml").write_text(yaml.safe_dump(config))
    return str(config["task"])


def _run(
    folder: Path, names: list[str], model: str, token: int, limit: int, environment: dict[str, str]
) -> float:
    settings = {
        "temperature": 0.6, "top_p": 0.95, "top_k": 20, "do_sample": True, "max_gen_toks": 128,
        "extra_args": {"knockout_ids": [token]},
    }  # fmt: skip
    arguments = (
        f"pretrained={model},dtype=float32,max_model_len=1024,max_num_seqs=64,"
        "enforce_eager=True,enable_prefix_caching=True"
    )
    start = time.perf_counter()
    done = subprocess.run(
        [
            str(Path(sys.executable).parent / "lm_eval"), "run", "--model", "vllm",
            "--model_args", arguments, "--tasks", ",".join(names), "--include_path", str(folder),
            "--limit", str(limit), "--gen_kwargs", json.dumps(settings), "--apply_chat_template",
            "--batch_size", "auto", "--log_samples", "--output_path", str(folder / f"out-{token}-{limit}"),
        ],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    wall = time.perf_counter() - start
    if done.returncode:
        raise SystemExit(f"lm_eval failed:\n{done.stderr[-3000:]}")
    print(f"lm_eval, token {token}, {limit} documents a task: {wall:.1f} s")
    return wall
