"""Tiny models with random weights and a real tokenizer: the real engines run them in moments."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, Literal

import torch

from knockout.engines.base import Completion, Request
from knockout.method.interventions import Intervention, ban
from knockout.tokens.checkpoint import EMBEDDED, quiet_transformers, resolve_model

__all__ = ["as_json", "banned_by", "banning", "embedded", "tiny_model"]

EOS = 2


def banning(ids: Collection[int]) -> Intervention | None:
    """The plain ban of some ids, None for none."""
    return ban(tuple(sorted(set(ids)))) if ids else None


def banned_by(request: Request) -> tuple[int, ...]:
    """The ids that a request bans."""
    return () if request.intervention is None else request.intervention.token_ids


def as_json(completions: Iterable[Completion]) -> dict[str, dict[str, Any]]:
    """Completions by key, as another process writes them."""
    return {
        c.key: {
            "tokens": c.tokens.tolist(),
            "finish": c.finish,
            "error": c.error,
            "changes": None if c.changes is None else c.changes.tolist(),
        }
        for c in completions
    }


@functools.cache
def embedded() -> Path:
    """The embedded model's checkpoint folder."""
    return Path(resolve_model(EMBEDDED))


def tiny_model(
    folder: Path,
    vocab_size: int = 300,
    layers: int = 2,
    seed: int = 0,
    *,
    kind: Literal["llama", "qwen3", "sliding", "gpt2", "mamba2"] = "llama",
    scale: float = 0.25,
    nan_token: int | None = None,
    head_dim: int = 8,
) -> Path:
    """Saves a random model with SmolLM2's tokenizer as a checkpoint folder.

    Args:
        folder: Where to; made if need be.
        vocab_size: Width of its logits. The tokenizer has 49,152 ids; prompts must stay below.
        layers: Decoder layers.
        seed: Of the weights.
        kind: Architecture; "sliding" attends to the last 6 tokens only; "mamba2" is recurrent.
        scale: Spread of the weights; larger makes it surer of its next token.
        nan_token: A token whose embedding is NaN, so that all that follows it is NaN.
        head_dim: Width of an attention head; vLLM wants 32 or more.

    Returns:
        The folder. The model ends its texts with id 2.
    """
    from transformers import (
        GPT2Config,
        GPT2LMHeadModel,
        LlamaConfig,
        LlamaForCausalLM,
        Mamba2Config,
        Mamba2ForCausalLM,
        MistralConfig,
        MistralForCausalLM,
        Qwen3Config,
        Qwen3ForCausalLM,
    )

    common = {
        "vocab_size": vocab_size,
        "bos_token_id": 1,
        "eos_token_id": EOS,
        "pad_token_id": EOS,
        "initializer_range": scale,
        "tie_word_embeddings": False,
    }
    llama = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": head_dim,
        "max_position_embeddings": 256,
    }
    torch.manual_seed(seed)
    if kind == "llama":
        model = LlamaForCausalLM(LlamaConfig(**common, **llama))
    elif kind == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(**common, **llama))
    elif kind == "sliding":
        model = MistralForCausalLM(MistralConfig(**common, **llama, sliding_window=6))
    elif kind == "mamba2":
        sizes = {"hidden_size": 32, "num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1}
        model = Mamba2ForCausalLM(
            Mamba2Config(**common, **sizes, num_hidden_layers=layers, chunk_size=8)
        )
    else:
        model = GPT2LMHeadModel(
            GPT2Config(**common, n_embd=32, n_layer=layers, n_head=4, n_positions=256)
        )
    if nan_token is not None:
        with torch.no_grad():
            model.get_input_embeddings().weight[nan_token] = torch.nan
    folder.mkdir(parents=True, exist_ok=True)
    with quiet_transformers():
        model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(embedded() / name, folder / name)
    return folder
