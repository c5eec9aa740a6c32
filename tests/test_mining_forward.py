"""Scoring forward passes: the same numbers as the models' own logits, padded or not, split or not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)

from knockout.errors import KnockoutError
from knockout.mining.forward import ScoringModel, length_batches, score_sequences

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 24,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "initializer_range": 0.5,
}


class ShiftedLlama(LlamaForCausalLM):
    """Does something to its logits that no configuration names."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = super().forward(*args, **kwargs)
        out.logits = out.logits + torch.linspace(0, 3, out.logits.shape[-1])
        return out


def build(kind: str, seed: int = 0) -> ScoringModel:
    torch.manual_seed(seed)
    model = {
        "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
        "soft cap": lambda: Gemma2ForCausalLM(Gemma2Config(**SIZES, final_logit_softcapping=2.0)),
        "scale": lambda: CohereForCausalLM(CohereConfig(**SIZES, logit_scale=0.25)),
        "division": lambda: GraniteForCausalLM(GraniteConfig(**SIZES, logits_scaling=4.0)),
        "gpt2": lambda: GPT2LMHeadModel(
            GPT2Config(vocab_size=97, n_embd=24, n_layer=2, n_head=4, initializer_range=0.5)
        ),
        "shifted": lambda: ShiftedLlama(LlamaConfig(**SIZES)),
    }[kind]()
    return ScoringModel(model, kind, range(1, 9))


def texts(seed: int = 0) -> tuple[list[np.ndarray], list[np.ndarray]]:
    rng = np.random.default_rng(seed)
    draw = lambda low, high: rng.integers(1, 97, rng.integers(low, high)).astype(np.int32)  # noqa: E731
    return [draw(1, 9) for _ in range(7)], [draw(0, 20) for _ in range(7)]


@pytest.mark.parametrize("kind", ["llama", "soft cap", "scale", "division", "gpt2", "shifted"])
def test_scores_are_those_of_the_models_own_logits(kind: str) -> None:
    student, teacher = build(kind), build("llama", seed=1)
    assert student.split is (kind != "shifted")
    prompts, responses = texts()
    (found,) = score_sequences([student], teacher, prompts, responses, tokens_per_batch=60, chunk=5)
    for prompt, response, scores in zip(prompts, responses, found, strict=True):
        assert scores.reverse_kl.shape == (len(response),)
        if not len(response):
            continue
        ids = torch.tensor(np.concatenate([prompt, response])[None].astype(np.int64))
        with torch.inference_mode():
            part = slice(len(prompt) - 1, -1)
            logp = student.model(ids).logits[0, part].double().log_softmax(1)
            logq = teacher.model(ids).logits[0, part].double().log_softmax(1)
        kl = (logp.exp() * (logp - logq)).sum(1)
        torch.testing.assert_close(scores.reverse_kl, kl.float(), rtol=1e-4, atol=1e-5)
        own = logq.gather(1, ids[0, len(prompt) :, None])[:, 0]
        torch.testing.assert_close(
            scores.teacher_gap, (logq.amax(1) - own).float(), rtol=1e-4, atol=1e-5
        )


def test_a_student_before_training_is_scored_beside_the_other() -> None:
    after, before, teacher = build("llama"), build("llama", seed=2), build("llama", seed=1)
    prompts, responses = texts(1)
    both = score_sequences([after, before], teacher, prompts, responses)
    alone = score_sequences([before], teacher, prompts, responses)
    for a, b in zip(both[1], alone[0], strict=True):
        torch.testing.assert_close(a.reverse_kl, b.reverse_kl)


def test_what_cannot_be_scored_is_refused() -> None:
    model = build("llama")
    empty, one = np.array([], dtype=np.int32), np.array([3], dtype=np.int32)
    with pytest.raises(KnockoutError, match="sequence 1: its prompt is empty"):
        score_sequences([model], model, [one, empty], [one, one])
    with pytest.raises(KnockoutError, match="contains token 97, but the models share ids 0 to 96"):
        score_sequences([model], model, [one], [one + 94])


@given(st.lists(st.integers(1, 50), max_size=30), st.integers(1, 120))
def test_batches_hold_every_sequence_once_within_the_budget(lengths: list[int], room: int) -> None:
    batches = list(length_batches(lengths, room))
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    for batch in batches:
        longest = max(lengths[i] for i in batch)
        assert len(batch) == 1 or longest * len(batch) <= room
