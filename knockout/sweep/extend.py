"""A run that grows: what makes its cells stays, what is asked of them may change.

A cell is made by model, tokenizer, prompt, sampling, number format, run seed and strategy. Seeds,
candidates, problems and benchmarks are asked: with more of them a run continues and uses everything
in its ledger; with fewer the rest stays in the ledger and out of the verdicts.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from knockout.benchmarks import Benchmark
from knockout.errors import UsageError, counted
from knockout.ledger import BenchmarkRow, Ledger, ProblemRow
from knockout.sweep.identity import differences, digest
from knockout.sweep.owed import Plan, PlannedBenchmark, PlannedProblem
from knockout.sweep.prepare import Prepared

__all__ = ["begin", "fit"]

log = logging.getLogger("knockout")

_SHOWN = 20


def begin(prepared: Prepared, path: Path, made_by: str) -> Ledger:
    """Makes the ledger of a new run."""
    n = len(prepared.benchmarks)
    return Ledger.create(
        path,
        {
            **_meta(prepared, list(range(n)), list(range(len(prepared.plan.candidates)))),
            "made_by": made_by,
            "special_ids": json.dumps(sorted(prepared.vocabulary.special_ids)),
        },
        prepared.plan.candidates,
        [_benchmark_row(prepared, b) for b in range(n)],
        [row for b in range(n) for row in _problem_rows(prepared, b, b, 0)],
    )


def fit(prepared: Prepared, ledger: Ledger, out: Path) -> Prepared:
    """Fits a sweep to the ledger of its run: the ledger is extended if the sweep asks for more.

    Returns:
        The sweep with a plan in the ledger's order, which also names what is not asked for now.

    Raises:
        UsageError: The sweep would change existing cells.
    """
    there = ledger.meta_json("identity", {})
    lines = differences(there, prepared.identity) + _changed_problems(prepared, ledger)
    grown = digest(there) != digest(prepared.identity)
    if grown and not lines and prepared.sweep.adaptive is not None:
        lines = _asked_differences(ledger, prepared)
        lines.append("a race decides by all that it asks, so nothing of that can change")
    if lines:
        shown = "".join(f"\n  {line}" for line in lines[:_SHOWN])
        rest = f"\n  and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
        raise UsageError(
            f"{out}: this run directory belongs to another sweep. What differs:{shown}{rest}\n"
            "Give another --out for it, or change the sweep file back. Seeds, candidates, problems "
            "(limit) and benchmarks of a run that does not race can change: it then continues with "
            "what it has"
        )
    names = [b.name for b in ledger.benchmarks]
    new = [n for n, b in enumerate(prepared.benchmarks) if b.name not in names]
    place = [
        names.index(b.name) if n not in new else len(names) + new.index(n)
        for n, b in enumerate(prepared.benchmarks)
    ]
    known = {c.intervention.digest: i for i, c in enumerate(ledger.candidates)}
    added = [c for c in prepared.plan.candidates if c.intervention.digest not in known]
    known |= {c.intervention.digest: len(known) + n for n, c in enumerate(added)}
    order = [known[c.intervention.digest] for c in prepared.plan.candidates]
    if grown or added or new:
        _extend(prepared, ledger, new, place, added, order)
    return replace(prepared, plan=_placed(prepared.plan, ledger, place, order))


def _extend(
    prepared: Prepared,
    ledger: Ledger,
    new: list[int],
    place: list[int],
    added: Sequence[Any],
    order: list[int],
) -> None:
    n_there = ledger.n_problems()
    replanned, problems = {}, []
    for n, at in enumerate(place):
        have = n_there.get(at, 0)
        problems += list(_problem_rows(prepared, n, at, have))
        if n not in new:
            replanned[at] = _benchmark_row(prepared, n)
    # A candidate may have another name or group now; a name may have gone to another candidate.
    renamed = {
        at: c
        for c, at in zip(prepared.plan.candidates, order, strict=True)
        if at < len(ledger.candidates) and ledger.candidates[at] != c
    }
    taken = {c.name for c in prepared.plan.candidates}
    for at, c in enumerate(ledger.candidates):
        if at not in order and c.name in taken:
            renamed[at] = replace(c, name=f"{c.name} ({c.intervention.digest})")
    ledger.extend(
        candidates=added,
        benchmarks=[_benchmark_row(prepared, n) for n in new],
        problems=problems,
        replanned=replanned,
        renamed=renamed,
        meta=_meta(prepared, place, order),
    )
    log.info(
        "the sweep asks for more or less than before: %d new candidates, %d new benchmarks, "
        "%d new problems; the run keeps what it has",
        len(added), len(new), len(problems),
    )  # fmt: skip


def _placed(plan: Plan, ledger: Ledger, place: list[int], order: list[int]) -> Plan:
    """The plan in the ledger's order; what is not asked for has no seeds and no problems."""
    benchmarks = [
        PlannedBenchmark(b.name, 0, plan.benchmarks[0].sampling, ()) for b in ledger.benchmarks
    ]
    for planned, at in zip(plan.benchmarks, place, strict=True):
        benchmarks[at] = planned
    asked = np.zeros(len(ledger.candidates), dtype=bool)
    asked[order] = True
    return replace(
        plan,
        benchmarks=tuple(benchmarks),
        candidates=ledger.candidates,
        asked=tuple(asked.tolist()),
    )


def _benchmark_row(prepared: Prepared, n: int) -> BenchmarkRow:
    b = prepared.benchmarks[n]
    return BenchmarkRow(b.name, b.metric, prepared.plan.benchmarks[n].n_seeds, b.fingerprint)


def _problem_rows(prepared: Prepared, n: int, at: int, have: int) -> Iterator[ProblemRow]:
    """The rows of a benchmark's problems from the given one on, for its place in the ledger."""
    problems = zip(
        prepared.benchmarks[n].problems, prepared.plan.benchmarks[n].problems, strict=True
    )
    # A grader of another package may not say what it expects.
    expected = getattr(prepared.benchmarks[n].grader, "expected", lambda index: "")
    for i, (problem, planned) in enumerate(problems):
        if i >= have:
            ids = np.array(planned.prompt, dtype=np.int32)
            yield ProblemRow(at, i, planned.doc_id, problem.prompt, ids, expected(i))


def _meta(prepared: Prepared, place: list[int], order: list[int]) -> dict[str, str]:
    """What the ledger notes of the sweep: its identity, what is asked, and what makes its cells."""
    planned = prepared.plan.benchmarks
    return {
        "identity": json.dumps(prepared.identity, sort_keys=True, default=str),
        "identity_hash": digest(prepared.identity),
        "asked": json.dumps(
            {
                "benchmarks": place,
                "problems": [len(b.problems) for b in planned],
                "candidates": order,
            }
        ),
        **{
            f"cells.{b.name}": json.dumps(
                {
                    "sampling": asdict(b.sampling),
                    "problems": [
                        [_cell_hash(p), _grade_hash(benchmark, n)] for n, p in enumerate(b.problems)
                    ],
                }
            )
            for benchmark, b in zip(prepared.benchmarks, planned, strict=True)
        },
    }


def _changed_problems(prepared: Prepared, ledger: Ledger) -> list[str]:
    """Names the shared problems that differ, in words, by benchmark and id."""
    lines = []
    names = [b.name for b in ledger.benchmarks]
    for benchmark, planned in zip(prepared.benchmarks, prepared.plan.benchmarks, strict=True):
        if benchmark.name not in names:
            continue
        at = names.index(benchmark.name)
        row = ledger.benchmarks[at]
        if row.metric != benchmark.metric:
            lines.append(f"metric of {row.name}: {row.metric} there, {benchmark.metric} here")
        made = ledger.meta_json(f"cells.{row.name}")
        n_there = ledger.n_problems().get(at, 0)
        others, regraded = [], []
        for n, problem in enumerate(planned.problems[:n_there]):
            stored = ledger.problem(at, n)
            assert stored is not None
            same = stored.doc_id == problem.doc_id
            same = same and stored.prompt_ids.tolist() == list(problem.prompt)
            if made is not None and n < len(made["problems"]):
                cell, grade = made["problems"][n]
                same = same and cell == _cell_hash(problem)
                if same and grade != _grade_hash(benchmark, n):
                    regraded.append(stored.doc_id)
            if not same:
                others.append(stored.doc_id)
        if others:
            lines.append(
                f"{row.name}: {len(others)} of its first {min(n_there, len(planned.problems))} "
                f"problems have another id, prompt, stop string or limit, first {others[0]!r}"
            )
        elif regraded:
            lines.append(
                f"{row.name}: {counted(len(regraded), 'problem')} with another document or metric, first "
                f"{regraded[0]!r}"
            )
        elif (
            made is None
            and n_there == len(planned.problems)
            and row.fingerprint != benchmark.fingerprint
        ):
            lines.append(f"{row.name}: its documents or its metric changed")
        if made is not None:
            was, now = made["sampling"], asdict(planned.sampling)
            lines += [
                f"sampling.{key} of {row.name}: {was.get(key)} there, {now[key]} here"
                for key in now
                if was.get(key) != now[key]
            ]
    return lines


def _asked_differences(ledger: Ledger, prepared: Prepared) -> list[str]:
    """What is asked for newly or no longer, in words."""
    lines = []
    mine = {b.name: b for b in prepared.plan.benchmarks}
    theirs = {b.name: b for b in ledger.benchmarks}
    for what, one, other in (("here", mine, theirs), ("there", theirs, mine)):
        lines += [f"benchmark {name}: only {what}" for name in one if name not in other]
    problems = ledger.n_problems()
    for at, row in enumerate(ledger.benchmarks):
        if (planned := mine.get(row.name)) is None:
            continue
        if planned.n_seeds != row.n_seeds:
            lines.append(f"seeds of {row.name}: {row.n_seeds} there, {planned.n_seeds} here")
        if len(planned.problems) != problems.get(at, 0):
            lines.append(
                f"problems of {row.name}: {problems.get(at, 0)} there, {len(planned.problems)} here"
            )
    here = {c.intervention.digest: c.name for c in prepared.plan.candidates}
    there = {c.intervention.digest: c.name for c in ledger.candidates}
    for what, some, others in (("here", here, there), ("there", there, here)):
        lines += [
            f"candidate {name}: only {what}" for key, name in some.items() if key not in others
        ]
    return lines


def _cell_hash(problem: PlannedProblem) -> str:
    return _hash([problem.doc_id, problem.prompt, problem.stop, problem.max_tokens])


def _grade_hash(benchmark: Benchmark, n: int) -> str:
    return _hash([benchmark.metric, benchmark.problems[n].doc])


def _hash(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=repr).encode("utf-8", "backslashreplace")
    return hashlib.blake2b(text, digest_size=8).hexdigest()
