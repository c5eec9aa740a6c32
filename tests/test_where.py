"""Interventions in the thinking or in the answer alone."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pytest
import torch
from tiny import tiny_model
from where_oracle import check_where, cut, found_by

from knockout.engines.base import Request, to_extra_args
from knockout.engines.transformers import TransformersEngine
from knockout.errors import UsageError
from knockout.method.interventions import Intervention
from knockout.method.sampling import Sampling
from knockout.processors.rules import rule_from_extra_args
from knockout.processors.thinking import Thought, closed_before
from knockout.processors.transformers import KnockoutLogitsProcessor

PARTS: tuple[Literal["thinking", "answer"], ...] = ("thinking", "answer")
V = 40


def test_both_ways_to_find_the_end_agree_with_a_search() -> None:
    draw = random.Random(4)
    for _ in range(200):
        n = draw.randint(1, 4)
        rows, starts, ends, tags, want = [], [], [], [], []
        for _ in range(n):
            tag = tuple(draw.randint(0, 2) for _ in range(draw.randint(1, 3)))
            tokens = [draw.randint(0, 2) for _ in range(14)]
            start, end = draw.randint(0, 8), draw.randint(8, 14)
            begin = max(0, start - len(tag) - 3)
            found = cut(tokens[begin:end], tag) is not None
            thought = Thought(tag, tokens[:8], start)
            for token in tokens[8:end]:
                thought.take(token)
            assert thought.closed == found
            assert thought.seen == end - 8
            rows.append(tokens), starts.append(start), ends.append(end)
            tags.append(tag), want.append(found)
        told = closed_before(torch.tensor(rows), torch.tensor(starts), torch.tensor(ends), tags)
        assert told.tolist() == want
    none = closed_before(torch.zeros(2, 3), torch.zeros(2), torch.zeros(2), [(), ()])
    assert none.tolist() == [False, False]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> TransformersEngine:
    torch.set_num_threads(1)
    folder = tiny_model(tmp_path_factory.mktemp("where") / "model", vocab_size=V, scale=0.1)
    return TransformersEngine(str(folder), max_num_seqs=16)


@pytest.mark.parametrize(
    "sampling", [Sampling(1.0), Sampling(0.9, top_p=0.9, top_k=12), Sampling(1.5, min_p=0.1)]
)
def test_forks_and_runs_from_scratch_are_what_the_cut_gives(
    engine: TransformersEngine, sampling: Sampling
) -> None:
    active: set[str] = set()
    for seed in range(3):
        plain = Request("r", (3, 4, 5, 6, 7, 1, 1, 1, 1), seed, sampling, max_tokens=24)
        base = found_by(engine, plain)
        for tag in (tuple(base[9:10]), tuple(base[8:10])):
            assert 1 not in tag  # the prompt would close the thinking
            ids = tuple(sorted({base[2], base[5], base[14 % len(base)], base[-1]} - set(tag)))
            watch = tuple(
                one
                for where in PARTS
                for one in (
                    Intervention("ban", ids, where=where),
                    Intervention("ban", ids[:1], where=where, first_step=4, end_step=16),
                    Intervention("penalty", ids, strength=1.5, where=where),
                    Intervention("replace", ids, replacement=(set(range(3, V)) - {*ids, *tag}).pop(),
                                 where=where),
                )
            )  # fmt: skip
            active |= check_where(engine, plain, tag, watch)
    assert active == set(PARTS)


def test_a_prompt_may_close_the_thinking(engine: TransformersEngine) -> None:
    plain = Request("r", (5, 6, 7, 8, 9), 3, Sampling(1.0), max_tokens=12)
    token = found_by(engine, plain)[0]
    thinking, answer = (Intervention("ban", (token,), where=where) for where in PARTS)
    for tag in ((7,), (8, 9)):
        asked = replace(plain, think_end=tag)
        assert found_by(engine, replace(asked, intervention=thinking)) == found_by(engine, plain)
        everywhere = replace(asked, intervention=replace(answer, where="everywhere"))
        assert found_by(engine, replace(asked, intervention=answer)) == found_by(engine, everywhere)


def test_it_is_refused_where_nothing_says_how_the_thinking_ends(
    engine: TransformersEngine,
) -> None:
    own = Intervention("ban", (3,), where="answer")
    bad = Request("r", (5,), 3, Sampling(1.0), max_tokens=2, intervention=own)
    with pytest.raises(UsageError, match=r"acts in the answer alone, which needs think_end"):
        engine.add(bad)
    with pytest.raises(ValueError, match=r"answer alone needs knockout_think_end"):
        rule_from_extra_args(to_extra_args(bad))
    args = to_extra_args(replace(bad, think_end=(4,)))
    del args["knockout_start"]
    with pytest.raises(ValueError, match=r"part of the text needs knockout_start"):
        rule_from_extra_args(args)


def test_generate_knows_the_parts() -> None:
    own = Intervention("ban", (3,), where="answer")
    request = Request("r", (5, 6), 3, Sampling(0), max_tokens=9, intervention=own, think_end=(8,))
    rule = rule_from_extra_args(to_extra_args(request))
    processor = KnockoutLogitsProcessor([rule, rule], torch.tensor([[0, 1, 1], [1, 1, 1]]))
    tokens = torch.tensor([[0, 5, 6, 8], [5, 6, 7, 7]])
    logits = torch.zeros(2, V)
    logits[:, 3], logits[:, 4] = 9, 5
    assert processor(tokens, logits).argmax(1).tolist() == [4, 3]


@pytest.fixture(scope="module")
def vllm() -> Any:
    pytest.importorskip("vllm")
    from vllm import SamplingParams
    from vllm_v1 import BatchUpdate

    from knockout.processors.vllm import KnockoutProcessor

    return SimpleNamespace(params=SamplingParams, update=BatchUpdate, make=KnockoutProcessor)


CONFIG = SimpleNamespace(
    speculative_config=None, model_config=SimpleNamespace(get_vocab_size=lambda: V)
)


def params(vllm: Any, where: Literal["thinking", "answer"]) -> Any:
    own = Intervention("ban", (3,), where=where)
    request = Request("r", (5, 6), 3, Sampling(0), max_tokens=9, intervention=own, think_end=(7, 8))
    return vllm.params(temperature=0, extra_args=to_extra_args(request))


def likes(best: int, second: int) -> torch.Tensor:
    logits = torch.zeros(2, V)
    logits[:, best], logits[:, second] = 9, 5
    return logits


@pytest.mark.parametrize("late", [False, True])
def test_v1_knows_the_parts(vllm: Any, late: bool) -> None:
    """Also where the lists hold −1 for tokens that are on the device still."""
    processor = vllm.make(CONFIG, torch.device("cpu"), False)
    outputs: tuple[list[int], list[int]] = ([], [])
    added = [(n, params(vllm, part), [5, 6], outputs[n]) for n, part in enumerate(PARTS)]
    update = vllm.update(batch_size=2, removed=[], added=added, moved=[])
    processor.update_state(update)
    picked = []
    for best in (3, 7, 8, 3):
        tokens = processor.apply(likes(best, 4)).argmax(1).tolist()
        assert processor.apply(likes(best, 4)).argmax(1).tolist() == tokens  # a discarded pick
        picked.append(tokens)
        for row, token in zip(outputs, tokens, strict=True):
            row.append(-1 if late else token)
        if best == 7:  # leaves the batch for a moment
            processor.update_state(vllm.update(batch_size=0, removed=[1, 0], added=[], moved=[]))
            processor.update_state(update)
    assert picked == [[4, 3], [7, 7], [8, 8], [3, 4]]


def test_v2_knows_the_parts(vllm: Any) -> None:
    kept = torch.zeros(8, 32, dtype=torch.int32)
    processor = vllm.make(CONFIG, SimpleNamespace(all_token_ids=SimpleNamespace(gpu=kept)))
    slots = (5, 2)
    kept[slots, :2] = torch.tensor([5, 6], dtype=torch.int32)
    for slot, part in zip(slots, PARTS, strict=True):
        assert processor.add_request(slot, params(vllm, part))
    picked = []
    for n, best in enumerate((3, 7, 8, 3)):
        context = SimpleNamespace(
            idx_mapping_np=np.array(slots), expanded_idx_mapping=torch.tensor(slots),
            pos=torch.tensor([1 + n] * 2), seq_lens_upper_bound_np=np.array([2 + n] * 2),
        )  # fmt: skip
        tokens = processor.apply(likes(best, 4), context).argmax(1)
        kept[slots, 2 + n] = tokens.to(torch.int32)
        picked.append(tokens.tolist())
    assert picked == [[4, 3], [7, 7], [8, 8], [3, 4]]


def test_drafts_and_parts_do_not_go_together(vllm: Any) -> None:
    config = SimpleNamespace(speculative_config=object(), model_config=CONFIG.model_config)
    processor = vllm.make(config, SimpleNamespace())
    with pytest.raises(ValueError, match="does not go with speculative decoding"):
        processor.add_request(0, params(vllm, "answer"))


def test_a_sweep_in_one_part(tmp_path: Path) -> None:
    import json

    from child_runs import sweep_file

    from knockout.config.file import load_sweep
    from knockout.sweep.run import run_sweep

    for where in PARTS:
        folder = tmp_path / where
        folder.mkdir()
        candidates = {"strings": ["w1", "w2", "w3", "w4"], "where": where}
        path = sweep_file(
            folder, n_problems=6, candidates=candidates, chat={"think_end": "w9"}, audit=1.0
        )
        run_sweep(load_sweep(path), folder / "run")
        summary = json.loads((folder / "run" / "summary.json").read_text())
        assert summary["complete"]
        assert summary["audited"] == summary["forks"] + summary["inherited"] > 20
        assert summary["fork_errors"] == summary["coupling_errors"] == 0
        assert summary["forks"] > 0
