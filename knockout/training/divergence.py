"""The one kernel: divergences of a student p from a teacher q at a position, and their gradients.

With z the student's logits and D(p, q) a divergence, h_j = ∂D/∂p_j gives

    ∂D/∂z = p · (h − Σ_j p_j h_j)                                       (V,)

| kind | D | h |
| --- | --- | --- |
| reverse | Σ p log(p/q) | log(p/q) |
| forward | Σ q log(q/p) | −q/p |
| jsd | β Σ q log(q/m) + (1−β) Σ p log(p/m), m = βq + (1−β)p | (1−β) log(p/m) |

The third is the generalised Jensen-Shannon divergence of GKD (arXiv 2306.13649); as there, its
limits β → 0 and β → 1, divided by β and by 1−β, are the forward and the reverse KL.

Ids that count as one action (ends of text; all ids outside a top-k) carry the log-probability of
their action in each of their columns: D is then that of the actions, and h is the same for all ids
of an action. So merging, top-k with its tail, and a teacher that names only its best tokens are all
this kernel with pooled columns. Training, mining and geometry call it and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from knockout.errors import UsageError

__all__ = [
    "Divergence",
    "Listed",
    "divergence",
    "entropy_of",
    "evaluate",
    "kernel",
    "pool_tail",
    "pool_twins",
    "row_dot",
    "sampled_kl",
    "spread_listed",
    "twin_columns",
]

TwinGroups = Sequence[Sequence[int]]
Kind = Literal["reverse", "forward", "jsd"]


@dataclass(frozen=True, slots=True)
class Divergence:
    """Which divergence a student is trained on, and from how much of the distributions."""

    kind: Kind = "reverse"
    """`reverse` KL(p ‖ q), `forward` KL(q ‖ p), or `jsd`."""
    beta: float = 0.5
    """β of `jsd`, in (0, 1): the teacher's share of the mixture."""
    top_k: int | None = None
    """The student's k most probable actions (tokens, or merged groups of them), and all others as
    one more; None for all."""
    sampled: bool = False
    """The one-sample estimate of the reverse KL from the emitted token. Its gradient is the
    score function's, log(p/q) ∇log p, whose mean over p is the exact gradient."""

    def __post_init__(self) -> None:
        if self.kind not in ("reverse", "forward", "jsd"):
            raise UsageError(f"divergence {self.kind!r}: expected reverse, forward or jsd")
        if self.kind == "jsd" and not 0 < self.beta < 1:
            raise UsageError(f"beta is {self.beta}; expected a number between 0 and 1")
        if self.top_k is not None and self.top_k < 1:
            raise UsageError(f"top_k is {self.top_k}; expected 1 or more, or None")
        if self.sampled and (self.kind != "reverse" or self.top_k is not None):
            raise UsageError(
                "the one-sample estimate is of the reverse KL over all tokens; found kind "
                f"{self.kind!r} and top_k {self.top_k}"
            )


class Listed(NamedTuple):
    """What a served teacher says of N positions: its log-probabilities of a few tokens each.

    Attributes:
        ids: (N, k) int64 token ids; −1 if a position has fewer than k.
        logp: (N, k) float32 log-probabilities; anything if the id is −1.
    """

    ids: Tensor
    logp: Tensor


def kernel(
    logp: Tensor,
    a: Tensor,
    b: Tensor,
    kind: Kind = "reverse",
    *,
    beta: float = 0.5,
    pooled: bool = False,
    gradient: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Values and gradients of N positions.

    Args:
        logp: (N, V) the student's log-probabilities.
        a: (N, V) log-probability of the action that each column belongs to, by the student; `logp`
            itself if every token is its own action.
        b: (N, V) the same by the teacher.
        kind: Which divergence.
        beta: Of `jsd`.
        pooled: Whether a column may stand for an action of several ids.
        gradient: Whether it is wanted.

    Returns:
        D (N,) in nats, and ∂D/∂z (N, V), or None. A token that neither model can emit adds
        nothing; D is +∞ where one gives probability to what the other excludes, as the divergence
        says.
    """
    p = logp.exp()
    if kind == "reverse":
        h = a - b
        value = row_dot(p, h)
        if bool(value.isnan().any()):  # 0 · ∞ and ∞ − ∞; rare, so looked for afterwards
            h.masked_fill_(p == 0, 0.0)
            value = row_dot(p, h)
        return value, h.sub_(value[:, None]).mul_(p) if gradient else None
    # Within an action the teacher's mass is spread as the student's, which changes no sum.
    q = b.exp()
    if pooled:
        q = q * (logp - a).exp().nan_to_num_(nan=1.0)
    if kind == "forward":
        value = _expectation(q, b - a)
        return value, p.sub_(q) if gradient else None
    # As a sum of exponentials m would need a log of 0 + 0 if both exclude an id.
    m = torch.logaddexp(a + math.log1p(-beta), b + math.log(beta))
    h = (a - m).masked_fill_(p == 0, 0.0)
    value = beta * _expectation(q, b - m) + (1 - beta) * row_dot(p, h)
    if not gradient:
        return value, None
    mean = row_dot(p, h)
    return value, h.sub_(mean[:, None]).mul_(p).mul_(1 - beta)


def divergence(
    student_logits: Tensor,
    teacher_logits: Tensor,
    chosen: Divergence | None = None,
    *,
    temperature: float = 1.0,
    merge: TwinGroups = (),
    emitted: Tensor | None = None,
) -> Tensor:
    """The divergence of each position from whole logits; gradients flow to the student only.

    Args:
        student_logits: (..., V) of any float dtype; computed in float32 or wider.
        teacher_logits: (..., V). If one is wider, the extra ids are padding and are cut.
        chosen: Which divergence; None for the reverse KL.
        temperature: Divides both.
        merge: Groups of token ids that count as one action.
        emitted: (...) int64, the generated tokens; needed for a one-sample estimate.

    Returns:
        (...) in nats, float32, or float64 for float64 logits.
    """
    chosen = chosen or Divergence()
    width = min(student_logits.shape[-1], teacher_logits.shape[-1])
    student, teacher = student_logits[..., :width], teacher_logits[..., :width].detach()
    if student.shape != teacher.shape:
        raise ValueError(
            f"student {tuple(student.shape)} and teacher {tuple(teacher.shape)} differ"
        )
    student = student if student.dtype == torch.float64 else student.float()
    flat = student.reshape(-1, width) / temperature
    logq = (teacher.to(student.dtype).reshape(-1, width) / temperature).log_softmax(dim=-1)
    twins = twin_columns(merge, width, flat.device)
    if chosen.sampled and emitted is None:
        raise ValueError("a one-sample estimate needs the emitted tokens")
    tokens = None if emitted is None else emitted.reshape(-1)
    value: Tensor = _Dense.apply(flat, logq, chosen, twins, tokens)  # type: ignore[no-untyped-call]
    return value.reshape(student.shape[:-1])


def evaluate(
    logp: Tensor,
    logq: Tensor,
    chosen: Divergence,
    twins: Sequence[Tensor],
    emitted: Tensor | None,
    gradient: bool,
) -> tuple[Tensor, Tensor | None]:
    """Value (N,) and ∂/∂z (N, V) of a `Divergence` on log-probabilities (N, V)."""
    a, b = pool_twins(logp, logq, twins)
    if chosen.top_k is not None and chosen.top_k < logp.shape[-1]:
        kept = torch.zeros_like(logp, dtype=torch.bool)
        ranked = a.clone() if twins else a
        for columns in twins:  # an action takes one of the k places
            ranked[:, columns[1:]] = -torch.inf
        kept.scatter_(1, ranked.topk(chosen.top_k, dim=1).indices, True)
        for columns in twins:  # and is kept with all of its ids
            kept[:, columns] = kept[:, columns[:1]]
        a, b = pool_tail(a, b, logp, logq, kept)
    if chosen.sampled:
        assert emitted is not None
        return _one_sample(logp, a, b, emitted, twins, gradient)
    pooled = bool(twins) or chosen.top_k is not None
    return kernel(logp, a, b, chosen.kind, beta=chosen.beta, pooled=pooled, gradient=gradient)


def _one_sample(
    logp: Tensor, a: Tensor, b: Tensor, emitted: Tensor, twins: Sequence[Tensor], gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """log(p/q) of the emitted token's action, and that times ∇ log p of the action."""
    place = emitted[:, None]
    own, ratio = a.gather(1, place), (a - b).gather(1, place)
    if not gradient:
        return ratio[:, 0], None
    inside = torch.zeros_like(logp, dtype=torch.bool).scatter_(1, place, True)
    for columns in twins:
        inside[:, columns] |= (place == columns).any(dim=1, keepdim=True)
    slope = torch.where(inside, (logp - own).exp(), 0.0) - logp.exp()
    return ratio[:, 0], slope * ratio


def sampled_kl(
    student_logp: Tensor, teacher_logp: Tensor, estimator: Literal["k1", "k2", "k3"] = "k3"
) -> Tensor:
    """One-sample reverse KL from the emitted tokens' log-probabilities alone.

    For trainers that have nothing else (a teacher over HTTP, a policy's own log-probabilities).

    Args:
        student_logp: (...) log p of the emitted tokens, with gradient.
        teacher_logp: (...) log q of the same tokens.
        estimator: What the value is: k1 = log(p/q), k2 = ½ log²(p/q), k3 = q/p − 1 + log(p/q)
            (Schulman, "Approximating KL divergence", 2020). k1 and k3 have the KL as their mean,
            k3 is never negative.

    Returns:
        (...) whose value is the estimator and whose gradient is log(p/q) ∇log p for each of them:
        its mean over p is the gradient of the reverse KL, which the gradient of k1 or k3 itself
        is not.
    """
    ratio = (student_logp - teacher_logp).detach()
    if estimator == "k1":
        value = ratio
    elif estimator == "k2":
        value = ratio.square() / 2
    elif estimator == "k3":
        value = torch.expm1(-ratio) + ratio
    else:
        raise ValueError(f"estimator {estimator!r}: expected k1, k2 or k3")
    return value + ratio * (student_logp - student_logp.detach())


class _Dense(torch.autograd.Function):
    """`evaluate` on whole logits (N, V)."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        logq: Tensor,
        chosen: Divergence,
        twins: Sequence[Tensor],
        emitted: Tensor | None,
    ) -> Tensor:
        wanted = ctx.needs_input_grad[0]
        logp = logits.log_softmax(dim=-1)
        value, slope = evaluate(logp, logq, chosen, twins, emitted, wanted)
        ctx.save_for_backward(slope)
        return value

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (slope,) = ctx.saved_tensors
        return slope * grads[0][:, None], None, None, None, None


def pool_twins(logp: Tensor, logq: Tensor, twins: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Both sides with each group's log-probability in all of its columns. (N, V) twice."""
    if not twins:
        return logp, logq
    a, b = logp.clone(), logq.clone()
    for columns in twins:
        for pooled, own in ((a, logp), (b, logq)):
            pooled[:, columns] = own[:, columns].logsumexp(1, keepdim=True)
    return a, b


def pool_tail(
    a: Tensor, b: Tensor, logp: Tensor, logq: Tensor, kept: Tensor
) -> tuple[Tensor, Tensor]:
    """Both sides with all columns outside `kept` (N, V) as one action."""
    return tuple(  # type: ignore[return-value]
        torch.where(kept, pooled, own.masked_fill(kept, -torch.inf).logsumexp(1, keepdim=True))
        for pooled, own in ((a, logp), (b, logq))
    )


def spread_listed(logp: Tensor, listed: Listed) -> tuple[Tensor, Tensor]:
    """A student's whole distribution and a teacher's list of tokens, as actions.

    The listed tokens are actions of their own and all the others one more, which has the mass that
    the teacher's list leaves over.

    Args:
        logp: (N, V) the student's log-probabilities.
        listed: Of the same N positions.

    Returns:
        a and b of `kernel`, each (N, V), pooled.
    """
    n, width = logp.shape
    known = (listed.ids >= 0) & (listed.ids < width)
    places = torch.where(known, listed.ids, width).to(logp.device)
    values = torch.where(known, listed.logp, -torch.inf).to(logp)
    # One more column takes what does not exist.
    kept = torch.zeros(n, width + 1, dtype=torch.bool, device=logp.device)
    kept = kept.scatter_(1, places, True)[:, :width]
    b = torch.full((n, width + 1), -torch.inf, dtype=logp.dtype, device=logp.device)
    b = b.scatter_(1, places, values)[:, :width]
    # Rounding can bring the list's sum to 1 and above; what is left is then below its precision.
    left = torch.log((-torch.expm1(b.logsumexp(1, keepdim=True))).clamp(min=1e-7))
    rest = logp.masked_fill(kept, -torch.inf).logsumexp(1, keepdim=True)
    return torch.where(kept, logp, rest), torch.where(kept, b, left)


def twin_columns(merge: TwinGroups, width: int, device: torch.device) -> list[Tensor]:
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


def _expectation(weights: Tensor, values: Tensor) -> Tensor:
    """Σ_j w_j x_j with 0 · anything = 0. (N, V) twice -> (N,)."""
    value = row_dot(weights, values)
    if bool(value.isnan().any()):
        value = row_dot(weights, values.masked_fill(weights == 0, 0.0))
    return value


def row_dot(a: Tensor, b: Tensor) -> Tensor:
    """Σ_j a[i, j] b[i, j], (N, V) twice -> (N,), without an (N, V) product."""
    return torch.bmm(a[:, None, :], b[:, :, None])[:, 0, 0]


def entropy_of(logp: Tensor) -> Tensor:
    """−Σ p log p, (n, V) -> (n,), with 0 · log 0 = 0."""
    p = logp.exp()
    entropy = -row_dot(p, logp)
    return torch.special.entr(p).sum(dim=1) if bool(entropy.isnan().any()) else entropy
