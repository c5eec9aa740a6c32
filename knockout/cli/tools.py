"""Commands that need no run directory: candidates, grade, doctor."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from knockout.cli.common import Json, print_json, print_table
from knockout.config.libraries import quiet_libraries

__all__ = ["candidates", "doctor", "grade"]


def candidates(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="CSV, TSV, Parquet, JSON, YAML or text.")
    ],
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
    quiet_libraries()
    from dataclasses import asdict

    from knockout.config.sweep import CandidateSource
    from knockout.tokens.candidates import resolve
    from knockout.tokens.vocabulary import open_vocabulary

    source = CandidateSource(file=file, column=column, family=family, allow_eos=allow_eos)
    _, _, vocabulary = open_vocabulary(model)
    found = resolve(source, vocabulary)
    if as_json:
        print_json([{"token_ids": c.token_ids, **asdict(c)} for c in found.candidates])
    else:
        print_table(
            ["candidate", "group", "ids", "tokens"],
            [
                [c.name, c.group, " ".join(map(str, c.token_ids)), " ".join(c.tokens)]
                for c in found.candidates
            ],
        )
    for note in found.notes:
        print(note, file=sys.stderr)
    for warning in found.warnings:
        print(f"warning: {warning}", file=sys.stderr)


def grade(
    task: Annotated[str, typer.Argument(metavar="TASK", help="The task that grades.")],
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE.jsonl",
            help='Lines of {"doc": {...}, "response": "..."}; for maths also {"answer": gold, ...}.',
        ),
    ],
    include_path: Annotated[
        Path | None, typer.Option("--include-path", help="Folder with further task files.")
    ] = None,
    data_dir: Annotated[
        Path | None, typer.Option("--data-dir", help="Folder with the task's records as JSONL.")
    ] = None,
    metric: Annotated[
        str | None, typer.Option("--metric", help="Which 0/1 metric of the task is the grade.")
    ] = None,
    think_end: Annotated[
        str, typer.Option("--think-end", help="What closes the thinking part; empty for none.")
    ] = "</think>",
    workers: Annotated[int, typer.Option("--workers", min=1, help="Processes.")] = 1,
    timeout_s: Annotated[float, typer.Option("--timeout", help="Seconds for one answer.")] = 10.0,
) -> None:
    """Grades saved responses; prints a JSON line for each."""
    quiet_libraries()
    from knockout.benchmarks.saved import grade_file

    for line in grade_file(
        task,
        file,
        data_dir=data_dir,
        include_path=include_path,
        metric=metric,
        think_end=think_end or None,
        workers=workers,
        timeout_s=timeout_s,
        warn=lambda text: print(f"warning: {text}", file=sys.stderr),
    ):
        text = json.dumps(line, ensure_ascii=False)
        try:
            text.encode(sys.stdout.encoding or "utf-8")
        except UnicodeEncodeError:  # a lone surrogate, or a terminal that is not UTF-8
            text = json.dumps(line)
        sys.stdout.write(text + "\n")


def doctor(
    fetch: Annotated[
        bool,
        typer.Option(
            "--fetch",
            help="First get the embedded model and, with the extra cpu, vLLM's CPU build.",
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Says what engine, device and versions will be used, and what is missing."""
    quiet_libraries()
    from knockout import doctor
    from knockout.doctor import diagnose, render

    if fetch:
        for line in doctor.fetch():
            print(line, file=sys.stderr)

    report = diagnose()
    if as_json:
        print_json(report.to_dict())
    else:
        print(render(report))
    if not report.healthy:
        raise typer.Exit(1)
