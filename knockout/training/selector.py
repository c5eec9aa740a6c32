"""What one training step does with a batch: which tokens are frozen, skipped and logged.

`Selector` applies a `Selection` to the batches of any training loop; the TRL trainer and the
examples' plain loop use it. A batch may be part (a micro-batch, a process's share) of what the
optimiser sees in a step: `part` and `plan` work out what all parts have in common.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from knockout.errors import KnockoutError, UsageError
from knockout.mining.kl import PositionScores, score_hidden
from knockout.mining.registry import score_positions
from knockout.training.batch import Batch, Part, Plan, StepLoss, step_metrics
from knockout.training.divergence import Listed
from knockout.training.heads import Head, project
from knockout.training.loss import SelectiveLoss, selective_kl
from knockout.training.ranks import gather, rank
from knockout.training.running_kl import RunningKl
from knockout.training.selection import Selection
from knockout.training.weights import (
    IGNORE,
    budget_weights,
    freeze_weights,
    near,
    random_windows,
    token_table,
)

__all__ = ["Selector"]


class Selector:
    """Applies a selection to batches, one after another; keeps the running KL and the dice."""

    def __init__(self, selection: Selection) -> None:
        self.selection = selection
        self._kl = RunningKl()
        self._tables: dict[torch.device, tuple[Tensor, Tensor]] = {}
        self._dice: dict[torch.device, torch.Generator] = {}

    @property
    def running_kl(self) -> float:
        """Mean KL of all tokens over about the last ten steps, in nats; NaN before the first."""
        return self._kl.value

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must keep, besides the step, for a resumed run to continue alike.

        Returns:
            The state of the running KL and `dice`, by device ("cpu", "cuda:0") the (n,) uint8 state
            of the control's generator. Floats, strings and tensors only, so that
            `torch.load(..., weights_only=True)` reads it.
        """
        dice = {str(device): generator.get_state() for device, generator in self._dice.items()}
        return {**self._kl.state_dict(), "dice": dice}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what `state_dict` gave; the selection itself is not part of it.

        Raises:
            KnockoutError: It is not such a state.
        """
        try:
            dice = {}
            for name, noise in state["dice"].items():
                device = torch.device(name)
                dice[device] = torch.Generator(device)
                dice[device].set_state(noise.cpu())
            self._kl.load_state_dict(state)
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise KnockoutError(
                f"not the state of this machine's selector ({error}); resume on the kind of device "
                "that made the checkpoint, or start without it"
            ) from error
        self._dice = dice

    def advance(self, step: int) -> None:
        """Begins an optimiser step: the running KL takes in the last one, over all processes.

        `loss` does it if a step is new. In a distributed run call it beforehand, at a place that
        all processes pass, since it is a collective.
        """
        self._kl.advance(step)

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
        one: attention looks back only. The running KL counts what is left out if the step was
        planned from the whole labels.

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

    @property
    def needs_states(self) -> bool:
        """Whether `part` has to see hidden states: one more forward pass of both models."""
        chosen = self.selection
        by_kl = chosen.window > 0 and bool(chosen.freeze_list)
        return chosen.budget is not None or (by_kl and chosen.normalise == "trained")

    @torch.no_grad()
    def part(
        self,
        labels: Tensor,
        *,
        step: int,
        student: tuple[Tensor, Head] | None = None,
        teacher: tuple[Tensor | Listed, Head | None] | None = None,
        temperature: float = 1.0,
        chunk: int | None = None,
    ) -> Part:
        """What a micro-batch adds to its step's plan; moves no state.

        Args:
            labels: (B, T) as in `loss`.
            step: Optimiser step.
            student: Hidden states and head as in `loss`, if `needs_states`.
            teacher: The same.
            temperature: As in `loss`.
            chunk: As in `loss`.
        """
        chosen, valid = self.selection, self.valid(labels)
        listed, pillars = self._lists(labels.device)
        masked = torch.where(valid, labels, IGNORE)
        n = int(valid.sum())
        if not self.needs_states:
            weights = freeze_weights(
                masked, None, listed, weight=self.weight(step), pillars=pillars
            )
            return Part(n, float(weights.sum()))
        assert student is not None
        assert teacher is not None
        batch = Batch(labels, valid, student, teacher, temperature, chunk)
        if chosen.budget is not None:
            is_pillar = batch.rows(freeze_weights(masked, None, pillars) == 0)
            scores = PositionScores(*(values.cpu() for values in self._scores(batch)))
            return Part(n, 0.0, scores, is_pillar.cpu())
        kl = self._run(batch, torch.ones_like(batch.emitted, dtype=torch.float32)).kl
        weights = freeze_weights(
            masked, batch.table(kl), listed, chosen.window, chosen.threshold, self.weight(step),
            pillars,
        )  # fmt: skip
        return Part(n, float(weights.sum()))

    def plan(self, parts: Sequence[Part]) -> Plan:
        """The plan of a step, from its parts on all processes; a collective.

        A process's parts divide by `Plan.denominator` over the number of processes where gradients
        are averaged over processes, as DDP and FSDP do.
        """
        by_rank = gather(list(parts))
        everyone = [part for own in by_rank for part in own]
        n = sum(part.n_tokens for part in everyone)
        weight = sum(part.weight for part in everyone)
        kept: tuple[Tensor, ...] = ()
        if self.selection.budget is not None and everyone:
            masks = self._keep(everyone)
            weight = float(sum(int(mask.sum()) for mask in masks))
            first = sum(len(own) for own in by_rank[: rank()])
            kept = tuple(masks[first : first + len(parts)])
        self._kl.planned = n
        total = float(n) if self.selection.normalise == "tokens" else weight
        return Plan(total, kept)

    def _keep(self, parts: Sequence[Part]) -> list[Tensor]:
        """What a budget keeps of each part, (n,) bool; all parts are scored and ranked together."""
        assert self.selection.budget is not None
        fields = zip(*(part.scores for part in parts if part.scores is not None), strict=True)
        scores = score_positions(self.selection.score, PositionScores(*map(torch.cat, fields)))
        best = budget_weights(scores[None], self.selection.budget)[0] > 0
        masks = torch.split(best, [part.scores.entropy.numel() for part in parts if part.scores])
        return [
            mask | part.pillars
            for mask, part in zip(masks, parts, strict=True)
            if part.pillars is not None
        ]

    def loss(
        self,
        labels: Tensor,
        student_hidden: Tensor,
        student_head: Head,
        teacher_hidden: Tensor | Listed,
        teacher_head: Head | None,
        *,
        step: int,
        denominator: Tensor | float | None = None,
        kept: Tensor | None = None,
        temperature: float = 1.0,
        chunk: int | None = None,
    ) -> StepLoss:
        """The selected divergence of a batch.

        Args:
            labels: (B, T) int64, the token that each position predicts; −100 on prompts and
                padding.
            student_hidden: (B, T, H), the state that predicts the label at the same index.
            student_head: (V, H).
            teacher_hidden: (B, T, H'); or a served teacher's list, each (B, T, k).
            teacher_head: (V', H'), or None for a served teacher.
            step: Optimiser step, from 0.
            denominator: If this is a part of what the optimiser sees, the plan's denominator;
                None divides by what is in `labels`.
            kept: What the plan keeps of this part, for a budget; None takes the budget of these
                labels alone.
            temperature: Divides both models' logits.
            chunk: As in `selective_kl`.
        """
        self.advance(step)
        chosen = self.selection
        valid = self.valid(labels)
        student, teacher = (student_hidden, student_head), (teacher_hidden, teacher_head)
        batch = Batch(labels, valid, student, teacher, temperature, chunk)
        weight = self.weight(step)
        prior, limits = self._prior(batch, weight, kept)
        out = self._run(batch, batch.rows(prior), limits, weight)
        kl, norm = out.kl, out.grad_norm
        skipped = kl.isnan()
        if self.watches(step) and bool(skipped.any()):
            with torch.no_grad():
                rest = self._run(batch, skipped.float())
            kl = torch.where(skipped, rest.kl, kl)
            norm = torch.where(skipped, rest.grad_norm, norm)
        self._kl.add(kl, skipped)
        if denominator is None:
            used = out.weights.sum() if chosen.normalise == "trained" else valid.sum()
            loss = out.loss / used.clamp(min=1e-6)
        elif isinstance(denominator, Tensor):
            loss = out.loss / denominator.clamp(min=1e-6)
        else:
            loss = out.loss / max(denominator, 1e-6)
        measured = ~out.entropy.isnan()
        metrics = step_metrics(out.weights, kl, norm, weight, int(measured.sum()))
        entropy = out.entropy[measured].sum()
        return StepLoss(loss, batch.table(out.weights), metrics, entropy, measured.sum())

    @torch.no_grad()
    def evaluate(
        self,
        labels: Tensor,
        student_hidden: Tensor,
        student_head: Head,
        teacher_hidden: Tensor | Listed,
        teacher_head: Head | None,
        *,
        temperature: float = 1.0,
        chunk: int | None = None,
    ) -> StepLoss:
        """The mean divergence of all response tokens, whatever the selection trains on.

        So arms can be compared. Moves neither the running KL nor the dice. Arguments as in `loss`.

        Returns:
            Weights are 1; the metrics are `kl_unfrozen` and `kl_frozen`, the means over the types
            that the selection leaves alone and over those of its freeze list.
        """
        valid = labels != IGNORE
        student, teacher = (student_hidden, student_head), (teacher_hidden, teacher_head)
        batch = Batch(labels, valid, student, teacher, temperature, chunk)
        out = self._run(batch, torch.ones_like(batch.emitted, dtype=torch.float32))
        listed, pillars = self._lists(labels.device)
        frozen = batch.rows(freeze_weights(labels, None, listed, pillars=pillars)) == 0
        metrics = {
            "kl_unfrozen": float(out.kl[~frozen].mean()),
            "kl_frozen": float(out.kl[frozen].mean()),
        }
        loss = out.loss / valid.sum().clamp(min=1)
        n = torch.tensor(out.kl.numel(), device=out.kl.device)
        return StepLoss(loss, valid.float(), metrics, out.entropy.sum(), n)

    def _prior(
        self, batch: Batch, weight: float, kept: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Weights (B, T) before any KL is known, and limits (N,) above which they change."""
        chosen, valid = self.selection, batch.valid
        listed, pillars = self._lists(batch.labels.device)
        masked = torch.where(valid, batch.labels, IGNORE)
        if chosen.budget is not None:
            if kept is not None:
                return batch.table(kept.to(batch.flat.device)), None
            table = batch.table(score_positions(chosen.score, self._scores(batch)))
            return budget_weights(table, chosen.budget, masked, pillars), None
        if chosen.control:
            loss = None
            if chosen.window > 0:
                with torch.no_grad():
                    ones = torch.ones_like(batch.emitted, dtype=torch.float32)
                    loss = batch.table(self._run(batch, ones).kl)
            prior = freeze_weights(
                masked, loss, listed, chosen.window, chosen.threshold, weight, pillars
            )
            dice = self._generator(batch.labels.device)
            return random_windows(prior, masked, dice, pillars), None
        prior = freeze_weights(masked, None, listed, weight=weight, pillars=pillars)
        if not chosen.window or not chosen.freeze_list:
            return prior, None
        is_pillar = freeze_weights(masked, None, pillars) == 0
        frozen = freeze_weights(masked, None, listed, pillars=pillars) == 0
        around = near(frozen & valid, chosen.window, valid) & ~is_pillar
        return prior, batch.rows(torch.where(around, chosen.threshold, math.inf))

    def _run(
        self, batch: Batch, weights: Tensor, limits: Tensor | None = None, over: float = 0.0
    ) -> SelectiveLoss:
        return selective_kl(
            batch.states,
            batch.student,
            batch.targets,
            batch.teacher,
            weights,
            chosen=self.selection.divergence,
            emitted=batch.emitted,
            limits=limits,
            over=over,
            temperature=batch.temperature,
            merge=self.selection.merge,
            chunk=batch.chunk,
        )

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
    def _scores(self, batch: Batch) -> PositionScores:
        """What the budget's score is made of, at each of the N positions."""
        if isinstance(batch.targets, Listed) or batch.teacher is None:
            raise UsageError(
                "a budget scores positions by the teacher's whole distribution, and a served "
                "teacher lists a few tokens; train with a freeze list, or a local teacher"
            )
        teacher = batch.teacher
        with torch.autocast(batch.states.device.type, enabled=False):
            (found,) = score_hidden(
                [(batch.states, lambda h: project(h, batch.student))],
                (batch.targets, lambda h: project(h, teacher)),
                batch.emitted,
                chunk=batch.chunk,
            )
        return found
