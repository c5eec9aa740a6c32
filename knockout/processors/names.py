"""Reading back which interventions a row of processed log-probabilities names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["Differing", "NotProcessed", "differing", "names_of"]

# What engines send in the place of −∞ (JSON has none).
_ABSENT = -5000.0


class NotProcessed(ValueError):
    """The log-probabilities are not those of a row that our processor made."""


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
    """
    own = logprobs[ids == token]
    if not len(own):
        raise NotProcessed("the emitted token is not among the highest")
    there = (logprobs > _ABSENT) & (ids != token)
    if not there.any():
        return Differing(())
    exact = np.asarray(own[0] - logprobs[there], dtype=np.float64)
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


def differing(
    tokens: Sequence[int],
    ids: NDArray[np.integer] | None,
    logprobs: NDArray[np.floating] | None,
    width: int,
) -> list[Differing]:
    """`names_of` for n steps: (n,) tokens, (n, K) ids and log-probabilities."""
    if ids is None or logprobs is None:
        raise NotProcessed("there are none")
    return [names_of(*step, width) for step in zip(tokens, ids, logprobs, strict=True)]
