"""The `knockout` command. Nothing heavy is imported before a command needs it."""

from __future__ import annotations

import errno
import json
import logging
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from knockout._version import __version__
from knockout.errors import KnockoutError, UsageError

__all__ = ["app", "main"]

app = typer.Typer(
    name="knockout",
    help="Finds out which tokens carry a language model's reasoning, by banning them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Sets = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY.PATH=VALUE", help="Put a value over the sweep file's."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
RunDirectory = Annotated[Path, typer.Argument(metavar="DIR", help="A run directory.")]


def _version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


@app.callback()
def _options(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    _State.debug = debug


class _State:
    """What the options before the command's name set."""

    debug = False


@app.command()
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


@app.command()
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
    _quiet_libraries()
    from knockout.run import run_sweep

    again = " ".join(["knockout", *(_quoted(part) for part in sys.argv[1:])])
    run_sweep(sweep, out, retry_failed=retry_failed, again=again)
    _show_verdicts(out, None, None, as_json)
    print(f"Results are in {out}", file=sys.stderr)


def _quoted(part: str) -> str:
    import shlex

    return shlex.quote(part)


@app.command()
def status(directory: RunDirectory, as_json: Json = False) -> None:
    """Shows how far a run is, also while it works."""
    from knockout.store import Ledger, RunLock
    from knockout.summary import summarise

    with Ledger.open(directory / "run.db") as ledger:
        summary = summarise(ledger, _sweep_of(directory))
    summary["running"] = RunLock(directory).holder()
    if as_json:
        _print_json(summary)
        return
    _print_pairs(
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


@app.command()
def verdicts(
    directory: RunDirectory,
    rule: Annotated[str | None, typer.Option("--rule", help="nominal or fdr.")] = None,
    alpha: Annotated[float | None, typer.Option("--alpha", help="Error level.")] = None,
    as_json: Json = False,
) -> None:
    """Shows the verdict table, computed from the ledger."""
    _show_verdicts(directory, rule, alpha, as_json)


@app.command()
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
    _one_of("--format", kind, ("ids", "json", "csv", "parquet"))
    _one_of("--group", group, ("candidate", "control"))
    for wanted in verdict or []:
        _one_of("--verdict", wanted, ("strong_pillar", "strong_stumbling_block", "neutral"))
    from knockout.export import render, selected, write
    from knockout.results import verdict_table
    from knockout.store import Ledger

    with Ledger.open(directory / "run.db") as ledger:
        chosen = selected(
            verdict_table(ledger, _sweep_of(directory).verdict),
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


@app.command()
def candidates(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="CSV, Parquet, JSON or text.")],
    model: Annotated[str, typer.Option("--model", help="Whose tokens they are.")],
    column: Annotated[
        str | None, typer.Option("--column", help="Of a CSV or Parquet file.")
    ] = None,
    family: Annotated[
        bool, typer.Option("--family", help="A string stands for its single-token variants.")
    ] = False,
    allow_eos: Annotated[
        bool, typer.Option("--allow-eos", help="Tokens that end the text may be in it.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Shows how a list of candidates resolves."""
    _quiet_libraries()
    from dataclasses import asdict

    from knockout.candidates import resolve
    from knockout.config import CandidateSource
    from knockout.vocabulary import open_vocabulary

    source = CandidateSource(file=file, column=column, family=family, allow_eos=allow_eos)
    _, _, vocabulary = open_vocabulary(model)
    found = resolve(source, vocabulary)
    if as_json:
        _print_json([asdict(candidate) for candidate in found.candidates])
    else:
        _print_table(
            ["candidate", "group", "ids", "tokens"],
            [
                [c.name, c.group, " ".join(map(str, c.token_ids)), " ".join(c.tokens)]
                for c in found.candidates
            ],
        )
    for warning in found.warnings:
        print(f"warning: {warning}", file=sys.stderr)


def _one_of(option: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise UsageError(f"{option}: found {value!r}; expected {', '.join(allowed)}")


def _sweep_of(directory: Path) -> Any:
    from knockout.sweepfile import load_sweep

    return load_sweep(directory / "config.yaml")


def _show_verdicts(directory: Path, rule: str | None, alpha: float | None, as_json: bool) -> None:
    if rule is not None:
        _one_of("--rule", rule, ("nominal", "fdr"))
    if alpha is not None and not 0 < alpha < 1:
        raise UsageError(f"--alpha: found {alpha}; expected a number between 0 and 1")
    from knockout.results import render_verdicts, verdict_table
    from knockout.store import Ledger

    with Ledger.open(directory / "run.db") as ledger:
        chosen = _sweep_of(directory).verdict
        given = {"rule": rule, "alpha": alpha}
        chosen = chosen.model_copy(update={k: v for k, v in given.items() if v is not None})
        table = verdict_table(ledger, chosen)
    if as_json:
        from knockout.verdicts import verdict_records

        _print_json(verdict_records(table))
        return
    title = f"rule {chosen.rule}, alpha {chosen.alpha}, margin {chosen.margin}"
    _console().print(render_verdicts(table, title))


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False, default=str))


def _print_pairs(pairs: dict[str, Any]) -> None:
    width = max(map(len, pairs))
    for key, value in pairs.items():
        print(f"{key:<{width}}  {value}")


def _print_table(header: list[str], rows: list[list[str]]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(*header)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    _console().print(table)


def _console() -> Any:
    from rich.console import Console

    # Piped output is as wide as it needs to be.
    return Console() if sys.stdout.isatty() else Console(width=200)


def _quiet_libraries() -> None:
    """Keeps other people's chatter off the terminal, unless the user asked for it."""
    for name, value in {
        "TRANSFORMERS_VERBOSITY": "error",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }.items():
        os.environ.setdefault(name, value)


def _log_to_stderr() -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    log = logging.getLogger("knockout")
    log.handlers = [handler]
    log.setLevel(logging.INFO)
    log.propagate = False


def main() -> None:
    """Runs the command line; exits 2 for misuse, 1 for failure, 130 after Ctrl-C."""
    _log_to_stderr()
    try:
        app(standalone_mode=False)
    except (KnockoutError, OSError, KeyboardInterrupt) as error:
        if _State.debug:
            raise
        sys.exit(_tell(error))
    except typer.Abort:
        sys.exit(130)
    except Exception as error:
        if _is_click_error(error):
            error.show()  # type: ignore[attr-defined]
            sys.exit(2)
        if _State.debug:
            raise
        print(
            f"knockout: internal error: {type(error).__name__}: {error} "
            "(`knockout --debug ...` shows where)",
            file=sys.stderr,
        )
        sys.exit(1)


def _tell(error: BaseException) -> int:
    """Prints an error in one message; returns the exit status."""
    if isinstance(error, KeyboardInterrupt):
        print("knockout: stopped", file=sys.stderr)
        return 130
    if isinstance(error, BrokenPipeError):
        # The reader went away (`| head`): nothing to say, and nowhere to say it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        print("knockout: the disk is full; what was committed is safe", file=sys.stderr)
        return 1
    print(f"knockout: {error}", file=sys.stderr)
    return error.exit_code if isinstance(error, KnockoutError) else 1


def _is_click_error(error: Exception) -> bool:
    return any(kind.__name__ == "ClickException" for kind in type(error).__mro__)
