"""`knockout run` and `knockout demo`, and the commands that read a run directory."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from knockout.cli_common import (
    Json,
    RunDirectory,
    Sets,
    console,
    one_of,
    print_json,
    print_pairs,
    quiet_libraries,
)
from knockout.errors import UsageError

__all__ = ["demo", "export", "run", "status", "verdicts"]


def run(
    sweep: Annotated[Path, typer.Argument(metavar="SWEEP.yaml", help="The sweep file.")],
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Run directory; runs/<name of the file> if not given."),
    ] = None,
    sets: Sets = None,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Try again what the engine failed on.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Runs a sweep, or goes on with it: the same command resumes."""
    from knockout.sweepfile import load_sweep

    _run(load_sweep(sweep, sets or []), out or Path("runs") / sweep.stem, retry_failed, as_json)


def demo(
    out: Annotated[Path, typer.Option("--out", help="Run directory.")] = Path("runs/demo"),
    sets: Sets = None,
    as_json: Json = False,
) -> None:
    """Runs a small sweep of the embedded model on the embedded tasks; needs no network."""
    from importlib.resources import files

    from knockout.sweepfile import parse_sweep

    text = files("knockout").joinpath("demo.yaml").read_text(encoding="utf-8")
    _run(parse_sweep(text, "demo.yaml", Path(), sets or []), out, False, as_json)


def _run(sweep: Any, out: Path, retry_failed: bool, as_json: bool) -> None:
    quiet_libraries()
    from knockout.run import run_sweep

    again = " ".join(["knockout", *(shlex.quote(part) for part in sys.argv[1:])])
    run_sweep(sweep, out, retry_failed=retry_failed, again=again)
    show_verdicts(out, None, None, as_json)
    print(f"Results are in {out}", file=sys.stderr)


def status(directory: RunDirectory, as_json: Json = False) -> None:
    """Shows how far a run is, also while it works."""
    from knockout.store import Ledger, RunLock
    from knockout.summary import summarise

    with Ledger.open(directory / "run.db") as ledger:
        summary = summarise(ledger, sweep_of(directory))
    summary["running"] = RunLock(directory).holder()
    if as_json:
        print_json(summary)
        return
    print_pairs(
        {
            "model": summary["model"],
            "benchmarks": ", ".join(summary["benchmarks"]),
            "candidates": f"{summary['n_candidates']} and {summary['n_controls']} controls",
            "cells": f"{summary['cells_done']} of {summary['n_cells']}",
            "failed": f"{summary['cells_failed']} cells, {summary['forks_failed']} forks",
            "forks": f"{summary['forks']}, {summary['forks_owed']} owed",
            "inherited": summary["inherited"],
            "tokens": f"{summary['tokens_generated']} generated; {summary['tokens_naive']} naively",
            "coupling errors": f"{summary['coupling_errors']} of {summary['steps_checked']} steps",
            "fork errors": f"{summary['fork_errors']} of {summary['audited']} audited",
            "working": summary["running"] or "nobody",
            "complete": "yes" if summary["complete"] else "no",
        }
    )
    for warning in summary["warnings"]:
        print(f"warning: {warning}", file=sys.stderr)


def verdicts(
    directory: RunDirectory,
    rule: Annotated[str | None, typer.Option("--rule", help="nominal or fdr.")] = None,
    alpha: Annotated[float | None, typer.Option("--alpha", help="Error level.")] = None,
    as_json: Json = False,
) -> None:
    """Shows the verdict table, computed from the ledger."""
    show_verdicts(directory, rule, alpha, as_json)


def export(
    directory: RunDirectory,
    kind: Annotated[str, typer.Option("--format", help="ids, json, csv or parquet.")] = "ids",
    verdict: Annotated[
        list[str] | None,
        typer.Option(
            "--verdict", help="strong_pillar, strong_stumbling_block or neutral; may be repeated."
        ),
    ] = None,
    benchmark: Annotated[
        str | None, typer.Option("--benchmark", help="Judge by this benchmark alone.")
    ] = None,
    group: Annotated[str, typer.Option("--group", help="candidate or control.")] = "candidate",
    special: Annotated[
        bool, typer.Option("--special", help="Keep candidates that hold special tokens.")
    ] = False,
    out: Annotated[Path | None, typer.Option("--out", help="File; printed if not given.")] = None,
) -> None:
    """Writes a list of tokens for training."""
    one_of("--format", kind, ("ids", "json", "csv", "parquet"))
    one_of("--group", group, ("candidate", "control"))
    for wanted in verdict or []:
        one_of("--verdict", wanted, ("strong_pillar", "strong_stumbling_block", "neutral"))
    from knockout.export import render, selected, write
    from knockout.results import verdict_table
    from knockout.store import Ledger

    with Ledger.open(directory / "run.db") as ledger:
        chosen = selected(
            verdict_table(ledger, sweep_of(directory).verdict),
            verdicts=verdict or (),
            benchmark=benchmark,
            groups={c.name: c.group for c in ledger.candidates},
            group=group,
            special_ids=json.loads(ledger.meta()["special_ids"]),
            with_special=special,
        )
    if out is None:
        sys.stdout.write(render(chosen, kind))  # type: ignore[arg-type]
    else:
        write(chosen, kind, out)  # type: ignore[arg-type]
        print(f"{len(chosen)} candidates in {out}", file=sys.stderr)


def sweep_of(directory: Path) -> Any:
    from knockout.sweepfile import load_sweep

    return load_sweep(directory / "config.yaml")


def show_verdicts(directory: Path, rule: str | None, alpha: float | None, as_json: bool) -> None:
    if rule is not None:
        one_of("--rule", rule, ("nominal", "fdr"))
    if alpha is not None and not 0 < alpha < 1:
        raise UsageError(f"--alpha: found {alpha}; expected a number between 0 and 1")
    from knockout.results import render_verdicts, verdict_table
    from knockout.store import Ledger

    with Ledger.open(directory / "run.db") as ledger:
        chosen = sweep_of(directory).verdict
        given = {"rule": rule, "alpha": alpha}
        chosen = chosen.model_copy(update={k: v for k, v in given.items() if v is not None})
        table = verdict_table(ledger, chosen)
    if as_json:
        from knockout.verdicts import verdict_records

        print_json(verdict_records(table))
        return
    title = f"rule {chosen.rule}, alpha {chosen.alpha}, margin {chosen.margin}"
    console().print(render_verdicts(table, title))
