"""What a server's answers must look like; other answers are errors and never stored."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["Odd", "Piece", "read_completion", "read_models", "read_prompt_logprobs", "read_tokens"]

_SHOWN = 200


class Odd(ValueError):
    """An answer with status 200 that is unusable; the message says why."""


class Piece(NamedTuple):
    """What a completion adds to a trajectory: (n,) ids, and (n, L) best log-probabilities."""

    tokens: list[int]
    top_ids: NDArray[np.int32]
    top_logprobs: NDArray[np.float32]


def read_completion(content: Any, *, top: int, most: int, vocab_size: int) -> Piece:
    """Reads a completion.

    Args:
        content: The answer's JSON.
        top: Log-probabilities asked for at each step.
        most: Tokens asked for.
        vocab_size: Ids are below it.

    Raises:
        Odd: It is no answer to what was asked.
    """
    choice = _choice(content)
    tokens = _ids(choice.get("token_ids"), vocab_size, "token_ids")
    if not 1 <= len(tokens) <= most:
        raise Odd(f"{len(tokens)} tokens where 1 to {most} were asked for")
    logprobs = choice.get("logprobs")
    steps = logprobs.get("top_logprobs") if isinstance(logprobs, dict) else None
    if not isinstance(steps, list) or len(steps) != len(tokens):
        n = len(steps) if isinstance(steps, list) else "no"
        raise Odd(f"log-probabilities of {n} steps for {len(tokens)} tokens")
    ids = np.empty((len(steps), top), dtype=np.int32)
    values = np.empty((len(steps), top), dtype=np.float32)
    for n, step in enumerate(steps):
        ids[n], values[n] = _best(step, top, vocab_size)
    return Piece(tokens, ids, values)


def read_prompt_logprobs(content: Any, prompt: list[int]) -> list[float]:
    """The log-probability of each token of a prompt but the first, given those before it."""
    found = _choice(content).get("prompt_logprobs")
    if not isinstance(found, list) or len(found) != len(prompt):
        raise Odd("no prompt_logprobs of the prompt's length")
    values = []
    for token, step in zip(prompt[1:], found[1:], strict=True):
        entry = step.get(str(token)) if isinstance(step, dict) else None
        value = entry.get("logprob") if isinstance(entry, dict) else None
        values.append(_number(value, f"the log-probability of token {token}"))
    return values


def read_models(content: Any) -> dict[str, dict[str, Any]]:
    """What a server serves, by name."""
    data = content.get("data") if isinstance(content, dict) else None
    if not isinstance(data, list) or not data:
        raise Odd(f"no list of models ({_shown(content)})")
    models = {}
    for entry in data:
        if not isinstance(entry, dict) or not isinstance(entry.get("id"), str):
            raise Odd(f"a model without an id ({_shown(entry)})")
        models[entry["id"]] = entry
    return models


def read_tokens(content: Any) -> list[int]:
    """Token ids of a text."""
    return _ids(content.get("tokens") if isinstance(content, dict) else None, 2**31, "tokens")


def _choice(content: Any) -> dict[str, Any]:
    choices = content.get("choices") if isinstance(content, dict) else None
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        raise Odd(f"no single choice ({_shown(content)})")
    return choices[0]


def _ids(value: Any, vocab_size: int, name: str) -> list[int]:
    if not isinstance(value, list):
        raise Odd(f"no {name} ({_shown(value)})")
    for token in value:
        if type(token) is not int or not 0 <= token < vocab_size:
            raise Odd(f"{name} with {_shown(token)}; this model's ids are 0 to {vocab_size - 1}")
    return value


def _best(step: Any, top: int, vocab_size: int) -> tuple[list[int], list[float]]:
    """The highest of a mapping from "token_id:17" to its log-probability, best first."""
    if not isinstance(step, dict):
        raise Odd(f"log-probabilities of a step as {_shown(step)}")
    pairs = []
    for name, value in step.items():
        number = name.removeprefix("token_id:")
        if not number.isdecimal() or int(number) >= vocab_size:
            raise Odd(f"a log-probability of {_shown(name)}")
        pairs.append((int(number), _number(value, f"the log-probability of {name}")))
    if len(pairs) < top:
        raise Odd(f"{len(pairs)} log-probabilities at a step where {top} were asked for")
    pairs.sort(key=lambda pair: -pair[1])
    return [token for token, _ in pairs[:top]], [value for _, value in pairs[:top]]


def _number(value: Any, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        raise Odd(f"{what} is {_shown(value)}")
    return float(value)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
