"""OpenRLHF: weights for the response positions of its on-policy distillation trainer.

`OPDTrainer.compute_loss` gets `sequences` (B, P + T), prompt padded on the left, with the response in
its last T columns, and `action_mask` (B, T), which ends with the first end-of-text token. Its
per-token losses are (B, T), loss t that of response token t, and `aggregate_loss(loss, action_mask,
...)` adds them up.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from knockout.training.weights import IGNORE, TokenIds, freeze_weights

__all__ = ["labels_of", "response_logits", "weigh"]


def labels_of(sequences: Tensor, action_mask: Tensor) -> Tensor:
    """The response tokens of a batch.

    Args:
        sequences: (B, P + T) int64.
        action_mask: (B, T).

    Returns:
        (B, T) int64, −100 if the mask is 0.
    """
    n = action_mask.shape[1]
    if sequences.shape[0] != action_mask.shape[0] or sequences.shape[1] <= n:
        raise ValueError(
            f"sequences {tuple(sequences.shape)}, action_mask {tuple(action_mask.shape)}: expected "
            "(B, P + T) and (B, T)"
        )
    return torch.where(action_mask.bool(), sequences[:, -n:], IGNORE)


def response_logits(logits: Tensor, action_mask: Tensor) -> Tensor:
    """The (B, T, V) logits that predict the response, of a model's (B, P + T, V)."""
    n = action_mask.shape[1]
    return logits[:, -n - 1 : -1]


def weigh(
    losses: Tensor,
    sequences: Tensor,
    action_mask: Tensor,
    freeze_list: TokenIds,
    *,
    window: int = 0,
    threshold: float = math.inf,
    weight: float = 0.0,
    pillars: TokenIds = (),
) -> tuple[Tensor, Tensor]:
    """Weights per-token losses before `aggregate_loss` adds them up.

    The mask stays `action_mask`, so OpenRLHF divides by all response tokens.

    Args:
        losses: (B, T).
        sequences: As in `labels_of`.
        action_mask: As there.
        freeze_list: As in `freeze_weights`.
        window: As there.
        threshold: As there; OpenRLHF's default (`opd.topk` = 0) is a one-sample estimate, a noisy
            ground for it.
        weight: λ.
        pillars: As there.

    Returns:
        The weighted losses and the weights, each (B, T).
    """
    labels = labels_of(sequences, action_mask)
    if losses.shape != labels.shape:
        raise ValueError(f"losses {tuple(losses.shape)}; expected {tuple(labels.shape)}")
    weights = freeze_weights(labels, losses, freeze_list, window, threshold, weight, pillars)
    return losses * weights.to(losses.dtype), weights
