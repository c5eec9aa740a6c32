"""A whole run: what a sweep file stands for, its directory, its engine, its results."""

from __future__ import annotations

import json
import logging
import os
import platform
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from knockout._version import __version__
from knockout.benchmarks import Benchmark, Chat, encode_prompt, load_benchmark
from knockout.candidates import Resolved, Vocabulary, resolve
from knockout.config import DEFAULT_MAX_TOKENS, BenchmarkSettings, Sweep
from knockout.engines.base import Engine
from knockout.engines.models import resolve_model
from knockout.engines.open import choose_kind, open_engine
from knockout.errors import KnockoutError, UsageError
from knockout.files import write_text
from knockout.identity import (
    differences,
    digest,
    identity,
    model_fingerprint,
    tokenizer_fingerprint,
)
from knockout.owed import Plan, PlannedBenchmark, PlannedProblem, Round, owed
from knockout.progress import Display
from knockout.sampling import Sampling
from knockout.scheduler import Scheduler
from knockout.store import BenchmarkRow, Ledger, ProblemRow, RunLock, totals
from knockout.summary import summarise
from knockout.sweepfile import dump_sweep
from knockout.vocabulary import open_vocabulary

__all__ = ["Interrupted", "Prepared", "prepare", "run_sweep", "start_engine"]

log = logging.getLogger("knockout")

_OURS = {
    "run.lock",
    "run.log",
    "run.db",
    "run.db-wal",
    "run.db-shm",
    "run.db-journal",
    "config.yaml",
}


class Interrupted(KnockoutError):
    """The user stopped the run; what had finished is in the ledger."""

    exit_code = 130


@dataclass(frozen=True, slots=True)
class Prepared:
    """A sweep with everything looked up that does not need an engine.

    Attributes:
        sweep: The sweep.
        folder: The model's checkpoint.
        tokenizer: Its tokenizer.
        vocabulary: Its ids.
        chat: How prompts were made.
        benchmarks: Loaded, groups expanded.
        resolved: Candidates and warnings.
        plan: What is to be generated.
        identity: What the run is.
        warnings: What the user should know before it starts.
    """

    sweep: Sweep
    folder: Path
    tokenizer: Any
    vocabulary: Vocabulary
    chat: Chat
    benchmarks: tuple[Benchmark, ...]
    resolved: Resolved
    plan: Plan
    identity: dict[str, Any]
    warnings: tuple[str, ...]


def prepare(sweep: Sweep) -> Prepared:
    """Looks up model, candidates and benchmarks; the engine is not started.

    Raises:
        UsageError, KnockoutError: Something the sweep names is not there or does not fit.
    """
    folder, tokenizer, vocabulary = open_vocabulary(
        sweep.model, revision=sweep.revision, trust_remote_code=sweep.trust_remote_code
    )
    resolved = resolve(sweep.candidates, vocabulary)
    chat = Chat(
        template=bool(tokenizer.chat_template)
        if sweep.chat.template is None
        else sweep.chat.template,
        system=sweep.chat.system,
        args=dict(sweep.chat.args),
        think_end=sweep.chat.think_end,
    )
    if chat.template and not tokenizer.chat_template:
        raise UsageError(
            f"chat.template is true, but the tokenizer of {sweep.model!r} has no chat template; "
            "set it to false"
        )
    longest = _max_model_len(sweep, folder)
    benchmarks: list[Benchmark] = []
    planned: list[PlannedBenchmark] = []
    warnings = list(resolved.warnings)
    for entry in sweep.benchmarks:
        settings = sweep.settings(entry)
        for benchmark in load_benchmark(
            settings.name,
            data_dir=settings.data_dir,
            include_path=sweep.include_path,
            limit=settings.limit,
            metric=settings.metric,
            num_fewshot=settings.num_fewshot,
            chat=chat,
            tokenizer=tokenizer,
        ):
            if benchmark.name in {other.name for other in benchmarks}:
                raise UsageError(
                    f"benchmarks: {benchmark.name} is there twice, once inside a group"
                )
            benchmarks.append(benchmark)
            planned.append(_plan(benchmark, settings, chat, tokenizer, longest))
            warnings += _short_of_room(planned[-1], settings, benchmark)
    plan = Plan(
        run_seed=sweep.run_seed,
        benchmarks=tuple(planned),
        candidates=resolved.candidates,
        strategy=sweep.strategy,
        audit=sweep.audit,
    )
    record = identity(
        sweep,
        model=model_fingerprint(folder),
        tokenizer=tokenizer_fingerprint(tokenizer),
        benchmarks=[(b.name, b.fingerprint) for b in benchmarks],
        candidates=resolved.candidates,
    )
    record["engine"]["kind"] = choose_kind(sweep.engine.kind)
    return Prepared(
        sweep, folder, tokenizer, vocabulary, chat, tuple(benchmarks), resolved, plan, record,
        tuple(warnings),
    )  # fmt: skip


def _plan(
    benchmark: Benchmark, settings: BenchmarkSettings, chat: Chat, tokenizer: Any, longest: int
) -> PlannedBenchmark:
    s = settings.sampling
    problems = []
    for problem in benchmark.problems:
        prompt = encode_prompt(tokenizer, problem, chat)
        wanted = s.max_tokens or problem.max_tokens or DEFAULT_MAX_TOKENS
        room = min(wanted, longest - len(prompt))
        problems.append(PlannedProblem(problem.doc_id, tuple(prompt), tuple(problem.stop), room))
    sampling = Sampling(s.temperature, s.top_p, s.top_k, s.min_p)
    return PlannedBenchmark(benchmark.name, settings.seeds, sampling, tuple(problems))


def _short_of_room(
    planned: PlannedBenchmark, settings: BenchmarkSettings, benchmark: Benchmark
) -> list[str]:
    """Says where prompt and max_tokens together are longer than the engine allows."""
    wanted = settings.sampling.max_tokens
    short = [
        p.max_tokens
        for p, problem in zip(planned.problems, benchmark.problems, strict=True)
        if p.max_tokens < (wanted or problem.max_tokens or DEFAULT_MAX_TOKENS)
    ]
    if not short:
        return []
    return [
        f"{planned.name}: {len(short)} of {len(planned.problems)} prompts leave fewer than "
        f"max_tokens tokens in engine.max_model_len (at least {max(min(short), 0)})"
    ]


def _max_model_len(sweep: Sweep, folder: Path) -> int:
    """Longest prompt plus trajectory, in tokens, as the sweep and the checkpoint allow."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder, trust_remote_code=sweep.trust_remote_code)
    own = getattr(config.get_text_config(), "max_position_embeddings", None)
    limits = [n for n in (sweep.engine.max_model_len, own) if n]
    if not limits:
        raise UsageError(
            f"the model {sweep.model!r} names no length limit; set engine.max_model_len"
        )
    if len(limits) == 2 and limits[0] > limits[1]:
        raise UsageError(
            f"engine.max_model_len is {limits[0]}, but {sweep.model!r} allows {limits[1]}"
        )
    return int(min(limits))


def start_engine(sweep: Sweep) -> Engine:
    """Starts the sweep's engine."""
    settings = sweep.engine.model_dump()
    settings["options"] = settings["options"] or None
    folder = resolve_model(sweep.model, revision=sweep.revision)
    return open_engine(folder, trust_remote_code=sweep.trust_remote_code, **settings)


def run_sweep(sweep: Sweep, out: Path, *, retry_failed: bool = False, again: str = "") -> None:
    """Runs a sweep, or goes on with it, and writes its results.

    Args:
        sweep: The sweep.
        out: The run directory; made where it is missing.
        retry_failed: Whether what the engine failed on is tried again.
        again: The command that goes on with the run, for messages.

    Raises:
        UsageError: The directory belongs to another sweep, or another process works on it.
        KnockoutError: The run failed; what had finished is in the ledger.
        Interrupted: The user stopped it.
    """
    if sweep.adaptive is not None:
        raise UsageError("adaptive: this version runs a fixed number of seeds; leave the key out")
    _check_directory(out)
    prepared = prepare(sweep)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{out}: cannot be made: {error.strerror}") from None
    with RunLock(out), _logging_to(out / "run.log"), _open_ledger(prepared, out) as ledger:
        write_text(out / "config.yaml", dump_sweep(sweep))
        for warning in prepared.warnings:
            log.warning(warning)
        if retry_failed and (n := ledger.forget_failures()):
            log.info("trying %d failed trajectories again", n)
        rounds = [prepared.plan.everything()]
        finished = _work(prepared, ledger, rounds)
        state = totals(ledger)
        summary = summarise(ledger, sweep)
        write_text(out / "summary.json", json.dumps(summary, indent=2, ensure_ascii=False) + "\n")
        if not finished:
            raise Interrupted(
                f"stopped with {state.cells} of {state.planned_cells} cells in {out / 'run.db'}; "
                f"go on with: {again or 'the same command'}"
            )
        _write_verdicts(ledger, sweep, out)
        for warning in summary["warnings"]:
            log.warning(warning)


def _work(prepared: Prepared, ledger: Ledger, rounds: Sequence[Round]) -> bool:
    """Does what is owed; starts no engine where nothing is. Returns whether it came to the end."""
    if not any(next(owed(prepared.plan, ledger, this), None) for this in rounds):
        log.info("nothing is left to generate")
        return True
    from knockout.grading.pool import GraderPool

    sweep, started = prepared.sweep, time.monotonic()
    session = ledger.add_session(
        datetime.now(UTC).isoformat(timespec="seconds"), socket.gethostname(), os.getpid()
    )
    engine = start_engine(sweep)
    try:
        _check_engine(engine, prepared)
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
            Display(state.planned_cells, state.cells) as display,
        ):
            scheduler = Scheduler(
                prepared.plan, ledger, engine, grader, prepared.tokenizer,
                sweep.engine.max_num_seqs, display.observe,
            )  # fmt: skip
            with _stop_on_signal(scheduler):
                return scheduler.run(rounds)
    finally:
        ledger.set_wall(session, time.monotonic() - started)
        engine.close()


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
            f"the engine holds {engine.info.max_model_len} tokens, the longest prompt with its "
            f"trajectory needs {longest}; set engine.max_model_len, or lower sampling.max_tokens"
        )


def _session_record(engine: Engine, sweep: Sweep) -> dict[str, Any]:
    return {
        "knockout": __version__,
        "python": platform.python_version(),
        "engine": asdict(engine.info),
        "sweep": sweep.model_dump(mode="json"),
    }


def _check_directory(out: Path) -> None:
    if out.exists() and not out.is_dir():
        raise UsageError(f"{out}: found a file; expected a folder for the run, or none yet")
    if out.is_dir() and not (out / "run.db").is_file():
        others = sorted(p.name for p in out.iterdir() if p.name not in _OURS)
        if others:
            raise UsageError(
                f"{out}: the folder is not empty (it holds {others[0]}) and holds no run; "
                "give another --out"
            )


def _open_ledger(prepared: Prepared, out: Path) -> Ledger:
    path = out / "run.db"
    if not Ledger.is_begun(path):
        log.info("new run in %s", out)
        return _create_ledger(prepared, path)
    ledger = Ledger.open(path, write=True)
    there = json.loads(ledger.meta()["identity"])
    different = differences(there, prepared.identity)
    if different:
        ledger.close()
        shown = "".join(f"\n  {line}" for line in different[:20])
        rest = f"\n  and {len(different) - 20} more" if len(different) > 20 else ""
        raise UsageError(
            f"{out}: this run directory belongs to another sweep. What differs:{shown}{rest}\n"
            "Give another --out, change the sweep file back, or delete the directory"
        )
    log.info("going on with the run in %s", out)
    return ledger


def _create_ledger(prepared: Prepared, path: Path) -> Ledger:
    plan = prepared.plan
    special = sorted(prepared.vocabulary.special_ids)
    return Ledger.create(
        path,
        {
            "identity": json.dumps(prepared.identity, sort_keys=True, default=str),
            "identity_hash": digest(prepared.identity),
            "made_by": f"knockout-harness {__version__}",
            "special_ids": json.dumps(special),
        },
        prepared.resolved.candidates,
        [
            BenchmarkRow(b.name, b.metric, p.n_seeds, b.fingerprint)
            for b, p in zip(prepared.benchmarks, plan.benchmarks, strict=True)
        ],
        [
            ProblemRow(
                b, n, planned.doc_id, problem.prompt, np.array(planned.prompt, dtype=np.int32)
            )
            for b, (benchmark, of) in enumerate(
                zip(prepared.benchmarks, plan.benchmarks, strict=True)
            )
            for n, (problem, planned) in enumerate(
                zip(benchmark.problems, of.problems, strict=True)
            )
        ],
    )


def _write_verdicts(ledger: Ledger, sweep: Sweep, out: Path) -> None:
    from knockout.results import verdict_table
    from knockout.verdicts import write_verdicts

    frame = verdict_table(ledger, sweep.verdict)
    write_verdicts(frame, out / "verdicts.csv", out / "verdicts.json")


@contextmanager
def _stop_on_signal(scheduler: Scheduler) -> Iterator[None]:
    """The first Ctrl-C (or SIGTERM) ends the run cleanly, the second at once."""

    def stop(number: int, _: object) -> None:
        if scheduler.stopping:
            raise KeyboardInterrupt
        log.warning("stopping after this step; once more stops at once")
        scheduler.stop()

    before = {n: signal.signal(n, stop) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _logging_to(path: Path) -> Iterator[None]:
    """Writes the program's log into the run directory, and its messages to stderr."""
    file = logging.FileHandler(path, encoding="utf-8")
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log.addHandler(file)
    try:
        yield
    except KnockoutError as error:
        # The command line prints it too, so it goes to the file alone.
        file.emit(log.makeRecord(log.name, logging.ERROR, "", 0, f"ended: {error}", (), None))
        raise
    finally:
        log.removeHandler(file)
        file.close()
