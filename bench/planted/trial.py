"""Sweeps drawn from a table of cells, judged by the product's own functions, against the truth.

Our arm: coupled seeds, forks. The published protocol: every knockout a full run with seeds of its
own, called by the nominal rule, on as many cells as the same number of generated tokens pays for.
Sweeps of one size share no problem, so they are independent of each other.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from bench.planted.decode import Cells
from bench.planted.sample import BENCHMARK
from knockout.config.sweep import VerdictRule
from knockout.errors import UsageError
from knockout.ledger.grades import GradeCube
from knockout.method.interventions import ban
from knockout.tokens.candidates import Candidate
from knockout.verdicts.race import settle_cube
from knockout.verdicts.table import build_verdicts

__all__ = ["Size", "Table", "judge", "seeds_compared"]

MARGIN = 0.02
_RULE = VerdictRule(rule="fdr", margin=MARGIN)


@dataclass(frozen=True, slots=True)
class Size:
    """A sweep of `problems` × `seeds`."""

    problems: int
    seeds: int

    def __str__(self) -> str:
        return f"{self.problems}×{self.seeds}"


class Table:
    """Cells as (P, S) and (C, P, S), and its candidates by name."""

    def __init__(self, cells: Cells, seeds: int, sets: Mapping[str, Sequence[str]]) -> None:
        def cut(values: NDArray[Any]) -> NDArray[Any]:
            return values.reshape(*values.shape[:-1], -1, seeds)

        self.baseline = cut(cells.baseline)
        self.knockout = cut(cells.knockout)
        self.forked = cut(cells.forked)
        self.baseline_tokens = cut(cells.baseline_tokens).astype(np.int64)
        self.fork_tokens = cut(cells.fork_tokens).astype(np.int64)
        self.knockout_tokens = cut(cells.knockout_tokens).astype(np.int64)
        self.names = list(sets)
        self.singles = [i for i, name in enumerate(self.names) if " + " not in name]
        self.pairs = [i for i, name in enumerate(self.names) if " + " in name]
        self.tokens = {name: tuple(words) for name, words in sets.items()}

    @property
    def shape(self) -> tuple[int, int]:
        """(problems, seeds)."""
        return self.baseline.shape[0], self.baseline.shape[1]

    def draw(
        self, size: Size, index: int, rng: np.random.Generator
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        """Problems of the sweep of that index, which no other index has, and seeds."""
        first = index * size.problems
        if first + size.problems > self.shape[0]:
            raise UsageError(
                f"{self.shape[0]:,} problems are {self.shape[0] // size.problems} sweeps of "
                f"{size.problems} that share none; sample more, or name fewer --sweeps"
            )
        problems = np.arange(first, first + size.problems)
        return problems, rng.choice(self.shape[1], size.seeds, replace=False)

    def cube(self, which: Sequence[int], problems: NDArray[Any], seeds: NDArray[Any]) -> GradeCube:
        """The grades of a coupled sweep."""
        at = np.ix_(problems, seeds)
        return self._cube(
            which, self.baseline[at], self.knockout[np.ix_(which, problems, seeds)],
            self.forked[np.ix_(which, problems, seeds)],
        )  # fmt: skip

    def independent_cube(
        self, which: Sequence[int], problems: NDArray[Any], rng: np.random.Generator
    ) -> GradeCube:
        """One cell a problem; every knockout is that of another seed than the baseline's."""
        n, seeds = len(problems), self.shape[1]
        own = rng.integers(seeds, size=n)
        others = (own + rng.integers(1, seeds, size=(len(which), n))) % seeds
        knockout = self.knockout[np.asarray(which)[:, None], problems, others]
        return self._cube(
            which, self.baseline[problems, own][:, None], knockout[:, :, None],
            np.ones((len(which), n, 1), np.bool_),
        )  # fmt: skip

    def _cube(self, which: Sequence[int], baseline: Any, knockout: Any, forked: Any) -> GradeCube:
        candidates = []
        for i in which:
            name = self.names[i]
            members = tuple(name.split(" + ")) if " + " in name else ()
            candidates.append(Candidate(name, ban((i,)), (name,), members=members))
        return GradeCube(
            BENCHMARK,
            tuple(candidates),
            tuple(map(str, range(len(baseline)))),
            tuple(range(baseline.shape[1])),
            np.ascontiguousarray(baseline),
            np.ascontiguousarray(knockout),
            np.ascontiguousarray(forked),
        )

    def tokens_of(self, problems: NDArray[Any], seeds: NDArray[Any]) -> tuple[int, float]:
        """Tokens that a coupled sweep generates, and that full re-runs cost a cell on average."""
        at, each = np.ix_(problems, seeds), np.ix_(self.singles, problems, seeds)
        forks = int(self.fork_tokens[each].sum())
        full = self.knockout_tokens[each].sum() + self.baseline_tokens[at].sum()
        return int(self.baseline_tokens[at].sum()) + forks, float(full) / (
            len(problems) * len(seeds)
        )


def sweeps(table: Table, size: Size, indexes: Sequence[int], seed: int) -> Iterator[dict[str, Any]]:
    """A record per sweep, arm and candidate."""
    for index in indexes:
        rng = np.random.default_rng([seed, size.problems, size.seeds, index])
        problems, seeds = table.draw(size, index, rng)
        spent, full = table.tokens_of(problems, seeds)
        affordable = min(size.problems, max(2, int(spent / full)))
        arms = {
            "ours": table.cube(table.singles, problems, seeds),
            "published": table.independent_cube(table.singles, problems[:affordable], rng),
        }
        for arm, cube in arms.items():
            found = build_verdicts([cube], _RULE)
            for row in found.to_dict("records"):
                yield {
                    "size": str(size),
                    "sweep": index,
                    "arm": arm,
                    "cells": cube.baseline.size,
                    "tokens": spent if arm == "ours" else affordable * full,
                    **{
                        key: row[key]
                        for key in (
                            "candidate", "delta", "ci_low", "ci_high", "ci_low_fdr", "ci_high_fdr", "verdict_fdr",
                            "verdict_nominal", "evidence", "equivalent",
                        )
                    },
                }  # fmt: skip


def pairs_found(
    table: Table, size: Size, indexes: Sequence[int], seed: int
) -> Iterator[dict[str, Any]]:
    """Whether a pair is called a pillar, while neither member is called at all."""
    for index in indexes:
        rng = np.random.default_rng([seed, 1, size.problems, size.seeds, index])
        problems, seeds = table.draw(size, index, rng)
        singles = build_verdicts([table.cube(table.singles, problems, seeds)], _RULE)
        pairs = build_verdicts([table.cube(table.pairs, problems, seeds)], _RULE)
        alone = dict(zip(singles["candidate"], singles["verdict_fdr"], strict=True))
        apart = _interact(table, problems, seeds)
        for name, verdict, interacts in zip(
            pairs["candidate"], pairs["verdict_fdr"], apart.tolist(), strict=True
        ):
            pillar = verdict == "strong_pillar"
            neutral = all(alone[member] == "neutral" for member in name.split(" + "))
            yield {
                "size": str(size), "sweep": index, "pair": name, "pillar": pillar,
                "pillar_members_neutral": pillar and neutral, "interaction_seen": interacts,
            }  # fmt: skip


def _interact(table: Table, problems: NDArray[Any], seeds: NDArray[Any]) -> NDArray[np.bool_]:
    """Whether Δ_AB − Δ_A − Δ_B is told from 0, Bonferroni over pairs, problems as units."""
    from scipy.stats import norm

    base = table.baseline[np.ix_(problems, seeds)].astype(float)

    def effect(i: int) -> NDArray[np.float64]:
        both = table.knockout[np.ix_([i], problems, seeds)][0]
        return np.asarray((both - base).mean(axis=1))

    seen = []
    limit = norm.isf(0.025 / len(table.pairs))
    for i in table.pairs:
        a, b = (effect(table.names.index(m)) for m in table.names[i].split(" + "))
        d = effect(i) - a - b
        error = d.std(ddof=1) / np.sqrt(len(d))
        seen.append(bool(error > 0 and abs(d.mean()) > limit * error))
    return np.array(seen)


def races(table: Table, size: Size, indexes: Sequence[int], seed: int) -> Iterator[dict[str, Any]]:
    """Adaptive sweeps: what is settled after which round, and what they generate."""
    for index in indexes:
        rng = np.random.default_rng([seed, 2, size.problems, size.seeds, index])
        problems, seeds = table.draw(size, index, rng)
        cube = table.cube(table.singles, problems, seeds)
        settled = settle_cube(cube, size.seeds, _RULE, max_rounds=size.seeds, futility=0.05)
        played = np.arange(size.seeds)[None, None, :] < settled.rounds[:, None, None]
        forks = table.fork_tokens[np.ix_(table.singles, problems, seeds)]
        baselines = table.baseline_tokens[np.ix_(problems, seeds)]
        rounds = int(settled.rounds.max())
        spent, _ = table.tokens_of(problems, seeds)
        for i, name in enumerate(c.name for c in cube.candidates):
            yield {
                "size": str(size), "sweep": index, "candidate": name,
                "status": settled.status[i], "round": int(settled.rounds[i]),
                "tokens": int((forks * played).sum() + baselines[:, :rounds].sum()),
                "tokens_fixed": spent,
            }  # fmt: skip


def confirmations(
    table: Table, size: Size, indexes: Sequence[int], seed: int
) -> Iterator[dict[str, Any]]:
    """What one sweep calls, measured again on the same problems with as many fresh seeds."""
    for index in indexes:
        rng = np.random.default_rng([seed, 3, size.problems, size.seeds, index])
        problems, seeds = table.draw(Size(size.problems, 2 * size.seeds), index, rng)
        first, fresh = (
            build_verdicts([table.cube(table.singles, problems, part)], _RULE)
            for part in (seeds[: size.seeds], seeds[size.seeds :])
        )
        for a, b in zip(first.to_dict("records"), fresh.to_dict("records"), strict=True):
            for rule in ("fdr", "nominal"):
                if a[f"verdict_{rule}"] != "neutral":
                    yield {
                        "size": str(size), "sweep": index, "rule": rule,
                        "candidate": a["candidate"], "first": a["delta"], "fresh": b["delta"],
                        "confirmed": a[f"verdict_{rule}"] == b[f"verdict_{rule}"],
                    }  # fmt: skip


def seeds_compared(table: Table) -> pd.DataFrame:
    """Standard deviation of one cell's difference, coupled and with independent seeds."""
    rows = []
    base = table.baseline.astype(float)
    for i, name in enumerate(table.names):
        knockout = table.knockout[i].astype(float)
        coupled = (knockout - base).ravel()
        apart = (np.roll(knockout, 1, axis=1) - base).ravel()
        rows.append(
            {
                "candidate": name,
                "forks": float(table.forked[i].mean()),
                "tokens_after_fork": float(
                    table.fork_tokens[i].sum() / max(1, table.forked[i].sum())
                ),
                "sd_coupled": float(coupled.std()),
                "sd_independent": float(apart.std()),
            }
        )
    return pd.DataFrame(rows)


_KINDS = {
    "sweeps": sweeps,
    "races": races,
    "confirmations": confirmations,
    "pairs": pairs_found,
}
_AT_ONCE = 10  # sweeps of a piece of work
_table: Table


def judge(
    kind: str, table: Table, sizes: Sequence[Size], n: int, processes: int, seed: int = 0
) -> pd.DataFrame:
    """Records of n sweeps of each size: "sweeps", "races", "confirmations" or "pairs"."""
    global _table
    _table = table  # the processes are forked with it
    work = [
        (kind, size, range(first, min(first + _AT_ONCE, n)), seed)
        for size in sizes
        for first in range(0, n, _AT_ONCE)
    ]
    records: list[dict[str, Any]] = []
    with multiprocessing.get_context("fork").Pool(processes) as pool:
        for done, part in enumerate(pool.imap(_judged, work), start=1):
            records += part
            print(f"{kind}: {done} of {len(work)}", flush=True)
    return pd.DataFrame(records)


def _judged(work: tuple[str, Size, Sequence[int], int]) -> list[dict[str, Any]]:
    kind, size, indexes, seed = work
    return list(_KINDS[kind](_table, size, indexes, seed))
