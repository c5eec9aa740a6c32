"""Faults put into whole runs: afterwards the ledger is that of an undisturbed run, or it says why not."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

import psutil
import pytest
from child_runs import begin, dump, fork_server, sweep_file
from conftest import Command
from test_scheduler import WordGrader, a_ledger, a_plan, work
from test_scheduler import dump as all_rows
from words import word_model

from knockout.engines.base import Completion, Request
from knockout.engines.transformers import TransformersEngine
from knockout.errors import KnockoutError
from knockout.ledger import Ledger, totals
from knockout.sweep.jobs import Snapshot
from knockout.sweep.owed import owed
from knockout.sweep.progress import Display
from knockout.sweep.scheduler import Scheduler

N_CELLS = 48


def rows_of(ledger: Ledger) -> dict[str, list[tuple[Any, ...]]]:
    """All rows, but not what a fork left: after a failure that may be another trajectory."""
    rows = all_rows(ledger)
    columns = [name for (name,) in ledger.query("SELECT name FROM pragma_table_info('fork')")]
    kept = [n for n, c in enumerate(columns) if c not in ("parent", "shared", "watched", "crc")]
    rows["fork"] = [tuple(row[n] for n in kept) for row in rows["fork"]]
    return rows


@pytest.fixture(scope="module")
def context() -> ForkServerContext:
    return fork_server()


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sweep_file(tmp_path_factory.mktemp("sweep"))


def finish(context: ForkServerContext, sweep: Path, out: Path, **more: Any) -> int:
    process = begin(context, sweep, out, **more)
    process.join(200)
    assert process.exitcode is not None, "the run does not end"
    return process.exitcode


def said(out: Path) -> str:
    return out.with_suffix(".txt").read_text()


def accounted(out: Path) -> None:
    """Every planned cell and every knockout of it is done or failed with its reason."""
    summary = json.loads((out / "summary.json").read_text())
    assert summary["complete"] is True
    assert summary["cells_done"] + summary["cells_failed"] == summary["n_cells"] == N_CELLS
    assert summary["forks"] + summary["inherited"] == summary["cells_done"] * 7
    assert summary["forks_owed"] == 0
    assert sum(summary["grades"].values()) == summary["n_cells"] + summary["forks"]


@pytest.fixture(scope="module")
def undisturbed(
    context: ForkServerContext, sweep: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, float]:
    """A finished run and how many seconds it took."""
    out = tmp_path_factory.mktemp("undisturbed") / "run"
    finish(context, sweep, out.with_name("first"))  # the server's imports are not counted
    began = time.monotonic()
    assert finish(context, sweep, out) == 0, said(out)
    accounted(out)
    return out, time.monotonic() - began


N_KILLS = 20


@pytest.mark.timeout(1800)
def test_killed_at_random_moments(
    context: ForkServerContext, sweep: Path, undisturbed: tuple[Path, float], tmp_path: Path
) -> None:
    """SIGKILL of the main process at 20 moments: one run after another, each until it is finished.

    The moments are uniform over an undisturbed run's time. A run goes on after each kill, so that
    a chain of kills ends when a start reaches the end before its moment; only real kills count.
    """
    there, seconds = undisturbed
    moments = random.Random(11)
    killed = chains = 0
    while killed < N_KILLS:
        out = tmp_path / f"run{chains}"
        chains += 1
        code = -signal.SIGKILL
        while code == -signal.SIGKILL and killed < N_KILLS:
            process = begin(context, sweep, out)
            process.join(moments.uniform(0, seconds))
            process.kill()
            process.join()
            assert process.exitcode in (0, -signal.SIGKILL), said(out)
            code = process.exitcode
            killed += code == -signal.SIGKILL
        if code:
            assert finish(context, sweep, out) == 0, said(out)
        assert dump(out) == dump(there)
        accounted(out)
        assert summary_of(out) == summary_of(there)
        for name in ("verdicts.csv", "verdicts.json"):
            assert (out / name).read_bytes() == (there / name).read_bytes()


def summary_of(out: Path) -> dict[str, Any]:
    """What two runs of one sweep share."""
    summary = json.loads((out / "summary.json").read_text())
    assert summary.pop("sessions") > 0
    assert summary.pop("wall_s") >= 0  # a killed session may not have noted its time yet
    return dict(summary)


def test_a_killed_grader_is_replaced_and_its_answer_graded_again(
    context: ForkServerContext, sweep: Path, undisturbed: tuple[Path, float], tmp_path: Path
) -> None:
    out = tmp_path / "run"
    process = begin(context, sweep, out)
    killed: set[int] = set()
    while process.is_alive() and len(killed) < 2:
        for child in psutil.Process(process.pid).children() if process.pid else []:
            # Grading begins with the first answer, so a worker that has written is at work.
            if child.pid not in killed and "knockout.grading.worker" in " ".join(_line(child)):
                time.sleep(0.3 if killed else 0.0)
                child.kill()
                killed.add(child.pid)
        time.sleep(0.01)
    process.join(200)
    assert killed
    assert process.exitcode == 0, said(out)
    assert dump(out) == dump(undisturbed[0])
    accounted(out)


def _line(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def test_a_disk_that_fills_up_and_has_room_again(
    context: ForkServerContext, sweep: Path, undisturbed: tuple[Path, float], tmp_path: Path
) -> None:
    # A limit on file sizes stands for the full disk. When the journal meets it depends on how many
    # grades a commit finds, so that a slow machine needs a smaller disk to fail in the middle.
    for limit in range(150_000, 70_000, -10_000):
        out = tmp_path / f"run{limit}"
        assert finish(context, sweep, out, limit_bytes=limit) == 1, said(out)
        assert "What was committed is safe" in said(out)
        assert "Traceback" not in said(out)
        with Ledger.open(out / "run.db") as ledger:
            cells = totals(ledger).cells
        if cells < N_CELLS:
            break
    assert 0 < cells < N_CELLS
    assert finish(context, sweep, out) == 0, said(out)
    assert dump(out) == dump(undisturbed[0])
    accounted(out)


@pytest.mark.parametrize("damage", ["last page", "cut short", "overwritten"])
def test_a_damaged_ledger_is_refused(
    context: ForkServerContext,
    sweep: Path,
    undisturbed: tuple[Path, float],
    tmp_path: Path,
    damage: str,
) -> None:
    out = tmp_path / "run"
    shutil.copytree(undisturbed[0], out)
    path = out / "run.db"
    size = path.stat().st_size
    with path.open("r+b") as file:
        if damage == "cut short":
            file.truncate(size // 2)
        else:
            file.seek(0 if damage == "overwritten" else size - 4096)
            file.write(b"\xff" * 4096)
    broken = path.read_bytes()
    assert finish(context, sweep, out) == 1
    assert "the ledger is damaged" in said(out)
    assert "--out" in said(out)
    assert "Traceback" not in said(out)
    assert path.read_bytes() == broken


def test_ctrl_c_twice_stops_at_once(
    context: ForkServerContext, sweep: Path, undisturbed: tuple[Path, float], tmp_path: Path
) -> None:
    for attempt in range(20):
        out = tmp_path / f"run{attempt}"
        process = begin(context, sweep, out)
        while process.is_alive() and not _has_a_cell(out):
            time.sleep(0.005)
        # Signals that arrive together count once, so the second waits until the first was heard.
        once = _interrupt(process)
        while process.is_alive() and "press Ctrl-C again" not in said(out):
            time.sleep(0.001)
        twice = once and _interrupt(process)
        process.join(60)
        if twice and process.exitcode != 0:
            break  # a run that reached its end before a signal was not interrupted
    assert process.exitcode == 130, said(out)
    assert "Traceback" not in said(out)
    assert finish(context, sweep, out) == 0, said(out)
    assert dump(out) == dump(undisturbed[0])


def _interrupt(process: ForkServerProcess) -> bool:
    """Whether it was there to hear it."""
    assert process.pid is not None
    try:
        os.kill(process.pid, signal.SIGINT)
    except ProcessLookupError:
        return False
    return True


def test_ctrl_c_in_the_last_moment_stops_nothing(
    sweep: Path, undisturbed: tuple[Path, float], tmp_path: Path,
    knockout: Command, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    observe = Display.observe
    interrupted = []

    def interrupt(display: Display, snapshot: Snapshot) -> None:
        observe(display, snapshot)
        left = snapshot.waiting + snapshot.running + snapshot.grading
        if snapshot.cells == N_CELLS and not left and not interrupted:
            interrupted.append(signal.raise_signal(signal.SIGINT))

    monkeypatch.setattr(Display, "observe", interrupt)
    code, _, err = knockout("run", sweep, "--out", tmp_path / "run")
    assert interrupted
    assert code == 0, err
    assert dump(tmp_path / "run") == dump(undisturbed[0])


def _has_a_cell(out: Path) -> bool:
    try:
        with Ledger.open(out / "run.db") as ledger:
            return bool(ledger.query("SELECT COUNT(*) FROM cell")[0][0])
    except KnockoutError:
        return False  # not made yet


# The scheduler beside a faulty engine ------------------------------------------------------------


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TransformersEngine]:
    folder = word_model(tmp_path_factory.mktemp("model"))
    engine = TransformersEngine(str(folder), dtype="float32", max_num_seqs=8)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def expected(
    engine: TransformersEngine, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[tuple[Any, ...]]]:
    plan = a_plan()
    with a_ledger(plan, tmp_path_factory.mktemp("expected")) as ledger:
        work(plan, ledger, engine, engine.tokenizer)
        return rows_of(ledger)


class Lying:
    """The real engine; every seventh completion is changed on its way to the scheduler."""

    def __init__(self, engine: TransformersEngine, lie: str) -> None:
        self.engine, self.info, self.lie = engine, engine.info, lie
        self.seen = self.lies = 0
        self.requests: dict[str, Request] = {}

    @property
    def n_open(self) -> int:
        return self.engine.n_open

    def add(self, request: Request) -> None:
        self.requests[request.key] = request
        self.engine.add(request)

    def close(self) -> None:
        pass

    def step(self) -> list[Completion]:
        return [self._changed(done) for done in self.engine.step()]

    def _changed(self, done: Completion) -> Completion:
        """Lies where it can be seen: of a baseline's tokens any may be true."""
        request = self.requests.pop(done.key)
        self.seen += 1
        if self.seen % 3:
            return done
        tokens, changes = done.tokens.copy(), {}
        if self.lie == "fewer tokens" and done.finish == "length":
            changes = {"tokens": tokens[:-1], "n_generated": done.n_generated - 1}
        elif self.lie == "another prefix" and request.prefix:
            tokens[0] += 1
            changes = {"tokens": tokens}
        elif self.lie == "banned token" and request.intervention:
            tokens[-1] = request.intervention.token_ids[0]
            changes = {"tokens": tokens}
        elif self.lie == "no answer" and request.watch:
            changes = {"changes": None, "early": None}
        self.lies += bool(changes)
        return replace(done, **changes)


@pytest.mark.parametrize("lie", ["fewer tokens", "another prefix", "banned token", "no answer"])
def test_a_completion_that_cannot_be_true_is_set_aside_with_its_reason(
    engine: TransformersEngine,
    expected: dict[str, list[tuple[Any, ...]]],
    tmp_path: Path,
    lie: str,
) -> None:
    plan = a_plan()
    with a_ledger(plan, tmp_path) as ledger:
        liar = Lying(engine, lie)
        work(plan, ledger, liar, engine.tokenizer)
        found = totals(ledger)
        assert found.complete
        failed = found.failed_cells + found.failed_forks + found.failed_audits
        assert failed == liar.lies > 0
        reasons = ledger.query("SELECT error FROM generation WHERE error IS NOT NULL")
        reasons += ledger.query("SELECT error FROM audit WHERE error IS NOT NULL")
        assert len(reasons) == failed
        assert all(reason.startswith("the engine returned") for (reason,) in reasons)
        assert ledger.forget_failures() == failed
        work(plan, ledger, engine, engine.tokenizer)
        assert rows_of(ledger) == expected


def test_nan_from_the_model_fails_those_requests_alone(
    engine: TransformersEngine, expected: dict[str, list[tuple[Any, ...]]], tmp_path: Path
) -> None:
    plan = a_plan()
    calls = 0

    def poison(module: Any, inputs: Any, output: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls in (3, 9, 15):
            output[0] = float("nan")
        return output

    hook = engine._model.lm_head.register_forward_hook(poison)
    with a_ledger(plan, tmp_path) as ledger:
        try:
            work(plan, ledger, engine, engine.tokenizer)
        finally:
            hook.remove()
        found = totals(ledger)
        assert found.complete
        assert 0 < found.failed_cells + found.failed_forks + found.failed_audits <= 3
        assert ledger.forget_failures() > 0
        work(plan, ledger, engine, engine.tokenizer)
        assert rows_of(ledger) == expected


def test_a_clock_that_jumps_changes_nothing(
    engine: TransformersEngine,
    expected: dict[str, list[tuple[Any, ...]]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    jumps = random.Random(5)
    monkeypatch.setattr(time, "time", lambda: jumps.uniform(0, 4e9))
    plan = a_plan()
    with a_ledger(plan, tmp_path) as ledger:
        assert Scheduler(plan, ledger, engine, WordGrader(), engine.tokenizer, 8).run(
            [plan.everything()]
        )
        assert rows_of(ledger) == expected
        assert list(owed(plan, ledger, plan.everything())) == []


def test_nothing_measures_time_by_the_wall_clock() -> None:
    root = Path(__file__).parents[1] / "knockout"
    users = [path.name for path in root.rglob("*.py") if "time.time(" in path.read_text()]
    # Dates of files, and the times that MLflow shows, are the wall clock's.
    assert sorted(users) == ["files.py", "tracking.py"]


class SlowGrader(WordGrader):
    """Holds back the grades of forks, so that an audit is written before its fork."""

    def poll(self) -> list[tuple[str, Any]]:
        done = super().poll()
        self.held = getattr(self, "held", []) + [g for g in done if ".fork." in g[0]]
        return [g for g in done if ".fork." not in g[0]]

    @property
    def n_open(self) -> int:
        return len(self.queue)


def test_an_audit_written_before_its_fork_is_not_made_twice(
    engine: TransformersEngine, expected: dict[str, list[tuple[Any, ...]]], tmp_path: Path
) -> None:
    plan = a_plan()
    with a_ledger(plan, tmp_path) as ledger:
        turns = 0

        def stop_late(_: object) -> None:
            nonlocal turns
            turns += 1
            if turns == 150:
                scheduler.stop()

        scheduler = Scheduler(
            plan, ledger, engine, SlowGrader(), engine.tokenizer, 8, observe=stop_late
        )
        assert scheduler.run([plan.everything()]) is False
        early = ledger.query(
            "SELECT COUNT(*) FROM audit LEFT JOIN fork USING (benchmark, problem, seed, candidate)"
            " JOIN cell USING (benchmark, problem, seed)"
            " WHERE fork.step IS NULL AND substr(steps, 4 * candidate + 1, 4) <> x'ffffffff'"
        )
        assert early[0][0] > 0
        while engine.n_open:
            engine.step()
        work(plan, ledger, engine, engine.tokenizer)
        assert rows_of(ledger) == expected
