"""Several engines in Ray actors behind the one protocol: on one machine, or on a cluster.

An engine that dies is replaced, and its requests are generated again with the same seeds, so that
the ledger is the same. `knockout.engines.dispatch` decides which engine gets which request.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from knockout.engines.base import Completion, Engine, EngineInfo, Request
from knockout.engines.dispatch import Dispatch, Limits
from knockout.engines.ray_cluster import engines_that_fit, join, last_words, place, release
from knockout.engines.trajectory import check_request
from knockout.errors import KnockoutError, UsageError, counted
from knockout.tokens.checkpoint import load_tokenizer

__all__ = ["RayEngine"]

log = logging.getLogger("knockout")

# A turn of an actor returns at the first completion after the shorter time, and without any after
# the longer one, so that new requests can join.
_TURN_S = (0.02, 0.25)
_WAIT_S = 0.05

Opener = Callable[..., Engine]


class _Host:
    """What runs in an actor: one engine, driven in short turns."""

    def start(self, opener: Opener, model: str, settings: dict[str, Any]) -> _Born:
        """Starts the engine; not in the constructor, whose errors Ray turns into text."""
        import ray

        # An engine in the actor's own process ends with it and frees its GPU; vLLM's workers of
        # a split model are then the actor's own actors, in its placement group.
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
        self._engine = opener(model, **settings)
        context = ray.get_runtime_context()
        return _Born(self._engine.info, os.getpid(), context.get_node_id())

    def turn(self, requests: list[Request]) -> list[Completion]:
        """Takes requests in and works until some are finished, or for a short time."""
        for request in requests:
            self._engine.add(request)
        done: list[Completion] = []
        began = time.monotonic()
        while self._engine.n_open and time.monotonic() - began < _TURN_S[bool(not done)]:
            done += self._engine.step()
        return done


@dataclass(frozen=True, slots=True)
class _Born:
    """An engine that is up."""

    info: EngineInfo
    pid: int
    node: str


@dataclass(slots=True)
class _Replica:
    """An actor, and the call that it has not answered yet: its start, or a turn."""

    actor: Any
    group: Any
    call: Any
    since: float
    born: _Born | None = None


class RayEngine:
    """Spreads requests over engines in Ray actors.

    Attributes:
        info: What runs in each of them.
        tokenizer: The model's tokenizer.
        n_engines: How many there are.
    """

    info: EngineInfo

    def __init__(
        self,
        model: str,
        opener: Opener,
        *,
        kind: str = "auto",
        data_parallel: int | None = None,
        address: str | None = None,
        max_num_seqs: int | None = None,
        tensor_parallel_size: int | None = None,
        device: str | None = None,
        trust_remote_code: bool = False,
        hang_limit_s: float = 900.0,
        start_limit_s: float = 1800.0,
        limits: Limits | None = None,
        **settings: Any,
    ) -> None:
        """Starts or joins a cluster and starts the engines in it.

        Args:
            model: Name, folder or hub name; a folder must be at the same place on every node.
            opener: What makes an engine in an actor: `open_engine`, or one that can be pickled and
                takes the same arguments.
            kind: Of the engines: "auto", "vllm" or "transformers".
            data_parallel: Number of engines; as many as there are GPUs for by default.
            address: Of a cluster ("auto", "HOST:PORT", "ray://HOST:PORT"); by default the one that
                `RAY_ADDRESS` names, else one is started on this machine.
            max_num_seqs: Requests that each of them runs at once; the engine's own number by default.
            tensor_parallel_size: GPUs of one engine.
            device: "cpu" keeps transformers engines away from the cluster's GPUs.
            trust_remote_code: Whether code that comes with the model may run.
            hang_limit_s: Seconds without an answer after which an engine is replaced. A
                healthy one answers after a step or a quarter of a second, whichever is longer.
            start_limit_s: Seconds that an engine may take to start, waiting for room included.
            limits: How many deaths of engines are tolerated.
            **settings: Further arguments of `opener`.

        Raises:
            UsageError: The cluster is too small, or a setting is wrong.
            KnockoutError: Ray is missing, or no engine starts.
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
        self._closed = False
        self._replicas: list[_Replica] = []
        self._done: list[Completion] = []
        self._hang_limit_s, self._start_limit_s = hang_limit_s, start_limit_s
        self._model, self._opener = model, opener
        self._began_ray = join(ray, address, data_parallel or 1)
        cluster = self._ray.cluster_resources()
        self._tensor = tensor_parallel_size or 1
        on_gpus = self._tensor > 1 or (device is None and cluster.get("GPU", 0) > 0)
        self._gpus = self._tensor if on_gpus else 0
        self._settings = {
            **settings, "kind": kind, "max_num_seqs": max_num_seqs, "device": device,
            "tensor_parallel_size": tensor_parallel_size, "trust_remote_code": trust_remote_code,
        }  # fmt: skip
        if self._tensor > 1:
            options = dict(settings.get("options") or {})
            options.setdefault("distributed_executor_backend", "ray")
            self._settings["options"] = options
        try:
            self.n_engines = engines_that_fit(data_parallel, self._gpus, cluster)
            own = self._began_ray and not (address or os.environ.get("RAY_ADDRESS"))
            self._cpus = max(1, int(cluster.get("CPU", 1)) // self.n_engines) if own else 1
            self._dispatch = Dispatch(self.n_engines, max_num_seqs or 64, limits)
            self._replicas = [self._start() for _ in range(self.n_engines)]
            info = self._wait_for_all()
            self._dispatch.places = int(info.settings.get("max_num_seqs", self._dispatch.places))
            self.tokenizer = load_tokenizer(model, trust_remote_code=trust_remote_code)
        except BaseException:
            self.close()
            raise
        versions = {**info.versions, "ray": str(ray.__version__)}
        shape = {"data_parallel": self.n_engines, "max_num_seqs": self._dispatch.places}
        self._first = info
        self.info = replace(
            info, model=model, versions=versions, settings={**info.settings, **shape}
        )

    @property
    def n_open(self) -> int:
        """See `Engine`."""
        return len(self._dispatch.keys) + len(self._done)

    @property
    def n_lost(self) -> int:
        """Actors that died so far."""
        return self._dispatch.n_lost

    @property
    def n_moved(self) -> int:
        """Requests that ran away from their cell's engine, because another was idle."""
        return self._dispatch.n_moved

    @property
    def served(self) -> tuple[int, ...]:
        """Completions of each engine."""
        return tuple(self._dispatch.served)

    @property
    def locations(self) -> list[tuple[str, int] | None]:
        """Where each engine runs: Ray's name of the node and the process id there; None: not up."""
        return [(r.born.node, r.born.pid) if r.born else None for r in self._replicas]

    def add(self, request: Request) -> None:
        """Queues a request: at its cell's engine, or for the first that has room."""
        check_request(request, self.info, self._dispatch.keys)
        self._dispatch.add(request)

    def step(self) -> list[Completion]:
        """Hands out as many requests as fit; returns what finished, after a short wait at most.

        Raises:
            KnockoutError: Every engine died again and again, or a new one is of another kind.
        """
        self._hand_out()
        calls = {r.call: n for n, r in enumerate(self._replicas) if r.call is not None}
        if calls and not self._done:
            refs = list(calls)
            self._ray.wait(refs, num_returns=1, timeout=_WAIT_S)
            ready, _ = self._ray.wait(refs, num_returns=len(refs), timeout=0)
            for ref in ready:
                self._receive(calls[ref])
            self._end_hanging()
        done, self._done = self._done, []
        return done

    def close(self) -> None:
        """Ends the actors and frees what they held. Harmless when called twice."""
        if self._closed:
            return
        self._closed = True
        for replica in self._replicas:
            with contextlib.suppress(Exception):  # the cluster may be gone
                release(self._ray, replica.actor, replica.group)
        self._replicas = []
        if self._began_ray:
            self._ray.shutdown()

    def _hand_out(self) -> None:
        """Gives every idle actor a turn, with as many requests as it has places for."""
        for n, replica in enumerate(self._replicas):
            if replica.call is not None or replica.born is None:
                continue
            batch = self._dispatch.next_batch(n)
            if self._dispatch.running(n):
                replica.call = replica.actor.turn.remote(batch)
                replica.since = time.monotonic()

    def _receive(self, n: int) -> None:
        replica = self._replicas[n]
        try:
            answer = self._ray.get(replica.call)
        except self._ray.exceptions.RayError as error:
            self._replace(n, last_words(error))
            return
        replica.call = None
        if isinstance(answer, _Born):
            _check_alike(self._first, answer.info)
            replica.born = answer
            self._dispatch.started(n)
            return
        self._dispatch.finished(n, [completion.key for completion in answer])
        self._done += answer

    def _end_hanging(self) -> None:
        for n, replica in enumerate(self._replicas):
            limit = self._hang_limit_s if replica.born else self._start_limit_s
            if replica.call is None or time.monotonic() - replica.since <= limit:
                continue
            if replica.born is None and any(other.born for other in self._replicas):
                continue  # its node may come back; the others go on
            self._replace(n, f"no answer for {limit:g} s")

    def _replace(self, n: int, reason: str) -> None:
        """Starts another actor in the place of one that died, and has its requests done again."""
        dead = self._replicas[n]
        release(self._ray, dead.actor, dead.group)
        log.warning(
            "engine %d of %d%s died (%s); %s to generate again",
            n + 1, self.n_engines, f" on node {dead.born.node[:8]}" if dead.born else "", reason,
            counted(self._dispatch.running(n), "request"),
        )  # fmt: skip
        for request, deaths in self._dispatch.lost(n):
            self._done.append(_set_aside(request, deaths, reason))
        if not self._dispatch.is_given_up(n):
            self._replicas[n] = self._start()
            return
        dead.call = dead.born = None
        log.warning("engine %d died too often and is not replaced any more", n + 1)
        if all(self._dispatch.is_given_up(other) for other in range(self.n_engines)):
            raise KnockoutError(f"engines died again and again without a result: {reason}")

    def _start(self) -> _Replica:
        """Asks for an actor; it answers when its engine is up."""
        actor, group = place(self._ray, _Host, self._cpus, self._gpus, self._tensor)
        call = actor.start.remote(self._opener, self._model, self._settings)
        return _Replica(actor, group, call, time.monotonic())

    def _wait_for_all(self) -> EngineInfo:
        """Waits for the engines; those that do not start are tried again while the others work."""
        failed: dict[int, KnockoutError] = {}
        up: list[EngineInfo] = []
        for n, replica in enumerate(self._replicas):
            try:
                replica.born = self._born(replica)
            except UsageError:
                raise
            except KnockoutError as error:
                failed[n] = error
                continue
            up.append(replica.born.info)
            _check_alike(up[0], up[-1])
            replica.call = None
            self._dispatch.started(n)
        if not up:
            raise failed[0]
        for n, failure in failed.items():
            self._replace(n, str(failure))
        return up[0]

    def _born(self, replica: _Replica) -> _Born:
        """Waits until an engine is up."""
        ray = self._ray
        try:
            answer = ray.get(replica.call, timeout=self._start_limit_s)
        except ray.exceptions.GetTimeoutError:
            raise KnockoutError(f"an engine has not started in {self._start_limit_s:g} s") from None
        except ray.exceptions.RayError as error:
            cause = getattr(error, "cause", None)
            if isinstance(cause, KnockoutError):
                raise type(cause)(str(cause)) from None
            raise KnockoutError(
                f"an engine does not start in its actor: {last_words(error)}"
            ) from None
        assert isinstance(answer, _Born)
        return answer


def _set_aside(request: Request, deaths: int, reason: str) -> Completion:
    return Completion(
        key=request.key, tokens=np.asarray(request.prefix, dtype=np.int32), n_generated=0,
        finish="error",
        error=f"{counted(deaths, 'engine')} died while it ran, and the last ran little else: {reason}",
    )  # fmt: skip


def _check_alike(one: EngineInfo, other: EngineInfo) -> None:
    """Engines that round differently would make results depend on where a cell ran."""
    for name in ("kind", "device", "dtype", "runner", "vocab_size", "eos_ids", "versions"):
        first, second = getattr(one, name), getattr(other, name)
        if first != second:
            raise KnockoutError(
                f"two engines differ in {name} ({first} and {second}); install the same on every "
                "node"
            )
