"""What the rows of one benchmark are made from: tallies, counts, tests; and pooling benchmarks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from knockout.ledger.grades import GradeCube
from knockout.tokens.candidates import Candidate

if TYPE_CHECKING:
    from knockout.stats.paired import Tally
    from knockout.stats.sequential import Settlement

__all__ = [
    "POOLED",
    "TIE",
    "Block",
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

TIE = 1e-9
"""Relative slack when a p-value meets its level, so that rounding never decides a verdict."""


@dataclass(frozen=True, slots=True)
class Block:
    """What the rows of one benchmark are made from; every array is (C,)."""

    name: str
    candidates: tuple[Candidate, ...]
    tally: Tally
    reasons: list[str]  # why there is no test; "" where there is one
    counts: dict[str, NDArray[np.int64]]  # columns that are plain counts
    base: NDArray[np.float64]  # baseline grades added up over the tally's units


@dataclass(frozen=True, slots=True)
class Tests:
    """p-values and the limits of their intervals, (C,) each."""

    p: NDArray[np.float64]
    low: NDArray[np.float64]
    high: NDArray[np.float64]


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
        for n in range(1, s + 1):  # by number of pairs, so that no order of problems enters
            base += np.where(pairs.n == n, pairs.base, 0).sum(axis=1) / n
    counts = {
        "n_problems": np.count_nonzero(pairs.n, axis=1),
        "n_seeds": rounds,
        "n_forked": forked,
        "n_inherited": np.count_nonzero(graded, axis=(1, 2)) - forked,
        "n_missing": p * rounds - n_pairs,
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
    return Block(cube.benchmark, cube.candidates, tally, reasons, counts, base)


def pool(blocks: list[Block], target: Target, *, adaptive: bool) -> Block:
    """All problems of all benchmarks as one sample, for the candidates that all blocks share."""
    from knockout.stats.paired import Tally

    shared = set.intersection(*({c.name for c in block.candidates} for block in blocks))
    keep = [c for c in blocks[0].candidates if c.name in shared]
    why = ""
    if adaptive:
        why = "racing settles each benchmark by itself"
    elif (
        target == "benchmark" and len({int(b.counts["n_seeds"].max(initial=0)) for b in blocks}) > 1
    ):
        why = "target benchmark does not pool different numbers of seeds"
    tally: Tally | None = None
    base = np.zeros(len(keep))
    counts: dict[str, NDArray[np.int64]] = {}
    for block in blocks:
        place = {c.name: i for i, c in enumerate(block.candidates)}
        order = [place[c.name] for c in keep]
        part = Tally(block.tally.numerators, block.tally.denominators, block.tally.counts[order])
        tally = part if tally is None else tally.merge(part)
        base = base + block.base[order]
        for key, values in block.counts.items():
            mine = values[order]
            merge = np.minimum if key == "n_seeds" else np.add
            counts[key] = merge(counts[key], mine) if key in counts else mine
    assert tally is not None
    reasons = [why or ("" if n else "no cell has both grades") for n in tally.n.tolist()]
    return Block(POOLED, tuple(keep), tally, reasons, counts, base)


def fixed_tests(block: Block, alpha: float) -> Tests:
    """p-values and intervals of a fixed design."""
    from knockout.stats.interval import mean_interval
    from knockout.stats.signflip import signflip_p

    p = signflip_p(block.tally)
    return Tests(p, *mean_interval(block.tally, p, alpha))


def raced_tests(
    cube: GradeCube, settled: Settlement, alpha: float, target: Target, max_rounds: int | None
) -> Tests:
    """p-values and intervals that hold at any stopping time."""
    from knockout.stats.sequential import confidence_sequence

    done = int(settled.rounds.max(initial=0))
    low, high = confidence_sequence(
        cube.baseline[:, :done],
        cube.knockout[:, :, :done],
        settled.rounds,
        alpha=alpha,
        target=target,
        max_rounds=max_rounds,
    )
    # The bets behind p and those behind the interval differ for target population: 0 goes by p.
    p = settled.p_values
    seen, lost = p <= alpha * (1 + TIE), settled.log_pillar > settled.log_stumbling
    low = np.where(seen & ~lost, np.maximum(low, 0.0), np.where(seen, low, np.minimum(low, 0.0)))
    high = np.where(seen & lost, np.minimum(high, 0.0), np.where(seen, high, np.maximum(high, 0.0)))
    return Tests(p, low, high)
