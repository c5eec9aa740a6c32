"""The token scores: what a position is worth, by name.

A score is one function from the scores of N positions (`PositionScores`) to (N,), higher for a
position that one would rather train on. A budget ranks positions by it, and `knockout mine --by
NAME` ranks types by its mean. A package of your own adds one with `token_score`, and names its
module in the entry-point group `knockout.token_scores`, so that the commands know it too.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from knockout.errors import UsageError
from knockout.mining.kl import PositionScores, efficiency_ratio
from knockout.registry import Registry

__all__ = ["TokenScore", "product_of", "score_names", "score_positions", "token_score"]

TokenScore = Callable[[PositionScores], Tensor]

_SCORES: Registry[TokenScore] = Registry("token score", "knockout.token_scores")


def token_score(name: str) -> Callable[[TokenScore], TokenScore]:
    """Registers a token score under a name; a decorator.

    Raises:
        UsageError: The name is taken, or contains what separates names.
    """
    if not name.isidentifier():
        raise UsageError(f"token score {name!r}: expected a name of letters, digits and _")

    def add(score: TokenScore) -> TokenScore:
        _SCORES.add(name, score, score)
        return score

    return add


def score_names() -> tuple[str, ...]:
    """The names of all scores, sorted."""
    return tuple(sorted(_SCORES.names()))


def product_of(text: str) -> tuple[str, ...]:
    """The names in a score such as `entropy` or `entropy*kl`.

    Raises:
        UsageError: One of them is no score.
    """
    names = tuple(part.strip() for part in text.split("*"))
    for name in names:
        if name not in score_names():
            raise UsageError(f"score {text!r}: no {name!r}; there are {', '.join(score_names())}")
    return names


def score_positions(text: str, found: PositionScores) -> Tensor:
    """Scores positions by a name or a product of names.

    Args:
        text: As in `product_of`.
        found: Scores of N positions: of one batch, if the score looks at more than one.

    Returns:
        (N,) float32.
    """
    score = torch.ones_like(found.entropy)
    for name in product_of(text):
        score = score * _SCORES.find(name)(found)
    return score


@token_score("kl")
def _kl(found: PositionScores) -> Tensor:
    return found.reverse_kl


@token_score("entropy")
def _entropy(found: PositionScores) -> Tensor:
    return found.entropy


@token_score("teacher_gap")
def _teacher_gap(found: PositionScores) -> Tensor:
    return found.teacher_gap


@token_score("efficiency")
def _efficiency(found: PositionScores) -> Tensor:
    return efficiency_ratio(found.signal, found.noise)


@token_score("soft_or")
def soft_or(found: PositionScores) -> Tensor:
    """Soft-OR of entropy and divergence (TIP, arXiv 2604.14084): 1 − (1 − h)(1 − d).

    h and d are the student's entropy and the reverse KL, each scaled to [0, 1] by its least and
    largest value in the batch. High if the student is unsure, or sure and wrong.
    """
    h, d = _unit(found.entropy), _unit(found.reverse_kl)
    return h + d - h * d


def _unit(x: Tensor) -> Tensor:
    """x scaled to [0, 1]; 0 if all are the same, or there are none."""
    if not x.numel():
        return x
    low, high = x.amin(), x.amax()
    return (x - low) / (high - low) if bool(high > low) else torch.zeros_like(x)
