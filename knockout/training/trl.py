"""Selective on-policy distillation in TRL.

TRL's maintained trainer for on-policy distillation (GKD) is `trl.DistillationTrainer`;
`trl.experimental.gkd.GKDTrainer` refers fully on-policy runs to it. Ours is that trainer with one
method replaced: the loss between the hidden states and the two heads. Generation (transformers or
vLLM), batching, logging, checkpoints and distribution stay TRL's.

This is the one module that imports TRL: `pip install knockout-harness[train]`.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from knockout.errors import KnockoutError, UsageError
from knockout.training.loss import head_of
from knockout.training.selection import Selection, Selector

try:
    from trl import DistillationConfig, DistillationTrainer
except ImportError as error:
    raise KnockoutError(
        f"TRL's DistillationTrainer is not here ({error}): pip install 'knockout-harness[train]'"
    ) from error

__all__ = ["SelectiveDistillationTrainer"]

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

    TRL's `entropy` covers the projected tokens.

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
            allow_special: Whether the freeze list may hold special ids, such as end of text.
            **kwargs: As in `trl.DistillationTrainer`.

        Raises:
            UsageError: The divergence is not the reverse KL, the models take images, or special
                ids are frozen without `allow_special`.
            KnockoutError: This TRL is too different from the one this was written for.
        """
        _check_seams()
        super().__init__(*args, **kwargs)
        config: DistillationConfig = self.args
        if config.beta != 1:
            raise UsageError(
                f"beta is {config.beta}; token weights apply to the reverse KL, beta=1"
            )
        if self._is_vlm:
            raise UsageError("the model takes images; selective distillation is for text models")
        self.selection = selection or Selection()
        self.selector = Selector(self.selection)
        if not allow_special:
            self.selection.refuse_special(list(self._tokenizer.all_special_ids))

    def _compute_loss(
        self, unwrapped_student: Any, inputs: dict[str, Any], num_items_in_batch: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """TRL's loss of a micro-batch, from hidden states on; called inside the model's wrapper.

        Returns:
            Loss, sum of the student's entropy over projected tokens, and their number.
        """
        step = int(self.state.global_step)
        found = [key for key in _MULTIMODAL if key in inputs]
        if found:
            raise UsageError(f"the batch holds {', '.join(found)}; expected text only")
        mask = inputs["completion_mask"]
        if "tool_mask" in inputs:
            mask = mask * inputs["tool_mask"]
        # By length, not by id: the padding id is often the end-of-text id too.
        labels = torch.where(mask.bool(), inputs["completion_ids"], -100)
        rows, columns = self.selector.reach(labels, step)
        labels = labels[rows, :columns]
        ids = torch.cat([inputs["prompt_ids"][rows], inputs["completion_ids"][rows, :columns]], 1)
        seen = torch.cat(
            [inputs["prompt_mask"][rows], inputs["completion_mask"][rows, :columns]], 1
        )

        student_hidden = self._get_last_hidden_state(unwrapped_student, ids, seen, columns)
        self.teacher_model.eval()
        teacher = self.accelerator.unwrap_model(self.teacher_model)
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
        result = self.selector.loss(
            labels.to(device),
            student_hidden.to(device),
            student_head,
            teacher_hidden.to(device),
            teacher_head,
            step=step,
            denominator=num_items_in_batch,
            temperature=self.temperature,
        )
        mode = "train" if self.model.training else "eval"
        for name, value in result.metrics.items():
            self._metrics[mode][name].append(value)
        return result.loss, result.entropy_sum.detach(), result.n_projected
