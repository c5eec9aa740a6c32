"""The pool with real processes: what hangs or eats memory is killed, and the next item is graded."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from knockout.grading.grade import Grade
from knockout.grading.graders import Grader, IfevalGrader, MathsGrader
from knockout.grading.pool import GraderPool


@dataclass(frozen=True)
class Named:
    name: str
    grader: Grader


@dataclass(frozen=True)
class Broken:
    """A grader that cannot start."""

    def warm_up(self) -> None:
        raise RuntimeError("no such thing here")

    def grade(self, index: int, response: str | None, *, finished: bool) -> Grade:
        raise NotImplementedError


MATHS = Named("m", MathsGrader(["7", "8"]))


def drain(pool: GraderPool, limit_s: float = 60) -> dict[str, Grade]:
    grades: dict[str, Grade] = {}
    end = time.monotonic() + limit_s
    while pool.n_open:
        assert time.monotonic() < end, f"open after {limit_s} s: {pool.n_open}"
        grades.update(pool.poll())
        time.sleep(0.01)
    return grades


def pids(pool: GraderPool) -> list[int]:
    return [worker.process.pid for worker in pool._workers]


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def test_an_answer_whose_worker_was_stopped_is_graded_once_more() -> None:
    """As when the machine sleeps: the limit passes on the clock, and nothing was computed."""
    with GraderPool([MATHS], timeout_s=2, memory_mb=1024) as pool:
        pool.submit("first", "m", 0, r"\boxed{7}", True)
        drain(pool)
        (pid,) = pids(pool)
        os.kill(pid, signal.SIGSTOP)
        pool.submit("slept", "m", 0, r"\boxed{7}", True)
        assert drain(pool)["slept"] == Grade(1, "ok", "7")
        assert pid not in pids(pool)


def test_hangs_time_out_and_the_next_is_graded() -> None:
    with GraderPool([MATHS], timeout_s=1, memory_mb=1024) as pool:
        pool.submit("hang", "m", 0, r"\boxed{9^{9^{9^{9}}}}", True)
        pool.submit("next", "m", 0, r"\boxed{7}", True)
        pool.submit("other", "m", 1, r"\boxed{7}", True)
        pool.submit("none", "m", 0, None, True)
        pool.submit("cut", "m", 0, r"so it is \boxed{", False)
        assert pool.n_open == 5
        grades = drain(pool)
        used = pids(pool)
    assert grades["hang"].status == "timeout"
    assert grades["hang"].correct == 0
    assert grades["next"] == Grade(1, "ok", "7")
    assert grades["other"] == Grade(0, "ok", "7")
    assert grades["none"].status == "error"
    assert grades["cut"].status == "incomplete"
    assert used
    assert not any(alive(pid) for pid in used)


def test_memory_is_limited_and_a_killed_worker_is_replaced() -> None:
    with GraderPool([MATHS], timeout_s=5, memory_mb=100) as pool:
        pool.submit("big", "m", 0, r"\boxed{2^{30^{6}}}", True)
        first = drain(pool)["big"]
        assert (first.correct, first.status) == (0, "error")
        pool.submit("hang", "m", 0, r"\boxed{9^{9^{9^{9}}}}", True)
        while not any(w.item and w.ready for w in pool._workers):
            pool.poll()
            time.sleep(0.01)
        # Killed once, an answer is graded again; it hangs there too.
        os.kill(pids(pool)[0], signal.SIGKILL)
        assert drain(pool)["hang"].status == "timeout"
        pool.submit("next", "m", 0, r"\boxed{7}", True)
        assert drain(pool)["next"].correct == 1


def test_poll_does_not_wait_and_workers_are_polite() -> None:
    with GraderPool([MATHS], timeout_s=20) as pool:
        pool.submit("a", "m", 0, r"\boxed{7}", True)
        start = time.monotonic()
        pool.poll()
        assert time.monotonic() - start < 0.2
        drain(pool)
        (pid,) = pids(pool)
        assert os.getpriority(os.PRIO_PROCESS, pid) > os.getpriority(os.PRIO_PROCESS, 0)
        os.kill(pid, signal.SIGINT)  # Ctrl-C is the parent's business
        pool.submit("b", "m", 0, r"\boxed{7}", True)
        assert drain(pool)["b"].correct == 1
        assert pids(pool) == [pid]
    pool.close()
    with pytest.raises(ValueError, match="closed"):
        pool.submit("c", "m", 0, "", True)


def test_several_benchmarks_share_the_workers() -> None:
    record = {"prompt": "x", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}
    with GraderPool([MATHS, Named("i", IfevalGrader([record]))], workers=2, timeout_s=20) as pool:
        for n in range(6):
            pool.submit(f"m{n}", "m", n % 2, r"\boxed{7}", True)
            pool.submit(f"i{n}", "i", 0, "a b" if n % 2 else "a, b", True)
        grades = drain(pool)
    assert [grades[f"m{n}"].correct for n in range(6)] == [1, 0] * 3
    assert [grades[f"i{n}"].correct for n in range(6)] == [0, 1] * 3


def test_workers_that_cannot_start_are_told() -> None:
    program = (
        "import sys; sys.path.insert(0, 'tests')\n"
        "from knockout.errors import KnockoutError\n"
        "from test_grading_pool import *\n"
        "os.environ['PYTHONPATH'] = 'tests'\n"
        "pool = GraderPool([Named('b', Broken())])\n"
        "pool.submit('a', 'b', 0, 'x', True)\n"
        "try: drain(pool)\n"
        "except KnockoutError as error: print(error)\n"
        "print(len(pool._workers))\n"
    )
    root = Path(__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=root, capture_output=True, text=True, timeout=120
    )
    assert "no such thing here" in done.stdout, done.stderr
    assert done.stdout.splitlines()[-1] == "0"


@pytest.mark.parametrize("busy", [False, True])
def test_no_orphans_when_the_parent_is_killed(busy: bool) -> None:
    response = r"\boxed{9^{9^{9^{9}}}}" if busy else r"\boxed{7}"
    program = (
        "import time\n"
        "from knockout.grading.pool import GraderPool\n"
        "from knockout.grading.graders import MathsGrader\n"
        "class B: name = 'm'; grader = MathsGrader(['7'])\n"
        "pool = GraderPool([B], timeout_s=1)\n"
        f"pool.submit('a', 'm', 0, {response!r}, True)\n"
        "while not any(w.ready for w in pool._workers): pool.poll(); time.sleep(0.01)\n"
        "print(pool._workers[0].process.pid, flush=True)\n"
        "time.sleep(100)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    parent.stdout.close()
    end = time.monotonic() + 40
    while alive(pid):
        assert time.monotonic() < end
        time.sleep(0.05)


def test_workers_have_work_while_the_caller_is_busy() -> None:
    record = {"prompt": "x", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}
    with GraderPool([Named("i", IfevalGrader([record]))], workers=1) as pool:
        pool.submit("first", "i", 0, "a", True)
        drain(pool)
        for n in range(50):
            pool.submit(str(n), "i", 0, "a", True)
        # As during a long step of the engine: nobody polls, and all is graded all the same.
        end = time.monotonic() + 60
        while len(pool._graded) < 50:
            assert time.monotonic() < end
            time.sleep(0.01)
        assert len(pool.poll()) == 50
        assert pool.n_open == 0


def test_more_workers_start_only_as_answers_queue_up() -> None:
    with GraderPool([MATHS], workers=2, timeout_s=20) as pool:
        for n in range(8):
            pool.submit(f"a{n}", "m", 0, r"\boxed{7}", True)
        drain(pool)
        assert len(pids(pool)) == 1
        for n in range(200):
            pool.submit(f"b{n}", "m", 0, r"\boxed{7}", True)
        assert len(drain(pool)) == 200
        assert len(pids(pool)) == 2


def test_wrong_use_is_told() -> None:
    with pytest.raises(ValueError, match="workers"):
        GraderPool([MATHS], workers=0)
    with GraderPool([MATHS]) as pool, pytest.raises(KeyError, match="nope"):
        pool.submit("a", "nope", 0, "x", True)
