"""A check at start-up that an engine does what we ask.

Engines have been seen to skip custom processors without an error (under speculative decoding, or
for greedy requests), and to decode a kind of model without its context. So every run starts with a check.

At a very high temperature logits hardly matter: the pick is the largest noise, which is known here
without any logits. That shows that picks, seeds, positions, bans, replacements and the answers to
watched interventions are ours, and that nothing picks again from a row that we have decided.
Decoding is then compared with fresh forward passes over the same tokens.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from knockout.engines.base import Completion, Engine, Request, generate
from knockout.errors import KnockoutError
from knockout.method.interventions import Intervention, ban
from knockout.method.sampling import Sampling, gumbel

__all__ = ["check_bans_hold"]

# Enough for a step to return as many numbers as it ever may.
_WATCHED = 40
_HOT = Sampling(temperature=1e7)
_SEED = 20240229
_LENGTH = 5
# The share of compared tokens that may differ when they are computed again (near ties under
# rounding); a model that decodes without its context agrees only by luck.
_TRAJECTORIES = 4
_MOST_DIFFERING = 0.3


def check_bans_hold(engine: Engine) -> None:
    """Runs a few short requests and compares their tokens with what they must be.

    Raises:
        KnockoutError: A ban does not hold, a pick is not ours, an answer about a watched
            intervention is wrong, or decoding does not see its context.
    """
    width = engine.info.vocab_size
    prompt = tuple(int(i) for i in torch.arange(3, 11) * 37 % width)
    tokens = torch.arange(width)
    noise = gumbel(torch.tensor(_SEED), torch.tensor(len(prompt)), tokens)
    first, second, third, *others = noise.topk(min(_WATCHED, width)).indices.tolist()
    watch: tuple[Intervention, ...] = (
        ban((first,)),
        ban((second,)),
        Intervention("replace", (first,), replacement=third),
    )
    watch += tuple(ban((token,)) for token in others)
    # Emits the token with the least noise and marks others: a second pick would take one of those.
    lowest = int(noise.argmin())
    swap = Intervention("replace", (first,), replacement=lowest)
    plain = Request("canary-pick", prompt, _SEED, _HOT, max_tokens=1, watch=watch)
    requests = [
        plain,
        replace(plain, key="canary-ban", intervention=watch[0], watch=()),
        replace(plain, key="canary-fork", intervention=watch[0], watch=watch[:2]),
        replace(plain, key="canary-swap", intervention=swap, watch=watch[:2]),
    ]
    found = _run(engine, requests)
    if int(found["canary-ban"].tokens[0]) == first:
        raise _failed(engine, f"token {first} was banned and came out")
    for key, want in (
        ("canary-pick", first),
        ("canary-ban", second),
        ("canary-fork", second),
        ("canary-swap", lowest),
    ):
        if (token := int(found[key].tokens[0])) != want:
            raise _failed(engine, f"its token {token} is not the {want} that we picked ({key})")
    for key, changes in (
        ("canary-pick", [0, -1, 0] + [-1] * len(others)),
        ("canary-fork", [-1, 0]),
        ("canary-swap", [0, 0]),
    ):
        told = found[key].changes
        if told is None or told.tolist() != changes:
            raise _failed(
                engine,
                f"asked which interventions would have changed a pick, it answers {told}, not "
                f"{changes}; its log-probabilities must be the processed ones",
            )
    _check_context(engine, prompt)


def _check_context(engine: Engine, prompt: tuple[int, ...]) -> None:
    """Compares decoded tokens with the first ones after the same tokens as a fresh prompt."""
    plain = Request("canary", prompt, _SEED, Sampling(temperature=1.0), max_tokens=_LENGTH)
    paths = [replace(plain, key=f"canary-{n}", seed=_SEED + n) for n in range(_TRAJECTORIES)]
    found = _run(engine, paths)
    again = [
        replace(
            path,
            key=f"{path.key}-{step}",
            prefix=tuple(found[path.key].tokens[:step].tolist()),
            max_tokens=step + 1,
        )
        for path in paths
        for step in range(1, len(found[path.key].tokens))
    ]
    fresh = _run(engine, again)
    otherwise = 0
    for request in again:
        name, step = request.key.rsplit("-", 1)
        otherwise += int(fresh[request.key].tokens[-1] != found[name].tokens[int(step)])
    if otherwise > max(1, _MOST_DIFFERING * len(again)):
        raise _failed(
            engine,
            f"{otherwise} of {len(again)} decoded tokens differ from a fresh forward pass over the "
            "tokens before them, so this engine decodes this model without its context",
        )


def _run(engine: Engine, requests: list[Request]) -> dict[str, Completion]:
    found = {done.key: done for done in generate(engine, requests)}
    for done in found.values():
        if done.finish == "error":
            raise _failed(engine, f"a request failed: {done.error}")
    return found


def _failed(engine: Engine, what: str) -> KnockoutError:
    info = engine.info
    return KnockoutError(
        f"the start-up check failed on {info.kind} {info.runner}: {what}. Knockouts would not be "
        "real in this engine. Look for speculative decoding, other logits processors, or another "
        f"version ({', '.join(f'{k} {v}' for k, v in info.versions.items())})."
    )
