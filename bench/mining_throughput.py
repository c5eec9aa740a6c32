"""What scoring costs beyond the forward passes of teacher and student.

    python -m bench mining_throughput

Both sides run the same padded batches of the same texts through two copies of a model, up to the
logits of the scored positions; scoring adds softmax, KL, entropy, top-k and the ratio.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from bench.machine import write
from knockout.mining.forward import ScoringModel, length_batches, score_sequences
from knockout.tokens.checkpoint import resolve_model


def main(*arguments: str) -> None:
    """Measures, and writes bench/results/mining_throughput.json."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--sequences", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--batch-tokens", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    args = parser.parse_args(arguments)

    torch.set_num_threads(args.threads)
    folder = resolve_model(args.model)
    models = []
    for name in ("student", "teacher"):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, args.dtype))
        models.append(ScoringModel(model.to(args.device), name, range(10, 26)))
    rng = np.random.default_rng(0)
    prompts, responses = [], []
    for _ in range(args.sequences):
        length = int(rng.integers(args.tokens // 2, args.tokens + 1))
        prompts.append(rng.integers(1, 40_000, 24).astype(np.int32))
        responses.append(rng.integers(1, 40_000, length).astype(np.int32))
    sequences = [np.concatenate(pair) for pair in zip(prompts, responses, strict=True)]

    def wait() -> None:
        if torch.device(args.device).type == "cuda":
            torch.cuda.synchronize()

    @torch.inference_mode()
    def bare() -> None:
        for batch in length_batches([len(s) for s in sequences], args.batch_tokens):
            for model in models:
                part = [sequences[i] for i in batch]
                model.head(model.states(part, [len(prompts[i]) for i in batch]))

    def scored() -> None:
        score_sequences(
            models[:1], models[1], prompts, responses, tokens_per_batch=args.batch_tokens
        )

    # On a CPU the process's own time: others may be at work on the machine.
    clock = time.perf_counter if args.device != "cpu" else time.process_time
    times: dict[str, list[float]] = {"bare": [], "scored": []}
    bare()
    for _ in range(args.repeats):
        for name, work in (("bare", bare), ("scored", scored)):
            wait()
            start = clock()
            work()
            wait()
            times[name].append(clock() - start)
    best = {name: min(values) for name, values in times.items()}
    positions = sum(len(r) for r in responses)
    found = {
        "positions": positions,
        "bare_s": round(best["bare"], 3),
        "scored_s": round(best["scored"], 3),
        "overhead": round(best["scored"] / best["bare"] - 1, 4),
        "positions_per_s": round(positions / best["scored"], 1),
    }
    write("mining_throughput", found | vars(args))
