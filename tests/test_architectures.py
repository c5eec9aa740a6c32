"""Forks equal full re-runs, and leave where these do, on tiny models of many architectures."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import EOS, embedded

from knockout.engines.base import Request, generate
from knockout.engines.transformers import TransformersEngine
from knockout.method.interventions import ban
from knockout.method.sampling import Sampling
from knockout.sweep.jobs import first_difference
from knockout.tokens.checkpoint import quiet_transformers

V = 320
COMMON: dict[str, Any] = {
    "vocab_size": V, "bos_token_id": 1, "eos_token_id": EOS, "pad_token_id": EOS,
    "initializer_range": 0.25, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 128,
}  # fmt: skip
GROUPED = {"num_key_value_heads": 2, "head_dim": 8}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": GROUPED,
    "qwen2": {"num_key_value_heads": 2},
    "qwen3": GROUPED,
    "qwen3_moe": GROUPED
    | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    "mistral": GROUPED | {"sliding_window": 5},
    "mixtral": GROUPED | EXPERTS,
    "gemma2": GROUPED | {"sliding_window": 5, "query_pre_attn_scalar": 8},
    "gemma3_text": GROUPED | {"sliding_window": 5, "query_pre_attn_scalar": 8},
    "phi3": {"num_key_value_heads": 2},
    "olmo2": {"num_key_value_heads": 2},
    "granite": {"num_key_value_heads": 2},
    "smollm3": {"num_key_value_heads": 2},
    "gpt_neox": {},
    "gpt2": {},
    "bloom": {},
    "falcon": {},
}
SETTINGS = (
    Sampling(0.6, top_p=0.95, top_k=20),
    Sampling(1.0, top_p=0.9),
    Sampling(1.5, min_p=0.05),
    Sampling(0),
)


def save(kind: str, folder: Path) -> Path:
    """A random model of one architecture with a real tokenizer."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(1)
    config = AutoConfig.for_model(kind, **COMMON, **ARCHITECTURES[kind])
    with quiet_transformers():
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(embedded() / name, folder / name)
    return folder


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_forks_equal_full_re_runs(kind: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    engine = TransformersEngine(str(save(kind, tmp_path)), device="cpu", max_num_seqs=64)
    rng = np.random.default_rng(4)
    bases = [
        Request(str(n), tuple(range(5 + n, 17 + 2 * n)), 90 + n, sampling, 14)
        for n, sampling in enumerate(SETTINGS)
    ]
    plain = {done.key: done.tokens for done in generate(engine, bases)}
    watches, runs = {}, []
    for base in bases:
        emitted = sorted(set(plain[base.key].tolist()) - {EOS})[:5]
        wide = rng.choice(np.arange(3, V), 200, replace=False).tolist()
        sets = [(t,) for t in (*emitted, 7, 300)] + [(*emitted[:1], 8, 9), wide]
        watches[base.key] = tuple(ban(tuple(sorted(set(map(int, ids))))) for ids in sets)
        runs += [
            replace(base, key=f"{base.key}/{n}", intervention=one)
            for n, one in enumerate(watches[base.key])
        ]
    told = {
        done.key: done
        for done in generate(engine, [replace(b, watch=watches[b.key]) for b in bases])
    }
    full = {done.key: done.tokens for done in generate(engine, runs)}
    forks = []
    for request in runs:
        base, _, n = request.key.partition("/")
        assert told[base].tokens.tolist() == plain[base].tolist()
        step = int(told[base].changes[int(n)])
        assert step == first_difference(plain[base], full[request.key]), request.key
        if step >= 0:
            forks.append(replace(request, prefix=tuple(plain[base][:step].tolist())))
    assert len(forks) > 10
    for done in generate(engine, forks):
        assert done.tokens.tolist() == full[done.key].tolist(), done.key
    engine.close()
