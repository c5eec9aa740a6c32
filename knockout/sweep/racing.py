"""Racing: rounds of seeds, after each of which settled candidates drop out.

What is settled depends on the ledger's grades alone, so an interrupted run decides the same as an
uninterrupted one. Only the stop by a budget of hours depends on the clock; it never looks at a
grade, so it is a stopping time like any other, and it is recorded.
"""

from __future__ import annotations

import json
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from knockout.config.sweep import Adaptive, VerdictRule
from knockout.errors import KnockoutError, counted
from knockout.ledger import Ledger, grade_cubes, totals
from knockout.sweep.owed import Plan, Round
from knockout.verdicts.blocks import Race
from knockout.verdicts.race import settle_cube

if TYPE_CHECKING:
    from knockout.stats.sequential import Settlement

__all__ = [
    "RaceState",
    "complete_rounds",
    "race_futility",
    "race_of",
    "race_record",
    "race_rounds",
    "race_rule",
    "race_warnings",
    "stand",
]

log = logging.getLogger("knockout")

# By simulation: 3 seeds of 500 problems have a third of the power for .95 of the forks, and 30
# problems find nothing (docs/verdicts.md).
_FEW_ROUNDS = 6
_FEW_PROBLEMS = 100


@dataclass(frozen=True, slots=True)
class RaceState:
    """The state of a race after its complete rounds.

    Attributes:
        done: (B,) complete rounds of each benchmark.
        planned: (B,) most rounds of each benchmark.
        hypotheses: (C,) bool, what can be settled; a canary cannot.
        settlements: Of each benchmark, after its complete rounds.
    """

    done: tuple[int, ...]
    planned: tuple[int, ...]
    hypotheses: NDArray[np.bool_]
    settlements: tuple[Settlement, ...]

    def active(self, seed: int) -> NDArray[np.bool_]:
        """(B, C) bool, which candidates the round of this seed knocks out on which benchmark."""
        rows = []
        for settled in self.settlements:
            going = (settled.settled_round == 0) | (settled.settled_round > seed)
            # A canary runs as long as any candidate does.
            rows.append(going & (self.hypotheses | (going & self.hypotheses).any()))
        return np.stack(rows)

    @property
    def n_open(self) -> int:
        """Hypotheses that are not settled, over all benchmarks."""
        return sum(int((self.hypotheses & (s.settled_round == 0)).sum()) for s in self.settlements)

    @property
    def next_seed(self) -> int | None:
        """The seed of the next round, or None if no round is left or nothing is open."""
        going = [
            done
            for done, planned, settled in zip(
                self.done, self.planned, self.settlements, strict=True
            )
            if done < planned and (self.hypotheses & (settled.settled_round == 0)).any()
        ]
        return min(going, default=None)


def race_rule(ledger: Ledger) -> VerdictRule | None:
    """The rule by which a run settles its candidates; None for a run that does not race."""
    rule = ledger.meta_json("identity", {}).get("racing")
    return None if rule is None else VerdictRule.model_validate(rule)


def race_futility(ledger: Ledger) -> float | None:
    """The chance of an effect below which a run drops its candidates; None if it does not."""
    adaptive = ledger.meta_json("identity", {}).get("adaptive")
    value = None if adaptive is None else adaptive.get("futility")
    return None if value is None else float(value)


def race_of(ledger: Ledger) -> Race | None:
    """What a race did, for the verdict table; None for a run that does not race."""
    rule = race_rule(ledger)
    if rule is None:
        return None
    return Race(
        rule,
        max_rounds={b.name: b.n_seeds for b in ledger.benchmarks},
        rounds_done=complete_rounds(ledger),
        futility=race_futility(ledger),
        ended=totals(ledger).ended,
    )


def race_warnings(
    rule: VerdictRule, benchmark: str, n_problems: int, max_seeds: int, n_hypotheses: int
) -> list[str]:
    """Why a race by this rule does not work on a benchmark; empty if it does.

    Tries `settle` on a candidate that loses every answer, and on one that changes none.
    """
    from knockout.stats.sequential import settle

    fixed = f"leave `adaptive` out and set `seeds: {max_seeds}`"
    ones = np.ones((n_problems, max_seeds), dtype=np.int8)
    best = settle(
        ones,
        np.stack([np.zeros_like(ones), ones]),
        rule="nominal" if rule.rule == "nominal" else "fdr",
        alpha=rule.alpha,
        margin=rule.margin,
        target=rule.target,
        m=max(n_hypotheses, 2),
        max_rounds=max_seeds,
    )
    effect, same = (status != "open" for status in best.status)
    if not effect and not same:
        return [
            f"{benchmark}: a race over {counted(n_problems, 'problem')} and {counted(max_seeds, 'seed')} cannot settle "
            f"anything, not even a candidate that loses every answer; {fixed}"
        ]
    found = []
    if not effect:
        found.append(f"{benchmark}: no effect can be settled by racing; {fixed}")
    elif rule.target == "population" and n_problems < _FEW_PROBLEMS:
        found.append(
            f"{benchmark}: with {counted(n_problems, 'problem')} and target population a race finds hardly "
            f"anything; {fixed}, or set `verdict.target: benchmark`"
        )
    if not same:
        found.append(
            f"{benchmark}: no candidate can be shown to lie within ±{rule.margin:g}, so only "
            f"effects drop out; widen `verdict.margin`, or {fixed}"
        )
    if max_seeds < _FEW_ROUNDS:
        found.append(
            f"{benchmark}: a race over {counted(max_seeds, 'seed')} saves hardly any forks and has less power "
            f"than the same seeds without a race; {fixed}"
        )
    return found


def race_record(ledger: Ledger) -> dict[str, Any] | None:
    """The state of a race at its last look; None before, or for other runs.

    Returns:
        `rule`; `rounds` and `max_rounds` by benchmark; `ended`: "settled", "max_seeds",
        "max_tokens", "max_hours" or None while it runs; `open`: unsettled hypotheses by
        benchmark; `settled`: benchmark, candidate, settled_round, settled_as of each settled
        one, with log10_e of its claim, or chance if it was dropped as futile.
    """
    record: dict[str, Any] | None = ledger.meta_json("race")
    return record


def complete_rounds(ledger: Ledger) -> dict[str, int]:
    """Rounds, counted from the first, of which every cell and every fork is in the ledger."""
    n_problems = ledger.n_problems()
    forks: Counter[tuple[int, int]] = Counter()
    for total in ledger.fork_totals():
        forks[total.benchmark, total.seed] += total.n
    complete = {
        (b, seed)
        for b, seed, cells, owed in ledger.cells_by_seed()
        if cells == n_problems[b] and forks[b, seed] == owed
    }
    found = {}
    for b, benchmark in enumerate(ledger.benchmarks):
        found[benchmark.name] = next(
            (s for s in range(benchmark.n_seeds) if (b, s) not in complete), benchmark.n_seeds
        )
    return found


def stand(ledger: Ledger, rule: VerdictRule, futility: float | None = None) -> RaceState:
    """Replays a race from the ledger's complete rounds."""
    hypotheses = np.array([c.group != "canary" for c in ledger.candidates], dtype=np.bool_)
    done = complete_rounds(ledger)
    settlements = tuple(
        settle_cube(
            cube,
            done[cube.benchmark],
            rule,
            planned=int(hypotheses.sum()),
            max_rounds=benchmark.n_seeds,
            futility=futility,
        )
        for cube, benchmark in zip(grade_cubes(ledger), ledger.benchmarks, strict=True)
    )
    return RaceState(
        done=tuple(done[b.name] for b in ledger.benchmarks),
        planned=tuple(b.n_seeds for b in ledger.benchmarks),
        hypotheses=hypotheses,
        settlements=settlements,
    )


def race_rounds(
    plan: Plan,
    ledger: Ledger,
    rule: VerdictRule,
    adaptive: Adaptive,
    hours: Callable[[], float],
) -> Iterator[Round]:
    """Yields rounds until everything is settled or a budget ends the race.

    Ask for the next round only when the last one is in the ledger. A round that has begun is
    finished regardless of the budgets.

    Args:
        plan: The sweep; its benchmarks' seeds are the most rounds.
        ledger: Decides; it also records the state of the race.
        rule: How candidates are settled.
        adaptive: The budgets, and whether futile candidates are dropped.
        hours: Hours that the run has worked.

    Raises:
        KnockoutError: It was asked for a round before the last one was complete.
    """
    for benchmark in plan.benchmarks:
        for warning in race_warnings(
            rule, benchmark.name, len(benchmark.problems), benchmark.n_seeds,
            sum(c.group != "canary" for c in plan.candidates),
        ):  # fmt: skip
            log.warning(warning)
    before: int | None = None
    while True:
        standing = stand(ledger, rule, adaptive.futility)
        seed = standing.next_seed
        if before is not None and seed == before:
            raise KnockoutError(f"{ledger.path}: round {seed + 1} is not complete")
        ended = _ended(ledger, standing, seed, adaptive, hours)
        _note(ledger, standing, rule, ended)
        if before is None and max(standing.done) > 0:
            # Audits of stored rounds, if a run was stopped before them.
            nobody = np.zeros((len(plan.benchmarks), len(plan.candidates)), dtype=np.bool_)
            yield Round(range(max(standing.done) if seed is None else seed), nobody)
        if ended is not None or seed is None:
            log.info("the race has ended: %s, %d open", ended, standing.n_open)
            return
        log.info("round %d: %d open", seed + 1, standing.n_open)
        yield Round(range(seed, seed + 1), standing.active(seed))
        before = seed


def _ended(
    ledger: Ledger,
    standing: RaceState,
    seed: int | None,
    adaptive: Adaptive,
    hours: Callable[[], float],
) -> str | None:
    """Why the race ends here, or None."""
    if seed is None:
        return "max_seeds" if standing.n_open else "settled"
    if ledger.n_cells(seed):
        return None
    state = totals(ledger)
    if adaptive.max_tokens is not None and (
        state.tokens_generated + state.tokens_audit >= adaptive.max_tokens
    ):
        return "max_tokens"
    if adaptive.max_hours is not None and hours() >= adaptive.max_hours:
        return "max_hours"
    return None


def _note(ledger: Ledger, standing: RaceState, rule: VerdictRule, ended: str | None) -> None:
    """Records the state of the race, so that a reader does not have to replay it."""
    names = [b.name for b in ledger.benchmarks]
    settled = [
        {
            "benchmark": name,
            "candidate": ledger.candidates[c].name,
            "settled_round": int(found.settled_round[c]),
            "settled_as": found.status[c],
            **(
                {"chance": float(f"{found.chance[c]:.2g}")}
                if found.status[c] == "futile"
                else {"log10_e": round(found.log_evidence(c) / math.log(10), 2)}
            ),
        }
        for name, found in zip(names, standing.settlements, strict=True)
        for c in np.flatnonzero(found.settled_round).tolist()
    ]
    record = {
        "rule": rule.model_dump(mode="json"),
        "rounds": dict(zip(names, standing.done, strict=True)),
        "max_rounds": dict(zip(names, standing.planned, strict=True)),
        "ended": ended,
        "open": {
            name: int((standing.hypotheses & (found.settled_round == 0)).sum())
            for name, found in zip(names, standing.settlements, strict=True)
        },
        "settled": settled,
    }
    text = json.dumps(record)
    if ledger.meta().get("race") != text:
        ledger.note("race", text)
