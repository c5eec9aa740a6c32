"""Running vLLM servers as an engine, lm-eval's own command line, and both against each other."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from local_tasks import IFEVAL, write_tasks
from server_tools import MAX_LEN, Proxy, vllm_environment, vllm_server, wait_until_healthy
from tiny import banning, embedded
from where_oracle import check_where, found_by

import knockout
from knockout.engines.base import Completion, Request, generate
from knockout.engines.server import ServerEngine
from knockout.errors import KnockoutError, UsageError
from knockout.method.interventions import Intervention, ban
from knockout.method.sampling import Sampling

pytest.importorskip("vllm")
pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

BANNED = 216  # a space before a number: SmolLM2 begins its sums with it
TASKS = ["local_sums", *(["local_ifeval"] if IFEVAL.is_file() else [])]


@dataclass
class World:
    """What runs for this module: a server, and lm-eval's own runs, all started at once."""

    folder: Path
    tasks: Path
    server: str
    runs: dict[str, subprocess.Popen[bytes]]

    def samples(self, name: str, task: str) -> list[dict[str, Any]]:
        """Of one of lm-eval's runs, once it has ended."""
        log = self.folder / f"{name}.log"
        assert self.runs[name].wait(400) == 0, log.read_text()[-4000:]
        return read_samples(self.folder / name, task)


def read_samples(out: Path, task: str) -> list[dict[str, Any]]:
    (path,) = out.glob(f"*/samples_{task}_*.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def lm_eval(world: Path, tasks: Path, name: str, names: list[str], *more: str) -> Any:
    """lm-eval's own command with its own vLLM model."""
    with (world / f"{name}.log").open("w") as log:
        return subprocess.Popen(
        [
            str(Path(sys.executable).parent / "lm_eval"), "run", "--model", "vllm",
            "--model_args", f"pretrained={embedded()},dtype=float32,max_model_len={MAX_LEN},"
            "max_num_seqs=8,enforce_eager=True,block_size=32",
            "--tasks", ",".join(names), "--include_path", str(tasks), "--apply_chat_template",
            "--system_instruction", "Answer briefly.", "--batch_size", "auto", "--log_samples",
            "--output_path", str(world / name), *more,
        ],
        env=vllm_environment(world, VLLM_ENABLE_V1_MULTIPROCESSING="0"),
        stdout=log, stderr=subprocess.STDOUT,
    )  # fmt: skip


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("world")
    tasks = write_tasks(folder)
    ban = json.dumps({"extra_args": {"knockout_ids": [BANNED]}})
    with vllm_server(folder) as url:
        runs = {
            "plain": lm_eval(folder, tasks, "plain", TASKS),
            "banned": lm_eval(folder, tasks, "banned", ["local_sums"], "--gen_kwargs", ban),
        }
        try:
            wait_until_healthy(url, folder / "server.log")
            yield World(folder, tasks, url, runs)
        finally:
            for process in runs.values():
                process.kill()
                process.wait(20)


@pytest.fixture(scope="module")
def engine(world: World) -> Iterator[ServerEngine]:
    engine = ServerEngine("smollm2-135m", urls=[world.server])
    yield engine
    engine.close()


def prompt_of(engine: ServerEngine, text: str) -> tuple[int, ...]:
    turns = [{"role": "user", "content": text}]
    template = engine.tokenizer.apply_chat_template(
        turns, tokenize=False, add_generation_prompt=True
    )
    return tuple(engine.tokenizer.encode(template, add_special_tokens=False))


def base(engine: ServerEngine, n: int = 0, **more: Any) -> Request:
    prompt = prompt_of(engine, f"Name {n + 2} animals.")
    settings = Sampling(0.8, top_k=20)
    request = Request(f"base {n}", prompt, 100 + n, settings, max_tokens=20)
    return replace(request, **more)


def run(engine: ServerEngine, *requests: Request) -> dict[str, Completion]:
    return {done.key: done for done in generate(engine, requests)}


class TestEngine:
    def test_what_runs_is_recorded(self, engine: ServerEngine) -> None:
        assert (engine.info.kind, engine.info.vocab_size) == ("server", 49152)
        assert engine.info.max_model_len == MAX_LEN
        assert engine.info.settings["served"] == ["smol"]

    def test_forks_equal_runs_from_scratch(self, engine: ServerEngine) -> None:
        (first,) = run(engine, base(engine)).values()
        step = 6
        ban = (int(first.tokens[step]),)
        while ban[0] in first.tokens[:step]:
            step, ban = step + 1, (int(first.tokens[step + 1]),)
        scratch = base(engine, key="scratch", intervention=banning(ban))
        fork = replace(scratch, key="fork", prefix=tuple(first.tokens[:step].tolist()))
        found = run(engine, scratch, fork)
        assert np.array_equal(found["fork"].tokens, found["scratch"].tokens)
        assert ban[0] not in found["fork"].tokens
        assert found["fork"].n_generated == len(found["fork"].tokens) - step

    def test_it_says_where_watched_bans_leave(self, engine: ServerEngine) -> None:
        (plain,) = run(engine, base(engine)).values()
        tokens = plain.tokens.tolist()
        watch = tuple(ban((t,)) for t in sorted({*tokens, *range(300, 320)}))
        (told,) = run(engine, base(engine, watch=watch)).values()
        runs = [base(engine, key=str(w), intervention=one) for w, one in enumerate(watch)]
        found = run(engine, *runs)
        assert told.changes is not None
        for w in range(len(watch)):
            other = found[str(w)].tokens.tolist()
            truth = [t for t, (a, b) in enumerate(zip(tokens, other, strict=False)) if a != b]
            assert told.changes[w] == (truth[0] if truth else -1)

    def test_it_tells_the_thinking_from_the_answer(self, engine: ServerEngine) -> None:
        plain = base(engine, 3)
        tokens = found_by(engine, plain)
        tag = tuple(tokens[6:8])
        ids = tuple(sorted({tokens[2], tokens[-2]} - set(tag)))
        watch = tuple(Intervention("ban", ids, where=where) for where in ("thinking", "answer"))
        assert check_where(engine, plain, tag, watch) == {"thinking", "answer"}

    def test_wrong_requests_are_refused_before_they_are_sent(self, engine: ServerEngine) -> None:
        with pytest.raises(UsageError, match="token ids are from 0 to 49151"):
            engine.add(base(engine, intervention=banning((49152,))))

    def test_the_servers_refusal_is_the_requests_error(self, engine: ServerEngine) -> None:
        everything = tuple(range(49152))
        bad = base(engine, key="bad", intervention=banning(everything[:-1]), sampling=Sampling(0))
        found = run(engine, base(engine), bad)
        assert found["base 0"].finish == "length"
        assert set(found["bad"].tokens.tolist()) == {49151}


class TestSeveralServers:
    def test_cells_are_spread_and_their_forks_follow_them(self, world: World) -> None:
        with Proxy(world.server) as one, Proxy(world.server) as two:
            engine = ServerEngine("smollm2-135m", urls=[one.url, f"{two.url}/v1/"])
            one.bodies.clear()
            two.bodies.clear()
            bases = [base(engine, n, max_tokens=4) for n in range(4)]
            found = run(engine, *bases)
            forks = [
                replace(
                    b,
                    key=f"fork {i}",
                    prefix=tuple(found[b.key].tokens[:2].tolist()),
                    intervention=banning((i,)),
                )
                for i, b in enumerate(bases)
            ]
            run(engine, *forks)
            engine.close()
            homes = [{b["vllm_xargs"]["knockout_seed"] for b in p.bodies} for p in (one, two)]
            assert [len(p.bodies) for p in (one, two)] == [4, 4]
            assert homes[0].isdisjoint(homes[1])

    def test_a_failing_server_is_tried_again_and_a_dead_one_left(self, world: World) -> None:
        with Proxy(world.server) as one, Proxy(world.server) as two:
            engine = ServerEngine("smollm2-135m", urls=[one.url, two.url])
            want = run(engine, base(engine))["base 0"].tokens
            one.failing = two.failing = 1
            assert np.array_equal(run(engine, base(engine))["base 0"].tokens, want)
            one.stop()
            again = run(engine, base(engine), base(engine, 1), base(engine, 2))
            assert np.array_equal(again["base 0"].tokens, want)
            assert {done.finish for done in again.values()} <= {"length", "stop"}
            engine.close()

    def test_no_server_left_is_an_error_that_says_so(
        self, world: World, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("knockout.engines.server._FIRST_WAIT_S", 0.01)
        with (
            Proxy(world.server) as proxy,
            closing(ServerEngine("smollm2-135m", urls=[proxy.url], outage_limit_s=1)) as engine,
        ):
            proxy.stop()
            with pytest.raises(KnockoutError, match=r"no server has answered for .* with 1 req"):
                run(engine, base(engine))

    def test_a_server_that_now_serves_another_model_ends_the_run(self, world: World) -> None:
        served = {"model": "smol"}
        with (
            Proxy(world.server, lambda body: body.update(served)) as proxy,
            closing(ServerEngine("smollm2-135m", urls=[proxy.url])) as engine,
        ):
            served["model"] = "other"
            with pytest.raises(KnockoutError, match=r"answers 404.*other"):
                run(engine, base(engine))

    def test_a_server_without_the_processor_is_refused(self, world: World) -> None:
        with (
            Proxy(world.server, lambda body: body.pop("vllm_xargs", None)) as bare,
            pytest.raises(
                KnockoutError, match=r"does not say which interventions.*--logits-processors knock"
            ),
        ):
            ServerEngine("smollm2-135m", urls=[bare.url])

    def test_a_server_that_gives_few_log_probabilities_is_refused(self, world: World) -> None:
        def limit(body: dict[str, Any]) -> None:
            if body.get("logprobs", 0) > 20:
                body["logprobs"] = -2  # what the server itself refuses

        with (
            Proxy(world.server, limit) as proxy,
            pytest.raises(KnockoutError, match=r"answers 400.*--max-logprobs -1"),
        ):
            ServerEngine("smollm2-135m", urls=[proxy.url])

    def test_nobody_there(self) -> None:
        with pytest.raises(KnockoutError, match=r"127\.0\.0\.1:9 does not answer"):
            ServerEngine("smollm2-135m", urls=["http://127.0.0.1:9"])
        with pytest.raises(UsageError, match="expected http://HOST:PORT"):
            ServerEngine("smollm2-135m", urls=["127.0.0.1:9"])


def test_the_openai_client(world: World, engine: ServerEngine) -> None:
    """As docs/how-to/server.md has it."""
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{world.server}/v1", api_key="none")
    common: dict[str, Any] = {"model": "smol", "prompt": "2, 4, 6,", "max_tokens": 8}
    free = client.completions.create(**common, temperature=0).choices[0].text
    banned = sorted({engine.tokenizer.encode(free)[0], *engine.tokenizer.encode(" ")})
    plain = client.completions.create(
        **common, temperature=0, extra_body={"vllm_xargs": {"knockout_ids": banned}}
    )
    assert plain.choices[0].text != free
    coupled = {
        "knockout_ids": banned, "knockout_seed": 7, "knockout_temperature": 0.6, "knockout_top_p": 0.95,
    }  # fmt: skip
    one, two = (
        client.completions.create(
            **common, temperature=0, extra_body={"vllm_xargs": coupled, "return_token_ids": True}
        ).choices[0]
        for _ in range(2)
    )
    assert one.token_ids == two.token_ids
    assert set(banned).isdisjoint(one.token_ids)
    with pytest.raises(openai.BadRequestError, match="knockout_ids"):
        client.completions.create(**common, extra_body={"vllm_xargs": {"knockout_ids": [1.5]}})
    for args in ({"knockout_ids": [999999]}, {**coupled, "knockout_ids": [5, 49152]}):
        with pytest.raises(openai.BadRequestError, match="token ids are from 0 to 49151"):
            client.completions.create(**common, temperature=0, extra_body={"vllm_xargs": args})
    assert client.completions.create(**common, temperature=0).choices[0].text == free


def test_a_teacher_that_the_server_serves_is_the_models_own(world: World) -> None:
    """Prompt log-probabilities over HTTP against transformers' whole logits."""
    from transformers import AutoModelForCausalLM

    from knockout.training.served import ServedTeacher

    ids, start = [504, 2988, 314, 4398, 269, 253, 1234, 99], 3
    teacher = ServedTeacher(world.server, top_k=5)
    (found,) = teacher([ids], [start])
    teacher.close()
    model = AutoModelForCausalLM.from_pretrained(embedded(), dtype=torch.float32)
    with torch.no_grad():
        own = model(torch.tensor([ids])).logits[0].log_softmax(-1)[start - 1 : -1]
    assert found.ids[:, 0].tolist() == ids[start:]
    for row, logp in enumerate(own):
        known = found.ids[row] >= 0
        assert set(logp.topk(5).indices.tolist()) <= set(found.ids[row][known].tolist())
        torch.testing.assert_close(
            found.logp[row][known], logp[found.ids[row][known]], rtol=1e-3, atol=2e-3
        )


@pytest.fixture(scope="module")
def sweep(world: World) -> knockout.Run:
    """Greedy, through our own command line, against the server."""
    path = world.folder / "sweep.yaml"
    path.write_text(
        json.dumps(
            {
                "model": "smollm2-135m",
                "engine": {"kind": "server", "urls": [world.server], "max_num_seqs": 8},
                "benchmarks": TASKS,
                "include_path": str(world.tasks),
                "seeds": 1,
                "sampling": {"temperature": 0.0},
                "chat": {"system": "Answer briefly."},
                "candidates": {"ids": [BANNED]},
                "audit": 1.0,
            }
        )
    )
    command = [
        sys.executable,
        "-m",
        "knockout",
        "run",
        str(path),
        "--out",
        str(world.folder / "run"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return knockout.load_run(world.folder / "run")


def test_a_sweep_against_a_server_has_no_fork_errors(sweep: knockout.Run) -> None:
    summary = sweep.summary()
    assert summary["complete"]
    assert summary["forks"] > 0
    assert summary["fork_errors"] == summary["coupling_errors"] == 0
    assert summary["audited"] == summary["n_cells"]


@pytest.fixture(scope="module")
def exported(world: World, sweep: knockout.Run) -> Path:
    out = world.folder / "export"
    command = [sys.executable, "-m", "knockout", "export", str(sweep.folder), "--format", "lm-eval"]
    subprocess.run([*command, "--out", str(out)], check=True)
    return out


@pytest.mark.parametrize("task", TASKS)
def test_our_baseline_is_lm_evals_own_greedy_run(world: World, exported: Path, task: str) -> None:
    ours, theirs = read_samples(exported / "baseline", task), world.samples("plain", task)
    metric = theirs[0]["metrics"][0]
    assert len(ours) == len(theirs) == 3
    for mine, other in zip(ours, theirs, strict=True):
        assert mine["arguments"]["gen_args_0"]["arg_0"] == other["arguments"]["gen_args_0"]["arg_0"]
        assert mine["resps"] == other["resps"]
        assert mine[metric] == other[metric]
        assert (mine["doc_hash"], mine["prompt_hash"]) == (other["doc_hash"], other["prompt_hash"])


def test_a_ban_in_plain_lm_eval_is_our_knockout(world: World, sweep: knockout.Run) -> None:
    """`lm_eval --model vllm --gen_kwargs '{"extra_args": {"knockout_ids": [...]}}'`."""
    frame = sweep.trajectories(benchmark="local_sums", inherited=True)
    knocked = frame[frame["candidate"] != "baseline"].sort_values("problem")
    assert "forked" in set(knocked["kind"])
    theirs = world.samples("banned", "local_sums")
    for text, other in zip(knocked["text"], theirs, strict=True):
        for stop in ("Question:", "\n\n"):
            text = text.split(stop)[0]
        assert [[text]] == other["resps"]


def test_knockout_lm_eval_gives_what_plain_lm_eval_gives(world: World) -> None:
    """`knockout lm-eval run --model knockout`, here with the running server as its engine."""
    out = world.folder / "ours"
    done = subprocess.run(
        [
            sys.executable, "-m", "knockout", "lm-eval", "run", "--model", "knockout",
            "--model_args", f"pretrained=smollm2-135m,knockout_ids={BANNED},engine=server,urls={world.server}",
            "--tasks", "local_sums", "--include_path", str(world.tasks), "--apply_chat_template",
            "--system_instruction", "Answer briefly.", "--batch_size", "auto", "--log_samples",
            "--output_path", str(out),
        ],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    ours, theirs = read_samples(out, "local_sums"), world.samples("banned", "local_sums")
    keys = ("doc_id", "target", "resps", "filtered_resps", "filter", "exact_match", "prompt_hash")
    assert [[s[k] for k in keys] for s in ours] == [[s[k] for k in keys] for s in theirs]
