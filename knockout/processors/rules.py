"""What a request asks of a logits processor, read from flat `extra_args` keys.

The keys are flat because the OpenAI-style server's `vllm_xargs` takes no nested values. A request
with `knockout_ids` alone is a *plain ban*: the engine goes on to sample as it likes. A request
with `knockout_temperature` is *coupled*: our own pick decides, and the engine must be told to be
greedy so that it takes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from knockout.method.sampling import Sampling

__all__ = ["KEYS", "Rule", "check_ids", "rule_from_extra_args"]

KEYS = (
    "knockout_ids",
    "knockout_seed",
    "knockout_temperature",
    "knockout_top_p",
    "knockout_top_k",
    "knockout_min_p",
    "knockout_name",
)
_PREFIX = "knockout_"
_TRUNCATION = ("knockout_top_p", "knockout_top_k", "knockout_min_p")


@dataclass(frozen=True, slots=True)
class Rule:
    """One request's ban and, where it is coupled, its sampling.

    Attributes:
        banned: Token ids, each once, ascending.
        sampling: Settings of the coupled pick, or None where the engine samples.
        seed: Seed of the noise; 0 where nothing is sampled.
        name: What errors call the request.
    """

    banned: tuple[int, ...]
    sampling: Sampling | None
    seed: int
    name: str

    @property
    def coupled(self) -> bool:
        """Whether our own pick decides."""
        return self.sampling is not None

    def __str__(self) -> str:
        shown = ", ".join(map(str, self.banned[:8]))
        if len(self.banned) > 8:
            shown += f", ... ({len(self.banned)} ids)"
        return f"request {self.name or '(unnamed)'} (banned: {shown or 'nothing'})"


def check_ids(ids: Any, *, width: int | None = None, where: str = "knockout_ids") -> list[int]:
    """Returns token ids as a sorted list without repeats.

    Args:
        ids: What a user gave.
        width: Width of the logits, where known; ids must be below it.
        where: What the message calls the place they came from.

    Raises:
        ValueError: Not a list, or an entry is no token id; the message shows it.
    """
    if not isinstance(ids, list | tuple):
        raise ValueError(f"{where} is {ids!r}; expected a list of token ids")
    for token in ids:
        if type(token) is not int:
            raise ValueError(
                f"{where} holds {token!r} ({type(token).__name__}); expected whole numbers"
            )
        if token < 0 or (width is not None and token >= width):
            limit = "0 or more" if width is None else f"from 0 to {width - 1}"
            raise ValueError(f"{where} holds {token}; this model's token ids are {limit}")
    return sorted(set(ids))


def _number(args: Mapping[str, Any], key: str, default: float) -> float:
    value = args.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{key} is {value!r}; expected a number")
    return float(value)


def rule_from_extra_args(extra_args: Mapping[str, Any] | None) -> Rule | None:
    """Reads a request's rule; None where it carries none of our keys.

    Args:
        extra_args: `SamplingParams.extra_args`.

    Raises:
        ValueError: A key that starts with "knockout_" is unknown, or a value is out of place.
    """
    ours = {k: v for k, v in (extra_args or {}).items() if str(k).startswith(_PREFIX)}
    if not ours:
        return None
    if unknown := sorted(set(ours) - set(KEYS)):
        raise ValueError(f"unknown key {', '.join(unknown)}; known keys are {', '.join(KEYS)}")
    name = ours.get("knockout_name", "")
    if not isinstance(name, str):
        raise ValueError(f"knockout_name is {name!r}; expected a string")
    banned = tuple(check_ids(ours.get("knockout_ids", ())))

    if "knockout_temperature" not in ours:
        stray = [k for k in ("knockout_seed", *_TRUNCATION) if k in ours]
        if stray:
            raise ValueError(f"{', '.join(stray)} without knockout_temperature changes nothing")
        if not banned:
            raise ValueError("knockout_ids is empty; expected at least one token id")
        return Rule(banned=banned, sampling=None, seed=0, name=name)

    top_k = ours.get("knockout_top_k", 0)
    if type(top_k) is not int:
        raise ValueError(f"knockout_top_k is {top_k!r}; expected a whole number")
    try:
        sampling = Sampling(
            temperature=_number(ours, "knockout_temperature", 1.0),
            top_p=_number(ours, "knockout_top_p", 1.0),
            top_k=top_k,
            min_p=_number(ours, "knockout_min_p", 0.0),
        )
    except ValueError as error:
        text = str(error)
        raise ValueError(text if text.startswith(_PREFIX) else _PREFIX + text) from None
    seed = ours.get("knockout_seed")
    if seed is None and sampling.greedy:
        seed = 0
    if seed is None:
        raise ValueError("knockout_temperature without knockout_seed; coupled noise needs a seed")
    if type(seed) is not int or not 0 <= seed < 2**63:
        raise ValueError(f"knockout_seed is {seed!r}; expected a whole number, 0 to 2^63 − 1")
    return Rule(banned=banned, sampling=sampling, seed=seed, name=name)
