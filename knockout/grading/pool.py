"""Grading beside generation: worker processes with a time and a memory limit for each item."""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
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


@dataclass
class _Worker:
    process: subprocess.Popen[bytes]
    connection: Connection
    stderr: IO[bytes]
    since: float
    ready: bool = False
    item: _Item | None = None


class GraderPool:
    """Grades responses in worker processes that are killed when they hang.

    Workers are separate interpreters, not forks (the parent may hold an engine's threads) and not
    `multiprocessing` children (whose start would run the user's script again). They run at low
    priority, take no part in Ctrl-C, and end when the parent does.

    Args:
        benchmarks: What has a `name` and a `grader`.
        workers: Number of processes; they start with the first item.
        timeout_s: Wall time for one item, in seconds.
        memory_mb: What grading may take in a worker on top of its imports, in MiB.
    """

    def __init__(
        self,
        benchmarks: Iterable[Graded],
        *,
        workers: int = 1,
        timeout_s: float = 10.0,
        memory_mb: int = 2048,
    ) -> None:
        if workers < 1 or timeout_s <= 0 or memory_mb < 64:
            raise ValueError(f"{workers=} {timeout_s=} {memory_mb=}: need ≥ 1, > 0 and ≥ 64")
        graders = {benchmark.name: benchmark.grader for benchmark in benchmarks}
        self._names = frozenset(graders)
        self._spec = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()
        pickle.dump(graders, self._spec)
        self._spec.flush()
        self._n_workers = workers
        self._timeout_s = timeout_s
        self._memory_mb = memory_mb
        self._queue: deque[_Item] = deque()
        self._workers: list[_Worker] = []
        self._closed = False
        self._failed_starts = 0

    def __enter__(self) -> GraderPool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def n_open(self) -> int:
        """Items submitted whose grade was not yet returned by `poll`."""
        return len(self._queue) + sum(w.item is not None for w in self._workers)

    def submit(
        self, key: str, benchmark: str, problem_index: int, response: str | None, finished: bool
    ) -> None:
        """Queues a response; `finished` is False where it was cut by length."""
        if self._closed:
            raise ValueError("the pool is closed")
        if benchmark not in self._names:
            raise KeyError(f"no grader for benchmark {benchmark!r}")
        self._queue.append(_Item(key, benchmark, problem_index, response, finished))
        self._hand_out()

    def poll(self) -> list[tuple[str, Grade]]:
        """Returns the grades that are there by now, without waiting, and keeps workers busy."""
        done: list[tuple[str, Grade]] = []
        for worker in list(self._workers):
            done += self._collect(worker)
        self._hand_out()
        return done

    def close(self) -> None:
        """Ends all workers and drops what is not graded yet. Harmless when called twice."""
        self._closed = True
        self._spec.close()
        self._queue.clear()
        for worker in self._workers:
            worker.process.kill()
        while self._workers:
            self._bury(self._workers[0])

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
        worker.process.kill()
        reason = self._bury(worker)
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
            self.close()
            raise KnockoutError(f"grading processes cannot be started: {reason}")

    def _hand_out(self) -> None:
        while self._queue:
            worker = next((w for w in self._workers if w.ready and w.item is None), None)
            if worker is None:
                starting = sum(not w.ready for w in self._workers)
                if len(self._workers) < self._n_workers and starting < len(self._queue):
                    self._workers.append(self._start())
                    continue
                return
            item = self._queue.popleft()
            worker.item, worker.since = item, time.monotonic()
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
