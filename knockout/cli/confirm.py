"""`knockout confirm`: chosen candidates again on fresh seeds, and lists banned at once."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from knockout.cli.common import (
    Json,
    RunDirectory,
    one_of,
    print_json,
    print_table,
)
from knockout.config.libraries import quiet_libraries
from knockout.errors import UsageError

__all__ = ["confirm"]


def confirm(
    directory: RunDirectory,
    out: Annotated[
        Path | None, typer.Option("--out", help="Run directory; DIR/confirm if not given.")
    ] = None,
    candidates: Annotated[
        list[str] | None,
        typer.Option("--candidates", metavar="NAME", help="Test this one; may be repeated."),
    ] = None,
    verdict: Annotated[
        list[str] | None,
        typer.Option(
            "--verdict",
            help="Test those called so by either rule; may be repeated. Without --candidates and "
            "--verdict: pillars and stumbling blocks.",
        ),
    ] = None,
    joint: Annotated[
        list[str] | None,
        typer.Option(
            "--joint",
            metavar="NAME=LIST",
            help="Ban a list at once: all, verdict:V, evidence:E, or a file; may be repeated. "
            "Without it: all neutrals, and all candidates.",
        ),
    ] = None,
    no_joint: Annotated[bool, typer.Option("--no-joint", help="Ban no list at once.")] = False,
    split: Annotated[
        bool,
        typer.Option(
            "--split",
            help="Generate nothing: choose on one half of the problems, estimate on the other.",
        ),
    ] = False,
    seeds: Annotated[
        int | None, typer.Option("--seeds", min=1, help="Repeats; the first run's if not given.")
    ] = None,
    run_seed: Annotated[
        int | None, typer.Option("--run-seed", min=0, help="Draws the fresh seeds.")
    ] = None,
    retry_failed: Annotated[
        bool,
        typer.Option(
            "--retry-failed/--keep-failed", help="Whether to try again what the engine failed on."
        ),
    ] = True,
    as_json: Json = False,
) -> None:
    """Tests a run's choice again: on fresh seeds with whole lists as one knockout, or by a split."""
    for wanted in verdict or []:
        one_of("--verdict", wanted, ("strong_pillar", "strong_stumbling_block", "neutral"))
    quiet_libraries()
    from knockout.sweep.confirmed import confirm_on_fresh_seeds, confirm_on_other_half

    if split:
        if joint or no_joint or seeds or run_seed is not None or not retry_failed:
            raise UsageError(
                "--split generates nothing; of the options it takes --candidates, --verdict and --out"
            )
        folder = out or directory / "split"
        found = confirm_on_other_half(
            directory, folder, candidates=candidates or (), verdicts=verdict or ()
        )
        _report(found, folder, as_json)
        return
    folder = out or directory / "confirm"
    found = confirm_on_fresh_seeds(
        directory,
        folder,
        candidates=candidates or (),
        verdicts=verdict or (),
        joint=() if no_joint else joint,
        seeds=seeds,
        run_seed=run_seed,
        retry_failed=retry_failed,
        again=" ".join(["knockout", *(shlex.quote(part) for part in sys.argv[1:])]),
    )
    _report(found, folder, as_json)


def _report(found: dict[str, Any], folder: Path, as_json: bool) -> None:
    if as_json:
        print_json(found)
    else:
        _show(found)
    for note in found["notes"]:
        print(f"note: {note}", file=sys.stderr)
    print(f"Results are in {folder}", file=sys.stderr)


def _show(found: dict[str, Any]) -> None:
    header = ["benchmark", "candidate", "first Δ", "fresh Δ", "interval", "p adj.", "was", "is"]
    rows = []
    for row in found["rows"]:
        first = row["first_delta"]
        if row["kind"] == "joint" and row["sum_of_singles"] is not None:
            shown = f"Σ {row['sum_of_singles']:+.3f}"
        else:
            shown = _number(first, "+.3f")
        was = {row["first_verdict_nominal"], row["first_verdict_fdr"]} - {None, "neutral"}
        rows.append(
            [
                row["benchmark"],
                row["candidate"],
                shown,
                _number(row["fresh_delta"], "+.3f"),
                f"[{_number(row['fresh_ci_low'], '+.3f')}, {_number(row['fresh_ci_high'], '+.3f')}]",
                _number(row["fresh_p_adjusted"], ".3g"),
                " ".join(sorted(was)) or ("joint" if row["kind"] == "joint" else "neutral"),
                row["fresh_verdict"],
            ]
        )
    print_table(header, rows)
    if found["n_called"]:
        print(
            f"{found['n_confirmed']} of {found['n_called']} calls confirmed; effects are "
            f"{_number(found['shrinkage'], '.2f')} times what they first seemed"
        )


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)
