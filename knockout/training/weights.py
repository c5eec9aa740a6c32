"""Which positions a distillation loss trains on: a weight for each token of a batch.

Pure tensor functions on any device. Shapes: B sequences, T positions, V token ids. `labels` are
token ids with −100 on prompts and padding, told apart by length and never by the padding id (which
is often the end-of-text id too).
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = [
    "IGNORE",
    "aligned_labels",
    "budget_weights",
    "freeze_weights",
    "near",
    "random_windows",
    "token_table",
]

IGNORE = -100
"""Label of a position that is not trained on, as in `torch.nn.functional.cross_entropy`."""

TokenIds = Tensor | Iterable[int]


def token_table(ids: TokenIds, device: torch.device | str = "cpu") -> Tensor:
    """Marks token ids in a table, which looks a batch up faster than a search in the list.

    Args:
        ids: Token ids ≥ 0, or such a table, which comes back on the device.
        device: Where the table is to live.

    Returns:
        (max id + 2,) bool; the last entry is False and stands for every higher id.
    """
    if isinstance(ids, Tensor) and ids.dtype == torch.bool:
        return ids.to(device)
    values = [int(i) for i in ids]
    if values and min(values) < 0:
        raise ValueError(f"found token id {min(values)}; expected 0 or more")
    table = torch.zeros(max(values, default=-1) + 2, dtype=torch.bool)
    table[values] = True
    return table.to(device)


def aligned_labels(labels: Tensor, label_shift: int) -> Tensor:
    """Labels moved to the place of their loss.

    Args:
        labels: (B, T) int64.
        label_shift: How far a label stands to the right of its loss. 0: both at the same index,
            as in a response's own tokens beside the losses of predicting them. 1: labels are
            Hugging Face's (a copy of `input_ids`) and losses come from the unshifted logits, so
            that loss t is that of token t + 1. −1: loss t belongs to label t − 1, as when a
            trainer looks up the token that a position has read instead of the one it predicts.

    Returns:
        (B, T) int64; the columns whose label is outside, the last `label_shift` ones or the first
        `-label_shift`, are −100.
    """
    if label_shift == 0:
        return labels
    outside = min(abs(label_shift), labels.shape[1])
    if label_shift > 0:
        return F.pad(labels[:, label_shift:], (0, outside), value=IGNORE)
    return F.pad(labels[:, : labels.shape[1] - outside], (outside, 0), value=IGNORE)


def near(marked: Tensor, window: int, inside: Tensor | None = None) -> Tensor:
    """Whether a marked position is at most `window` positions away, to either side.

    Args:
        marked: (B, T) bool.
        window: In tokens; 0 gives `marked` itself.
        inside: (B, T) bool, the positions of responses; a window ends where they do, so that it
            does not reach over a prompt or a tool's answer into the next turn. None for all.

    Returns:
        (B, T) bool. The cost does not depend on the window.
    """
    if window < 0:
        raise ValueError(f"window is {window}; expected 0 or more")
    if window == 0:
        return marked
    after = _follows(marked, window, inside)
    flipped = None if inside is None else inside.flip(1)
    return after | _follows(marked.flip(1), window, flipped).flip(1)


def _follows(marked: Tensor, window: int, inside: Tensor | None) -> Tensor:
    """(B, T) whether a marked position is at most `window` places back, with no gap between."""
    here = torch.arange(marked.shape[1], device=marked.device).expand(marked.shape)
    far = -1 - window
    last = torch.where(marked, here, far).cummax(dim=1).values
    found = here - last <= window
    if inside is not None:
        gap = torch.where(inside, far, here).cummax(dim=1).values
        found = found & (last > gap)
    return found


def freeze_weights(
    labels: Tensor,
    loss_per_token: Tensor | None,
    freeze_list: TokenIds,
    window: int = 0,
    threshold: float = math.inf,
    weight: float = 0.0,
    pillars: TokenIds = (),
    *,
    label_shift: int = 0,
) -> Tensor:
    """Weights that freeze tokens: `weight` (λ) on them and on hard positions around them.

    A position is frozen if its token is in `freeze_list`, or if its loss exceeds `threshold`
    and a token of `freeze_list` is at most `window` positions away in the same response (a gap of
    −100, such as a tool's answer, ends one and begins another). A pillar
    is never frozen, on either ground; a type in both lists counts as a pillar, and nothing is
    frozen around it for its sake.

    Args:
        labels: (B, T) int64 token ids, −100 on prompts and padding.
        loss_per_token: (B, T) reverse KL of each position, in nats; no gradient flows through it.
            None is allowed if the window is 0, for then no loss is asked.
        freeze_list: Token ids, or their `token_table`.
        window: Half width of the local window, in tokens.
        threshold: Loss above which a position of a window is frozen, in nats.
        weight: λ in [0, 1], the weight of frozen positions.
        pillars: Token ids, or their `token_table`, that always keep weight 1.
        label_shift: As in `aligned_labels`: `loss_per_token[b, t]` is the loss of
            `labels[b, t + label_shift]`.

    Returns:
        (B, T) float32, aligned with `loss_per_token`: 0 if the label is −100, λ if frozen,
        else 1.

    Example:
        >>> labels = torch.tensor([[-100, 5, 8, 6, 5, -100]])
        >>> loss = torch.tensor([[9.0, 2.0, 2.0, 0.1, 2.0, 9.0]])
        >>> freeze_weights(labels, loss, [8], window=1, threshold=1.0)
        tensor([[0., 0., 0., 1., 1., 0.]])
    """
    if labels.ndim != 2:
        raise ValueError(f"labels have shape {tuple(labels.shape)}; expected (B, T)")
    if not 0 <= weight <= 1:
        raise ValueError(f"weight is {weight}; expected a number in [0, 1]")
    labels = aligned_labels(labels, label_shift)
    valid = labels != IGNORE
    pillar = _lookup(labels, pillars)
    listed = _lookup(labels, freeze_list) & ~pillar
    frozen = listed
    if window > 0 and threshold < math.inf:
        if loss_per_token is None or loss_per_token.shape != labels.shape:
            found = None if loss_per_token is None else tuple(loss_per_token.shape)
            raise ValueError(f"loss_per_token has shape {found}; expected {tuple(labels.shape)}")
        hard = loss_per_token.detach() > threshold
        frozen = listed | (near(listed, window, valid) & hard & valid & ~pillar)
    weights = valid.to(torch.float32)
    return weights.masked_fill_(frozen, weight)


def random_windows(
    weights: Tensor,
    labels: Tensor,
    generator: torch.Generator,
    pillars: TokenIds = (),
    *,
    label_shift: int = 0,
) -> Tensor:
    """The control of a freeze: as many windows, as long and as heavy, somewhere else.

    Each run of adjacent frozen positions (weight below 1) moves as one block to a random place of
    its own response (of its own turn, where −100 gaps part a row into several); blocks and single trained positions are shuffled, all orders alike. So a
    response keeps its number of frozen positions and their runs (two blocks may come to touch),
    and only where they are is left to chance. Pillars, prompt and padding stay as they are.

    Args:
        weights: (B, T) float32 of `freeze_weights`.
        labels: (B, T), as there.
        generator: Source of chance, on the device of `weights`; seed it for a repeatable control.
        pillars: As in `freeze_weights`.
        label_shift: As there.

    Returns:
        (B, T) float32.
    """
    labels = aligned_labels(labels, label_shift)
    movable = (labels != IGNORE) & ~_lookup(labels, pillars)
    # The movable positions of each row, in order and packed to the left.
    places = torch.argsort((~movable).to(torch.int8), dim=1, stable=True)
    packed = weights.gather(1, places)
    there = movable.gather(1, places)
    frozen = (packed < 1) & there
    # A turn is what stands between two gaps; a place beyond the last of a row is in none.
    turn = ((labels == IGNORE).to(torch.int64).cumsum(dim=1)).gather(1, places)
    joins = torch.zeros_like(frozen)
    joins[:, 1:] = frozen[:, 1:] & frozen[:, :-1] & (turn[:, 1:] == turn[:, :-1])
    block = (~joins).to(torch.int64).cumsum(dim=1) - 1
    keys = torch.rand(
        weights.shape, generator=generator, device=weights.device, dtype=torch.float64
    ).gather(1, block)
    order = torch.argsort(torch.where(there, turn + keys, torch.inf), dim=1, stable=True)
    return weights.scatter(1, places, packed.gather(1, order))


def budget_weights(
    scores: Tensor,
    budget: float,
    labels: Tensor | None = None,
    pillars: TokenIds = (),
    *,
    label_shift: int = 0,
) -> Tensor:
    """Weight 1 on the best share of a batch's positions by a score, 0 elsewhere.

    Args:
        scores: (B, T), higher is better: reverse KL, entropy, information-efficiency ratio, or a
            product of them (`knockout.mining.kl`). NaN is never kept.
        budget: Share of the valid positions to keep, in (0, 1]; 0.01 keeps 1 %. Rounded, and at
            least one position of a batch that has any.
        labels: (B, T) int64, −100 on prompts and padding; None takes every position as valid.
        pillars: Types that are kept on top of the budget.
        label_shift: As in `aligned_labels`.

    Returns:
        (B, T) float32. Of equal scores the earlier position wins.

    Example:
        >>> budget_weights(torch.tensor([[0.1, 3.0, 0.2, 2.0]]), 0.5)
        tensor([[0., 1., 0., 1.]])
    """
    if not 0 < budget <= 1:
        raise ValueError(f"budget is {budget}; expected a share in (0, 1], 0.01 for 1 %")
    valid = torch.ones_like(scores, dtype=torch.bool)
    keep = torch.zeros_like(valid)
    if labels is not None:
        labels = aligned_labels(labels, label_shift)
        valid = labels != IGNORE
        keep = _lookup(labels, pillars)
    candidates = torch.where(valid & ~scores.isnan(), scores.detach().float(), -math.inf)
    flat = candidates.flatten()
    best = torch.argsort(flat, descending=True, stable=True)[: _kept(int(valid.sum()), budget)]
    best = best[flat[best] > -math.inf]
    chosen = torch.zeros_like(flat, dtype=torch.bool)
    chosen[best] = True
    return (chosen.view(scores.shape) | keep).to(torch.float32)


def _kept(n_valid: int, budget: float) -> int:
    return min(n_valid, max(1, round(budget * n_valid)))


def _lookup(labels: Tensor, ids: TokenIds) -> Tensor:
    """(B, T) whether a label is one of the ids; −100 never is."""
    table = token_table(ids, labels.device)
    last = table.shape[0] - 1
    # A negative label wraps to the top and is cut to the last entry, which is False.
    return table[torch.where(labels < 0, last, labels).clamp(max=last)]
