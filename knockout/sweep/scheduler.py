"""The sweep's loop: baselines, then forks in the same running batch, grading in parallel."""

from __future__ import annotations

import json
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from knockout.engines.base import Completion, Engine, Request
from knockout.engines.checks import checked
from knockout.errors import KnockoutError
from knockout.grading import Grade
from knockout.ledger import (
    INHERITED,
    NO_ROOM,
    NOT_ASKED,
    AuditRow,
    CellKey,
    CellRow,
    ExtendedCell,
    ForkRow,
    Ledger,
)
from knockout.method.interventions import Intervention
from knockout.sweep.jobs import (
    NO_TOKENS,
    Cell,
    Divergences,
    Job,
    Snapshot,
    Standing,
    first_difference,
)
from knockout.sweep.owed import Owed, Plan, Round, audit_mask, owed
from knockout.sweep.pairs import Pairs, Whole
from knockout.tokens.thinking import response_text

__all__ = ["GradingPool", "Scheduler"]

log = logging.getLogger("knockout")

# Rows wait at most this long for their transaction: what a killed process can lose.
_COMMIT_EVERY_S = 2.0
_COMMIT_EVERY_ROWS = 256
# How soon a missing ledger is noticed although nothing is to be written.
_LOOK_EVERY_S = 1.0
# Requests queued in the engine beyond those it runs, so that a freed place is filled at once.
_LOOKAHEAD = 8
# Answers waiting for a grade; beyond them generation waits.
_MOST_GRADING = 4096


class GradingPool(Protocol):
    """Grades during generation; see `knockout.grading`."""

    @property
    def n_open(self) -> int:
        """Answers submitted and not yet returned."""

    def submit(
        self, key: str, benchmark: str, problem_index: int, response: str | None, finished: bool
    ) -> None:
        """Queues an answer."""

    def poll(self) -> list[tuple[str, Grade]]:
        """Returns the finished grades, without waiting."""


class Scheduler:
    """Does what a ledger still lacks.

    Args:
        plan: The sweep.
        ledger: Receives everything that finished.
        engine: What generates.
        grader: What grades.
        tokenizer: For the text that is graded.
        max_num_seqs: Requests that the engine runs at once.
        observe: Called in every turn of the loop.
    """

    def __init__(
        self,
        plan: Plan,
        ledger: Ledger,
        engine: Engine,
        grader: GradingPool,
        tokenizer: Any,
        max_num_seqs: int,
        observe: Callable[[Snapshot], None] = lambda _: None,
    ) -> None:
        self.plan, self.ledger, self.engine, self.grader = plan, ledger, engine, grader
        self.tokenizer = tokenizer
        self.most_open = max_num_seqs + _LOOKAHEAD
        self.observe = observe
        self.stopping = False
        self._todo: Iterator[Owed] = iter(())
        self._ready: deque[Job] = deque()
        self._running: dict[str, Job] = {}
        self._requests: dict[str, Request] = {}
        self._grading: dict[str, tuple[Job, Completion]] = {}
        self._cells: list[CellRow] = []
        self._forks: list[ForkRow] = []
        self._audits: list[AuditRow] = []
        self._extended: list[ExtendedCell] = []
        self._last_commit = self._looked = time.monotonic()
        self._n_cells = self._n_forks = self._tokens = 0
        self._standing = Standing([c.name for c in plan.candidates])
        # One tuple for all baselines, so that an engine reads it once.
        self._watch = tuple(c.intervention for c in plan.candidates)
        self._pairs = Pairs(plan, ledger)
        self._checks: dict[CellKey, tuple[int, int]] = {}
        self._ban_texts = [
            [tokenizer.decode([t]) for t in c.token_ids if t < len(tokenizer)]
            for c in plan.candidates
        ]

    def run(self, rounds: Iterable[Round]) -> bool:
        """Works through rounds; a round is planned when the one before it is in the ledger.

        Returns:
            True when all is done, False when `stop` ended it early.

        Raises:
            KnockoutError: The engine failed; what had finished is in the ledger.
        """
        self._n_cells, self._n_forks = self.ledger.n_cells(), self.ledger.n_forks()
        for pair in self.ledger.changed_grades():
            self._standing.count(*pair)
        for this in rounds:
            self._todo = owed(self.plan, self.ledger, this)
            while self._feed() or self._running or self._grading:
                for completion in self._step():
                    self._arrived(completion)
                self._collect_grades()
                self._commit_when_due()
                self.observe(self.snapshot())
                if self.stopping:
                    self._finish_grading()
                    return False
            self._commit()
        return True

    def stop(self) -> None:
        """Ends the run after the current step: what finished is graded and written."""
        self.stopping = True

    def snapshot(self) -> Snapshot:
        """How far it is."""
        return Snapshot(
            cells=self._n_cells,
            forks=self._n_forks,
            waiting=len(self._ready),
            running=len(self._running),
            grading=len(self._grading),
            tokens=self._tokens,
            leading=self._standing.leading(),
        )

    def _feed(self) -> bool:
        """Fills the engine: forks and audits first, while their prefix is cached, then baselines.

        Returns:
            Whether anything is left that has not been started.
        """
        while len(self._running) < self.most_open and len(self._grading) < _MOST_GRADING:
            if not self._ready and not self._start_next_cell():
                return False
            while self._ready and len(self._running) < self.most_open:
                self._submit(self._ready.popleft())
        return True

    def _start_next_cell(self) -> bool:
        """Makes the next owed cell's jobs ready; False when the round has no more."""
        while (item := next(self._todo, None)) is not None:
            cell = Cell(item.key, item.asked, audit_mask(self.plan, item.key))
            if item.steps is None:
                if self.plan.problem(item.key).max_tokens >= 1:
                    self._ready.append(Job(cell, "baseline"))
                    return True
                why = "the prompt leaves no room in engine.max_model_len"
                self._failed_cell(cell, why, grade=NO_ROOM)
                continue
            cell.tokens, cell.steps = self.ledger.trajectory(item.key), item.steps
            cell.written, cell.correct = True, self.ledger.cell_grade(item.key)
            if not self.ledger.has_early(item.key):
                cell.early = np.zeros(len(self.plan.candidates), dtype=bool)
            # An audit may be stored before its fork, whose grade it does not wait for.
            cell.audited[self.ledger.audits_of(item.key)] = False
            if not item.new:
                self._make_ready(cell, item)
                return True
            cell.owed = item
            cell.asked[list(item.new)] = True
            if self.plan.strategy == "fork":
                self._ready.append(Job(cell, "replay", reference=cell.tokens))
            else:
                self._place_new(cell, self._from_scratch())
            return True
        return False

    def _make_ready(self, cell: Cell, item: Owed) -> None:
        """Queues what is left of a cell whose steps are all known."""
        self._ready_forks(cell, item.forks)
        for c in item.audits:
            reference = self.ledger.trajectory(cell.key, c)
            self._ready.append(Job(cell, "audit", c, 0, reference))

    def _submit(self, job: Job) -> None:
        key, problem = job.cell.key, self.plan.problem(job.cell.key)
        sampling = self.plan.benchmarks[key.benchmark].sampling
        baseline = job.kind in ("baseline", "replay")
        own: Intervention | None = None
        watch = self._watch if baseline and self.plan.strategy == "fork" else ()
        if not baseline:
            own = self.plan.candidates[job.candidate].intervention
        if job.kind == "fork":
            watch = self._pairs.watched(job)
        request = Request(
            key=job.key,
            prompt=problem.prompt,
            prefix=tuple(job.shared.tolist()),
            seed=self.plan.seed(key),
            sampling=sampling,
            max_tokens=problem.max_tokens,
            intervention=own,
            stop=problem.stop,
            stop_after=(problem.think_end or "") if problem.thinks else "",
            watch=watch,
            think_end=problem.think_ids,
        )
        with self._engine_failures():
            self.engine.add(request)
        self._running[job.key], self._requests[job.key] = job, request

    def _step(self) -> list[Completion]:
        if not self._running:
            time.sleep(0.002)  # only grades are awaited
            return []
        with self._engine_failures():
            done = self.engine.step()
            if not done and not self.engine.n_open:
                raise RuntimeError(f"it lost {len(self._running)} requests")
            eos_ids = self.engine.info.eos_ids
            return [checked(self._requests.pop(c.key), c, eos_ids) for c in done]

    @contextmanager
    def _engine_failures(self) -> Iterator[None]:
        """Blames an exception on the engine, after writing what had finished before it."""
        try:
            yield
        except Exception as error:
            self._finish_grading()
            if isinstance(error, KnockoutError):
                raise
            raise KnockoutError(
                f"the engine failed: {type(error).__name__}: {error}. What had finished is in the "
                "ledger; the same command resumes from there"
            ) from error

    def _arrived(self, done: Completion) -> None:
        job = self._running.pop(done.key)
        self._tokens += done.n_generated
        if job.kind == "baseline":
            self._baseline(job, done)
        elif job.kind == "replay":
            self._replay(job, done)
        elif job.kind == "fork":
            self._fork(job, done)
        else:
            differs_at = (
                -1 if done.finish == "error" else first_difference(done.tokens, job.reference)
            )
            self._write(
                job.cell,
                AuditRow(
                    job.cell.key, job.candidate, differs_at, done.tokens, done.finish, done.error
                ),
            )

    def _baseline(self, job: Job, done: Completion) -> None:
        cell = job.cell
        if done.finish == "error":
            self._failed_cell(cell, done.error or "the engine gave no reason", done)
            return
        cell.tokens = done.tokens
        found = self._divergences(done)
        cell.early = found.early
        cell.steps = np.where(cell.asked, found.step, NOT_ASKED).astype(np.int32)
        self._knock_out(cell, cell.asked)
        self._submit_answer(job, done)

    def _replay(self, job: Job, done: Completion) -> None:
        """Places candidates that came after a cell: its baseline was decoded again for them."""
        cell = job.cell
        if done.finish == "error":
            log.warning("a baseline could not be decoded again: %s", done.error)
            return
        differs = first_difference(done.tokens, job.reference) >= 0
        self._count_replay(done.n_generated, differs)
        if differs:
            self._commit()
            self.ledger.forget_cell(cell.key)
            self._n_cells -= 1
            asked = cell.asked & np.array(self.plan.asked, dtype=bool)
            anew = Cell(cell.key, asked, audit_mask(self.plan, cell.key))
            self._baseline(Job(anew, "baseline"), done)
            return
        self._place_new(cell, self._divergences(done))

    def _place_new(self, cell: Cell, found: Divergences) -> None:
        item, new = cell.owed, np.zeros(len(cell.steps), dtype=bool)
        assert item is not None
        new[list(item.new)] = True
        cell.steps = np.where(new, found.step, cell.steps).astype(np.int32)
        if cell.early is not None:
            cell.early = np.where(new, found.early, cell.early)
        n_early = int((found.early & new & (cell.steps >= 0)).sum())
        self._extended.append(ExtendedCell(cell.key, cell.steps, n_early))
        self._knock_out(cell, new)
        self._make_ready(cell, item)

    def _knock_out(self, cell: Cell, which: NDArray[np.bool_]) -> None:
        """Makes the forks of some candidates ready, and the audits of those without one."""
        self._ready_forks(cell, np.flatnonzero((cell.steps >= 0) & which).tolist())
        for c in np.flatnonzero((cell.steps == INHERITED) & cell.audited & which).tolist():
            self._ready.append(Job(cell, "audit", c, 0, cell.tokens))

    def _ready_forks(self, cell: Cell, forks: Sequence[int]) -> None:
        for one in self._pairs.ready(cell, forks):
            if isinstance(one, Job):
                self._ready.append(one)
            else:
                self._inherit(cell, one)

    def _inherit(self, cell: Cell, whole: Whole) -> None:
        """Writes a pair that is its member's fork to the end."""
        row = replace(
            whole.fork, candidate=whole.pair, parent=whole.fork.candidate, shared=len(whole.tokens),
            watched={}, respelled=self._respelled(cell.key, whole.pair, whole.tokens),
        )  # fmt: skip
        self._write(cell, row)
        if cell.audited[whole.pair]:
            self._ready.append(Job(cell, "audit", whole.pair, 0, whole.tokens))

    def _from_scratch(self) -> Divergences:
        n = len(self._watch)
        return Divergences(np.zeros(n, dtype=np.int32), np.zeros(n, dtype=bool))

    def _divergences(self, done: Completion) -> Divergences:
        if self.plan.strategy == "naive":
            return self._from_scratch()
        assert done.changes is not None
        assert done.early is not None
        return Divergences(done.changes, done.early)

    def _fork(self, job: Job, done: Completion) -> None:
        self._ready.extend(self._pairs.left(job, done))
        if done.finish == "error":
            row = ForkRow(
                job.cell.key, job.candidate, job.step, done.tokens[job.step :],
                "error", None, "failed", None, done.error or "the engine gave no reason",
                parent=job.parent, shared=len(job.shared),
            )  # fmt: skip
            self._write(job.cell, row)
            return
        if job.cell.audited[job.candidate]:
            self._ready.append(Job(job.cell, "audit", job.candidate, 0, done.tokens))
        self._submit_answer(job, done)

    def _check_coupling(self, cell: Cell, fork: ForkRow) -> None:
        """A fork's first own token must be another than the baseline's, unless it is early."""
        if self.plan.strategy == "naive" or cell.early is None or cell.early[fork.candidate]:
            return
        if len(fork.tokens) and fork.finish != "error":
            same = bool(fork.tokens[0] == cell.tokens[fork.step])
            checked, errors = self._checks.get(cell.key, (0, 0))
            self._checks[cell.key] = (checked + 1, errors + same)

    def _submit_answer(self, job: Job, done: Completion) -> None:
        key = job.cell.key
        text = self._text(key, done.tokens)
        self._grading[job.key] = (job, done)
        name = self.plan.benchmarks[key.benchmark].name
        self.grader.submit(job.key, name, key.problem, text, done.finish == "stop")

    def _text(self, key: CellKey, tokens: NDArray[np.int32]) -> str:
        problem = self.plan.problem(key)
        return response_text(
            self.tokenizer, tokens, stop=problem.stop, eos_ids=self.engine.info.eos_ids,
            think_end=problem.think_end, opened=problem.think_open,
        )  # fmt: skip

    def _collect_grades(self) -> None:
        try:
            grades = self.grader.poll()
        except Exception:  # whatever it is, what had finished is kept
            self._commit()
            raise
        for key, grade in grades:
            self._graded(key, grade)

    def _graded(self, key: str, grade: Grade) -> None:
        job, done = self._grading.pop(key)
        cell = job.cell
        # An answer that could not be graded is missing, not wrong.
        correct = None if grade.status in {"timeout", "error"} else int(grade.correct)
        if job.kind == "fork":
            row = ForkRow(
                cell.key, job.candidate, job.step, done.tokens[job.step :], done.finish, correct,
                grade.status, grade.extracted, None, self._respelled(cell.key, job.candidate, done.tokens),
                parent=job.parent, shared=len(job.shared), watched=cell.left.pop(job.candidate, {}),
            )  # fmt: skip
            self._write(cell, row)
            for pair, step in row.watched.items():
                if step == INHERITED:
                    self._inherit(cell, Whole(pair, row, done.tokens))
            return
        assert cell.early is not None
        self._cells.append(
            CellRow(
                cell.key,
                self.plan.seed(cell.key),
                done.tokens,
                done.finish,
                correct,
                grade.status,
                grade.extracted,
                None,
                cell.steps,
                int((cell.early & (cell.steps >= 0)).sum()),
            )
        )
        self._n_cells += 1
        cell.correct, cell.written = correct, True
        for waiting in cell.rows:
            self._write(cell, waiting)
        cell.rows.clear()

    def _respelled(self, key: CellKey, candidate: int, tokens: NDArray[np.int32]) -> bool:
        """Whether the text's own encoding contains a banned id; its ids never do."""
        text = self._text(key, tokens)
        if not any(part in text for part in self._ban_texts[candidate]):
            return False
        again = self.tokenizer.encode(text, add_special_tokens=False)
        return not set(self.plan.candidates[candidate].token_ids).isdisjoint(again)

    def _failed_cell(
        self, cell: Cell, why: str, done: Completion | None = None, grade: str = "failed"
    ) -> None:
        tokens = NO_TOKENS if done is None else done.tokens
        steps = np.full(len(self.plan.candidates), NOT_ASKED, dtype=np.int32)
        seed = self.plan.seed(cell.key)
        self._cells.append(CellRow(cell.key, seed, tokens, "error", None, grade, None, why, steps))
        self._n_cells += 1

    def _count_replay(self, tokens: int, differs: bool) -> None:
        so_far = self.ledger.meta_json("replays", {})
        more = {"cells": 1, "tokens": tokens, "mismatches": int(differs)}
        record = {key: so_far.get(key, 0) + value for key, value in more.items()}
        self.ledger.note("replays", json.dumps(record))

    def _write(self, cell: Cell, row: ForkRow | AuditRow) -> None:
        """Puts a row into the next transaction, or after its cell's."""
        if not cell.written:
            cell.rows.append(row)
        elif isinstance(row, ForkRow):
            self._forks.append(row)
            self._n_forks += 1
            self._check_coupling(cell, row)
            self._standing.count(row.candidate, cell.correct, row.correct)
        else:
            self._audits.append(row)

    def _commit_when_due(self) -> None:
        n = len(self._cells) + len(self._extended) + len(self._forks) + len(self._audits)
        if n >= _COMMIT_EVERY_ROWS or time.monotonic() - self._last_commit >= _COMMIT_EVERY_S:
            self._commit()
        elif time.monotonic() - self._looked >= _LOOK_EVERY_S:
            self._looked = time.monotonic()
            self.ledger.in_place()

    def _commit(self) -> None:
        if self._cells or self._forks or self._audits or self._extended:
            self.ledger.commit(
                self._cells, self._forks, self._audits, self._extended, checks=self._checks
            )
            self._cells, self._forks, self._audits, self._extended = [], [], [], []
            self._checks = {}
        self._last_commit = time.monotonic()

    def _finish_grading(self) -> None:
        """Waits for the grades of what finished (each has a time limit) and writes it."""
        while self._grading and self.grader.n_open:
            self._collect_grades()
            time.sleep(0.002)
        self._commit()
