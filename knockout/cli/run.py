"""`knockout run` and `knockout demo`, and the commands that read a run directory."""

from __future__ import annotations

import contextlib
import json
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from knockout.cli.common import (
    Json,
    Limit,
    Overrides,
    RunDirectory,
    Sets,
    all_sets,
    console,
    one_of,
    print_json,
    print_pairs,
    to_nowhere,
)
from knockout.cli.lm_eval import export_lm_eval
from knockout.config.libraries import quiet_libraries
from knockout.errors import KnockoutError, UsageError, counted

__all__ = ["demo", "export", "run", "show_verdicts", "status", "sweep_of", "verdicts"]

PRELIMINARY = (
    "warning: the run is unfinished and this table preliminary: knockouts that are their baseline "
    "arrive before those that are generated, which pulls Δ towards 0"
)


def run(
    sweep: Annotated[Path, typer.Argument(metavar="SWEEP.yaml", help="The sweep file.")],
    overrides: Overrides = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Run directory; runs/<name of the file> if not given."),
    ] = None,
    sets: Sets = None,
    limit: Limit = None,
    retry_failed: Annotated[
        bool,
        typer.Option(
            "--retry-failed/--keep-failed", help="Whether to try again what the engine failed on."
        ),
    ] = True,
    ray: Annotated[
        str | None,
        typer.Option("--ray", metavar="ADDRESS", help="Run on a Ray cluster; sets engine.ray."),
    ] = None,
    shard: Annotated[
        str | None,
        typer.Option(
            "--shard", metavar="K/N", help="Work on every N-th problem from the K-th on; see merge."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Runs a sweep, or goes on with it: the same command resumes."""
    from knockout.cli.runs import parse_shard
    from knockout.config.file import load_sweep

    given = all_sets(sets, overrides, limit) + ([] if ray is None else [f"engine.ray={ray}"])
    folder, part = out or Path("runs") / sweep.stem, parse_shard(shard)
    _run(load_sweep(sweep, given), folder, retry_failed, as_json, part)


def demo(
    overrides: Overrides = None,
    out: Annotated[Path, typer.Option("--out", help="Run directory.")] = Path("runs/demo"),
    sets: Sets = None,
    limit: Limit = None,
    as_json: Json = False,
) -> None:
    """Runs a small sweep of the embedded model on the embedded tasks; needs no network."""
    from importlib.resources import files

    from knockout.config.file import parse_sweep

    text = files("knockout").joinpath("demo.yaml").read_text(encoding="utf-8")
    _run(
        parse_sweep(text, "demo.yaml", Path(), all_sets(sets, overrides, limit)),
        out,
        False,
        as_json,
    )


def _run(
    sweep: Any, out: Path, retry_failed: bool, as_json: bool, shard: tuple[int, int] = (1, 1)
) -> None:
    quiet_libraries()
    from knockout.sweep.run import run_sweep

    again = " ".join(["knockout", *(shlex.quote(part) for part in sys.argv[1:])])
    run_sweep(sweep, out, retry_failed=retry_failed, again=again, shard=shard)
    try:
        show_verdicts(out, None, None, as_json)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader went away (`| head`); the run is complete all the same
        to_nowhere(sys.stdout)
    with contextlib.suppress(OSError):
        _say_findings(sweep, out)
        print(f"Results are in {out}", file=sys.stderr)


def _say_findings(sweep: Any, out: Path) -> None:
    """The block that also heads the report."""
    from knockout.verdicts.findings import findings

    rows, summary = (
        json.loads((out / name).read_text(encoding="utf-8"))
        for name in ("verdicts.json", "summary.json")
    )
    rule = sweep.verdict
    said = findings(
        rows, summary, rule=rule.rule, alpha=rule.alpha, margin=rule.margin, folder=str(out)
    )
    print(*said.lines, sep="\n", file=sys.stderr)


def status(
    directory: RunDirectory,
    check: Annotated[
        bool, typer.Option("--check", help="Read every page and row of the ledger first.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Shows how far a run is, also while it works."""
    from knockout.ledger import Ledger, RunLock
    from knockout.sweep.summary import summarise

    with Ledger.open(directory / "run.db") as ledger:
        if check:
            _check(ledger)
        summary = summarise(ledger, sweep_of(directory))
    summary["running"] = RunLock(directory).holder()
    if as_json:
        print_json(summary)
        return
    race = summary["race"]
    print_pairs(
        {
            "model": summary["model"],
            "benchmarks": ", ".join(summary["benchmarks"]),
            "candidates": f"{summary['n_candidates']} and {summary['n_controls']} controls",
            "cells": f"{summary['cells_done']} of {summary['n_cells']}",
            "failed": f"{counted(summary['cells_failed'], 'cell')}, {counted(summary['forks_failed'], 'fork')}",
            "forks": f"{summary['forks']}, {summary['forks_owed']} owed",
            "inherited": summary["inherited"],
            "tokens": f"{summary['tokens_generated']} generated; {summary['tokens_naive']} naively",
            "coupling errors": f"{summary['coupling_errors']} of {summary['steps_checked']} forks",
            "fork errors": f"{summary['fork_errors']} of {summary['audited']} audited",
            "working": summary["running"] or "nobody",
            **({} if race is None else {"race": _race(race)}),
            "complete": "yes" if summary["complete"] else "no",
        }
    )
    for name in race["rounds"] if race is not None else ():
        for one in race["settled"]:
            if one["benchmark"] == name:
                why = (
                    f"chance of an effect {one['chance']:.2g}"
                    if one["settled_as"] == "futile"
                    else f"e = 10^{one['log10_e']:.1f}"
                )
                print(
                    f"  {name}: {one['candidate']} {one['settled_as']} after round "
                    f"{one['settled_round']}, {why}"
                )
    for warning in summary["warnings"]:
        print(f"warning: {warning}", file=sys.stderr)


def _check(ledger: Any) -> None:
    from itertools import islice

    from knockout.ledger.check import faults

    if found := list(islice(faults(ledger), 10)):
        lines = "".join(f"\n  {line}" for line in found)
        raise KnockoutError(
            f"{ledger.path}: the rows of the ledger do not fit together:{lines}\n"
            "Put back a copy of it, or run with another --out"
        )
    print("the ledger is whole", file=sys.stderr)


def _race(race: dict[str, Any]) -> str:
    """One line: rounds, what is open, and what ended it."""
    parts = [
        f"{name}: round {done} of at most {race['max_rounds'][name]}, {race['open'][name]} open"
        for name, done in race["rounds"].items()
    ]
    return "; ".join([*parts, f"ended by {race['ended']}" if race["ended"] else "goes on"])


def verdicts(
    directory: RunDirectory,
    rule: Annotated[
        str | None, typer.Option("--rule", help="nominal, fdr, holm, by, or a rule of yours.")
    ] = None,
    alpha: Annotated[float | None, typer.Option("--alpha", help="Error level.")] = None,
    kind: Annotated[
        str | None,
        typer.Option("--format", help="markdown, latex or csv: print a table to paste."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Shows the verdict table, computed from the ledger."""
    if kind is None:
        show_verdicts(directory, rule, alpha, as_json)
        return
    from knockout.verdicts.paper import FORMATS, paper_table

    one_of("--format", kind, FORMATS)
    table, chosen, _ = _verdicts_of(directory, rule, alpha)
    print(paper_table(table, chosen.rule, kind), end="")


def cite(directory: RunDirectory) -> None:
    """Prints a methods paragraph with the numbers of a run, and a BibTeX entry."""
    from knockout.ledger import Ledger
    from knockout.sweep.summary import summarise
    from knockout.verdicts.paper import BIBTEX, methods

    sweep = sweep_of(directory)
    with Ledger.open(directory / "run.db") as ledger:
        summary = summarise(ledger, sweep)
    rule = sweep.verdict
    print(
        methods(summary, rule=rule.rule, alpha=rule.alpha, margin=rule.margin, target=rule.target)
    )
    print(BIBTEX, end="")


def export(
    directory: RunDirectory,
    kind: Annotated[
        str,
        typer.Option(
            "--format", help="ids, json (self-describing), yaml, csv, parquet or lm-eval."
        ),
    ] = "ids",
    verdict: Annotated[
        list[str] | None,
        typer.Option(
            "--verdict", help="strong_pillar, strong_stumbling_block or neutral; may be repeated."
        ),
    ] = None,
    evidence: Annotated[
        list[str] | None,
        typer.Option("--evidence", help="effect, equivalent or undetermined; may be repeated."),
    ] = None,
    rule: Annotated[
        str | None,
        typer.Option("--rule", help="nominal, fdr, holm, by, or your own; default: the run's."),
    ] = None,
    benchmark: Annotated[
        str | None, typer.Option("--benchmark", help="Judge by this benchmark alone.")
    ] = None,
    across: Annotated[
        str,
        typer.Option("--across", help="overall, or the wanted verdict on any or all benchmarks."),
    ] = "overall",
    rocks: Annotated[
        Path | None,
        typer.Option(
            "--freeze-list",
            metavar="ROCKS",
            help="Those of these mined tokens that are neither pillars nor undetermined.",
        ),
    ] = None,
    column: Annotated[
        str, typer.Option("--column", help="Column of the ids in that table.")
    ] = "rock_id",
    keep_undetermined: Annotated[
        bool, typer.Option("--keep-undetermined", help="Freeze undetermined rocks too.")
    ] = False,
    top: Annotated[int | None, typer.Option("--top", min=1, help="The first N only.")] = None,
    by: Annotated[
        str, typer.Option("--by", help="delta, p_value, p_adjusted, or a column of --scores.")
    ] = "delta",
    scores: Annotated[
        Path | None, typer.Option("--scores", help="Token scores of `mine`, to rank by.")
    ] = None,
    for_model: Annotated[
        str | None,
        typer.Option("--for", metavar="MODEL", help="Refuse if its token ids mean other tokens."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Export for it in spite of that.")] = False,
    group: Annotated[str, typer.Option("--group", help="candidate or control.")] = "candidate",
    special: Annotated[
        bool, typer.Option("--special", help="Keep candidates that contain special tokens.")
    ] = False,
    out: Annotated[Path | None, typer.Option("--out", help="File; printed if not given.")] = None,
) -> None:
    """Writes a list of tokens for training."""
    one_of("--format", kind, ("ids", "json", "yaml", "csv", "parquet", "lm-eval"))
    if kind == "lm-eval":
        export_lm_eval(directory, out)
        return
    from knockout.sweep.lists import choose, describe
    from knockout.verdicts.export import render, write

    chosen = choose(
        directory,
        verdicts=verdict or (),
        evidence=evidence or (),
        rule=rule,
        benchmark=benchmark,
        across=across,
        group=group,
        special=special,
        rocks=rocks,
        column=column,
        keep_undetermined=keep_undetermined,
        top=top,
        by=by,
        scores=scores,
    )
    for note in ([PRELIMINARY] if chosen.preliminary else []) + list(chosen.notes):
        print(note, file=sys.stderr)
    about = None
    if for_model is not None or kind in ("json", "yaml"):
        quiet_libraries()
        about = describe(chosen, for_model, force=force)
    if out is None:
        sys.stdout.write(render(chosen.rows, kind, about))  # type: ignore[arg-type]
    else:
        write(chosen.rows, kind, out, about)  # type: ignore[arg-type]
        print(f"{counted(len(chosen.rows), 'candidate')} in {out}", file=sys.stderr)


def sweep_of(directory: Path) -> Any:
    from knockout.config.file import load_sweep

    return load_sweep(directory / "config.yaml")


def _verdicts_of(
    directory: Path, rule: str | None, alpha: float | None, *, with_luck: bool = False
) -> tuple[Any, Any, Any]:
    """The table, the rule that it follows, and what luck would bring (None if not asked for)."""
    from knockout.verdicts.rules import rule_names

    if rule is not None:
        one_of("--rule", rule, rule_names())
    if alpha is not None and not 0 < alpha < 1:
        raise UsageError(f"--alpha: found {alpha}; expected a number between 0 and 1")
    from knockout.ledger import Ledger
    from knockout.sweep.results import luck_of, verdict_table

    with Ledger.open(directory / "run.db") as ledger:
        chosen = sweep_of(directory).verdict
        given = {"rule": rule, "alpha": alpha}
        chosen = chosen.model_copy(update={k: v for k, v in given.items() if v is not None})
        table = verdict_table(ledger, chosen)
        return table, chosen, luck_of(ledger, chosen) if with_luck else None


def show_verdicts(directory: Path, rule: str | None, alpha: float | None, as_json: bool) -> None:
    from knockout.verdicts.terminal import render_verdicts

    table, chosen, luck = _verdicts_of(directory, rule, alpha, with_luck=not as_json)
    preliminary = bool(table["preliminary"].any())
    if preliminary:
        print(PRELIMINARY, file=sys.stderr)
    if as_json:
        from knockout.verdicts.files import verdict_records

        print_json(verdict_records(table))
        return
    title = f"rule {chosen.rule}, alpha {chosen.alpha}, margin {chosen.margin}"
    title = f"PRELIMINARY: {title}" if preliminary else title
    console().print(render_verdicts(table, title, rule=chosen.rule, luck=luck))
