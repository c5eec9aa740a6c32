"""A whole run: its directory, its engine, its rounds, its results."""

from __future__ import annotations

import json
import logging
import os
import platform
import signal
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from knockout._version import __version__
from knockout.config.file import dump_sweep, load_sweep, sweep_record
from knockout.config.sweep import Sweep
from knockout.config.urls import without_secrets
from knockout.engines.base import Engine, Several
from knockout.engines.open import open_engine
from knockout.errors import KnockoutError, UsageError
from knockout.files import write_text
from knockout.ledger import Ledger, RunLock, totals
from knockout.sweep.extend import begin, fit
from knockout.sweep.jobs import Snapshot
from knockout.sweep.looks import note_look
from knockout.sweep.owed import Round, owed
from knockout.sweep.prepare import Prepared, prepare
from knockout.sweep.progress import Display
from knockout.sweep.racing import race_rounds
from knockout.sweep.scheduler import Scheduler
from knockout.sweep.summary import summarise
from knockout.sweep.tracking import Tracking
from knockout.sweep.weights import check_weights
from knockout.tokens.checkpoint import resolve_model

__all__ = ["Interrupted", "run_sweep", "start_engine", "write_results"]

log = logging.getLogger("knockout")

# A killed session loses at most this much of its time on record.
_NOTE_TIME_EVERY_S = 30.0

_OURS = {
    "run.lock",
    "run.log",
    "run.db",
    "run.db-wal",
    "run.db-shm",
    "run.db-journal",
    "run.db.part",
    "config.yaml",
}


class Interrupted(KnockoutError):
    """The user stopped the run; what had finished is in the ledger."""

    exit_code = 130


def start_engine(sweep: Sweep) -> Engine:
    """Starts the sweep's engine."""
    settings = sweep.engine.model_dump()
    settings["options"] = settings["options"] or None
    folder = resolve_model(sweep.model, revision=sweep.revision)
    return open_engine(folder, trust_remote_code=sweep.trust_remote_code, **settings)


def run_sweep(
    sweep: Sweep,
    out: Path,
    *,
    retry_failed: bool = True,
    again: str = "",
    shard: tuple[int, int] = (1, 1),
) -> None:
    """Runs or resumes a sweep, and writes its results.

    Args:
        sweep: The sweep.
        out: The run directory; created if it is missing.
        retry_failed: Whether to try again what the engine failed on; in a race only what failed in
            the last round that began, since the earlier ones have been decided.
        again: The command that resumes the run, for messages.
        shard: Which part of the problems to work on, and of how many; `merge` joins them.

    Raises:
        UsageError: The directory belongs to another sweep, or another process works on it.
        KnockoutError: The run failed; what had finished is in the ledger.
        Interrupted: The user stopped it.
    """
    _check_directory(out)
    if shard != (1, 1) and sweep.adaptive is not None:
        raise UsageError(
            "--shard: this sweep races, and what a race asks depends on all problems; leave "
            "`adaptive` out, or run it on one machine"
        )
    prepared = prepare(sweep)
    prepared = replace(prepared, plan=replace(prepared.plan, shard=shard))
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{out}: cannot be created: {error.strerror}") from None
    with RunLock(out), _logging_to(out / "run.log"), ExitStack() as stack:
        prepared, ledger = _open_ledger(prepared, out)
        stack.enter_context(ledger)
        write_text(out / "config.yaml", dump_sweep(sweep))
        for note in prepared.resolved.notes:
            log.info(note)
        for warning in prepared.warnings:
            log.warning(warning)
        as_text = json.dumps({b.name: len(b.as_text) for b in prepared.benchmarks if b.as_text})
        if ledger.meta().get("golds_as_text", "{}") != as_text:
            ledger.note("golds_as_text", as_text)
        if retry_failed:
            _forget_failures(ledger, raced=sweep.adaptive is not None)
        tracking = Tracking(sweep.tracker, out, sweep_record(sweep))
        stack.enter_context(tracking)
        finished = _work(prepared, ledger, tracking)
        state = totals(ledger)
        if finished and state.complete:
            note_look(ledger)
        summary = summarise(ledger, sweep)
        write_text(out / "summary.json", json.dumps(summary, indent=2, ensure_ascii=False) + "\n")
        if not finished:
            raise Interrupted(
                f"stopped with {state.planned_cells - state.owed_cells} of {state.planned_cells} "
                f"cells in {out / 'run.db'}; "
                f"resume with: {again or 'the same command'}"
            )
        _write_verdicts(ledger, sweep, out)
        tracking.tell(_numbers(summary), int(summary["cells_done"]), now=True)
        for warning in summary["warnings"]:
            log.warning(warning)


def _numbers(summary: dict[str, Any]) -> dict[str, float]:
    """The counts of a summary, for a tracker."""
    return {
        f"summary/{key}": float(value)
        for key, value in summary.items()
        if isinstance(value, int | float)
    }


def _forget_failures(ledger: Ledger, *, raced: bool) -> None:
    """Makes failures owed again; in a race only those of the round that is not decided yet."""
    if n := ledger.forget_failures(last_seed_only=raced):
        log.info("trying %d failed trajectories again", n)
    if raced and (n := ledger.failed_before_last_seed()):
        log.warning(
            "%d trajectories failed in rounds that the race has decided without them; they stay "
            "missing", n
        )  # fmt: skip


def _rounds(prepared: Prepared, ledger: Ledger, hours: Callable[[], float]) -> Iterable[Round]:
    """What is to be generated, in turn; ask for a round when the one before is done."""
    sweep = prepared.sweep
    if sweep.adaptive is None:
        return [prepared.plan.everything()]
    return race_rounds(prepared.plan, ledger, sweep.verdict, sweep.adaptive, hours)


def _nothing_owed(prepared: Prepared, ledger: Ledger, hours: Callable[[], float]) -> bool:
    rounds = _rounds(prepared, ledger, hours)
    return not any(next(owed(prepared.plan, ledger, this), None) for this in rounds)


def _work(prepared: Prepared, ledger: Ledger, tracking: Tracking) -> bool:
    """Does what is owed; starts no engine if nothing is. Returns whether all of it is done."""

    def hours_so_far() -> float:
        return ledger.wall_s() / 3600

    if _nothing_owed(prepared, ledger, hours_so_far):
        log.info("nothing is left to generate")
        return True
    from knockout.grading.pool import GraderPool

    sweep, started = prepared.sweep, time.monotonic()
    session = ledger.add_session(
        datetime.now(UTC).isoformat(timespec="seconds"), socket.gethostname(), os.getpid()
    )
    noted = started

    def note_time() -> None:
        nonlocal noted
        noted = time.monotonic()
        ledger.set_wall(session, noted - started)

    def hours() -> float:
        note_time()
        return hours_so_far()

    log.info("starting the engine and loading %s; this can take a minute", sweep.model)
    engine = start_engine(sweep)
    try:
        _check_engine(engine, prepared)
        check_weights(engine, ledger)
        ledger.describe_session(session, _session_record(engine, sweep))
        state = totals(ledger)
        pool = GraderPool(
            prepared.benchmarks,
            workers=sweep.grading.workers,
            timeout_s=sweep.grading.timeout_s,
            memory_mb=sweep.grading.memory_mb,
        )
        with (
            closing(pool) as grader,
            Display(state.planned_cells, state.planned_cells - state.owed_cells) as display,
        ):

            def observe(snapshot: Snapshot) -> None:
                display.observe(snapshot)
                tracking.tell(display.numbers(snapshot), snapshot.cells)
                if time.monotonic() - noted >= _NOTE_TIME_EVERY_S:
                    note_time()

            scheduler = Scheduler(
                prepared.plan, ledger, engine, grader, prepared.tokenizer,
                _at_once(engine),
                observe,
            )  # fmt: skip
            with _stop_on_signal(scheduler):
                # A stop during the last grade's write leaves nothing undone.
                return scheduler.run(_rounds(prepared, ledger, hours)) or _nothing_owed(
                    prepared, ledger, hours
                )
    finally:
        note_time()
        engine.close()


def _at_once(engine: Engine) -> int:
    """Requests that the engine runs at once; 64 where it does not say."""
    each = int(engine.info.settings.get("max_num_seqs", 64))
    return each * (engine.n_engines if isinstance(engine, Several) else 1)


def _check_engine(engine: Engine, prepared: Prepared) -> None:
    """The plan was made from the checkpoint's files; the engine must not allow less."""
    width = engine.info.vocab_size
    for candidate in prepared.plan.candidates:
        if candidate.token_ids[-1] >= width:
            raise UsageError(
                f"candidate {candidate.name}: token id {candidate.token_ids[-1]} is outside the "
                f"engine's logits, which are {width} wide"
            )
    longest = max(
        len(p.prompt) + p.max_tokens for b in prepared.plan.benchmarks for p in b.problems
    )
    if longest > engine.info.max_model_len:
        raise UsageError(
            f"the engine has room for {engine.info.max_model_len} tokens, the longest prompt with its "
            f"trajectory needs {longest}; set engine.max_model_len, or lower sampling.max_tokens"
        )


def _session_record(engine: Engine, sweep: Sweep) -> dict[str, Any]:
    return {
        "knockout": __version__,
        "python": platform.python_version(),
        "engine": asdict(engine.info),
        "sweep": sweep_record(sweep),
    }


def _check_directory(out: Path) -> None:
    if out.exists() and not out.is_dir():
        raise UsageError(f"{out}: found a file; expected a folder for the run, or none yet")
    if out.is_dir() and not (out / "run.db").is_file():
        others = sorted(p.name for p in out.iterdir() if p.name not in _OURS)
        if others:
            raise UsageError(
                f"{out}: the folder is not empty (it contains {others[0]}) and is no run "
                "(run.db is missing); give another --out"
            )


def _open_ledger(prepared: Prepared, out: Path) -> tuple[Prepared, Ledger]:
    """The ledger of a run, begun or extended if needed, and the sweep fitted to it."""
    path = out / "run.db"
    if not Ledger.is_begun(path):
        log.info("new run in %s", out)
        ledger = begin(prepared, path, f"knockout-harness {__version__}")
    else:
        log.info("resuming the run in %s", out)
        ledger = Ledger.open(path, write=True)
    try:
        return fit(prepared, ledger, out), ledger
    except BaseException:
        ledger.close()
        raise


def write_results(out: Path) -> None:
    """Writes summary and verdicts of a run directory anew, from its ledger."""
    sweep = load_sweep(out / "config.yaml")
    with Ledger.open(out / "run.db") as ledger:
        summary = summarise(ledger, sweep)
        write_text(out / "summary.json", json.dumps(summary, indent=2, ensure_ascii=False) + "\n")
        _write_verdicts(ledger, sweep, out)


def _write_verdicts(ledger: Ledger, sweep: Sweep, out: Path) -> None:
    from knockout.sweep.results import verdict_table
    from knockout.verdicts.files import write_verdicts

    frame = verdict_table(ledger, sweep.verdict)
    write_verdicts(frame, out / "verdicts.csv", out / "verdicts.json")


@contextmanager
def _stop_on_signal(scheduler: Scheduler) -> Iterator[None]:
    """The first Ctrl-C (or SIGTERM, SIGHUP) ends the run cleanly, the second at once."""

    def stop(number: int, _: object) -> None:
        if scheduler.stopping:
            raise KeyboardInterrupt
        log.warning("stopping after this step; press Ctrl-C again to stop at once")
        scheduler.stop()

    # A hang-up that is ignored (nohup) stays ignored.
    numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
    numbers = [n for n in numbers if signal.getsignal(n) is not signal.SIG_IGN]
    before = {n: signal.signal(n, stop) for n in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _WithoutSecrets(logging.Formatter):
    """Keeps a password in an address that a message quotes out of the file."""

    def format(self, record: logging.LogRecord) -> str:
        return without_secrets(super().format(record))


@contextmanager
def _logging_to(path: Path) -> Iterator[None]:
    """Writes the program's log into the run directory, and its messages to stderr."""
    file = logging.FileHandler(path, encoding="utf-8")
    file.setFormatter(_WithoutSecrets("%(asctime)s %(levelname)s %(message)s"))
    log.addHandler(file)
    try:
        yield
    except KnockoutError as error:
        # The command line prints it too, so this writes only to the file.
        file.emit(log.makeRecord(log.name, logging.ERROR, "", 0, f"ended: {error}", (), None))
        raise
    finally:
        log.removeHandler(file)
        file.close()
