"""What an arm is worth: KL on held-out prompts, Pass@1 on the starter tasks, and the report."""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np


def held_out_kl(
    args: argparse.Namespace, student: Path, teacher: str, prompts: Sequence[str]
) -> dict[str, Any]:
    """Mean reverse KL per token of the student's own rollouts, for each seed, and their length."""
    import torch
    from transformers import AutoModelForCausalLM

    from knockout.engines.base import Request, generate
    from knockout.engines.models import load_tokenizer, resolve_model
    from knockout.engines.open import open_engine
    from knockout.mining.forward import ScoringModel, score_sequences
    from knockout.sampling import Sampling, cell_seed

    folder = resolve_model(teacher)
    tokenizer: Any = load_tokenizer(folder)
    encoded = []
    for prompt in prompts:
        turn = [{"role": "user", "content": prompt}]
        text = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
        encoded.append(tuple(tokenizer.encode(text, add_special_tokens=False)))
    engine = open_engine(str(student), kind=args.engine, dtype="float32", max_num_seqs=32)
    requests = [
        Request(
            f"{seed}/{index}",
            prompt,
            cell_seed(seed, "held out", str(index), 0),
            Sampling(temperature=1.0),
            args.max_tokens,
        )
        for seed in range(args.seeds)
        for index, prompt in enumerate(encoded)
    ]
    found = {done.key: done.tokens for done in generate(engine, requests)}
    engine.close()
    models = [
        ScoringModel(
            AutoModelForCausalLM.from_pretrained(f, dtype=torch.float32), str(f), encoded[0]
        )
        for f in (student, folder)
    ]
    kls = []
    for seed in range(args.seeds):
        keys = [f"{seed}/{index}" for index in range(len(encoded))]
        (scores,) = score_sequences(
            models[:1],
            models[1],
            [np.array(p, dtype=np.int32) for p in encoded],
            [found[key] for key in keys],
        )
        kls.append(float(torch.cat([s.reverse_kl for s in scores]).mean()))
    lengths = [len(tokens) for tokens in found.values()]
    return {"held_out_kl": kls, "mean_length": statistics.mean(lengths)}


def pass_at_1(
    args: argparse.Namespace, student: Path, out: Path, knockout: Callable[..., str]
) -> dict[str, Any]:
    """Pass@1 of each starter task: the baseline of a sweep whose one candidate never occurs."""
    sweep = out.with_suffix(".yaml")
    out.parent.mkdir(parents=True, exist_ok=True)
    sweep.write_text(
        json.dumps(
            {
                "model": str(student),
                "engine": {"kind": args.engine, "dtype": "float32", "max_num_seqs": 32},
                "benchmarks": ["knockout_starter_arithmetic", "knockout_starter_instructions"],
                "limit": args.problems,
                "seeds": args.seeds,
                "sampling": {"temperature": 0.6, "max_tokens": args.max_tokens},
                "candidates": {"strings": [" parliament"]},
            }
        ),
        encoding="utf-8",
    )
    knockout("run", sweep, "--out", out)
    rows = json.loads((out / "verdicts.json").read_text(encoding="utf-8"))
    alone = [row for row in rows if row["benchmark"] != "pooled"]
    return {"pass1": {row["benchmark"]: row["pass1_baseline"] for row in alone}}


def report(
    args: argparse.Namespace,
    out: Path,
    results: dict[str, list[dict[str, Any]]],
    *,
    frozen: Sequence[int],
    strict: Sequence[int],
    pillars: Sequence[int],
) -> None:
    """Writes report.json and report.md: a row per arm, means over training runs and seeds.

    ± is the standard error over training runs; with one run there is none.
    """
    tasks = list(results["start"][0]["pass1"])
    lines = [
        "| arm | runs | held-out KL (nats) | rollout length | frozen | train s | "
        + " | ".join(f"Pass@1 {task.removeprefix('knockout_starter_')}" for task in tasks)
        + " |",
        "| --- " * (6 + len(tasks)) + "|",
    ]
    for name, runs in results.items():
        kl = [statistics.mean(run["held_out_kl"]) for run in runs]
        shares = [
            statistics.mean(run["history"]["frozen_share"]) for run in runs if "history" in run
        ]
        cells = [
            name,
            str(len(runs)),
            _mean(kl, 3),
            _mean([run["mean_length"] for run in runs], 1),
            f"{statistics.mean(shares):.0%}" if shares else "–",
            _mean([run["train_s"] for run in runs if "train_s" in run], 0),
            *(_mean([run["pass1"][task] for run in runs], 3) for task in tasks),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    settings = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()}
    settings.pop("out"), settings.pop("prompts")
    lists = {"frozen": list(frozen), "frozen_without_undetermined": list(strict)}
    lists["pillars"] = list(pillars)
    whole = {"settings": settings, **lists, "results": results}
    (out / "report.json").write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    told = (
        f"{len(frozen)} rocks frozen, of which {len(strict)} are known to be neutral and the rest "
        f"undetermined; {len(pillars)} pillars kept."
    )
    text = "\n".join([*lines, "", told, "", f"Settings: `{json.dumps(settings)}`"])
    (out / "report.md").write_text(text + "\n", encoding="utf-8")


def _mean(values: Sequence[float], digits: int) -> str:
    if not values:
        return "–"
    mean = f"{statistics.mean(values):.{digits}f}"
    if len(values) < 2:
        return mean
    error = statistics.stdev(values) / math.sqrt(len(values))
    return f"{mean} ± {error:.{digits}f}"
