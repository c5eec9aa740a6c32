"""What a step trains on, skips and logs, against whole logits and the weights' own functions."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from knockout.errors import KnockoutError, UsageError
from knockout.mining.kl import PositionScores
from knockout.mining.registry import token_score
from knockout.training import (
    Constant,
    Divergence,
    FollowKL,
    Head,
    budget_weights,
    freeze_weights,
    random_windows,
    reverse_kl,
)
from knockout.training import divergence as whole_divergence
from knockout.training.batch import StepLoss
from knockout.training.selection import Selection
from knockout.training.selector import Selector

B, T, H, V = 3, 14, 8, 19
FREEZE, PILLARS = (3, 4, 5, 6), (6, 7)


class Batch:
    """Random states and heads, labels with prompts and padding, and the KL of whole logits."""

    def __init__(self, seed: int = 0) -> None:
        make = torch.Generator().manual_seed(seed)
        draw = lambda *shape: torch.randn(*shape, generator=make)  # noqa: E731
        self.labels = torch.randint(V, (B, T), generator=make)
        self.labels[0, :2] = self.labels[1, 9:] = self.labels[2, 12:] = -100
        self.student_hidden = draw(B, T, H).requires_grad_()
        self.student_head = Head(draw(V, H).requires_grad_())
        self.teacher_hidden = draw(B, T, H)
        self.teacher_head = Head(draw(V, H))
        self.kl = reverse_kl(
            self.student_hidden @ self.student_head.weight.T,
            self.teacher_hidden @ self.teacher_head.weight.T,
        )
        self.mean = float(self.kl.detach()[self.labels != -100].mean())

    def run(self, selector: Selector, **kwargs: Any) -> StepLoss:
        return selector.loss(
            self.labels,
            self.student_hidden,
            self.student_head,
            self.teacher_hidden,
            self.teacher_head,
            **{"step": 1, **kwargs},
        )


def test_no_selection_is_the_plain_mean() -> None:
    batch = Batch()
    out = batch.run(Selector(Selection()))
    valid = batch.labels != -100
    torch.testing.assert_close(out.loss, batch.kl[valid].mean())
    assert out.metrics["frozen_share"] == out.metrics["skipped_share"] == 0
    assert int(out.n_projected) == int(valid.sum())
    halves = batch.run(Selector(Selection()), denominator=2.0 * valid.sum())
    torch.testing.assert_close(halves.loss * 2, out.loss)


@pytest.mark.parametrize("weight", [0.0, 0.3])
@pytest.mark.parametrize("window", [0, 2])
def test_freezing_applies_freeze_weights(window: int, weight: float) -> None:
    batch = Batch()
    threshold = float(batch.kl.detach().median()) if window else math.inf
    chosen = Selection(FREEZE, PILLARS, window, threshold, Constant(weight), watch_every=5)
    out = batch.run(Selector(chosen))
    wanted = freeze_weights(batch.labels, batch.kl, FREEZE, window, threshold, weight, PILLARS)
    assert torch.equal(out.weights, wanted)
    assert window == 0 or not torch.equal(
        wanted, freeze_weights(batch.labels, None, FREEZE, weight=weight, pillars=PILLARS)
    )
    n = int((batch.labels != -100).sum())
    torch.testing.assert_close(out.loss, (wanted * batch.kl).sum() / n)
    ours = torch.autograd.grad(out.loss, [batch.student_hidden, batch.student_head.weight])
    theirs = torch.autograd.grad(
        (wanted * batch.kl).sum() / n, [batch.student_hidden, batch.student_head.weight]
    )
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    frozen = (wanted < 1) & (batch.labels != -100)
    assert out.metrics["frozen_share"] == pytest.approx(float(frozen.sum()) / n)
    trained = (wanted == 1) & (batch.labels != -100)
    assert out.metrics["kl_trained"] == pytest.approx(
        float(batch.kl[trained].mean().detach()), rel=1e-4
    )
    if weight == 0:
        listed = freeze_weights(batch.labels, None, FREEZE, pillars=PILLARS) == 0
        assert out.metrics["skipped_share"] == pytest.approx(
            float((listed & (batch.labels != -100)).sum()) / n
        )


def test_skipped_tokens_are_measured_now_and_then() -> None:
    batch = Batch()
    selector = Selector(Selection(FREEZE, watch_every=5))
    frozen = freeze_weights(batch.labels, None, FREEZE) == 0
    frozen &= batch.labels != -100
    quiet, watched = batch.run(selector), batch.run(selector, step=5)
    assert math.isnan(quiet.metrics["kl_frozen"])
    assert watched.metrics["kl_frozen"] == pytest.approx(
        float(batch.kl[frozen].mean().detach()), rel=1e-4
    )
    assert watched.metrics["logit_grad_norm_frozen"] > 0
    assert torch.equal(quiet.loss, watched.loss)
    assert watched.metrics["skipped_share"] > 0  # the look is not part of the loss


def test_a_batch_of_frozen_tokens_only_trains_nothing() -> None:
    batch = Batch()
    out = batch.run(Selector(Selection(tuple(range(V)))))
    grads = torch.autograd.grad(out.loss, [batch.student_hidden, batch.student_head.weight])
    assert out.loss.item() == 0
    assert all(g.abs().max() == 0 for g in grads)


def test_the_control_moves_the_same_windows() -> None:
    batch = Batch()
    threshold = float(batch.kl.detach().median())
    chosen = Selection(FREEZE, PILLARS, 1, threshold, control=True, seed=7)
    out = batch.run(Selector(chosen))
    frozen = freeze_weights(batch.labels, batch.kl, FREEZE, 1, threshold, 0.0, PILLARS)
    moved = random_windows(frozen, batch.labels, torch.Generator().manual_seed(7), PILLARS)
    assert torch.equal(out.weights, moved)
    assert out.weights.sum() == frozen.sum()
    assert not torch.equal(out.weights, frozen)


@pytest.mark.parametrize("score", ["kl", "entropy", "entropy*kl", "efficiency", "teacher_gap"])
def test_a_budget_keeps_the_best_by_the_score(score: str) -> None:
    batch = Batch()
    out = batch.run(Selector(Selection(budget=0.2, score=score, normalise="trained")))
    logp = (batch.student_hidden @ batch.student_head.weight.T).detach().log_softmax(-1)
    entropy = -(logp.exp() * logp).sum(-1)
    n = int((batch.labels != -100).sum())
    kept = out.weights > 0
    assert int(kept.sum()) == round(0.2 * n)
    assert not bool((kept & (batch.labels == -100)).any())
    scores = {"kl": batch.kl, "entropy": entropy, "entropy*kl": entropy * batch.kl}
    if score in scores:
        assert torch.equal(out.weights, budget_weights(scores[score], 0.2, batch.labels))
    torch.testing.assert_close(out.loss, batch.kl[kept].mean())  # "trained" keeps the size
    assert out.metrics["skipped_share"] == pytest.approx(1 - int(kept.sum()) / n)


def test_tails_beyond_the_limit_are_left_out() -> None:
    batch = Batch()
    selector = Selector(Selection(max_tokens=4))
    rows, columns = selector.reach(batch.labels, 1)
    assert rows.tolist() == [0, 1, 2]
    assert columns == 6  # two prompt tokens and four of the response in row 0
    out = batch.run(selector)
    assert (out.weights.sum(dim=1) == 4).all()


def test_reach_drops_frozen_tails_and_rows() -> None:
    labels = torch.tensor([[1, 1, 3, 3], [3, 3, 3, -100], [1, 3, 1, -100]])
    selector = Selector(Selection((3,), watch_every=4))
    rows, columns = selector.reach(labels, 1)
    assert (rows.tolist(), columns) == ([0, 2], 3)
    assert selector.reach(labels, 4)[1] == 4  # everything is looked at
    nothing = Selector(Selection((1, 3), watch_every=0)).reach(labels, 0)
    assert (nothing[0].tolist(), nothing[1]) == ([0], 1)
    soft = Selector(Selection((3,), schedule=Constant(0.1), watch_every=0))
    assert soft.reach(labels, 1)[1] == 4


def test_lambda_follows_the_kl_of_all_tokens() -> None:
    batch = Batch()
    selector = Selector(Selection(FREEZE, schedule=FollowKL(high=1000, low=999), watch_every=2))
    mean = batch.mean
    first = batch.run(selector, step=0)
    assert first.metrics["frozen_weight"] == 1  # the KL is not known yet
    second = batch.run(selector, step=1)  # its frozen ones are skipped, and not watched at step 1
    assert second.metrics["frozen_weight"] == 0
    assert selector.running_kl == pytest.approx(mean)
    assert math.isnan(second.metrics["kl_frozen"])
    selector.advance(2)
    assert selector.running_kl == pytest.approx(mean)  # nothing has watched what λ = 0 skips yet
    assert selector.weight(2) == 0
    batch.run(selector, step=2)
    batch.run(selector, step=3)
    selector.advance(4)
    assert selector.running_kl == pytest.approx(mean)
    batch.labels[:] = -100
    batch.run(selector, step=4)
    selector.advance(5)
    assert selector.running_kl == pytest.approx(mean)  # a batch without tokens says nothing


def test_an_even_fall_of_all_kls_moves_lambda_as_far_as_it_says() -> None:
    """Frozen types have five times the KL of the others; all fall by 20 % and then stay."""
    make = torch.Generator().manual_seed(0)
    labels = torch.randint(V, (4, 30), generator=make)
    frozen = torch.isin(labels, torch.tensor(FREEZE))
    kl = torch.where(frozen, 5.0, 1.0)
    high = float(kl.mean())
    schedule = FollowKL(high=high, low=high * 0.4)
    selector = Selector(Selection(FREEZE, schedule=schedule))
    for step in range(80):
        selector.advance(step)
        now = kl if step < 1 else kl * 0.8
        skipped = frozen if selector.weight(step) == 0 else torch.zeros_like(frozen)
        seen = torch.where(skipped & torch.tensor(not selector.watches(step)), torch.nan, now)
        selector._kl.add(seen.flatten(), skipped.flatten())
    assert selector.running_kl == pytest.approx(0.8 * high, rel=1e-3)
    assert selector.weight(80) == pytest.approx((0.8 - 0.4) / 0.6, rel=1e-2)


def test_what_reach_leaves_out_counts_as_when_it_was_last_seen() -> None:
    labels = torch.tensor([[1, 3, 3, 3], [3, 3, 3, 3]])
    selector = Selector(Selection((3,), schedule=FollowKL(1.0, 0.5), watch_every=2))
    kl = torch.tensor([[0.1, 2.0, 2.0, 2.0], [2.0] * 4])
    selector._kl.value = 0.1  # λ = 0
    for step in (0, 1):
        selector.advance(step)
        rows, columns = selector.reach(labels, step)
        selector.plan([selector.part(labels, step=step)])
        seen, ids = kl[rows, :columns].flatten(), labels[rows, :columns].flatten()
        watched = selector.watches(step)
        selector._kl.add(torch.where((ids == 3) & (not watched), torch.nan, seen), ids == 3)
        assert (len(ids) == 8) == watched
    selector.advance(2)
    mean = float(kl.mean())
    assert selector.running_kl == pytest.approx(0.9 * (0.9 * 0.1 + 0.1 * mean) + 0.1 * mean)


@pytest.mark.parametrize("divergence", [Divergence("forward"), Divergence("jsd", 0.3)])
def test_other_divergences_carry_the_same_weights(divergence: Divergence) -> None:
    batch = Batch()
    chosen = Selection(FREEZE, PILLARS, schedule=Constant(0.3), divergence=divergence)
    out = batch.run(Selector(chosen))
    weights = freeze_weights(batch.labels, None, FREEZE, weight=0.3, pillars=PILLARS)
    whole = whole_divergence(
        batch.student_hidden @ batch.student_head.weight.T,
        batch.teacher_hidden @ batch.teacher_head.weight.T,
        divergence,
    )
    torch.testing.assert_close(out.weights, weights)
    torch.testing.assert_close(out.loss, (weights * whole).sum() / (batch.labels != -100).sum())


@pytest.mark.parametrize(
    "chosen",
    [
        Selection(FREEZE),
        Selection(FREEZE, control=True),
        Selection(budget=0.1, score="soft_or"),
        Selection(max_tokens=2),
    ],
)
def test_an_evaluation_is_the_same_for_every_arm_and_moves_nothing(chosen: Selection) -> None:
    batch = Batch()
    selector = Selector(chosen)
    batch.run(selector, step=0)
    before = copy.deepcopy(selector.state_dict())
    out = selector.evaluate(
        batch.labels,
        batch.student_hidden,
        batch.student_head,
        batch.teacher_hidden,
        batch.teacher_head,
    )
    valid = batch.labels != -100
    torch.testing.assert_close(out.loss, batch.kl[valid].mean().detach())
    listed = torch.isin(batch.labels, torch.tensor(chosen.freeze_list, dtype=torch.int64)) & valid
    assert out.metrics["kl_unfrozen"] == pytest.approx(
        float(batch.kl.detach()[valid & ~listed].mean())
    )
    if chosen.freeze_list:
        assert out.metrics["kl_frozen"] == pytest.approx(float(batch.kl.detach()[listed].mean()))
    after = selector.state_dict()
    assert str(after) == str(before)


NORMALISED = {
    "trained": {"freeze_list": FREEZE, "normalise": "trained"},
    "window": {"freeze_list": FREEZE, "window": 2, "threshold": 2.0, "normalise": "trained"},
    "first": {"max_tokens": 4, "normalise": "tokens"},
    "budget": {"budget": 0.2, "score": "kl", "normalise": "trained"},
    "soft_or": {"budget": 0.3, "score": "soft_or", "pillars": PILLARS},
    "ties": {"budget": 0.2, "score": "agree_with_teacher", "normalise": "trained"},
}


@token_score("agree_with_teacher")
def agree_with_teacher(found: PositionScores) -> torch.Tensor:
    """A score with hardly anything but ties."""
    return found.agree.float()


def step_gradient(chosen: Selection, parts: list[Batch], ranks: int = 1) -> torch.Tensor:
    """∂(sum of the parts' losses)/∂(student's head), as an optimiser step adds them up."""
    selector = Selector(chosen)
    selector.advance(1)
    plan = selector.plan(
        [
            selector.part(
                b.labels,
                step=1,
                student=(b.student_hidden, b.student_head),
                teacher=(b.teacher_hidden, b.teacher_head),
            )
            for b in parts
        ]
    )
    total = torch.zeros(V, H)
    for place, b in enumerate(parts):
        kept = plan.kept[place] if plan.kept else None
        out = b.run(selector, denominator=plan.denominator / ranks, kept=kept)
        (g,) = torch.autograd.grad(out.loss, b.student_head.weight)
        total += g
    return total


def piece(batch: Batch, rows: slice) -> Batch:
    part = copy.copy(batch)
    part.labels, part.kl = batch.labels[rows], batch.kl[rows]
    part.student_hidden = batch.student_hidden[rows].detach()
    part.teacher_hidden = batch.teacher_hidden[rows]
    return part


@pytest.mark.parametrize("case", list(NORMALISED))
def test_a_step_does_not_depend_on_its_micro_batches(case: str) -> None:
    batch, chosen = Batch(), Selection(**NORMALISED[case])  # type: ignore[arg-type]
    parts = [piece(batch, slice(i, i + 1)) for i in range(B)]
    torch.testing.assert_close(step_gradient(chosen, parts), step_gradient(chosen, [batch]))
    out = batch.run(Selector(chosen))  # and a whole batch needs no plan
    (g,) = torch.autograd.grad(out.loss, batch.student_head.weight)
    torch.testing.assert_close(step_gradient(chosen, [batch]), g)


def _rank(rank: int, folder: str) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2
    )
    batch = Batch()
    mine = [slice(0, 1), slice(1, 3)][rank]  # shares of unlike size
    found = {}
    for case, arguments in NORMALISED.items():
        g = step_gradient(Selection(**arguments), [piece(batch, mine)], ranks=2)  # type: ignore[arg-type]
        torch.distributed.all_reduce(g)
        found[case] = g / 2  # what DDP does
    selector = Selector(Selection(FREEZE, schedule=FollowKL(1000, 0.001)))
    piece(batch, mine).run(selector, step=0)
    selector.advance(1)
    found["kl"] = torch.tensor(selector.running_kl)
    torch.save(found, f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


def test_two_processes_make_the_step_of_one(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(_rank, (str(tmp_path),), nprocs=2)
    batch = Batch()
    for rank in range(2):
        found = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        for case, arguments in NORMALISED.items():
            wanted = step_gradient(Selection(**arguments), [batch])  # type: ignore[arg-type]
            torch.testing.assert_close(found[case], wanted, msg=case)
        assert float(found["kl"]) == pytest.approx(batch.mean)


def test_a_saved_selector_goes_on_alike(tmp_path: Path) -> None:
    chosen = Selection(FREEZE, control=True, schedule=FollowKL(high=1000, low=0.001))
    batches = [Batch(seed) for seed in range(6)]
    whole = Selector(chosen)
    wanted = [batch.run(whole, step=i) for i, batch in enumerate(batches)]
    first = Selector(chosen)
    for step, batch in enumerate(batches[:3]):
        batch.run(first, step=step)
    torch.save(first.state_dict(), tmp_path / "selector.pt")
    second = Selector(chosen)
    second.load_state_dict(torch.load(tmp_path / "selector.pt", weights_only=True))
    assert second.running_kl == first.running_kl
    for step in (3, 4, 5):
        one, other = wanted[step], batches[step].run(second, step=step)
        assert torch.equal(other.weights, one.weights)
        assert other.metrics["frozen_weight"] == one.metrics["frozen_weight"]
    assert second.running_kl == whole.running_kl
    fresh = [batch.run(selector) for selector in [Selector(chosen)] for batch in batches[3:]]
    assert not all(
        torch.equal(a.weights, b.weights) for a, b in zip(fresh, wanted[3:], strict=True)
    )


@pytest.mark.parametrize(
    "state",
    [{}, {"running_kl": 1.0}, {"running_kl": 1.0, "dice": {"cpu": torch.zeros(3)}}, [1, 2],
     {"running_kl": 1.0, "dice": {"abacus": torch.zeros(3)}}, {"running_kl": "much", "dice": {}}],
)  # fmt: skip
def test_what_is_no_selectors_state_is_refused(state: Any) -> None:
    selector = Selector(Selection())
    with pytest.raises(KnockoutError, match="not the state"):
        selector.load_state_dict(state)
    assert math.isnan(selector.running_kl)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"budget": 0.1, "freeze_list": (1,)}, "takes one of them"),
        ({"budget": 0.0}, "budget is 0"),
        ({"control": True}, "control needs the freeze_list"),
        ({"freeze_list": (1,), "window": 2}, "no threshold"),
        ({"window": -1}, "window is -1"),
        ({"score": "kl*luck"}, "no 'luck'"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"schedule": FollowKL(2, 1), "watch_every": 0}, "never be measured"),
    ],
)
def test_misuse_is_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Selection(**wrong)


def test_special_ids_are_refused_by_name() -> None:
    with pytest.raises(UsageError, match=r"special token ids \[2\]"):
        Selection((2, 8)).refuse_special([0, 1, 2])
    Selection((8,), (2,)).refuse_special([0, 1, 2])
