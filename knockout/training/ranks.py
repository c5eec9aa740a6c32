"""Sums and lists over the processes of a distributed run; of one process, the thing itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

__all__ = ["gather", "n_ranks", "rank", "summed"]


def rank() -> int:
    """Which of them this is, from 0."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def n_ranks() -> int:
    """How many processes train together."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def summed(values: Tensor) -> Tensor:
    """The sum of a tensor over all processes; a collective."""
    if n_ranks() == 1:
        return values
    device = torch.device("cuda") if dist.get_backend() == "nccl" else torch.device("cpu")
    total = values.detach().clone().to(device)
    dist.all_reduce(total)
    return total.to(values.device)


def gather(value: Any) -> list[Any]:
    """What each process has, in the order of their ranks; a collective."""
    if n_ranks() == 1:
        return [value]
    found: list[Any] = [None] * n_ranks()
    dist.all_gather_object(found, value)
    return found
