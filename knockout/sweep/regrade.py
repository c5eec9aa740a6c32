"""Grading stored answers anew, after a grader changed; nothing is generated."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from knockout._version import __version__
from knockout.config.file import load_sweep
from knockout.errors import UsageError
from knockout.grading import Grade
from knockout.ledger import INHERITED, NOT_ASKED, CellKey, Ledger, RunLock
from knockout.sweep.prepare import Prepared, prepare
from knockout.tokens.eos import stop_ids
from knockout.tokens.thinking import response_text

__all__ = ["regrade_run"]

_OPEN = 256
_COMMIT_ROWS = 200

Place = tuple[CellKey, int | None]


def regrade_run(
    directory: Path, *, write: bool = True, told: Callable[[dict[str, Any]], None] | None = None
) -> dict[str, Any]:
    """Grades every stored trajectory of a run with the graders of this version.

    Args:
        directory: The run directory.
        write: Whether changed grades are written; else it is only said what would change.
        told: Called with each change: benchmark, doc_id, seed, candidate (None: the baseline),
            and correct, status and extracted before and after.

    Returns:
        `graded`, `changed`, and by benchmark and arm ("baseline", "knockout") how many went from
        wrong to right, right to wrong, gained, lost or only changed in `status` or `extracted`.

    Raises:
        UsageError: Somebody works on the run, it races, or its problems are not what they were.
    """
    sweep = load_sweep(directory / "config.yaml")
    if write and sweep.adaptive is not None:
        raise UsageError(
            f"{directory}: a race; what it asked follows from its grades, so changed ones would "
            "contradict it. See what would change with --dry-run"
        )
    prepared = prepare(sweep)
    with RunLock(directory), Ledger.open(directory / "run.db", write=True) as ledger:
        places = _check_problems(directory, ledger, prepared)
        found = _regrade(ledger, prepared, places, write, told)
        if write and found["changed"]:
            history = ledger.meta_json("regraded", [])
            when = datetime.now(UTC).isoformat(timespec="seconds")
            history.append({"when": when, "with": f"knockout-harness {__version__}", **found})
            ledger.note("regraded", json.dumps(history))
    return found


def _check_problems(
    directory: Path, ledger: Ledger, prepared: Prepared
) -> dict[int, tuple[int, dict[int, int]]]:
    """Where the ledger's benchmarks and problems are in the sweep; both by index."""
    names = [b.name for b in prepared.benchmarks]
    places = {}
    for b, row in enumerate(ledger.benchmarks):
        if row.name not in names:
            continue
        at = names.index(row.name)
        if prepared.benchmarks[at].metric != row.metric:
            raise UsageError(
                f"{directory}: the grade of {row.name} is {row.metric} in the run and "
                f"{prepared.benchmarks[at].metric} in config.yaml now"
            )
        planned = prepared.plan.benchmarks[at].problems
        index = {p.doc_id: n for n, p in enumerate(planned)}
        problems = {}
        for n, doc_id in enumerate(ledger.doc_ids(b)):
            stored = ledger.problem(b, n)
            assert stored is not None
            to = index.get(doc_id)
            if to is None:
                continue
            if tuple(stored.prompt_ids.tolist()) != tuple(planned[to].prompt):
                raise UsageError(
                    f"{directory}: problem {doc_id} of {row.name} has another prompt than in the "
                    "run; regrading wants the same data"
                )
            problems[n] = to
        places[b] = at, problems
    return places


def _regrade(
    ledger: Ledger,
    prepared: Prepared,
    places: dict[int, tuple[int, dict[int, int]]],
    write: bool,
    told: Callable[[dict[str, Any]], None] | None,
) -> dict[str, Any]:
    from knockout.grading.pool import GraderPool

    grading = prepared.sweep.grading
    pool = GraderPool(
        prepared.benchmarks,
        workers=grading.workers,
        timeout_s=grading.timeout_s,
        memory_mb=grading.memory_mb,
    )
    changes: dict[str, dict[str, dict[str, int]]] = {}
    waiting: dict[str, tuple[Place, tuple[int | None, str, str | None]]] = {}
    rows: list[tuple[CellKey, int | None, int | None, str, str | None]] = []
    n_graded = n_changed = 0

    def collect(most: int) -> None:
        nonlocal n_graded, n_changed, rows
        while len(waiting) > most:
            for name, grade in pool.poll():
                (key, candidate), before = waiting.pop(name)
                after = _stored(grade)
                n_graded += 1
                if before == after:
                    continue
                n_changed += 1
                benchmark = ledger.benchmarks[key.benchmark].name
                arm = "baseline" if candidate is None else "knockout"
                kind = _kind(before, after)
                counts = changes.setdefault(benchmark, {}).setdefault(arm, {})
                counts[kind] = counts.get(kind, 0) + 1
                rows.append((key, candidate, *after))
                if told is not None:
                    told(_record(ledger, key, candidate, before, after))
            if write and len(rows) >= _COMMIT_ROWS:
                ledger.regrade(rows)
                rows = []
            time.sleep(0.001)

    with closing(pool):
        for n, (place, text, finished, before) in enumerate(_answers(ledger, prepared, places)):
            at, problems = places[place[0].benchmark]
            waiting[str(n)] = place, before
            pool.submit(
                str(n), prepared.benchmarks[at].name, problems[place[0].problem], text, finished
            )
            collect(_OPEN)
        collect(0)
    if write and rows:
        ledger.regrade(rows)
    return {"graded": n_graded, "changed": n_changed, "changes": changes}


def _answers(
    ledger: Ledger, prepared: Prepared, places: dict[int, tuple[int, dict[int, int]]]
) -> Iterator[tuple[Place, str, bool, tuple[int | None, str, str | None]]]:
    """Every trajectory that is there, as it is graded, and its grade so far."""
    eos_ids = stop_ids(prepared.tokenizer, prepared.folder)
    for key, steps in zip(*ledger.decided(), strict=True):
        if key.benchmark not in places or key.problem not in places[key.benchmark][1]:
            continue
        at, problems = places[key.benchmark]
        problem = prepared.plan.benchmarks[at].problems[problems[key.problem]]
        forked = [c for c, step in enumerate(steps.tolist()) if step not in (INHERITED, NOT_ASKED)]
        for candidate in (None, *forked):
            outcome = ledger.outcome(key, -1 if candidate is None else candidate)
            if outcome is None or outcome.finish == "error":
                continue
            tokens = ledger.trajectory(key, candidate)
            text = response_text(
                prepared.tokenizer, tokens, stop=problem.stop, eos_ids=eos_ids,
                think_end=problem.think_end, opened=problem.think_open,
            )  # fmt: skip
            before = outcome.correct, outcome.grade, outcome.extracted
            yield (key, candidate), text, outcome.finish == "stop", before


def _stored(grade: Grade) -> tuple[int | None, str, str | None]:
    """A grade as the ledger has it: what could not be graded is missing, not wrong."""
    from knockout.ledger.codec import safe_text

    correct = None if grade.status in {"timeout", "error"} else int(grade.correct)
    return correct, grade.status, safe_text(grade.extracted)


def _kind(before: tuple[int | None, str, str | None], after: tuple[Any, ...]) -> str:
    was, now = before[0], after[0]
    if was == now:
        return "status or answer only"
    if was is None or now is None:
        return "gained" if was is None else "lost"
    return "wrong to right" if now else "right to wrong"


def _record(
    ledger: Ledger, key: CellKey, candidate: int | None, before: Any, after: Any
) -> dict[str, Any]:
    names = ("correct", "status", "extracted")
    return {
        "benchmark": ledger.benchmarks[key.benchmark].name,
        "doc_id": ledger.doc_ids(key.benchmark)[key.problem],
        "seed": key.seed,
        "candidate": None if candidate is None else ledger.candidates[candidate].name,
        "before": dict(zip(names, before, strict=True)),
        "after": dict(zip(names, after, strict=True)),
    }
