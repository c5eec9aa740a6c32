"""A check at start-up that an engine does what we ask: bans hold, and picks are ours.

Engines have been seen to skip custom processors without an error (under speculative decoding, or
for greedy requests), so no run starts on trust.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from knockout.engines.base import Completion, Engine, Request, generate
from knockout.errors import KnockoutError
from knockout.method.sampling import Rows, Sampling, pick

__all__ = ["check_bans_hold"]

_TOP = 24
_SAMPLING = Sampling(temperature=0.8, top_k=20)
_SEED = 20240229
# Two log-probabilities closer than this may change places by rounding.
_ROUNDING = 0.05


def check_bans_hold(engine: Engine) -> None:
    """Runs a few one-token requests and compares the answers with `sampling.py`.

    Raises:
        KnockoutError: A banned token came out, or a pick is not ours.
    """
    width = engine.info.vocab_size
    prompt = tuple(int(i) for i in torch.arange(3, 11) * 37 % width)
    top = min(_TOP, width)
    plain = Request(
        key="canary-greedy",
        prompt=prompt,
        seed=_SEED,
        sampling=Sampling(temperature=0),
        max_tokens=1,
        logprobs=top,
    )
    first = _answer(engine, plain)
    assert first.top_ids is not None
    best = int(first.top_ids[0, 0])
    banned = replace(plain, key="canary-ban", banned=(best,))
    sampled = replace(plain, key="canary-pick", sampling=_SAMPLING, banned=(best,))
    answers = {c.key: c for c in generate(engine, [banned, sampled])}
    for completion in answers.values():
        if completion.finish == "error":
            raise _failed(engine, f"a request failed: {completion.error}")
        if int(completion.tokens[0]) == best:
            raise _failed(engine, f"token {best} was banned and came out ({completion.key})")

    if not _matches(first, (), plain):
        raise _failed(engine, "the greedy token is not the most probable one")
    for request in (banned, sampled):
        if not _matches(answers[request.key], request.banned, request):
            raise _failed(engine, f"its token is not the one that we picked ({request.key})")


def _answer(engine: Engine, request: Request) -> Completion:
    (completion,) = generate(engine, [request])
    if completion.finish == "error":
        raise _failed(engine, f"a request failed: {completion.error}")
    return completion


def _matches(answer: Completion, banned: tuple[int, ...], request: Request) -> bool:
    """Whether the emitted token is the pick from the reported log-probabilities.

    A token that only rounding separates from the pick passes.
    """
    assert answer.top_ids is not None
    assert answer.top_logprobs is not None
    ids = torch.from_numpy(answer.top_ids[0]).long()
    row = torch.full((1, int(ids.max()) + 1), -math.inf)
    row[0, ids] = torch.from_numpy(answer.top_logprobs[0])
    row[0, list(banned)] = -math.inf
    rows = Rows([request.sampling], [request.seed])
    position = torch.tensor([len(request.prompt)])
    emitted = int(answer.tokens[0])
    picked = int(pick(row, rows, position)[0])
    if picked == emitted:
        return True
    # Would a change of the size of rounding make it the pick?
    if emitted >= row.shape[1]:
        return False
    row[0, emitted] += _ROUNDING
    return int(pick(row, rows, position)[0]) == emitted


def _failed(engine: Engine, what: str) -> KnockoutError:
    info = engine.info
    return KnockoutError(
        f"the start-up check failed on {info.kind} {info.runner}: {what}. Bans would not be real "
        "in this engine. Look for speculative decoding, other logits processors, or another "
        f"version ({', '.join(f'{k} {v}' for k, v in info.versions.items())})."
    )
