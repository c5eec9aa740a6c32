"""What the commands share: option types, checks, and printing."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from knockout.errors import UsageError

__all__ = [
    "Json",
    "Limit",
    "Overrides",
    "RunDirectory",
    "Sets",
    "all_sets",
    "console",
    "one_of",
    "print_json",
    "print_pairs",
    "print_table",
    "to_nowhere",
]

Sets = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY.PATH=VALUE", help="Put a value over the sweep file's."),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY.PATH=VALUE...", help="Values over the sweep file's; as --set."),
]
Limit = Annotated[
    int | None,
    typer.Option(
        "--limit",
        min=1,
        help="First N problems of each benchmark that sets no limit of its own; sets limit.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
RunDirectory = Annotated[Path, typer.Argument(metavar="DIR", help="A run directory.")]


def all_sets(
    sets: list[str] | None, overrides: list[str] | None = None, limit: int | None = None
) -> list[str]:
    """What --set, bare key=value and --limit put over a sweep file; the last one wins."""
    for item in overrides or []:
        if "=" not in item:
            raise UsageError(
                f"found {item!r}; expected key.path=value, such as seeds=5, after the sweep file"
            )
    return [*(sets or []), *(overrides or []), *([] if limit is None else [f"limit={limit}"])]


def one_of(option: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise UsageError(f"{option}: found {value!r}; expected {', '.join(allowed)}")


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False, default=str))


def print_pairs(pairs: dict[str, Any]) -> None:
    width = max(map(len, pairs))
    for key, value in pairs.items():
        print(f"{key:<{width}}  {value}")


def print_table(header: list[str], rows: list[list[str]]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(*header)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    console().print(table)


def console() -> Any:
    from rich.console import Console

    class Piped(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError  # rich by itself would exit

    # Piped output is as wide as it needs to be.
    return Console() if sys.stdout.isatty() else Piped(width=200)


def to_nowhere(stream: Any) -> None:
    """Sends what a stream still holds, and all that follows, to the null device."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
