"""Commands around a first sweep: init, schema, tasks, list."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from knockout.cli.common import Json, print_json, print_table
from knockout.errors import KnockoutError, UsageError, shortened

__all__ = ["init", "runs", "schema", "tasks"]

_TEMPLATE = """\
# Editors that know YAML complete and check it: knockout schema > sweep.schema.json, and above this
# line: # yaml-language-server: $schema=sweep.schema.json
# Every key: docs/sweep-file.md. Cost and power before it runs: knockout plan {name}
model: {model}
engine: {{kind: auto}}
benchmarks: [{benchmarks}]
limit: {limit}                     # first N problems of each benchmark; null for all
seeds: {seeds}
sampling: {{temperature: 0.6, top_p: 0.95, top_k: 20, max_tokens: {max_tokens}}}
candidates: {candidates}
verdict: {{rule: fdr, alpha: 0.05, margin: 0.02}}
"""


def init(
    file: Annotated[
        Path, typer.Argument(metavar="SWEEP.yaml", help="The sweep file to write.")
    ] = Path("sweep.yaml"),
    model: Annotated[
        str | None, typer.Option("--model", help="Embedded, a hub name, or a folder.")
    ] = None,
    benchmark: Annotated[
        list[str] | None, typer.Option("--benchmark", help="`knockout tasks`; may be repeated.")
    ] = None,
    candidates: Annotated[
        Path | None, typer.Option("--candidates", metavar="FILE", help="A list of tokens.")
    ] = None,
    column: Annotated[str | None, typer.Option("--column", help="Of that file.")] = None,
    text: Annotated[
        list[str] | None,
        typer.Option("--token", help="A token's text, instead of a file; may be repeated."),
    ] = None,
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="Repeats of each problem.")] = 3,
    limit: Annotated[
        int | None, typer.Option("--limit", min=1, help="First N problems; all if not given.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", min=1, help="The task's own if not given.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Write over a file.")] = False,
) -> None:
    """Writes a sweep file that runs; asks for what is not given if it can."""
    from knockout.config.file import parse_sweep
    from knockout.files import write_text

    if file.exists() and not force:
        raise UsageError(f"{file}: is there already; name another file, or give --force")
    if candidates is not None and text:
        raise UsageError("--candidates and --token: give one of them")
    asking = sys.stdin.isatty() and sys.stdout.isatty()
    if model is None:
        model = typer.prompt("Model", default="smollm2-135m") if asking else "smollm2-135m"
    if not benchmark:
        default = "knockout_starter_arithmetic"
        given = typer.prompt("Benchmarks (knockout tasks)", default=default) if asking else default
        benchmark = given.replace(",", " ").split()
    if candidates is None and not text and asking:
        answer = typer.prompt("File of tokens (empty: three common ones)", default="")
        candidates = Path(answer).expanduser() if answer else None
    source: dict[str, Any] = {"strings": text or [" the", " is", ","]}
    if candidates is not None:
        found = candidates.expanduser()
        source = {"file": _path_from(file, found)}
        if column is not None:
            source["column"] = column
    made = _TEMPLATE.format(
        name=file.name,
        model=json.dumps(model, ensure_ascii=False),
        benchmarks=", ".join(json.dumps(name, ensure_ascii=False) for name in benchmark),
        limit=json.dumps(limit),
        seeds=seeds,
        max_tokens=json.dumps(max_tokens),
        candidates=json.dumps(source, ensure_ascii=False),
    )
    parse_sweep(made, str(file), file.parent)
    write_text(file, made)
    print(f"{file} is written. Next: knockout plan {file}; knockout run {file}", file=sys.stderr)


def _path_from(sweep: Path, found: Path) -> str:
    """How a sweep file names a file: from its own folder, so that both can be moved together."""
    folder, path = sweep.absolute().parent, found.absolute()
    if not found.exists():
        return str(found)
    return path.relative_to(folder).as_posix() if path.is_relative_to(folder) else str(path)


def schema() -> None:
    """Prints the JSON schema of the sweep file, for editors that complete and check YAML."""
    from knockout.config.page import sweep_schema

    print_json(sweep_schema())


def tasks(
    pattern: Annotated[
        str, typer.Argument(metavar="WORD", help="Only tasks whose name contains it.")
    ] = "",
    everything: Annotated[
        bool, typer.Option("--all", help="lm-eval's own as well (takes some 20 s).")
    ] = False,
    as_json: Json = False,
) -> None:
    """Shows the benchmarks that a sweep may name."""
    from knockout.benchmarks.find import describe_tasks

    found = [row for row in describe_tasks(everything) if pattern.lower() in row["task"].lower()]
    if not found:
        more = "" if everything else "; --all looks among lm-eval's own too"
        raise UsageError(f"no task has {shortened(pattern)!r} in its name{more}")
    if as_json:
        print_json(found)
        return
    print_table(
        ["task", "graded as", "problems", "about"],
        [[row["task"], row["graded_as"], row["problems"], row["about"]] for row in found],
    )


def runs(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where to look.")] = Path("runs"),
    as_json: Json = False,
) -> None:
    """Shows the runs under a folder: state, size and cost."""
    if not folder.is_dir():
        raise UsageError(f"{folder}: no such folder; name the one that contains your runs")
    found = [_one_run(ledger.parent) for ledger in sorted(folder.rglob("run.db"))]
    if as_json:
        print_json(found)
        return
    if not found:
        print(f"no runs under {folder}", file=sys.stderr)
        return
    print_table(
        ["run", "state", "model", "benchmarks", "candidates", "seeds", "cells", "tokens", "hours",
         "MB"],
        [
            [
                row["run"], row["state"], row.get("model", ""), ", ".join(row.get("benchmarks", [])),
                str(row.get("n_candidates", "")), str(row.get("n_seeds", "")),
                f"{row['cells_done']} of {row['n_cells']}" if "n_cells" in row else "",
                f"{row['tokens_generated']:,}" if "tokens_generated" in row else "",
                f"{row['wall_s'] / 3600:.2f}" if "wall_s" in row else "", f"{row['megabytes']:.1f}",
            ]
            for row in found
        ],
    )  # fmt: skip


def _one_run(directory: Path) -> dict[str, Any]:
    from knockout.config.file import load_sweep
    from knockout.ledger import Ledger, RunLock
    from knockout.sweep.summary import summarise

    size = sum(path.stat().st_size for path in directory.iterdir() if path.is_file())
    row: dict[str, Any] = {"run": str(directory), "megabytes": round(size / 1e6, 3)}
    try:
        with Ledger.open(directory / "run.db") as ledger:
            summary = summarise(ledger, load_sweep(directory / "config.yaml"))
        holder = RunLock(directory).holder()
    except (KnockoutError, OSError) as error:
        return row | {"state": "unreadable", "why": str(error)}
    state = "complete" if summary["complete"] else "stopped"
    keys = ("model", "benchmarks", "n_candidates", "n_seeds", "cells_done", "n_cells",
            "tokens_generated", "wall_s")  # fmt: skip
    return row | {"state": "running" if holder else state} | {key: summary[key] for key in keys}
