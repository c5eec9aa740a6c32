"""Heads of architectures that do something to their logits, on tiny models of transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from knockout.mining.forward import ScoringModel
from knockout.training.heads import head_of, project, reproduces

V = 61
SMALL = {
    "vocab_size": V,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MAMBA = {
    "mamba_d_ssm": 32,
    "mamba_n_heads": 4,
    "mamba_d_head": 8,
    "mamba_n_groups": 1,
    "mamba_d_state": 8,
    "mamba_chunk_size": 16,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("Llama", {}),
    "Cohere": ("Cohere", {"logit_scale": 0.37}),
    "Granite": ("Granite", {"logits_scaling": 6.0}),
    "HyperCLOVA X": ("HyperCLOVAX", {"logits_scaling": 0.4}),
    "Falcon-H1": ("FalconH1", {"lm_head_multiplier": 0.29, **MAMBA}),
    "Gemma 2": ("Gemma2", {"final_logit_softcapping": 1.5}),
    "RecurrentGemma": (
        "RecurrentGemma",
        {"logits_soft_cap": 1.5, "lru_width": 32, "attention_window_size": 8},
    ),
    "NanoChat": ("NanoChat", {"final_logit_softcapping": 1.5}),
}


def tiny(case: str) -> Any:
    name, extra = CASES[case]
    config = getattr(transformers, f"{name}Config")(**SMALL, **extra)
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(8)  # far enough from 0 that a wrong factor or cap shows
    return model


@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.filterwarnings("ignore")  # of transformers' slow paths
def test_the_head_gives_the_models_own_logits(case: str) -> None:
    model = tiny(case)
    ids = torch.arange(3, 15)[None]
    with torch.no_grad():
        own = model(ids, use_cache=False).logits
        states = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    torch.testing.assert_close(project(states[0], head_of(model)), own[0], rtol=1e-4, atol=1e-5)
    scoring = ScoringModel(model, case, ids[0].tolist())
    assert scoring.split


def test_a_model_that_does_something_else_to_its_logits_is_told() -> None:
    model = tiny("plain")
    ids = torch.arange(3, 15)[None]
    plain = model.lm_head.forward

    states = model.base_model(input_ids=ids, use_cache=False).last_hidden_state

    assert reproduces(model, states, model(ids).logits)
    model.lm_head.forward = lambda states: plain(states) * 1.1
    assert not reproduces(model, states, model(ids).logits)
    assert not ScoringModel(model, "odd", ids[0].tolist()).split
