"""What a sweep consists of, and what of it is not in the ledger yet."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from knockout.ledger import INHERITED, NOT_ASKED, CellKey, Ledger
from knockout.method.interventions import Intervention
from knockout.method.sampling import Sampling, cell_seed, mix64
from knockout.tokens.candidates import Candidate

__all__ = ["Owed", "Plan", "PlannedBenchmark", "PlannedProblem", "Round", "audit_mask", "owed"]


@dataclass(frozen=True, slots=True)
class PlannedProblem:
    """A problem as the engine gets it.

    Attributes:
        doc_id: The benchmark's own id, unique in it.
        prompt: Token ids.
        stop: Strings that end a trajectory.
        max_tokens: Longest trajectory, in tokens; below 1 if the prompt leaves no room.
        think_end: What closes the thinking; None if there is none.
        think_open: Whether the prompt itself opened the thinking.
        thinks: Whether stop strings count only after the thinking.
        think_ids: Token ids that close the thinking, if candidates act in a part of the text.
    """

    doc_id: str
    prompt: tuple[int, ...]
    stop: tuple[str, ...]
    max_tokens: int
    think_end: str | None = None
    think_open: bool = False
    thinks: bool = False
    think_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PlannedBenchmark:
    """A benchmark's problems, and how often and how each is sampled."""

    name: str
    n_seeds: int
    sampling: Sampling
    problems: tuple[PlannedProblem, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that decides which requests a sweep makes.

    Attributes:
        run_seed: Keys all randomness of the run.
        benchmarks: In the ledger's order.
        candidates: In the ledger's order.
        strategy: "fork", or "naive": every knockout from scratch.
        audit: Share of knockouts that are generated again from scratch.
    """

    run_seed: int
    benchmarks: tuple[PlannedBenchmark, ...]
    candidates: tuple[Candidate, ...]
    strategy: Literal["fork", "naive"] = "fork"
    audit: float = 0.0
    shard: tuple[int, int] = (1, 1)
    """Which part of the problems this process works on, and of how many: (2, 8) for every eighth
    from the second on."""
    asked: tuple[bool, ...] = ()
    """(C,) whether each candidate is asked for now; () for all."""
    ban_keys: NDArray[np.uint64] = field(init=False, repr=False, compare=False)
    """(C,) hash of each candidate's intervention, for `audit_mask`."""

    def __post_init__(self) -> None:
        keys = np.array([_hash(c.intervention) for c in self.candidates], dtype=np.uint64)
        object.__setattr__(self, "ban_keys", keys)
        if not self.asked:
            object.__setattr__(self, "asked", (True,) * len(self.candidates))

    def has(self, key: CellKey) -> bool:
        """Whether a cell of the ledger is asked for now."""
        benchmark = self.benchmarks[key.benchmark]
        return key.problem < len(benchmark.problems) and key.seed < benchmark.n_seeds

    def problem(self, key: CellKey) -> PlannedProblem:
        """The problem of a cell."""
        return self.benchmarks[key.benchmark].problems[key.problem]

    def in_shard(self, problem: int) -> bool:
        """Whether a problem is this process's."""
        part, parts = self.shard
        return problem % parts == part - 1

    def seed(self, key: CellKey) -> int:
        """What keys the noise of a cell; the same for its baseline and all of its knockouts."""
        benchmark = self.benchmarks[key.benchmark]
        return cell_seed(
            self.run_seed, benchmark.name, benchmark.problems[key.problem].doc_id, key.seed
        )

    def everything(self) -> Round:
        """All seeds of all problems for all candidates, in one round."""
        most = max(benchmark.n_seeds for benchmark in self.benchmarks)
        active = np.tile(np.array(self.asked, dtype=bool), (len(self.benchmarks), 1))
        active[[not benchmark.problems for benchmark in self.benchmarks]] = False
        return Round(range(most), active)


@dataclass(frozen=True, slots=True)
class Round:
    """Cells that may be worked on at once.

    Attributes:
        seeds: Repeats; a benchmark with fewer of them stops earlier.
        active: (B, C) bool, which candidates are knocked out on which benchmark. A benchmark
            without any is left out.
    """

    seeds: range
    active: NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Owed:
    """A cell with something left to do.

    Attributes:
        key: The cell.
        asked: (C,) bool, the candidates to knock out, if the whole cell is owed.
        steps: (C,) int32, if its baseline is in the ledger; else None.
        new: Candidates that came after the cell: where they diverge is not known yet.
        forks: Candidates whose fork is owed.
        audits: Candidates whose audit is owed and can start.
    """

    key: CellKey
    asked: NDArray[np.bool_]
    steps: NDArray[np.int32] | None = None
    new: tuple[int, ...] = ()
    forks: tuple[int, ...] = ()
    audits: tuple[int, ...] = ()


def owed(plan: Plan, ledger: Ledger, this: Round) -> Iterator[Owed]:
    """Yields what a round still needs; reads the ledger as it goes.

    First the cells with new candidates, forks or audits left. Then one cell of each problem that has
    none yet, those with the most room first. Then all other cells, the problems with the longest
    trajectories so far first: long work must not start when everything else has ended.
    """
    keys, steps = ledger.decided()
    unfinished = ledger.unfinished()
    failed = ledger.failed_forks()
    failed_cells = ledger.failed_cells()
    audited = ledger.audited() if plan.audit else set()
    asked = np.array(plan.asked, dtype=bool)
    for key, of_cell in zip(keys, steps, strict=True):
        if key.seed not in this.seeds or not plan.has(key) or not plan.in_shard(key.problem):
            continue
        diverging = set(np.flatnonzero((of_cell >= 0) & asked).tolist())
        have = unfinished.get(key, diverging) & diverging
        chosen = audit_mask(plan, key) & asked
        ready = set(np.flatnonzero(chosen & (of_cell == INHERITED)).tolist())
        ready |= {c for c in have - failed.get(key, set()) if chosen[c]}
        audits = tuple(sorted(c for c in ready if (key, c) not in audited))
        forks = tuple(sorted(diverging - have))
        fine = key not in failed_cells
        missing = this.active[key.benchmark] & (of_cell == NOT_ASKED) & fine
        new = tuple(np.flatnonzero(missing).tolist())
        if new or forks or audits:
            yield Owed(key, of_cell != NOT_ASKED, of_cell, new, forks, audits)
    there = set(keys)
    known = {(key.benchmark, key.problem) for key in keys}
    whole: dict[tuple[int, int], list[CellKey]] = {}
    for b, benchmark in enumerate(plan.benchmarks):
        if not this.active[b].any():
            continue
        for p in filter(plan.in_shard, range(len(benchmark.problems))):
            cells = (CellKey(b, p, s) for s in this.seeds if s < benchmark.n_seeds)
            if left := [cell for cell in cells if cell not in there]:
                whole[b, p] = left
    room = {at: float(plan.problem(cells[0]).max_tokens) for at, cells in whole.items()}
    for at in _longest_first((at for at in whole if at not in known), room):
        first = whole[at].pop(0)
        yield Owed(first, this.active[first.benchmark])
    # What is not in the ledger yet is still running, so it is long.
    lengths = dict.fromkeys(whole, np.inf) | ledger.mean_tokens()
    for at in _longest_first(whole, lengths):
        for key in whole[at]:
            yield Owed(key, this.active[key.benchmark])


def _longest_first(
    problems: Iterable[tuple[int, int]], lengths: Mapping[tuple[int, int], float]
) -> list[tuple[int, int]]:
    return sorted(problems, key=lambda at: (-lengths[at], at))


def audit_mask(plan: Plan, key: CellKey) -> NDArray[np.bool_]:
    """Which candidates of a cell are audited: (C,) bool, always the same.

    Decided by a hash of the cell's seed and the candidate's ids, so it depends neither on the
    order of work nor on which other candidates the run has. A failed knockout is not audited.
    """
    if plan.strategy == "naive" or plan.audit <= 0:
        return np.zeros(len(plan.candidates), dtype=bool)
    # One round of mixing joins the two hashes well enough for a share.
    z = (plan.ban_keys ^ np.uint64(plan.seed(key))).view(np.int64)
    uniform = mix64(torch.from_numpy(z)).numpy().view(np.uint64).astype(np.float64) / 2.0**64
    return np.asarray(uniform < plan.audit)


def _hash(intervention: Intervention) -> int:
    plain = ",".join(map(str, intervention.token_ids))
    text = (plain if intervention.is_plain_ban else intervention.digest).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
