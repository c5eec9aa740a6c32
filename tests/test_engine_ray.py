"""Engines in Ray actors on two nodes: the ledger of one local engine, whatever dies.

One cluster serves the whole module: a head that runs no engine, and two nodes of the same machine.
"""

from __future__ import annotations

import functools
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from child_runs import sweep_file
from conftest import Command
from test_scheduler import SAMPLED, WordGrader, a_ledger, a_plan, dump, work
from words import EOS, N_WORDS, word_model

from knockout.engines.base import Completion, EngineInfo, Request, generate
from knockout.engines.dispatch import Limits
from knockout.engines.open import open_engine
from knockout.engines.ray import RayEngine
from knockout.engines.ray_cluster import check_reachable, engines_that_fit, join, patiently
from knockout.engines.transformers import TransformersEngine
from knockout.errors import KnockoutError, UsageError
from knockout.ledger import totals
from knockout.sweep.jobs import Snapshot
from knockout.sweep.scheduler import Scheduler

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.timeout(900)  # starting processes on a busy machine takes its time

SETTINGS: dict[str, Any] = {
    "kind": "transformers",
    "dtype": "float32",
    "device": "cpu",
    "max_num_seqs": 4,
}
LONG_S = 300.0  # what may take long on a busy machine, but not for ever
Rows = dict[str, list[tuple[Any, ...]]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(word_model(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two nodes that say they have four GPUs each; no engine here uses them."""
    from ray import cloudpickle
    from ray.cluster_utils import Cluster

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # The actors cannot import test modules.
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    head = {"num_cpus": 0, "include_dashboard": False}
    cluster = patiently(ray, lambda: Cluster(initialize_head=True, head_node_args=head))
    try:
        for _ in range(2):
            patiently(ray, lambda: cluster.add_node(num_cpus=4, num_gpus=2))
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()
        cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


@pytest.fixture(scope="module")
def local(model: str, tmp_path_factory: pytest.TempPathFactory) -> Rows:
    """What one engine of this process makes of the plan."""
    plan, engine = a_plan(), TransformersEngine(model, dtype="float32", max_num_seqs=8)
    with a_ledger(plan, tmp_path_factory.mktemp("local")) as ledger:
        work(plan, ledger, engine, engine.tokenizer)
        return dump(ledger)


@pytest.fixture(scope="module")
def engine(cluster: Any, model: str) -> Iterator[RayEngine]:
    engine = open_engine(model, ray=cluster.address, data_parallel=2, **SETTINGS)
    assert isinstance(engine, RayEngine)
    yield engine
    engine.close()
    engine.close()


def test_the_command_line_hands_the_address_on(tmp_path: Path, knockout: Command) -> None:
    # Before anything here connects: a connection that is there already would be used.
    code, _, err = knockout(
        "run", sweep_file(tmp_path, 2), "--out", tmp_path / "run", "--ray", "somewhere"
    )
    assert code == 2
    assert "engine.ray is 'somewhere'; expected auto, HOST:PORT" in err


def nodes(engine: RayEngine) -> set[str]:
    return {place[0] for place in engine.locations if place}


def all_up(engine: RayEngine) -> None:
    give_up = time.monotonic() + LONG_S
    while None in engine.locations:
        assert time.monotonic() < give_up
        engine.step()


def test_two_engines_on_two_nodes_make_the_ledger_of_one(
    engine: RayEngine, local: Rows, tmp_path: Path
) -> None:
    plan = a_plan()
    with a_ledger(plan, tmp_path) as ledger:
        work(plan, ledger, engine, engine.tokenizer)
        assert dump(ledger) == local
    assert engine.info.kind == "transformers"
    assert engine.info.settings["data_parallel"] == 2
    assert len(nodes(engine)) == 2
    assert min(engine.served) > 0.2 * sum(engine.served)


def test_a_connection_that_is_there_already_is_used_and_kept(engine: RayEngine) -> None:
    assert ray.is_initialized()
    assert not join(ray, "192.0.2.1:1", 1)
    assert ray.is_initialized()


def run_and_disturb(engine: RayEngine, folder: Path, disturb: Any) -> Rows:
    """Runs the plan; in the middle of it, `disturb` happens once."""
    plan, happened = a_plan(), []

    def observe(snapshot: Snapshot) -> None:
        if snapshot.forks > 20 and not happened:
            happened.append(True)
            disturb()

    with a_ledger(plan, folder) as ledger:
        Scheduler(plan, ledger, engine, WordGrader(), engine.tokenizer, 8, observe=observe).run(
            [plan.everything()]
        )
        assert happened
        assert totals(ledger).complete
        return dump(ledger)


def test_an_actor_killed_in_the_middle_is_replaced(
    engine: RayEngine, local: Rows, tmp_path: Path
) -> None:
    all_up(engine)
    lost, before = engine.n_lost, list(engine.locations)
    assert before[0] is not None

    def kill() -> None:
        os.kill(before[0][1], signal.SIGKILL)

    assert run_and_disturb(engine, tmp_path, kill) == local
    all_up(engine)
    assert engine.n_lost == lost + 1
    assert engine.locations[0] != before[0]
    assert engine.locations[1] == before[1]


def test_too_large_a_request_is_refused_in_seconds(engine: RayEngine, model: str) -> None:
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


def test_engines_that_do_not_start_say_why_and_free_their_gpus(
    engine: RayEngine, model: str
) -> None:
    with pytest.raises(UsageError, match="only vLLM has this"):
        open_engine(model, kind="transformers", data_parallel=2, tensor_parallel_size=2)
    give_up = time.monotonic() + LONG_S
    while ray.available_resources().get("GPU") != 4.0:
        assert time.monotonic() < give_up
        time.sleep(0.05)
    states = {group["state"] for group in ray.util.placement_group_table().values()}
    assert states <= {"REMOVED"}


class Faulty:
    """An engine that ends, raises or hangs in the step after a request of a certain seed.

    It makes up its tokens from the request alone, so that a new actor is up in a second or two.
    Which fault it is stands in a file; a file that is gone is no fault.
    """

    def __init__(self, model: str, *, fault: Path, **settings: Any) -> None:
        self.info = EngineInfo("made up", model, "cpu", "float32", "", N_WORDS, (EOS,), 64)
        self.fault, self.doomed = fault, False
        self.running: dict[str, tuple[Request, list[int]]] = {}

    @property
    def n_open(self) -> int:
        return len(self.running)

    def add(self, request: Request) -> None:
        self.doomed |= request.seed == 666
        self.running[request.key] = (request, [])

    def step(self) -> list[Completion]:
        done = []
        for key, (request, tokens) in list(self.running.items()):
            tokens.append(hash((request.prompt, request.seed, len(tokens))) % N_WORDS)
            if len(tokens) == request.max_tokens:
                del self.running[key]
                made = np.array(tokens, dtype=np.int32)
                done.append(Completion(key, made, len(tokens), "length"))
        what = self.fault.read_text() if self.doomed and self.fault.exists() else ""
        if what == "exit":
            os._exit(3)
        if what == "raise":
            raise RuntimeError("device-side assert")
        if what == "hang once":
            self.fault.unlink()
            time.sleep(1e6)
        return done

    def close(self) -> None:
        pass


@pytest.fixture(scope="module")
def fault(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fault") / "what"


@pytest.fixture(scope="module")
def faulty(engine: RayEngine, model: str, fault: Path) -> Iterator[RayEngine]:
    """One engine that may die, and is suspicious after one death instead of two: it saves time."""
    opener = functools.partial(Faulty, fault=fault)
    faulty = RayEngine(
        model, opener, data_parallel=1, hang_limit_s=5, limits=Limits(suspect_after=1), **SETTINGS
    )
    yield faulty
    faulty.close()


def seven(fatal: bool) -> list[Request]:
    return [
        Request(f"r{i}", (2, 4 + i), 666 if i == 3 and fatal else i, SAMPLED, 12) for i in range(7)
    ]


@pytest.fixture(scope="module")
def expected(model: str, fault: Path) -> dict[str, list[int]]:
    alone: Any = Faulty(model, fault=fault)
    return {done.key: done.tokens.tolist() for done in generate(alone, seven(fatal=True))}


@pytest.mark.parametrize(("what", "says"), [("exit", "ActorDied"), ("raise", "device-side assert")])
def test_a_request_that_kills_engines_is_set_aside_and_the_others_are_kept(
    faulty: RayEngine, fault: Path, expected: dict[str, list[int]], what: str, says: str
) -> None:
    fault.write_text(what)
    lost = faulty.n_lost
    found = {done.key: done for done in generate(faulty, seven(fatal=True))}
    set_aside = found.pop("r3")
    assert set_aside.finish == "error"
    assert "2 engines died" in (set_aside.error or "")
    assert says in (set_aside.error or "")
    assert (set_aside.n_generated, len(set_aside.tokens)) == (0, 0)
    assert {key: done.tokens.tolist() for key, done in found.items()} == {
        key: tokens for key, tokens in expected.items() if key != "r3"
    }
    assert faulty.n_lost == lost + 2


def test_an_engine_that_hangs_is_replaced(
    faulty: RayEngine, fault: Path, expected: dict[str, list[int]]
) -> None:
    fault.write_text("hang once")
    lost = faulty.n_lost
    found = {done.key: done.tokens.tolist() for done in generate(faulty, seven(fatal=True))}
    assert found == expected
    assert faulty.n_lost == lost + 1
    assert not fault.exists()


def test_a_node_that_dies_in_the_middle_is_survived(
    cluster: Any, engine: RayEngine, local: Rows, tmp_path: Path
) -> None:
    all_up(engine)
    assert len(nodes(engine)) == 2
    lost, doomed = engine.n_lost, engine.locations[1]
    assert doomed is not None
    node = next(node for node in cluster.worker_nodes if node.node_id == doomed[0])

    def end_the_node() -> None:
        # With a machine its engine ends. Here it would outlive Ray's part of the node for a while,
        # long enough to finish the run.
        os.kill(doomed[1], signal.SIGKILL)
        cluster.remove_node(node, allow_graceful=False)

    assert run_and_disturb(engine, tmp_path, end_the_node) == local
    all_up(engine)
    # More than one where Ray starts the replacement there before it knows that the node is gone.
    assert engine.n_lost > lost
    assert len(nodes(engine)) == 1
    assert doomed[0] not in nodes(engine)


def test_servers_are_not_spread_by_ray(model: str) -> None:
    with pytest.raises(UsageError, match="its own urls"):
        open_engine(model, kind="server", data_parallel=2, urls=("http://127.0.0.1:1",))


@pytest.mark.parametrize("scheme", ["", "ray://"])
def test_an_address_where_nobody_listens_is_refused_at_once(scheme: str) -> None:
    with socket.socket() as mine:  # bound, but it does not listen
        mine.bind(("127.0.0.1", 0))
        address = f"{scheme}127.0.0.1:{mine.getsockname()[1]}"
        with pytest.raises(KnockoutError, match=rf"{address}: nothing answers there .*ray start"):
            check_reachable(address)


@pytest.mark.parametrize("address", ["here", "ray://there", "host:", ":6379", "host:70000", "h:x"])
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(UsageError, match=r"expected auto, HOST:PORT or ray://HOST:PORT"):
        check_reachable(address)


class Busy:
    """Stands for Ray on a machine that is too busy for its first starts."""

    __file__ = ray.__file__

    def __init__(self, fails: int) -> None:
        self.fails, self.tries, self.shut = fails, 0, 0

    def start(self) -> str:
        self.tries += 1
        if self.tries <= self.fails:
            raise Exception("The current node timed out during startup.\nMore of it.")
        return "up"

    def shutdown(self) -> None:
        self.shut += 1


def test_a_start_on_a_busy_machine_is_tried_again() -> None:
    busy = Busy(fails=2)
    assert patiently(busy, busy.start, pause_s=0) == "up"
    assert (busy.tries, busy.shut) == (3, 2)
    busy = Busy(fails=9)
    with pytest.raises(KnockoutError, match=r"in 3 tries: The current node timed out .*raylet.err"):
        patiently(busy, busy.start, pause_s=0)
    assert busy.tries == 3
