"""From grades to the verdict table: the only place that knows the table's columns.

Every number is computed from whole-number tallies without random draws, so the same grades make
the same table, byte for byte, in any order of problems. See `knockout.stats` for the methods.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from knockout.config.sweep import VerdictRule
from knockout.ledger.grades import GradeCube
from knockout.tokens.candidates import Candidate
from knockout.verdicts.blocks import (
    POOLED,
    TIE,
    Block,
    Target,
    Tests,
    block_of,
    fixed_tests,
    pool,
    raced_tests,
)

if TYPE_CHECKING:
    import pandas as pd

    from knockout.stats.sequential import Settlement

__all__ = [
    "COLUMNS",
    "POOLED",
    "build_verdicts",
    "settle_cube",
]

Rule = Literal["fdr", "nominal"]
COLUMNS = (
    "benchmark",
    "candidate",
    "group",
    "token_ids",
    "tokens",
    "n_problems",
    "n_seeds",
    "pass1_baseline",
    "pass1_knockout",
    "delta",
    "ci_low",
    "ci_high",
    "p_value",
    "p_adjusted",
    "p_holm",
    "p_by",
    "mde",
    "verdict",
    "verdict_nominal",
    "verdict_fdr",
    "evidence",
    "n_forked",
    "n_inherited",
    "n_missing",
    "n_differing_cells",
    "won",
    "lost",
    "settled_round",
    "settled_as",
    "reason",
    "preliminary",
)


def build_verdicts(
    cubes: Sequence[GradeCube],
    *,
    rule: Rule = "fdr",
    alpha: float = 0.05,
    margin: float = 0.02,
    target: Target = "population",
    m_planned: int | None = None,
    max_rounds: int | Mapping[str, int] | None = None,
    rounds_done: int | Mapping[str, int] | None = None,
    raced_by: VerdictRule | None = None,
    futility: float | None = None,
    ended: str = "",
    preliminary: bool = False,
) -> pd.DataFrame:
    """The verdict table: a row per benchmark and candidate, then pooled rows.

    Args:
        cubes: One per benchmark. Pooled rows are made where there are two or more, for the
            candidates that all of them share; every problem weighs the same there, so a large
            benchmark weighs more than a small one.
        rule: Which rule fills `verdict`; `verdict_nominal` and `verdict_fdr` are always there.
        alpha: Level of the verdicts, and 1 − the confidence level of the intervals.
        margin: A neutral candidate is `equivalent` where its interval lies inside ± margin.
        target: "population": problems are a sample. "benchmark": these very problems, only the
            sampling noise counts; needs two seeds. A cell is the unit there, with or without
            siblings, so after failures Δ is the mean over cells.
        m_planned: Planned hypotheses per benchmark (candidates and controls, not canaries); None
            counts those in the cube. One without data counts as p = 1.
        max_rounds: Planned rounds of an adaptive sweep, for all benchmarks or by name; None for a
            fixed one. Then p-values, intervals and verdicts are those of `stats.sequential`,
            valid at any stopping time.
        rounds_done: Complete rounds of an adaptive sweep, for all benchmarks or by name; None
            takes every seed with a baseline grade.
        raced_by: The rule by which the sweep settled its candidates, where the table is asked for
            by another one; its target must be this one's. None: `rule`, `alpha` and `margin`.
        futility: The chance below which the sweep dropped candidates as futile; None: it did not.
        ended: What ended an adaptive sweep, for `reason`.
        preliminary: Whether the run is unfinished, for the column of that name.

    Returns:
        The frame with `COLUMNS`. Where a number cannot be had it is NaN and `reason` says why; in
        an adaptive sweep `reason` also says what settled a candidate, or that it is open.

    Raises:
        ValueError: if `m_planned` is below the number of hypotheses here, or a level or margin is
            outside (0, 1).
    """
    import pandas as pd

    for name, value in (("alpha", alpha), ("margin", margin)):
        if not 0 < value < 1:
            raise ValueError(f"{name} is {value}, expected a number between 0 and 1")
    race = raced_by or VerdictRule(rule=rule, alpha=alpha, margin=margin, target=target)
    if race.target != target:
        raise ValueError(f"the sweep raced for target {race.target}, not {target}")
    blocks: list[tuple[Block, Tests, Settlement | None]] = []
    for cube in cubes:
        if max_rounds is None:
            block = block_of(cube, target, None)
            blocks.append((block, fixed_tests(block, alpha), None))
            continue
        most = max_rounds if isinstance(max_rounds, int) else max_rounds[cube.benchmark]
        settled = settle_cube(
            cube,
            _rounds(cube, rounds_done),
            rule=race.rule,
            alpha=race.alpha,
            margin=race.margin,
            target=target,
            m_planned=m_planned,
            max_rounds=most,
            futility=futility,
        )
        block = block_of(cube, target, settled)
        blocks.append((block, raced_tests(cube, settled, alpha, target, most), settled))
    if len(blocks) >= 2:
        pooled = pool([block for block, _, _ in blocks], target, adaptive=max_rounds is not None)
        if pooled.candidates:
            blocks.append((pooled, fixed_tests(pooled, alpha), None))
    tables = [
        _judge(
            block, tests, settled, race, ended, rule=rule, alpha=alpha, margin=margin,
            m_planned=m_planned,
        )
        for block, tests, settled in blocks
    ]  # fmt: skip
    for table in tables:
        table["preliminary"] = [preliminary] * len(table["candidate"])
    columns = {name: [value for table in tables for value in table[name]] for name in COLUMNS}
    # Names may hold what Arrow's strings cannot, such as half a surrogate pair.
    names = pd.Series(columns["candidate"], dtype=object)
    return pd.DataFrame({**columns, "candidate": names}, columns=list(COLUMNS))


def settle_cube(
    cube: GradeCube,
    rounds_done: int,
    *,
    rule: Rule = "fdr",
    alpha: float = 0.05,
    margin: float = 0.02,
    target: Target = "population",
    m_planned: int | None = None,
    max_rounds: int | None = None,
    futility: float | None = None,
) -> Settlement:
    """Which candidates of a benchmark are settled after so many complete rounds (seeds).

    The scheduler calls this after each round and makes no more forks for what is not "open".
    Canaries are never settled. See `knockout.stats.sequential.settle` for arguments and proof.
    """
    from knockout.stats.sequential import settle

    return settle(
        cube.baseline[:, :rounds_done],
        cube.knockout[:, :, :rounds_done],
        rule=rule,
        alpha=alpha,
        margin=margin,
        target=target,
        m=m_planned,
        max_rounds=max_rounds or len(cube.seeds),
        counted=_counted(cube.candidates),
        futility=futility,
    )


def _judge(
    block: Block,
    tests: Tests,
    settled: Settlement | None,
    race: VerdictRule,
    ended: str,
    *,
    rule: Rule,
    alpha: float,
    margin: float,
    m_planned: int | None,
) -> dict[str, list[Any]]:
    """The rows of one block, as columns."""
    from knockout.stats.multiplicity import adjust_bh, adjust_by, adjust_holm
    from knockout.stats.power import mde_of_tally

    tally, reasons = block.tally, list(block.reasons)
    testable = np.array([not reason for reason in reasons], dtype=np.bool_)
    bounded = testable & (block.counts["n_problems"] >= 2)
    for i in np.flatnonzero(testable & ~bounded):
        reasons[i] = "one problem has no interval"
    p = np.where(testable, tests.p, np.nan)
    low, high = (np.where(bounded, x, np.nan) for x in (tests.low, tests.high))
    delta = tally.mean()

    counted = _counted(block.candidates)
    bh, holm, by = (p.copy() for _ in range(3))  # a canary is no hypothesis and keeps its p
    bh[counted] = adjust_bh(p[counted], m_planned)
    holm[counted] = adjust_holm(p[counted], m_planned)
    by[counted] = adjust_by(p[counted], m_planned)

    level = alpha * (1 + TIE)
    names = {"nominal": _strong(delta, p <= level), "fdr": _strong(delta, bh <= level)}
    same = (low > -margin) & (high < margin)
    if settled is not None:
        raced = {"pillar": "strong_pillar", "stumbling_block": "strong_stumbling_block"}
        if alpha == race.alpha:
            names[race.rule] = [raced.get(status, "neutral") for status in settled.status]
            if margin == race.margin:
                same |= np.array([s == "equivalent" for s in settled.status], dtype=np.bool_)
        for i, reason in enumerate(reasons):
            hypothesis = block.candidates[i].group != "canary"
            reasons[i] = reason or _why(settled, i, ended if hypothesis else "canaries run along")
    verdict = names[rule]

    # The level that one more discovery would have to reach.
    family = int(counted.sum()) if m_planned is None else m_planned
    found = int((bh[counted] <= level).sum())
    share = 1.0 if rule == "nominal" else min(1.0, (found + 1) / max(family, 1))
    units = np.maximum(tally.n, 1)
    base = np.where(tally.n > 0, block.base / units, np.nan)
    columns: dict[str, Any] = {
        "benchmark": [block.name] * len(p),
        "candidate": [c.name for c in block.candidates],
        "group": [c.group for c in block.candidates],
        "token_ids": [list(c.token_ids) for c in block.candidates],
        "tokens": [list(c.tokens) for c in block.candidates],
        "pass1_baseline": base,
        "pass1_knockout": np.clip(np.round(base + delta, 12), 0, 1),
        "delta": delta,
        "ci_low": low,
        "ci_high": high,
        "p_value": p,
        "p_adjusted": bh,
        "p_holm": holm,
        "p_by": by,
        "mde": np.where(testable, mde_of_tally(tally, alpha * share), np.nan),
        "verdict": verdict,
        "verdict_nominal": names["nominal"],
        "verdict_fdr": names["fdr"],
        "evidence": [
            "effect" if v != "neutral" else "equivalent" if inside else "undetermined"
            for v, inside in zip(verdict, same.tolist(), strict=True)
        ],
        **block.counts,
        "n_differing_cells": block.counts["won"] + block.counts["lost"],
        "settled_round": [0] * len(p) if settled is None else settled.settled_round,
        "settled_as": [""] * len(p) if settled is None else list(settled.status),
        "reason": reasons,
    }
    return {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in columns.items()}


def _why(settled: Settlement, candidate: int, ended: str) -> str:
    """What settled a candidate, or that nothing did."""
    shown = {
        "pillar": "a loss",
        "stumbling_block": "a gain",
        "equivalent": "an effect inside the margin",
    }.get(settled.status[candidate])
    round_ = int(settled.settled_round[candidate])
    if settled.status[candidate] == "futile":
        chance = settled.chance[candidate]
        return f"futile: after round {round_} the chance of seeing an effect was {chance:.2g}"
    if shown is None:
        open_ = f"open after round {int(settled.rounds[candidate])}"
        return f"{open_}: {ended}" if ended else open_
    return (
        f"settled after round {round_}: evidence of {shown}, "
        f"e = 10^{settled.log_evidence(candidate) / math.log(10):.1f}"
    )


def _strong(delta: NDArray[np.float64], significant: NDArray[np.bool_]) -> list[str]:
    return [
        "neutral" if not yes else "strong_pillar" if d < 0 else "strong_stumbling_block"
        for d, yes in zip(delta.tolist(), significant.tolist(), strict=True)
    ]


def _counted(candidates: Sequence[Candidate]) -> NDArray[np.bool_]:
    return np.array([c.group != "canary" for c in candidates], dtype=np.bool_)


def _rounds(cube: GradeCube, done: int | Mapping[str, int] | None) -> int:
    if isinstance(done, int):
        return done
    if done is not None and cube.benchmark in done:
        return done[cube.benchmark]
    played = np.flatnonzero((cube.baseline >= 0).any(axis=0))
    return int(played[-1]) + 1 if len(played) else 0
