"""The report's numbers, shaped for its pages. Everything here can be written as JSON."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from knockout.ledger import Ledger
from knockout.report.contrasts import doses, pairs
from knockout.report.plain import plain
from knockout.report.source import RunView
from knockout.report.tables import LOST, UNGRADED, WON, CellTable, ForkTable, describe_forks
from knockout.verdicts.findings import findings, interval_of
from knockout.verdicts.table import verdict_key

__all__ = [
    "VERDICTS",
    "count_verdicts",
    "details",
    "overview",
    "shown_config",
    "without_folders",
]

VERDICTS = ("strong_pillar", "strong_stumbling_block", "equivalent", "undetermined")
"""Keys of the report's verdicts: neutral is split by its evidence."""

_WINDOWS = re.compile(r"[A-Za-z]:[\\/]")
_RULES = ("nominal", "fdr")
_KEYS = {"key": None, "key_nominal": "nominal", "key_fdr": "fdr"}


def count_verdicts(rows: Iterable[dict[str, Any]], rule: str) -> dict[str, int]:
    """How many rows have each verdict by a rule."""
    counts = dict.fromkeys(VERDICTS, 0)
    for row in rows:
        counts[verdict_key(row, rule)] += 1
    return counts


def overview(
    run: RunView,
    ledger: Ledger,
    found: NDArray[np.int64],
    total: NDArray[np.int64],
    *,
    has_tokenizer: bool = True,
) -> dict[str, Any]:
    """Everything but the details of single candidates.

    Args:
        run: The run.
        ledger: Its ledger, for the names of candidates and benchmarks.
        found: (B, C) occurrences of each candidate in the baselines.
        total: (B,) tokens of the baselines.
        has_tokenizer: Whether tokens can be shown by their texts.
    """
    names = [benchmark.name for benchmark in ledger.benchmarks]
    order = {candidate.name: index for index, candidate in enumerate(ledger.candidates)}
    levels = _levels(run)
    rows = []
    for row in run.rows:
        c = order[row["candidate"]]
        b = names.index(row["benchmark"]) if row["benchmark"] in names else -1
        share = found[b, c] / max(int(total[b]), 1) if b >= 0 else found[:, c].sum() / total.sum()
        rows.append(
            {
                **{key: plain(value) for key, value in row.items()},
                "b": b,
                "c": c,
                **{name: verdict_key(row, rule) for name, rule in _KEYS.items()},
                **_by_rule(row, levels, run.sweep.verdict.alpha),
                "per_1000": plain(1000 * float(share)),
            }
        )
    benchmarks = [
        _benchmark(index, b.name, b.metric, run.cells[index], run.forks)
        for index, b in enumerate(ledger.benchmarks)
    ]
    return {
        "run": _about(run, has_tokenizer),
        "benchmarks": benchmarks,
        "candidates": [
            {"name": c.name, "ids": list(c.token_ids), "tokens": list(c.tokens), "group": c.group}
            for c in ledger.candidates
        ],
        "rows": rows,
        "counts": _counts(run.rows),
        "findings": _findings(run),
        "doses": doses(run.rows),
        "pairs": pairs(ledger, run.sweep.verdict.alpha),
        "map": outcome_cells(run, ledger),
        "cost": _cost(run, benchmarks),
        "racing": [_racing(b, cell, ledger) for b, cell in zip(names, run.cells, strict=True)],
        "health": _health(run),
    }


def details(run: RunView, candidate: int) -> list[dict[str, Any]]:
    """What the forks of a candidate look like on each benchmark (see `describe_forks`)."""
    out = []
    for b, cell in enumerate(run.cells):
        at = run.forks.rows(b, candidate)
        described = describe_forks(run.forks, at)
        described["inherited"] = int(cell.n_inherited[candidate])
        described["seeds"] = _seeds(cell, run.forks, at, candidate)
        out.append(described)
    return out


def _by_rule(
    row: dict[str, Any], levels: dict[tuple[str, str], float], alpha: float
) -> dict[str, Any]:
    """What figures draw of a row for each rule: its interval, and the p-value at which the rule calls."""
    at = {"nominal": alpha, "fdr": levels.get((row["benchmark"], row["family"]), alpha)}
    out: dict[str, Any] = {}
    for name in _RULES:
        low, high = interval_of(row, name)
        out |= {f"low_{name}": low, f"high_{name}": high, f"level_{name}": at[name]}
    return out


def _levels(run: RunView) -> dict[tuple[str, str], float]:
    """The largest p-value that the corrected rule calls, by benchmark and family."""
    families: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in run.rows:
        if row["group"] != "canary" and row["testable"]:
            families.setdefault((row["benchmark"], row["family"]), []).append(row)
    return {
        key: max(
            (r["p_value"] for r in own if r["verdict_fdr"] != "neutral"),
            default=run.sweep.verdict.alpha / len(own),
        )
        for key, own in families.items()
    }


def _findings(run: RunView) -> dict[str, Any]:
    rule = run.sweep.verdict
    said = findings(
        run.rows, run.summary, rule=rule.rule, alpha=rule.alpha, margin=rule.margin,
        folder=run.folder.name,
    )  # fmt: skip
    return {
        "headline": said.headline,
        "context": list(said.context),
        "cost": said.cost,
        "next": list(said.next_steps),
    }


def outcome_cells(run: RunView, ledger: Ledger, most: int = 60) -> list[dict[str, Any]]:
    """Rows of the map of problems and candidates; the candidates with most changes only."""
    forks = run.forks
    out = []
    for b, cell in enumerate(run.cells):
        own = np.flatnonzero((forks.benchmark == b) & np.isin(forks.outcome, (LOST, WON)))
        changed = np.bincount(forks.candidate[own], minlength=len(ledger.candidates))
        shown = np.argsort(-changed, kind="stable")[:most]
        own = own[np.isin(forks.candidate[own], shown)]
        pairs = np.stack([forks.candidate[own], forks.problem[own]], axis=1)
        places, which = np.unique(pairs, axis=0, return_inverse=True)
        won = np.bincount(which.ravel(), forks.outcome[own] == WON, minlength=len(places))
        lost = np.bincount(which.ravel(), forks.outcome[own] == LOST, minlength=len(places))
        for (c, p), up, down in zip(places.tolist(), won.tolist(), lost.tolist(), strict=True):
            out.append(
                {
                    "benchmark": ledger.benchmarks[b].name,
                    "label": ledger.candidates[c].name,
                    "c": c,
                    "problem": cell.doc_ids[p],
                    "net": int(up - down),
                    "lost": int(down),
                    "won": int(up),
                }
            )
    return out


def _seeds(cell: CellTable, forks: ForkTable, at: slice, candidate: int) -> list[dict[str, Any]]:
    """Δ of a candidate in each seed, from the grades of its forks; inherited knockouts change nothing."""
    out = []
    for seed in range(cell.correct.shape[1]):
        asked = int(cell.n_asked[candidate, seed])
        mine = forks.seed[at] == seed
        change = forks.outcome[at][mine]
        if asked:
            delta = int(change[change != UNGRADED].sum()) / asked
            out.append({"seed": seed + 1, "delta": round(delta, 6), "forks": int(mine.sum())})
    return out


def _about(run: RunView, has_tokenizer: bool) -> dict[str, Any]:
    rule = run.sweep.verdict
    return {
        "name": run.folder.resolve().name,
        "model": without_folders(run.sweep.model),
        "rule": rule.rule,
        "alpha": rule.alpha,
        "margin": rule.margin,
        "strategy": run.sweep.strategy,
        "complete": bool(run.summary["complete"]),
        "cells_done": run.summary["cells_done"],
        "n_cells": run.summary["n_cells"],
        "identity": run.identity_hash,
        "has_tokenizer": has_tokenizer,
        "sampling": run.sweep.sampling.model_dump(mode="json"),
    }


def _benchmark(
    index: int, name: str, metric: str, cell: CellTable, forks: ForkTable
) -> dict[str, Any]:
    own = forks.benchmark == index
    there = cell.there
    graded = cell.correct >= 0
    lengths = cell.n_tokens[there]
    # Problems have equal weight, however many of their seeds are graded.
    n_graded = graded.sum(axis=1)
    right = np.where(graded, cell.correct, 0).sum(axis=1)
    n_cells = int(there.sum())
    saved_prefix = int(forks.step[own].sum())
    fork_tokens = int(forks.n_tokens[own].sum())
    inherited = int(cell.n_inherited.sum())
    grades: dict[str, int] = {}
    for status, n in zip(
        forks.statuses,
        np.bincount(forks.grade[own], minlength=len(forks.statuses)),
        strict=True,
    ):
        grades[status] = int(n)
    return {
        "name": name,
        "metric": metric,
        "doc_ids": list(cell.doc_ids),
        "n_problems": len(cell.doc_ids),
        "n_seeds": int(cell.correct.shape[1]),
        "n_cells": n_cells,
        "pass1": _mean(right[n_graded > 0] / n_graded[n_graded > 0]),
        "length": _mean(lengths),
        "forks": int(own.sum()),
        "inherited": inherited,
        "tokens_generated": int(lengths.sum()) + fork_tokens - saved_prefix,
        # A naive sweep would have generated the inherited knockouts too.
        "tokens_naive": int(lengths.sum()) + fork_tokens + cell.inherited_tokens,
        "unfinished": [int(cell.unfinished.sum()), int(forks.unfinished[own].sum())],
        "unfinished_at_fork": int(forks.base_unfinished[own].sum()),
        "grades": [dict(cell.grades), {k: v for k, v in grades.items() if v}],
        "steps_checked": cell.n_checked,
        "coupling_errors": cell.n_coupling_errors,
    }


def _counts(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Verdicts by benchmark, group and rule; canaries are no hypotheses."""
    out = []
    for benchmark in dict.fromkeys(row["benchmark"] for row in rows):
        for group in ("candidate", "control"):
            own = [r for r in rows if r["benchmark"] == benchmark and r["group"] == group]
            if own:
                by_rule = {rule: count_verdicts(own, rule) for rule in _RULES}
                out.append({"benchmark": benchmark, "group": group, "n": len(own), **by_rule})
    return out


def _cost(run: RunView, benchmarks: list[dict[str, Any]]) -> dict[str, Any]:
    keys = (
        "tokens_generated", "tokens_naive", "tokens_audit", "wall_s", "forks", "inherited",
        "trajectories", "sessions",
    )  # fmt: skip
    cost = {key: plain(run.summary[key]) for key in keys}
    # A fixed design would have asked for every candidate in every planned cell.
    per_cell = run.cells[0].n_asked.shape[0] + 1
    planned = sum(
        b["n_problems"] * b["n_seeds"] * per_cell * (b["length"] or 0.0) for b in benchmarks
    )
    return {**cost, "tokens_planned": round(planned)}


def _racing(name: str, cell: CellTable, ledger: Ledger) -> dict[str, Any]:
    """How many candidates of each group were still asked for in each round of seeds."""
    groups = np.array([c.group for c in ledger.candidates])
    asked = cell.n_asked > 0
    return {
        "benchmark": name,
        "cells": cell.there.sum(axis=0).tolist(),
        "active": {
            group: asked[groups == group].sum(axis=0).tolist()
            for group in ("candidate", "control")
            if (groups == group).any()
        },
    }


def _health(run: RunView) -> dict[str, Any]:
    keys = (
        "coupling_errors", "steps_checked", "audited", "fork_errors", "audits_failed", "unfinished",
        "trajectories", "forks", "early_forks", "forks_owed", "forks_failed", "cells_failed",
        "timeouts", "respelled", "grades", "canary", "warnings",
    )  # fmt: skip
    return {
        **{key: run.summary.get(key) for key in keys},
        "sessions": [
            {"started": started, "wall_s": wall_s, **without_folders(record)}
            for started, wall_s, record in run.sessions
        ],
    }


def without_folders(value: Any) -> Any:
    """A value with absolute paths in it shortened to their last part.

    A report is shared; the folders of a machine are private and reproduce nothing.
    """
    if isinstance(value, dict):
        return {key: without_folders(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [without_folders(inner) for inner in value]
    if isinstance(value, str) and (PurePosixPath(value).is_absolute() or _WINDOWS.match(value)):
        return f"…/{PurePosixPath(value.replace(chr(92), '/')).name}"
    return value


def shown_config(text: str) -> str:
    """A run's `config.yaml` as the report shows it."""
    return yaml.safe_dump(
        without_folders(yaml.safe_load(text)), sort_keys=False, allow_unicode=True
    )


def _mean(values: NDArray[Any]) -> float | None:
    return float(values.mean()) if len(values) else None
