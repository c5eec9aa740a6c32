"""Two runs side by side: how a candidate's effect differs between checkpoints, models or settings.

A call in one run and none in the other says little: the difference of the two effects has its own
test.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy import stats

from knockout.config.file import load_sweep
from knockout.errors import UsageError
from knockout.ledger import Ledger, grade_cubes
from knockout.ledger.grades import GradeCube
from knockout.stats.interval import mean_interval
from knockout.stats.multiplicity import adjust_bh
from knockout.stats.paired import Pairs, Tally, pair, tally_problems
from knockout.stats.signflip import signflip_p
from knockout.sweep.identity import differences
from knockout.sweep.results import verdict_table
from knockout.tokens.candidates import Candidate

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["COMPARISON", "agreement", "compare_runs", "setting_differences"]

COMPARISON = (
    "benchmark", "benchmark_b", "candidate", "candidate_b", "token_ids", "token_ids_b", "tokens",
    "n_problems", "paired", "delta_a", "delta_b", "difference", "ci_low", "ci_high", "p_value",
    "p_adjusted", "verdict_a", "verdict_b", "change", "supported",
)  # fmt: skip
"""Columns of `compare_runs`."""


@dataclass(frozen=True, slots=True)
class _Side:
    """A run as it is compared."""

    folder: Path
    cubes: dict[str, GradeCube]
    verdicts: dict[tuple[str, str], str]
    tokenizer: str | None
    prompts: dict[str, dict[str, bytes]]


def compare_runs(
    a: Path, b: Path, *, benchmarks: Mapping[str, str] | None = None, alpha: float = 0.05
) -> pd.DataFrame:
    """Compares two runs candidate by candidate.

    Candidates are matched by their intervention if the runs have one tokenizer, else by the
    texts of their tokens. The effect of a problem is its mean over seeds. Problems that both runs
    have are compared pair by pair (sign-flip test of the differences of effects); if they share
    none, the two means are compared as independent ones.

    Args:
        a, b: Run directories.
        benchmarks: Which benchmark of `b` each of `a` is compared with; those of one name by
            default, or the only ones.
        alpha: Level of the intervals and of `supported`.

    Returns:
        A row for each benchmark and candidate of either run (see `COMPARISON`): Δ in each, their
        difference (b − a) with its interval and p-value, corrected over the rows of the benchmark
        by Benjamini and Hochberg; the verdicts; `change`: "same", "appeared", "went away",
        "reversed", "only in a" or "only in b"; and `supported`: whether the difference itself is
        significant after correction. Proportions are in [−1, 1], differences in [−2, 2].

    Raises:
        UsageError: The runs have no benchmark or no candidate in common.
    """
    import pandas as pd

    one, other = _side(a), _side(b)
    rows: list[dict[str, Any]] = []
    for name, name_b in _matched(one, other, benchmarks).items():
        rows += _rows(one, other, name, name_b, alpha)
    if not any(row["change"] not in ("only in a", "only in b") for row in rows):
        raise UsageError(f"{a} and {b} have no candidate in common; nothing can be compared")
    frame = pd.DataFrame(rows, columns=list(COMPARISON))
    for name in ("candidate", "candidate_b", "verdict_a", "verdict_b"):
        frame[name] = pd.Series([row[name] for row in rows], dtype=object)
    for index in frame.groupby("benchmark").groups.values():
        p = frame.loc[index, "p_value"].to_numpy(dtype=float)
        adjusted = np.full(len(p), np.nan)
        adjusted[np.isfinite(p)] = adjust_bh(p[np.isfinite(p)])
        frame.loc[index, "p_adjusted"] = adjusted
        frame.loc[index, "supported"] = adjusted <= alpha
    return frame


def setting_differences(a: Path, b: Path) -> list[str]:
    """Returns a line for each setting, weight and prompt in which two runs differ."""
    records = []
    for folder in (a, b):
        with Ledger.open(folder / "run.db") as ledger:
            records.append(ledger.meta_json("identity", {}))
    return differences(records[0], records[1], words=("in A", "in B"))


def agreement(frame: pd.DataFrame) -> dict[str, dict[str, int]]:
    """How often each change occurs, by benchmark, and how many of them are supported."""
    return {
        str(name): {
            **dict(sorted(Counter(part["change"]).items())),
            "supported": int(part["supported"].sum()),
        }
        for name, part in frame.groupby("benchmark", sort=False)
    }


def _side(folder: Path) -> _Side:
    sweep = load_sweep(folder / "config.yaml")
    with Ledger.open(folder / "run.db") as ledger:
        table = verdict_table(ledger, sweep.verdict)
        identity = ledger.meta_json("identity", {})
        prompts = {row.name: _prompts(ledger, b) for b, row in enumerate(ledger.benchmarks)}
        return _Side(
            folder,
            {cube.benchmark: cube for cube in grade_cubes(ledger)},
            {
                (row["benchmark"], row["candidate"]): row["verdict"]
                for row in table.to_dict("records")
            },
            identity.get("tokenizer_fingerprint"),
            prompts,
        )


def _prompts(ledger: Ledger, benchmark: int) -> dict[str, bytes]:
    """Each problem's prompt by its id; other ids of another vocabulary make no other problem."""
    found = {}
    for n, doc_id in enumerate(ledger.doc_ids(benchmark)):
        stored = ledger.problem(benchmark, n)
        assert stored is not None
        found[doc_id] = stored.prompt.encode()
    return found


def _matched(one: _Side, other: _Side, wanted: Mapping[str, str] | None) -> dict[str, str]:
    if wanted is None:
        shared = {name: name for name in one.cubes if name in other.cubes}
        if not shared and len(one.cubes) == len(other.cubes) == 1:
            shared = {next(iter(one.cubes)): next(iter(other.cubes))}
        if not shared:
            raise UsageError(
                f"{one.folder} has {', '.join(one.cubes)}, {other.folder} has "
                f"{', '.join(other.cubes)}; say which belong together with --benchmarks A=B"
            )
        return shared
    for side, names in ((one, wanted.keys()), (other, wanted.values())):
        for name in names:
            if name not in side.cubes:
                raise UsageError(
                    f"{side.folder} has no benchmark {name!r}; it has {', '.join(side.cubes)}"
                )
    return dict(wanted)


def _rows(one: _Side, other: _Side, name: str, name_b: str, alpha: float) -> list[dict[str, Any]]:
    cube, cube_b = one.cubes[name], other.cubes[name_b]
    same = one.tokenizer is not None and one.tokenizer == other.tokenizer
    mine, theirs = _by_key(cube.candidates, same), _by_key(cube_b.candidates, same)
    pairs, pairs_b = pair(cube.baseline, cube.knockout), pair(cube_b.baseline, cube_b.knockout)
    deltas, deltas_b = tally_problems(pairs).mean(), tally_problems(pairs_b).mean()
    # A problem of another task may have the same id.
    at_b = {doc: n for n, doc in enumerate(cube_b.problem_ids)}
    here, there = one.prompts[name], other.prompts[name_b]
    shared = [
        (n, at_b[doc])
        for n, doc in enumerate(cube.problem_ids)
        if doc in at_b and (name == name_b or here[doc] == there[doc])
    ]
    rows = []
    for key in [*mine, *(key for key in theirs if key not in mine)]:
        c, d = mine.get(key), theirs.get(key)
        own = None if c is None else cube.candidates[c]
        own_b = None if d is None else cube_b.candidates[d]
        shown = own or own_b
        assert shown is not None
        if shown.group == "canary":
            continue
        row: dict[str, Any] = {
            "benchmark": name,
            "benchmark_b": name_b,
            "candidate": None if own is None else own.name,
            "candidate_b": None if own_b is None else own_b.name,
            "token_ids": None if own is None else list(own.token_ids),
            "token_ids_b": None if own_b is None else list(own_b.token_ids),
            "tokens": list(shown.tokens),
            "delta_a": math.nan if c is None else float(deltas[c]),
            "delta_b": math.nan if d is None else float(deltas_b[d]),
            "verdict_a": None if own is None else one.verdicts.get((name, own.name)),
            "verdict_b": None if own_b is None else other.verdicts.get((name_b, own_b.name)),
            "p_adjusted": math.nan,
            "supported": False,
        }
        if c is None or d is None:
            row |= dict.fromkeys(("difference", "ci_low", "ci_high", "p_value"), math.nan)
            row |= {"n_problems": 0, "paired": False}
            row["change"] = "only in b" if c is None else "only in a"
        else:
            row |= _difference(pairs, c, pairs_b, d, shared, alpha)
            row["change"] = _change(row["verdict_a"], row["verdict_b"])
        rows.append(row)
    return rows


def _by_key(candidates: tuple[Candidate, ...], by_id: bool) -> dict[Any, int]:
    """Candidates by their match key; a key that two of them share matches nothing."""
    keys = [c.intervention if by_id else _text_key(c) for c in candidates]
    often = Counter(keys)
    return {key if often[key] == 1 else (key, i): i for i, key in enumerate(keys)}


def _text_key(candidate: Candidate) -> tuple[Any, ...]:
    record = asdict(candidate.intervention)
    kept = {k: v for k, v in record.items() if k not in ("token_ids", "replacement")}
    return tuple(sorted(candidate.tokens)), tuple(sorted(kept.items(), key=str))


def _difference(
    pairs: Pairs, c: int, pairs_b: Pairs, d: int, shared: list[tuple[int, int]], alpha: float
) -> dict[str, Any]:
    """The difference of two candidates' effects, its interval and p-value."""
    at, at_b = (np.array(x, dtype=np.int64) for x in zip(*shared, strict=True)) if shared else (
        np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    )  # fmt: skip
    n, n_b = pairs.n[c, at], pairs_b.n[d, at_b]
    both = (n > 0) & (n_b > 0)
    if both.sum() >= 2:
        net = (pairs.won - pairs.lost)[c, at][both]
        net_b = (pairs_b.won - pairs_b.lost)[d, at_b][both]
        n, n_b = n[both], n_b[both]
        # Halved, so that it lies in [−1, 1] as the statistics want it.
        tally = _tally(net_b * n - net * n_b, 2 * n * n_b)
        p = signflip_p(tally)
        low, high = mean_interval(tally, p, alpha)
        return {
            "n_problems": int(both.sum()),
            "paired": True,
            "difference": 2 * float(tally.mean()[0]),
            "ci_low": 2 * float(low[0]),
            "ci_high": 2 * float(high[0]),
            "p_value": float(p[0]),
        }
    return _independent(_one(pairs, c), _one(pairs_b, d), alpha)


def _independent(one: Tally, other: Tally, alpha: float) -> dict[str, Any]:
    """Two independent means: an interval from those of each (Zou & Donner 2008), p to match it."""
    (mean,), (mean_b,) = one.mean(), other.mean()
    (low,), (high,) = mean_interval(one, signflip_p(one), alpha)
    (low_b,), (high_b,) = mean_interval(other, signflip_p(other), alpha)
    difference = float(mean_b - mean)
    below = math.hypot(mean_b - low_b, high - mean)
    above = math.hypot(high_b - mean_b, mean - low)
    towards_zero = below if difference > 0 else above
    z = float(stats.norm.isf(alpha / 2))
    p = (
        2 * float(stats.norm.sf(z * abs(difference) / towards_zero))
        if towards_zero > 0
        else math.nan
    )
    return {
        "n_problems": int(one.n[0] + other.n[0]),
        "paired": False,
        "difference": difference,
        "ci_low": difference - below,
        "ci_high": difference + above,
        "p_value": p,
    }


def _one(pairs: Pairs, c: int) -> Tally:
    """A candidate's differences by problem."""
    there = pairs.n[c] > 0
    return _tally((pairs.won - pairs.lost)[c, there], pairs.n[c, there])


def _tally(numerators: Any, denominators: Any) -> Tally:
    unique, counts = np.unique(np.stack([denominators, numerators]), axis=1, return_counts=True)
    return Tally(numerators=unique[1], denominators=unique[0], counts=counts[None, :])


def _change(verdict: str | None, verdict_b: str | None) -> str:
    if verdict == verdict_b:
        return "same"
    strong, strong_b = (bool(v) and v != "neutral" for v in (verdict, verdict_b))
    if strong and strong_b:
        return "reversed"
    return "appeared" if strong_b else "went away"
