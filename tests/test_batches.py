"""A row's token and answer are its own: no other row, and no order of the rows, changes them."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import pick_plain

from knockout.method.interventions import Intervention, ban
from knockout.method.sampling import Rows, Sampling, pick
from knockout.processors import batch as batch_module
from knockout.processors.batch import Batch
from knockout.processors.rules import Rule, watch_of

# Few values, so that ties are everywhere, and −∞ as a ban by somebody else leaves it.
LOGITS = st.sampled_from([-math.inf, -1.5, 0.0, 0.25, 1.0, 3.0])
SAMPLINGS = st.sampled_from(
    [
        Sampling(temperature=0),
        Sampling(temperature=1),
        Sampling(temperature=0.7, top_k=3),
        Sampling(temperature=0.7, top_k=20, top_p=0.8),
        Sampling(temperature=1.3, top_p=0.5),
        Sampling(temperature=1, min_p=0.2),
    ]
)


@st.composite
def interventions(draw: st.DrawFn, width: int) -> Intervention:
    some = st.sets(st.integers(0, width - 2), min_size=1, max_size=4)
    ids = tuple(sorted(draw(some)))
    where = draw(st.sampled_from(["everywhere", "everywhere", "thinking", "answer"]))
    first = draw(st.sampled_from([0, 0, 2]))
    end = draw(st.sampled_from([None, None, 4]))
    kind = draw(st.sampled_from(["ban", "ban", "penalty", "replace"]))
    strength = draw(st.sampled_from([-2.0, 0.5, 4.0])) if kind == "penalty" else None
    to = width - 1 if kind == "replace" else None
    return Intervention(kind, ids, strength, to, where, first, end)


@st.composite
def rules(draw: st.DrawFn, width: int, name: str) -> Rule | None:
    what = draw(st.sampled_from(["none", "plain", "coupled", "coupled", "coupled", "coupled"]))
    if what == "none":
        return None
    own = draw(st.one_of(st.none(), interventions(width)))
    if what == "plain":
        return Rule(ban((draw(st.integers(0, width - 2)), width - 1)), None, 0, name)
    watch = tuple(draw(st.lists(interventions(width), max_size=4)))
    if own is not None and draw(st.booleans()):  # an extension of its own
        more = tuple(sorted({*own.token_ids, *draw(st.sets(st.integers(0, width - 2)))}))
        watch += (Intervention(own.kind, more, *_rest(own)),)
    return Rule(
        own, draw(SAMPLINGS), draw(st.integers(0, 5)), name, start=3, report=draw(st.integers(0, 5)),
        watch=watch_of(watch) if watch else None, think_end=(0,),
        fail_token=draw(st.integers(0, width - 1)),
    )  # fmt: skip


def _rest(one: Intervention) -> tuple[Any, ...]:
    return one.strength, one.replacement, one.where, one.first_step, one.end_step


@st.composite
def batches(
    draw: st.DrawFn,
) -> tuple[list[Rule | None], torch.Tensor, list[int], list[bool], list[int]]:
    """Rules, logits, positions, whether the thinking has ended, and another order of the rows."""
    n, width = draw(st.integers(1, 6)), draw(st.sampled_from([7, 48]))
    found = [draw(rules(width, str(row))) for row in range(n)]
    flat = draw(st.lists(LOGITS, min_size=n * width, max_size=n * width))
    logits = torch.tensor(flat, dtype=torch.float32).reshape(n, width)
    steps = draw(st.lists(st.integers(3, 8), min_size=n, max_size=n))
    closed = draw(st.lists(st.booleans(), min_size=n, max_size=n))
    return found, logits, steps, closed, draw(st.permutations(range(n)))


def applied(
    batch: Batch, logits: torch.Tensor, steps: list[int], closed: list[bool]
) -> torch.Tensor:
    """What the rows become; one that cannot be sampled from says so half a step below its token."""
    out = logits.clone()
    positions = torch.tensor([steps[row] for row in batch.coupled], dtype=torch.int64)
    ended = torch.tensor([closed[row] for row in batch.coupled], dtype=torch.bool)
    batch.apply_(out, positions, ended)
    return out


@settings(max_examples=60, deadline=None)
@given(batches())
def test_a_row_is_what_it_is_alone(case: Any) -> None:
    found, logits, steps, closed, _ = case
    width = logits.shape[1]
    together = applied(Batch(found, width), logits, steps, closed)
    for row, rule in enumerate(found):
        here = slice(row, row + 1)
        alone = applied(Batch([rule], width), logits[here], steps[here], closed[here])
        assert torch.equal(together[here], alone), row
        failed = bool((alone == -0.5).any())
        own = None if rule is None else rule.intervention
        if rule is None or rule.sampling is None or failed or (own and own != ban(own.token_ids)):
            continue
        # Against the plain implementation and against `pick` on the row alone.
        raw = logits[row].clone()
        raw[list(rule.banned)] = -math.inf
        token = pick_plain(raw.tolist(), rule.sampling, rule.seed, steps[row])
        assert int((together[row] == 0).nonzero()) == token
        one = Rows([rule.sampling], [rule.seed])
        assert int(pick(raw[None], one, torch.tensor(steps[here]))) == token


@settings(max_examples=80, deadline=None)
@given(batches())
def test_rows_in_another_order_are_the_rows_of_a_new_batch(case: Any) -> None:
    found, logits, steps, closed, order = case
    width = logits.shape[1]
    batch = Batch(found, width)
    for _ in range(2):  # also a batch that has been re-indexed before
        rearranged = batch.rearranged([found[row] for row in order], width)
        moved = (logits[order], [steps[row] for row in order], [closed[row] for row in order])
        new = applied(Batch([found[row] for row in order], width), *moved)
        assert torch.equal(applied(rearranged, *moved), new)
        batch, order = rearranged, order[1:] + order[:1]


# When a batch is laid out -------------------------------------------------------------------------


class Laid:
    """How often rules were laid out."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.times, real = 0, batch_module.Rows

        def counted(*args: Any) -> Any:
            self.times += 1
            return real(*args)

        monkeypatch.setattr(batch_module, "Rows", counted)


def some_rules(n: int) -> list[Rule]:
    return [
        Rule(ban((row, 20 + row)), Sampling(temperature=1, top_k=4), row, str(row))
        for row in range(n)
    ]


def test_other_rules_are_laid_out_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    laid, found = Laid(monkeypatch), some_rules(4)
    plain = Rule(ban((3,)), None, 0, "plain")
    batch = Batch([*found, plain, None], 40)
    assert laid.times == 1
    batch = batch.rearranged([None, plain, *reversed(found)], 40)
    batch = batch.rearranged([*found, None, None, plain], 40)
    assert laid.times == 1
    others = [
        ([*found[:3], plain], 40),
        ([*found, plain, plain], 40),
        ([found[0], found[0], *found[2:], plain], 40),
        ([*found[:3], *some_rules(1), plain], 40),
        ([*found, plain], 41),
    ]
    for n, (rows, width) in enumerate(others, 2):
        logits = torch.randn(len(rows), width)
        closed = [False] * len(rows)
        steps = list(range(len(rows)))
        want = applied(Batch(rows, width), logits, steps, closed)
        laid.times = n - 1
        got = applied(batch.rearranged(rows, width), logits, steps, closed)
        assert laid.times == n
        assert torch.equal(got, want)


def test_rows_of_one_request_may_change_places() -> None:
    one, two = some_rules(2)
    batch = Batch([one, one, two], 40).rearranged([two, one, one], 40)
    logits = torch.randn(3, 40)
    want = applied(Batch([two, one, one], 40), logits, [3, 4, 5], [False] * 3)
    got = applied(batch, logits, [3, 4, 5], [False] * 3)
    assert torch.equal(got, want)


def params_of(vllm: Any, row: int) -> Any:
    ours = {"knockout_ids": [row, 20 + row], "knockout_temperature": 1, "knockout_seed": row}
    return vllm.SamplingParams(temperature=0, extra_args={**ours, "knockout_name": str(row)})


CONFIG = SimpleNamespace(
    speculative_config=None, model_config=SimpleNamespace(get_vocab_size=lambda: 40)
)


def test_v1_re_indexes_moved_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    vllm = pytest.importorskip("vllm")
    from vllm_v1 import BatchUpdate, MoveDirectionality

    from knockout.processors.vllm import KnockoutProcessor

    laid, processor = Laid(monkeypatch), KnockoutProcessor(CONFIG, torch.device("cpu"), False)
    logits = torch.randn(4, 40)
    added = [(row, params_of(vllm, row), [7] * 3, []) for row in range(4)]
    processor.update_state(BatchUpdate(4, [], added, []))
    before = processor.apply(logits.clone())
    swap = MoveDirectionality.SWAP
    processor.update_state(BatchUpdate(4, [], [], [(0, 3, swap), (1, 3, swap)]))
    after = processor.apply(logits[[3, 0, 2, 1]])
    assert torch.equal(after, before[[3, 0, 2, 1]])
    assert laid.times == 1
    processor.update_state(BatchUpdate(3, [3], [], []))
    assert torch.equal(processor.apply(logits[[3, 0, 2]]), before[[3, 0, 2]])
    assert laid.times == 2


def test_v2_re_indexes_slots_in_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    vllm = pytest.importorskip("vllm")
    from knockout.processors.vllm import KnockoutProcessor

    def processor_with(requests: dict[int, int]) -> KnockoutProcessor:
        made = KnockoutProcessor(CONFIG, SimpleNamespace(max_num_reqs=8))
        for slot, which in requests.items():
            made.add_request(slot, params_of(vllm, which))
        return made

    laid, processor = Laid(monkeypatch), processor_with({row: row for row in range(4)})
    logits = torch.randn(4, 40)

    def step(slots: list[int], processor: KnockoutProcessor = processor) -> torch.Tensor:
        mapping = np.array(slots, dtype=np.int32)
        context = SimpleNamespace(idx_mapping_np=mapping, pos=torch.full((len(slots),), 2))
        return processor.apply(logits[slots], context)

    before = step([0, 1, 2, 3])
    assert torch.equal(step([3, 0, 2, 1]), before[[3, 0, 2, 1]])
    assert laid.times == 1
    assert torch.equal(step([3, 0]), before[[3, 0]])
    assert laid.times == 2
    processor.add_request(3, params_of(vllm, 5))
    changed = step([0, 3])
    assert laid.times == 3
    assert torch.equal(changed, step([0, 3], processor_with({0: 0, 3: 5})))
