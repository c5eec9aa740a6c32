"""How a race's settlements enter the verdict table."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from knockout.config.sweep import VerdictRule
from knockout.errors import UsageError
from knockout.ledger.grades import GradeCube

if TYPE_CHECKING:
    from knockout.stats.sequential import Settlement

__all__ = ["raced_names", "settle_cube", "why"]


def settle_cube(
    cube: GradeCube,
    rounds_done: int,
    rule: VerdictRule,
    *,
    planned: int | None = None,
    max_rounds: int | None = None,
    futility: float | None = None,
) -> Settlement:
    """Which candidates of a benchmark are settled after its complete rounds (seeds).

    The scheduler calls this after each round and makes no more forks for what is not "open".
    Canaries are never settled. See `knockout.stats.sequential.settle` for arguments and proof.

    Raises:
        UsageError: The rule is neither `nominal` nor `fdr`, the two that have anytime-valid forms.
    """
    from knockout.stats.sequential import settle

    if rule.rule not in ("nominal", "fdr"):
        raise UsageError(f"a race settles by nominal or fdr; found verdict.rule {rule.rule!r}")
    return settle(
        cube.baseline[:, :rounds_done],
        cube.knockout[:, :, :rounds_done],
        rule="nominal" if rule.rule == "nominal" else "fdr",
        alpha=rule.alpha,
        margin=rule.margin,
        target=rule.target,
        m=planned,
        max_rounds=max_rounds or len(cube.seeds),
        counted=np.array([c.group != "canary" for c in cube.candidates], dtype=np.bool_),
        futility=futility,
    )


def raced_names(
    settled: Settlement,
    raced: VerdictRule,
    asked: VerdictRule,
    names: dict[str, list[str]],
    same: NDArray[np.bool_],
) -> NDArray[np.bool_]:
    """Puts what the race settled into the verdicts by its own rule; returns what is equivalent."""
    words = {"pillar": "strong_pillar", "stumbling_block": "strong_stumbling_block"}
    if asked.alpha == raced.alpha:
        names[raced.rule] = [words.get(status, "neutral") for status in settled.status]
        if asked.margin == raced.margin:
            return same | np.array([s == "equivalent" for s in settled.status], dtype=np.bool_)
    return same


def why(settled: Settlement, candidate: int, ended: str) -> str:
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
