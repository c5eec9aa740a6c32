"""Verdict rules: how the p-values of one family become verdicts. A new rule is one function.

A rule turns the evidence of a family (the hypotheses of one benchmark that are judged together)
into adjusted p-values; a candidate is called if its own is at most alpha. `verdict_rule` puts
it in the registry, and a package's entry point in the group `knockout.verdict_rules` makes its
module known to every command. `docs/extending.md` has an example.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from knockout.registry import Registry

__all__ = ["Family", "Rule", "find_rule", "rule_names", "verdict_rule"]

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Family:
    """The hypotheses of one benchmark that are judged together, with their data.

    Attributes:
        p: (C,) two-sided p-values, NaN if there is none.
        differing: (C,) problems (cells for target `benchmark`) that differ.
        planned: Hypotheses that were planned, at least C.
        alpha: Error level.
        exact: Whether p comes from the sign-flip test, whose smallest value follows from
            `differing`; not so in a race.
    """

    p: Floats
    differing: NDArray[np.int64]
    planned: int
    alpha: float
    exact: bool = True

    @property
    def unknown(self) -> int:
        """Planned hypotheses without a p-value."""
        return self.planned - int(np.isfinite(self.p).sum())

    def testable(self) -> NDArray[np.bool_]:
        """(C,) which can reach the level at all and so are corrected for (Tarone, Gilbert)."""
        from knockout.stats.multiplicity import can_reach

        known = np.isfinite(self.p)
        if not self.exact:
            return known
        found = np.zeros(len(self.p), dtype=np.bool_)
        found[known] = can_reach(self.differing[known], self.alpha, self.unknown)
        return found


Rule = Callable[[Family], Floats]

_RULES: Registry[Rule] = Registry("verdict rule", "knockout.verdict_rules")


def verdict_rule(name: str) -> Callable[[Rule], Rule]:
    """Registers a function from a `Family` to (C,) adjusted p-values under a name."""

    def register(rule: Rule) -> Rule:
        _RULES.add(name, rule, rule)
        return rule

    return register


def rule_names() -> tuple[str, ...]:
    """The rules that are known, those of installed packages among them."""
    return _RULES.names()


def find_rule(name: str) -> Rule:
    """The rule of this name.

    Raises:
        UsageError: There is none.
    """
    return _RULES.find(name)


@verdict_rule("nominal")
def nominal(family: Family) -> Floats:
    """No correction: the published rule."""
    return family.p


@verdict_rule("fdr")
def fdr(family: Family) -> Floats:
    """False discovery rate: Benjamini-Hochberg over what is testable."""
    from knockout.stats.multiplicity import adjust_bh

    inside = family.testable()
    adjusted = np.where(np.isfinite(family.p), 1.0, np.nan)
    adjusted[inside] = adjust_bh(family.p[inside], int(inside.sum()) + family.unknown)
    return adjusted


@verdict_rule("holm")
def holm(family: Family) -> Floats:
    """Any false discovery at all: Holm over everything that was planned."""
    from knockout.stats.multiplicity import adjust_holm

    return adjust_holm(family.p, family.planned)


@verdict_rule("by")
def by(family: Family) -> Floats:
    """False discovery rate under any dependence: Benjamini-Yekutieli over all that was planned."""
    from knockout.stats.multiplicity import adjust_by

    return adjust_by(family.p, family.planned)
