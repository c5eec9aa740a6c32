"""Our lm-eval model with the embedded model in transformers, through lm-eval's own evaluator."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from local_tasks import write_tasks

from knockout.errors import UsageError
from knockout.integrations.lm_eval_settings import check_settings, claim_cache, parse_ids

engine_tests = pytest.mark.engine


@pytest.mark.parametrize("value", [11, "11", [11], (11,), " 11 ", "11+11", "[11]"])
def test_one_id_however_it_is_written(value: Any) -> None:
    assert parse_ids(value) == (11,)


@pytest.mark.parametrize("value", ["13+11", "13;11", "[13, 11]", "13 11", [13, 11]])
def test_several_ids(value: Any) -> None:
    assert parse_ids(value) == (11, 13)


@pytest.mark.parametrize("value", ["-3", "the", 1.5, True, [11, "13"], {"a": 1}])
def test_what_is_no_id_is_refused(value: Any) -> None:
    with pytest.raises(UsageError, match="knockout_ids"):
        parse_ids(value)


def test_no_ids_is_a_baseline() -> None:
    assert parse_ids(None) == parse_ids("") == parse_ids([]) == ()


def test_settings_are_applied_or_refused() -> None:
    check_settings(
        {"until": [], "max_gen_toks": 8, "temperature": 0.5, "num_beams": 1, "seed": None}
    )
    with pytest.raises(UsageError, match=r"repetition_penalty=1\.2"):
        check_settings({"repetition_penalty": 1.2})
    with pytest.raises(UsageError, match="model_args knockout_ids"):
        check_settings({"extra_args": {"knockout_ids": [3]}})


class Cache(dict[str, Any]):
    filename = "cache.db"

    def commit(self) -> None:
        """sqlitedict has it."""


def test_a_cache_belongs_to_one_ban() -> None:
    cache = Cache()
    claim_cache(cache, {"knockout_ids": [11], "seed": 0})
    cache["a request"] = "a response"
    claim_cache(cache, {"knockout_ids": [11], "seed": 0})
    with pytest.raises(UsageError, match=r"knockout_ids = \[11\], this run has \[13\]"):
        claim_cache(cache, {"knockout_ids": [13], "seed": 0})
    with pytest.raises(UsageError, match="seed = 0, this run has 1"):
        claim_cache(cache, {"knockout_ids": [11], "seed": 1})
    with pytest.raises(UsageError, match="without a record"):
        claim_cache(Cache(foreign="response"), {"knockout_ids": []})


def test_a_sweep_reads_a_task_with_repeats(tmp_path: Path) -> None:
    """Its documents once each; how often each is answered is the sweep's `seeds`."""
    from knockout.benchmarks import Chat, load_benchmark

    (benchmark,) = load_benchmark(
        "local_repeats", include_path=write_tasks(tmp_path), chat=Chat(template=False)
    )
    assert [problem.index for problem in benchmark.problems] == [0, 1, 2]
    assert benchmark.metric == "exact_match"


@pytest.fixture(scope="module")
def lm() -> Any:
    from knockout.integrations.lm_eval_model import KnockoutLM

    model = KnockoutLM("smollm2-135m", engine="transformers", max_length=400, seed=7)
    yield model
    model.engine.close()


@pytest.fixture
def banning(lm: Any) -> Any:
    """Sets the ban on the one engine of this module."""

    def ban(*ids: int) -> Any:
        lm.banned = ids
        return lm

    yield ban
    lm.banned = ()


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tasks(tmp_path_factory.mktemp("tasks"))


def evaluate(lm: Any, folder: Path, task: str, **options: Any) -> dict[str, Any]:
    import lm_eval
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_defaults=False, include_path=str(folder))
    return lm_eval.simple_evaluate(
        lm, tasks=[task], task_manager=manager, bootstrap_iters=0, log_samples=True, **options
    )


@engine_tests
class TestInTheEvaluator:
    def test_a_ban_holds(self, banning: Any, tasks: Path) -> None:
        def digits(lm: Any) -> tuple[int, dict[str, Any]]:
            found = evaluate(lm, tasks, "local_sums")
            texts = [s["resps"][0][0] for s in found["samples"]["local_sums"]]
            return sum(c.isdecimal() for text in texts for c in text), found

        assert digits(banning())[0] > 0
        lm = banning(*[i for d in range(10) for i in banning().tok_encode(str(d))])
        n, found = digits(lm)
        assert n == 0
        assert found["config"]["knockout_ids"] == list(lm.banned)

    def test_repeats_differ_and_come_again(self, banning: Any, tasks: Path) -> None:
        settings = {"gen_kwargs": "do_sample=True,temperature=1.0", "limit": 2}
        one = evaluate(banning(), tasks, "local_repeats", **settings)
        two = evaluate(banning(), tasks, "local_repeats", **settings)
        for a, b in zip(
            one["samples"]["local_repeats"], two["samples"]["local_repeats"], strict=True
        ):
            assert len(set(a["resps"][0])) == 4
            assert a["resps"] == b["resps"]

    def test_thinking_is_cut_and_stops_are_looked_for_behind_it(
        self, banning: Any, tasks: Path
    ) -> None:
        def response(**options: Any) -> str:
            found = evaluate(banning(), tasks, "local_repeats", limit=1, **options)
            return str(found["samples"]["local_repeats"][0]["resps"][0][0])

        lm = banning()
        whole = response(gen_kwargs="until=@@@")
        lm.think_end_token = whole.split()[len(whole.split()) // 2]
        try:
            cut = response()
        finally:
            end, lm.think_end_token = lm.think_end_token, None
        want = whole.split(end)[-1].lstrip()
        for stop in ("Question:", "\n\n"):
            want = want.split(stop)[0]
        assert cut == want != whole

    def test_a_choice_with_a_banned_token_is_never_chosen(self, banning: Any, tasks: Path) -> None:
        free = evaluate(banning(), tasks, "local_choice")["samples"]["local_choice"][0]
        scores = [float(r[0][0]) for r in free["resps"]]
        best = free["doc"]["c"][scores.index(max(scores))]
        lm = banning(*banning().tok_encode(" " + best))
        hit = evaluate(lm, tasks, "local_choice")["samples"]["local_choice"][0]
        now = [float(r[0][0]) for r in hit["resps"]]
        assert now[scores.index(max(scores))] == -math.inf
        # The others share what the banned token had.
        assert all(b > a for a, b in zip(scores, now, strict=True) if b > -math.inf)

    def test_log_likelihoods_are_those_of_a_masked_softmax(self, banning: Any) -> None:
        lm = banning(260, 30)
        context, answer = lm.tok_encode("One two three four"), lm.tok_encode(" five six")
        with torch.inference_mode():
            logits = lm.engine._model(torch.tensor([context + answer])).logits[0].double()
            logits[:, [260, 30]] = -math.inf
            rows = logits.log_softmax(-1)[len(context) - 1 : -1]
        want = sum(float(row[t]) for row, t in zip(rows, answer, strict=True))
        greedy = rows.argmax(-1).tolist() == answer
        ((got, is_greedy),) = lm._loglikelihood_tokens([(None, context, answer)])
        assert got == pytest.approx(want, abs=1e-4)
        assert is_greedy == greedy

    def test_batches_and_rolling_windows_add_up(self, banning: Any) -> None:
        from lm_eval.api.instance import Instance

        lm = banning(260)
        text = "A cat sat on a mat and looked at me. " * 3
        ids = lm.tok_encode(text)
        (rolled,) = lm.loglikelihood_rolling(
            [Instance("loglikelihood_rolling", {}, (text,), 0, ("t", 0, 1))]
        )
        pairs = [([lm.prefix_token_id, *ids[:i]], [ids[i]]) for i in range(len(ids))]
        assert 260 not in ids
        assert rolled == pytest.approx(sum(s[0] for s in lm._score(pairs)), abs=1e-3)

    def test_use_cache_keeps_bans_apart(self, banning: Any, tasks: Path, tmp_path: Path) -> None:
        cache = str(tmp_path / "cache")
        one = evaluate(banning(284), tasks, "local_sums", use_cache=cache)
        again = evaluate(banning(284), tasks, "local_sums", use_cache=cache)
        with pytest.raises(UsageError, match=r"knockout_ids = \[284\], this run has \[30\]"):
            evaluate(banning(30), tasks, "local_sums", use_cache=cache)
        with pytest.raises(UsageError, match="without do_sample=True"):
            evaluate(
                banning(284), tasks, "local_repeats", use_cache=cache, gen_kwargs="temperature=0.7"
            )
        assert [s["resps"] for s in one["samples"]["local_sums"]] == [
            s["resps"] for s in again["samples"]["local_sums"]
        ]


@engine_tests
def test_the_command_line_passes_lm_evals_options_on(tasks: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [
            sys.executable, "-m", "knockout", "lm-eval", "run", "--model", "knockout",
            "--model_args", "pretrained=smollm2-135m,knockout_ids=260+30,engine=transformers,max_length=300",
            "--tasks", "local_sums", "--include_path", str(tasks), "--limit", "1",
            "--batch_size", "auto", "--apply_chat_template", "--system_instruction", "Be brief.",
            "--num_fewshot", "1", "--log_samples", "--output_path", str(tmp_path / "out"),
        ],
        capture_output=True, text=True, check=False, env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "|local_sums|" in done.stdout
    (samples,) = (tmp_path / "out").glob("*/samples_local_sums_*.jsonl")
    assert "Be brief." in samples.read_text()
    assert len(samples.read_text().splitlines()) == 1


@engine_tests
def test_ends_of_text_are_banned_on_request_only() -> None:
    from knockout.integrations.lm_eval_model import KnockoutLM

    with pytest.raises(
        UsageError, match="knockout_ids contains 2, which ends a text; give allow_eos"
    ):
        KnockoutLM("smollm2-135m", knockout_ids=2, engine="transformers")
    with pytest.raises(UsageError, match="token ids are from 0 to 49151"):
        KnockoutLM("smollm2-135m", knockout_ids=49152, engine="transformers")
