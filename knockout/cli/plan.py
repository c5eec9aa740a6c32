"""`knockout plan`: cost and power before anything is generated."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from knockout.cli.common import Limit, Overrides, Sets, all_sets
from knockout.errors import UsageError, counted

if TYPE_CHECKING:
    from knockout.sweep.plan import Forecast

__all__ = ["plan"]


def plan(
    sweep: Annotated[Path, typer.Argument(metavar="SWEEP.yaml", help="The sweep file.")],
    overrides: Overrides = None,
    baseline: Annotated[
        Path | None,
        typer.Option(
            "--baseline", help="Run directory whose baselines say how often tokens occur."
        ),
    ] = None,
    frequencies: Annotated[
        Path | None,
        typer.Option("--frequencies", help="CSV or Parquet with how often each token occurs."),
    ] = None,
    ids_column: Annotated[
        str, typer.Option("--ids-column", help="Its column of token ids.")
    ] = "rock_id",
    frequency_column: Annotated[
        str, typer.Option("--frequency-column", help="Its column of counts.")
    ] = "rock_freq",
    per: Annotated[
        float, typer.Option("--per", help="Trajectories over which they were counted.")
    ] = 500.0,
    tokens_per_s: Annotated[
        float | None,
        typer.Option(
            "--tokens-per-s", help="Speed of the engine; 1000 with a GPU here, 100 without one."
        ),
    ] = None,
    mean_tokens: Annotated[
        float | None,
        typer.Option("--mean-tokens", help="Expected trajectory length; half of max_tokens else."),
    ] = None,
    pass1: Annotated[
        float, typer.Option("--pass1", min=0, max=1, help="Expected Pass@1 of the baseline.")
    ] = 0.5,
    correlation: Annotated[
        float,
        typer.Option(
            "--correlation",
            min=0,
            max=1,
            help="Agreement of a problem's differences between seeds; an earlier run's own if known.",
        ),
    ] = 0.2,
    sets: Sets = None,
    limit: Limit = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Predicts cells, forks, tokens, hours, and the smallest effect that can be seen."""
    from knockout.config.file import load_sweep
    from knockout.sweep.earlier import read_baselines
    from knockout.sweep.plan import Assumptions, forecast, rates_from_file
    from knockout.sweep.prepare import prepare

    if (
        (tokens_per_s is not None and tokens_per_s <= 0)
        or per <= 0
        or (mean_tokens is not None and mean_tokens <= 0)
    ):
        raise UsageError("--tokens-per-s, --per and --mean-tokens must be above 0")
    prepared = prepare(load_sweep(sweep, all_sets(sets, overrides, limit)))
    candidates = prepared.plan.candidates
    bans = [c.token_ids for c in candidates if c.group != "canary"]
    rates = None
    if frequencies is not None:
        rates = rates_from_file(frequencies, frequency_column, ids_column, per, bans)
    speed = tokens_per_s or (1000.0 if shutil.which("nvidia-smi") else 100.0)
    assumed = Assumptions(mean_tokens, pass1, speed, correlation, rates)
    known = read_baselines(baseline, candidates) if baseline is not None else None
    found = forecast(prepared, assumed, known)
    if as_json:
        print(json.dumps(found.to_json(), indent=2))
    else:
        _show(found)


def _show(found: Forecast) -> None:
    from rich.console import Console
    from rich.table import Table

    from knockout.sweep.plan import SEEDS

    console = Console() if sys.stdout.isatty() else Console(width=120)
    cost = Table(title=f"Cost of {counted(found.n_candidates, 'candidate')}", title_justify="left")
    cost.add_column("benchmark")
    for name in ("problems", "seeds", "cells", "length", "forks", "tokens", "naively", "from"):
        cost.add_column(name, justify="right", no_wrap=True)
    for b in found.benchmarks:
        cost.add_row(
            b.name, str(b.n_problems), str(b.n_seeds), f"{b.n_cells:,}", f"{b.mean_tokens:,.0f}",
            f"{b.forks:,.0f}", f"{b.tokens:,.0f}", f"{b.tokens_naive:,.0f}", b.source,
        )  # fmt: skip
    console.print(cost)
    audit = f" and {found.tokens_audit:,.0f} of audits" if found.tokens_audit >= 1 else ""
    print(
        f"{found.tokens:,.0f} tokens to generate{audit}, {_duration(found.hours)} at "
        f"{found.tokens_per_s:g} tokens/s; {found.tokens_naive:,.0f} with full re-runs"
    )
    if any(b.source == "bound" for b in found.benchmarks):
        print(
            "How often the candidates occur is not known, so every knockout is taken to be "
            "generated whole: give --frequencies, or --baseline with an earlier run."
        )
    power = Table(
        title="Smallest loss seen with 80 % power, nominal / corrected (none: no possible loss is)",
        title_justify="left",
    )
    power.add_column("seeds", justify="right")
    for b in found.benchmarks:
        power.add_column(b.name, justify="right", no_wrap=True)
    for i, seeds in enumerate(SEEDS):
        power.add_row(
            str(seeds),
            *(f"{_effect(b.mde_nominal[i])} / {_effect(b.mde_fdr[i])}" for b in found.benchmarks),
        )
    console.print(power)
    _show_equivalence(found)
    assumptions: dict[str, list[str]] = {}
    for b in found.benchmarks:
        text = (
            f"{b.share:.1%} of cells differ without an effect, and repeats of a problem agree by "
            f"{b.correlation:.2f}"
        )
        assumptions.setdefault(text, []).append(b.name)
    for text, names in assumptions.items():
        print(f"Assumed ({'all' if len(assumptions) == 1 else ', '.join(names)}): {text}")
    for warning in found.warnings:
        print(f"warning: {warning}")


def _show_equivalence(found: Forecast) -> None:
    """Whether neutral tokens can be told from untested ones, and at which margin."""
    for b in found.benchmarks:
        can = (
            f"can be shown within ±{found.margin:g}"
            if b.margin_usual <= found.margin
            else f"will often stay undetermined at ±{found.margin:g}"
            if b.margin_best <= found.margin
            else f"cannot be shown within ±{found.margin:g}, whatever is generated"
        )
        print(
            f"{b.name}: a token that does nothing {can}; it usually can within "
            f"±{b.margin_usual:.2g}, and one that changes no answer within ±{b.margin_best:.2g}"
        )
    if len(found.benchmarks) > 1:
        verb = "can" if found.pooled_margin <= found.margin else "often cannot"
        print(
            f"all problems pooled, as freeze lists go by: {verb} be shown within "
            f"±{found.margin:g}; usually within ±{found.pooled_margin:.3f}"
        )


def _duration(hours: float) -> str:
    if hours >= 1:
        return f"{hours:,.1f} hours"
    return f"{hours * 60:.0f} minutes" if hours * 60 >= 1 else f"{hours * 3600:.0f} seconds"


def _effect(value: float) -> str:
    return "none" if value != value else f"{value:.3f}"
