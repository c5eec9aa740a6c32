"""Scores of a position from two next-token distributions, computed in chunks.

A position is one generated token with the distributions that the student p and the teacher q give
at its place. All logarithms are natural, so divergences and entropies are in nats.

Pure tensor functions: nothing here knows of models, files or tokenizers. A model comes in as its
last hidden states and a head (a function from hidden states to logits), so that logits exist for
one chunk of positions at a time: never (T, V) in float32, for no model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from knockout.training.divergence import entropy_of, kernel
from knockout.training.eos_merge import merge_actions

__all__ = [
    "Head",
    "PositionScores",
    "chunk_positions",
    "efficiency_ratio",
    "score_hidden",
    "score_logits",
    "signal_and_noise",
]

Head = Callable[[Tensor], Tensor]

# float32 copies of (chunk, V) alive at the peak of one chunk: both models' logits as the heads
# return them, the teacher's log-probabilities, the student's, its probabilities, their difference.
_COPIES = 6


class PositionScores(NamedTuple):
    """Scores of N positions, each a tensor (N,).

    Attributes:
        reverse_kl: float32, KL(p ‖ q) = Σ_a p(a) (log p(a) − log q(a)), in nats.
        entropy: float32, the student's entropy −Σ_a p(a) log p(a), in nats.
        agree: bool, whether the student's most probable token is (one of) the teacher's.
        teacher_gap: float32, max_a log q(a) − log q(emitted) ≥ 0, in nats: how far the emitted
            token is behind the teacher's favourite.
        signal: float32, S = Var_p[A] of `signal_and_noise`, in nats².
        noise: float32, M(b*) − S of `signal_and_noise`, in nats².
        grad_norm: float32, length of ∂KL/∂z with respect to the student's logits.
    """

    reverse_kl: Tensor
    entropy: Tensor
    agree: Tensor
    teacher_gap: Tensor
    signal: Tensor
    noise: Tensor
    grad_norm: Tensor


# Temporaries of a chunk: on a CPU small enough for its caches (which makes twice the speed), on a
# GPU large enough to keep it busy. Measured on SmolLM2: 128 positions are best on one core.
_CPU_BYTES, _GPU_BYTES = 160 << 20, 512 << 20
# Fewer positions at once would read the head's weights too often.
_LEAST = 64


def chunk_positions(vocab_size: int, device: torch.device | str = "cpu") -> int:
    """How many positions to score at once on a device: 160 MB of temporaries, on a GPU 512 MB."""
    budget = _CPU_BYTES if torch.device(device).type == "cpu" else _GPU_BYTES
    return max(_LEAST, budget // (_COPIES * 4 * vocab_size))


def signal_and_noise(student_logp: Tensor, advantage: Tensor) -> tuple[Tensor, Tensor]:
    """Signal and noise of the one-sample policy gradient of the reverse KL at a position.

    The estimator draws a ~ p and gives the gradient (A(a) − b)(e_a − p) with respect to the
    logits, with advantage A = log q − log p. In the Fisher metric F = diag(p) − p pᵀ (through its
    pseudo-inverse) the squared length of e_a − p is (1 − p(a)) / p(a). Hence

        S     = ‖E g‖²  = Var_p[A]
        M(b)  = E ‖g‖²  = Σ_a (A(a) − b)² (1 − p(a))
        b*    = Σ_a A(a) (1 − p(a)) / Σ_a (1 − p(a)), which makes M smallest,

    and the noise, the estimator's variance, is M(b*) − S. With two tokens it is 0: there the best
    scalar baseline makes both draws give the same gradient.

    Args:
        student_logp: (N, k) log-probabilities of the candidate set; renormalised here.
        advantage: (N, k); a constant added to a row changes nothing.

    Returns:
        S and M(b*) − S, each (N,) float64 and ≥ 0.
    """
    p = student_logp.to(torch.float64).log_softmax(dim=1).exp()
    a = advantage.to(torch.float64)
    weight = (1 - p).clamp_(min=0)
    total = weight.sum(dim=1, keepdim=True)
    baseline = (a * weight).sum(dim=1, keepdim=True) / total.clamp(min=torch.finfo(a.dtype).tiny)
    mean = (p * a).sum(dim=1, keepdim=True)
    signal = (p * (a - mean).square()).sum(dim=1)
    moment = (weight * (a - baseline).square()).sum(dim=1)
    noise = moment - signal
    # Below rounding the difference means nothing; 1e-12 of the moment is far above float64's own.
    return signal, torch.where(noise > 1e-12 * moment, noise, 0.0)


def efficiency_ratio(signal: Tensor, noise: Tensor) -> Tensor:
    """Information-efficiency ratio S / (M(b*) − S): the squared signal-to-noise of one sample.

    0 if there is no signal (student and teacher agree on the set), +∞ if there is signal and
    no noise (two tokens).

    Args:
        signal: Any shape, as `signal_and_noise` gives it, or a sum of such.
        noise: The same shape.

    Returns:
        The same shape.
    """
    return torch.where(signal > 0, signal / noise, torch.zeros_like(signal))


def score_logits(
    student_logits: Tensor, teacher_logp: Tensor, emitted: Tensor, top_k: int = 20
) -> PositionScores:
    """Scores positions whose whole distributions are at hand.

    Args:
        student_logits: (N, V) of any float dtype.
        teacher_logp: (N, V) float32 or float64 log-probabilities; its dtype is computed in.
        emitted: (N,) int64, the token that the student generated.
        top_k: Size of the candidate set for signal and noise: the student's most probable tokens,
            renormalised. At least 2.

    Returns:
        The scores of the N positions. A KL is +∞ if the teacher gives 0 to a token that the
        student can draw.
    """
    if student_logits.shape != teacher_logp.shape or emitted.shape != student_logits.shape[:1]:
        raise ValueError(
            f"student {tuple(student_logits.shape)}, teacher {tuple(teacher_logp.shape)} and "
            f"emitted {tuple(emitted.shape)}: expected (N, V), (N, V) and (N,)"
        )
    if top_k < 2:
        raise ValueError(f"top_k is {top_k}; expected 2 or more")
    logp = student_logits.to(teacher_logp.dtype).log_softmax(dim=1)
    best, top_ids = logp.topk(min(top_k, logp.shape[1]), dim=1)
    advantage = teacher_logp.gather(1, top_ids) - best
    if bool(advantage.isinf().any() | advantage.isnan().any()):  # tokens that a model excludes
        advantage = advantage.nan_to_num(nan=0.0, neginf=-torch.finfo(torch.float32).max)
    reverse_kl, gradient = kernel(logp, logp, teacher_logp)
    assert gradient is not None
    norm = torch.linalg.vector_norm(gradient, dim=1).nan_to_num_(nan=torch.inf)
    del gradient
    entropy = entropy_of(logp)
    favourite = teacher_logp.amax(dim=1)
    signal, noise = signal_and_noise(best, advantage)
    return PositionScores(
        reverse_kl=reverse_kl.clamp_(min=0).float(),
        entropy=entropy.clamp_(min=0).float(),
        agree=teacher_logp.gather(1, top_ids[:, :1])[:, 0] == favourite,
        teacher_gap=(favourite - teacher_logp.gather(1, emitted[:, None])[:, 0]).float(),
        signal=signal.float(),
        noise=noise.float(),
        grad_norm=norm.float(),
    )


def score_hidden(
    students: Sequence[tuple[Tensor, Head]],
    teacher: tuple[Tensor, Head],
    emitted: Tensor,
    *,
    top_k: int = 20,
    chunk: int | None = None,
    dtype: torch.dtype = torch.float32,
    merge: Sequence[Sequence[int]] = (),
) -> list[PositionScores]:
    """Scores positions from hidden states, chunk by chunk.

    Several students (after and before training) share the teacher's logits. If the models'
    logits differ in width, the extra ones are padding of the wider head: both are cut to the
    narrower and renormalised.

    Args:
        students: Pairs of hidden states (N, H) and the head that turns (n, H) into (n, V) logits.
        teacher: The same for the teacher; H may be another.
        emitted: (N,) int64 tokens that the student generated.
        top_k: As in `score_logits`.
        chunk: Positions at once; None takes `chunk_positions` of the vocabulary.
        dtype: What softmax and sums are computed in.
        merge: Groups of token ids that count as one action (ends of text) in every score.

    Returns:
        The scores for each student, on the device of `emitted`.
    """
    hidden, head = teacher
    n = emitted.shape[0]
    # Filled in place: small results that outlive a chunk would keep its freed memory in pieces.
    found = [_empty_scores(n, emitted.device) for _ in students]
    if n and chunk is None:
        chunk = chunk_positions(head(hidden[:1]).shape[1], hidden.device)
    for start in range(0, n, chunk or 1):
        part = slice(start, start + (chunk or 1))
        teacher_logits = head(hidden[part])
        where = teacher_logits.device
        logits = [student_head(states[part]).to(where) for states, student_head in students]
        width = min([teacher_logits.shape[1]] + [x.shape[1] for x in logits])
        teacher_logp = teacher_logits[:, :width].to(dtype).log_softmax(dim=1)
        del teacher_logits
        tokens = emitted[part].to(where)
        if merge:
            teacher_logp = merge_actions(teacher_logp, merge)
            logits = [merge_actions(x[:, :width].to(dtype).log_softmax(1), merge) for x in logits]
            for group in merge:
                for other in group[1:]:
                    tokens = torch.where(tokens == other, group[0], tokens)
        for own, one in zip(found, logits, strict=True):
            scores = score_logits(one[:, :width], teacher_logp, tokens, top_k)
            for place, values in zip(own, scores, strict=True):
                place[part] = values
    return found


def _empty_scores(n: int, device: torch.device) -> PositionScores:
    """Room for the scores of n positions."""

    def room(dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(n, dtype=dtype, device=device)

    return PositionScores(room(), room(), room(torch.bool), *(room() for _ in range(4)))
