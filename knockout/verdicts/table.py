"""From grades to the verdict table: the only place that knows the table's columns.

Every number is computed from whole-number tallies without random draws (the power behind `mde`
uses fixed ones), so the same grades make the same table, byte for byte, in any order of problems.
See `knockout.stats` for the methods and `knockout.verdicts.rules` for the rules.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from knockout.config.sweep import VerdictRule
from knockout.ledger.grades import GradeCube
from knockout.verdicts.blocks import (
    POOLED,
    TIE,
    Block,
    Race,
    Tests,
    block_of,
    fixed_tests,
    pool,
    raced_tests,
)
from knockout.verdicts.columns import FEW, carrying, corrected, smallest_effects
from knockout.verdicts.overall import overall_evidence
from knockout.verdicts.race import raced_names, settle_cube, why

if TYPE_CHECKING:
    import pandas as pd

    from knockout.stats.sequential import Settlement

__all__ = ["COLUMNS", "POOLED", "build_verdicts", "verdict_key"]

COLUMNS = (
    "benchmark",
    "candidate",
    "group",
    "family",
    "token_ids",
    "tokens",
    "intervention",
    "strength",
    "replacement",
    "where",
    "first_step",
    "end_step",
    "members",
    "n_problems",
    "n_seeds",
    "pass1_baseline",
    "pass1_knockout",
    "delta",
    "ci_low",
    "ci_high",
    "ci_low_fdr",
    "ci_high_fdr",
    "eq_low",
    "eq_high",
    "p_value",
    "p_adjusted",
    "p_holm",
    "p_by",
    "p_bounded",
    "testable",
    "mde",
    "verdict",
    "verdict_nominal",
    "verdict_fdr",
    "evidence",
    "equivalent",
    "evidence_overall",
    "n_forked",
    "n_inherited",
    "n_missing",
    "n_missing_baseline",
    "n_missing_knockout",
    "delta_lowest",
    "delta_highest",
    "n_differing_cells",
    "n_differing_problems",
    "n_carrying",
    "few_carry",
    "won",
    "lost",
    "settled_round",
    "settled_as",
    "reason",
    "preliminary",
    "looks",
)


def build_verdicts(
    cubes: Sequence[GradeCube],
    rule: VerdictRule | None = None,
    *,
    planned: int | Mapping[str, int] | None = None,
    race: Race | None = None,
    preliminary: bool = False,
    looks: int = 1,
) -> pd.DataFrame:
    """The verdict table: a row per benchmark and candidate, then pooled rows.

    Args:
        cubes: One per benchmark. Pooled rows are added if there are two or more, for the
            candidates that all of them share; every problem weighs the same there, so a large
            benchmark weighs more than a small one.
        rule: Which rule fills `verdict`, at which level, for which target and margin; the default
            `VerdictRule()`. `verdict_nominal` and `verdict_fdr` are always there.
        planned: Planned hypotheses per benchmark (candidates and controls, not canaries), for all
            or by family; None counts those in the cube. One without data may still reach any level.
        race: What an adaptive sweep did; None for a fixed one. Then p-values, intervals and
            verdicts are those of `stats.sequential`, valid at any stopping time.
        preliminary: Whether the run is unfinished, for the column of that name.
        looks: How often the run was looked at with growing data, this time included, likewise.

    Returns:
        The frame with `COLUMNS`. A number that cannot be computed is NaN and `reason` says why; in
        an adaptive sweep `reason` also says what settled a candidate, or that it is open.

    Raises:
        ValueError: if `planned` is below the number of hypotheses here, or the sweep raced for
            another target.
    """
    import pandas as pd

    rule = rule or VerdictRule()
    if race is not None and race.rule.target != rule.target:
        raise ValueError(f"the sweep raced for target {race.rule.target}, not {rule.target}")
    blocks: list[tuple[Block, Tests, Settlement | None]] = []
    for cube in cubes:
        if race is None:
            block = block_of(cube, rule.target, None)
            blocks.append((block, fixed_tests(block), None))
            continue
        most = race.max_rounds[cube.benchmark]
        settled = settle_cube(
            cube,
            race.rounds_done[cube.benchmark],
            race.rule,
            planned=planned
            if planned is None or isinstance(planned, int)
            else sum(planned.values()),
            max_rounds=most,
            futility=race.futility,
        )
        block = block_of(cube, rule.target, settled)
        blocks.append((block, raced_tests(cube, settled, rule.target, most), settled))
    if len(blocks) >= 2:
        pooled = pool([block for block, _, _ in blocks], rule.target, adaptive=race is not None)
        if pooled.candidates:
            blocks.append((pooled, fixed_tests(pooled), None))
    tables = [_judge(*parts, race, rule, planned) for parts in blocks]
    for table in tables:
        table["preliminary"] = [preliminary] * len(table["candidate"])
        table["looks"] = [looks] * len(table["candidate"])
    names = [name for name in COLUMNS if name != "evidence_overall"]
    columns = {name: [value for table in tables for value in table[name]] for name in names}
    columns["evidence_overall"] = overall_evidence(columns, rule)
    # Names may contain what Arrow's strings cannot, such as half a surrogate pair; the others may
    # be missing, and stay whole numbers.
    objects = {
        name: pd.Series(columns[name], dtype=object)
        for name in ("candidate", "strength", "replacement", "end_step")
    }
    return pd.DataFrame({**columns, **objects}, columns=list(COLUMNS))


def _interventions(block: Block) -> dict[str, list[Any]]:
    """What each candidate changes; None if a kind has no such number."""
    all_of = [c.intervention for c in block.candidates]
    return {
        "intervention": [i.kind for i in all_of],
        "strength": [i.strength for i in all_of],
        "replacement": [i.replacement for i in all_of],
        "where": [i.where for i in all_of],
        "first_step": [i.first_step for i in all_of],
        "end_step": [i.end_step for i in all_of],
        "members": [list(c.members) for c in block.candidates],
    }


def verdict_key(row: Mapping[str, Any], rule: str | None = None) -> str:
    """The verdict of a row, neutral split by its evidence.

    Args:
        row: Of the table.
        rule: "nominal" or "fdr"; None for the rule that the table was asked for.

    Returns:
        "strong_pillar", "strong_stumbling_block", "equivalent" or "undetermined".
    """
    verdict = str(row["verdict"] if rule is None else row[f"verdict_{rule}"])
    if verdict != "neutral":
        return verdict
    return "equivalent" if row["equivalent"] else "undetermined"


def _judge(
    block: Block,
    tests: Tests,
    settled: Settlement | None,
    race: Race | None,
    rule: VerdictRule,
    planned: int | Mapping[str, int] | None,
) -> dict[str, list[Any]]:
    """The rows of one block, as columns."""
    from knockout.stats.sequential import bounded_p

    tally, reasons, alpha = block.tally, list(block.reasons), rule.alpha
    testable = np.array([not reason for reason in reasons], dtype=np.bool_)
    bounded = testable & (block.counts["n_problems"] >= 2)
    for i in np.flatnonzero(testable & ~bounded):
        reasons[i] = "one problem has no interval"
    p = np.where(testable, tests.p, np.nan)
    delta = tally.mean()
    differing = tally.counts[:, tally.numerators != 0].sum(axis=1)
    found = corrected(block, p, differing, rule, planned, exact=settled is None)

    level = alpha * (1 + TIE)
    names = {
        "nominal": _strong(delta, p <= level),
        "fdr": _strong(delta, found.adjusted["fdr"] <= level),
    }
    names.setdefault(rule.rule, _strong(delta, found.adjusted[rule.rule] <= level))
    intervals = [tests.interval(np.full(len(p), alpha)), tests.interval(found.levels)]
    inside = tests.equivalence(alpha)
    (low, high), (low_fdr, high_fdr), (eq_low, eq_high) = (
        tuple(np.where(bounded, side, np.nan) for side in pair) for pair in (*intervals, inside)
    )
    same = (eq_low > -rule.margin) & (eq_high < rule.margin)
    if settled is not None and race is not None:
        same = raced_names(settled, race.rule, rule, names, same)
        for i, reason in enumerate(reasons):
            hypothesis = block.candidates[i].group != "canary"
            reasons[i] = reason or why(
                settled, i, race.ended if hypothesis else "canaries run along"
            )
    verdict = names[rule.rule]

    units = np.maximum(tally.n, 1)
    base = np.where(tally.n > 0, block.base / units, np.nan)
    seen = smallest_effects(block, alpha if rule.rule == "nominal" else found.next)
    seen = np.where(testable, seen, np.nan)
    for i in np.flatnonzero(testable & np.isnan(seen)):
        reasons[i] = reasons[i] or "no possible loss would be seen with 80 % power"
    carriers = carrying(tally.values, tally.counts)
    called = np.array(
        [{a, b} != {"neutral"} for a, b in zip(verdict, names["nominal"], strict=True)]
    )
    counts = {name: values for name, values in block.counts.items() if name in COLUMNS}
    bounds = {
        name: np.where(tally.n > 0, total / max(block.planned, 1), np.nan)
        for name, total in block.sums.items()
    }
    columns: dict[str, Any] = {
        "benchmark": [block.name] * len(p),
        "candidate": [c.name for c in block.candidates],
        "group": [c.group for c in block.candidates],
        "family": [c.family for c in block.candidates],
        "token_ids": [list(c.token_ids) for c in block.candidates],
        "tokens": [list(c.tokens) for c in block.candidates],
        **_interventions(block),
        "pass1_baseline": base,
        "pass1_knockout": np.clip(np.round(base + delta, 12), 0, 1),
        "delta": delta,
        "ci_low": low,
        "ci_high": high,
        "ci_low_fdr": low_fdr,
        "ci_high_fdr": high_fdr,
        "eq_low": eq_low,
        "eq_high": eq_high,
        "p_value": p,
        "p_adjusted": found.adjusted["fdr"],
        "p_holm": found.adjusted["holm"],
        "p_by": found.adjusted["by"],
        "p_bounded": np.where(testable & (settled is None), bounded_p(tally), np.nan),
        "testable": found.inside,
        "mde": seen,
        "verdict": verdict,
        "verdict_nominal": names["nominal"],
        "verdict_fdr": names["fdr"],
        "evidence": [
            "effect" if v != "neutral" else "equivalent" if inside else "undetermined"
            for v, inside in zip(verdict, same.tolist(), strict=True)
        ],
        "equivalent": same,
        **counts,
        **bounds,
        "n_differing_cells": block.counts["won"] + block.counts["lost"],
        "n_carrying": carriers,
        "few_carry": called & (carriers <= FEW),
        "settled_round": [0] * len(p) if settled is None else settled.settled_round,
        "settled_as": [""] * len(p) if settled is None else list(settled.status),
        "reason": reasons,
    }
    return {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in columns.items()}


def _strong(delta: NDArray[np.float64], significant: NDArray[np.bool_]) -> list[str]:
    return [
        "neutral" if not yes else "strong_pillar" if d < 0 else "strong_stumbling_block"
        for d, yes in zip(delta.tolist(), significant.tolist(), strict=True)
    ]
