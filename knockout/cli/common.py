"""What the commands share: option types, checks, and printing."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from knockout.errors import UsageError

__all__ = [
    "Json",
    "RunDirectory",
    "Sets",
    "console",
    "one_of",
    "print_json",
    "print_pairs",
    "print_table",
]

Sets = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY.PATH=VALUE", help="Put a value over the sweep file's."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
RunDirectory = Annotated[Path, typer.Argument(metavar="DIR", help="A run directory.")]


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

    # Piped output is as wide as it needs to be.
    return Console() if sys.stdout.isatty() else Console(width=200)
