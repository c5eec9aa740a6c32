"""Calibration study: do tests, intervals and racing keep what they promise?

Simulated sweeps in which the truth is known. Problems differ in difficulty (a problem is solved
with probability b ~ Beta(.6, .6)); a candidate forks in a share f of the cells, unevenly over
problems, and a forked cell is a fresh draw with the knockout's own probability. Two models say
where differences come from:

- `fork`: f of the cells fork; grades differ where the fresh draw happens to (about .27 f);
- `grade`: the grades themselves differ in a share f of the cells; each problem has its own chance
  that a difference is a loss, so that under the null problems move although their mean does not;
- `skewed`: the same with a mean of zero that no symmetry makes (a null only).

Run, in parts of a few minutes each on one core:

    export OMP_NUM_THREADS=1
    python bench/calibration.py --out bench/results/calibration \\
        --only fixed_design --only fixed_problems --only power_curves
    python bench/calibration.py --out bench/results/calibration \\
        --only peeking --only false_equivalence --only discoveries --only racing --only speed
    python bench/calibration.py --out bench/results/calibration --worlds 30 --only racing_futility
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from knockout.ledger.grades import GradeCube
from knockout.method.interventions import ban
from knockout.stats.interval import mean_interval
from knockout.stats.multiplicity import adjust_bh, adjust_holm
from knockout.stats.paired import Pairs, pair, tally_cells, tally_problems
from knockout.stats.power import plan_mde
from knockout.stats.power import power as predicted_power
from knockout.stats.sequential import confidence_sequence, settle
from knockout.stats.signflip import signflip_p
from knockout.tokens.candidates import Candidate

PROBLEMS, SEEDS, SHARES = (30, 100, 500), (1, 3, 8), (0.05, 0.3, 1.0)
Row = dict[str, Any]


def spread(rng: np.random.Generator, mean: float, shape: tuple[int, ...]) -> np.ndarray:
    """Shares that differ from problem to problem around a mean."""
    return np.ones(shape) if mean >= 1 else rng.beta(2 * mean, 2 * (1 - mean), shape)


def fork_model(
    rng: np.random.Generator, runs: int, n: int, seeds: int, share: float, effect: float
) -> tuple[Pairs, float]:
    """Independent sweeps of one candidate; the knockout solves (1 − effect) as often. And Δ."""
    b = rng.beta(0.6, 0.6, (runs, n))
    forked = spread(rng, share, (runs, n))
    won, lost = (np.zeros((runs, n), dtype=np.int64) for _ in range(2))
    for _ in range(seeds):
        fork = rng.random((runs, n)) < forked
        before = rng.random((runs, n)) < b
        after = np.where(fork, rng.random((runs, n)) < b * (1 - effect), before)
        won += after & ~before
        lost += before & ~after
    total = np.full((runs, n), seeds)
    return Pairs(total, won, lost, np.zeros_like(total), seeds), -share * 0.5 * effect


def grade_model(
    rng: np.random.Generator, runs: int, n: int, seeds: int, share: float, effect: float
) -> tuple[Pairs, float]:
    """Grades differ in `share` of the cells, (1 + effect)/2 of them losses, problem by problem."""
    lose = (1 + effect) / 2
    losing = rng.beta(4 * lose, 4 * (1 - lose), (runs, n))
    won, lost = (np.zeros((runs, n), dtype=np.int64) for _ in range(2))
    for _ in range(seeds):
        differs = rng.random((runs, n)) < share
        loses = rng.random((runs, n)) < losing
        won += differs & ~loses
        lost += differs & loses
    total = np.full((runs, n), seeds)
    return Pairs(total, won, lost, np.zeros_like(total), seeds), -share * effect


def skewed_model(
    rng: np.random.Generator, runs: int, n: int, seeds: int, share: float, effect: float
) -> tuple[Pairs, float]:
    """Δ = 0 without symmetry: one problem in ten loses nine times what each other one gains."""
    losing = np.where(rng.random((runs, n)) < 0.1, 0.95, 0.45)
    won, lost = (np.zeros((runs, n), dtype=np.int64) for _ in range(2))
    for _ in range(seeds):
        differs = rng.random((runs, n)) < share
        loses = rng.random((runs, n)) < losing
        won += differs & ~loses
        lost += differs & loses
    total = np.full((runs, n), seeds)
    return Pairs(total, won, lost, np.zeros_like(total), seeds), 0.0


MODELS: dict[str, Callable[..., tuple[Pairs, float]]] = {
    "fork": fork_model,
    "grade": grade_model,
    "skewed": skewed_model,
}


def fixed_design(runs: int, seed: int) -> Iterator[Row]:
    """False positives and coverage of one candidate in a fixed design, target population."""
    for model, draw in MODELS.items():
        for effect in (0.0,) if model == "skewed" else (0.0, 0.2, 0.6):
            for n in PROBLEMS:
                for seeds in SEEDS:
                    for share in SHARES:
                        key = [seed, n, seeds, int(100 * share), int(10 * effect), len(model)]
                        pairs, truth = draw(
                            np.random.default_rng(key), runs, n, seeds, share, effect
                        )
                        tally = tally_problems(pairs)
                        p = signflip_p(tally)
                        low, high = mean_interval(tally, p)
                        yield {
                            "model": model,
                            "effect": effect,
                            "n_problems": n,
                            "n_seeds": seeds,
                            "share": share,
                            "delta": truth,
                            "rejected": np.mean(p <= 0.05),
                            "coverage": np.mean((low <= truth) & (truth <= high)),
                            "missed_low": np.mean(truth < low),
                            "missed_high": np.mean(truth > high),
                            "width": np.mean(high - low),
                            "differing_problems": np.mean(((pairs.won + pairs.lost) > 0).sum(1)),
                        }


def fixed_problems(runs: int, seed: int) -> Iterator[Row]:
    """Target benchmark: the problems stay, only seeds are drawn again; truth is their own Δ."""
    for n in PROBLEMS:
        for seeds in SEEDS[1:]:
            for share in SHARES:
                for kind in ("still", "mixed"):
                    rng = np.random.default_rng([seed, n, seeds, int(100 * share), len(kind)])
                    # still: no problem moves. mixed: half of them gain what the others lose.
                    losing = np.full(n, 0.5)
                    if kind == "mixed":
                        losing[: n // 2], losing[n // 2 :] = 0.9, 0.1
                    won, lost = (np.zeros((runs, n), dtype=np.int64) for _ in range(2))
                    for _ in range(seeds):
                        differs = rng.random((runs, n)) < share
                        loses = rng.random((runs, n)) < losing
                        won += differs & ~loses
                        lost += differs & loses
                    total = np.full((runs, n), seeds)
                    tally = tally_cells(Pairs(total, won, lost, np.zeros_like(total), seeds))
                    p = signflip_p(tally)
                    low, high = mean_interval(tally, p)
                    yield {
                        "problems": kind,
                        "n_problems": n,
                        "n_seeds": seeds,
                        "share": share,
                        "rejected": np.mean(p <= 0.05),
                        "coverage": np.mean((low <= 0) & (high >= 0)),
                        "width": np.mean(high - low),
                    }


def power_curves(runs: int, seed: int) -> Iterator[Row]:
    """Simulated power beside what `knockout plan` predicts."""
    for n in PROBLEMS:
        for seeds in SEEDS:
            for share in (0.05, 0.3):
                smallest = float(plan_mde(n, [seeds], share=share)[0])
                for factor in (0.5, 0.75, 1.0, 1.5):
                    effect = min(1.0, factor * smallest)
                    rng = np.random.default_rng([seed, n, seeds, int(100 * share), 9])
                    differs = max(share, effect)
                    u = rng.random((runs, n, seeds))
                    lost = u < (differs + effect) / 2
                    won = (u < differs) & ~lost
                    total = np.full((runs, n), seeds)
                    pairs = Pairs(
                        total, won.sum(axis=2), lost.sum(axis=2), np.zeros_like(total), seeds
                    )
                    p = signflip_p(tally_problems(pairs))
                    yield {
                        "n_problems": n,
                        "n_seeds": seeds,
                        "share": share,
                        "effect": effect,
                        "mde": smallest,
                        "power": np.mean(p <= 0.05),
                        "predicted": float(predicted_power(effect, n * seeds, share)),
                    }


def sweep(
    rng: np.random.Generator, n: int, rounds: int, forks: np.ndarray, effects: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """One benchmark with C candidates: baseline (P, R), knockout and forked (C, P, R).

    A candidate with effect x loses x of Pass@1 (where its forks can: it forks at least that much).
    """
    b = rng.beta(0.8, 0.5, n)
    baseline = rng.random((n, rounds)) < b[:, None]
    c = len(forks)
    forked_share = np.maximum(forks, np.minimum(1, 1.3 * effects / b.mean()))
    forked = rng.random((c, n, rounds)) < forked_share[:, None, None]
    kept = 1 - np.minimum(1, effects / (forked_share * b.mean()))
    fresh = rng.random((c, n, rounds)) < (kept[:, None] * b)[:, :, None]
    knockout = np.where(forked, fresh, baseline)
    return baseline.astype(np.int8), knockout.astype(np.int8), forked


def discoveries(worlds: int, seed: int) -> Iterator[Row]:
    """False discovery rate with 3 % true pillars, fixed design and racing, 100 candidates."""
    for n in PROBLEMS:
        for effect in (0.05, 0.15):
            got: list[Row] = []
            for world in range(worlds):
                rng = np.random.default_rng([seed, n, int(100 * effect), world])
                forks = np.clip(rng.lognormal(np.log(0.15), 0.8, 100), 0.005, 1)
                effects = np.where(np.arange(100) < 3, effect, 0.0)
                base, knock, _ = sweep(rng, n, 8, forks, effects)
                true = effects > 0
                p = signflip_p(tally_problems(pair(base, knock)))
                sets = {"bh": adjust_bh(p) <= 0.05, "holm": adjust_holm(p) <= 0.05}
                sets["nominal"] = p <= 0.05
                for target in ("population", "benchmark"):
                    found = settle(base, knock, target=target)
                    sets[f"race_{target}"] = np.array(
                        [s in ("pillar", "stumbling_block") for s in found.status]
                    )
                got += [
                    {
                        "method": name,
                        "fdp": (hit & ~true).sum() / max(hit.sum(), 1),
                        "found": (hit & true).sum() / 3,
                    }
                    for name, hit in sets.items()
                ]
            frame = pd.DataFrame(got).groupby("method", sort=False).mean()
            for method, row in frame.iterrows():
                yield {
                    "n_problems": n,
                    "effect": effect,
                    "method": method,
                    "fdr": row.fdp,
                    "pillars_found": row.found,
                }


def peeking(worlds: int, seed: int) -> Iterator[Row]:
    """Racing with nothing to find, a peek after each of 8 rounds, each candidate by itself.

    `even`: half of the problems gain what the others lose. `skewed`: one problem in ten loses nine
    times what each other one gains, so that the mean is zero but no symmetry helps. With target
    population each candidate draws its own problems' effects; with target benchmark they are fixed.
    """
    for target in ("population", "benchmark"):
        for n in PROBLEMS:
            for share in SHARES:
                for kind in ("even", "skewed"):
                    wrong = naive = total = 0
                    for world in range(worlds):
                        key = [seed, n, int(100 * share), world, len(target), len(kind)]
                        rng = np.random.default_rng(key)
                        base = rng.random((n, 8)) < 0.5
                        lose = _losing(rng, n, kind, fixed=target == "benchmark")
                        # A right cell can only be lost and a wrong one only be won.
                        flips = rng.random((50, n, 8)) < share * np.where(base, lose, 1 - lose)
                        base8, knock = base.astype(np.int8), (base ^ flips).astype(np.int8)
                        found = settle(base8, knock, rule="nominal", target=target, margin=0.001)
                        wrong += sum(s in ("pillar", "stumbling_block") for s in found.status)
                        naive += int(_repeated(base8, knock, target).sum())
                        total += 50
                    yield {
                        "target": target,
                        "n_problems": n,
                        "share": share,
                        "problems": kind,
                        "errors": wrong / total,
                        "errors_of_repeated_fixed_tests": naive / total,
                    }


def _losing(rng: np.random.Generator, n: int, kind: str, *, fixed: bool) -> np.ndarray:
    """(50 or 1, P, 1) chance that a difference is a loss; .5 on average."""
    strong, rate = (0.8, 0.5) if kind == "even" else (0.95, 0.1)
    weak = 0.5 - (strong - 0.5) * rate / (1 - rate)
    if fixed:
        hit = rng.permutation(n)[None, :, None] < round(rate * n)
    else:
        hit = rng.random((50, n, 1)) < rate
    return np.where(hit, strong, weak)


def _repeated(base: np.ndarray, knock: np.ndarray, target: str) -> np.ndarray:
    """What peeking does to a fixed-sample test: significant after any of the rounds."""
    units = tally_cells if target == "benchmark" else tally_problems
    looks = [units(pair(base[:, :r], knock[:, :, :r])) for r in (1, 2, 4, 8)]
    return np.any([signflip_p(tally) <= 0.05 for tally in looks], axis=0)


def false_equivalence(worlds: int, seed: int) -> Iterator[Row]:
    """A true Δ that lies exactly at the margin: how often is it called equivalent?"""
    for target in ("population", "benchmark"):
        for n in PROBLEMS:
            for share in SHARES:
                wrong = fixed = 0
                margin = 0.5 * share * 0.3
                for world in range(worlds):
                    rng = np.random.default_rng([seed, n, int(100 * share), world, 77])
                    base = rng.random((n, 8)) < 0.5
                    lost = rng.random((50, n, 8)) < share * 0.3
                    base8, gone = base.astype(np.int8), (base & ~lost).astype(np.int8)
                    edge = settle(base8, gone, rule="nominal", target=target, margin=margin)
                    wrong += sum(s == "equivalent" for s in edge.status)
                    pairs = pair(base8, gone)
                    tally = tally_cells(pairs) if target == "benchmark" else tally_problems(pairs)
                    low, high = mean_interval(tally, signflip_p(tally))
                    fixed += int(((low > -margin) & (high < margin)).sum())
                yield {
                    "target": target,
                    "n_problems": n,
                    "share": share,
                    "margin": margin,
                    "racing": wrong / (50 * worlds),
                    "fixed": fixed / (50 * worlds),
                }


def racing(worlds: int, seed: int) -> Iterator[Row]:
    """Forks of racing against the fixed design at the published base rates.

    500 problems, 100 candidates, 3.5 % pillars (3 or 4 of 100), no stumbling block, 16 seeds at
    most. `rock` candidates fork in .37 of the cells on average (the published list's saving of
    2.7), `control` ones in .14 (7.2). A verdict is right when a pillar is found or a neutral one
    is shown to lie within ± margin. `matched_seeds` is the smallest fixed design whose right
    verdicts are as many as racing's; it can only be known afterwards.
    """
    seeds = 16
    for kind, mean_share in (("rock", 0.37), ("control", 0.14)):
        for effect in (0.05, 0.1):
            drawn = []
            for world in range(worlds):
                rng = np.random.default_rng([seed, int(100 * effect), world, len(kind)])
                forks = np.clip(rng.lognormal(0, 1.0, 100), None, 20)
                for _ in range(20):  # scaled so that the clipped shares have the wanted mean
                    forks = forks * mean_share / np.minimum(forks, 1).mean()
                effects = np.where(np.arange(100) < 3 + world % 2, effect, 0.0)
                drawn.append((*sweep(rng, 500, seeds, np.minimum(forks, 1), effects), effects > 0))
            for target in ("population", "benchmark"):
                tests = [_fixed_tests(base, knock, seeds, target) for base, knock, _, _ in drawn]
                for margin in (0.02, 0.03, 0.05):
                    yield {
                        "list": kind,
                        "target": target,
                        "effect": effect,
                        "margin": margin,
                        **_race_against_fixed(drawn, tests, target, margin, seeds),
                    }


def _fixed_tests(base: np.ndarray, knock: np.ndarray, seeds: int, target: str) -> list[Any]:
    out = []
    for s in range(1, seeds + 1):
        pairs = pair(base[:, :s], knock[:, :, :s])
        tally = tally_cells(pairs) if target == "benchmark" else tally_problems(pairs)
        p = signflip_p(tally)
        out.append((adjust_bh(p) <= 0.05, *mean_interval(tally, p)))
    return out


def _race_against_fixed(
    drawn: list[Any], tests: list[Any], target: str, margin: float, seeds: int
) -> Row:
    ratio, right, agree, rounds, found_share = [], [], [], [], []
    fixed_right = np.zeros((len(drawn), seeds))
    fixed_found = []
    forks_by_seed = np.zeros((len(drawn), seeds))
    raced_forks = np.zeros(len(drawn))
    for w, ((base, knock, forked, true), fixed) in enumerate(zip(drawn, tests, strict=True)):
        found = settle(base, knock, target=target, margin=margin, max_rounds=seeds)
        status = np.array(found.status)
        per_round = forked.sum(axis=1)
        used = sum(per_round[c, : found.rounds[c]].sum() for c in range(len(status)))
        raced_forks[w] = used
        forks_by_seed[w] = per_round.sum(axis=0).cumsum()
        ratio.append(used / forks_by_seed[w, -1])
        right.append(np.where(true, status == "pillar", status == "equivalent").mean())
        found_share.append((status == "pillar")[true].mean())
        rounds.append(found.rounds.mean())
        for s, (hit, low, high) in enumerate(fixed):
            same = ~hit & (low > -margin) & (high < margin)
            fixed_right[w, s] = np.where(true, hit, same).mean()
        hit = fixed[-1][0]
        fixed_found.append(hit[true].mean())
        agree.append(((status == "pillar") == hit).mean())
    enough = np.flatnonzero(fixed_right.mean(axis=0) >= np.mean(right))
    matched = int(enough[0]) + 1 if len(enough) else seeds
    return {
        "forks_of_16_seeds": np.mean(ratio),
        "matched_seeds": matched,
        "forks_of_matched": raced_forks.sum() / forks_by_seed[:, matched - 1].sum(),
        "mean_rounds": np.mean(rounds),
        "right": np.mean(right),
        "right_fixed_16": fixed_right[:, -1].mean(),
        "same_verdict_as_fixed_16": np.mean(agree),
        "pillars_found": np.mean(found_share),
        "pillars_found_fixed_16": np.mean(fixed_found),
    }


def racing_futility(worlds: int, seed: int) -> Iterator[Row]:
    """What dropping futile candidates saves and costs, against the fixed 16-seed design.

    The sweeps of `racing`, and `mixed` lists, half rocks and half controls; the same 3.5 % pillars.
    `loss` is their effect. `same_verdict` compares pillar, stumbling block or neutral,
    `same_evidence` also whether a neutral is equivalent. `regretted` is the share of candidates
    dropped as futile whose effect the same race claims when it drops nobody.
    """
    seeds = 16
    shares = {"rock": (0.37,), "control": (0.14,), "mixed": (0.37, 0.14)}
    for kind, means in shares.items():
        for loss in (0.02, 0.05):
            drawn = []
            for world in range(worlds):
                rng = np.random.default_rng([seed, int(100 * loss), world, len(kind), 5])
                forks = np.concatenate(
                    [_fork_shares(rng, mean, 100 // len(means)) for mean in means]
                )
                # Every other one from each half, so that a mixed list has pillars of both kinds.
                pillars = np.linspace(0, 99, 3 + world % 2).astype(int)
                effects = np.where(np.isin(np.arange(100), pillars), loss, 0.0)
                drawn.append((*sweep(rng, 500, seeds, forks, effects), effects > 0))
            for target in ("population", "benchmark"):
                tests = [_fixed_test(base, knock, target) for base, knock, _, _ in drawn]
                for rule in ("fdr", "nominal"):
                    for margin in (0.02, 0.03, 0.05):
                        for futility in (None, 0.05):
                            yield {
                                "list": kind,
                                "loss": loss,
                                "target": target,
                                "rule": rule,
                                "margin": margin,
                                "futility": "off" if futility is None else futility,
                                **_dropping(drawn, tests, target, rule, margin, futility),
                            }


def _fork_shares(rng: np.random.Generator, mean: float, n: int) -> np.ndarray:
    """Shares of the cells in which candidates fork, uneven, with this mean."""
    forks = np.clip(rng.lognormal(0, 1.0, n), None, 20)
    for _ in range(20):  # scaled so that the clipped shares have the wanted mean
        forks = forks * mean / np.minimum(forks, 1).mean()
    return np.minimum(forks, 1)


def _fixed_test(base: np.ndarray, knock: np.ndarray, target: str) -> tuple[np.ndarray, ...]:
    pairs = pair(base, knock)
    tally = tally_cells(pairs) if target == "benchmark" else tally_problems(pairs)
    p = signflip_p(tally)
    return tally.mean(), p, adjust_bh(p), *mean_interval(tally, p)


def _dropping(
    drawn: list[Any], tests: list[Any], target: str, rule: str, margin: float, futility: Any
) -> Row:
    rows = []
    dropped = regretted = 0
    for (base, knock, forked, true), (delta, p, bh, low, high) in zip(drawn, tests, strict=True):
        options = {"target": target, "rule": rule, "margin": margin, "max_rounds": 16}
        found = settle(base, knock, futility=futility, **options)
        status = np.array(found.status)
        verdict = np.select([status == "pillar", status == "stumbling_block"], [-1, 1], 0)
        # What a table of the fixed design says, and of the race: a futile or open candidate counts
        # as equivalent where its confidence sequence says so.
        hit = (p if rule == "nominal" else bh) <= 0.05
        fixed = np.where(hit, np.sign(delta), 0)
        fixed_same = ~hit & (low > -margin) & (high < margin)
        lower, upper = confidence_sequence(base, knock, found.rounds, target=target, max_rounds=16)
        inside = (status == "equivalent") | ((lower > -margin) & (upper < margin))
        same = (verdict == 0) & inside
        per_round = forked.sum(axis=1)
        used = sum(per_round[c, : found.rounds[c]].sum() for c in range(len(status)))
        rows.append(
            {
                "forks_of_16_seeds": used / per_round.sum(),
                "same_verdict": (verdict == fixed).mean(),
                "same_evidence": ((verdict == fixed) & (same == fixed_same)).mean(),
                "pillars_found": (verdict == -1)[true].mean(),
                "pillars_found_fixed": (fixed == -1)[true].mean(),
                "false_effects": (verdict != 0)[~true].mean(),
                "false_effects_fixed": (fixed != 0)[~true].mean(),
                "equivalent": same.mean(),
                "equivalent_fixed": fixed_same.mean(),
                "futile": (status == "futile").mean(),
            }
        )
        if futility is not None:
            patient = np.array(settle(base, knock, **options).status)
            gone = status == "futile"
            dropped += int(gone.sum())
            regretted += int((gone & np.isin(patient, ("pillar", "stumbling_block"))).sum())
    means = pd.DataFrame(rows).mean().to_dict()
    return {**means, "regretted": regretted / max(dropped, 1)}


def speed() -> Iterator[Row]:
    """Grades to table at 200 candidates × 1,131 problems × 16 seeds, five benchmarks and pooled."""
    from knockout.verdicts.table import build_verdicts

    rng = np.random.default_rng(0)
    infos = tuple(Candidate(f"c{i}", ban((i,))) for i in range(200))
    cubes = []
    sizes = {"math500": 500, "aime24": 30, "aime25": 30, "hmmt25": 30, "ifeval": 541}
    for name, n in sizes.items():
        base, knock, forked = sweep(rng, n, 16, np.linspace(0.01, 1, 200), np.zeros(200))
        ids = tuple(str(i) for i in range(n))
        cubes.append(GradeCube(name, infos, ids, tuple(range(16)), base, knock, forked))
    for label, options in (
        ("fixed, population", {}),
        ("fixed, benchmark", {"target": "benchmark"}),
        ("racing, population", {"max_rounds": 16}),
        ("racing, benchmark", {"max_rounds": 16, "target": "benchmark"}),
    ):
        wall, cpu = time.perf_counter(), time.process_time()
        frame = build_verdicts(cubes, **options)
        yield {
            "table": label,
            "rows": len(frame),
            "wall_s": round(time.perf_counter() - wall, 2),
            "cpu_s": round(time.process_time() - cpu, 2),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--runs", type=int, default=2000, help="sweeps per setting")
    parser.add_argument("--worlds", type=int, default=40, help="sweeps with many candidates")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", action="append", help="sections to run; default all")
    args = parser.parse_args()
    sections: dict[str, Callable[[], Iterator[Row]]] = {
        "fixed_design": lambda: fixed_design(args.runs, args.seed),
        "fixed_problems": lambda: fixed_problems(args.runs, args.seed),
        "power_curves": lambda: power_curves(args.runs // 2, args.seed),
        "peeking": lambda: peeking(args.worlds, args.seed),
        "false_equivalence": lambda: false_equivalence(args.worlds, args.seed),
        "discoveries": lambda: discoveries(args.worlds, args.seed),
        "racing": lambda: racing(max(2, args.worlds // 5), args.seed),
        "racing_futility": lambda: racing_futility(max(2, args.worlds // 5), args.seed),
        "speed": speed,
    }
    args.out.mkdir(parents=True, exist_ok=True)
    for name in args.only or sections:
        started = time.perf_counter()
        frame = pd.DataFrame(list(sections[name]()))
        frame.to_csv(args.out / f"{name}.csv", index=False, float_format="%.4f")
        print(f"{name}: {len(frame)} rows, {time.perf_counter() - started:.0f} s", flush=True)
    # A part that is run alone leaves the others' files.
    settings = {"runs": args.runs, "worlds": args.worlds, "seed": args.seed}
    (args.out / "settings.json").write_text(json.dumps(settings, indent=1) + "\n")


if __name__ == "__main__":
    main()
