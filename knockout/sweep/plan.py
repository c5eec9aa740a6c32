"""Cost and power of a sweep before anything is generated: what `knockout plan` shows."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from knockout.errors import UsageError
from knockout.stats.interval import equivalence_margin, resolution
from knockout.stats.power import (
    CORRELATION,
    SPREAD,
    Design,
    difficulty,
    expected_share,
    mde,
    never_rising,
    reachable,
)
from knockout.sweep.cost import (
    Cost,
    cost_from_frequency,
    cost_from_trajectories,
    with_pairs,
)
from knockout.sweep.earlier import Baselines
from knockout.sweep.racing import race_warnings

if TYPE_CHECKING:
    from knockout.config.sweep import Sweep
    from knockout.sweep.owed import PlannedBenchmark
    from knockout.sweep.prepare import Prepared
    from knockout.tokens.candidates import Candidate

__all__ = ["SEEDS", "Assumptions", "BenchmarkForecast", "Forecast", "forecast"]

SEEDS = tuple(range(1, 17))

# Divergences at which the ban only moved the support, per occurrence of the token, at temperature
# 0.6, top_k 20, top_p 0.95: .0052 and .0074 on IFEval and MATH-500 (bench/results/cost_model.json).
SUPPORT_MOVES = 0.006


@dataclass(frozen=True, slots=True)
class Assumptions:
    """What is assumed without a baseline.

    Attributes:
        mean_tokens: Length of a trajectory, in tokens; None: half of max_tokens.
        pass1: Pass@1 of the baseline.
        tokens_per_s: Speed of the engine.
        correlation: Of a problem's differences on two seeds (`stats.power.Design`).
        rates: (C,) occurrences of each candidate per trajectory, or None if unknown.
    """

    mean_tokens: float | None = None
    pass1: float = 0.5
    tokens_per_s: float = 1000.0
    correlation: float = CORRELATION
    rates: NDArray[np.float64] | None = None


@dataclass(frozen=True, slots=True)
class BenchmarkForecast:
    """One benchmark.

    Attributes:
        source: "baseline", "frequencies" or "bound" (nothing is known: assumes that
            every knockout is generated whole).
        forks, tokens, tokens_naive: Expected, over all seeds; tokens are of baselines and forks.
        tokens_audit: Expected, to generate audited knockouts again from scratch.
        mde_nominal, mde_fdr: Smallest detectable loss for each of `SEEDS`, without correction and
            with one over the candidates that can reach the level; NaN if none can be seen.
        family: Candidates that are expected to be corrected for, at the planned seeds.
        margin_best: Half-width of the equivalence interval of a candidate that never differs: no
            smaller margin can be shown on these problems.
        margin_usual: Margin within which the mean candidate, if it does nothing, is shown to lie
            in 80 of 100 sweeps with the planned seeds.
        square: Expected Σ d² over problems of the mean candidate.
        share: Share of cells that would differ in grade without an effect, for the mean candidate.
        correlation: Of a problem's differences on two seeds.
    """

    name: str
    n_problems: int
    n_seeds: int
    source: str
    mean_tokens: float
    forks: float
    tokens: float
    tokens_naive: float
    tokens_audit: float
    share: float
    correlation: float
    mde_nominal: NDArray[np.float64]
    mde_fdr: NDArray[np.float64]
    family: int
    margin_best: float
    margin_usual: float
    square: float

    @property
    def n_cells(self) -> int:
        """Problems × seeds."""
        return self.n_problems * self.n_seeds


@dataclass(frozen=True, slots=True)
class Forecast:
    """A whole sweep."""

    n_candidates: int
    benchmarks: tuple[BenchmarkForecast, ...]
    tokens_per_s: float
    alpha: float = 0.05
    margin: float = 0.02
    warnings: tuple[str, ...] = ()

    @property
    def tokens(self) -> float:
        """Generated tokens."""
        return sum(b.tokens for b in self.benchmarks)

    @property
    def tokens_naive(self) -> float:
        """Generated tokens of full re-runs."""
        return sum(b.tokens_naive for b in self.benchmarks)

    @property
    def tokens_audit(self) -> float:
        """Generated tokens of audits."""
        return sum(b.tokens_audit for b in self.benchmarks)

    @property
    def hours(self) -> float:
        """At the given speed, audits included."""
        return (self.tokens + self.tokens_audit) / self.tokens_per_s / 3600

    @property
    def pooled_margin(self) -> float:
        """`margin_usual` of all benchmarks' problems as one sample, which freeze lists go by."""
        n = sum(b.n_problems for b in self.benchmarks)
        return equivalence_margin(n, sum(b.square for b in self.benchmarks), self.alpha)

    def to_json(self) -> dict[str, Any]:
        """What `--json` prints."""

        def effects(values: NDArray[np.float64]) -> list[float | None]:
            return [None if np.isnan(v) else round(float(v), 4) for v in values]

        return {
            "n_candidates": self.n_candidates,
            "tokens": round(self.tokens),
            "tokens_naive": round(self.tokens_naive),
            "tokens_audit": round(self.tokens_audit),
            "tokens_per_s": self.tokens_per_s,
            "hours": round(self.hours, 3),
            "margin": self.margin,
            "pooled_margin": round(self.pooled_margin, 4),
            "warnings": list(self.warnings),
            "benchmarks": [
                {
                    "name": b.name,
                    "n_problems": b.n_problems,
                    "n_seeds": b.n_seeds,
                    "n_cells": b.n_cells,
                    "source": b.source,
                    "mean_tokens": round(b.mean_tokens, 1),
                    "forks": round(b.forks),
                    "tokens": round(b.tokens),
                    "tokens_naive": round(b.tokens_naive),
                    "tokens_audit": round(b.tokens_audit),
                    "share_differing": round(b.share, 4),
                    "seed_correlation": round(b.correlation, 4),
                    "seeds": list(SEEDS),
                    "mde_nominal": effects(b.mde_nominal),
                    "mde_fdr": effects(b.mde_fdr),
                    "n_corrected": b.family,
                    "margin_best": round(b.margin_best, 4),
                    "margin_usual": round(b.margin_usual, 4),
                }
                for b in self.benchmarks
            ],
        }


def forecast(
    prepared: Prepared, assumed: Assumptions, baselines: dict[str, Baselines] | None = None
) -> Forecast:
    """Predicts cost and power of a sweep.

    Args:
        prepared: The sweep with its problems and candidates looked up.
        assumed: Values to use without a baseline.
        baselines: Of an earlier run with the same model and sampling, by benchmark.
    """
    plan, sweep = prepared.plan, prepared.sweep
    hypotheses = [c for c in plan.candidates if c.group != "canary"]
    return Forecast(
        n_candidates=len(hypotheses),
        benchmarks=tuple(
            _one(
                benchmark,
                hypotheses,
                sweep,
                assumed,
                (baselines or {}).get(benchmark.name),
            )
            for benchmark in plan.benchmarks
        ),
        tokens_per_s=assumed.tokens_per_s,
        alpha=sweep.verdict.alpha,
        margin=sweep.verdict.margin,
        warnings=tuple(
            warning
            for benchmark in plan.benchmarks
            for warning in race_warnings(
                sweep.verdict,
                benchmark.name,
                len(benchmark.problems),
                benchmark.n_seeds,
                len(hypotheses),
            )
            if sweep.adaptive is not None
        ),
    )


def _one(
    benchmark: PlannedBenchmark,
    candidates: list[Candidate],
    sweep: Sweep,
    assumed: Assumptions,
    known: Baselines | None,
) -> BenchmarkForecast:
    bans = [c.token_ids for c in candidates]
    n = len(benchmark.problems)
    cells = n * benchmark.n_seeds
    if known is not None:
        source = "baseline"
        cost = cost_from_trajectories(
            known.trajectories,
            bans,
            truncates=benchmark.sampling.truncates,
            support_moves=SUPPORT_MOVES,
        )
        shares = expected_share(known.right, known.n_seeds, cost.forks)
    else:
        length = assumed.mean_tokens or sum(p.max_tokens for p in benchmark.problems) / n / 2
        if assumed.rates is not None:
            source, cost = "frequencies", cost_from_frequency(assumed.rates, length)
        else:
            source = "bound"
            cost = Cost(np.ones(len(bans)), np.full(len(bans), length), length)
        shares = cost.forks * 2 * assumed.pass1 * (1 - assumed.pass1)
    cost = with_pairs(cost, _members(candidates))
    if known is not None:
        cost = known.seen_cost(candidates, cost)
    share = float(shares.mean()) if len(bans) else 0.0
    scratch = cells * cost.length * (1 + len(bans))
    forked = sweep.strategy == "fork"
    audit = sweep.audit * cells * cost.length * len(bans) if forked else 0.0
    tokens = cells * (cost.length + cost.tokens.sum())
    rule, correlation = sweep.verdict, assumed.correlation
    pass1, spread = assumed.pass1, SPREAD
    if known is not None:
        pass1, spread = difficulty(known.right, known.n_seeds)
        if known.correlation is not None:
            correlation = known.correlation

    def design(seeds: int, of: float) -> Design:
        # For target benchmark each cell is a trial, and only its noise counts.
        of, agree, p = round(of, 5), round(correlation, 4), round(pass1, 4)
        if rule.target == "benchmark":
            return Design(n * seeds, 1, of, agree, p, round(spread, 2))
        return Design(n, seeds, of, agree, p, round(spread, 2))

    def family(seeds: int) -> int:
        kinds, place = np.unique(np.round(shares, 3), return_inverse=True)
        designs = [design(seeds, float(kind)) for kind in kinds]
        differs = np.array([1 - d.differences(0.0)[d.n_seeds] for d in designs])
        if not len(kinds):
            return 1
        return reachable(differs[place.ravel()], designs[0].n_problems, rule.alpha)

    square = n * share / benchmark.n_seeds * (1 + (benchmark.n_seeds - 1) * correlation)
    return BenchmarkForecast(
        name=benchmark.name,
        n_problems=n,
        n_seeds=benchmark.n_seeds,
        source=source,
        mean_tokens=cost.length,
        forks=float(cells * cost.forks.sum()),
        tokens=float(min(tokens, scratch) if forked else scratch),
        tokens_naive=float(scratch),
        tokens_audit=float(audit),
        share=share,
        correlation=correlation,
        mde_nominal=never_rising(np.array([mde(design(s, share), rule.alpha) for s in SEEDS])),
        mde_fdr=never_rising(
            np.array([mde(design(s, share), rule.alpha / family(s)) for s in SEEDS])
        ),
        family=family(benchmark.n_seeds),
        margin_best=resolution(n, rule.alpha),
        margin_usual=equivalence_margin(n, square, rule.alpha),
        square=square,
    )


def _members(candidates: list[Candidate]) -> dict[int, tuple[int, int]]:
    """For each pair the places of its members."""
    place = {c.name: n for n, c in enumerate(candidates)}
    return {
        n: (place[c.members[0]], place[c.members[1]])
        for n, c in enumerate(candidates)
        if c.members and place.keys() >= set(c.members)
    }


def rates_from_file(
    path: Path, column: str, ids_column: str, per: float, bans: list[tuple[int, ...]]
) -> NDArray[np.float64]:
    """Occurrences of each ban per trajectory, from a table of token frequencies.

    Args:
        path: CSV or Parquet.
        column: Column of counts.
        ids_column: Column of token ids.
        per: Trajectories over which the counts were taken.
        bans: C sets of token ids; ids that the table lacks count 0.

    Raises:
        UsageError: The file or a column is missing.
    """
    import pandas as pd

    try:
        table = pd.read_parquet(path) if path.suffix == ".parquet" else pd.read_csv(path)
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: cannot be read as a table: {error}") from None
    for name in (column, ids_column):
        if name not in table.columns:
            raise UsageError(
                f"{path}: found no column {name!r}; it has {', '.join(map(str, table.columns))}"
            )
    ids, counts = (
        pd.to_numeric(table[name], errors="coerce").to_numpy(float) for name in (ids_column, column)
    )
    wrong = ~(np.isfinite(ids) & np.isfinite(counts) & (counts >= 0))
    if wrong.any():
        row = table.iloc[int(wrong.argmax())]
        raise UsageError(
            f"{path}: row {int(wrong.argmax()) + 1}: found {ids_column} {row[ids_column]!r} with "
            f"{column} {row[column]!r}; expected a token id and a count of 0 or more"
        )
    of = dict(zip(ids.astype(int), counts, strict=True))
    return np.array([sum(of.get(token, 0.0) for token in ban) for ban in bans]) / per
