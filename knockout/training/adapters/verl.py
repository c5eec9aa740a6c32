"""verl: weights for the (B, T) losses of its distillation registry.

A loss of `verl.trainer.distillation.losses` is called with `model_output` and a micro-batch `data`
and returns losses (B, T) padded on the right, where `data["response_mask"]` and `data["responses"]`
are either (B, T) too, or nested tensors of each response's own length. Loss t is that of response
token t: verl has shifted the model's output by then.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from knockout.training.weights import IGNORE, TokenIds, freeze_weights

__all__ = ["labels_of", "weigh"]


def labels_of(data: Mapping[str, Any]) -> Tensor:
    """The response tokens of a micro-batch.

    Args:
        data: With `responses` and `response_mask`, each (B, T) or nested.

    Returns:
        (B, T) int64, −100 on padding and on tokens that the mask leaves out (tool answers).
    """
    ids, mask = _padded(data["responses"]), _padded(data["response_mask"]).bool()
    if ids.shape != mask.shape:
        raise ValueError(f"responses {tuple(ids.shape)}, response_mask {tuple(mask.shape)}")
    return torch.where(mask, ids, IGNORE)


def weigh(
    losses: Tensor,
    data: Mapping[str, Any],
    freeze_list: TokenIds,
    *,
    window: int = 0,
    threshold: float = math.inf,
    weight: float = 0.0,
    pillars: TokenIds = (),
) -> tuple[Tensor, Tensor]:
    """Weights a registered loss's values before `agg_loss` adds them up.

    The response mask stays as it is, so verl divides by all response tokens and a trained token
    weighs what it would weigh without freezing. With `use_policy_gradient` the same product makes
    the advantage of a frozen token λ times its own.

    Args:
        losses: (B, T) of any of verl's distillation losses: exact, top-k or one-sample.
        data: As in `labels_of`.
        freeze_list: As in `freeze_weights`.
        window: As there.
        threshold: As there; a one-sample loss is a noisy ground for it.
        weight: λ.
        pillars: As there.

    Returns:
        The weighted losses and the weights, each (B, T).
    """
    labels = labels_of(data)
    if losses.shape != labels.shape:
        raise ValueError(f"losses {tuple(losses.shape)}; expected {tuple(labels.shape)}")
    weights = freeze_weights(labels, losses, freeze_list, window, threshold, weight, pillars)
    return losses * weights.to(losses.dtype), weights


def _padded(tensor: Tensor) -> Tensor:
    return tensor.to_padded_tensor(0) if tensor.is_nested else tensor
