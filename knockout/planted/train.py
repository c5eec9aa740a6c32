"""Trains a planted model: a small Llama on fresh problems and responses, on CPU threads."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from knockout.planted.language import Language
from knockout.planted.tokenizer import EOS, PAD, make_tokenizer, padded_width

if TYPE_CHECKING:
    import torch

__all__ = ["Training", "train"]

_POSITIONS = 128
_IGNORED = -100
_POOL = 4  # batches whose texts are sorted by length together


@dataclass(frozen=True, slots=True)
class Training:
    """How a planted model is trained.

    Attributes:
        seed: Of the first weights and of the texts.
        hidden, layers, heads: Size of the transformer; the MLP is three times as wide.
        steps: Updates of the first part, in which every text has about the same weight, so that
            few texts suffice to learn the operations.
        settling: Updates of the second part, in which every token has the same weight: without it the
            model's probabilities would not be those of the language.
        rows: Texts in an update; they have about the same length.
        rate: Highest learning rate, a third of it in the second part; in each part it rises for 5 %
            of the steps, then falls as a cosine.
        threads: CPU threads. Another number rounds differently, so it is part of the recipe.
    """

    seed: int = 0
    hidden: int = 128
    layers: int = 4
    heads: int = 4
    steps: int = 1400
    settling: int = 300
    rows: int = 64
    rate: float = 3e-3
    threads: int = 1


def train(
    language: Language,
    folder: Path,
    training: Training | None = None,
    tell: Callable[[str], None] = print,
) -> None:
    """Trains and writes a checkpoint that transformers and vLLM load, with `language.json`.

    The same language, settings, library versions and kind of processor give the same bytes.

    Args:
        language: What is learned.
        folder: Where the checkpoint goes.
        training: Size, length and seed.
        tell: Called with a line of progress.
    """
    import torch
    import transformers

    library: Any = transformers  # its classes carry no types
    training = training or Training()
    tokenizer = make_tokenizer(language)
    before = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    torch.set_num_threads(training.threads)
    torch.use_deterministic_algorithms(True)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(training.seed)
            config = library.LlamaConfig(
                vocab_size=padded_width(len(tokenizer)),
                hidden_size=training.hidden,
                intermediate_size=3 * training.hidden,
                num_hidden_layers=training.layers,
                num_attention_heads=training.heads,
                num_key_value_heads=training.heads,
                max_position_embeddings=_POSITIONS,
                tie_word_embeddings=True,
                bos_token_id=None,
                eos_token_id=tokenizer.eos_token_id,
                pad_token_id=tokenizer.pad_token_id,
            )
            model = library.LlamaForCausalLM(config)
            for part in (1, 2):
                _fit(model, language, tokenizer, training, part, tell)
    finally:
        torch.set_num_threads(before[0])
        torch.use_deterministic_algorithms(before[1])
    model.generation_config = library.GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=True
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    language.save(folder / "language.json")


def _fit(
    model: Any,
    language: Language,
    tokenizer: Any,
    training: Training,
    part: int,
    tell: Callable[[str], None],
) -> None:
    import torch

    first = part == 1
    steps = training.steps if first else training.settling
    rate = training.rate if first else training.rate / 3
    rng = random.Random(f"training {training.seed}" if first else f"settling {training.seed}")
    ids = tokenizer.get_vocab()
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.01, betas=(0.9, 0.98))
    warm = max(1, steps // 20)

    def share(step: int) -> float:
        rising = min(1.0, (step + 1) / warm)
        return rising * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * step / steps)))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, share)
    model.train()
    start = time.perf_counter()
    seen = 0.0
    batches: list[tuple[torch.Tensor, torch.Tensor]] = []
    each = 1.0
    for step in range(steps):
        if not batches:
            batches = _batches(language, ids, rng, training.rows)
            each = sum(int((y != _IGNORED).sum()) for _, y in batches) / len(batches)
        tokens, labels = batches.pop()
        # Padding is on the right and never attended to, so no mask is needed.
        loss = model(input_ids=tokens, labels=labels, use_cache=False).loss
        if not first:
            loss = loss * (int((labels != _IGNORED).sum()) / each)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        seen += float(loss.detach())
        if (step + 1) % 100 == 0 or step + 1 == steps:
            elapsed = time.perf_counter() - start
            tell(
                f"part {part}, step {step + 1}: loss {seen / (step % 100 + 1):.4f}, {elapsed:.0f} s"
            )
            seen = 0.0


def _batches(
    language: Language, ids: dict[str, int], rng: random.Random, rows: int
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Some batches in a random order: texts as (rows, T) ids, and labels without the prompt."""
    import torch

    texts = []
    for _ in range(_POOL * rows):
        problem = language.problem(rng)
        texts.append((problem.split(), [*language.response(problem, rng).split(), EOS]))
    texts.sort(key=lambda text: len(text[0]) + len(text[1]))  # little padding
    batches = []
    for first in range(0, len(texts), rows):
        chosen = texts[first : first + rows]
        width = max(len(prompt) + len(response) for prompt, response in chosen)
        tokens = torch.full((rows, width), ids[PAD])
        labels = torch.full((rows, width), _IGNORED)
        for row, (prompt, response) in enumerate(chosen):
            line = torch.tensor([ids[word] for word in prompt + response])
            tokens[row, : len(line)] = line
            labels[row, len(prompt) : len(line)] = line[len(prompt) :]
        batches.append((tokens, labels))
    rng.shuffle(batches)
    return batches
