"""The one kernel against autograd in float64, in every kind and on every way in."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from knockout.errors import UsageError
from knockout.geometry import kl_gradient
from knockout.mining.kl import score_logits
from knockout.training import (
    Divergence,
    Head,
    Listed,
    divergence,
    reverse_kl,
    sampled_kl,
    selective_kl,
)

N, H, V = 11, 6, 23
KINDS = [
    Divergence("reverse"),
    Divergence("forward"),
    Divergence("jsd", beta=0.5),
    Divergence("jsd", beta=0.1),
]


def logits(seed: int, scale: float = 2.0) -> Tensor:
    make = torch.Generator().manual_seed(seed)
    return scale * torch.randn(N, V, generator=make, dtype=torch.float64)


def actions(p: Tensor, groups: list[list[list[int]]]) -> Tensor:
    """(N, A) probabilities of each row's groups of ids."""
    return torch.stack(
        [
            torch.stack([row[group].sum() for group in own])
            for row, own in zip(p, groups, strict=True)
        ]
    )


def by_hand(p: Tensor, q: Tensor, chosen: Divergence) -> Tensor:
    """From probabilities (N, A), with 0 log 0 = 0; autograd does the rest."""

    def kl(a: Tensor, b: Tensor) -> Tensor:
        return torch.special.xlogy(a, a).sub(torch.special.xlogy(a, b)).sum(-1)

    if chosen.kind == "reverse":
        return kl(p, q)
    if chosen.kind == "forward":
        return kl(q, p)
    m = chosen.beta * q + (1 - chosen.beta) * p
    return chosen.beta * kl(q, m) + (1 - chosen.beta) * kl(p, m)


def groups_of(z: Tensor, chosen: Divergence, merge: list[list[int]]) -> list[list[list[int]]]:
    """Each row's actions: the merged groups, and what is outside its top k as one."""
    rows = []
    for p in z.softmax(-1):
        own = merge + [[j] for j in range(V) if not any(j in group for group in merge)]
        if chosen.top_k is not None:
            best = sorted(own, key=lambda group: -float(p[group].sum()))[: chosen.top_k]
            rest = [j for g in own if g not in best for j in g]
            own = [*best, rest]
        rows.append(own)
    return rows


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("top_k", [None, 1, 5])
@pytest.mark.parametrize("merge", [[], [[3, 9, 20], [5, 6]]])
@pytest.mark.parametrize("kind", KINDS)
def test_value_and_gradient_are_autograds(
    kind: Divergence, merge: list[list[int]], top_k: int | None, temperature: float
) -> None:
    chosen = Divergence(kind.kind, kind.beta, top_k)
    z, t = logits(0).requires_grad_(), logits(1)
    weights = torch.rand(N, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    found = divergence(z, t, chosen, temperature=temperature, merge=merge)
    own = groups_of(z.detach() / temperature, chosen, merge)
    width = max(len(g) for g in own)
    own = [g + [[]] * (width - len(g)) for g in own]
    p = actions((z / temperature).softmax(-1), own)
    q = actions((t / temperature).softmax(-1), own)
    wanted = by_hand(p.clamp(min=1e-300), q.clamp(min=1e-300), chosen)
    torch.testing.assert_close(found, wanted)
    (ours,) = torch.autograd.grad((weights * found).sum(), z)
    (theirs,) = torch.autograd.grad((weights * wanted).sum(), z)
    torch.testing.assert_close(ours, theirs)


def test_the_limits_of_jsd_are_the_two_kls() -> None:
    z, t = logits(0), logits(1)
    small = 1e-6
    near_forward = divergence(z, t, Divergence("jsd", beta=small)) / small
    near_reverse = divergence(z, t, Divergence("jsd", beta=1 - small)) / small
    torch.testing.assert_close(
        near_forward, divergence(z, t, Divergence("forward")), rtol=1e-3, atol=0
    )
    torch.testing.assert_close(near_reverse, divergence(z, t), rtol=1e-3, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_ids_that_both_exclude_add_nothing(kind: Divergence) -> None:
    z, t = logits(0), logits(1)
    z[:, [2, 7]] = t[:, [2, 7]] = -torch.inf
    z.requires_grad_()
    found = divergence(z, t, kind)
    rest = [j for j in range(V) if j not in (2, 7)]
    torch.testing.assert_close(found, divergence(z[:, rest], t[:, rest], kind))
    (g,) = torch.autograd.grad(found.sum(), z)
    assert g.isfinite().all()
    assert (g[:, [2, 7]] == 0).all()


def test_what_one_model_excludes_alone_is_infinite_where_the_other_can_draw_it() -> None:
    z, t = logits(0), logits(1)
    t[0, 4] = -torch.inf
    z[1, 4] = -torch.inf
    reverse = divergence(z, t)
    forward = divergence(z, t, Divergence("forward"))
    jsd = divergence(z, t, Divergence("jsd"))
    assert reverse[0] == torch.inf
    assert reverse[1].isfinite()
    assert forward[0].isfinite()
    assert forward[1] == torch.inf
    assert jsd.isfinite().all()


def test_mining_geometry_and_training_agree() -> None:
    z, t = logits(0), logits(1)
    z[:, 2] = t[:, 2] = -torch.inf
    emitted = torch.zeros(N, dtype=torch.int64)
    mined = score_logits(z, t.log_softmax(-1), emitted).reverse_kl
    kl, gradient = kl_gradient(z, t)
    student = z.clone().requires_grad_()
    trained = reverse_kl(student, t)
    (own,) = torch.autograd.grad(trained.sum(), student)
    torch.testing.assert_close(kl, trained.detach())
    torch.testing.assert_close(mined, trained.detach().float())
    torch.testing.assert_close(gradient, own)


@pytest.mark.parametrize("merge", [[], [[3, 9, 20]]])
def test_the_mean_gradient_of_one_sample_is_the_exact_one(merge: list[list[int]]) -> None:
    z, t = logits(0).requires_grad_(), logits(1)
    p = z.detach().softmax(-1)
    (exact,) = torch.autograd.grad(divergence(z, t, merge=merge).sum(), z)
    mean, value = torch.zeros_like(exact), torch.zeros(N, dtype=torch.float64)
    chosen = Divergence(sampled=True)
    for token in range(V):
        emitted = torch.full((N,), token)
        one = divergence(z, t, chosen, merge=merge, emitted=emitted)
        (g,) = torch.autograd.grad(one.sum(), z)
        mean += p[:, [token]] * g
        value += p[:, token] * one.detach()
    torch.testing.assert_close(mean, exact)
    torch.testing.assert_close(value, divergence(z, t, merge=merge).detach())


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_log_probabilities_alone_give_the_same_gradient(estimator: Any) -> None:
    z, t = logits(0).requires_grad_(), logits(1)
    emitted = torch.arange(N)
    logp = z.log_softmax(-1).gather(1, emitted[:, None])[:, 0]
    logq = t.log_softmax(-1).gather(1, emitted[:, None])[:, 0]
    found = sampled_kl(logp, logq, estimator)
    (ours,) = torch.autograd.grad(found.sum(), z, retain_graph=True)
    one = divergence(z, t, Divergence(sampled=True), emitted=emitted)
    (theirs,) = torch.autograd.grad(one.sum(), z)
    torch.testing.assert_close(ours, theirs)
    ratio = (logp - logq).detach()
    wanted = {"k1": ratio, "k2": ratio**2 / 2, "k3": (-ratio).exp() - 1 + ratio}[estimator]
    torch.testing.assert_close(found.detach(), wanted)


def head(seed: int) -> tuple[Tensor, Head]:
    make = torch.Generator().manual_seed(seed)
    hidden = torch.randn(N, H, generator=make).requires_grad_()
    return hidden, Head(torch.randn(V, H, generator=make).requires_grad_(), None, 0.8, 3.0)


def whole(hidden: Tensor, own: Head) -> Tensor:
    z = 0.8 * hidden.double() @ own.weight.double().T
    return 3.0 * (z / 3.0).tanh()


@pytest.mark.parametrize(
    "chosen",
    [*KINDS, Divergence(top_k=4), Divergence("forward", top_k=4), Divergence(sampled=True)],
)
def test_hidden_states_in_chunks_are_whole_logits(chosen: Divergence) -> None:
    hidden, own = head(0)
    targets, teacher = head(1)
    weights = torch.rand(N, generator=torch.Generator().manual_seed(3))
    weights[2] = 0
    emitted = torch.arange(N)
    found = selective_kl(
        hidden, own, targets, teacher, weights, chosen=chosen, emitted=emitted, chunk=4
    )
    direct = divergence(whole(hidden, own), whole(targets, teacher), chosen, emitted=emitted)
    wanted = (weights * direct).sum()
    torch.testing.assert_close(found.loss.double(), wanted, rtol=1e-4, atol=1e-6)
    leaves = [hidden, own.weight]
    for a, b in zip(
        torch.autograd.grad(found.loss, leaves), torch.autograd.grad(wanted, leaves), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_list_of_the_teachers_best_is_its_actions_and_one_rest(kind: Divergence) -> None:
    hidden, own = head(0)
    logq = whole(*head(1)).detach().log_softmax(-1)
    best = logq.topk(5, dim=1)
    ids, values = best.indices.clone(), best.values.float()
    ids[0, 3:], values[0, 3:] = -1, 123.0  # one position lists three tokens only
    found = selective_kl(
        hidden, own, Listed(ids, values), None, torch.ones(N), chosen=kind, chunk=4
    )
    groups = []
    for row in ids.tolist():
        listed = [j for j in row if j >= 0]
        rest = [j for j in range(V) if j not in listed]
        groups.append([[j] for j in listed] + [[]] * (5 - len(listed)) + [rest])
    tiny = 1e-300
    p = actions(whole(hidden, own).softmax(-1), groups).clamp(min=tiny)
    q = actions(logq.exp(), groups).clamp(min=tiny)
    wanted = by_hand(p, q, kind)
    torch.testing.assert_close(found.kl.double(), wanted.detach(), rtol=1e-4, atol=1e-5)
    leaves = [hidden, own.weight]
    for a, b in zip(
        torch.autograd.grad(found.loss, leaves),
        torch.autograd.grad(wanted.sum(), leaves),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(UsageError, match="reverse, forward or jsd"):
        Divergence("hellinger")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="beta is 1"):
        Divergence("jsd", beta=1.0)
    with pytest.raises(UsageError, match="one-sample"):
        Divergence("forward", sampled=True)
    with pytest.raises(ValueError, match="emitted"):
        divergence(logits(0), logits(1), Divergence(sampled=True))
    hidden, own = head(0)
    few = Listed(torch.zeros(N, 1, dtype=torch.int64), torch.zeros(N, 1))
    with pytest.raises(ValueError, match="temperature 1"):
        selective_kl(hidden, own, few, None, torch.ones(N), temperature=0.5)


@pytest.mark.parametrize("kind", ["reverse", "forward", "jsd"])
def test_a_merged_action_takes_one_place_of_the_k_best(kind: Any) -> None:
    """By hand: merge {0, 3}, the two best actions are it and 5, and the rest is one more."""
    student = torch.tensor([0.3, 0.02, 0.03, 0.25, 0.05, 0.35], dtype=torch.float64).log()
    teacher = torch.tensor([0.1, 0.3, 0.1, 0.2, 0.1, 0.2], dtype=torch.float64).log()
    found = divergence(student[None], teacher[None], Divergence(kind, top_k=2), merge=[[0, 3]])
    parts = [[0, 3], [5], [1, 2, 4]]
    of = [torch.stack([x[ids].logsumexp(0) for ids in parts]) for x in (student, teacher)]
    wanted = divergence(of[0][None], of[1][None], Divergence(kind))
    torch.testing.assert_close(found, wanted)


def test_a_hard_position_that_is_frozen_may_be_infinite() -> None:
    """The teacher excludes an id: above the limit that position has no weight, and no part."""
    make = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(4, 3, generator=make), torch.randn(7, 3, generator=make)
    bias = torch.zeros(7)
    bias[2] = -torch.inf
    teacher = torch.randn(4, 3, generator=make)
    out = selective_kl(
        hidden.requires_grad_(),
        Head(weight),
        teacher,
        Head(weight, bias),
        torch.ones(4),
        limits=torch.full((4,), 1.0),
    )
    out.loss.backward()
    assert out.kl.isinf().all()
    assert out.loss == 0
    assert hidden.grad is not None
    assert (hidden.grad == 0).all()
