"""Weights of tokens against plain loops over positions."""

from __future__ import annotations

import inspect
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from knockout import training
from knockout.training import (
    Constant,
    FollowKL,
    Linear,
    aligned_labels,
    budget_weights,
    freeze_weights,
    near,
    random_windows,
    token_table,
)

FREEZE, PILLARS = {1, 2, 3}, {3, 4}


def test_the_public_surface_is_what_trainers_were_told() -> None:
    assert sorted(training.__all__) == [
        "Constant",
        "Divergence",
        "FollowKL",
        "Head",
        "Linear",
        "Listed",
        "Schedule",
        "SelectiveLoss",
        "aligned_labels",
        "budget_weights",
        "divergence",
        "freeze_weights",
        "head_of",
        "merge_actions",
        "near",
        "random_windows",
        "reverse_kl",
        "sampled_kl",
        "selective_kl",
        "token_table",
    ]
    assert list(inspect.signature(freeze_weights).parameters) == [
        "labels",
        "loss_per_token",
        "freeze_list",
        "window",
        "threshold",
        "weight",
        "pillars",
        "label_shift",
    ]
    assert list(inspect.signature(budget_weights).parameters)[:2] == ["scores", "budget"]


def batch(seed: int, rows: int = 4, length: int = 23) -> tuple[torch.Tensor, torch.Tensor]:
    """Labels of 9 types with a prompt and padding in each row, and losses on all places."""
    make = torch.Generator().manual_seed(seed)
    labels = torch.randint(9, (rows, length), generator=make)
    loss = torch.rand(rows, length, generator=make) * 2
    for row in range(rows):
        prompt = int(torch.randint(0, 8, (1,), generator=make))
        end = int(torch.randint(prompt, length + 1, (1,), generator=make))
        labels[row, :prompt] = -100
        labels[row, end:] = -100
    return labels, loss


def by_hand(
    labels: list[list[int]], loss: list[list[float]], window: int, threshold: float, weight: float
) -> list[list[float]]:
    found = []
    for row, losses in zip(labels, loss, strict=True):
        rocks = [t for t, token in enumerate(row) if token in FREEZE - PILLARS]
        weights = []
        for t, token in enumerate(row):
            close = any(abs(t - rock) <= window for rock in rocks)
            if token == -100:
                weights.append(0.0)
            elif token in PILLARS:
                weights.append(1.0)
            elif t in rocks or (close and losses[t] > threshold):
                weights.append(weight)
            else:
                weights.append(1.0)
        found.append(weights)
    return found


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    window=st.integers(0, 30),
    threshold=st.floats(0, 2),
    weight=st.sampled_from([0.0, 0.25, 1.0]),
    shift=st.integers(0, 2),
)
def test_freezing_equals_a_plain_loop(
    seed: int, window: int, threshold: float, weight: float, shift: int
) -> None:
    labels, loss = batch(seed)
    found = freeze_weights(
        labels, loss, FREEZE, window, threshold, weight, PILLARS, label_shift=shift
    )
    moved = [row[shift:] + [-100] * shift for row in labels.tolist()]
    wanted = by_hand(moved, loss.tolist(), window, threshold, weight)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, torch.tensor(wanted))
    tables = freeze_weights(
        labels,
        loss,
        token_table(FREEZE),
        window,
        threshold,
        weight,
        token_table(PILLARS),
        label_shift=shift,
    )
    assert torch.equal(found, tables)


def test_a_shift_of_one_is_hugging_faces_convention() -> None:
    ids = torch.tensor([[7, 8, 1, 5]])
    labels = torch.tensor([[-100, 8, 1, 5]])
    # Logits at index 1 predict token 1 (frozen), at index 3 nothing of this text.
    assert freeze_weights(labels, None, [1], label_shift=1).tolist() == [[1, 0, 1, 0]]
    assert freeze_weights(labels, None, [1]).tolist() == [[0, 1, 0, 1]]
    assert aligned_labels(ids, 1).tolist() == [[8, 1, 5, -100]]
    assert aligned_labels(ids, 9).tolist() == [[-100] * 4]


def test_the_true_end_of_text_counts_and_its_padding_twins_do_not() -> None:
    # Padding id = end-of-text id = 2: the labels tell them apart by length.
    labels = torch.tensor([[20, 2, -100, -100]])
    assert freeze_weights(labels, None, []).tolist() == [[1, 1, 0, 0]]
    assert freeze_weights(labels, None, [2]).tolist() == [[1, 0, 0, 0]]


def test_ids_beyond_the_table_and_empty_batches_are_harmless() -> None:
    assert freeze_weights(torch.tensor([[151_000, 3]]), None, [3]).tolist() == [[1, 0]]
    assert freeze_weights(torch.empty(2, 0, dtype=torch.int64), None, [3]).shape == (2, 0)
    assert freeze_weights(torch.tensor([[3, 4]]), None, []).tolist() == [[1, 1]]


def test_no_gradient_flows_through_the_choice() -> None:
    loss = torch.tensor([[2.0, 2.0]], requires_grad=True)
    weights = freeze_weights(torch.tensor([[1, 5]]), loss, [1], 1, 1.0)
    assert weights.tolist() == [[0, 0]]
    assert not weights.requires_grad


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"weight": 1.5}, "weight is 1.5"),
        ({"window": -1, "threshold": 1.0}, "window is -1"),
        ({"window": 1, "threshold": 1.0, "loss_per_token": None}, "loss_per_token has shape None"),
        ({"freeze_list": [-1]}, "token id -1"),
        ({"labels": torch.zeros(3, dtype=torch.int64)}, r"expected \(B, T\)"),
    ],
)
def test_misuse_is_refused(wrong: dict[str, object], message: str) -> None:
    good: dict[str, object] = {
        "labels": torch.zeros(1, 3, dtype=torch.int64),
        "loss_per_token": torch.zeros(1, 3),
        "freeze_list": [1],
    }
    with pytest.raises(ValueError, match=message):
        near(torch.zeros(1, 3, dtype=torch.bool), -1) if wrong.get("window") == -1 else (
            freeze_weights(**{**good, **wrong})  # type: ignore[arg-type]
        )


def runs(weights: list[float]) -> list[int]:
    """Lengths of the runs of frozen positions, sorted."""
    text = "".join("x" if w < 1 else "." for w in weights)
    return sorted(len(part) for part in text.split(".") if part)


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_control_windows_keep_number_and_place_of_everything_else(seed: int) -> None:
    labels, loss = batch(seed, length=40)
    weights = freeze_weights(labels, loss, [1], 2, 0.7, 0.25, PILLARS)
    dice = torch.Generator().manual_seed(seed)
    moved = random_windows(weights, labels, dice, PILLARS)
    fixed = (labels == -100) | torch.isin(labels, torch.tensor(sorted(PILLARS)))
    assert torch.equal(moved[fixed], weights[fixed])
    for row in range(len(labels)):
        free = ~fixed[row]
        assert sorted(moved[row][free].tolist()) == sorted(weights[row][free].tolist())
        # Blocks stay whole, though two may touch: no more runs than before, none shorter.
        before, after = runs(weights[row][free].tolist()), runs(moved[row][free].tolist())
        assert len(after) <= len(before)
        assert sum(after) == sum(before)
        assert not before or min(after) >= min(before)
    again = random_windows(weights, labels, torch.Generator().manual_seed(seed), PILLARS)
    assert torch.equal(moved, again)


def test_control_windows_fall_anywhere_alike() -> None:
    labels = torch.full((20_000, 6), 5)
    labels[:, 0] = -100
    weights = torch.ones(20_000, 6)
    weights[:, 0] = 0
    weights[:, 2:4] = 0  # one window of two among five places: four places to start
    moved = random_windows(weights, labels, torch.Generator().manual_seed(0))
    starts = (moved[:, 1:] == 0).int().argmax(dim=1).bincount(minlength=5)
    assert starts[4] == 0
    # χ² with 3 degrees of freedom: 16.3 is its 99.9th percentile.
    assert float(((starts[:4] - 5000) ** 2 / 5000).sum()) < 16.3


def test_a_budget_keeps_the_best_valid_positions() -> None:
    scores = torch.tensor([[9.0, 1.0, 5.0, math.nan], [2.0, 5.0, 3.0, 8.0]])
    labels = torch.tensor([[-100, 1, 1, 1], [1, 1, 1, -100]])
    assert budget_weights(scores, 0.5, labels).tolist() == [[0, 0, 1, 0], [0, 1, 1, 0]]
    assert budget_weights(scores, 0.001, labels).tolist() == [[0, 0, 1, 0], [0, 0, 0, 0]]
    assert budget_weights(scores, 1.0, labels).sum() == 5  # NaN never
    assert budget_weights(scores, 0.2, labels, pillars=[1]).sum() == 6
    assert budget_weights(scores, 0.5, torch.full((2, 4), -100)).sum() == 0
    shifted = budget_weights(scores, 0.01, labels, label_shift=1)
    assert shifted.tolist() == [[1, 0, 0, 0], [0, 0, 0, 0]]
    with pytest.raises(ValueError, match="budget is 0"):
        budget_weights(scores, 0)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 1000), budget=st.floats(0.001, 1))
def test_a_budget_is_kept_to_the_position(seed: int, budget: float) -> None:
    labels, scores = batch(seed)
    weights = budget_weights(scores, budget, labels)
    n = int((labels != -100).sum())
    assert int(weights.sum()) == (min(n, max(1, round(budget * n))) if n else 0)
    if 0 < weights.sum() < n:
        valid = labels != -100
        assert scores[weights > 0].min() >= scores[valid & (weights == 0)].max()


def test_schedules() -> None:
    assert Constant(0.3)(5, math.nan) == 0.3
    assert [Linear(1.0, 0.2, 4)(s, 0) for s in (0, 2, 4, 99)] == pytest.approx([1, 0.6, 0.2, 0.2])
    follow = FollowKL(high=0.5, low=0.1, end=0.2)
    assert [follow(0, kl) for kl in (math.nan, 0.9, 0.5, 0.3, 0.1, 0.0)] == pytest.approx(
        [1, 1, 1, 0.6, 0.2, 0.2]
    )
    for wrong in (
        lambda: Constant(1.1),
        lambda: Linear(0, -0.1, 3),
        lambda: Linear(1, 0, 0),
        lambda: FollowKL(0.1, 0.2),
    ):
        with pytest.raises(ValueError, match="expected"):
            wrong()


def test_windows_end_at_the_gap_between_two_turns() -> None:
    # Turn, a tool's answer (−100), turn: the rock 8 stands at the end of the first.
    labels = torch.tensor([[5, 6, 8, -100, -100, 7, 5, 6]])
    loss = torch.full((1, 8), 2.0)
    found = freeze_weights(labels, loss, [8], window=4, threshold=1.0)
    assert found.tolist() == [[0, 0, 0, 0, 0, 1, 1, 1]]
    marked = labels == 8
    assert near(marked, 4)[0, 5]  # without `labels`, a window is a distance only
    assert not near(marked, 4, labels != -100)[0, 3:].any()


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), window=st.integers(0, 9))
def test_near_is_a_walk_that_stops_at_gaps(seed: int, window: int) -> None:
    make = torch.Generator().manual_seed(seed)
    marked = torch.rand(3, 14, generator=make) < 0.2
    inside = torch.rand(3, 14, generator=make) < 0.8
    marked &= inside
    found = near(marked, window, inside)
    for row in range(3):
        for t in range(14):
            walks = [range(t, min(14, t + window + 1)), range(t, max(-1, t - window - 1), -1)]
            reached = False
            for walk in walks:
                for place in walk:
                    if not inside[row, place]:
                        break
                    reached |= bool(marked[row, place])
            assert bool(found[row, t]) == (reached if inside[row, t] else bool(marked[row, t]))


def test_random_windows_stay_in_their_own_turn() -> None:
    labels = torch.tensor([[5, 8, 8, 5, 5, -100, 7, 7, 7, 7, 8, -100]])
    weights = freeze_weights(labels, None, [8])
    dice = torch.Generator().manual_seed(0)
    places = set()
    for _ in range(200):
        moved = random_windows(weights, labels, dice)
        frozen = (moved < 1) & (labels != -100)
        assert frozen[0, :5].sum() == 2
        assert frozen[0, 6:11].sum() == 1
        places.add(int(frozen[0, :5].nonzero()[0]))
        assert frozen[0, :5].tolist() in [[i in (j, j + 1) for i in range(5)] for j in range(4)]
    assert places == {0, 1, 2, 3}


@pytest.mark.parametrize("shift", [-1, 0, 1])
def test_a_label_shift_is_a_move_of_the_labels(shift: int) -> None:
    labels = torch.tensor([[-100, 5, 8, 6, 8, -100], [8, 1, 1, 8, 1, 1]])
    moved = aligned_labels(labels, shift)
    for t in range(6):
        own = labels[:, t + shift] if 0 <= t + shift < 6 else torch.tensor([-100, -100])
        assert torch.equal(moved[:, t], own)
    loss = torch.rand(2, 6, generator=torch.Generator().manual_seed(0))
    found = freeze_weights(labels, loss, [8], 1, 0.5, label_shift=shift)
    assert torch.equal(found, freeze_weights(moved, loss, [8], 1, 0.5))
