"""Joining or starting a Ray cluster, and placing actors in it. Ray is passed in as a module."""

from __future__ import annotations

import gc
import logging
import os
import socket
import time
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

from knockout.errors import KnockoutError, UsageError

__all__ = [
    "check_reachable",
    "engines_that_fit",
    "join",
    "last_words",
    "patiently",
    "place",
    "release",
]

log = logging.getLogger("knockout")

_LOCAL_STORE_BYTES = 256 * 2**20
_START_TRIES = 3
_PAUSE_S = 2.0
_ANSWER_S = 20.0

T = TypeVar("T")


def join(ray: Any, address: str | None, n_engines: int) -> bool:
    """Connects to a cluster, or starts one on this machine.

    Args:
        ray: The module.
        address: "auto", "HOST:PORT" or "ray://HOST:PORT"; None for what `RAY_ADDRESS` names, else
            for a cluster of our own.
        n_engines: What a cluster of our own must have CPUs for.

    Returns:
        Whether there was no connection before, so that it is ours to close.

    Raises:
        UsageError: That is no address.
        KnockoutError: There is no such cluster, or none can be started.
    """
    if ray.is_initialized():
        return False
    address = address or os.environ.get("RAY_ADDRESS") or None
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address is not None:
        check_reachable(address)
        try:
            ray.init(address=address, **quiet)
        except Exception as error:  # Ray raises all kinds, Exception itself among them
            raise KnockoutError(
                f"Ray cluster {address}: {_first_line(error)}. Start one with `ray start --head`, "
                "or leave the address out"
            ) from error
        return True
    cpus = max(n_engines, os.cpu_count() or 1)
    patiently(
        ray,
        lambda: ray.init(
            address="local", include_dashboard=False, num_cpus=cpus,
            object_store_memory=_LOCAL_STORE_BYTES, **quiet,
        ),
    )  # fmt: skip
    return True


def check_reachable(address: str) -> None:
    """Checks that something listens there: Ray itself would try for a quarter of an hour.

    Raises:
        UsageError: That is no address.
        KnockoutError: Nothing does.
    """
    if address == "auto":
        return
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise UsageError(
            f"engine.ray is {address!r}; expected auto, HOST:PORT or ray://HOST:PORT "
            "(`ray start --head` prints the address)"
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_S).close()
    except OSError as error:
        raise KnockoutError(
            f"Ray cluster {address}: nothing answers there ({error}). Start one with "
            "`ray start --head`, or leave the address out"
        ) from error


def patiently(ray: Any, start: Callable[[], T], pause_s: float = _PAUSE_S) -> T:
    """Starts a cluster, with further tries if the machine is too busy for Ray's own limits.

    Ray's node process waits 15 s for its two helpers, which import much, and aborts then; what
    started it notices after 30 s. Neither limit is a setting (ray#65983). On a busy machine or with
    a cold file system the next try finds the files in memory.

    Args:
        ray: The module.
        start: Starts it.
        pause_s: Seconds before the second try; twice that before the third.

    Returns:
        What `start` returned.

    Raises:
        KnockoutError: No try succeeded.
    """
    with warnings.catch_warnings():
        # Python notes that processes of a failed try were left running; they are ended below.
        warnings.simplefilter("ignore", ResourceWarning)
        for attempt in range(1, _START_TRIES + 1):
            before = _processes(ray)
            try:
                return start()
            except Exception as error:  # Ray raises all kinds, Exception itself among them
                ray.shutdown()
                _end_processes(ray, before)
                reason = _first_line(error)
                if attempt == _START_TRIES:
                    raise KnockoutError(
                        f"Ray does not start on this machine in {attempt} tries: {reason}. "
                        "Its logs are in /tmp/ray/session_latest/logs (raylet.err says most)"
                    ) from error
            gc.collect()
            log.warning("Ray did not start (%s); trying again", reason)
            time.sleep(pause_s * attempt)
    raise AssertionError


def engines_that_fit(wanted: int | None, gpus_each: int, cluster: dict[str, float]) -> int:
    """How many engines to start; refuses more than would ever start.

    Args:
        wanted: `engine.data_parallel`, or None for as many as fit.
        gpus_each: GPUs of one engine; 0 if it runs on CPUs.
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


def place(ray: Any, host: type, cpus: int, gpus: int, tensor: int) -> tuple[Any, Any]:
    """Asks for an actor; Ray starts it as soon as there is room.

    Args:
        ray: The module.
        host: The actor's class.
        cpus: CPUs of one on CPUs; Ray gives its process as many threads.
        gpus: GPUs of one; 0 on CPUs.
        tensor: GPUs over which vLLM splits the model.

    Returns:
        The actor, and its placement group or None.
    """
    options: dict[str, Any]
    group = None
    if tensor > 1:
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        # The actor itself takes no GPU: vLLM's workers take them, from the actor's own group.
        group = placement_group([{"CPU": 1, "GPU": 1}] * tensor, strategy="PACK")
        options = {
            "num_cpus": 0,
            "num_gpus": 0,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                group, placement_group_capture_child_tasks=True
            ),
        }
    else:
        options = {
            "num_cpus": 0 if gpus else cpus,
            "num_gpus": gpus,
            "scheduling_strategy": "SPREAD",
        }
    return ray.remote(host).options(**options).remote(), group


def release(ray: Any, actor: Any, group: Any) -> None:
    """Ends an actor, dead or alive, and frees what was set aside for it."""
    ray.kill(actor)
    if group is not None:
        from ray.util.placement_group import remove_placement_group

        remove_placement_group(group)


def last_words(error: BaseException) -> str:
    """What a Ray error says, in one line."""
    cause = getattr(error, "cause", None)
    if cause is not None:
        return f"{type(cause).__name__}: {cause}"
    return f"{type(error).__name__}: {_first_line(error)}"[:300]


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def _processes(ray: Any) -> dict[int, Any]:
    """Ray's processes below this one, by id."""
    import psutil

    folder = os.path.dirname(ray.__file__)
    found = {}
    for child in psutil.Process().children(recursive=True):
        try:
            if any(folder in part for part in child.cmdline()):
                found[child.pid] = child
        except psutil.Error:  # it ended meanwhile
            continue
    return found


def _end_processes(ray: Any, before: dict[int, Any]) -> None:
    """Ends what a try that failed left running: Ray does so only when this process ends."""
    import psutil

    left = [child for pid, child in _processes(ray).items() if pid not in before]
    for child in left:
        try:
            child.kill()
        except psutil.Error:
            continue
    psutil.wait_procs(left, timeout=10)
