"""Engines in Ray actors: the ledger of one local engine, whatever dies."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_scheduler import SAMPLED, WordGrader, a_ledger, a_plan, dump, work
from words import word_model

from knockout.engines.base import Completion, Request, generate
from knockout.engines.open import open_engine
from knockout.engines.ray import RayEngine, engines_that_fit
from knockout.engines.transformers import TransformersEngine
from knockout.errors import UsageError
from knockout.jobs import Snapshot
from knockout.scheduler import Scheduler
from knockout.store import totals

ray = pytest.importorskip("ray")

SETTINGS: dict[str, Any] = {
    "kind": "transformers",
    "dtype": "float32",
    "device": "cpu",
    "max_num_seqs": 4,
}
Rows = dict[str, list[tuple[Any, ...]]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(word_model(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """A cluster of this machine that says it has four GPUs; no engine here uses them."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(
        address="local", num_cpus=4, num_gpus=4, include_dashboard=False, log_to_driver=False,
        object_store_memory=100 * 2**20,
        runtime_env={"env_vars": {"PYTHONPATH": str(Path(__file__).parent)}},
    )  # fmt: skip
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def local(model: str, tmp_path_factory: pytest.TempPathFactory) -> Rows:
    """What one engine of this process makes of the plan."""
    plan, engine = a_plan(), TransformersEngine(model, dtype="float32", max_num_seqs=8)
    with a_ledger(plan, tmp_path_factory.mktemp("local")) as ledger:
        work(plan, ledger, engine, engine.tokenizer)
        return dump(ledger)


@pytest.fixture(scope="module")
def engine(cluster: None, model: str) -> Iterator[RayEngine]:
    engine = open_engine(model, data_parallel=2, **SETTINGS)
    assert isinstance(engine, RayEngine)
    yield engine
    engine.close()
    engine.close()


def test_two_engines_make_the_ledger_of_one(engine: RayEngine, local: Rows, tmp_path: Path) -> None:
    plan = a_plan()
    with a_ledger(plan, tmp_path) as ledger:
        work(plan, ledger, engine, engine.tokenizer)
        assert dump(ledger) == local
    assert engine.info.kind == "transformers"
    assert engine.info.settings["data_parallel"] == 2
    assert min(engine.served) > 0.2 * sum(engine.served)


def test_forks_run_where_their_baseline_ran(engine: RayEngine) -> None:
    before = list(engine.served)
    moved = engine.n_moved

    def request(kind: str, cell: int) -> Request:
        return Request(f"{kind}{cell}", (3, 5, 7 + cell), cell, SAMPLED, 20)

    assert len(list(generate(engine, [request("a", c) for c in range(8)]))) == 8
    first = [now - was for now, was in zip(engine.served, before, strict=True)]
    homes = dict(engine._homes)
    assert len(list(generate(engine, [request("b", c) for c in range(8)]))) == 8
    assert dict(engine._homes) == homes
    again = [now - was for now, was in zip(engine.served, before, strict=True)]
    if engine.n_moved == moved:
        assert again == [2 * n for n in first]


def test_an_actor_killed_in_the_middle_is_replaced(
    engine: RayEngine, local: Rows, tmp_path: Path
) -> None:
    plan, lost, killed = a_plan(), engine.n_lost, []

    def kill_once(snapshot: Snapshot) -> None:
        if snapshot.forks > 20 and not killed:
            killed.append(engine._replicas[0].pid)
            os.kill(killed[0], signal.SIGKILL)

    with a_ledger(plan, tmp_path) as ledger:
        Scheduler(plan, ledger, engine, WordGrader(), engine.tokenizer, 8, observe=kill_once).run(
            [plan.everything()]
        )
        assert dump(ledger) == local
        assert totals(ledger).complete
    assert killed
    assert engine.n_lost == lost + 1


class Deadly:
    """An engine whose process ends as soon as a request of a certain seed runs."""

    def __init__(self, engine: Any, fault: str) -> None:
        self.engine, self.info, self.fault = engine, engine.info, fault
        self.doomed = False

    @property
    def n_open(self) -> int:
        return int(self.engine.n_open)

    def add(self, request: Request) -> None:
        self.doomed |= request.seed == 666
        self.engine.add(request)

    def step(self) -> list[Completion]:
        done: list[Completion] = self.engine.step()
        if self.doomed:
            if self.fault == "exit":
                os._exit(3)
            raise RuntimeError("device-side assert")
        return done

    def close(self) -> None:
        self.engine.close()


def deadly_exit(model: str, **settings: Any) -> Any:
    return Deadly(open_engine(model, **settings), "exit")


def deadly_raise(model: str, **settings: Any) -> Any:
    return Deadly(open_engine(model, **settings), "raise")


@pytest.mark.parametrize("opener", [deadly_exit, deadly_raise])
def test_a_request_that_kills_engines_is_set_aside_and_the_others_are_kept(
    cluster: None, model: str, opener: Any
) -> None:
    engine = RayEngine(model, data_parallel=1, opener=opener, **SETTINGS)
    alone = TransformersEngine(model, dtype="float32")
    requests = [Request(f"r{i}", (2, 4 + i), 666 if i == 3 else i, SAMPLED, 12) for i in range(7)]
    try:
        found = {done.key: done for done in generate(engine, requests)}
    finally:
        engine.close()
    expected = {done.key: done for done in generate(alone, requests)}
    assert found.keys() == expected.keys()
    for key, done in found.items():
        if key == "r3":
            assert done.finish == "error"
            assert "engines died" in (done.error or "")
            assert (done.n_generated, len(done.tokens)) == (0, 0)
        else:
            assert done.tokens.tolist() == expected[key].tokens.tolist()
    assert 3 <= engine.n_lost <= 8


def test_too_small_a_cluster_is_refused_in_seconds(cluster: None, model: str) -> None:
    began = time.monotonic()
    with pytest.raises(
        UsageError, match=r"3 engines of 2 GPUs each need 6 GPUs, the cluster has 4"
    ):
        open_engine(model, kind="vllm", data_parallel=3, tensor_parallel_size=2)
    assert time.monotonic() - began < 5
    assert engines_that_fit(None, 2, {"GPU": 5.0}) == 2
    assert engines_that_fit(None, 0, {"CPU": 2.0}) == 1
    with pytest.raises(UsageError, match=r"9 CPUs, the cluster has 8"):
        engines_that_fit(9, 0, {"CPU": 8.0})


def test_an_engine_that_does_not_start_says_why_and_frees_its_gpus(
    cluster: None, model: str
) -> None:
    with pytest.raises(UsageError, match="only vLLM has this"):
        RayEngine(model, data_parallel=2, tensor_parallel_size=2, kind="transformers")
    give_up = time.monotonic() + 20
    while ray.available_resources().get("GPU") != 4.0:
        assert time.monotonic() < give_up
        time.sleep(0.05)
    states = {group["state"] for group in ray.util.placement_group_table().values()}
    assert states <= {"REMOVED"}


def test_servers_are_not_spread_by_ray(model: str) -> None:
    with pytest.raises(UsageError, match="its own urls"):
        open_engine(model, kind="server", data_parallel=2, urls=("http://127.0.0.1:1",))
