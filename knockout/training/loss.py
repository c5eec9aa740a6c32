"""Weighted per-token reverse KL, whose cost falls with the positions that have no weight.

Two forms of one loss Σ_t w_t KL(p_t ‖ q_t), student p and teacher q, in nats:

* `reverse_kl` on logits, for trainers that already hold both (B, T, V) tensors;
* `selective_reverse_kl` on hidden states, which makes logits for a chunk of trained positions at
  a time, so that neither (N, V) tensor exists and a position with weight 0 costs nothing here.

With z the student's logits, ∂KL/∂z = p · (log(p/q) − KL). The second form computes that at once
with the value, so backward repeats no projection.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["Head", "SelectiveLoss", "head_of", "reverse_kl", "selective_reverse_kl"]

# float32 copies of (chunk, V) alive at the peak of one chunk.
_COPIES = 4
_HAS_OUT_DTYPE = tuple(int(x) for x in torch.__version__.split(".")[:2]) >= (2, 8)

TwinGroups = Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True, eq=False)
class Head:
    """A language model's last layer: logits = cap(scale · (hidden · weightᵀ + bias)).

    Attributes:
        weight: (V, H).
        bias: (V,) or None.
        scale: Factor on the logits.
        soft_cap: c of the cap c · tanh(· / c); None for no cap.
    """

    weight: Tensor
    bias: Tensor | None = None
    scale: float = 1.0
    soft_cap: float | None = None


def head_of(model: Any) -> Head:
    """The head of a causal language model of transformers.

    Scale and soft cap are read from its configuration under the names `logit_scale`,
    `logits_scaling` (a divisor) and `final_logit_softcapping`. A model that does anything else to
    its logits is not described by a `Head`; `knockout.mining.forward.ScoringModel` tells whether
    one is (`split`).
    """
    config = model.config.get_text_config()
    layer = model.get_output_embeddings()
    scale = float(getattr(config, "logit_scale", None) or 1.0)
    scale /= float(getattr(config, "logits_scaling", None) or 1.0)
    soft_cap = getattr(config, "final_logit_softcapping", None)
    bias: Tensor | None = getattr(layer, "bias", None)
    return Head(_whole(layer.weight), _whole(bias), scale, float(soft_cap) if soft_cap else None)


def _whole(weight: Any) -> Any:
    """A sharded parameter as one tensor, gathered once for all chunks."""
    return weight.full_tensor() if hasattr(weight, "full_tensor") else weight


class SelectiveLoss(NamedTuple):
    """What `selective_reverse_kl` gives; all but `loss` are without gradient.

    Attributes:
        loss: () float32, Σ_t w_t KL_t in nats.
        kl: (N,) float32, KL of each position, in nats; NaN where it was skipped.
        weights: (N,) float32, the weights that were applied.
        entropy: (N,) float32, the student's entropy in nats; NaN where it was skipped.
        grad_norm: (N,) float32, length of ∂KL/∂z with respect to the student's logits at the
            loss's temperature, before weighting; NaN where it was skipped.
    """

    loss: Tensor
    kl: Tensor
    weights: Tensor
    entropy: Tensor
    grad_norm: Tensor


def reverse_kl(
    student_logits: Tensor,
    teacher_logits: Tensor,
    *,
    temperature: float = 1.0,
    merge: TwinGroups = (),
) -> Tensor:
    """KL(p ‖ q) of each position from whole logits; gradients flow to the student only.

    Args:
        student_logits: (..., V) of any float dtype; computed in float32 or wider.
        teacher_logits: (..., V). Where one is wider, the extra ids are padding and are cut.
        temperature: Divides both.
        merge: Groups of token ids that count as one action, as in `selective_reverse_kl`.

    Returns:
        (...) in nats, float32, or float64 for float64 logits.
    """
    width = min(student_logits.shape[-1], teacher_logits.shape[-1])
    student, teacher = student_logits[..., :width], teacher_logits[..., :width].detach()
    if student.shape != teacher.shape:
        raise ValueError(
            f"student {tuple(student.shape)} and teacher {tuple(teacher.shape)} differ"
        )
    student = student if student.dtype == torch.float64 else student.float()
    logp = (student / temperature).log_softmax(dim=-1)
    logq = (teacher.to(student.dtype) / temperature).log_softmax(dim=-1)
    ratio = logp - logq
    for columns in _twin_columns(merge, width, logp.device):
        twin = logp[..., columns].logsumexp(-1) - logq[..., columns].logsumexp(-1)
        ratio = ratio.index_copy(
            ratio.ndim - 1, columns, twin[..., None].expand(*twin.shape, len(columns)).contiguous()
        )
    return (logp.exp() * ratio).sum(dim=-1)


def selective_reverse_kl(
    student_hidden: Tensor,
    student_head: Head,
    teacher_hidden: Tensor,
    teacher_head: Head,
    weights: Tensor,
    *,
    limits: Tensor | None = None,
    over: float = 0.0,
    temperature: float = 1.0,
    merge: TwinGroups = (),
    chunk: int | None = None,
) -> SelectiveLoss:
    """Σ_t w_t KL(p_t ‖ q_t) from hidden states; positions with weight 0 are skipped.

    A skipped position costs no projection by either head, no softmax and no backward. What is left
    of its cost is the two backbones, whose keys and values later positions attend to.

    Args:
        student_hidden: (N, H) last hidden states that predict the N tokens.
        student_head: (V, H).
        teacher_hidden: (N, H'), no gradient.
        teacher_head: (V', H'); where V' differs from V, the narrower width is used for both.
        weights: (N,) float32, ≥ 0.
        limits: (N,) float32 or None. A position whose KL exceeds its limit gets weight `over`: so
            the hard positions of a frozen window are found in the pass that trains the others.
            For those the forward half is paid and the backward half saved.
        over: See `limits`.
        temperature: Divides both models' logits.
        merge: Groups of token ids that count as one action (ends of text): probabilities are
            added within a group before the KL, so nothing is learned about the choice inside it.
        chunk: Positions whose logits exist at once; None for about 512 MB of temporaries.

    Returns:
        The loss, and per-position values for logging.
    """
    n = student_hidden.shape[0]
    if teacher_hidden.shape[0] != n or weights.shape != (n,):
        raise ValueError(
            f"student {tuple(student_hidden.shape)}, teacher {tuple(teacher_hidden.shape)}, "
            f"weights {tuple(weights.shape)}: expected (N, H), (N, H') and (N,)"
        )
    width = min(student_head.weight.shape[0], teacher_head.weight.shape[0])
    chunk = chunk or max(1, (512 << 20) // (_COPIES * 4 * width))
    own = (student_hidden, student_head.weight, student_head.bias)
    if not torch.is_grad_enabled():  # else the gradients are worked out all the same
        own = (own[0].detach(), own[1].detach(), None if own[2] is None else own[2].detach())
    job = _Job(student_head, teacher_head, limits, over, temperature, width, chunk, merge)
    states = own[0].to(_matmul_dtype(own[0]))
    targets = teacher_hidden.detach().to(_matmul_dtype(teacher_hidden))
    with torch.autocast(states.device.type, enabled=False):  # it would sum the KL in low precision
        parts = _SelectiveKL.apply(  # type: ignore[no-untyped-call]
            states, *own[1:], targets, job, weights.detach()
        )
    return SelectiveLoss(*parts)


class _Job(NamedTuple):
    student: Head
    teacher: Head
    limits: Tensor | None
    over: float
    temperature: float
    width: int
    chunk: int
    merge: TwinGroups


class _SelectiveKL(torch.autograd.Function):
    """Value and gradient in one sweep over chunks of the positions that have weight."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        teacher_hidden: Tensor,
        job: _Job,
        weights: Tensor,
    ) -> tuple[Tensor, ...]:
        n, device = hidden.shape[0], hidden.device
        kl, entropy, norm = (torch.full((n,), torch.nan, device=device) for _ in range(3))
        weights = weights.to(torch.float32, copy=True)
        loss = torch.zeros((), dtype=torch.float32, device=device)
        wants = ctx.needs_input_grad[:3]
        grad_hidden = torch.zeros_like(hidden) if wants[0] else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if wants[1] else None
        grad_bias = (
            torch.zeros_like(bias, dtype=torch.float32) if wants[2] and bias is not None else None
        )
        twins = _twin_columns(job.merge, job.width, device)
        for rows in torch.split(torch.nonzero(weights)[:, 0], job.chunk):
            states = hidden[rows]
            z, slope = _logits(states, job.student, job.width, job.temperature)
            logp = z.log_softmax(dim=1)
            del z
            target, _ = _logits(teacher_hidden[rows], job.teacher, job.width, job.temperature)
            logq = target.log_softmax(dim=1)
            del target
            p = logp.exp()
            entropy[rows] = -_row_dot(p, logp)
            pooled = [logp[:, c].logsumexp(1) - logq[:, c].logsumexp(1) for c in twins]
            ratio = logp.sub_(logq)
            for columns, twin in zip(twins, pooled, strict=True):
                ratio[:, columns] = twin[:, None]
            value = _row_dot(p, ratio)
            kl[rows] = value
            if job.limits is not None:
                weights[rows] = torch.where(value > job.limits[rows], job.over, weights[rows])
            w = weights[rows]
            loss += (w * value).sum()
            gradient = ratio.sub_(value[:, None]).mul_(p)
            norm[rows] = torch.linalg.vector_norm(gradient, dim=1)
            if not any(wants):
                continue
            gradient.mul_((w * (job.student.scale / job.temperature))[:, None])
            if slope is not None:
                gradient.mul_(slope)
            kept = w != 0
            if not bool(kept.all()):
                gradient, states, rows = gradient[kept], states[kept], rows[kept]
            low = gradient.to(states.dtype)
            if grad_hidden is not None:
                grad_hidden[rows] = low @ weight[: job.width].to(states.dtype)
            if grad_weight is not None:
                if low.dtype == torch.float32:
                    grad_weight[: job.width].addmm_(low.T, states)
                else:
                    grad_weight[: job.width] += low.T @ states
            if grad_bias is not None:
                grad_bias[: job.width] += gradient.sum(dim=0)
        ctx.save_for_backward(grad_hidden, grad_weight, grad_bias)
        ctx.dtypes = weight.dtype, None if bias is None else bias.dtype
        ctx.mark_non_differentiable(kl, weights, entropy, norm)
        return loss, kl, weights, entropy, norm

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight, grad_bias = ctx.saved_tensors
        by = grads[0]
        return (
            None if grad_hidden is None else grad_hidden * by.to(grad_hidden.dtype),
            None if grad_weight is None else (grad_weight * by).to(ctx.dtypes[0]),
            None if grad_bias is None else (grad_bias * by).to(ctx.dtypes[1]),
            None,
            None,
            None,
        )


def project(states: Tensor, head: Head) -> Tensor:
    """Logits (n, V) float32 of states (n, H), without gradient."""
    states = states.detach().to(_matmul_dtype(states))
    with torch.autocast(states.device.type, enabled=False):
        return _logits(states, head, head.weight.shape[0], 1.0)[0]


def _matmul_dtype(states: Tensor) -> torch.dtype:
    """What a projection multiplies in: autocast's dtype inside autocast, else the states' own."""
    kind = states.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else states.dtype


def _logits(
    states: Tensor, head: Head, width: int, temperature: float
) -> tuple[Tensor, Tensor | None]:
    """Logits (n, width) float32 at a temperature, and the cap's slope (n, width) or None."""
    weight = head.weight[:width].detach().to(states.dtype)
    # Logits of 16 bits would round the KL away where student and teacher are close.
    if _HAS_OUT_DTYPE and states.is_cuda and states.dtype in (torch.float16, torch.bfloat16):
        z = torch.mm(states, weight.T, out_dtype=torch.float32)
    else:
        z = states.float() @ weight.float().T
    if head.bias is not None:
        z.add_(head.bias[:width].detach().float())
    if head.scale != 1.0:
        z.mul_(head.scale)
    slope: Tensor | None = None
    if head.soft_cap is not None:
        z.div_(head.soft_cap).tanh_()
        slope = 1 - z.square()
        z.mul_(head.soft_cap)
    if temperature != 1.0:
        z.div_(temperature)
    return z, slope


def _twin_columns(merge: TwinGroups, width: int, device: torch.device) -> list[Tensor]:
    """Index tensors of the groups of two ids or more; they must not overlap."""
    seen: set[int] = set()
    columns = []
    for group in merge:
        ids = sorted({int(i) for i in group})
        if ids and (ids[0] < 0 or ids[-1] >= width):
            raise ValueError(f"merged token ids {ids}: expected ids from 0 to {width - 1}")
        if seen.intersection(ids):
            raise ValueError(f"token ids {sorted(seen.intersection(ids))} are in two merged groups")
        seen.update(ids)
        if len(ids) > 1:
            columns.append(torch.tensor(ids, device=device))
    return columns


def _row_dot(a: Tensor, b: Tensor) -> Tensor:
    """Σ_j a[i, j] b[i, j], (N, V) twice -> (N,), without an (N, V) product."""
    return torch.bmm(a[:, None, :], b[:, :, None])[:, 0, 0]
