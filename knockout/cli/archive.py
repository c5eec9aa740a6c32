"""`knockout export-run` and `import-run`: a whole run as Parquet files, and back."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from knockout.cli.common import Json, RunDirectory, print_json, print_pairs

__all__ = ["export_run", "import_run"]


def export_run(
    directory: RunDirectory,
    out: Annotated[Path, typer.Option("--out", help="A new folder.")],
    as_json: Json = False,
) -> None:
    """Writes a whole run as Parquet files, one a table, with token ids as lists."""
    from knockout.ledger.archive import export_run as export

    _show(export(directory, out), out, as_json)


def import_run(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="What export-run wrote.")],
    out: Annotated[Path, typer.Option("--out", help="A new run directory.")],
    as_json: Json = False,
) -> None:
    """Makes a run directory of an exported run."""
    from knockout.ledger.archive import import_run as import_

    _show(import_(folder, out), out, as_json)


def _show(rows: dict[str, int], out: Path, as_json: bool) -> None:
    if as_json:
        print_json(rows)
        return
    print_pairs(rows)
    print(f"Rows of each table in {out}", file=sys.stderr)
