"""Several engines in Ray actors behind the one protocol: on one machine, or on a cluster.

A cell's requests go to the engine that holds its prefix. Whatever dies is replaced, and what it was
working on is generated again with the same seeds, so that the ledger cannot tell the difference.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from knockout.engines.base import Completion, Engine, EngineInfo, Request
from knockout.engines.models import load_tokenizer
from knockout.engines.open import choose_kind, open_engine
from knockout.engines.trajectory import check_request
from knockout.errors import KnockoutError, UsageError

__all__ = ["RayEngine", "engines_that_fit"]

log = logging.getLogger("knockout")

# A turn of an actor returns at the first completion after the shorter time, and without any after
# the longer one, so that new requests can join.
_TURN_S = (0.02, 0.25)
_WAIT_S = 0.05
_START_LIMIT_S = 1800.0
_HANG_LIMIT_S = 900.0
# What was running at one death runs together again; after the second it runs in groups of a
# quarter, then a sixteenth ..., so that few innocents die with the request that kills engines.
_SUSPECT_AFTER = 2
_MOST_DEATHS = 8
# Engines that may die in a row, for each that there should be, without any completion between.
_MOST_LOST = 6
_MOST_HOMES = 65_536
_LOCAL_STORE_BYTES = 256 * 2**20

Cell = tuple[int, tuple[int, ...]]
Opener = Callable[..., Engine]


class _Host:
    """What runs in an actor: one engine, driven in short turns."""

    def start(self, opener: Opener, model: str, settings: dict[str, Any]) -> tuple[EngineInfo, int]:
        """Starts the engine; not in the constructor, whose errors Ray hands on as mere text."""
        self._engine = opener(model, **settings)
        return self._engine.info, os.getpid()

    def turn(self, requests: list[Request]) -> list[Completion]:
        """Takes requests in and works until some are finished, or for a short time."""
        for request in requests:
            self._engine.add(request)
        done: list[Completion] = []
        began = time.monotonic()
        while self._engine.n_open and time.monotonic() - began < _TURN_S[bool(not done)]:
            done += self._engine.step()
        return done


@dataclass(slots=True)
class _Replica:
    """An actor, and what was handed to it."""

    actor: Any
    group: Any
    call: Any
    since: float
    ready: bool = False
    pid: int = 0
    waiting: deque[Request] = field(default_factory=deque)
    suspects: deque[Request] = field(default_factory=deque)
    running: dict[str, Request] = field(default_factory=dict)


def engines_that_fit(wanted: int | None, gpus_each: int, cluster: dict[str, float]) -> int:
    """How many engines to start; refuses in words what would otherwise wait for ever.

    Args:
        wanted: `engine.data_parallel`, or None for as many as there is room for.
        gpus_each: GPUs of one engine; 0 where it runs on CPUs.
        cluster: What Ray says the cluster has.

    Raises:
        UsageError: It is more than the cluster has.
    """
    name, each = ("GPU", gpus_each) if gpus_each else ("CPU", 1)
    there = int(cluster.get(name, 0))
    n = wanted or (max(1, there // each) if gpus_each else 1)
    if n * each > there:
        raise UsageError(
            f"engine: {n} engines of {each} {name}{'s' if each > 1 else ''} each need {n * each} "
            f"{name}s, the cluster has {there}; lower engine.data_parallel"
            + (" or engine.tensor_parallel_size" if gpus_each > 1 else "")
        )
    return n


class RayEngine:
    """Spreads requests over engines in Ray actors.

    Attributes:
        info: What runs in each of them.
        tokenizer: The model's tokenizer.
        n_engines: How many there are.
        n_lost: Actors that died so far.
        n_moved: Requests that ran away from their cell's engine, because another was idle.
        served: Completions of each engine.
    """

    info: EngineInfo

    def __init__(
        self,
        model: str,
        *,
        kind: str = "auto",
        data_parallel: int | None = None,
        address: str | None = None,
        max_num_seqs: int | None = None,
        tensor_parallel_size: int | None = None,
        device: str | None = None,
        trust_remote_code: bool = False,
        opener: Opener = open_engine,
        **settings: Any,
    ) -> None:
        """Starts or joins a cluster and starts the engines in it.

        Args:
            model: Name, folder or hub name; a folder must be at the same place on every node.
            kind: Of the engines: "auto", "vllm" or "transformers".
            data_parallel: Number of engines; as many as there are GPUs for by default.
            address: Of a cluster ("auto", "HOST:PORT", "ray://HOST:PORT"); by default the one that
                `RAY_ADDRESS` names, else one is started on this machine.
            max_num_seqs: Requests that each of them runs at once; 64 by default.
            tensor_parallel_size: GPUs of one engine.
            device: "cpu" keeps transformers engines away from the cluster's GPUs.
            trust_remote_code: Whether code that comes with the model may run.
            opener: What makes an engine in an actor.
            **settings: Further arguments of `open_engine`.

        Raises:
            UsageError: The cluster is too small, or a setting is wrong.
            KnockoutError: Ray is missing, or an engine does not start.
        """
        try:
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            import ray
        except ImportError as error:
            raise KnockoutError(
                f"Ray cannot be imported ({error}): install the extra 'ray' "
                "(`pip install 'knockout-harness[ray]'`)"
            ) from error
        self._ray: Any = ray
        self._kind = choose_kind(kind)
        self._closed = False
        self._began_ray = _join(ray, address, data_parallel or 1)
        self._replicas: list[_Replica] = []
        self._homes: OrderedDict[Cell, int] = OrderedDict()
        self._new: deque[Request] = deque()
        self._deaths: dict[str, int] = {}
        self._keys: set[str] = set()
        self._done: list[Completion] = []
        self._lost_in_a_row = self.n_lost = self.n_moved = 0
        self._places = max_num_seqs or 64
        self._model, self._opener = model, opener
        cluster = self._ray.cluster_resources()
        self._tensor = tensor_parallel_size or 1
        on_gpus = self._tensor > 1 or (device is None and cluster.get("GPU", 0) > 0)
        self._gpus = self._tensor if on_gpus else 0
        self._settings = {
            **settings, "kind": self._kind, "max_num_seqs": max_num_seqs, "device": device,
            "tensor_parallel_size": tensor_parallel_size, "trust_remote_code": trust_remote_code,
        }  # fmt: skip
        if self._tensor > 1:
            options = dict(settings.get("options") or {})
            options.setdefault("distributed_executor_backend", "ray")
            self._settings["options"] = options
        try:
            self.n_engines = engines_that_fit(data_parallel, self._gpus, cluster)
            self._replicas = [self._start() for _ in range(self.n_engines)]
            self.served = [0] * self.n_engines
            infos = [self._begin(replica) for replica in self._replicas]
            _check_alike(infos)
            self.tokenizer = load_tokenizer(model, trust_remote_code=trust_remote_code)
        except BaseException:
            self.close()
            raise
        versions = {**infos[0].versions, "ray": str(ray.__version__)}
        shape = {"data_parallel": self.n_engines, "max_num_seqs": self._places}
        self.info = replace(
            infos[0], model=model, versions=versions, settings={**infos[0].settings, **shape}
        )

    @property
    def n_open(self) -> int:
        """Requests added and not yet returned."""
        return len(self._keys) + len(self._done)

    def add(self, request: Request) -> None:
        """Queues a request: at its cell's engine, or for the first that has room.

        Raises:
            UsageError: The request is wrong in itself (an id outside the vocabulary, a key twice).
        """
        check_request(request, self.info, self._keys)
        self._keys.add(request.key)
        home = self._homes.get(_cell(request))
        if home is None:
            self._new.append(request)
        else:
            self._replicas[home].waiting.append(request)

    def step(self) -> list[Completion]:
        """Hands out what there is room for; returns what finished, after a short wait at most."""
        self._hand_out()
        calls = {replica.call: n for n, replica in enumerate(self._replicas) if replica.call}
        if calls and not self._done:
            refs = list(calls)
            self._ray.wait(refs, num_returns=1, timeout=_WAIT_S)
            ready, _ = self._ray.wait(refs, num_returns=len(refs), timeout=0)
            for ref in ready:
                self._received(calls[ref])
            self._end_hanging()
        done, self._done = self._done, []
        return done

    def close(self) -> None:
        """Ends the actors and frees what they held. Harmless when called twice."""
        if self._closed:
            return
        self._closed = True
        for replica in self._replicas:
            self._end(replica)
        self._replicas = []
        if self._began_ray:
            self._ray.shutdown()

    # Handing out ---------------------------------------------------------------------------------

    def _hand_out(self) -> None:
        """Gives every idle actor a turn, with as many requests as it has places for."""
        for n, replica in enumerate(self._replicas):
            if replica.call is not None:
                continue
            batch = self._next_batch(n, replica)
            replica.running.update((request.key, request) for request in batch)
            if replica.running:
                replica.call = replica.actor.turn.remote(batch)
                replica.since = time.monotonic()

    def _next_batch(self, n: int, replica: _Replica) -> list[Request]:
        if any(self._deaths.get(key, 0) >= _SUSPECT_AFTER for key in replica.running):
            return []
        if replica.suspects:
            # The actor runs empty first, so that nothing else dies with them.
            return [] if replica.running else self._next_suspects(replica.suspects)
        batch: list[Request] = []
        # Some beyond its places, so that one that becomes free is filled inside a turn.
        free = self._places + self._places // 8 + 1 - len(replica.running)
        while len(batch) < free and replica.waiting:
            batch.append(replica.waiting.popleft())
        while len(batch) < free and self._new:
            request = self._new.popleft()
            self._homes[_cell(request)] = n
            if len(self._homes) > _MOST_HOMES:
                self._homes.popitem(last=False)
            batch.append(request)
        if not batch and len(replica.running) < max(1, self._places // 2):
            batch = self._taken_from_the_busiest(free)
        return batch

    def _next_suspects(self, suspects: deque[Request]) -> list[Request]:
        deaths = self._deaths.get(suspects[0].key, 0)
        size = max(1, self._places >> 2 * (deaths - _SUSPECT_AFTER + 1))
        return [suspects.popleft() for _ in range(min(size, len(suspects)))]

    def _taken_from_the_busiest(self, most: int) -> list[Request]:
        """Half of what waits longest elsewhere: empty places cost more than a cold prefix."""
        busiest = max(self._replicas, key=lambda replica: len(replica.waiting))
        n = min(most, math.ceil(len(busiest.waiting) / 2))
        taken = [busiest.waiting.pop() for _ in range(n)]
        self.n_moved += n
        return taken

    # What comes back -----------------------------------------------------------------------------

    def _received(self, n: int) -> None:
        replica = self._replicas[n]
        try:
            answer = self._ray.get(replica.call)
        except self._ray.exceptions.RayError as error:
            self._replace(n, _reason(error))
            return
        replica.call = None
        if not replica.ready:
            replica.ready, replica.pid = True, answer[1]
            return
        for completion in answer:
            del replica.running[completion.key]
            self._deaths.pop(completion.key, None)
            self._keys.discard(completion.key)
            self._done.append(completion)
        self.served[n] += len(answer)
        if answer:
            self._lost_in_a_row = 0

    def _end_hanging(self) -> None:
        for n, replica in enumerate(self._replicas):
            limit = _HANG_LIMIT_S if replica.ready else _START_LIMIT_S
            if replica.call is not None and time.monotonic() - replica.since > limit:
                if not replica.ready and any(other.ready for other in self._replicas):
                    continue  # its node may come back; the others go on
                self._replace(n, f"no answer for {limit:g} s")

    def _replace(self, n: int, reason: str) -> None:
        """Starts another actor in the place of one that died, and has its requests done again."""
        dead = self._replicas[n]
        self._end(dead)
        self.n_lost += 1
        self._lost_in_a_row += 1
        log.warning(
            "engine %d of %d died (%s); it is replaced and its %d requests are generated again",
            n + 1, self.n_engines, reason, len(dead.running),
        )  # fmt: skip
        if self._lost_in_a_row > _MOST_LOST * self.n_engines:
            raise KnockoutError(
                f"{self._lost_in_a_row} engines died one after another without a result: {reason}"
            )
        replica = self._replicas[n] = self._start()
        replica.waiting, replica.suspects = dead.waiting, dead.suspects
        for key, request in reversed(dead.running.items()):
            deaths = self._deaths[key] = self._deaths.get(key, 0) + 1
            if deaths >= _MOST_DEATHS or (deaths > _SUSPECT_AFTER and len(dead.running) == 1):
                self._give_up(request, reason)
            elif deaths >= _SUSPECT_AFTER:
                replica.suspects.appendleft(request)
            else:
                replica.waiting.appendleft(request)

    def _give_up(self, request: Request, reason: str) -> None:
        import numpy as np

        self._keys.discard(request.key)
        deaths = self._deaths.pop(request.key)
        self._lost_in_a_row = 0  # one request was to blame
        self._done.append(
            Completion(
                key=request.key, tokens=np.asarray(request.prefix, dtype=np.int32), n_generated=0,
                finish="error",
                error=f"{deaths} engines died while it ran, and the last ran little else: {reason}",
            )
        )  # fmt: skip

    # Actors --------------------------------------------------------------------------------------

    def _start(self) -> _Replica:
        """Asks for an actor; it answers when its engine is up."""
        ray, group = self._ray, None
        options: dict[str, Any] = {"num_cpus": 0 if self._gpus else 1, "num_gpus": self._gpus}
        if self._tensor > 1:
            from ray.util.placement_group import placement_group
            from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

            # The actor itself takes no GPU: vLLM's workers take them, from the actor's own group.
            group = placement_group([{"CPU": 1, "GPU": 1}] * self._tensor, strategy="PACK")
            options = {
                "num_cpus": 0,
                "num_gpus": 0,
                "scheduling_strategy": PlacementGroupSchedulingStrategy(
                    group, placement_group_capture_child_tasks=True
                ),
            }
        actor = ray.remote(_Host).options(**options).remote()
        call = actor.start.remote(self._opener, self._model, self._settings)
        return _Replica(actor, group, call, time.monotonic())

    def _begin(self, replica: _Replica) -> EngineInfo:
        """Waits until an engine is up."""
        ray = self._ray
        try:
            info, replica.pid = ray.get(replica.call, timeout=_START_LIMIT_S)
        except ray.exceptions.GetTimeoutError:
            raise KnockoutError(f"an engine has not started in {_START_LIMIT_S:g} s") from None
        except ray.exceptions.RayError as error:
            cause = getattr(error, "cause", None)
            if isinstance(cause, KnockoutError):
                raise type(cause)(str(cause)) from None
            raise KnockoutError(
                f"an engine does not start in its actor: {_reason(error)}"
            ) from None
        replica.call, replica.ready = None, True
        assert isinstance(info, EngineInfo)
        return info

    def _end(self, replica: _Replica) -> None:
        self._ray.kill(replica.actor)
        if replica.group is not None:
            from ray.util.placement_group import remove_placement_group

            remove_placement_group(replica.group)


def _join(ray: Any, address: str | None, n_engines: int) -> bool:
    """Connects to a cluster, or starts one here; returns whether it did that or was connected."""
    if ray.is_initialized():
        return False
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
    try:
        if address is not None or os.environ.get("RAY_ADDRESS"):
            ray.init(address=address, **quiet)
        else:
            ray.init(
                address="local", include_dashboard=False, object_store_memory=_LOCAL_STORE_BYTES,
                num_cpus=max(n_engines, os.cpu_count() or 1), **quiet,
            )  # fmt: skip
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise KnockoutError(
            f"Ray cluster {address or os.environ.get('RAY_ADDRESS') or 'on this machine'}: "
            f"{error}. Start one with `ray start --head`, or leave the address out"
        ) from error
    return True


def _check_alike(infos: list[EngineInfo]) -> None:
    """Engines that round differently would make results depend on where a cell ran."""
    for n, info in enumerate(infos):
        for name in ("kind", "device", "dtype", "runner", "vocab_size", "eos_ids", "versions"):
            one, other = getattr(infos[0], name), getattr(info, name)
            if one != other:
                raise KnockoutError(
                    f"engines 1 and {n + 1} differ in {name} ({one} and {other}); install the same "
                    "on every node"
                )


def _cell(request: Request) -> Cell:
    return request.seed, request.prompt


def _reason(error: BaseException) -> str:
    """The last line of a Ray error that says something."""
    cause = getattr(error, "cause", None)
    if cause is not None:
        return f"{type(cause).__name__}: {cause}"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"[:300]
