"""Many candidates that share their baselines: discoveries, luck, freeze lists, confirmation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from bench.calibration.generators import rates_like_published, shared
from bench.calibration.single import DESIGNS
from knockout.config.sweep import VerdictRule
from knockout.stats.interval import equivalence_interval
from knockout.stats.luck import expected_calls
from knockout.stats.multiplicity import adjust_bh, adjust_holm, can_reach
from knockout.stats.paired import Tally, pair, tally_cells, tally_problems
from knockout.stats.signflip import signflip_p, signflip_sizes_p
from knockout.verdicts.blocks import POOLED
from knockout.verdicts.overall import overall_evidence

Row = dict[str, Any]
LOSSES = {
    (30, 4): 0.25,
    (30, 16): 0.1,
    (100, 3): 0.1,
    (500, 1): 0.06,
    (500, 3): 0.03,
    (541, 1): 0.06,
}
BENCHMARKS = {"math500": 500, "aime24": 30, "aime25": 30, "hmmt25": 30, "ifeval": 541}


def discoveries(worlds: int) -> Iterator[Row]:
    """200 candidates without any pillar, and with 3.5 % of them.

    `all`: Benjamini-Hochberg over all 200. `fdr`: over those whose differing problems can reach the
    level, the product's rule. `mid_p`: the same with mid-p values. `by_forks`: the same with the
    level shared out by the number of forks (1.5 : .5 above and below the median).
    """
    for n, seeds in DESIGNS:
        for pillars in (0, 7):
            got: dict[str, list[tuple[float, float]]] = {}
            for world in range(worlds):
                rng = np.random.default_rng([n, seeds, pillars, world])
                rates = rates_like_published(rng, 200)
                losses = np.where(np.arange(200) < pillars, LOSSES[n, seeds], 0.0)
                base, knock, forks = shared(rng, n, seeds, rates, losses)
                pairs = pair(base, knock)
                tally, true = tally_problems(pairs), losses > 0
                p = signflip_p(tally)
                inside = can_reach((pairs.won != pairs.lost).sum(axis=1), 0.05)
                many = forks.sum(axis=(1, 2)) > np.median(
                    forks.sum(axis=(1, 2))[inside] if inside.any() else 0
                )
                weights = np.where(many, 1.5, 0.5)
                calls = {
                    "nominal": p <= 0.05,
                    "all": adjust_bh(p) <= 0.05,
                    "holm": adjust_holm(p) <= 0.05,
                    "fdr": _within(p, inside),
                    "mid_p": _within(_mid_p(tally), inside),
                    "by_forks": _within(np.minimum(p / weights, 1.0), inside),
                }
                for name, hit in calls.items():
                    false = (hit & ~true).sum() / max(hit.sum(), 1)
                    found = hit[true].mean() if pillars else np.nan
                    got.setdefault(name, []).append((float(false), float(found)))
            for name, values in got.items():
                false, found = np.mean(values, axis=0)
                yield {
                    "n_problems": n,
                    "n_seeds": seeds,
                    "pillars": pillars,
                    "rule": name,
                    "false_discoveries": false,
                    "found": found,
                }


def _within(p: np.ndarray, inside: np.ndarray) -> np.ndarray:
    hit = np.zeros(len(p), dtype=bool)
    if inside.any():
        hit[inside] = adjust_bh(p[inside]) <= 0.05
    return hit


def _mid_p(tally: Tally) -> np.ndarray:
    """Half of what is as extreme as observed counts."""
    whole = tally.numerators * (int(tally.denominators.max()) // tally.denominators)
    sizes = np.unique(np.abs(whole))
    sizes = sizes[sizes > 0]
    out = np.ones(len(tally.counts))
    for row, counts in enumerate(tally.counts):
        of = np.array([counts[np.abs(whole) == k].sum() for k in sizes], dtype=np.int64)
        total = abs(int(counts @ whole))
        if of.any() and total:
            step = 2 * int(np.gcd.reduce(sizes[of > 0]))
            beyond = total + step
            more = signflip_sizes_p(sizes, of, beyond) if beyond <= int(of @ sizes) else 0.0
            out[row] = (signflip_sizes_p(sizes, of, total) + more) / 2
    return out


def references(worlds: int) -> Iterator[Row]:
    """What more draws of the baseline are worth, and whether the sign-flip test stands them.

    d = knockout − mean of the reference draws of the same cell or problem. `coupled`: the baseline
    alone. `seeds`: four times as many baseline seeds. `controls`: the forks of 30 neutral controls
    in the same cell. `all candidates`: the forks of all, the pillars among them.
    """
    for n, seeds in DESIGNS:
        for kind, rate in (("like published", None), ("forks everywhere", 8.0)):
            got: dict[str, list[tuple[float, float]]] = {}
            for world in range(max(worlds // 2, 4)):
                rng = np.random.default_rng([n, seeds, world, len(kind), 3])
                rates = rates_like_published(rng, 80) if rate is None else np.full(80, rate)
                rates[50:] = rates_like_published(rng, 30, 1.5)  # controls
                losses = np.where(np.arange(80) < 5, LOSSES[n, seeds], 0.0)
                b = rng.beta(0.3, 0.3, (n, 1))
                state = rng.bit_generator.state
                del state
                base, knock, forks = _shared_at(rng, b, seeds, rates, losses)
                more = (rng.random((n, 4 * seeds)) < b).mean(axis=1)
                mine = knock[:50].mean(axis=2)
                cell = {
                    "coupled": base.astype(float),
                    "controls": _average(base, knock[50:], forks[50:]),
                    "all candidates": _average(base, knock, forks),
                }
                for name, reference in cell.items():
                    _note(got, name, mine - reference.mean(axis=1), losses[:50] > 0)
                wide = (base.sum(axis=1) + 4 * seeds * more) / (5 * seeds)
                _note(got, "seeds", mine - wide, losses[:50] > 0)
            for name, values in got.items():
                false, found = np.mean(values, axis=0)
                yield {
                    "n_problems": n,
                    "n_seeds": seeds,
                    "candidates": kind,
                    "reference": name,
                    "false_positives": false,
                    "power": found,
                }


def _shared_at(
    rng: np.random.Generator, b: np.ndarray, seeds: int, rates: np.ndarray, losses: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    base = rng.random((len(b), seeds)) < b
    shape = (len(rates), len(b), seeds)
    again = rng.exponential(1, shape) < rates[:, None, None] * rng.random((len(b), seeds))
    after = np.where(again, rng.random(shape) < b, base)
    after &= rng.random(shape) >= (losses / 0.5)[:, None, None]
    return base, after, again


def _average(base: np.ndarray, knock: np.ndarray, forks: np.ndarray) -> np.ndarray:
    return (base + np.where(forks, knock, 0).sum(axis=0)) / (1 + forks.sum(axis=0))


def _note(
    got: dict[str, list[tuple[float, float]]], name: str, moves: np.ndarray, true: np.ndarray
) -> None:
    whole = np.round(moves * 120).astype(np.int64)
    kinds, place = np.unique(whole, return_inverse=True)
    counts = np.stack(
        [np.bincount(row, minlength=len(kinds)) for row in place.reshape(moves.shape)]
    )
    p = signflip_p(Tally(kinds, np.full(len(kinds), 120), counts))
    got.setdefault(name, []).append(
        (float((p <= 0.05)[~true].mean()), float((p <= 0.05)[true].mean()))
    )


def luck(worlds: int) -> Iterator[Row]:
    """Nominal calls of sweeps in which nothing works, beside what was expected of them."""
    for n, seeds in DESIGNS:
        for pillars in (0, 20):
            seen, mean, quantile, above = [], [], [], []
            for world in range(worlds):
                rng = np.random.default_rng([n, seeds, world, pillars, 11])
                losses = np.where(np.arange(200) < pillars, 2 * LOSSES[n, seeds], 0.0)
                base, knock, _ = shared(rng, n, seeds, rates_like_published(rng, 200), losses)
                pairs = pair(base, knock)
                calls = int((signflip_p(tally_problems(pairs)) <= 0.05).sum())
                found = expected_calls((pairs.won - pairs.lost) / seeds, draws=1000)
                seen.append(calls)
                mean.append(found.mean)
                quantile.append(found.quantile)
                above.append(calls > found.quantile)
            yield {
                "n_problems": n,
                "n_seeds": seeds,
                "pillars": pillars,
                "calls_mean": np.mean(seen),
                "calls_median": np.median(seen),
                "calls_quantile_95": np.quantile(seen, 0.95),
                "expected_mean": np.mean(mean),
                "expected_quantile_95": np.mean(quantile),
                "exceeds": np.mean(above),
            }


def freezing(worlds: int) -> Iterator[Row]:
    """Five benchmarks: how many tokens that do nothing are kept, and how many pillars are frozen."""
    cases: tuple[tuple[float, tuple[str, ...]], ...] = (
        (0.0, ()),
        (0.03, ("math500",)),
        (0.03, ("math500", "ifeval")),
        (0.05, ("math500",)),
        (0.05, ("ifeval",)),
        (0.1, ("aime24", "aime25", "hmmt25")),
        (0.2, ("aime24",)),
    )
    for seeds in (1, 3, 8):
        for median in (0.3, 1.0):
            for loss, where in cases:
                kept, frozen, alone = [], [], []
                for world in range(max(worlds // 3, 3)):
                    rng = np.random.default_rng(
                        [seeds, int(10 * median), int(100 * loss), world, len(where)]
                    )
                    rates = rates_like_published(rng, 100, median)
                    rates[:4] = np.maximum(rates[:4], 0.5)
                    losses = np.where(np.arange(100) < 4, loss, 0.0)
                    evidence, one = _freeze(rng, seeds, rates, losses, where)
                    kept.append(np.mean([e == "equivalent" for e in evidence[4:]]))
                    frozen.append(np.mean([e == "equivalent" for e in evidence[:4]]))
                    alone.append(one[4:].mean())
                yield {
                    "n_seeds": seeds,
                    "median_rate": median,
                    "loss": loss,
                    "where": " ".join(where) or "nowhere",
                    "kept": np.mean(kept),
                    "kept_by_math500_alone": np.mean(alone),
                    "pillars_frozen": np.mean(frozen) if loss else np.nan,
                }


def _freeze(
    rng: np.random.Generator,
    seeds: int,
    rates: np.ndarray,
    losses: np.ndarray,
    where: tuple[str, ...],
) -> tuple[list[str], np.ndarray]:
    rule, c = VerdictRule(), len(rates)
    columns: dict[str, list[Any]] = {}
    pooled: Tally | None = None
    for name, n in BENCHMARKS.items():
        base, knock, _ = shared(rng, n, seeds, rates, losses if name in where else 0 * losses)
        pairs = pair(base, knock)
        tally = tally_problems(pairs)
        pooled = tally if pooled is None else pooled.merge(tally)
        inside = can_reach((pairs.won != pairs.lost).sum(axis=1), 0.05)
        _add(columns, name, tally, _within(signflip_p(tally), inside), n)
    assert pooled is not None
    _add(columns, POOLED, pooled, np.zeros(c, dtype=bool), sum(BENCHMARKS.values()))
    alone = np.array(columns["equivalent"][:c])
    return overall_evidence(columns, rule)[:c], alone


def _add(columns: dict[str, list[Any]], name: str, tally: Tally, hit: np.ndarray, n: int) -> None:
    low, high = equivalence_interval(tally)
    delta, p = tally.mean(), signflip_p(tally)
    word = np.where(delta < 0, "strong_pillar", "strong_stumbling_block")
    rows = {
        "candidate": list(range(len(p))),
        "benchmark": [name] * len(p),
        "verdict": np.where(hit, word, "neutral").tolist(),
        "verdict_nominal": np.where(p <= 0.05, word, "neutral").tolist(),
        "n_problems": [n] * len(p),
        "delta": delta.tolist(),
        "eq_low": low.tolist(),
        "equivalent": ((low > -0.02) & (high < 0.02)).tolist(),
    }
    for key, values in rows.items():
        columns.setdefault(key, []).extend(values)


def confirmation(worlds: int) -> Iterator[Row]:
    """Chance findings that are confirmed: problems move by ±.3 in 30 of 100 cases, on average by 0."""
    for n, seeds in ((30, 8), (100, 3), (500, 3)):
        rng = np.random.default_rng([n, seeds, 21])
        c = 20 * worlds
        moves = np.where(rng.random((c, n, 1)) < 0.3, rng.choice([-0.3, 0.3], (c, n, 1)), 0.0)

        def draw(
            moves: np.ndarray = moves, seeds: int = seeds, rng: np.random.Generator = rng
        ) -> np.ndarray:
            u = rng.random((*moves.shape[:2], seeds))
            return (u < np.maximum(moves, 0)).astype(np.int8) - (u < np.maximum(-moves, 0)).astype(
                np.int8
            )

        first, fresh = draw(), draw()
        half = np.arange(n) < n // 2
        called, sign = _test(first, "population")
        part, sign_part = _test(first[:, half], "population")
        for how, (again, other), chosen, old in (
            ("fresh seeds, population", _test(fresh, "population"), called, sign),
            ("fresh seeds, benchmark", _test(fresh, "benchmark"), called, sign),
            ("split", _test(first[:, ~half], "population"), part, sign_part),
        ):
            yield {
                "n_problems": n,
                "n_seeds": seeds,
                "how": how,
                "chosen": int(chosen.sum()),
                "confirmed": np.mean((again & (other == old))[chosen]) if chosen.any() else np.nan,
            }


def _test(moves: np.ndarray, target: str) -> tuple[np.ndarray, np.ndarray]:
    grades = np.zeros(moves.shape[1:], dtype=np.int8)
    grades[:] = 1
    pairs = pair(grades, np.where(moves < 0, 0, 1).astype(np.int8))
    gains = pair(0 * grades, np.where(moves > 0, 1, 0).astype(np.int8))
    both = type(pairs)(pairs.n, gains.won, pairs.lost, pairs.base, pairs.n_seeds)
    tally = tally_cells(both) if target == "benchmark" else tally_problems(both)
    return signflip_p(tally) <= 0.05, np.sign(tally.mean())
