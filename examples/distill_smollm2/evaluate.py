"""What a student is worth: KL on held-out prompts, and Pass@1 on the starter tasks."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np


def held_out_kl(
    args: argparse.Namespace, student: Path | str, teacher: str, prompts: Sequence[str]
) -> dict[str, Any]:
    """Reverse KL of the student's own rollouts of each prompt.

    Returns:
        `held_out_kl`: a list per seed, of each prompt's mean over its rollout's tokens, in nats;
        `lengths`: the same shape, tokens.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from knockout.engines.base import Request, generate
    from knockout.engines.open import open_engine
    from knockout.method.sampling import Sampling, cell_seed
    from knockout.mining.forward import ScoringModel, score_sequences
    from knockout.tokens.checkpoint import load_tokenizer, resolve_model

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
        for f in (resolve_model(str(student)), folder)
    ]
    kls, lengths = [], []
    for seed in range(args.seeds):
        answers = [found[f"{seed}/{index}"] for index in range(len(encoded))]
        (scores,) = score_sequences(
            models[:1], models[1], [np.array(p, dtype=np.int32) for p in encoded], answers
        )
        kls.append([float(s.reverse_kl.mean()) for s in scores])
        lengths.append([len(tokens) for tokens in answers])
    return {"held_out_kl": kls, "lengths": lengths}


def pass_at_1(run: Path) -> dict[str, float]:
    """Baseline Pass@1 of each benchmark of a run directory."""
    rows = json.loads((run / "verdicts.json").read_text(encoding="utf-8"))
    return {r["benchmark"]: r["pass1_baseline"] for r in rows if r["benchmark"] != "pooled"}
