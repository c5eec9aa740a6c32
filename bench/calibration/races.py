"""Racing: errors under a look after every round, and what it saves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from bench.calibration.generators import shared
from knockout.stats.multiplicity import adjust_bh, can_reach
from knockout.stats.paired import pair, tally_problems
from knockout.stats.sequential import settle
from knockout.stats.signflip import signflip_p
from knockout.sweep.cost import cost_from_frequency

Row = dict[str, Any]


def peeking(worlds: int) -> Iterator[Row]:
    """Nothing to find, a look after each of 8 rounds, each candidate by itself.

    `even`: half of the problems gain what the others lose. `skewed`: one problem in ten loses nine
    times what each other one gains. With target population each candidate draws its own problems'
    effects; with target benchmark they are fixed.
    """
    for target in ("population", "benchmark"):
        for n in (30, 100, 500):
            for share in (0.05, 0.3, 1.0):
                for kind in ("even", "skewed"):
                    wrong = naive = total = 0
                    for world in range(max(worlds // 3, 3)):
                        key = [n, int(100 * share), world, len(target), len(kind)]
                        rng = np.random.default_rng(key)
                        base = rng.random((n, 8)) < 0.5
                        lose = _losing(rng, n, kind, fixed=target == "benchmark")
                        # A right cell can only be lost and a wrong one only be won.
                        flips = rng.random((50, n, 8)) < share * np.where(base, lose, 1 - lose)
                        grades, knock = base.astype(np.int8), (base ^ flips).astype(np.int8)
                        found = settle(grades, knock, rule="nominal", target=target, margin=0.001)
                        wrong += sum(s in ("pillar", "stumbling_block") for s in found.status)
                        if target == "population":
                            looks = [
                                signflip_p(tally_problems(pair(grades[:, :r], knock[:, :, :r])))
                                for r in (1, 2, 4, 8)
                            ]
                            naive += int((np.min(looks, axis=0) <= 0.05).sum())
                        total += 50
                    yield {
                        "target": target,
                        "n_problems": n,
                        "share": share,
                        "problems": kind,
                        "errors": wrong / total,
                        "errors_of_repeated_fixed_tests": naive / total
                        if target == "population"
                        else np.nan,
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


def racing(worlds: int, frequencies: np.ndarray | None = None) -> Iterator[Row]:
    """Forks and tokens of a race, against the fixed design of as many seeds.

    3.5 % pillars. `rock` and `control` candidates occur so often that forking alone generates 1/2.7
    and 1/7.2 of the tokens of full re-runs (the published lists); `listed` are the frequencies of a
    file. Tokens are of baselines and forks, per token of full re-runs.
    """
    lists = {"rock": _rates(1 / 2.7, 100), "control": _rates(1 / 7.2, 100)}
    if frequencies is not None:
        lists = {"listed": frequencies}
    for name, rates in lists.items():
        for n, seeds in ((500, 16), (500, 3), (30, 16)):
            for margin in (0.02, 0.05) if seeds == 16 and n == 500 else (0.05,):
                for target in ("population", "benchmark"):
                    for futility in (None, 0.05):
                        yield {
                            "list": name,
                            "n_problems": n,
                            "n_seeds": seeds,
                            "margin": margin,
                            "target": target,
                            "futility": "off" if futility is None else futility,
                            **_race(
                                rates, n, seeds, margin, target, futility, max(worlds // 10, 2)
                            ),
                        }


def _race(
    rates: np.ndarray, n: int, seeds: int, margin: float, target: Any, futility: Any, worlds: int
) -> Row:
    rows = []
    c = len(rates)
    cost = cost_from_frequency(rates, 1.0)
    for world in range(worlds):
        rng = np.random.default_rng([n, seeds, world, int(1000 * margin)])
        pillars = rng.permutation(c) < round(0.035 * c)
        losses = np.where(pillars, 0.05 if n > 30 else 0.15, 0.0)
        base, knock, _ = shared(rng, n, seeds, rates, losses)
        pairs = pair(base, knock)
        p = signflip_p(tally_problems(pairs))
        fixed = np.zeros(c, dtype=bool)
        inside = can_reach((pairs.won != pairs.lost).sum(axis=1), 0.05)
        fixed[inside] = adjust_bh(p[inside]) <= 0.05
        found = settle(
            base, knock, target=target, margin=margin, max_rounds=seeds, futility=futility
        )
        status = np.array(found.status)
        rounds = found.rounds
        going = int(rounds.max())
        whole = seeds * (1 + c)
        rows.append(
            {
                "forks_of_fixed": (cost.forks * rounds).sum() / (cost.forks * seeds).sum(),
                "tokens_of_naive": (going + (cost.tokens * rounds).sum()) / whole,
                "tokens_of_naive_fixed": (seeds + (cost.tokens * seeds).sum()) / whole,
                "pillars_found": (status == "pillar")[pillars].mean(),
                "pillars_found_fixed": fixed[pillars].mean(),
                "false_effects": np.isin(status, ("pillar", "stumbling_block"))[~pillars].mean(),
                "equivalent": (status == "equivalent")[~pillars].mean(),
                "futile": (status == "futile")[~pillars].mean(),
            }
        )
    return {key: float(np.mean([row[key] for row in rows])) for key in rows[0]}


def _rates(share: float, c: int) -> np.ndarray:
    """Uneven rates with which forks generate this share of the tokens."""
    shape = np.exp(np.linspace(-2.2, 2.2, c) * 1.3)
    low, high = 1e-3, 1e3
    for _ in range(60):
        middle = (low * high) ** 0.5
        less = cost_from_frequency(shape * middle, 1.0).tokens.mean() < share
        low, high = (middle, high) if less else (low, middle)
    return shape * high
