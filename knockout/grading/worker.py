"""A worker process: receives graders and responses over a pipe, sends grades back.

Started by `knockout.grading.pool` as `python -m knockout.grading.worker PIPE_FD GRADERS_FD MEMORY_MB
TIMEOUT_S`.
"""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import resource
import signal
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

from knockout.grading.grade import Grade
from knockout.grading.graders import Grader

__all__ = ["main"]

_NICENESS = 10


def main(pipe_fd: int, graders_fd: int, memory_mb: int, timeout_s: float) -> None:
    """Serves until the pipe closes, which it also does when the parent dies."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.nice(_NICENESS)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    connection = Connection(pipe_fd)
    # Workers share the file and its offset, so it is read without moving.
    pickled = os.pread(graders_fd, os.fstat(graders_fd).st_size, 0)
    graders: dict[str, Grader] = pickle.loads(pickled)
    for grader in graders.values():
        grader.warm_up()
    _limit_memory(memory_mb)
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        connection.send(None)  # ready
        while True:
            benchmark, index, response, finished = connection.recv()
            _limit_cpu(timeout_s)
            connection.send(_grade(graders[benchmark], index, response, finished))


def _grade(grader: Grader, index: int, response: str | None, finished: bool) -> Grade:
    try:
        return grader.grade(index, response, finished=finished)
    except MemoryError:
        return Grade(0, "error", "out of memory")
    except Exception as error:  # a task's code may raise anything; that is data, not a crash
        return Grade(0, "error", f"{type(error).__name__}: {error}"[:500])


def _limit_memory(memory_mb: int) -> None:
    """Limits the address space to what the imports took (which varies by machine) and this much."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + memory_mb * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _limit_cpu(timeout_s: float) -> None:
    """Lets the kernel end this process soon after its item's limit, should the parent be gone."""
    limit = math.ceil(time.process_time() + timeout_s) + 5
    resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
