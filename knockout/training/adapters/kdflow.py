"""KDFlow: weights for the rows of a micro-batch's masked positions.

KDFlow's `stu_loss_mask` (B, L) marks the positions that *predict* a response's tokens: the label of a
marked position t is `stu_input_ids[:, t + 1]`. Its algorithms gather the marked positions of a batch
into rows (N,), in row-major order, and so does everything here.

The authors' fork of it freezes by looking up the *marked* ids themselves, `stu_input_ids` at t, the
token that the position has read. So it leaves out the loss of the token after each rock, not that of
the rock. `position="read"` does the same, to repeat their runs; `"predicted"` is what the paper's
text says and the default here. docs/recipes/kdflow.md has the other differences.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor

from knockout.training.weights import IGNORE, TokenIds, freeze_weights

__all__ = ["divide", "labels_of", "row_weights"]

Position = Literal["predicted", "read"]


def labels_of(micro_batch: dict[str, Any], position: Position = "predicted") -> Tensor:
    """The token that each position's loss is looked up by.

    Args:
        micro_batch: KDFlow's, with `stu_input_ids` (B, L) int64 and `stu_loss_mask` (B, L).
        position: `predicted`: the token that the position predicts. `read`: the one it has read.

    Returns:
        (B, L) int64, −100 outside the mask.
    """
    ids, mask = micro_batch["stu_input_ids"], micro_batch["stu_loss_mask"].bool()
    if ids.shape != mask.shape:
        raise ValueError(f"stu_input_ids {tuple(ids.shape)}, stu_loss_mask {tuple(mask.shape)}")
    if position == "predicted":
        ids = ids.roll(shifts=-1, dims=1)  # the last column's label is outside, and so is its mask
        mask = mask & (torch.arange(ids.shape[1], device=ids.device) < ids.shape[1] - 1)
    elif position != "read":
        raise ValueError(f"position is {position!r}; expected predicted or read")
    return torch.where(mask, ids, IGNORE)


def row_weights(
    micro_batch: dict[str, Any],
    freeze_list: TokenIds,
    *,
    loss: Tensor | None = None,
    position: Position = "predicted",
    freeze_weight: float = 0.0,
    window: int = 0,
    threshold: float = math.inf,
    pillars: TokenIds = (),
) -> Tensor:
    """Weights for KDFlow's per-position losses.

    Args:
        micro_batch: As in `labels_of`.
        freeze_list: Token ids, or their `token_table`.
        loss: (N,) the losses of the marked positions, for a window; None without one.
        position: As in `labels_of`.
        freeze_weight: λ of frozen positions, under the fork's name.
        window: As in `freeze_weights`; in the fork there is none.
        threshold: As there.
        pillars: As there.

    Returns:
        (N,) float32, one for each marked position.
    """
    labels, mask = labels_of(micro_batch, position), micro_batch["stu_loss_mask"].bool()
    table = None
    if loss is not None:
        if loss.shape != (int(mask.sum()),):
            raise ValueError(f"loss has shape {tuple(loss.shape)}; expected ({int(mask.sum())},)")
        table = torch.zeros(mask.shape, dtype=loss.dtype, device=loss.device)
        table = table.masked_scatter(mask, loss.detach())
    weights = freeze_weights(labels, table, freeze_list, window, threshold, freeze_weight, pillars)
    return weights[mask]


def divide(
    loss: Tensor,
    weights: Tensor,
    micro_batch: dict[str, Any],
    by: Literal["kept", "tokens"] = "tokens",
) -> Tensor:
    """The weighted loss of a micro-batch.

    Args:
        loss: (N,) with gradient.
        weights: (N,) of `row_weights`.
        micro_batch: For `avg_micro_batch_token_num`, the response tokens of the global batch over
            its micro-batches.
        by: `tokens` divides by that number, as KDFlow does without freezing, so a trained token
            weighs what it would weigh otherwise. `kept` divides by the micro-batch's own summed
            weight, as the authors' fork does: a token then weighs more in a micro-batch that holds
            many rocks, and the update depends on how the batch is cut.

    Returns:
        () in the units of `loss`.
    """
    total = (loss * weights).sum()
    if by == "kept":
        return total / weights.sum().clamp(min=1e-6)
    if by != "tokens":
        raise ValueError(f"by is {by!r}; expected kept or tokens")
    mean: Tensor = total / micro_batch["avg_micro_batch_token_num"]
    return mean
