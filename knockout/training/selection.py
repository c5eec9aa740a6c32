"""What one training step does with a batch: who is frozen, what is skipped, what is logged.

`Selection` says which tokens a student is trained on. `Selector` applies it to batches of any
training loop; the TRL trainer and the plain loop of the examples both stand on it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from knockout.errors import KnockoutError, UsageError
from knockout.mining.kl import efficiency_ratio, score_hidden
from knockout.training.loss import Head, SelectiveLoss, project, selective_reverse_kl
from knockout.training.schedules import Constant, Schedule
from knockout.training.weights import (
    IGNORE,
    budget_weights,
    freeze_weights,
    near,
    random_windows,
    token_table,
)

__all__ = ["SCORES", "Selection", "Selector", "StepLoss"]

SCORES = ("efficiency", "entropy", "kl", "teacher_gap")
"""Token scores that a budget may rank by; several are multiplied: "entropy*kl"."""


@dataclass(frozen=True, slots=True)
class Selection:
    """Which tokens of its rollouts a student is trained on. All of them by default."""

    freeze_list: tuple[int, ...] = ()
    """Token ids to freeze: what `knockout export --freeze-list` writes."""
    pillars: tuple[int, ...] = ()
    """Token ids that are always trained on."""
    window: int = 0
    """Tokens to either side of a frozen one in which positions of high loss are frozen too."""
    threshold: float = math.inf
    """Loss above which a position of a window is frozen, in nats."""
    schedule: Schedule = field(default_factory=Constant)
    """λ, the weight of frozen positions, by step and KL. Only at λ = 0 is anything skipped."""
    control: bool = False
    """Moves the frozen windows to random places: the control arm of a freeze."""
    budget: float | None = None
    """Trains on this share of positions only, the best by `score`; instead of a freeze list."""
    score: str = "efficiency"
    """What the budget ranks by: names of `SCORES`, multiplied where joined by `*`."""
    max_tokens: int | None = None
    """Trains on the first tokens of each response only; what follows costs nothing at all."""
    merge: tuple[tuple[int, ...], ...] = ()
    """Groups of token ids that count as one action in the KL (ends of text)."""
    normalise: Literal["tokens", "trained"] = "tokens"
    """Divides the loss by all response tokens, so that a trained token weighs what it would weigh
    without freezing; or by the weight that is left, so that the whole loss keeps its size."""
    watch_every: int = 10
    """Steps between measurements of the KL of skipped positions, which costs what skipping saved.
    0 for never."""
    seed: int = 0
    """Of the control's random places."""

    def __post_init__(self) -> None:
        if self.budget is not None and (self.freeze_list or self.control):
            raise UsageError(
                "found budget beside freeze_list or control; a selection takes one of them"
            )
        if self.budget is not None and not 0 < self.budget <= 1:
            raise UsageError(f"budget is {self.budget}; expected a share in (0, 1], 0.01 for 1 %")
        if self.control and not self.freeze_list:
            raise UsageError("control needs the freeze_list whose windows it moves")
        if self.window < 0 or math.isnan(self.threshold):
            raise UsageError(
                f"window is {self.window} and threshold {self.threshold}; expected 0 or more "
                "tokens and a number of nats"
            )
        if self.window > 0 and self.freeze_list and self.threshold == math.inf:
            raise UsageError(f"window is {self.window}, but no threshold says what a high loss is")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise UsageError(f"max_tokens is {self.max_tokens}; expected 1 or more, or None")
        for name in self.score.split("*"):
            if name not in SCORES:
                raise UsageError(
                    f"score {self.score!r}: no {name!r}; there are {', '.join(SCORES)}"
                )

    def refuse_special(self, special_ids: list[int]) -> None:
        """Raises UsageError where the freeze list holds special ids (end of text, padding, ...)."""
        found = sorted(set(self.freeze_list) & set(special_ids))
        if found:
            raise UsageError(
                f"the freeze list holds special token ids {found}: a student that never learns to "
                "stop runs on; drop them, or allow them with allow_special=True"
            )


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


class Selector:
    """Applies a selection to batches, one after another; keeps the running KL and the dice."""

    def __init__(self, selection: Selection) -> None:
        self.selection = selection
        self.running_kl = math.nan
        self._tables: dict[torch.device, tuple[Tensor, Tensor]] = {}
        self._dice: dict[torch.device, torch.Generator] = {}

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must keep, beside the step, for a resumed run to go on alike.

        Returns:
            `running_kl`, the running mean KL of trained tokens in nats (NaN before the first), and
            `dice`, by device ("cpu", "cuda:0") the (n,) uint8 state of the control's generator.
            Floats, strings and tensors only, so that `torch.load(..., weights_only=True)` reads it.
        """
        dice = {str(device): generator.get_state() for device, generator in self._dice.items()}
        return {"running_kl": self.running_kl, "dice": dice}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes up what `state_dict` gave; the selection itself is not part of it.

        Raises:
            KnockoutError: It is not such a state.
        """
        try:
            running_kl = float(state["running_kl"])
            dice = {}
            for name, noise in state["dice"].items():
                device = torch.device(name)
                dice[device] = torch.Generator(device)
                dice[device].set_state(noise.cpu())
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise KnockoutError(
                f"not the state of this machine's selector ({error}); resume on the kind of device "
                "that made the checkpoint, or start without it"
            ) from error
        self.running_kl, self._dice = running_kl, dice

    def weight(self, step: int) -> float:
        """λ at an optimiser step."""
        return self.selection.schedule(step, self.running_kl)

    def watches(self, step: int) -> bool:
        """Whether skipped positions are measured at this step."""
        every = self.selection.watch_every
        return every > 0 and step % every == 0

    def valid(self, labels: Tensor) -> Tensor:
        """(B, T) bool: tokens of responses, the tails beyond `max_tokens` left out."""
        valid = labels != IGNORE
        if self.selection.max_tokens is not None:
            valid = valid & (valid.cumsum(dim=1) <= self.selection.max_tokens)
        return valid

    def reach(self, labels: Tensor, step: int) -> tuple[Tensor, int]:
        """What the backbones have to see of a batch at all.

        A response's tail without any trained token needs no forward pass, nor does a row without
        one: attention looks back only.

        Args:
            labels: (B, T) token ids, each at the place of its loss.
            step: Optimiser step.

        Returns:
            (R,) indices of the rows to keep, at least one, and the number of leading columns to
            keep, at least 1.
        """
        needed = self.valid(labels)
        known = self.selection.budget is None and not self.selection.control
        if known and self.weight(step) == 0 and not self.watches(step):
            listed, pillars = self._lists(labels.device)
            needed = needed & (freeze_weights(labels, None, listed, pillars=pillars) > 0)
        rows = torch.nonzero(needed.any(dim=1))[:, 0]
        columns = torch.nonzero(needed.any(dim=0))[:, 0]
        if rows.numel() == 0:
            return torch.zeros(1, dtype=torch.int64, device=labels.device), 1
        return rows, int(columns[-1]) + 1

    def loss(
        self,
        labels: Tensor,
        student_hidden: Tensor,
        student_head: Head,
        teacher_hidden: Tensor,
        teacher_head: Head,
        *,
        step: int,
        denominator: Tensor | float | None = None,
        temperature: float = 1.0,
        chunk: int | None = None,
    ) -> StepLoss:
        """The selected reverse KL of a batch.

        Args:
            labels: (B, T) int64, the token that each position predicts; −100 on prompts and
                padding.
            student_hidden: (B, T, H), the state that predicts the label at the same index.
            student_head: (V, H).
            teacher_hidden: (B, T, H').
            teacher_head: (V', H').
            step: Optimiser step, from 0.
            denominator: Response tokens of the whole batch that the optimiser sees, where this is
                a part of it; None for those of `labels`.
            temperature: Divides both models' logits.
            chunk: As in `selective_reverse_kl`.
        """
        chosen = self.selection
        valid = self.valid(labels)
        flat = torch.nonzero(valid.flatten())[:, 0]
        states = student_hidden.flatten(0, 1)
        targets = teacher_hidden.flatten(0, 1)

        def run(weights: Tensor, limits: Tensor | None = None, over: float = 0.0) -> SelectiveLoss:
            return selective_reverse_kl(
                states[flat],
                student_head,
                targets[flat],
                teacher_head,
                weights,
                limits=limits,
                over=over,
                temperature=temperature,
                merge=chosen.merge,
                chunk=chunk,
            )

        weight = self.weight(step)
        listed, pillars = self._lists(labels.device)
        masked = torch.where(valid, labels, IGNORE)
        limits: Tensor | None = None
        if chosen.budget is not None:
            score = self._scores(
                states[flat],
                student_head,
                targets[flat],
                teacher_head,
                labels.flatten()[flat],
                chunk,
            )
            scores = torch.zeros(labels.numel(), device=labels.device).index_copy(0, flat, score)
            prior = budget_weights(scores.view(labels.shape), chosen.budget, masked, pillars)
        elif chosen.control:
            loss = None
            if chosen.window > 0:
                with torch.no_grad():
                    known = run(torch.ones_like(flat, dtype=torch.float32)).kl
                loss = torch.zeros(labels.numel(), device=labels.device).index_copy(0, flat, known)
                loss = loss.view(labels.shape)
            prior = freeze_weights(
                masked, loss, listed, chosen.window, chosen.threshold, weight, pillars
            )
            prior = random_windows(prior, masked, self._generator(labels.device), pillars)
        else:
            prior = freeze_weights(masked, None, listed, weight=weight, pillars=pillars)
            if chosen.window > 0 and chosen.freeze_list:
                is_pillar = freeze_weights(masked, None, pillars) == 0
                frozen = freeze_weights(masked, None, listed, pillars=pillars) == 0
                around = near(frozen & valid, chosen.window) & ~is_pillar
                limits = torch.where(around, chosen.threshold, math.inf).flatten()[flat]
        out = run(prior.flatten()[flat], limits, weight)

        kl, norm = out.kl, out.grad_norm
        unmeasured = kl.isnan()
        if self.watches(step) and bool(unmeasured.any()):
            with torch.no_grad():
                rest = run(unmeasured.float())
            kl = torch.where(unmeasured, rest.kl, kl)
            norm = torch.where(unmeasured, rest.grad_norm, norm)
        total = float(flat.numel()) if denominator is None else denominator
        loss = (
            out.loss / max(total, 1.0)
            if isinstance(total, float)
            else out.loss / total.clamp(min=1)
        )
        if chosen.normalise == "trained":
            loss = loss * (flat.numel() / out.weights.sum().clamp(min=1e-6))
        weights = torch.zeros(labels.numel(), device=labels.device).index_copy(0, flat, out.weights)
        measured = ~out.entropy.isnan()
        metrics = _metrics(out.weights, kl, norm, weight, int(measured.sum()))
        self._remember(metrics["kl_trained"])
        return StepLoss(
            loss, weights.view(labels.shape), metrics, out.entropy[measured].sum(), measured.sum()
        )

    def _remember(self, kl: float) -> None:
        """Follows the KL of trained tokens, in nats, over about the last ten batches."""
        if math.isnan(kl):
            return
        known = not math.isnan(self.running_kl)
        self.running_kl = 0.9 * self.running_kl + 0.1 * kl if known else kl

    def _lists(self, device: torch.device) -> tuple[Tensor, Tensor]:
        if device not in self._tables:
            self._tables[device] = (
                token_table(self.selection.freeze_list, device),
                token_table(self.selection.pillars, device),
            )
        return self._tables[device]

    def _generator(self, device: torch.device) -> torch.Generator:
        if device not in self._dice:
            self._dice[device] = torch.Generator(device).manual_seed(self.selection.seed)
        return self._dice[device]

    @torch.no_grad()
    def _scores(
        self,
        states: Tensor,
        student: Head,
        targets: Tensor,
        teacher: Head,
        emitted: Tensor,
        chunk: int | None,
    ) -> Tensor:
        """(N,) the budget's score of each position."""
        with torch.autocast(states.device.type, enabled=False):
            (found,) = score_hidden(
                [(states, lambda h: project(h, student))],
                (targets, lambda h: project(h, teacher)),
                emitted,
                chunk=chunk,
            )
        values = {
            "efficiency": efficiency_ratio(found.signal, found.noise),
            "entropy": found.entropy,
            "kl": found.reverse_kl,
            "teacher_gap": found.teacher_gap,
        }
        score = torch.ones_like(found.entropy)
        for name in self.selection.score.split("*"):
            score = score * values[name]
        return score


def _metrics(
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
