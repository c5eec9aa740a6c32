"""Weighted per-token divergence, whose cost falls with the positions that have no weight.

Two forms of one loss Σ_t w_t D(p_t, q_t), student p and teacher q, in nats, on the kernel of
`knockout.training.divergence`:

* `reverse_kl` (and `divergence.divergence`) on logits, for trainers that already have both
  (B, T, V) tensors;
* `selective_kl` on hidden states, which makes logits for a chunk of trained positions at a time,
  so that neither (N, V) tensor exists and a position with weight 0 costs nothing here. It computes
  the gradient together with the value, so backward repeats no projection.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from knockout.training.divergence import (
    Divergence,
    Listed,
    TwinGroups,
    divergence,
    entropy_of,
    evaluate,
    kernel,
    spread_listed,
    twin_columns,
)
from knockout.training.heads import Head, logits_of, matmul_dtype

__all__ = ["SelectiveLoss", "reverse_kl", "selective_kl"]

# float32 copies of (chunk, V) alive at the peak of one chunk.
_COPIES = 4


class SelectiveLoss(NamedTuple):
    """What `selective_kl` gives; all but `loss` are without gradient.

    Attributes:
        loss: () float32, Σ_t w_t D_t in nats.
        kl: (N,) float32, the divergence of each position, in nats; NaN if it was skipped.
        weights: (N,) float32, the weights that were applied.
        entropy: (N,) float32, the student's entropy in nats; NaN if it was skipped.
        grad_norm: (N,) float32, length of ∂D/∂z with respect to the student's logits at the
            loss's temperature, before weighting; NaN if it was skipped.
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
    """KL(p ‖ q) of each position from whole logits: `divergence` with its default."""
    return divergence(student_logits, teacher_logits, temperature=temperature, merge=merge)


def selective_kl(
    student_hidden: Tensor,
    student_head: Head,
    teacher_hidden: Tensor | Listed,
    teacher_head: Head | None,
    weights: Tensor,
    *,
    chosen: Divergence | None = None,
    emitted: Tensor | None = None,
    limits: Tensor | None = None,
    over: float = 0.0,
    temperature: float = 1.0,
    merge: TwinGroups = (),
    chunk: int | None = None,
) -> SelectiveLoss:
    """Σ_t w_t D(p_t, q_t) from hidden states; positions with weight 0 are skipped.

    A skipped position costs no projection by either head, no softmax and no backward. What is left
    of its cost is the two backbones, whose keys and values later positions attend to.

    Args:
        student_hidden: (N, H) last hidden states that predict the N tokens.
        student_head: (V, H).
        teacher_hidden: (N, H'), no gradient; or what a served teacher lists. Its tokens are then
            actions of their own and all others are one more; `chosen.top_k` and `merge` do not
            apply, and a temperature other than 1 cannot.
        teacher_head: (V', H'); where V' differs from V, the narrower width is used for both. None
            for a served teacher.
        weights: (N,) float32, ≥ 0.
        chosen: Which divergence; None for the reverse KL.
        emitted: (N,) int64, the generated tokens; needed for a one-sample estimate.
        limits: (N,) float32 or None. A position whose divergence exceeds its limit gets weight
            `over`: so the hard positions of a frozen window are found in the pass that trains the
            others. For those the forward half is paid and the backward half saved.
        over: See `limits`.
        temperature: Divides both models' logits.
        merge: Groups of token ids that count as one action (ends of text): probabilities are
            added within a group before the divergence, so nothing is learned about the choice
            inside it.
        chunk: Positions whose logits exist at once; None for about 512 MB of temporaries.

    Returns:
        The loss, and per-position values for logging.
    """
    chosen = chosen or Divergence()
    n = student_hidden.shape[0]
    listed = teacher_hidden if isinstance(teacher_hidden, Listed) else None
    target = listed.logp if listed else teacher_hidden
    assert isinstance(target, Tensor)
    if target.shape[0] != n or weights.shape != (n,):
        raise ValueError(
            f"student {tuple(student_hidden.shape)}, teacher {tuple(target.shape)}, "
            f"weights {tuple(weights.shape)}: expected (N, H), (N, H') and (N,)"
        )
    if chosen.sampled and (emitted is None or emitted.shape != (n,)):
        raise ValueError(f"a one-sample estimate needs the emitted tokens, ({n},)")
    if listed and (merge or temperature != 1.0 or chosen.top_k is not None):
        raise ValueError(
            "a served teacher lists log-probabilities at temperature 1 and of its own choice of "
            "tokens; found merge, top_k or another temperature"
        )
    if not listed and teacher_head is None:
        raise ValueError("the teacher's hidden states need its head")
    width = student_head.weight.shape[0]
    if teacher_head is not None:
        width = min(width, teacher_head.weight.shape[0])
    chunk = chunk or max(1, (512 << 20) // (_COPIES * 4 * width))
    own = (student_hidden, student_head.weight, student_head.bias)
    if not torch.is_grad_enabled():  # else the gradients are worked out all the same
        own = (own[0].detach(), own[1].detach(), None if own[2] is None else own[2].detach())
    job = _Job(
        student_head, teacher_head, listed, chosen, emitted, limits, over, temperature, width,
        chunk, merge,
    )  # fmt: skip
    states = own[0].to(matmul_dtype(own[0]))
    target = target.detach() if listed else target.detach().to(matmul_dtype(target))
    with torch.autocast(states.device.type, enabled=False):  # it would sum the KL in low precision
        parts = _SelectiveKL.apply(  # type: ignore[no-untyped-call]
            states, *own[1:], target, job, weights.detach()
        )
    return SelectiveLoss(*parts)


class _Job(NamedTuple):
    student: Head
    teacher: Head | None
    listed: Listed | None
    chosen: Divergence
    emitted: Tensor | None
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
        target: Tensor,
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
        twins = twin_columns(job.merge, job.width, device)
        for rows in torch.split(torch.nonzero(weights)[:, 0], job.chunk):
            states = hidden[rows]
            z, slope = logits_of(states, job.student, job.width, job.temperature)
            logp = z.log_softmax(dim=1)
            del z
            entropy[rows] = entropy_of(logp)
            value, gradient = _of_chunk(job, logp, target, rows, twins)
            kl[rows] = value
            if job.limits is not None:
                weights[rows] = torch.where(value > job.limits[rows], job.over, weights[rows])
            w = weights[rows]
            loss += torch.where(w == 0, 0.0, w * value).sum()  # a frozen one may be infinite
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


def _of_chunk(
    job: _Job, logp: Tensor, target: Tensor, rows: Tensor, twins: list[Tensor]
) -> tuple[Tensor, Tensor]:
    """The divergence of some positions (n,) and its gradient (n, V)."""
    emitted = None if job.emitted is None else job.emitted[rows]
    if job.listed is not None:
        a, b = spread_listed(logp, Listed(job.listed.ids[rows], target[rows]))
        if job.chosen.sampled:
            value, gradient = evaluate(logp, b, job.chosen, twins, emitted, gradient=True)
        else:
            value, gradient = kernel(logp, a, b, job.chosen.kind, beta=job.chosen.beta, pooled=True)
    else:
        assert job.teacher is not None
        other, _ = logits_of(target[rows], job.teacher, job.width, job.temperature)
        logq = other.log_softmax(dim=1)
        del other
        value, gradient = evaluate(logp, logq, job.chosen, twins, emitted, gradient=True)
    assert gradient is not None
    return value, gradient
