"""Pairs as forks of forks: which wait for the fork of a member, and what becomes of them.

A pair that leaves the baseline with one of its members is that member's fork up to the first step
at which the other member matters too. So the pair waits for the fork, which watches it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from knockout.engines.base import Completion
from knockout.ledger import INHERITED, ForkRow, Ledger
from knockout.method.interventions import Intervention
from knockout.sweep.jobs import Cell, Job
from knockout.sweep.owed import Plan

__all__ = ["Pairs", "Whole"]


class Whole(NamedTuple):
    """A pair that is its member's fork to the end.

    Attributes:
        pair: The pair.
        fork: The member's fork.
        tokens: Its whole trajectory, (n,).
    """

    pair: int
    fork: ForkRow
    tokens: NDArray[np.int32]


class Pairs:
    """The pairs of a plan.

    Args:
        plan: The sweep.
        ledger: With the forks of earlier sessions.
    """

    def __init__(self, plan: Plan, ledger: Ledger) -> None:
        self._plan, self._ledger = plan, ledger
        place = {c.name: n for n, c in enumerate(plan.candidates)}
        members = {
            n: tuple(place[name] for name in c.members if name in place)
            for n, c in enumerate(plan.candidates)
        }
        # Without forks nothing is shared.
        self._members = {n: m for n, m in members.items() if m and plan.strategy == "fork"}

    def watched(self, job: Job) -> tuple[Intervention, ...]:
        """What a fork watches: the pairs that wait for it."""
        pairs = job.cell.pairs.get(job.candidate, ())
        return tuple(self._plan.candidates[c].intervention for c in pairs)

    def ready(self, cell: Cell, forks: Sequence[int]) -> Iterator[Job | Whole]:
        """The forks of a cell that can start now; notes in the cell which pairs wait.

        Yields:
            A job for each fork that need not wait, and a pair's whole if an earlier session's fork
            already is the pair.
        """
        there, waiting = set(forks), set[int]()
        for c in forks:
            step, members = cell.steps[c], self._members.get(c, ())
            member = next((m for m in members if m in there and cell.steps[m] == step), None)
            if member is not None:
                cell.pairs[member] = (*cell.pairs.get(member, ()), c)
                waiting.add(c)
        alone = [c for c in forks if c not in waiting]
        later = {_pair(one): one for one in self._of_earlier_sessions(cell, alone)}
        for c in alone:
            yield later.get(c) or _of_the_baseline(cell, c)

    def _of_earlier_sessions(self, cell: Cell, forks: Sequence[int]) -> Iterator[Job | Whole]:
        """Continues pairs whose member's fork is in the ledger."""
        if not cell.written or self._members.keys().isdisjoint(forks):
            return
        for row in self._ledger.fork_rows(cell.key):
            for c in sorted(row.watched.keys() & set(forks)):
                tokens = np.concatenate([cell.tokens[: row.step], row.tokens])
                if row.watched[c] == INHERITED:
                    yield Whole(c, row, tokens)
                else:
                    yield _of_a_fork(cell, c, row.candidate, tokens, row.watched[c])

    def left(self, job: Job, done: Completion) -> list[Job]:
        """The pairs that leave a generated fork; notes in the cell where each does.

        If the fork failed, they leave the baseline.
        """
        cell, pairs = job.cell, job.cell.pairs.pop(job.candidate, ())
        if not pairs:
            return []
        if done.finish == "error" or done.changes is None:
            return [_of_the_baseline(cell, c) for c in pairs]
        steps = dict(zip(pairs, done.changes.tolist(), strict=True))
        cell.left[job.candidate] = steps
        return [
            _of_a_fork(cell, c, job.candidate, done.tokens, step)
            for c, step in steps.items()
            if step != INHERITED
        ]


def _pair(one: Job | Whole) -> int:
    return one.candidate if isinstance(one, Job) else one.pair


def _of_the_baseline(cell: Cell, candidate: int) -> Job:
    return Job(cell, "fork", candidate, int(cell.steps[candidate]))


def _of_a_fork(cell: Cell, pair: int, member: int, tokens: NDArray[np.int32], step: int) -> Job:
    return Job(cell, "fork", pair, int(cell.steps[pair]), parent=member, prefix=tokens[:step])
