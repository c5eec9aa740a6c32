"""Racing: rounds of seeds, after each of which settled candidates drop out.

What is settled follows from the ledger's grades alone, so a run that was interrupted decides what
it would have decided anyway. Only the stop by a budget of hours depends on the clock; it never
looks at a grade, which makes it a stopping time like any other, and it is on record.
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
from knockout.errors import KnockoutError
from knockout.ledger import Ledger, grade_cubes, totals
from knockout.sweep.owed import Plan, Round
from knockout.verdicts.table import settle_cube

if TYPE_CHECKING:
    from knockout.stats.sequential import Settlement

__all__ = [
    "Standing",
    "complete_rounds",
    "race_futility",
    "race_record",
    "race_rounds",
    "race_rule",
    "stand",
]

log = logging.getLogger("knockout")


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a race stands after its complete rounds.

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
            # A canary runs along as long as anything does.
            rows.append(going & (self.hypotheses | (going & self.hypotheses).any()))
        return np.stack(rows)

    @property
    def n_open(self) -> int:
        """Hypotheses that are not settled, over all benchmarks."""
        return sum(int((self.hypotheses & (s.settled_round == 0)).sum()) for s in self.settlements)

    @property
    def next_seed(self) -> int | None:
        """The seed of the next round, or None where no round is left or nothing is open."""
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
    """The chance of an effect below which a run drops its candidates; None where it does not."""
    adaptive = ledger.meta_json("identity", {}).get("adaptive")
    value = None if adaptive is None else adaptive.get("futility")
    return None if value is None else float(value)


def race_record(ledger: Ledger) -> dict[str, Any] | None:
    """Where a race stood when it was last looked at; None before, or for other runs.

    Returns:
        `rule`; `rounds` and `max_rounds` by benchmark; `ended`: "settled", "max_seeds",
        "max_tokens", "max_hours" or None while it goes on; `open`: unsettled hypotheses by
        benchmark; `settled`: benchmark, candidate, settled_round, settled_as of each settled
        one, with log10_e of its claim, or chance where it was dropped as futile.
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


def stand(ledger: Ledger, rule: VerdictRule, futility: float | None = None) -> Standing:
    """Replays a race from the ledger's complete rounds."""
    hypotheses = np.array([c.group != "canary" for c in ledger.candidates], dtype=np.bool_)
    done = complete_rounds(ledger)
    settlements = tuple(
        settle_cube(
            cube,
            done[cube.benchmark],
            rule=rule.rule,
            alpha=rule.alpha,
            margin=rule.margin,
            target=rule.target,
            m_planned=int(hypotheses.sum()),
            max_rounds=benchmark.n_seeds,
            futility=futility,
        )
        for cube, benchmark in zip(grade_cubes(ledger), ledger.benchmarks, strict=True)
    )
    return Standing(
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

    The next round may only be asked for when the last one is in the ledger. A round that has begun
    is finished whatever the budgets say.

    Args:
        plan: The sweep; its benchmarks' seeds are the most rounds.
        ledger: Decides; where the race stands is noted in it too.
        rule: How candidates are settled.
        adaptive: The budgets, and whether futile candidates are dropped.
        hours: Hours that the run has worked.

    Raises:
        KnockoutError: It was asked for a round before the last one was complete.
    """
    before: int | None = None
    while True:
        standing = stand(ledger, rule, adaptive.futility)
        seed = standing.next_seed
        if before is not None and seed == before:
            raise KnockoutError(f"{ledger.path}: round {seed + 1} is not complete")
        ended = _ended(ledger, standing, seed, adaptive, hours)
        _note(ledger, standing, rule, ended)
        if before is None and max(standing.done) > 0:
            # Audits of rounds that are there, where a run was stopped before them.
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
    standing: Standing,
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


def _note(ledger: Ledger, standing: Standing, rule: VerdictRule, ended: str | None) -> None:
    """Writes down where the race stands, so that a reader need not replay it."""
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
