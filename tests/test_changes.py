"""Which interventions change a pick, against picking again over the whole vocabulary in numpy."""

from __future__ import annotations

import math
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from oracles import gumbel_plain

from knockout.method import sampling as sampling_module
from knockout.method.changes import Watched, pick_watched
from knockout.method.sampling import Rows, Sampling, pick

Floats = NDArray[np.float64]
SAMPLINGS = [
    Sampling(0.6, top_p=0.95, top_k=20),
    Sampling(0.6, top_p=0.95),
    Sampling(1.0, top_p=0.95),
    Sampling(1.0, top_p=0.9),
    Sampling(1.0, top_p=0.5, min_p=0.02),
    Sampling(1.5, min_p=0.05),
    Sampling(2.0, top_p=0.99),
    Sampling(0.7, top_k=3),
    Sampling(0.7, top_k=1),
    Sampling(0.8, top_p=0.9, top_k=100_000),  # more than the vocabulary
    Sampling(0.7, top_p=0.4, top_k=5, min_p=0.1),
    Sampling(1.0),
    Sampling(0.0),
]


def brute_pick(row: Floats, noise: Floats, s: Sampling) -> int:
    """One row's pick from the definitions: temperature, min_p, top_k, top_p, arg max."""
    if s.temperature == 0:
        return int(np.argmax(row))
    x = row / s.temperature
    order = np.lexsort((-np.arange(len(x)), -x))  # falling, ties by falling id
    keep = x[order] >= x[order[0]] + (math.log(s.min_p) if s.min_p else -math.inf)
    if 0 < s.top_k < len(x):
        keep &= x[order] >= x[order[s.top_k - 1]]
    kept = order[keep]
    if s.top_p < 1:
        mass = np.exp(x[kept] - x[kept[0]])
        before = np.concatenate([[0.0], np.cumsum(mass)[:-1]])
        inside = before < s.top_p * mass.sum()
        inside[0] = True
        kept = kept[inside]
    return int(kept[np.argmax((x + noise)[kept])])


def make_row(rng: np.random.Generator, kind: str, width: int) -> NDArray[np.float32]:
    row = rng.normal(0, {"peaked": 6.0, "flat": 0.05}.get(kind, 2.0), width)
    if kind == "tied":
        row = np.round(row)
    if kind == "equal":
        row = np.zeros(width)
    if kind == "cliff":
        row = np.full(width, -20.0)
        row[rng.permutation(width)[: width // 2]] = 0.0
        row[rng.integers(width)] = 6.8
    if kind == "holes":
        row[rng.permutation(width)[: width - max(2, width // 3)]] = -np.inf
    out = row.astype(np.float32)
    if kind == "bf16":
        out = torch.from_numpy(out).bfloat16().float().numpy()
    return out


KINDS = ["peaked", "normal", "flat", "tied", "equal", "cliff", "holes", "bf16"]


def lay_out(per_row: list[list[tuple[int, float, list[int]]]]) -> Watched:
    """(kind, strength, ids) of each watched intervention of each row."""
    row = [r for r, some in enumerate(per_row) for _ in some]
    every = [one for some in per_row for one in some]
    entry = [p for p, one in enumerate(every) for _ in one[2]]
    token = [t for one in every for t in one[2]]
    return Watched(
        torch.tensor(row),
        torch.tensor([place for some in per_row for place in range(len(some))]),
        torch.tensor([one[0] for one in every]),
        torch.tensor([one[1] for one in every], dtype=torch.float64),
        torch.tensor(entry),
        torch.tensor(token),
        max(map(len, per_row)),
        any(one[0] == 1 for one in every),
    )


def brute_changes(
    logits: NDArray[np.float32],
    noise: Floats,
    samplings: list[Sampling],
    per_row: list[list[tuple[int, float, list[int]]]],
) -> list[bool]:
    found = []
    for row, g, s, some in zip(logits, noise, samplings, per_row, strict=True):
        own = brute_pick(row.astype(np.float64), g, s)
        for kind, strength, ids in some:
            changed = row.copy()
            if kind == 2:
                found.append(own in ids)
                continue
            if kind == 0:
                changed[ids] = -np.inf
            else:
                changed[ids] -= np.float32(strength)
            if not (changed > -np.inf).any():
                found.append(True)
                continue
            found.append(brute_pick(changed.astype(np.float64), g, s) != own)
    return found


def noise_of(seeds: list[int], positions: list[int], width: int) -> Floats:
    return np.array(
        [
            [gumbel_plain(s, p, t) for t in range(width)]
            for s, p in zip(seeds, positions, strict=True)
        ]
    )


def random_interventions(
    rng: np.random.Generator, row: NDArray[np.float32], n: int
) -> list[tuple[int, float, list[int]]]:
    width, order, some = len(row), np.argsort(-row), []
    for _ in range(n):
        size = int(rng.choice([1, 1, 1, 2, 5, max(1, width // 3), width - 1]))
        # Half of them among the best tokens, where it matters.
        pool = order[: max(size, 12)] if rng.random() < 0.5 else np.arange(width)
        ids = sorted(rng.permutation(pool)[:size].tolist())
        kind = int(rng.choice([0, 0, 0, 1, 2]))
        some.append(
            (kind, float(rng.choice([0.5, 2.0, -1.0, 8.0, -6.0])) if kind == 1 else 0.0, ids)
        )
    return some


@settings(max_examples=300, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.lists(st.tuples(st.sampled_from(SAMPLINGS), st.sampled_from(KINDS)), min_size=1, max_size=4),
    st.sampled_from([3, 17, 90]),
    st.sampled_from([(512, 16), (1, 1), (2, 4), (4, 2), (9, 1), (30, 4)]),
)
@example(39116, [(SAMPLINGS[0], "normal"), (SAMPLINGS[0], "holes")], 17, (512, 16))  # top_k > V
def test_it_says_what_picking_again_says(
    seed: int, kinds: list[tuple[Sampling, str]], width: int, lists: tuple[int, int]
) -> None:
    """Whatever the length of the lists: without top_k, and beyond its k."""
    with (
        patch.object(sampling_module, "_OPEN_PREFIX", lists[0]),
        patch.object(sampling_module, "_TIE_ROOM", lists[1]),
    ):
        compare_with_brute_force(seed, kinds, width)


def compare_with_brute_force(seed: int, kinds: list[tuple[Sampling, str]], width: int) -> None:
    rng = np.random.default_rng(seed)
    samplings = [s for s, _ in kinds]
    logits = np.stack([make_row(rng, kind, width) for _, kind in kinds])
    seeds = [int(rng.integers(2**62)) for _ in kinds]
    positions = [int(rng.integers(5000)) for _ in kinds]
    per_row = [random_interventions(rng, row, 12) for row in logits]
    noise = noise_of(seeds, positions, width)
    rows, where = Rows(samplings, seeds), torch.tensor(positions)
    tensor = torch.from_numpy(logits)
    picks, found = pick_watched(tensor, rows, where, lay_out(per_row))
    assert picks.equal(pick(tensor, rows, where))
    want = [
        brute_pick(r.astype(np.float64), g, s)
        for r, g, s in zip(logits, noise, samplings, strict=True)
    ]
    assert picks.tolist() == want
    assert found.tolist() == brute_changes(logits, noise, samplings, per_row)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_it_holds_where_the_vocabulary_is_wider_than_the_lists(sampling: Sampling) -> None:
    """Lists of 36 and 512 of 2,000 tokens: sets of up to 1,000 empty them."""
    rng = np.random.default_rng(7)
    width, kinds = 2000, KINDS
    logits = np.stack([make_row(rng, kind, width) for kind in kinds])
    seeds, positions = [int(rng.integers(2**62)) for _ in kinds], list(range(8))
    per_row = []
    for row in logits:
        order = np.argsort(-row)
        sets = [order[:30], order[:1000], order[1::2][:1000], rng.permutation(width)[:1000]]
        some = [(0, 0.0, sorted(ids.tolist())) for ids in sets]
        some += [(0, 0.0, [int(t)]) for t in order[:40]]
        some += [(1, 1.5, [int(t)]) for t in order[:4]] + [(1, -3.0, [int(order[700])])]
        per_row.append(some)
    noise = noise_of(seeds, positions, width)
    samplings = [sampling] * len(kinds)
    rows, where = Rows(samplings, seeds), torch.tensor(positions)
    tensor = torch.from_numpy(logits)
    picks, told = pick_watched(tensor, rows, where, lay_out(per_row))
    found = told.tolist()
    assert picks.equal(pick(tensor, rows, where))
    assert found == brute_changes(logits, noise, samplings, per_row)
    # Whatever else is in the batch changes nothing.
    for r, some in enumerate(per_row):
        one = torch.tensor([r])
        _, alone = pick_watched(tensor[one], rows.take(one), where[one], lay_out([some]))
        start = sum(map(len, per_row[:r]))
        assert alone.tolist() == found[start : start + len(some)]


def test_a_list_that_loses_its_last_token_does_not_show_where_the_support_ends() -> None:
    """A nucleus of about 600 of 1,200 tokens, of which 512 are listed; min_p drops the lowered."""
    width, settings_, changed = 1200, Sampling(top_p=0.5, min_p=0.05), 0
    row = np.linspace(0.001, 0, width).astype(np.float32)
    some = [(1, 8.0, list(range(212, 512))), (1, 8.0, [511])]
    for seed in range(40):
        rows, where = Rows([settings_], [seed]), torch.tensor([3])
        _, found = pick_watched(torch.from_numpy(row)[None], rows, where, lay_out([some]))
        want = brute_changes(row[None], noise_of([seed], [3], width), [settings_], [some])
        assert found.tolist() == want, seed
        changed += want[0]
    assert 0 < changed < 40


def test_mass_behind_the_nucleus_counts() -> None:
    """Half of the mass, .3 and .2: without the last, .5 is more than top_p .6 of what is left."""
    row = np.log(np.array([0.5, 0.3, 0.2])).astype(np.float32)
    settings_, changed = Sampling(top_p=0.6), 0
    some = [(1, 0.1, [2]), (1, 8.0, [2]), (0, 0.0, [2])]
    for seed in range(20):
        rows, where = Rows([settings_], [seed]), torch.tensor([3])
        _, found = pick_watched(torch.from_numpy(row)[None], rows, where, lay_out([some]))
        noise = noise_of([seed], [3], 3)
        assert found.tolist() == brute_changes(row[None], noise, [settings_], [some])
        changed += found.tolist() == [False, True, True]
    assert changed
