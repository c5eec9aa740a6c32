"""Confirmations from beginning to end: derived, run, compared, written."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from knockout.ledger import Ledger
from knockout.sweep.confirm import derive, write_comparison
from knockout.sweep.results import verdict_table
from knockout.sweep.run import run_sweep
from knockout.sweep.split import split_run

__all__ = ["confirm_on_fresh_seeds", "confirm_on_other_half"]


def confirm_on_fresh_seeds(
    directory: Path,
    out: Path,
    *,
    candidates: Collection[str] = (),
    verdicts: Collection[str] = (),
    joint: Sequence[str] | None = None,
    seeds: int | None = None,
    run_seed: int | None = None,
    retry_failed: bool = True,
    again: str = "",
) -> dict[str, Any]:
    """Runs a run's choice again on fresh seeds; arguments as in `confirm.derive` and `run_sweep`.

    Args:
        directory: The run that is confirmed.
        out: The new run's directory.

    Returns:
        The content of `confirm.json`.
    """
    plan = derive(
        directory,
        candidates=candidates,
        verdicts=verdicts,
        joint=joint,
        seeds=seeds,
        run_seed=run_seed,
    )
    run_sweep(plan.sweep, out, retry_failed=retry_failed, again=again)
    with Ledger.open(out / "run.db") as ledger:
        return write_comparison(plan, verdict_table(ledger, plan.sweep.verdict), out)


def confirm_on_other_half(
    directory: Path,
    out: Path,
    *,
    candidates: Collection[str] = (),
    verdicts: Collection[str] = (),
) -> dict[str, Any]:
    """Chooses on one half of the problems and estimates on the other; generates nothing.

    Args:
        directory: The run that is confirmed.
        out: Folder of the results; created if it is missing.

    Returns:
        The content of `confirm.json`.
    """
    chosen, fresh = split_run(directory, candidates=candidates, verdicts=verdicts)
    out.mkdir(parents=True, exist_ok=True)
    return write_comparison(chosen, fresh, out)
