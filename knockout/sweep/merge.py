"""Joining runs of one identity: disjoint cells, candidates or seeds; overlaps must agree."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from knockout.errors import KnockoutError, UsageError
from knockout.files import write_text
from knockout.ledger import (
    NOT_ASKED,
    AuditRow,
    BenchmarkRow,
    CellKey,
    CellRow,
    ForkRow,
    Ledger,
    ProblemRow,
    RunLock,
)
from knockout.sweep.identity import digest
from knockout.sweep.weights import stored_fingerprint
from knockout.tokens.candidates import Candidate

__all__ = ["merge_runs"]

log = logging.getLogger("knockout")

# What a sweep asks for; everything else in an identity makes its cells.
_ASKED = ("candidates", "benchmarks", "benchmark_fingerprints", "seeds", "limit")
_SHOWN = 10
_ROWS = 500
# What a killed merge may leave; the next one removes it.
_LEFT_OVER = ("run.db.merging", "config.yaml", ".config.yaml.")


@dataclass(frozen=True, slots=True)
class _Source:
    """A run that is joined, and where its benchmarks, problems and candidates go."""

    folder: Path
    ledger: Ledger
    benchmarks: tuple[int, ...]
    problems: tuple[tuple[int, ...], ...]
    candidates: tuple[int, ...]

    def key(self, key: CellKey) -> CellKey:
        b = key.benchmark
        return CellKey(self.benchmarks[b], self.problems[b][key.problem], key.seed)


@dataclass(frozen=True, slots=True)
class _Joined:
    """What the runs ask for together."""

    candidates: list[Candidate]
    benchmarks: list[BenchmarkRow]
    problems: list[list[ProblemRow]]


def merge_runs(folders: Sequence[Path], out: Path) -> dict[str, int]:
    """Joins runs into a new one, which can be resumed, extended and judged as any other.

    Args:
        folders: Run directories, at least two; no process may be working on them.
        out: A new run directory. It is written whole or not at all.

    Returns:
        Counts: `runs`, `cells`, `forks`, `audits`, `shared` (cells that several runs have).

    Raises:
        UsageError: The runs differ in what makes their cells, or race, or the directory is taken.
        KnockoutError: They disagree about a trajectory or a grade; the message names which.
    """
    if len(folders) < 2 or len({f.resolve() for f in folders}) < len(folders):
        raise UsageError("merge: give at least two run directories, each once")
    if out.exists() and (
        not out.is_dir()
        or any(p.name != "run.lock" and not p.name.startswith(_LEFT_OVER) for p in out.iterdir())
    ):
        raise UsageError(f"{out}: found files there; give a new or empty folder")
    with ExitStack() as stack:
        ledgers = []
        for folder in folders:
            if who := RunLock(folder).holder():
                raise UsageError(f"{folder}: {who} is working on this run; wait for it or stop it")
            ledgers.append(stack.enter_context(Ledger.open(folder / "run.db")))
        _check_alike(folders, ledgers)
        joined, sources = _joined(folders, ledgers)
        out.mkdir(parents=True, exist_ok=True)
        with RunLock(out):
            counts = _write(joined, sources, out)
    return {"runs": len(folders), **counts}


def _check_alike(folders: Sequence[Path], ledgers: Sequence[Ledger]) -> None:
    identities = [ledger.meta_json("identity", {}) for ledger in ledgers]
    for folder, identity in zip(folders, identities, strict=True):
        if identity.get("adaptive") is not None:
            raise UsageError(
                f"{folder}: a race: what it asks depends on all of its grades, so it cannot be "
                "joined with another run"
            )
        keys = sorted((identities[0].keys() | identity.keys()) - set(_ASKED))
        lines = [
            f"{key}: {json.dumps(identities[0].get(key))[:80]} in {folders[0]}, "
            f"{json.dumps(identity.get(key))[:80]} in {folder}"
            for key in keys
            if identities[0].get(key) != identity.get(key)
        ]
        if lines:
            shown = "".join(f"\n  {line}" for line in lines[:_SHOWN])
            raise UsageError(f"merge: these runs cannot be joined. What differs:{shown}")
    prints = [stored_fingerprint(ledger) for ledger in ledgers]
    first = next((one for one in prints if one is not None), None)
    for folder, found in zip(folders, prints, strict=True):
        if first is not None and found is not None and not found.agrees(first):
            raise UsageError(
                f"merge: {folders[0]} and {folder} were made with different weights "
                f"(log-probabilities differ by {found.difference(first):.2g} in the median)"
            )


def _joined(folders: Sequence[Path], ledgers: Sequence[Ledger]) -> tuple[_Joined, list[_Source]]:
    """The union of what the runs ask for, in the order in which it is met."""
    joined = _Joined([], [], [])
    sources = []
    for folder, ledger in zip(folders, ledgers, strict=True):
        candidates = [_place(joined.candidates, c, folder) for c in ledger.candidates]
        benchmarks, problems = [], []
        for b, row in enumerate(ledger.benchmarks):
            at = next((i for i, o in enumerate(joined.benchmarks) if o.name == row.name), None)
            if at is None:
                at = len(joined.benchmarks)
                joined.benchmarks.append(row)
                joined.problems.append([])
            there = joined.benchmarks[at]
            _check_benchmark(there, row, ledger, ledgers, folder)
            joined.benchmarks[at] = replace(there, n_seeds=max(there.n_seeds, row.n_seeds))
            benchmarks.append(at)
            problems.append(_add_problems(joined, at, ledger, b, folder))
        sources.append(
            _Source(folder, ledger, tuple(benchmarks), tuple(problems), tuple(candidates))
        )
    return joined, sources


def _place(there: list[Candidate], candidate: Candidate, folder: Path) -> int:
    """Where a candidate goes: to the one with the same intervention, or to the end."""
    for i, other in enumerate(there):
        if other.intervention == candidate.intervention:
            return i
        if other.name == candidate.name:
            raise UsageError(
                f"merge: candidate {candidate.name} of {folder} is another intervention than the "
                "candidate of that name in a run before it"
            )
    there.append(candidate)
    return len(there) - 1


def _check_benchmark(
    there: BenchmarkRow, row: BenchmarkRow, ledger: Ledger, ledgers: Sequence[Ledger], folder: Path
) -> None:
    made = [one.meta_json(f"cells.{row.name}") for one in ledgers]
    first = next((one for one in made if one is not None), None)
    own = ledger.meta_json(f"cells.{row.name}")
    if there.metric != row.metric:
        raise UsageError(
            f"merge: the grade of {row.name} is {there.metric} in one run and {row.metric} in {folder}"
        )
    if own is not None and first is not None and own["sampling"] != first["sampling"]:
        raise UsageError(
            f"merge: sampling of {row.name} is {first['sampling']} in one run and "
            f"{own['sampling']} in {folder}"
        )


def _add_problems(
    joined: _Joined, at: int, ledger: Ledger, b: int, folder: Path
) -> tuple[int, ...]:
    rows = joined.problems[at]
    known = {row.doc_id: n for n, row in enumerate(rows)}
    placed = []
    for n, doc_id in enumerate(ledger.doc_ids(b)):
        stored = ledger.problem(b, n)
        assert stored is not None
        if doc_id not in known:
            known[doc_id] = len(rows)
            rows.append(
                ProblemRow(at, len(rows), doc_id, stored.prompt, stored.prompt_ids, stored.gold)
            )
        elif not np.array_equal(rows[known[doc_id]].prompt_ids, stored.prompt_ids):
            raise UsageError(
                f"merge: problem {doc_id} of {joined.benchmarks[at].name} has another prompt in "
                f"{folder} than in a run before it"
            )
        placed.append(known[doc_id])
    return tuple(placed)


def _write(joined: _Joined, sources: Sequence[_Source], out: Path) -> dict[str, int]:
    merging = out / "run.db.merging"
    for path in out.iterdir():
        if path.name.startswith(_LEFT_OVER):
            path.unlink()
    problems = (row for rows in joined.problems for row in rows)
    try:
        with Ledger.create(
            merging, _meta(joined, sources), joined.candidates, joined.benchmarks, problems
        ) as ledger:
            counts = _fill(ledger, joined, sources)
            for source in sources:
                ledger.copy_sessions(source.ledger)
        config = sources[0].folder / "config.yaml"
        write_text(out / "config.yaml", config.read_text(encoding="utf-8"))
        os.replace(merging, out / "run.db")
    finally:
        merging.unlink(missing_ok=True)
    if any(len(source.candidates) < len(joined.candidates) for source in sources):
        log.warning(
            "%s/config.yaml is that of %s; to continue this run, give a sweep file that asks for "
            "all candidates", out, sources[0].folder
        )  # fmt: skip
    return counts


def _meta(joined: _Joined, sources: Sequence[_Source]) -> dict[str, str]:
    """The first run's settings, with what all of them ask for."""
    meta = dict(sources[0].ledger.meta())
    identities = [source.ledger.meta_json("identity", {}) for source in sources]
    if any(identity != identities[0] for identity in identities):
        identity = dict(identities[0])
        listed: list[Any] = []
        for one in identities:
            listed += [entry for entry in one["candidates"] if entry not in listed]
        identity["candidates"] = listed
        identity["benchmark_fingerprints"] = {b.name: b.fingerprint for b in joined.benchmarks}
        meta["identity"] = json.dumps(identity, sort_keys=True)
        meta["identity_hash"] = digest(identity)
    if any(source.ledger.meta().get("asked") for source in sources):
        meta["asked"] = json.dumps(_asked(joined, sources))
    for at, row in enumerate(joined.benchmarks):
        key = f"cells.{row.name}"
        of_problem: dict[int, Any] = {}
        sampling = None
        for source in sources:
            made = source.ledger.meta_json(key)
            if made is None or at not in source.benchmarks:
                continue
            sampling = made["sampling"]
            b = source.benchmarks.index(at)
            for n, hashes in zip(source.problems[b], made["problems"], strict=False):
                if of_problem.setdefault(n, hashes) != hashes:
                    raise UsageError(
                        f"merge: problem {joined.problems[at][n].doc_id} of {row.name} has another "
                        f"document, stop string or limit in {source.folder}"
                    )
        if sampling is not None and len(of_problem) == len(joined.problems[at]):
            made_of = {
                "sampling": sampling,
                "problems": [of_problem[n] for n in sorted(of_problem)],
            }
            meta[key] = json.dumps(made_of)
    if "weights" not in meta:
        found = (source.ledger.meta().get("weights") for source in sources)
        if (text := next(filter(None, found), None)) is not None:
            meta["weights"] = text
    return meta


def _asked(joined: _Joined, sources: Sequence[_Source]) -> dict[str, list[int]]:
    """What the runs ask for now, in their order; cells beyond that stay out of the verdicts."""
    candidates: dict[int, None] = {}
    problems: dict[int, int] = {}
    for source in sources:
        asked = source.ledger.asked()
        candidates |= dict.fromkeys(source.candidates[c] for c in asked.candidates)
        for b, n in zip(asked.benchmarks, asked.problems, strict=True):
            at, placed = source.benchmarks[b], source.problems[b][:n]
            # If a run's first n are not the first n here, no prefix contains them: all are asked.
            n = n if placed == tuple(range(n)) else len(joined.problems[at])
            problems[at] = max(problems.get(at, 0), n)
    of, sizes = list(problems), list(problems.values())
    return {"benchmarks": of, "problems": sizes, "candidates": list(candidates)}


def _fill(ledger: Ledger, joined: _Joined, sources: Sequence[_Source]) -> dict[str, int]:
    """Copies cells with everything that belongs to them, cell by cell."""
    places: dict[CellKey, list[tuple[_Source, CellKey]]] = {}
    for source in sources:
        for key in source.ledger.decided()[0]:
            places.setdefault(source.key(key), []).append((source, key))
    counts = {"cells": 0, "forks": 0, "audits": 0, "shared": 0}
    conflicts: list[str] = []
    cells: list[CellRow] = []
    forks: list[ForkRow] = []
    audits: list[AuditRow] = []
    for key in sorted(places):
        cell, own_forks, own_audits = _cell(key, places[key], joined, conflicts)
        counts["cells"] += 1
        counts["forks"] += len(own_forks)
        counts["audits"] += len(own_audits)
        counts["shared"] += len(places[key]) > 1
        cells.append(cell)
        forks += own_forks
        audits += own_audits
        if len(cells) + len(forks) >= _ROWS:
            ledger.commit(cells, forks, audits)
            cells, forks, audits = [], [], []
        if len(conflicts) >= _SHOWN:
            break
    ledger.commit(cells, forks, audits)
    if conflicts:
        shown = "".join(f"\n  {line}" for line in conflicts[:_SHOWN])
        raise KnockoutError(f"merge: the runs disagree about what both of them have:{shown}")
    return counts


def _cell(
    key: CellKey, places: list[tuple[_Source, CellKey]], joined: _Joined, conflicts: list[str]
) -> tuple[CellRow, list[ForkRow], list[AuditRow]]:
    cells = [_moved_cell(source, at, key, len(joined.candidates)) for source, at in places]
    whole = [cell for cell in cells if cell.finish != "error"] or cells[:1]
    cell = whole[0]
    where = _shown(key, joined)
    for other in whole[1:]:
        if what := _difference(cell, other):
            conflicts.append(f"{where}, baseline: {what}")
        both = (cell.steps != NOT_ASKED) & (other.steps != NOT_ASKED)
        conflicts += [
            f"{where}, {joined.candidates[c].name}: divergence step"
            for c in np.flatnonzero(both & (cell.steps != other.steps)).tolist()
        ]
        new = (cell.steps == NOT_ASKED) & (other.steps != NOT_ASKED)
        if new.any():
            cell = replace(
                cell,
                steps=np.where(new, other.steps, cell.steps),
                n_early=cell.n_early + other.n_early,
            )
    forks: dict[int, ForkRow] = {}
    audits: dict[int, AuditRow] = {}
    for source, at in places:
        for fork in _moved_forks(source, at, key):
            there = forks.get(fork.candidate)
            if there is None or there.finish == "error":
                forks[fork.candidate] = fork
            elif fork.finish != "error" and (what := _difference(there, fork)):
                name = joined.candidates[fork.candidate].name
                conflicts.append(f"{where}, {name}: {what}")
        for audit in source.ledger.audit_rows(at):
            moved = replace(audit, key=key, candidate=source.candidates[audit.candidate])
            if audits.setdefault(moved.candidate, moved).finish == "error":
                audits[moved.candidate] = moved
    return cell, list(forks.values()), list(audits.values())


def _moved_cell(source: _Source, at: CellKey, key: CellKey, n_candidates: int) -> CellRow:
    row = source.ledger.cell_row(at)
    steps = np.full(n_candidates, NOT_ASKED, dtype=np.int32)
    steps[list(source.candidates)] = row.steps
    return replace(row, key=key, steps=steps)


def _moved_forks(source: _Source, at: CellKey, key: CellKey) -> Iterator[ForkRow]:
    to = source.candidates
    for row in source.ledger.fork_rows(at):
        yield replace(
            row,
            key=key,
            candidate=to[row.candidate],
            parent=to[row.parent] if row.parent >= 0 else -1,
            watched={to[c]: step for c, step in row.watched.items()},
        )


def _difference(one: CellRow | ForkRow, other: CellRow | ForkRow) -> str | None:
    if not np.array_equal(one.tokens, other.tokens) or one.finish != other.finish:
        return "another trajectory"
    if one.correct != other.correct and None not in (one.correct, other.correct):
        return (
            f"grade {one.correct} and {other.correct} of the same trajectory (`knockout regrade`)"
        )
    return None


def _shown(key: CellKey, joined: _Joined) -> str:
    b = joined.benchmarks[key.benchmark].name
    doc_id = joined.problems[key.benchmark][key.problem].doc_id
    return f"{b}, problem {doc_id}, seed {key.seed}"
