"""Servers that misbehave: odd answers, outages, other weights, secrets. No vLLM is needed."""

from __future__ import annotations

import json
import logging
import math
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from child_runs import dump, sweep_file
from fake_server import MISBEHAVIOURS, MISBEHAVIOURS_OF_LOGPROBS, FakeServer
from safetensors.torch import load_file, save_file
from tiny import tiny_model

import knockout
from knockout.engines import server as server_module
from knockout.engines.base import Completion, Request, generate
from knockout.engines.fingerprint import Fingerprint, fingerprints
from knockout.engines.server import ServerEngine
from knockout.engines.transformers import TransformersEngine
from knockout.errors import KnockoutError, UsageError
from knockout.ledger import Ledger, totals
from knockout.method.interventions import Intervention, ban
from knockout.method.sampling import Sampling
from knockout.sweep.identity import model_fingerprint

Rows = dict[str, list[tuple[Any, ...]]]

SAMPLED = Sampling(temperature=0.8, top_k=20)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), seed=1)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("other"), seed=2)


@pytest.fixture(scope="module")
def fake(model: Path) -> Iterator[FakeServer]:
    with FakeServer(model) as fake:
        yield fake


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[None]:
    monkeypatch.setattr(server_module, "_FIRST_WAIT_S", 0.01)
    monkeypatch.setattr(server_module, "_LONGEST_WAIT_S", 0.05)
    monkeypatch.setattr(server_module, "_PROBED_S", 0.0)
    yield
    if "fake" in request.fixturenames:
        fake = request.getfixturevalue("fake")
        fake.misbehave, fake.status, fake.raw, fake.well = 0, 0, b"", True
        fake.change, fake.picky, fake.spoil_probes = (lambda a: a), (lambda body: True), False


@pytest.fixture(scope="module")
def engine(fake: FakeServer, model: Path) -> Iterator[ServerEngine]:
    with closing(ServerEngine(str(model), urls=[fake.url], outage_limit_s=20)) as engine:
        yield engine


def requests(n: int = 3, **more: Any) -> list[Request]:
    watch = tuple(ban((t,)) for t in range(22))
    request = Request("r", (2, 4), 1, SAMPLED, 5, watch=watch)
    return [replace(request, key=f"r{i}", prompt=(2, 4 + i), seed=i, **more) for i in range(n)]


def run(engine: Any, *wanted: Request) -> dict[str, Completion]:
    return {done.key: done for done in generate(engine, wanted)}


@pytest.fixture(scope="module")
def expected(model: Path) -> dict[str, list[int]]:
    engine = TransformersEngine(str(model), dtype="float32")
    return {key: done.tokens.tolist() for key, done in run(engine, *requests()).items()}


def tokens(found: dict[str, Completion]) -> dict[str, list[int]]:
    return {key: done.tokens.tolist() for key, done in found.items()}


def test_a_server_that_behaves(engine: ServerEngine, expected: dict[str, list[int]]) -> None:
    assert tokens(run(engine, *requests())) == expected


def test_a_row_of_nan_fails_its_request_alone(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path, nan_token=123)
    wanted = [
        Request("good", (2, 4), 1, SAMPLED, 5, watch=(ban((5,)), ban((6,)))),
        Request("watched", (2, 123), 1, SAMPLED, 5, watch=(ban((5,)), ban((6,)))),
        Request("fork", (2, 123), 1, SAMPLED, 5, intervention=ban((5,))),
        Request("all", (2, 4), 1, SAMPLED, 5, intervention=ban(tuple(range(300)))),
        Request("later", (2, 4), 1, SAMPLED, 5, intervention=every_token_as(123)),
    ]
    local = run(TransformersEngine(str(folder), dtype="float32"), *wanted)
    with FakeServer(folder) as fake, closing(ServerEngine(str(folder), urls=[fake.url])) as engine:
        found = run(engine, *wanted)
    for key, want in local.items():
        got = found[key]
        assert (got.finish, got.error, got.tokens.tolist()) == (
            want.finish, want.error, want.tokens.tolist(),
        )  # fmt: skip
    assert found["good"].error is None
    assert found["all"].error == "every token is banned"
    assert found["later"].tokens.tolist() == [123]
    for key in ("watched", "fork", "later"):
        assert found[key].error == "its highest logit is NaN or infinite"


def every_token_as(token: int) -> Intervention:
    others = tuple(t for t in range(300) if t != token)
    return Intervention("replace", others, replacement=token)


@pytest.mark.parametrize("how", [*MISBEHAVIOURS, *MISBEHAVIOURS_OF_LOGPROBS])
def test_an_odd_answer_is_tried_again_then_named(
    fake: FakeServer, engine: ServerEngine, expected: dict[str, list[int]], how: str
) -> None:
    fake.change = (MISBEHAVIOURS | MISBEHAVIOURS_OF_LOGPROBS)[how]
    fake.misbehave = 2
    assert tokens(run(engine, *requests())) == expected
    # One request that is always answered so is set aside with the reason; the others are kept.
    fake.misbehave = 10**6
    fake.picky = lambda body: body["prompt"][:2] == [2, 5]
    found = run(engine, *requests())
    bad = found.pop("r1")
    assert bad.finish == "error"
    assert (bad.n_generated, len(bad.tokens)) == (0, 0)
    assert "failed 4 times on servers that answer others" in str(bad.error)
    assert f"{fake.url} answers" in str(bad.error)
    assert tokens(found) == {key: ids for key, ids in expected.items() if key != "r1"}


@pytest.mark.parametrize(
    "raw",
    [b"", b"{", b"\xff\xfe{}", b'{"choices": [', b"[" * 100_000, b"<html>Bad gateway</html>"],
    ids=["empty", "cut", "utf-16", "truncated", "nested", "html"],
)
def test_garbage_instead_of_json(
    fake: FakeServer, engine: ServerEngine, expected: dict[str, list[int]], raw: bytes
) -> None:
    fake.raw, fake.misbehave = raw, 3
    assert tokens(run(engine, *requests())) == expected


def test_an_outage_is_waited_for_and_costs_nothing(
    fake: FakeServer, engine: ServerEngine, expected: dict[str, list[int]],
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    # 5xx for everything while /health is still 200: many times the tries of one request.
    caplog.set_level(logging.INFO, "knockout")
    fake.status, fake.misbehave, fake.spoil_probes = 500, 60, True
    found = run(engine, *requests())
    assert tokens(found) == expected
    assert {done.finish for done in found.values()} <= {"stop", "length"}
    assert "no server answers" in caplog.text
    assert "answers again after" in caplog.text


def test_a_server_that_has_too_much_to_do_is_waited_for(
    fake: FakeServer, engine: ServerEngine, expected: dict[str, list[int]]
) -> None:
    fake.status, fake.misbehave = 429, 60  # its probes are answered all the while
    assert tokens(run(engine, *requests())) == expected


def test_an_outage_that_does_not_end_stops_the_run(fake: FakeServer, model: Path) -> None:
    with closing(ServerEngine(str(model), urls=[fake.url], outage_limit_s=0.5)) as engine:
        fake.well, fake.status, fake.misbehave, fake.spoil_probes = False, 500, 10**6, True
        with pytest.raises(KnockoutError, match=r"no server has answered for \d+ s, with 3 requ"):
            run(engine, *requests())


def test_servers_with_different_weights_are_refused(
    fake: FakeServer, model: Path, other: Path
) -> None:
    with (
        FakeServer(other) as second,
        pytest.raises(UsageError, match=f"{second.url} and {fake.url} serve different weights"),
    ):
        ServerEngine(str(model), urls=[fake.url, second.url])


def test_a_server_that_comes_back_with_other_weights_ends_the_run(model: Path, other: Path) -> None:
    with FakeServer(model) as fake, closing(ServerEngine(str(model), urls=[fake.url])) as engine:
        run(engine, *requests())
        fake.load(other)
        fake.status, fake.misbehave = 500, 1
        with pytest.raises(KnockoutError, match="serves other weights than it did when the run"):
            run(engine, *requests())


@pytest.mark.parametrize(
    ("models", "told"),
    [
        (b"no json", "answers"),
        ({"data": []}, "no list of models"),
        ([1], "no list of models"),
        ({"data": [{"name": "x"}]}, "a model without an id"),
        ({"data": [{"id": "tiny", "max_model_len": "long"}]}, "names no max_model_len"),
    ],
)
def test_odd_answers_about_the_model(fake: FakeServer, model: Path, models: Any, told: str) -> None:
    fake.models = models
    try:
        with pytest.raises(UsageError, match=told):
            ServerEngine(str(model), urls=[fake.url])
    finally:
        fake.models = None


@pytest.mark.parametrize(
    "answer", [[], {"tokens": None}, {"tokens": ["a"]}, {"tokens": [-4]}, b"x"]
)
def test_odd_answers_about_tokens(fake: FakeServer, model: Path, answer: Any) -> None:
    fake.tokenize = answer or {"tokens": {}}
    try:
        with pytest.raises(KnockoutError, match=r"/tokenize answers"):
            ServerEngine(str(model), urls=[fake.url])
    finally:
        fake.tokenize = None


def test_fingerprints_tell_weights_apart_and_forgive_rounding(model: Path, other: Path) -> None:
    def of(folder: Path, dtype: str) -> Fingerprint:
        return fingerprints(TransformersEngine(str(folder), dtype=dtype))["transformers"]

    exact, rough = of(model, "float32"), of(model, "bfloat16")
    assert exact.agrees(of(model, "float32"))
    assert exact.agrees(rough)
    assert 0 < exact.difference(rough) < 0.15
    assert not exact.agrees(of(other, "float32"))
    assert not rough.agrees(of(other, "bfloat16"))
    assert Fingerprint.from_record(exact.to_record()).agrees(exact)
    assert Fingerprint((-math.inf,) * 3, "float32").agrees(Fingerprint((-math.inf,) * 3, "float32"))


# Whole runs. ----------------------------------------------------------------------------------


SECRET = "hunter2"


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep file of the word model."""
    return sweep_file(tmp_path_factory.mktemp("words"), n_problems=6)


@pytest.fixture(scope="module")
def undisturbed(words: Path, tmp_path_factory: pytest.TempPathFactory) -> Rows:
    out = tmp_path_factory.mktemp("undisturbed") / "run"
    knockout.Sweep.load(words).run(out)
    return dump(out)


def served(words: Path, url: str, **more: Any) -> knockout.Sweep:
    engine = {"kind": "server", "urls": [url], "max_num_seqs": 8, **more}
    return knockout.Sweep.load(words, f"engine={json.dumps(engine)}")


def test_a_run_on_a_server_with_a_password_leaves_no_secret_behind(
    words: Path, undisturbed: Rows, tmp_path: Path
) -> None:
    with FakeServer(words.parent / "model", password=f"user:{SECRET}@/ä") as fake:
        url = fake.url.replace("//", f"//user:{SECRET}%40%2F%C3%A4@")
        served(words, url).run(tmp_path / "run")
        # A wrong address is echoed without it, too.
        with pytest.raises(UsageError) as told:
            served(words, url.replace("http", "htp")).run(tmp_path / "wrong")
        assert SECRET not in str(told.value)
    assert dump(tmp_path / "run") == undisturbed
    kept = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"config.yaml", "run.db", "summary.json", "run.log"} <= {path.name for path in kept}
    for path in kept:
        assert SECRET.encode() not in path.read_bytes(), path
    with Ledger.open(tmp_path / "run" / "run.db") as ledger:
        assert fake.url in json.dumps([session.record for session in ledger.sessions()])


def test_an_outage_stops_a_run_and_the_same_command_goes_on(
    words: Path, undisturbed: Rows, tmp_path: Path
) -> None:
    with FakeServer(words.parent / "model") as fake:
        sweep = served(words, fake.url, outage_limit_s=0.3)

        def after_forty(_: Any) -> bool:
            return fake.n_completions > 40  # some twenty of them are the start-up check's

        fake.status, fake.misbehave, fake.spoil_probes = 502, 10**6, True
        fake.picky = after_forty
        with pytest.raises(KnockoutError, match="no server has answered for"):
            sweep.run(tmp_path / "run")
        with Ledger.open(tmp_path / "run" / "run.db") as ledger:
            state = totals(ledger)
        assert state.cells > 0
        assert not state.complete
        assert (state.failed_cells, state.failed_forks, state.failed_audits) == (0, 0, 0)
        fake.misbehave = 0
        sweep.run(tmp_path / "run")
    assert dump(tmp_path / "run") == undisturbed


@pytest.mark.parametrize("raced", [False, True])
def test_what_the_engine_failed_on_is_owed_again(words: Path, tmp_path: Path, raced: bool) -> None:
    more = {"adaptive": {"max_seeds": 3}} if raced else {}
    with FakeServer(words.parent / "model") as fake:
        sweep = knockout.Sweep(**{**served(words, fake.url).model_dump(), **more})
        sweep.run(tmp_path / "well")
        calls = fake.n_completions
        fake.n_completions = 0
        # The last requests of a run: in a race, of the last round.
        fake.status, fake.misbehave, fake.picky = 400, 3, lambda _: fake.n_completions > calls - 8
        sweep.run(tmp_path / "run")
        with Ledger.open(tmp_path / "run" / "run.db") as ledger:
            state = totals(ledger)
            assert state.failed_cells + state.failed_forks + state.failed_audits > 0
            assert raced or state.failed_cells + state.failed_forks > 0
        fake.misbehave = 0
        sweep.run(tmp_path / "run")
    assert dump(tmp_path / "run") == dump(tmp_path / "well")


def test_a_run_stays_with_its_weights(words: Path, tmp_path: Path) -> None:
    """A folder is written over, a server serves a later checkpoint: both are refused."""
    folder = Path(shutil.copytree(words.parent, tmp_path / "sweep"))
    other = Path(shutil.copytree(folder / "model", tmp_path / "other"))
    weights = load_file(other / "model.safetensors")
    save_file({k: v * 1.05 for k, v in weights.items()}, other / "model.safetensors")
    sweep = knockout.Sweep.load(folder / "sweep.yaml")
    half = knockout.Sweep.load(folder / "sweep.yaml")
    half.run(tmp_path / "run")
    forget_some(tmp_path / "run")
    # The files' own fingerprint would tell these apart; it does not see what an engine loads.
    with FakeServer(folder / "model") as fake:
        online = served(folder / "sweep.yaml", fake.url)
        online.run(tmp_path / "online")
        forget_some(tmp_path / "online")
        fake.load(other)
        with pytest.raises(UsageError, match="this run was made with other weights than http"):
            online.run(tmp_path / "online")
        fake.load(folder / "model")
        online.run(tmp_path / "online")
    shutil.copy(other / "model.safetensors", folder / "model" / "model.safetensors")
    with Ledger.open(tmp_path / "run" / "run.db", write=True) as ledger:
        identity = ledger.meta_json("identity")
        identity["model_fingerprint"] = model_fingerprint(folder / "model")
        ledger.note("identity", json.dumps(identity))
    with pytest.raises(UsageError, match="this run was made with other weights than transformers"):
        sweep.run(tmp_path / "run")


def forget_some(out: Path) -> None:
    """Makes a finished run owe some of its forks."""
    with sqlite3.connect(out / "run.db") as db:
        db.execute("DELETE FROM audit")
    db.close()
