"""Grading beside generation: worker processes with a time and a memory limit for each item."""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import IO, NamedTuple, Protocol

import knockout
from knockout.errors import KnockoutError
from knockout.grading.grade import Grade
from knockout.grading.graders import Grader

__all__ = ["Graded", "GraderPool"]

_START_LIMIT_S = 120.0
_MOST_FAILED_STARTS = 3
# Workers that may die on one answer before it is given up.
_MOST_DEATHS = 2
# Answers waiting for each worker before another starts: it takes seconds and some 300 MiB.
_QUEUE_EACH = 32
_MOST_BY_DEFAULT = 8
# A time-out counts at once if the worker computed for this share of the limit.
_LEAST_WORK = 0.5


class Graded(Protocol):
    """What the pool needs to know of a benchmark."""

    @property
    def name(self) -> str: ...

    @property
    def grader(self) -> Grader: ...


class _Item(NamedTuple):
    key: str
    benchmark: str
    problem: int
    response: str | None
    finished: bool
    deaths: int = 0
    again: bool = False


@dataclass
class _Worker:
    process: subprocess.Popen[bytes]
    connection: Connection
    stderr: IO[bytes]
    since: float
    ready: bool = False
    item: _Item | None = None
    cpu_s: float = 0.0


class GraderPool:
    """Grades responses in worker processes that are killed when they hang.

    Workers are separate interpreters, not forks (the parent may hold an engine's threads) and not
    `multiprocessing` children (whose start would run the user's script again). They run at low
    priority, take no part in Ctrl-C, and end when the parent does. A thread attends to them, so that
    they have work and their limits apply however long the engine's step takes.

    Args:
        benchmarks: What has a `name` and a `grader`.
        workers: Most processes; by default a quarter of the cores, 1 to 8. One starts with the
            first item, and another whenever many items wait for each that there is.
        timeout_s: Wall time for one item, in seconds.
        memory_mb: What grading may take in a worker on top of its imports, in MiB.
    """

    def __init__(
        self,
        benchmarks: Iterable[Graded],
        *,
        workers: int | None = None,
        timeout_s: float = 10.0,
        memory_mb: int = 2048,
    ) -> None:
        if workers is None:
            affinity = getattr(os, "sched_getaffinity", None)
            cores = len(affinity(0)) if affinity else os.cpu_count() or 1
            workers = max(1, min(cores // 4, _MOST_BY_DEFAULT))
        if workers < 1 or timeout_s <= 0 or memory_mb < 64:
            raise ValueError(f"{workers=} {timeout_s=} {memory_mb=}: need ≥ 1, > 0 and ≥ 64")
        graders = {benchmark.name: benchmark.grader for benchmark in benchmarks}
        self._names = frozenset(graders)
        self._spec = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()
        pickle.dump(graders, self._spec)
        self._spec.flush()
        self._most_workers = workers
        self._timeout_s = timeout_s
        self._memory_mb = memory_mb
        self._workers: list[_Worker] = []
        self._failed_starts = 0
        # Between the caller and the thread: both ends of a deque may be used at once.
        self._queue: deque[_Item] = deque()
        self._graded: deque[tuple[str, Grade]] = deque()
        self._open = 0
        self._closed = False
        self._error: Exception | None = None
        self._woken, self._wake = os.pipe()
        os.set_blocking(self._wake, False)
        self._thread = threading.Thread(target=self._attend, name="graders", daemon=True)

    def __enter__(self) -> GraderPool:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def n_open(self) -> int:
        """Items submitted whose grade was not yet returned by `poll`."""
        return self._open

    def submit(
        self, key: str, benchmark: str, problem_index: int, response: str | None, finished: bool
    ) -> None:
        """Queues a response; `finished` is False if it was cut by length."""
        if self._closed:
            raise ValueError("the pool is closed")
        if benchmark not in self._names:
            raise KeyError(f"no grader for benchmark {benchmark!r}")
        self._queue.append(_Item(key, benchmark, problem_index, response, finished))
        self._open += 1
        if self._thread.ident is None:
            self._thread.start()
        self._rouse()

    def poll(self) -> list[tuple[str, Grade]]:
        """Returns the grades that are finished, without waiting.

        Raises:
            KnockoutError: Workers cannot be started.
        """
        if self._error is not None:
            raise self._error
        done = [self._graded.popleft() for _ in range(len(self._graded))]
        self._open -= len(done)
        return done

    def close(self) -> None:
        """Ends all workers and drops what is not graded yet. Harmless when called twice."""
        if self._closed:
            return
        self._closed = True
        if self._thread.ident is not None:
            for worker in list(self._workers):
                worker.process.kill()
            self._rouse()
            self._thread.join()
        self._queue.clear()
        self._open = 0
        self._spec.close()
        os.close(self._wake)
        os.close(self._woken)

    def _rouse(self) -> None:
        with contextlib.suppress(BlockingIOError):  # a full pipe wakes it as well
            os.write(self._wake, b".")

    # The thread ----------------------------------------------------------------------------------

    def _attend(self) -> None:
        """Keeps workers busy, collects what they send, and kills those that take too long."""
        failure: Exception | None = None
        try:
            while not self._closed:
                self._hand_out()
                self._wait()
                for worker in list(self._workers):
                    self._graded.extend(self._collect(worker))
        except Exception as error:
            failure = error
        for worker in list(self._workers):
            worker.process.kill()
            self._bury(worker)
        self._error = failure

    def _wait(self) -> None:
        """Until a worker has sent something or died, a limit is reached, or the caller calls."""
        busy = [w for w in self._workers if w.item is not None or not w.ready]
        limits = [w.since + (self._timeout_s if w.ready else _START_LIMIT_S) for w in busy]
        timeout = max(0.0, min(limits) - time.monotonic()) if limits else None
        ready = wait([self._woken, *(w.connection for w in self._workers)], timeout)
        if self._woken in ready:
            os.read(self._woken, 65_536)

    def _collect(self, worker: _Worker) -> list[tuple[str, Grade]]:
        try:
            if worker.connection.poll():
                grade = worker.connection.recv()
                item, worker.item = worker.item, None
                worker.ready = True
                self._failed_starts = 0
                return [(item.key, grade)] if item is not None else []
        except (EOFError, OSError):
            return self._died(worker)
        limit = self._timeout_s if worker.ready else _START_LIMIT_S
        if (worker.ready and worker.item is None) or time.monotonic() - worker.since <= limit:
            return []
        worked = _cpu_s(worker.process.pid) - worker.cpu_s
        worker.process.kill()
        reason = self._bury(worker)
        if worker.item is not None and not worker.item.again and worked < _LEAST_WORK * limit:
            # The machine slept, or had no time for the worker: the answer may be innocent.
            self._queue.appendleft(worker.item._replace(again=True))
            return []
        if worker.item is None:
            self._start_failed(f"not ready after {limit:g} s ({reason})")
            return []
        return [(worker.item.key, Grade(0, "timeout", f"no grade after {limit:g} s"))]

    def _died(self, worker: _Worker) -> list[tuple[str, Grade]]:
        worker.process.kill()
        reason = self._bury(worker)
        if worker.item is None:
            self._start_failed(reason)
            return []
        deaths = worker.item.deaths + 1
        if deaths < _MOST_DEATHS:  # killed by someone else, perhaps: the answer may be innocent
            self._queue.appendleft(worker.item._replace(deaths=deaths))
            return []
        return [(worker.item.key, Grade(0, "error", f"the grader died twice ({reason})"))]

    def _start_failed(self, reason: str) -> None:
        self._failed_starts += 1
        if self._failed_starts >= _MOST_FAILED_STARTS:
            raise KnockoutError(f"grading processes cannot be started: {reason}")

    def _hand_out(self) -> None:
        while self._queue:
            worker = next((w for w in self._workers if w.ready and w.item is None), None)
            if worker is None:
                n = len(self._workers)
                if n < self._most_workers and len(self._queue) > n * _QUEUE_EACH:
                    self._workers.append(self._start())
                    continue
                return
            item = self._queue.popleft()
            worker.item, worker.since = item, time.monotonic()
            worker.cpu_s = _cpu_s(worker.process.pid)
            try:
                worker.connection.send(item[1:5])
            except OSError:  # it died while idle: the item is not to blame
                worker.item = None
                self._queue.appendleft(item)
                self._died(worker)

    def _start(self) -> _Worker:
        ours, theirs = Pipe()
        stderr = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the worker
        root = str(Path(knockout.__file__).parents[1])
        paths = [root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(paths),
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        fds = [theirs.fileno(), self._spec.fileno()]
        arguments = [*map(str, fds), str(self._memory_mb), str(self._timeout_s)]
        process = subprocess.Popen(
            [sys.executable, "-m", "knockout.grading.worker", *arguments],
            pass_fds=fds,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            env=environment,
            start_new_session=True,
        )
        theirs.close()
        return _Worker(process, ours, stderr, time.monotonic())

    def _bury(self, worker: _Worker) -> str:
        """Forgets a killed or dead worker; returns what it said last."""
        self._workers.remove(worker)
        worker.connection.close()
        code = worker.process.wait()
        with contextlib.closing(worker.stderr) as stream:
            stream.seek(0)
            lines = stream.read().decode(errors="replace").strip().splitlines()
        return f"exit status {code}" + (f", {lines[-1][:300]}" if lines else "")


def _cpu_s(pid: int) -> float:
    """Processor time of a process so far, in seconds; infinite if the system does not say."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return math.inf
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
