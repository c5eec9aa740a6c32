"""Reading back what a row of processed log-probabilities says: interventions, or a failure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "FAILED",
    "Differing",
    "NotProcessed",
    "NotSampled",
    "Told",
    "names_of",
    "told",
    "told_by_own",
]

# Why a row could not be sampled from; the nth is told by n entries half a step below the token's.
FAILED = ("its highest logit is NaN or infinite", "every token is banned")

# What engines send in the place of −∞ (JSON has none).
_ABSENT = -5000.0


class NotProcessed(ValueError):
    """The log-probabilities are not those of a row that our processor made."""


class NotSampled(ValueError):
    """The row says that it could not be sampled from; the message says why."""


class Differing(NamedTuple):
    """What is said of one step.

    Attributes:
        named: Indices of watched interventions that would have picked another token.
        and_more: Whether others would have too, which did not fit.
    """

    named: Sequence[int]
    and_more: bool = False


def names_of(
    token: int, ids: NDArray[np.integer], logprobs: NDArray[np.floating], width: int
) -> Differing:
    """Reads what `mark_` wrote.

    Args:
        token: The emitted token.
        ids: (K,) the highest entries of the row, the token's own among them.
        logprobs: (K,) their processed log-probabilities.
        width: Width of the logits.

    Raises:
        NotProcessed: These are not differences that `mark_` makes.
        NotSampled: What `mark_failure_` wrote.
    """
    own = logprobs[ids == token]
    if not len(own):
        raise NotProcessed("the emitted token is not among the highest")
    there = (logprobs > _ABSENT) & (ids != token)
    if not there.any():
        return Differing(())
    exact = np.asarray(own[0] - logprobs[there], dtype=np.float64)
    if (np.abs(exact - 0.5) < 0.01).all() and len(exact) <= len(FAILED):
        raise NotSampled(FAILED[len(exact) - 1])
    marks = np.rint(exact).astype(np.int64)
    if (np.abs(exact - marks) > 0.01).any() or (marks < 1).any():
        raise NotProcessed("the log-probabilities are not whole steps below the token's")
    columns = ids[there].astype(np.int64)
    columns = columns - (columns > token)
    room = width - 2
    more = columns == room
    named: list[int] = []
    for column, mark in zip(columns[~more].tolist(), marks[~more].tolist(), strict=True):
        block = 0
        while mark >> block:
            if mark >> block & 1:
                named.append(column + block * room)
            block += 1
    return Differing(named, bool(more.any()))


class Told(NamedTuple):
    """What is said of several steps.

    Attributes:
        good: Steps before the one that failed, or all.
        failed: Why the next one could not be sampled; None if all could.
        differing: One for each good step, if something is watched.
    """

    good: int
    failed: str | None = None
    differing: Sequence[Differing] = ()


def told(
    tokens: Sequence[int],
    ids: NDArray[np.integer],
    logprobs: NDArray[np.floating],
    width: int,
) -> Told:
    """Reads n steps of a request that watches.

    Args:
        tokens: (n,) emitted.
        ids: (n, K) the highest entries of each row, the token's own among them.
        logprobs: (n, K) their processed log-probabilities.
        width: Width of the logits.

    Raises:
        NotProcessed: The rows are not those that our processor made.
    """
    found: list[Differing] = []
    try:
        for step in zip(tokens, ids, logprobs, strict=True):
            found.append(names_of(*step, width))  # noqa: PERF401 - those before a failure stay
    except NotSampled as failure:
        return Told(len(found), str(failure), found)
    return Told(len(found), None, found)


def told_by_own(own: Sequence[float]) -> Told:
    """Reads n steps of a request that watches nothing; plain numbers, for it runs at every token.

    Args:
        own: (n,) processed log-probability of each emitted token, the highest of its row.

    Raises:
        NotProcessed: The rows are not those that our processor made.
    """
    for step, value in enumerate(own):
        if value < -0.01:
            return Told(step, _why(value))
    return Told(len(own))


def _why(own: float) -> str:
    """The reason that a token's own log-probability tells: −log(1 + n e^(−1/2)) is the nth."""
    for n, reason in enumerate(FAILED, start=1):
        if abs(own + math.log1p(n * math.exp(-0.5))) < 0.01:
            return reason
    raise NotProcessed(f"the log-probability of an emitted token is {own:.3g} and not 0")
