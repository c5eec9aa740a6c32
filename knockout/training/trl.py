"""Selective on-policy distillation in TRL.

TRL's maintained trainer for on-policy distillation (GKD) is `trl.DistillationTrainer`;
`trl.experimental.gkd.GKDTrainer` refers fully on-policy runs to it. Ours is that trainer with one
method replaced: the loss between the hidden states and the two heads. Generation (transformers or
vLLM), batching, logging, checkpoints and distribution stay TRL's.

This is the one module that imports TRL: `pip install knockout-harness[train]`.
"""

from __future__ import annotations

import inspect
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint

from knockout.errors import KnockoutError, UsageError
from knockout.files import atomic_path
from knockout.tokens.special import special_ids
from knockout.training.batch import Part, Plan
from knockout.training.heads import CHECK_TOKENS, Head, head_of, reproduces
from knockout.training.ranks import n_ranks
from knockout.training.selection import Selection
from knockout.training.selector import Selector

try:
    from trl import DistillationConfig, DistillationTrainer
except ImportError as error:
    raise KnockoutError(
        f"TRL's DistillationTrainer is not here ({error}): pip install 'knockout-harness[train]'"
    ) from error

__all__ = ["SelectiveDistillationTrainer"]

log = logging.getLogger(__name__)

# The seams of TRL that this module stands on; checked, because they are not public.
_SEAMS = {
    "_compute_loss": ["self", "unwrapped_student", "inputs", "num_items_in_batch"],
    "_get_last_hidden_state": [
        "self",
        "unwrapped_model",
        "input_ids",
        "attention_mask",
        "logits_to_keep",
    ],
}
_MULTIMODAL = ("pixel_values", "image_grid_thw", "image_sizes", "pixel_attention_mask")


def _check_seams() -> None:
    for name, wanted in _SEAMS.items():
        method = getattr(DistillationTrainer, name, None)
        found = list(inspect.signature(method).parameters) if method else []
        if found[: len(wanted)] != wanted:
            import trl

            raise KnockoutError(
                f"TRL {trl.__version__}: DistillationTrainer.{name} takes {found}, expected "
                f"{wanted}; this trainer was written for TRL 1.16"
            )


def _state_file(folder: str | Path, args: TrainingArguments) -> Path:
    """Where a process's selector lies in a checkpoint; named as the trainer's random states are."""
    rank = f"_{args.process_index}" if args.world_size > 1 else ""
    return Path(folder) / f"selector{rank}.pt"


class _SaveSelector(TrainerCallback):
    """Puts the selector's state into every checkpoint that can be resumed from."""

    def __init__(self, selector: Selector) -> None:
        self.selector = selector

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        # A hyperparameter search keeps its checkpoints elsewhere and does not resume them.
        if args.save_only_model or state.is_hyper_param_search:
            return
        folder = Path(args.output_dir or ".") / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        with atomic_path(_state_file(folder, args)) as temporary:
            torch.save(self.selector.state_dict(), temporary)


class SelectiveDistillationTrainer(DistillationTrainer):  # type: ignore[misc]
    """TRL's `DistillationTrainer` with a `Selection`.

    Takes that trainer's arguments. The divergence is the reverse KL (`args.beta` = 1, TRL's
    default). Beside TRL's metrics (among them `grad_norm`, of the parameters) it logs:

    * `frozen_share`: of the response tokens, those with weight below 1;
    * `skipped_share`: those that were never projected to logits;
    * `frozen_weight`: λ;
    * `kl_trained`, `kl_frozen`: mean reverse KL in nats; of skipped tokens every
      `Selection.watch_every` steps;
    * `logit_grad_norm_trained`, `logit_grad_norm_frozen`: mean length of ∂KL/∂logits at a token,
      before weighting.

    TRL's `entropy` covers the projected tokens. An evaluation looks at all response tokens, whatever
    the selection trains on: `eval_loss` is their mean KL, `eval_kl_unfrozen` and `eval_kl_frozen`
    are those of the types outside and inside the freeze list; it moves no state.

    What a step divides by, and what a budget keeps, is worked out over all of its micro-batches and
    processes. For a budget, and for `normalise="trained"` with a window, that takes one more forward
    pass of both models over the step's batch.

    Each checkpoint also keeps the selector's running KL and the control's generator (`selector.pt`,
    or `selector_RANK.pt` for each of several processes); a resumed run takes them up.

    Example:
        ```python
        trainer = SelectiveDistillationTrainer(
            model="student", teacher_model="teacher", train_dataset=prompts,
            args=DistillationConfig("out", max_completion_length=1024),
            selection=Selection(freeze_list=tuple(json.load(open("freeze.json"))), window=4,
                                threshold=0.5),
        )
        trainer.train()
        ```
    """

    _tag_names = ("trl", "distillation", "knockout")

    def __init__(
        self,
        *args: Any,
        selection: Selection | None = None,
        allow_special: bool = False,
        **kwargs: Any,
    ) -> None:
        """Takes what TRL's trainer takes, and:

        Args:
            *args: As in `trl.DistillationTrainer`.
            selection: Which tokens to train on; None for all of them.
            allow_special: Whether the freeze list may contain special ids, such as end of text.
            **kwargs: As in `trl.DistillationTrainer`.

        Raises:
            UsageError: `args.beta` asks for another divergence than the selection, the models take
                images, special ids are frozen without `allow_special`, or a model does something
                to its logits that no `Head` describes.
            KnockoutError: This TRL is too different from the one this was written for.
        """
        _check_seams()
        super().__init__(*args, **kwargs)
        config: DistillationConfig = self.args
        if config.beta != 1:
            raise UsageError(
                f"beta is {config.beta}; leave it at 1 and choose with "
                "Selection(divergence=Divergence(...)), which token weights apply to"
            )
        if self._is_vlm:
            raise UsageError("the model takes images; selective distillation is for text models")
        self.selection = selection or Selection()
        self.selector = Selector(self.selection)
        if not allow_special:
            self.selection.refuse_special(sorted(special_ids(self._tokenizer)))
        self.add_callback(_SaveSelector(self.selector))
        self._plan, self._place = Plan(1.0), 0  # and which of its micro-batches is under way
        self._heads_checked = False
        if not (self.is_deepspeed_enabled or self.is_fsdp_enabled):  # else in the first step
            unwrap = self.accelerator.unwrap_model
            self._check_heads(unwrap(self.model), unwrap(self.teacher_model))

    def train(
        self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        """As in `transformers.Trainer`; a checkpoint's selector is taken up with the rest of it.

        Raises:
            KnockoutError: The checkpoint's selector cannot be read.
        """
        folder = resume_from_checkpoint
        if folder is True:
            folder = get_last_checkpoint(self.args.output_dir)  # type: ignore[no-untyped-call]
        if folder:
            self._resume_selector(str(folder))
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def _resume_selector(self, folder: str) -> None:
        path = _state_file(folder, self.args)
        if not path.is_file():
            log.warning(
                "%s is not there: the running KL and the control's dice start anew, so this run "
                "will differ from one that was not interrupted",
                path,
            )
            return
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
            self.selector.load_state_dict(state)
        except Exception as error:  # torch meets damaged files with errors of any kind
            raise KnockoutError(
                f"{path}: {error}. Resume from another checkpoint, or delete the file to start "
                "its running KL and dice anew"
            ) from error

    @torch.no_grad()
    def _check_heads(self, student: Any, teacher: Any) -> None:
        """Refuses a model whose logits are not those of its hidden states and `head_of`."""
        self._heads_checked = True
        for role, model in (("student", student), ("teacher", teacher)):
            device = model.get_input_embeddings().weight.device
            ids = torch.arange(1, CHECK_TOKENS + 1, device=device)[None]
            mask, was_training = torch.ones_like(ids), model.training
            model.eval()
            own = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
            states = self._get_last_hidden_state(model, ids, mask, CHECK_TOKENS - 1)
            same = reproduces(model, states, own)
            model.train(was_training)
            if not same:
                raise UsageError(
                    f"the {role} ({type(model).__name__}): its logits are not those of its last "
                    "hidden states and its head, so the loss would be wrong; this architecture "
                    "cannot be trained here (TRL's own trainer would be wrong on it too, if it "
                    "reads the same settings)"
                )

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        """TRL's micro-batch; plans the step where its batch is new."""
        every = self.args.gradient_accumulation_steps
        self._place = self._step % every
        new = self.model.training and (
            self._place == 0 or getattr(self, "_buffered_inputs", None) is None
        )
        inputs = super()._prepare_inputs(generation_batch)
        if new:
            step = int(self.state.global_step)
            self.selector.advance(step)
            parts = [self._part(part, step) for part in self._buffered_inputs]
            self._plan = self.selector.plan(parts)
        return inputs

    def _part(self, inputs: dict[str, Any], step: int) -> Part:
        """What a micro-batch adds to the plan."""
        if not self.selector.needs_states:
            return self.selector.part(_labels(inputs), step=step)
        wrapped = self.model_wrapped
        student = self.accelerator.unwrap_model(wrapped)

        def run(unwrapped: Any) -> Part:
            labels, own, target = self._sides(unwrapped, inputs, step)
            return self.selector.part(
                labels, step=step, student=own, teacher=target, temperature=self.temperature
            )

        with torch.no_grad(), self.compute_loss_context_manager():
            part: Part = self._forward_redirection(wrapped, student, run, student)
        # Of what `reach` left out too.
        return replace(part, n_tokens=int(self.selector.valid(_labels(inputs)).sum()))

    def _sides(
        self, unwrapped_student: Any, inputs: dict[str, Any], step: int | None
    ) -> tuple[Tensor, tuple[Tensor, Head], tuple[Tensor, Head]]:
        """Labels, and both models' hidden states and heads; called inside the model's wrapper.

        Rows and tails that the selection does not need at this step are left out; None keeps all.
        """
        found = [key for key in _MULTIMODAL if key in inputs]
        if found:
            raise UsageError(f"the batch contains {', '.join(found)}; expected text only")
        labels = _labels(inputs)
        if step is None:
            rows, columns = torch.arange(labels.shape[0], device=labels.device), labels.shape[1]
        else:
            rows, columns = self.selector.reach(labels, step)
        labels = labels[rows, :columns]
        ids = torch.cat([inputs["prompt_ids"][rows], inputs["completion_ids"][rows, :columns]], 1)
        seen = torch.cat(
            [inputs["prompt_mask"][rows], inputs["completion_mask"][rows, :columns]], 1
        )
        teacher = self.accelerator.unwrap_model(self.teacher_model)
        if not self._heads_checked:
            self._check_heads(unwrapped_student, teacher)
        student_hidden = self._get_last_hidden_state(unwrapped_student, ids, seen, columns)
        self.teacher_model.eval()
        with torch.no_grad():
            teacher_hidden = self._forward_redirection(
                self.teacher_model,
                teacher,
                self._get_last_hidden_state,
                teacher,
                ids,
                seen,
                columns,
            )
        student_head, teacher_head = head_of(unwrapped_student), head_of(teacher)
        device = student_head.weight.device
        return (
            labels.to(device),
            (student_hidden.to(device), student_head),
            (teacher_hidden.to(device), teacher_head),
        )

    def _compute_loss(
        self, unwrapped_student: Any, inputs: dict[str, Any], num_items_in_batch: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """TRL's loss of a micro-batch, from hidden states on; called inside the model's wrapper.

        Returns:
            Loss, sum of the student's entropy over projected tokens, and their number.
        """
        step = int(self.state.global_step)
        training = self.model.training
        labels, student, teacher = self._sides(
            unwrapped_student, inputs, step if training else None
        )
        if training:
            # Gradients are averaged over processes, and each has a part of the sum.
            result = self.selector.loss(
                labels,
                *student,
                *teacher,
                step=step,
                denominator=self._plan.denominator / n_ranks(),
                kept=self._plan.kept[self._place] if self._plan.kept else None,
                temperature=self.temperature,
            )
        else:
            result = self.selector.evaluate(
                labels, *student, *teacher, temperature=self.temperature
            )
        for name, value in result.metrics.items():
            self._metrics["train" if training else "eval"][name].append(value)
        return result.loss, result.entropy_sum.detach(), result.n_projected


def _labels(inputs: dict[str, Any]) -> Tensor:
    """(B, T) the completion's ids, −100 if nothing is trained on."""
    mask = inputs["completion_mask"]
    if "tool_mask" in inputs:
        mask = mask * inputs["tool_mask"]
    # By length, not by id: the padding id is often the end-of-text id too.
    labels: Tensor = torch.where(mask.bool(), inputs["completion_ids"], -100)
    return labels
