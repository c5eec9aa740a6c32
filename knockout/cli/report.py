"""What `knockout report` and `knockout view` do; the command line registers them."""

from __future__ import annotations

import ipaddress
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from knockout.config.libraries import quiet_libraries
from knockout.errors import UsageError

if TYPE_CHECKING:
    from knockout.engines.base import Engine

__all__ = ["report", "view"]

RunDirectory = Annotated[Path, typer.Argument(metavar="DIR", help="A run directory.")]


def report(
    directory: RunDirectory,
    out: Annotated[
        Path | None, typer.Option("--out", help="The file; DIR/report.html if not given.")
    ] = None,
    figures: Annotated[
        Path | None,
        typer.Option(
            "--figures", help="Write figures for papers (PDF, SVG, CSV) into this folder."
        ),
    ] = None,
    trajectories_mb: Annotated[
        float,
        typer.Option("--trajectories-mb", min=0, help="Room for trajectories in the file, in MB."),
    ] = 2.4,
    compare: Annotated[
        Path | None,
        typer.Option("--compare", metavar="DIR", help="Another run, set beside this one."),
    ] = None,
    picks: Annotated[
        bool,
        typer.Option(
            "--picks",
            help="First measure how likely the picks at the forks were, with the run's model (a "
            "forward pass over each baseline in the file); kept in DIR/picks.json.",
        ),
    ] = False,
    model: Annotated[
        str | None,
        typer.Option("--model", help="Where that model is, if not where the run had it."),
    ] = None,
) -> None:
    """Writes the report of a run: one HTML file that needs no network."""
    if figures is not None:
        from knockout.report.plots import write_figures

        for path in write_figures(directory, figures):
            print(path)
        if out is None:
            return
    from knockout.report.build import build_report

    if model is not None and not picks:
        raise UsageError("--model is for --picks; the report itself needs no model")
    if picks:
        quiet_libraries()
    made = build_report(
        directory,
        out,
        budget=round(1e6 * trajectories_mb),
        compare=compare,
        picks=picks,
        model=model,
    )
    print(made["path"])
    print(
        f"{made['bytes'] / 1e6:.1f} MB in {made['seconds']:.1f} s; it contains {made['pairs']} of "
        f"{made['forks']} pairs of trajectories (`knockout view {directory}` shows all)",
        file=sys.stderr,
    )


def view(
    directory: RunDirectory,
    model: Annotated[
        str | None,
        typer.Option("--model", help="Model for the fork explorer; read-only if not given."),
    ] = None,
    engine: Annotated[
        str, typer.Option("--engine", help="transformers or vllm, for the fork explorer.")
    ] = "transformers",
    host: Annotated[
        str,
        typer.Option(
            "--host", help="Address to listen on; others than loopback are open to the network."
        ),
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option("--port", min=0, max=65535, help="0 for any free one.")
    ] = 8000,
) -> None:
    """Serves the report's pages from the ledger, live while the run goes on."""
    from knockout.view.server import serve

    if engine not in ("transformers", "vllm"):
        raise UsageError(f"--engine: found {engine!r}; expected transformers or vllm")
    if not _is_loopback(host):
        print(
            f"warning: {host} can be reached by others; they can read the run"
            + (" and use the engine" if model else ""),
            file=sys.stderr,
        )
    if model is not None:
        _check_model(directory, model)
    start = None if model is None else _starter(directory, model, engine)
    serve(directory, host, port, start, lambda text: print(text, file=sys.stderr, flush=True))


def _check_model(directory: Path, model: str) -> None:
    """Refuses another model than the run's: its ids and its noise would mean something else."""
    import json

    from knockout.ledger import Ledger
    from knockout.sweep.identity import model_fingerprint
    from knockout.tokens.checkpoint import resolve_model

    with Ledger.open(directory / "run.db") as ledger:
        known = json.loads(ledger.meta().get("identity", "{}")).get("model_fingerprint")
    found = model_fingerprint(Path(resolve_model(model)))
    if known is not None and found != known:
        raise UsageError(
            f"--model {model}: its weights are not those of the run (fingerprint {found[:12]}, the run has "
            f"{known[:12]}); give the model that the run had"
        )


def _starter(directory: Path, model: str, kind: str) -> Callable[[], Engine]:
    """What starts the explorer's engine, with the run's number format and context length."""

    def start() -> Engine:
        from knockout.config.file import load_sweep
        from knockout.engines.open import open_engine

        asked = load_sweep(directory / "config.yaml").engine
        return open_engine(
            model, kind=kind, dtype=asked.dtype, max_model_len=asked.max_model_len, max_num_seqs=1
        )

    return start


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
