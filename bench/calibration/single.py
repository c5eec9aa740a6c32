"""One candidate: false positives, coverage, power, equivalence, skew."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from bench.calibration.generators import MODELS, decided, rare_losses, strongly_skewed
from knockout.stats.interval import equivalence_interval, mean_interval
from knockout.stats.paired import Pairs, tally_cells, tally_problems
from knockout.stats.power import plan_mde, seed_correlation
from knockout.stats.sequential import bounded_p
from knockout.stats.signflip import signflip_p

Row = dict[str, Any]
DESIGNS = ((30, 4), (30, 16), (100, 3), (500, 1), (500, 3), (541, 1))


def coverage(runs: int) -> Iterator[Row]:
    """False positives and coverage in a fixed design, target population."""
    for model, draw in MODELS.items():
        for effect in (0.0,) if model == "skewed" else (0.0, 0.2, 0.6):
            for n in (30, 100, 500):
                for seeds in (1, 3, 8):
                    for share in (0.05, 0.3, 1.0):
                        key = [n, seeds, int(100 * share), int(10 * effect), len(model)]
                        rng = np.random.default_rng(key)
                        pairs, truth = draw(
                            rng, runs if n < 500 else runs // 2, n, seeds, share, effect
                        )
                        tally = tally_problems(pairs)
                        p = signflip_p(tally)
                        low, high = mean_interval(tally, p)
                        outside = (low > 0) | (high < 0)
                        yield {
                            "model": model,
                            "effect": effect,
                            "n_problems": n,
                            "n_seeds": seeds,
                            "share": share,
                            "delta": truth,
                            "rejected": np.mean(p <= 0.05),
                            "coverage": np.mean((low <= truth) & (truth <= high)),
                            "disagree_with_p": int((outside != (p < 0.05)).sum()),
                            "width": np.mean(high - low),
                        }


def fixed_problems(runs: int) -> Iterator[Row]:
    """Target benchmark: the problems stay, only seeds are drawn again; truth is their own Δ."""
    for n in (30, 100, 500):
        for seeds in (3, 8):
            for share in (0.05, 0.3, 1.0):
                for kind in ("still", "mixed"):
                    rng = np.random.default_rng([n, seeds, int(100 * share), len(kind)])
                    losing = np.full((1, n, 1), 0.5)
                    if kind == "mixed":
                        losing[:, : n // 2], losing[:, n // 2 :] = 0.9, 0.1
                    from bench.calibration.generators import _flips

                    tally = tally_cells(_flips(rng, losing, (runs // 2, n, seeds), share))
                    p = signflip_p(tally)
                    low, high = mean_interval(tally, p)
                    yield {
                        "problems": kind,
                        "n_problems": n,
                        "n_seeds": seeds,
                        "share": share,
                        "rejected": np.mean(p <= 0.05),
                        "coverage": np.mean((low <= 0) & (high >= 0)),
                    }


def power(runs: int) -> Iterator[Row]:
    """Power at the smallest detectable loss, by a generator that is not the formula's."""
    for n, seeds in DESIGNS:
        # The last one forks nearly everywhere, on problems of nearly one difficulty.
        for rate, spread in ((0.05, 0.6), (0.3, 0.6), (1.5, 0.6), (30.0, 6.0)):
            for lean in (0.0, 1.0):
                rng = np.random.default_rng([n, seeds, int(100 * rate), int(lean)])
                some = max(200_000 // (n * seeds), 50)
                idle = decided(rng, some, n, seeds, rate, 0.0, lean, spread)
                share = float((idle.won + idle.lost).mean() / seeds)
                n_pairs, won, lost, base = (
                    x.reshape(1, -1) for x in (idle.n, idle.won, idle.lost, idle.base)
                )
                together = Pairs(n_pairs, won, lost, base, seeds)
                agree = float(seed_correlation(together)[0])
                for m in (1, 200):
                    loss = float(plan_mde(n, [seeds], share=share, correlation=agree, m=m)[0])
                    many = runs if n < 500 else runs // 2
                    pairs = decided(rng, many, n, seeds, rate, loss, lean, spread)
                    yield {
                        "n_problems": n,
                        "n_seeds": seeds,
                        "rate": rate,
                        "spread": spread,
                        "lean": lean,
                        "share": share,
                        "correlation": agree,
                        "corrected_for": m,
                        "mde": loss,
                        "power": np.mean(signflip_p(tally_problems(pairs)) <= 0.05 / m),
                    }


def equivalence(runs: int) -> Iterator[Row]:
    """A true Δ at the margin, on few problems: how often is it called equivalent?"""
    for n, seeds in (*DESIGNS, (1131, 3)):
        for margin in (0.02, 0.05, 0.1):
            for strength in (1.0, 0.5, 0.25):
                rng = np.random.default_rng([n, seeds, int(100 * margin), int(100 * strength)])
                tally = tally_problems(rare_losses(rng, 2 * runs, n, seeds, margin, strength))
                low, high = equivalence_interval(tally)
                p = signflip_p(tally)
                inner, outer = mean_interval(tally, p)
                yield {
                    "n_problems": n,
                    "n_seeds": seeds,
                    "margin": margin,
                    "strength": strength,
                    "called_equivalent": np.mean((low > -margin) & (high < margin)),
                    "coverage": np.mean((inner <= -margin) & (outer >= -margin)),
                }


def skew(runs: int) -> Iterator[Row]:
    """Δ = 0 without symmetry: the sign-flip test asks another question, the bounded bet this one."""
    for n, seeds in DESIGNS:
        rng = np.random.default_rng([n, seeds, 5])
        tally = tally_problems(strongly_skewed(rng, runs, n, seeds))
        yield {
            "n_problems": n,
            "n_seeds": seeds,
            "sign_flip": np.mean(signflip_p(tally) <= 0.05),
            "bounded": np.mean(bounded_p(tally) <= 0.05),
        }
        for loss in (0.1, 0.2):
            tally = tally_problems(decided(rng, runs // 4, n, seeds, 0.5, loss))
            yield {
                "n_problems": n,
                "n_seeds": seeds,
                "loss": loss,
                "sign_flip": np.mean(signflip_p(tally) <= 0.05),
                "bounded": np.mean(bounded_p(tally) <= 0.05),
            }
