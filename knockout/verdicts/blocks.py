"""What the rows of one benchmark are made from: tallies, counts, tests; and pooling benchmarks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from knockout.config.sweep import VerdictRule
from knockout.ledger.grades import GradeCube
from knockout.tokens.candidates import Candidate

if TYPE_CHECKING:
    from knockout.stats.paired import Pairs, Tally
    from knockout.stats.power import Design
    from knockout.stats.sequential import Settlement

__all__ = [
    "POOLED",
    "TIE",
    "Block",
    "Race",
    "Target",
    "Tests",
    "block_of",
    "fixed_tests",
    "pool",
    "raced_tests",
]

Target = Literal["population", "benchmark"]

POOLED = "pooled"
"""The benchmark name of rows over all benchmarks together."""

_ENOUGH = 30
"""Least number of differing cells from which to estimate how much a problem's repeats agree."""

TIE = 1e-9
"""Relative tolerance when a p-value is compared with its level, so that rounding never decides."""


@dataclass(frozen=True, slots=True)
class Block:
    """What the rows of one benchmark are made from; every array is (C,)."""

    name: str
    candidates: tuple[Candidate, ...]
    tally: Tally
    reasons: list[str]  # why there is no test; "" if there is one
    counts: dict[str, NDArray[np.int64]]  # columns that are plain counts
    base: NDArray[np.float64]  # baseline grades added up over the tally's units
    sums: dict[str, NDArray[np.float64]]  # Δ if all missing grades had fallen one way, × units
    design: Design  # all of it but each candidate's own share
    planned: int  # problems


@dataclass(frozen=True, slots=True)
class Race:
    """What an adaptive sweep did.

    Attributes:
        rule: How it settled its candidates.
        max_rounds: Planned rounds of each benchmark.
        rounds_done: Complete rounds of each benchmark.
        futility: The chance below which it dropped candidates; None: it did not.
        ended: What ended it, or "" while it runs.
    """

    rule: VerdictRule
    max_rounds: Mapping[str, int]
    rounds_done: Mapping[str, int]
    futility: float | None = None
    ended: str = ""


@dataclass(frozen=True, slots=True)
class Tests:
    """p-values, and intervals at any level, (C,) each."""

    p: NDArray[np.float64]
    interval: Callable[[NDArray[np.float64]], tuple[NDArray[np.float64], NDArray[np.float64]]]
    equivalence: Callable[[float], tuple[NDArray[np.float64], NDArray[np.float64]]]


def block_of(cube: GradeCube, target: Target, settled: Settlement | None) -> Block:
    """Counts a benchmark; in a race each candidate up to the round that settled it."""
    from knockout.stats.paired import pair, tally_cells, tally_problems

    knockout = cube.knockout
    c, p, s = knockout.shape
    rounds = np.full(c, s, dtype=np.int64) if settled is None else settled.rounds
    if settled is not None:
        played = np.arange(s) < rounds[:, None]
        knockout = np.where(played[:, None, :], knockout, np.int8(-1))
    pairs = pair(cube.baseline, knockout)
    graded = knockout >= 0
    forked = np.count_nonzero(graded & cube.forked, axis=(1, 2))
    n_pairs = pairs.n.sum(axis=1)
    if target == "benchmark":
        tally, base = tally_cells(pairs), pairs.base.sum(axis=1).astype(np.float64)
    else:
        tally = tally_problems(pairs)
        base = np.zeros(c)
        # By number of pairs, so that the order of problems does not matter.
        for n in range(1, s + 1):
            base += np.where(pairs.n == n, pairs.base, 0).sum(axis=1) / n
    counts = {
        "n_problems": np.count_nonzero(pairs.n, axis=1),
        "n_seeds": rounds,
        "n_forked": forked,
        "n_inherited": np.count_nonzero(graded, axis=(1, 2)) - forked,
        "n_missing": p * rounds - n_pairs,
        "n_missing_baseline": p * rounds - _there(cube.baseline[None], rounds),
        "n_missing_knockout": p * rounds - _there(knockout, rounds),
        "cells": n_pairs,
        "n_differing_problems": np.count_nonzero(pairs.won != pairs.lost, axis=1),
        "won": pairs.won.sum(axis=1),
        "lost": pairs.lost.sum(axis=1),
    }
    reasons = []
    for n, repeats in zip(n_pairs.tolist(), pairs.n.max(axis=1, initial=0).tolist(), strict=True):
        if n == 0:
            reasons.append("no cell has both grades")
        elif target == "benchmark" and repeats < 2 and settled is None:
            reasons.append("target benchmark needs two seeds of a problem")
        else:
            reasons.append("")
    low, high = _bounds(cube.baseline, knockout, rounds)
    sums = {"delta_lowest": low * p, "delta_highest": high * p}
    design = _design(cube, pairs, target)
    return Block(cube.benchmark, cube.candidates, tally, reasons, counts, base, sums, design, p)


def _there(grades: NDArray[np.int8], rounds: NDArray[np.int64]) -> NDArray[np.int64]:
    """(C,) grades within each candidate's rounds."""
    per_round = np.count_nonzero(grades >= 0, axis=1)  # (C or 1, S)
    played = np.arange(grades.shape[2]) < rounds[:, None]
    return np.asarray((per_round * played).sum(axis=1), dtype=np.int64)


def _bounds(
    baseline: NDArray[np.int8], knockout: NDArray[np.int8], rounds: NDArray[np.int64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """(C,) Δ over all planned cells if every missing grade were the worst and the best possible."""
    n = np.maximum(rounds * len(baseline), 1)
    low, high = np.zeros(len(knockout)), np.zeros(len(knockout))
    for s in range(baseline.shape[1]):
        b, k = baseline[:, s], knockout[:, :, s]
        # A cell without grades counts too: if both were missing, they could differ.
        least = np.where(k < 0, 0, k).sum(axis=1) - int(np.where(b < 0, 1, b).sum())
        most = np.where(k < 0, 1, k).sum(axis=1) - int(np.where(b < 0, 0, b).sum())
        played = s < rounds
        low += np.where(played, least, 0)
        high += np.where(played, most, 0)
    return low / n, high / n


def _design(cube: GradeCube, pairs: Pairs, target: Target) -> Design:
    """The benchmark's design, for `mde`."""
    from knockout.stats.power import CORRELATION, Design, difficulty, seed_correlation

    graded = cube.baseline[:, (cube.baseline >= 0).any(axis=0)]
    whole = graded[(graded >= 0).all(axis=1)]
    if len(whole):
        pass1, spread = difficulty(whole.sum(axis=1), max(graded.shape[1], 1))
    else:
        pass1, spread = difficulty(np.zeros(0), 1)
    weight = (pairs.won + pairs.lost).sum(axis=1).astype(np.float64)
    correlation = CORRELATION
    if graded.shape[1] >= 2 and weight.sum() >= _ENOUGH:
        correlation = float(np.average(seed_correlation(pairs), weights=weight))
    seeds = 1 if target == "benchmark" else max(int(pairs.n.max(initial=1)), 1)
    return Design(1, seeds, 0.0, round(correlation, 4), round(pass1, 4), round(spread, 2))


def pool(blocks: list[Block], target: Target, *, adaptive: bool) -> Block:
    """All problems of all benchmarks as one sample, for the candidates that all blocks share."""
    from knockout.stats.paired import Tally

    shared = set.intersection(*({c.name for c in block.candidates} for block in blocks))
    keep = [c for c in blocks[0].candidates if c.name in shared]
    why = ""
    if adaptive:
        why = "racing settles each benchmark separately"
    elif (
        target == "benchmark" and len({int(b.counts["n_seeds"].max(initial=0)) for b in blocks}) > 1
    ):
        why = "target benchmark does not pool different numbers of seeds"
    tally: Tally | None = None
    base = np.zeros(len(keep))
    counts: dict[str, NDArray[np.int64]] = {}
    sums: dict[str, NDArray[np.float64]] = {}
    for block in blocks:
        place = {c.name: i for i, c in enumerate(block.candidates)}
        order = [place[c.name] for c in keep]
        part = Tally(block.tally.numerators, block.tally.denominators, block.tally.counts[order])
        tally = part if tally is None else tally.merge(part)
        base = base + block.base[order]
        for key, one in block.sums.items():
            sums[key] = sums.get(key, 0.0) + one[order]
        for key, values in block.counts.items():
            mine = values[order]
            merge = np.minimum if key == "n_seeds" else np.add
            counts[key] = merge(counts[key], mine) if key in counts else mine
    assert tally is not None
    reasons = [why or ("" if n else "no cell has both grades") for n in tally.n.tolist()]
    design = _pooled_design(blocks)
    planned = sum(block.planned for block in blocks)
    return Block(POOLED, tuple(keep), tally, reasons, counts, base, sums, design, planned)


def _pooled_design(blocks: list[Block]) -> Design:
    """The benchmarks' designs, averaged over problems; seeds by the number of cells."""
    sizes = [float(block.counts["n_problems"].max(initial=0)) + 1e-9 for block in blocks]

    def mean(values: list[float]) -> float:
        return float(np.average(values, weights=sizes))

    designs = [block.design for block in blocks]
    return replace(
        designs[0],
        n_seeds=max(round(mean([float(d.n_seeds) for d in designs])), 1),
        correlation=round(mean([d.correlation for d in designs]), 4),
        pass1=round(mean([d.pass1 for d in designs]), 4),
        spread=round(mean([d.spread for d in designs]), 2),
    )


def fixed_tests(block: Block) -> Tests:
    """p-values and intervals of a fixed design."""
    from knockout.stats.interval import equivalence_interval, mean_interval
    from knockout.stats.signflip import signflip_p

    p = signflip_p(block.tally)
    return Tests(
        p,
        lambda alpha: mean_interval(block.tally, p, alpha),
        lambda alpha: equivalence_interval(block.tally, alpha),
    )


def raced_tests(cube: GradeCube, settled: Settlement, target: Target, max_rounds: int) -> Tests:
    """p-values and intervals that are valid at any stopping time."""
    from knockout.stats.sequential import confidence_sequence

    done = int(settled.rounds.max(initial=0))
    p = settled.p_values

    def sequence(alpha: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        return confidence_sequence(
            cube.baseline[:, :done], cube.knockout[:, :, :done], settled.rounds,
            alpha=alpha, target=target, max_rounds=max_rounds,
        )  # fmt: skip

    def interval(alpha: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        low, high = sequence(alpha)
        # For target population p and interval come from different bets: p decides about 0.
        seen, lost = p <= alpha * (1 + TIE), settled.log_pillar > settled.log_stumbling
        gain = np.where(seen, np.maximum(low, 0.0), np.minimum(low, 0.0))
        loss = np.where(seen, np.minimum(high, 0.0), np.maximum(high, 0.0))
        return np.where(seen & lost, low, gain), np.where(seen & ~lost, high, loss)

    return Tests(p, interval, lambda alpha: sequence(np.full(len(p), 2 * alpha)))
