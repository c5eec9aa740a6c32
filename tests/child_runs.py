"""Whole runs of the word model in child processes that start fast, so that they can be killed."""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import sys
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

import pytest
import yaml
from words import word_model, word_task

__all__ = ["begin", "dump", "fork_server", "sweep_file"]

_PRELOADED = (
    "child_runs",
    "datasets",
    "knockout.cli",
    "knockout.engines.transformers",
    "knockout.grading.ifeval",
    "knockout.grading.pool",
    "knockout.sweep.results",
    "knockout.sweep.run",
    "knockout.verdicts.files",
    "lm_eval.api.task",
    "lm_eval.tasks",
    "transformers",
)
"""What a run imports, most of it where it is used."""


def sweep_file(folder: Path, n_problems: int = 24, **changes: Any) -> Path:
    """Writes model, task and sweep; returns the sweep's path."""
    word_model(folder / "model")
    word_task(folder, n_problems)
    content = {
        "model": "./model",
        "engine": {"kind": "transformers", "dtype": "float32", "max_num_seqs": 8},
        "benchmarks": ["words"],
        "include_path": ".",
        "seeds": 2,
        "sampling": {"temperature": 0.9, "top_k": 12, "top_p": 0.95, "max_tokens": 10},
        "candidates": {"strings": [f"w{i}" for i in range(1, 7)]},
        "audit": 0.1,
        **changes,
    }
    path = folder / "sweep.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def fork_server() -> ForkServerContext:
    """A context whose children have everything imported: a run starts in about a second."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(_PRELOADED))
    # Python 3.11 and 3.12 do not hand this process's path to the server before it preloads.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
        forkserver.ensure_running()
    # A module that cannot be imported is passed over in silence.
    check = f"import sys; sys.exit(not set({_PRELOADED}) <= set(sys.modules))"
    process = context.Process(target=exec, args=(check,))
    process.start()
    process.join()
    assert process.exitcode == 0, "the fork server did not preload what it was told to"
    return context


def begin(
    context: ForkServerContext, sweep: Path, out: Path, limit_bytes: int | None = None
) -> ForkServerProcess:
    """Starts a run, or goes on with it; what it says is added to `OUT.txt`."""
    process = context.Process(target=_run, args=(sweep, out, limit_bytes))
    process.start()
    return process


def _run(sweep: Path, out: Path, limit_bytes: int | None) -> None:
    from knockout import cli
    from knockout.sweep import scheduler

    # Small transactions, so that a kill meets the ledger in many states.
    scheduler._COMMIT_EVERY_ROWS = 4
    file = os.open(out.with_suffix(".txt"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    if limit_bytes is not None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes))
    sys.argv = ["knockout", "run", str(sweep), "--out", str(out)]
    try:
        cli.main()
    except KeyboardInterrupt:  # a signal as the command was ending; a process of its own ends so
        sys.exit(130)
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def dump(out: Path) -> dict[str, list[tuple[Any, ...]]]:
    """Every row that two runs of one sweep share."""
    from knockout.ledger import Ledger
    from knockout.ledger.schema import COMPARED_TABLES

    with Ledger.open(out / "run.db") as ledger:
        return {
            table: ledger.query(f"SELECT * FROM {table} ORDER BY 1, 2, 3, 4")
            for table in COMPARED_TABLES
        }
