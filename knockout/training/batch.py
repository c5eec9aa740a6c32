"""A batch of a training step, what its parts have in common, and what comes out."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from knockout.mining.kl import PositionScores
from knockout.training.divergence import Listed
from knockout.training.heads import Head

__all__ = ["Batch", "Part", "Plan", "StepLoss", "step_metrics"]


@dataclass(frozen=True, slots=True)
class StepLoss:
    """A batch's loss.

    Attributes:
        loss: () float32, with gradient.
        weights: (B, T) float32, as applied.
        metrics: For the log; a value that was not measured is NaN.
        entropy_sum: () sum of the student's entropy over the positions that were projected.
        n_projected: () how many those are.
    """

    loss: Tensor
    weights: Tensor
    metrics: dict[str, float]
    entropy_sum: Tensor
    n_projected: Tensor


@dataclass(frozen=True, slots=True)
class Part:
    """What a part of a step's batch adds to its `Plan`.

    Attributes:
        n_tokens: Response tokens (within `max_tokens`).
        weight: Their summed weight; 0 for a budget, which weighs them later.
        scores: Of a budget: those of its n positions, on the CPU.
        pillars: (n,) bool of a budget, which positions are kept on top of it.
    """

    n_tokens: int
    weight: float
    scores: PositionScores | None = None
    pillars: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """What all parts of a step's batch have in common.

    Attributes:
        denominator: What the summed loss of all parts is divided by.
        kept: Of a budget, for each of this process's parts: (n,) bool, which positions it keeps.
            Empty without one.
    """

    denominator: float
    kept: tuple[Tensor, ...] = ()


class Batch:
    """Labels and states of a batch, and those of its valid positions as rows."""

    def __init__(
        self,
        labels: Tensor,
        valid: Tensor,
        student: tuple[Tensor, Head],
        teacher: tuple[Tensor | Listed, Head | None],
        temperature: float,
        chunk: int | None,
    ) -> None:
        self.labels, self.valid = labels, valid
        self.flat = torch.nonzero(valid.flatten())[:, 0]
        self.emitted = labels.flatten()[self.flat]
        self.states = student[0].flatten(0, 1)[self.flat]
        target = teacher[0]
        self.targets: Tensor | Listed = (
            Listed(*(x.flatten(0, 1)[self.flat] for x in target))
            if isinstance(target, Listed)
            else target.flatten(0, 1)[self.flat]
        )
        self.student, self.teacher = student[1], teacher[1]
        self.temperature, self.chunk = temperature, chunk

    def table(self, values: Tensor) -> Tensor:
        """(N,) of the valid positions as (B, T), 0 elsewhere."""
        room = torch.zeros(self.labels.numel(), device=self.labels.device)
        return room.index_copy(0, self.flat, values.float()).view(self.labels.shape)

    def rows(self, table: Tensor) -> Tensor:
        """(B, T) as (N,) of the valid positions."""
        return table.flatten()[self.flat]


def step_metrics(
    weights: Tensor, kl: Tensor, norm: Tensor, weight: float, n_projected: int
) -> dict[str, float]:
    """Of the (N,) positions of responses; means over none, or over unmeasured ones, are NaN."""
    frozen = weights < 1
    n = max(weights.numel(), 1)
    return {
        "frozen_share": float(frozen.sum()) / n,
        "skipped_share": 1 - n_projected / n,
        "frozen_weight": weight,
        "kl_trained": float(kl[~frozen].nanmean()),
        "kl_frozen": float(kl[frozen].nanmean()),
        "logit_grad_norm_trained": float(norm[~frozen].nanmean()),
        "logit_grad_norm_frozen": float(norm[frozen].nanmean()),
    }
