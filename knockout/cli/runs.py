"""`knockout merge`, `compare` and `regrade`: what is done with whole runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from knockout.cli.common import Json, RunDirectory, print_json, print_pairs, print_table
from knockout.config.libraries import quiet_libraries
from knockout.errors import UsageError

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["compare", "merge", "parse_shard", "regrade"]


def merge(
    runs: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Run directories.")],
    out: Annotated[Path, typer.Option("--out", help="A new run directory.")],
    as_json: Json = False,
) -> None:
    """Joins runs of one identity: shards, or disjoint candidates or seeds."""
    from knockout.sweep.merge import merge_runs

    counts = merge_runs(runs, out)
    if as_json:
        print_json(counts)
        return
    print_pairs(counts)
    print(f"The joined run is in {out}", file=sys.stderr)


def compare(
    a: Annotated[Path, typer.Argument(metavar="A", help="A run directory.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="The one it is compared with.")],
    benchmarks: Annotated[
        list[str] | None,
        typer.Option("--benchmarks", metavar="A=B", help="Which belong together; may be repeated."),
    ] = None,
    alpha: Annotated[float, typer.Option("--alpha", help="Error level.")] = 0.05,
    out: Annotated[
        Path | None, typer.Option("--out", help="A .csv or .json file of all columns.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Compares two runs candidate by candidate: which pillars appeared or went away?"""
    from knockout.files import write_text
    from knockout.sweep.compare import agreement, compare_runs, setting_differences

    if not 0 < alpha < 1:
        raise UsageError(f"--alpha: found {alpha}; expected a number between 0 and 1")
    if out is not None and out.suffix not in (".csv", ".json"):
        raise UsageError(f"--out: found {out.name}; expected a name that ends in .csv or .json")
    pairs: dict[str, str] | None = None
    if benchmarks:
        pairs = {}
        for item in benchmarks:
            one, equals, other = item.partition("=")
            if not equals or not one or not other:
                raise UsageError(f"--benchmarks: found {item!r}; expected A=B")
            pairs[one] = other
    frame = compare_runs(a, b, benchmarks=pairs, alpha=alpha)
    records = json.loads(frame.to_json(orient="records"))
    if out is not None:
        text = frame.to_csv(index=False) if out.suffix == ".csv" else json.dumps(records, indent=1)
        write_text(out, text if text.endswith("\n") else f"{text}\n")
    if as_json:
        print_json(records)
        return
    ordered = sorted(records, key=lambda r: (r["benchmark"], _order(r)))
    print_table(
        ["benchmark", "candidate", "Δ A", "Δ B", "B − A", "interval", "p adj.", "verdicts", "change"],
        [
            [
                row["benchmark"], row["candidate"] or row["candidate_b"],
                _signed(row["delta_a"]), _signed(row["delta_b"]), _signed(row["difference"]),
                f"{_signed(row['ci_low'])} to {_signed(row['ci_high'])}",
                "–" if row["p_adjusted"] is None else f"{row['p_adjusted']:.3f}",
                f"{row['verdict_a'] or '–'} → {row['verdict_b'] or '–'}",
                row["change"] + (" (supported)" if row["supported"] else ""),
            ]
            for row in ordered
        ],
    )  # fmt: skip
    for name, counts in agreement(frame).items():
        told = ", ".join(f"{n} {what}" for what, n in counts.items())
        print(f"{name}: {told}; {_how(frame[frame['benchmark'] == name])}", file=sys.stderr)
    for line in setting_differences(a, b):
        print(f"The runs differ in {line}", file=sys.stderr)


def _how(rows: pd.DataFrame) -> str:
    """Whether the rows that have a difference were compared pair by pair, and on how many problems."""
    tested = rows[rows["n_problems"] > 0]
    told = []
    for paired, text in ((True, "paired over the {} shared problems"),
                         (False, "not paired, {} problems in all, as too few are shared")):  # fmt: skip
        if len(part := tested[tested["paired"] == paired]):
            told.append(text.format(int(part["n_problems"].max())))
    return " and ".join(told) or "nothing tested"


def regrade(
    directory: RunDirectory,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would change; write nothing.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Grades stored answers anew after a grader changed, and says what changed."""
    quiet_libraries()
    from knockout.sweep.regrade import regrade_run

    changed: list[dict[str, Any]] = []
    found = regrade_run(directory, write=not dry_run, told=changed.append)
    if not dry_run and found["changed"]:
        from knockout.sweep.run import write_results

        write_results(directory)
    if as_json:
        print_json({**found, "list": changed})
        return
    for row in changed:
        who = row["candidate"] or "baseline"
        print(
            f"{row['benchmark']}, {row['doc_id']}, seed {row['seed']}, {who}: "
            f"{_grade(row['before'])} → {_grade(row['after'])}"
        )
    for benchmark, arms in found["changes"].items():
        for arm, counts in arms.items():
            told = ", ".join(f"{n} {kind}" for kind, n in sorted(counts.items()))
            print(f"{benchmark}, {arm}: {told}", file=sys.stderr)
    verb = "would change" if dry_run else "changed"
    print(f"{found['changed']} of {found['graded']} grades {verb}", file=sys.stderr)


def parse_shard(text: str | None) -> tuple[int, int]:
    """Reads "2/8" as the second of eight parts; (1, 1) for none."""
    if text is None:
        return 1, 1
    part, slash, parts = text.partition("/")
    if not slash or not part.isdecimal() or not parts.isdecimal() or len(text) > 20:
        raise UsageError(f"--shard: found {text!r}; expected K/N, such as 2/8")
    if not 1 <= int(part) <= int(parts):
        raise UsageError(f"--shard: found {text!r}; expected K from 1 to N")
    return int(part), int(parts)


def _grade(grade: dict[str, Any]) -> str:
    shown = {1: "right", 0: "wrong", None: "missing"}[grade["correct"]]
    return f"{shown} ({grade['status']}, {grade['extracted']!r})"


def _signed(value: float | None) -> str:
    return "–" if value is None else f"{value:+.3f}"


def _order(row: dict[str, Any]) -> tuple[bool, float]:
    p = row["p_value"]
    return p is None, 1.0 if p is None else p
