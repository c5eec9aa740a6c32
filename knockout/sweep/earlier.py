"""What an earlier run tells of a sweep that is planned: its baselines, and its forks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from knockout.errors import UsageError
from knockout.ledger import NOT_ASKED, CellKey, Ledger, grade_cubes
from knockout.method.interventions import Intervention
from knockout.stats.paired import pair
from knockout.stats.power import seed_correlation
from knockout.sweep.cost import Cost, first_pick
from knockout.tokens.candidates import Candidate

if TYPE_CHECKING:
    from knockout.ledger.grades import GradeCube

__all__ = ["Baselines", "read_baselines"]


class Seen(NamedTuple):
    """Per cell: the share that forked, and tokens generated."""

    forks: float
    tokens: float


@dataclass(frozen=True, slots=True)
class Baselines:
    """Baselines of an earlier run, for one benchmark.

    Attributes:
        trajectories: Token ids of each.
        forks: What that run generated for each intervention, over its decided cells.
        pairs: What a pair of two of its candidates would have generated as a fork of a fork.
        right: (P,) right answers of the problems that have every seed.
        n_seeds: Seeds of those.
        correlation: Of a problem's differences on two seeds, over all knockouts of that run; None
            if none differs, or with one seed.
    """

    trajectories: list[NDArray[np.int32]]
    right: NDArray[np.int64]
    n_seeds: int
    correlation: float | None
    forks: dict[Intervention, Seen] = field(default_factory=dict)
    pairs: dict[frozenset[str], Seen] = field(default_factory=dict)

    def seen_cost(self, candidates: Sequence[Candidate], cost: Cost) -> Cost:
        """Replaces what was predicted of the candidates by what that run generated, if it had them."""
        forks, tokens = cost.forks.copy(), cost.tokens.copy()
        for n, one in enumerate(candidates):
            own = self.forks.get(one.intervention) or self.pairs.get(frozenset(one.members))
            if own is not None:
                forks[n], tokens[n] = own
        return replace(cost, forks=forks, tokens=tokens)


def read_baselines(directory: Path, candidates: Sequence[Candidate] = ()) -> dict[str, Baselines]:
    """Reads the baselines of a run directory, by benchmark, and what it tells of candidates' forks.

    Raises:
        UsageError: It has none.
    """
    found: dict[str, Baselines] = {}
    with Ledger.open(directory / "run.db") as ledger:
        keys, _ = ledger.decided()
        for b, cube in enumerate(grade_cubes(ledger)):
            # A race may have ended before its last seed.
            baseline = cube.baseline[:, (cube.baseline >= 0).any(axis=0)]
            whole = (baseline >= 0).all(axis=1)
            trajectories = [ledger.trajectory(key) for key in keys if key.benchmark == b]
            if trajectories and whole.any():
                right = baseline[whole].sum(axis=1).astype(np.int64)
                found[cube.benchmark] = Baselines(
                    trajectories, right, baseline.shape[1], _correlation(cube),
                    *_seen(ledger, b, candidates),
                )  # fmt: skip
    if not found:
        raise UsageError(f"{directory}: this run has no finished baselines to plan from")
    return found


def _correlation(cube: GradeCube) -> float | None:
    """Seed correlation of the knockouts that differ somewhere, weighted by how much they do."""
    if not cube.candidates:
        return None
    pairs = pair(cube.baseline, cube.knockout)
    weight = (pairs.won + pairs.lost).sum(axis=1).astype(float)
    if cube.baseline.shape[1] < 2 or not weight.any():
        return None
    return float(np.average(seed_correlation(pairs), weights=weight))


def _seen(
    ledger: Ledger, benchmark: int, candidates: Sequence[Candidate]
) -> tuple[dict[Intervention, Seen], dict[frozenset[str], Seen]]:
    """What a run generated for each of its candidates, and would have for pairs of them."""
    keys, decided = ledger.decided()
    owed = ledger.unfinished()
    rows = [n for n, key in enumerate(keys) if key.benchmark == benchmark and key not in owed]
    keys, decided = [keys[n] for n in rows], decided[rows]
    place = {c.intervention: n for n, c in enumerate(ledger.candidates)}
    of = {c.name: place[c.intervention] for c in candidates if c.intervention in place}
    singles = {}
    for c in of.values():
        if n := int((decided[:, c] != NOT_ASKED).sum()):
            forks = [
                f
                for f in ledger.forks(benchmark, c)
                if CellKey(benchmark, f.problem, f.seed) not in owed
            ]
            tokens = sum(f.n_tokens - f.step for f in forks)
            singles[ledger.candidates[c].intervention] = Seen(len(forks) / n, tokens / n)
    pairs = {
        c.members: (of[c.members[0]], of[c.members[1]])
        for c in candidates
        if c.members and of.keys() >= set(c.members)
    }
    found = _pairs(ledger, keys, decided, pairs) if pairs else {}
    return singles, found


def _pairs(
    ledger: Ledger,
    keys: Sequence[CellKey],
    decided: NDArray[np.int32],
    pairs: dict[tuple[str, ...], tuple[int, int]],
) -> dict[frozenset[str], Seen]:
    """Looks in each member's fork for the first token that the other member bans."""
    bans = [c.token_ids for c in ledger.candidates]
    totals = dict.fromkeys(pairs, (0, 0, 0))
    for key, steps in zip(keys, decided, strict=True):
        first: dict[int, tuple[int, NDArray[np.int64]]] = {}
        for names, (a, b) in pairs.items():
            if NOT_ASKED in (steps[a], steps[b]):
                continue
            n, forks, tokens = totals[names]
            leaving = [c for c in (a, b) if steps[c] >= 0]
            if leaving:
                member = min(leaving, key=lambda c: steps[c])
                if member not in first:
                    own = ledger.own_tokens(key, member).astype(np.int64)
                    first[member] = len(own), first_pick(own, bans)
                length, picks = first[member]
                forks, tokens = forks + 1, tokens + length - int(picks[b if member == a else a])
            totals[names] = n + 1, forks, tokens
    return {
        frozenset(names): Seen(forks / n, tokens / n)
        for names, (n, forks, tokens) in totals.items()
        if n
    }
