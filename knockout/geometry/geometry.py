"""Mean logit-space gradients of token types, streaming over positions.

At a position with student p and teacher q the reverse KL has the gradient

    g = ∂KL(p ‖ q)/∂z = p · (log(p/q) − KL)                                     (V,)

with respect to the student's logits z. For a type v (the positions at which v was emitted) G_v is the
mean of g. Two directions say where training goes: G_global, the mean over all positions, in which
frequent types weigh more, and G_balanced, the mean of G_v over all types that occur.

V-sized sums are kept for chosen types and the two directions only; every other position is added
to the directions and forgotten.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from knockout.training.divergence import kernel

__all__ = ["Geometry", "GradientSums", "kl_gradient"]


def kl_gradient(student_logits: Tensor, teacher_logits: Tensor) -> tuple[Tensor, Tensor]:
    """Reverse KL of positions and its gradient with respect to the student's logits.

    Args:
        student_logits: (N, V), computed in float32 or wider.
        teacher_logits: (N, V); if one is wider, the extra ids are padding and are cut.

    Returns:
        KL (N,) in nats and g (N, V); a row of g adds up to 0.
    """
    width = min(student_logits.shape[1], teacher_logits.shape[1])
    dtype = torch.float64 if student_logits.dtype == torch.float64 else torch.float32
    logp = student_logits[:, :width].to(dtype).log_softmax(dim=1)
    logq = teacher_logits[:, :width].to(dtype).log_softmax(dim=1)
    kl, gradient = kernel(logp, logp, logq)
    assert gradient is not None
    return kl, gradient


@dataclass(frozen=True, slots=True)
class Geometry:
    """Geometry of K chosen types; tensors are (K,) float64 unless said otherwise.

    A type that was never emitted has NaN throughout.

    Attributes:
        type_ids: (K,) int64.
        count: (K,) int64, its positions.
        mean_kl: In nats.
        mean_norm: Mean length of g over its positions.
        norm: Length of G_v. Far below `mean_norm` where its positions pull against each other.
        coherence: norm / mean_norm, in [0, 1]: 1 if all positions pull the same way.
        cos_global: Cosine of G_v and G_global.
        cos_global_rest: The same with G_global of all other positions; a frequent type is part of
            the whole and agrees with itself.
        cos_balanced: Cosine of G_v and G_balanced.
        cos_balanced_rest: The same with G_balanced of all other types.
        share_global: (count / N) ⟨G_v, G_global⟩ / ‖G_global‖², the part of G_global that is this
            type's; over all types the shares add up to 1. Negative: it pulls against the rest.
        norm_global: Length of G_global.
        norm_balanced: Length of G_balanced.
        cos_directions: Cosine of G_global and G_balanced.
        n_positions: N.
        n_types: Types that occur.
    """

    type_ids: Tensor
    count: Tensor
    mean_kl: Tensor
    mean_norm: Tensor
    norm: Tensor
    coherence: Tensor
    cos_global: Tensor
    cos_global_rest: Tensor
    cos_balanced: Tensor
    cos_balanced_rest: Tensor
    share_global: Tensor
    norm_global: float
    norm_balanced: float
    cos_directions: float
    n_positions: int
    n_types: int


class GradientSums:
    """Adds up gradients, chunk by chunk."""

    def __init__(self, counts: Tensor, type_ids: Sequence[int], device: str = "cpu") -> None:
        """Starts empty.

        Args:
            counts: (V,) int64, how often each type occurs in all that will be added: known from
                the token ids before any forward pass, and needed to balance types on the way.
            type_ids: The K types to keep sums of. K + 2 sums of V float64 are held.
            device: Of the sums.
        """
        if len(set(type_ids)) != len(type_ids):
            raise ValueError("a type was chosen twice")
        self.counts = counts.to(device)
        self.ids = torch.tensor(list(type_ids), dtype=torch.int64, device=device)
        self.slot = torch.full_like(self.counts, -1)
        self.slot[self.ids] = torch.arange(len(self.ids), device=device)
        width = self.counts.shape[0]
        self.sums = torch.zeros(len(self.ids), width, dtype=torch.float64, device=device)
        self.directions = torch.zeros(2, width, dtype=torch.float64, device=device)
        self.norms = torch.zeros(len(self.ids), dtype=torch.float64, device=device)
        self.kl = torch.zeros_like(self.norms)
        self.seen = torch.zeros(len(self.ids), dtype=torch.int64, device=device)
        self.n = 0

    def add(self, emitted: Tensor, kl: Tensor, gradient: Tensor) -> None:
        """Adds positions.

        Args:
            emitted: (N,) int64 types.
            kl: (N,) of `kl_gradient`.
            gradient: (N, W) of `kl_gradient`, W ≤ V.
        """
        width = gradient.shape[1]
        weights = torch.stack(
            [torch.ones_like(kl), 1 / self.counts[emitted].clamp(min=1).to(kl.dtype)]
        )
        self.directions[:, :width] += (weights @ gradient).double()
        self.n += len(emitted)
        slots = self.slot[emitted]
        chosen = torch.nonzero(slots >= 0)[:, 0]
        if not len(chosen):
            return
        slots, rows = slots[chosen], gradient[chosen]
        present, place = torch.unique(slots, return_inverse=True)
        pick = torch.zeros(len(present), len(chosen), dtype=rows.dtype, device=rows.device)
        pick[place, torch.arange(len(chosen), device=rows.device)] = 1
        self.sums[present, :width] += (pick @ rows).double()
        self.norms.index_add_(0, slots, torch.linalg.vector_norm(rows, dim=1).double())
        self.kl.index_add_(0, slots, kl[chosen].double())
        self.seen.index_add_(0, slots, torch.ones_like(slots))

    def finish(self) -> Geometry:
        """The geometry of what was added.

        Raises:
            ValueError: Nothing was added, or a chosen type was not added as often as `counts` says.
        """
        if not self.n:
            raise ValueError("no position was added")
        wanted = self.counts[self.ids]
        if not torch.equal(self.seen, wanted) or self.n != int(self.counts.sum()):
            raise ValueError(
                f"{self.n} positions were added, and counts say {int(self.counts.sum())}; they "
                "must be those of the same rollouts"
            )
        n_types = int((self.counts > 0).sum())
        count = self.seen.double()
        mean = self.sums / count[:, None]
        total, balanced = self.directions[0] / self.n, self.directions[1] / n_types
        rest = (self.directions[0] - self.sums) / max(self.n - 1, 1)  # only its direction matters
        balanced_rest = self.directions[1] - mean
        norm = torch.linalg.vector_norm(mean, dim=1)
        mean_norm = self.norms / count
        return Geometry(
            type_ids=self.ids,
            count=self.seen,
            mean_kl=self.kl / count,
            mean_norm=mean_norm,
            norm=norm,
            coherence=norm / mean_norm,
            cos_global=_cosine(mean, total[None]),
            cos_global_rest=_cosine(mean, rest),
            cos_balanced=_cosine(mean, balanced[None]),
            cos_balanced_rest=_cosine(mean, balanced_rest),
            share_global=(count / self.n) * (mean @ total) / total.square().sum(),
            norm_global=float(torch.linalg.vector_norm(total)),
            norm_balanced=float(torch.linalg.vector_norm(balanced)),
            cos_directions=float(_cosine(total[None], balanced[None])),
            n_positions=self.n,
            n_types=n_types,
        )


def _cosine(a: Tensor, b: Tensor) -> Tensor:
    """Cosine of rows, (K, V) and (K or 1, V) -> (K,); NaN if one is 0."""
    length = torch.linalg.vector_norm(a, dim=1) * torch.linalg.vector_norm(b, dim=1)
    return (a * b).sum(dim=1) / torch.where(length > 0, length, torch.nan)
