"""Log-likelihoods of given continuations under a ban, for both engines.

Under a ban B the policy is softmax over the tokens outside B, so a continuation token t has
log p(t) − log(1 − Σ_{b in B} p(b)), with p the untouched softmax at temperature 1, and −∞ where t
is in B.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

__all__ = ["Pair", "Scored", "score_with_model", "score_with_vllm"]

Pair = tuple[Sequence[int], Sequence[int]]
"""Token ids of a context (not empty) and of its continuation."""

# Most numbers in one batch's logits (1 GB in float32).
_MOST_LOGITS = 2**28


class Scored(NamedTuple):
    """A continuation's log-likelihood, and whether greedy decoding under the ban would give it."""

    logprob: float
    greedy: bool


@torch.inference_mode()
def score_with_model(
    model: Any,
    pairs: Sequence[Pair],
    banned: Sequence[int],
    *,
    device: torch.device,
    tokens_per_batch: int,
    padding: bool,
    vocab_size: int,
) -> list[Scored]:
    """Scores with a transformers model.

    Args:
        model: A causal language model.
        pairs: Contexts and continuations.
        banned: Ids inside the logits.
        device: The model's.
        tokens_per_batch: Most tokens of a forward pass, padding included.
        padding: Whether sequences of different lengths may share a batch.
        vocab_size: Width of the logits.

    Returns:
        One result a pair, in their order.
    """
    results: list[Scored | None] = [Scored(0.0, True) if not pair[1] else None for pair in pairs]
    order = sorted(
        (i for i, pair in enumerate(pairs) if pair[1]),
        key=lambda i: len(pairs[i][0]) + len(pairs[i][1]),
    )
    ban = torch.tensor(list(banned), dtype=torch.int64, device=device)
    while order:
        batch = [order.pop()]  # the longest first: what does not fit shows at once
        width = len(pairs[batch[0]][0]) + len(pairs[batch[0]][1]) - 1
        answer = len(pairs[batch[0]][1])
        while order and padding:
            answer_if = max(answer, len(pairs[order[-1]][1]))
            n = len(batch) + 1
            if width * n > tokens_per_batch or answer_if * n * vocab_size > _MOST_LOGITS:
                break
            batch.append(order.pop())
            answer = answer_if
        for i, scored in zip(
            batch, _forward(model, [pairs[i] for i in batch], ban, answer, device), strict=True
        ):
            results[i] = scored
    return [scored for scored in results if scored is not None]


def _forward(
    model: Any, pairs: Sequence[Pair], ban: torch.Tensor, answer: int, device: torch.device
) -> list[Scored]:
    """One batch, padded on the left; `answer` is the length of the longest continuation."""
    rows = [[*context, *continuation][:-1] for context, continuation in pairs]
    lengths = torch.tensor([len(row) for row in rows])
    width = int(lengths.max())
    ids = torch.zeros(len(rows), width, dtype=torch.int64)
    for i, row in enumerate(rows):
        ids[i, width - len(row) :] = torch.tensor(row)
    mask = (torch.arange(width) >= width - lengths[:, None]).long()
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    output = model(
        input_ids=ids.to(device),
        attention_mask=mask.to(device),
        position_ids=positions.to(device),
        use_cache=False,
        logits_to_keep=answer,
    )
    logits = output.logits[:, -answer:].float()
    logits[..., ban] = -math.inf
    logprobs = logits.log_softmax(dim=-1)
    results = []
    for row, (_, continuation) in zip(logprobs, pairs, strict=True):
        part = row[-len(continuation) :]
        wanted = torch.tensor(list(continuation), device=device)
        total = float(part.gather(1, wanted[:, None]).double().sum())
        results.append(Scored(total, bool((part.argmax(dim=1) == wanted).all())))
    return results


def score_with_vllm(engine: Any, pairs: Sequence[Pair], banned: Sequence[int]) -> list[Scored]:
    """Scores with vLLM: one one-token request for each token of a continuation.

    Its log-probabilities of prompt tokens know nothing of a ban. So each request asks for the
    processed log-probability of the wanted id after the tokens before it, which are in the
    prefix cache; a plain ban acts before it is taken.

    Args:
        engine: vLLM's `LLMEngine`, idle.
        pairs: Contexts and continuations.
        banned: Ids inside the logits.

    Returns:
        One result a pair, in their order.
    """
    from vllm import SamplingParams

    ban = set(banned)
    asked: dict[str, int] = {}
    for i, (context, continuation) in enumerate(pairs):
        for j, token in enumerate(continuation):
            if token in ban:
                continue
            key = f"score-{i}-{j}"
            asked[key] = token
            params = SamplingParams(
                temperature=0,
                max_tokens=1,
                logprob_token_ids=[token],
                detokenize=False,
                extra_args={"knockout_ids": list(banned)} if banned else None,
            )
            prompt = {"prompt_token_ids": [*context, *continuation[:j]]}
            engine.add_request(key, prompt, params)
    logprob: dict[str, float] = {}
    best: dict[str, int] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                piece = output.outputs[0]
                logprob[output.request_id] = piece.logprobs[0][asked[output.request_id]].logprob
                best[output.request_id] = piece.token_ids[0]
    results = []
    for i, (_, continuation) in enumerate(pairs):
        total, greedy = 0.0, True
        for j, token in enumerate(continuation):
            if token in ban:
                total, greedy = -math.inf, False
                break
            total += logprob[f"score-{i}-{j}"]
            greedy &= best[f"score-{i}-{j}"] == token
        results.append(Scored(total, greedy))
    return results
