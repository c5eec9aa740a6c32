"""The running mean KL of all tokens, which a schedule of λ may follow."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from knockout.training.ranks import summed

__all__ = ["RunningKl"]


class RunningKl:
    """A mean over about the last ten steps and all processes, in nats; NaN before the first step.

    Positions that a step skips have no KL. They count with the mean of the last step that measured
    skipped positions (`Selection.watch_every`).
    """

    def __init__(self) -> None:
        self.value = math.nan
        self._skipped = math.nan
        # Of the current step, on this process: sum and number of measured KLs, the same of skipped
        # positions that were watched, and the number of those that were not.
        self._pending = torch.zeros(5, dtype=torch.float64)
        self._step = -1
        self.planned = 0  # tokens of the step's plan; `Selector.reach` may leave some out

    def state_dict(self) -> dict[str, Any]:
        """Floats, strings and tensors that `load_state_dict` takes."""
        return {
            "running_kl": self.value,
            "skipped_kl": self._skipped,
            "pending": self._pending.cpu().clone(),
            "planned": self.planned,
            "step": self._step,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores a state; a wrong one raises what Python raises and changes nothing."""
        numbers = float(state["running_kl"]), float(state["skipped_kl"])
        counts = int(state["step"]), int(state["planned"])
        self._pending = state["pending"].double().reshape(5)
        (self.value, self._skipped), (self._step, self.planned) = numbers, counts

    def advance(self, step: int) -> None:
        """Begins a step, if it is a new one: adds the last step's KL. A collective."""
        if step == self._step:
            return
        self._step = step
        measured, n, skipped, n_skipped, n_unknown = summed(self._pending).tolist()
        self._pending = torch.zeros_like(self._pending)
        n_unknown = max(n_unknown, self.planned - n - n_skipped)
        self.planned = 0
        if n_skipped:
            self._skipped = skipped / n_skipped
        total = measured + skipped
        if n_unknown:
            total += n_unknown * self._skipped
        count = n + n_skipped + n_unknown
        if not count or math.isnan(total):
            return
        kl = total / count
        self.value = kl if math.isnan(self.value) else 0.9 * self.value + 0.1 * kl

    def add(self, kl: Tensor, skipped: Tensor) -> None:
        """Adds a batch to the step: the KL (N,), NaN if not measured, and which were skipped."""
        known = ~kl.isnan()
        seen, unseen = skipped & known, skipped & ~known
        measured = known & ~skipped
        sums = torch.stack(
            [kl[measured].sum(), measured.sum(), kl[seen].sum(), seen.sum(), unseen.sum()]
        )
        self._pending = self._pending.to(kl.device) + sums.double()
