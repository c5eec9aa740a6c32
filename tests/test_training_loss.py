"""The weighted loss against autograd on whole float64 logits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from knockout.training import Head, merge_actions, reverse_kl, selective_kl

N, H, V = 17, 8, 53


def problem(seed: int = 0, **kwargs: Any) -> tuple[torch.Tensor, Head, torch.Tensor, Head]:
    make = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=make)  # noqa: E731
    student = Head(draw(V, H).requires_grad_(), draw(V).requires_grad_(), **kwargs)
    teacher = Head(draw(V, H + 3), None, soft_cap=kwargs.get("soft_cap"))
    return draw(N, H).requires_grad_(), student, draw(N, H + 3), teacher


def whole_logits(hidden: torch.Tensor, head: Head) -> torch.Tensor:
    z = hidden.double() @ head.weight.double().T
    if head.bias is not None:
        z = z + head.bias.double()
    z = z * head.scale
    return z if head.soft_cap is None else head.soft_cap * (z / head.soft_cap).tanh()


def gradients(loss: torch.Tensor, hidden: torch.Tensor, head: Head) -> list[torch.Tensor]:
    return list(torch.autograd.grad(loss, [hidden, head.weight, head.bias]))  # type: ignore[list-item]


@pytest.mark.parametrize("chunk", [None, 4])
@pytest.mark.parametrize(
    "kwargs", [{}, {"scale": 0.3}, {"soft_cap": 2.0}, {"scale": 1.7, "soft_cap": 3.0}]
)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("merge", [(), ((2, 9, 40), (5, 6))])
def test_value_and_gradients_equal_autograd(
    kwargs: dict[str, float], temperature: float, merge: Any, chunk: int | None
) -> None:
    hidden, student, targets, teacher = problem(**kwargs)
    weights = torch.rand(N, generator=torch.Generator().manual_seed(5))
    weights[[0, 3, 4, 16]] = 0
    found = selective_kl(
        hidden,
        student,
        targets,
        teacher,
        weights,
        temperature=temperature,
        merge=merge,
        chunk=chunk,
    )
    # The oracle merges by adding probabilities, and derives nothing by hand.
    logp = (whole_logits(hidden, student) / temperature).log_softmax(-1)
    logq = (whole_logits(targets, teacher) / temperature).log_softmax(-1)
    p, q = merge_actions(logp, merge).exp(), merge_actions(logq, merge).exp()
    kl = torch.where(p > 0, p * (p.clamp(min=1e-300).log() - q.clamp(min=1e-300).log()), 0).sum(-1)
    wanted = (weights * kl).sum()
    torch.testing.assert_close(found.loss.double(), wanted, rtol=1e-4, atol=1e-6)
    oracle = gradients(wanted, hidden, student)
    for a, b in zip(gradients(3 * found.loss, hidden, student), oracle, strict=True):
        torch.testing.assert_close(a, 3 * b, rtol=1e-3, atol=1e-5)
    trained = weights > 0
    torch.testing.assert_close(
        found.kl[trained].double(), kl[trained].detach(), rtol=1e-4, atol=1e-6
    )
    assert found.kl[~trained].isnan().all()
    entropy = -(logp.exp() * logp).sum(-1).detach()
    torch.testing.assert_close(
        found.entropy[trained].double(), entropy[trained], rtol=1e-4, atol=1e-5
    )
    direct = reverse_kl(
        whole_logits(hidden, student),
        whole_logits(targets, teacher),
        temperature=temperature,
        merge=merge,
    )
    torch.testing.assert_close(direct, kl)
    for a, b in zip(gradients((weights * direct).sum(), hidden, student), oracle, strict=True):
        torch.testing.assert_close(a, b)


def test_logit_gradient_norm_equals_autograd() -> None:
    hidden, student, targets, teacher = problem()
    found = selective_kl(hidden, student, targets, teacher, torch.ones(N))
    z = whole_logits(hidden, student).detach().requires_grad_()
    (g,) = torch.autograd.grad(reverse_kl(z, whole_logits(targets, teacher)).sum(), z)
    torch.testing.assert_close(found.grad_norm.double(), g.norm(dim=1), rtol=1e-4, atol=1e-6)


def test_positions_over_their_limit_weigh_as_told_and_pass_no_gradient() -> None:
    hidden, student, targets, teacher = problem()
    kl = selective_kl(hidden, student, targets, teacher, torch.ones(N)).kl
    limits = torch.where(torch.arange(N) < 9, float(kl.median()), torch.inf)
    over = (torch.arange(N) < 9) & (kl > kl.median())
    assert 0 < over.sum() < 9
    found = selective_kl(hidden, student, targets, teacher, torch.ones(N), limits=limits, chunk=5)
    assert torch.equal(found.weights, (~over).float())
    assert not found.kl.isnan().any()
    explicit = selective_kl(hidden, student, targets, teacher, (~over).float())
    for a, b in zip(
        gradients(found.loss, hidden, student),
        gradients(explicit.loss, hidden, student),
        strict=True,
    ):
        torch.testing.assert_close(a, b)
    half = selective_kl(hidden, student, targets, teacher, torch.ones(N), limits=limits, over=0.5)
    assert torch.equal(half.weights, torch.where(over, 0.5, 1.0))


def test_a_batch_without_weight_has_zero_loss_and_zero_gradients() -> None:
    hidden, student, targets, teacher = problem()
    found = selective_kl(hidden, student, targets, teacher, torch.zeros(N))
    assert found.loss.item() == 0
    assert all(g.abs().max() == 0 for g in gradients(found.loss, hidden, student))
    empty = selective_kl(hidden[:0], student, targets[:0], teacher, torch.zeros(0))
    assert empty.loss.item() == 0


def test_skipped_positions_are_not_even_looked_at() -> None:
    hidden, student, targets, teacher = problem()
    spoiled = targets.clone()
    spoiled[4:] = torch.nan
    weights = (torch.arange(N) < 4).float()
    clean = selective_kl(hidden, student, targets, teacher, weights)
    dirty = selective_kl(hidden, student, spoiled, teacher, weights)
    assert torch.equal(clean.loss, dirty.loss)


def test_a_wider_head_is_cut_to_the_shared_ids() -> None:
    hidden, student, targets, teacher = problem()
    wide = replace(teacher, weight=torch.cat([teacher.weight, torch.full((7, H + 3), 2.0)]))
    weights = torch.ones(N)
    narrow = selective_kl(hidden, student, targets, teacher, weights)
    padded = selective_kl(hidden, student, targets, wide, weights)
    torch.testing.assert_close(narrow.loss, padded.loss)
    padding = replace(
        student,
        weight=torch.cat([student.weight.detach(), torch.ones(7, H)]).requires_grad_(),
        bias=torch.cat([student.bias.detach(), torch.ones(7)]).requires_grad_(),  # type: ignore[union-attr]
    )
    other = selective_kl(hidden, padding, targets, teacher, weights)
    torch.testing.assert_close(other.loss, narrow.loss)
    assert (gradients(other.loss, hidden, padding)[1][V:] == 0).all()


def test_without_gradients_none_are_worked_out() -> None:
    hidden, student, targets, teacher = problem()
    with torch.no_grad():
        found = selective_kl(hidden, student, targets, teacher, torch.ones(N))
    assert not found.loss.requires_grad


# Two ends of text, ids 0 and 1: p stops with the one, q with the other, and they differ in nothing else.
P = torch.tensor([[0.6, 0.1, 0.2, 0.1]], dtype=torch.float64)
Q = torch.tensor([[0.1, 0.6, 0.2, 0.1]], dtype=torch.float64)


def test_stopping_with_the_other_end_of_text_is_no_error_once_merged() -> None:
    z = P.log().requires_grad_()
    apart = reverse_kl(z, Q.log())
    assert apart.item() == pytest.approx(0.5 * torch.log(torch.tensor(6.0)).item())
    (g,) = torch.autograd.grad(apart.sum(), z)
    assert g[0, 0] > 0.1  # the student is pushed away from its own stop token
    assert g[0, 2] < 0  # and towards going on
    merged = reverse_kl(z, Q.log(), merge=[[0, 1]])
    assert merged.item() == pytest.approx(0, abs=1e-12)
    (g,) = torch.autograd.grad(merged.sum(), z)
    assert g.abs().max() < 1e-12


def test_merging_adds_probabilities_and_keeps_a_real_difference() -> None:
    assert merge_actions(P.log(), [[0, 1]]).exp()[0].tolist() == pytest.approx([0.7, 0, 0.2, 0.1])
    q = torch.tensor([[0.1, 0.2, 0.4, 0.3]], dtype=torch.float64)
    merged = reverse_kl(P.log(), q.log(), merge=[[1, 0]])
    log = torch.log
    by_hand = (
        0.7 * log(P.new_tensor(0.7 / 0.3))
        + 0.2 * log(P.new_tensor(0.5))
        + 0.1 * log(P.new_tensor(1 / 3))
    )
    assert float(merged) == pytest.approx(float(by_hand))
    with pytest.raises(ValueError, match="in two"):
        reverse_kl(P.log(), q.log(), merge=[[0, 1], [1, 2]])
    with pytest.raises(ValueError, match="in two"):
        merge_actions(P.log(), [[0, 1], [1, 2]])
    with pytest.raises(ValueError, match="expected ids from 0 to 3"):
        reverse_kl(P.log(), q.log(), merge=[[0, 4]])


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 1000))
def test_merging_never_raises_the_divergence(seed: int) -> None:
    make = torch.Generator().manual_seed(seed)
    a, b = (torch.randn(6, 9, generator=make, dtype=torch.float64) * 2 for _ in range(2))
    assert (reverse_kl(a, b, merge=[[1, 4, 8]]) <= reverse_kl(a, b) + 1e-12).all()


@pytest.mark.parametrize("mixed", [True, False])
def test_low_precision_sums_in_float32(mixed: bool) -> None:
    """Student and teacher are close: a KL that is summed or made of logits in 16 bits is off."""
    hidden, student, _, _ = problem()
    low = torch.bfloat16
    states = hidden.detach().to(low)
    near = Head(student.weight.detach().to(low).float() + 0.02 * torch.randn(V, H).to(low).float())
    student = Head(student.weight.detach().to(low).float().requires_grad_())
    exact = reverse_kl(
        states.double() @ student.weight.double().T,
        states.double() @ near.weight.to(low).double().T,
    ).detach()
    given = states.float() if mixed else states
    heads = [
        Head(h.weight if mixed else h.weight.detach().to(low).requires_grad_())
        for h in (student, near)
    ]
    given.requires_grad_()
    with torch.autocast("cpu", dtype=low, enabled=mixed):
        found = selective_kl(given, heads[0], given.detach(), heads[1], torch.ones(N))
    assert 0 < float(exact.mean()) < 0.01
    torch.testing.assert_close(found.kl.double(), exact, rtol=1e-3, atol=1e-6)
    found.loss.backward()
    assert given.grad is not None
    assert given.grad.isfinite().all()


def test_shapes_are_checked() -> None:
    hidden, student, targets, teacher = problem()
    with pytest.raises(ValueError, match=r"expected \(N, H\)"):
        selective_kl(hidden, student, targets[:3], teacher, torch.ones(N))
    with pytest.raises(ValueError, match="differ"):
        reverse_kl(torch.zeros(2, 5), torch.zeros(3, 5))
