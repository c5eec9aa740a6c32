"""Confirmation: chosen candidates again on fresh seeds, and whole lists banned at once.

The extremes of many noisy estimates are extreme partly by luck, so their effects shrink when they
are measured again. And single tokens may each be neutral while their set is not. A second sweep with
other seeds settles both; it uses nothing of the first but the choice.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from knockout.config.file import load_sweep
from knockout.config.sweep import CandidateSource, Sweep
from knockout.errors import UsageError
from knockout.files import write_text
from knockout.ledger import Ledger, totals
from knockout.method.sampling import cell_seed
from knockout.sweep.racing import complete_rounds
from knockout.sweep.results import verdict_table
from knockout.tokens.token_list import read_token_list
from knockout.verdicts.export import selected
from knockout.verdicts.files import verdict_records

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["COMPARED", "FRESH", "Confirmation", "compare", "derive", "write_comparison"]

DEFAULT_JOINT = ("all neutrals=verdict:neutral", "all candidates=all")
"""Lists that are tested as one knockout each, if none is named."""

FRESH = (
    "fresh seeds on the same problems show whether a token matters on these very problems, so they "
    "are judged by target benchmark (from two seeds on); to see whether it matters on problems like "
    "these, use `--split` or other problems"
)
"""What a confirmation by fresh seeds does and does not say."""

_VERDICTS = ("strong_pillar", "strong_stumbling_block", "neutral")
_EVIDENCE = ("effect", "equivalent", "undetermined")
_ESTIMATE = (
    "n_seeds", "delta", "ci_low", "ci_high", "p_value", "p_adjusted", "verdict",
    "verdict_nominal", "verdict_fdr", "evidence",
)  # fmt: skip

COMPARED = (
    "benchmark",
    "candidate",
    "kind",
    "token_ids",
    *(f"first_{name}" for name in _ESTIMATE),
    *(f"fresh_{name}" for name in _ESTIMATE),
    "shrinkage",
    "confirmed",
    "sum_of_singles",
)
"""Columns of the comparison."""


@dataclass(frozen=True, slots=True)
class Confirmation:
    """What is to be tested again.

    Attributes:
        sweep: Runs like any other.
        first: The verdict table of the first run, by its own rule.
        singles: Names of the candidates that are tested again.
        joint: Ids of each list that is banned at once, by name.
        notes: What the user should know.
        record: Where the seeds come from, for `confirm.json`.
    """

    sweep: Sweep
    first: pd.DataFrame
    singles: tuple[str, ...]
    joint: dict[str, tuple[int, ...]]
    notes: tuple[str, ...]
    record: dict[str, Any]


def derive(
    directory: Path,
    *,
    candidates: Collection[str] = (),
    verdicts: Collection[str] = (),
    joint: Sequence[str] | None = None,
    seeds: int | None = None,
    run_seed: int | None = None,
) -> Confirmation:
    """Makes the sweep that tests a run's choice again.

    Args:
        directory: A finished run.
        candidates: Names to test again, besides those that `verdicts` chooses.
        verdicts: Candidates called so by either rule on any benchmark. If neither is given:
            pillars and stumbling blocks.
        joint: `NAME=all`, `NAME=verdict:V`, `NAME=evidence:E` or `NAME=FILE` each, chosen as
            `knockout export` does; None for `DEFAULT_JOINT`.
        seeds: Repeats; None for as many as the first run had.
        run_seed: Draws the fresh seeds; None for the next one that shares no cell's seed.

    Raises:
        UsageError: The run is unfinished, a name or list is missing, nothing is chosen, or the
            seeds would not be fresh.
    """
    sweep = load_sweep(directory / "config.yaml")
    settings = [sweep.settings(entry) for entry in sweep.benchmarks]
    if all(one.sampling.temperature == 0 for one in settings):
        raise UsageError(
            f"{directory}: it decodes greedily (temperature 0), so there are no fresh seeds: "
            "another run would give the same. Confirm on other problems"
        )
    with Ledger.open(directory / "run.db") as ledger:
        if not totals(ledger).complete:
            raise UsageError(f"{directory}: the run is unfinished; finish it before confirming")
        first = verdict_table(ledger, sweep.verdict)
        special = ledger.meta_json("special_ids", [])
        identity_hash = ledger.meta().get("identity_hash")
        rounds = max(complete_rounds(ledger).values())
        used = ledger.cell_seeds()
        problems = [(b.name, d) for i, b in enumerate(ledger.benchmarks) for d in ledger.doc_ids(i)]
    ids_of: dict[str, tuple[int, ...]] = {
        name: tuple(ids) for name, ids in zip(first["candidate"], first["token_ids"], strict=True)
    }
    singles = choose_singles(first, candidates, verdicts)
    lists, notes = _lists(first, DEFAULT_JOINT if joint is None else joint, special)
    sets, taken = {name: ids_of[name] for name in singles}, {ids_of[n]: n for n in singles}
    for name, ids in lists.items():
        if ids in taken:
            notes.append(f"{name}: the same tokens as {taken[ids]!r}, so it is not tested twice")
            continue
        if name in sets:
            raise UsageError(f"--joint {name}: a candidate has this name; give another one")
        sets[name], taken[ids] = ids, name
    if not sets:
        raise UsageError(
            f"{directory}: nothing to confirm: no candidate was called, and no list has tokens. "
            "Choose with --candidates or --joint"
        )
    if any(one.sampling.temperature == 0 for one in settings):
        notes.append("benchmarks that are decoded greedily give the same grades again")
    own = rounds if sweep.adaptive is not None else None
    entries = tuple(
        entry.model_copy(update={"seeds": seeds or own or one.seeds})
        for entry, one in zip(sweep.benchmarks, settings, strict=True)
    )
    most = max(entry.seeds or 0 for entry in entries)
    fresh, seed = _fresh(problems, most, used, sweep.run_seed, run_seed)
    source = CandidateSource(
        sets=dict(sets), allow_eos=sweep.candidates.allow_eos, canary=sweep.candidates.canary
    )
    rule = sweep.verdict
    if rule.target == "population" and min(entry.seeds or 0 for entry in entries) >= 2:
        rule = rule.model_copy(update={"target": "benchmark"})
    notes.append(FRESH)
    changes = {
        "verdict": rule,
        "run_seed": seed,
        "benchmarks": entries,
        "candidates": source,
        "adaptive": None,
    }
    return Confirmation(
        sweep=sweep.model_copy(update=changes),
        first=first,
        singles=tuple(singles),
        joint={name: ids for name, ids in sets.items() if name in lists},
        notes=tuple(notes),
        record={
            "of": identity_hash,
            "first_run_seed": sweep.run_seed,
            "fresh_run_seed": seed,
            "cells_first": len(used),
            "cells_fresh": len(fresh),
            "shared_seeds": len(fresh & used),
            "n_hypotheses": len(sets),
        },
    )


def choose_singles(
    first: pd.DataFrame, candidates: Collection[str], verdicts: Collection[str]
) -> list[str]:
    """Names to test again, in the table's order."""
    of_run = first[first["group"] != "canary"]
    for name in candidates:
        if name not in set(of_run["candidate"]):
            raise UsageError(f"--candidates: the run has no candidate {name!r}")
    called = set(verdicts)
    if not called and not candidates:
        called = {"strong_pillar", "strong_stumbling_block"}
    either = of_run["verdict_nominal"].isin(called) | of_run["verdict_fdr"].isin(called)
    by_verdict = set(of_run["candidate"][either & (of_run["group"] == "candidate")])
    wanted = by_verdict | set(candidates)
    return [name for name in dict.fromkeys(of_run["candidate"]) if name in wanted]


def _lists(
    first: pd.DataFrame, joint: Sequence[str], special: Collection[int]
) -> tuple[dict[str, tuple[int, ...]], list[str]]:
    """The ids of each list, without special tokens unless a file lists them; and notes."""
    groups = dict(zip(first["candidate"], first["group"], strict=True))
    lists: dict[str, tuple[int, ...]] = {}
    notes = []
    for text in joint:
        name, equals, what = text.partition("=")
        if not (name and equals and what):
            raise UsageError(
                f"--joint {text}: expected NAME=all, NAME=verdict:V, NAME=evidence:E or NAME=FILE"
            )
        kind, colon, value = what.partition(":")
        if what == "all" or (colon and kind in ("verdict", "evidence")):
            allowed = _VERDICTS if kind == "verdict" else _EVIDENCE
            if colon and value not in allowed:
                raise UsageError(f"--joint {text}: expected {', '.join(allowed)}")
            rows = selected(
                first,
                verdicts=[value] if kind == "verdict" else (),
                evidence=[value] if kind == "evidence" else (),
                groups=groups,
                special_ids=special,
            )
            ids = {token for row in rows for token in row["token_ids"]}
        else:
            ids = set(read_token_list(Path(what).expanduser()))
        if name in lists:
            raise UsageError(f"--joint {text}: the list contains this name twice")
        if not ids:
            notes.append(f"{name}: no tokens, so there is nothing to ban at once")
            continue
        lists[name] = tuple(sorted(ids))
    return lists, notes


def _fresh(
    problems: Sequence[tuple[str, str]],
    repeats: int,
    used: Collection[int],
    first: int,
    wanted: int | None,
) -> tuple[set[int], int]:
    """A run seed that shares no cell's seed with the first run, and the seeds of its cells."""
    for seed in (wanted,) if wanted is not None else range(first + 1, first + 100):
        assert seed is not None
        cells = {
            cell_seed(seed, benchmark, doc_id, repeat)
            for benchmark, doc_id in problems
            for repeat in range(repeats)
        }
        if cells.isdisjoint(used):
            return cells, seed
    raise UsageError(f"--run-seed {wanted}: cells of the first run used these seeds; give another")


def compare(plan: Confirmation, fresh: pd.DataFrame) -> list[dict[str, Any]]:
    """Lines up first and fresh estimates: a mapping with `COMPARED` for each benchmark and test.

    `shrinkage` is the fresh Δ over the first one. `confirmed` says whether what either rule had
    called the candidate on this benchmark is its verdict again, by the rule of the run; None if
    it had not been called. `sum_of_singles` is what a list's Δ would be if its members' first Δ
    added up.
    """
    before = {(r["benchmark"], r["candidate"]): r for r in verdict_records(plan.first)}
    rows = []
    for new in verdict_records(fresh):
        if new["group"] == "canary":
            continue
        joint = new["candidate"] in plan.joint
        old = None if joint else before.get((new["benchmark"], new["candidate"]))
        row: dict[str, Any] = {
            "benchmark": new["benchmark"],
            "candidate": new["candidate"],
            "kind": "joint" if joint else "single",
            "token_ids": new["token_ids"],
            "shrinkage": None,
            "confirmed": None,
            "sum_of_singles": None,
        }
        for name in _ESTIMATE:
            row[f"first_{name}"] = None if old is None else old[name]
            row[f"fresh_{name}"] = new[name]
        if old is not None:
            if old["delta"] and new["delta"] is not None:
                row["shrinkage"] = round(new["delta"] / old["delta"], 4)
            called = {old["verdict_nominal"], old["verdict_fdr"]} - {"neutral"}
            if called:
                row["confirmed"] = new["verdict"] in called
        else:
            ids = set(new["token_ids"])
            members = [
                r["delta"]
                for (benchmark, _), r in before.items()
                if benchmark == new["benchmark"]
                and r["group"] == "candidate"
                and ids.issuperset(r["token_ids"])
                and r["delta"] is not None
            ]
            row["sum_of_singles"] = round(sum(members), 10) if members else None
        rows.append({name: row[name] for name in COMPARED})
    return rows


def write_comparison(plan: Confirmation, fresh: pd.DataFrame, out: Path) -> dict[str, Any]:
    """Writes `confirm.csv` and `confirm.json`; returns the content of the latter."""
    rows = compare(plan, fresh)
    called = [row for row in rows if row["confirmed"] is not None and row["shrinkage"] is not None]
    first = sum(abs(row["first_delta"]) for row in called)
    towards = sum(row["shrinkage"] * abs(row["first_delta"]) for row in called)
    whole = {
        **plan.record,
        "rule": plan.sweep.verdict.model_dump(mode="json"),
        "notes": list(plan.notes),
        "n_called": len(called),
        "n_confirmed": sum(row["confirmed"] for row in called),
        "shrinkage": round(towards / first, 4) if first else None,
        "rows": rows,
    }
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(COMPARED)
    for row in rows:
        table.writerow(
            ["" if v is None else json.dumps(v) if isinstance(v, list) else v for v in row.values()]
        )
    write_text(out / "confirm.csv", text.getvalue())
    write_text(out / "confirm.json", json.dumps(whole, indent=1, ensure_ascii=False) + "\n")
    return whole
