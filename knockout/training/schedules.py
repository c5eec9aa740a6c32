"""How the weight λ of frozen positions changes during training."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Constant", "FollowKL", "Linear", "Schedule"]

Schedule = Callable[[int, float], float]
"""From the optimiser step (0 for the first) and the running mean KL (nats, NaN while unknown) to λ."""


def _check_share(name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise ValueError(f"{name} is {value}; expected a number in [0, 1]")


@dataclass(frozen=True, slots=True)
class Constant:
    """The same λ throughout."""

    weight: float = 0.0

    def __post_init__(self) -> None:
        _check_share("weight", self.weight)

    def __call__(self, step: int, kl: float) -> float:
        return self.weight


@dataclass(frozen=True, slots=True)
class Linear:
    """From `start` to `end` in a straight line over `steps` optimiser steps, then `end`.

    Example:
        >>> [Linear(1.0, 0.0, 4)(step, 0.0) for step in (0, 1, 4, 9)]
        [1.0, 0.75, 0.0, 0.0]
    """

    start: float
    end: float
    steps: int

    def __post_init__(self) -> None:
        _check_share("start", self.start)
        _check_share("end", self.end)
        if self.steps < 1:
            raise ValueError(f"steps is {self.steps}; expected 1 or more")

    def __call__(self, step: int, kl: float) -> float:
        done = min(max(step / self.steps, 0.0), 1.0)
        return self.start + (self.end - self.start) * done


@dataclass(frozen=True, slots=True)
class FollowKL:
    """λ follows the KL: 1 while the mean KL is at `high` or above, `end` at `low` or below.

    Between them λ goes in a straight line. So frozen types take part while the whole student still
    learns fast, and are let go when it has come close to its teacher.

    Attributes:
        high: In nats.
        low: In nats, below `high`.
        end: λ at `low` and below.
    """

    high: float
    low: float
    end: float = 0.0

    def __post_init__(self) -> None:
        _check_share("end", self.end)
        if not 0 <= self.low < self.high:
            raise ValueError(f"low is {self.low}, high is {self.high}; expected 0 ≤ low < high")

    def __call__(self, step: int, kl: float) -> float:
        if math.isnan(kl):
            return 1.0
        share = min(max((kl - self.low) / (self.high - self.low), 0.0), 1.0)
        return self.end + (1.0 - self.end) * share
