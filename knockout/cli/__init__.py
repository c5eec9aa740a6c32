"""The `knockout` command. Nothing heavy is imported before a command needs it."""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import os
import signal
import sys
from collections.abc import Callable
from typing import Annotated

import typer

from knockout._version import __version__
from knockout.cli import (
    archive,
    begin,
    confirm,
    lm_eval,
    mine,
    plan,
    report,
    run,
    runs,
    tools,
    training,
)
from knockout.cli.common import to_nowhere
from knockout.errors import KnockoutError

__all__ = ["app", "main"]

app = typer.Typer(
    name="knockout",
    help="Finds out which tokens carry a language model's reasoning, by banning them.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
_HELP = {"help_option_names": ["-h", "--help"]}
_COMMANDS: tuple[tuple[str, Callable[..., None], str], ...] = (
    ("init", begin.init, "knockout init sweep.yaml --model smollm2-135m --token ' the'"),
    ("run", run.run, "knockout run sweep.yaml seeds=5 --out runs/first"),
    ("demo", run.demo, "knockout demo --limit 8"),
    ("list", begin.runs, "knockout list runs"),
    ("status", run.status, "knockout status runs/first --check"),
    ("verdicts", run.verdicts, "knockout verdicts runs/first --rule nominal"),
    ("cite", run.cite, "knockout cite runs/first"),
    ("report", report.report, "knockout report runs/first"),
    ("view", report.view, "knockout view runs/first --model smollm2-135m"),
    ("export", run.export, "knockout export runs/first --verdict strong_pillar --format json"),
    ("export-run", archive.export_run, "knockout export-run runs/first --out first"),
    ("import-run", archive.import_run, "knockout import-run first --out runs/again"),
    ("plan", plan.plan, "knockout plan sweep.yaml seeds=8 --limit 100"),
    ("confirm", confirm.confirm, "knockout confirm runs/first --verdict strong_pillar"),
    ("merge", runs.merge, "knockout merge runs/part-1 runs/part-2 --out runs/whole"),
    ("compare", runs.compare, "knockout compare runs/step-100 runs/step-400"),
    ("regrade", runs.regrade, "knockout regrade runs/first --dry-run"),
    ("grade", tools.grade, "knockout grade knockout_math500 answers.jsonl"),
    ("candidates", tools.candidates, "knockout candidates rocks.csv --model smollm2-135m"),
    ("tasks", begin.tasks, "knockout tasks math"),
    ("schema", begin.schema, "knockout schema > sweep.schema.json"),
    ("mine", mine.mine, "knockout mine mine.yaml list.top=50"),
    (
        "orthogonality",
        mine.orthogonality,
        "knockout orthogonality runs/first --scores runs/mine/token_scores.csv",
    ),
    ("geometry", training.geometry, "knockout geometry runs/mine"),
    ("doctor", tools.doctor, "knockout doctor --fetch"),
)
for name, command, example in _COMMANDS:
    app.command(name, context_settings=_HELP, epilog=f"Example: {example}")(command)
app.command("lm-eval", context_settings=lm_eval.PASS_ON)(lm_eval.lm_eval)


class _State:
    """What the options before the command's name set."""

    debug = False


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


def _log_to_stderr() -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    log = logging.getLogger("knockout")
    log.handlers = [handler]
    log.setLevel(logging.INFO)
    log.propagate = False


def main() -> None:
    """Runs the command line; exits 2 for misuse, 1 for failure, 130 after Ctrl-C."""
    # Idle OpenMP threads sleep instead of spinning. Read when torch loads, so it is set first: on
    # few or shared cores spinning costs several times.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    _have_streams()
    _write_what_the_terminal_can()
    _end_like_ctrl_c()
    _log_to_stderr()
    try:
        # typer turns Ctrl-C into a status that it returns.
        status = app(standalone_mode=False)
        if status == 130:
            raise KeyboardInterrupt
        if status:
            sys.exit(status)
        sys.stdout.flush()
    except (KnockoutError, OSError, KeyboardInterrupt) as error:
        if _State.debug:
            raise
        sys.exit(_tell(error))
    except typer.Abort:
        sys.exit(_tell(KeyboardInterrupt()))
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


def _have_streams() -> None:
    """Output that was closed (`>&-`) goes nowhere, and its number to no file of ours."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115


def _write_what_the_terminal_can() -> None:
    """On a terminal or pipe that is not UTF-8 other characters are escaped, not fatal."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _end_like_ctrl_c() -> None:
    """SIGTERM and SIGHUP end a command as Ctrl-C does, also before a run listens to them."""

    def stop(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:  # nohup ignores a hang-up: leave it
            signal.signal(number, stop)


def _tell(error: BaseException) -> int:
    """Prints an error in one message; returns the exit status."""
    if isinstance(error, KeyboardInterrupt):
        with contextlib.suppress(OSError):  # the terminal may be gone
            print(
                "knockout: stopped; what a run had finished is in its ledger, and the same command "
                "goes on from there",
                file=sys.stderr,
            )
        return 130
    if isinstance(error, BrokenPipeError):
        # The reader went away (`| head`): nothing to say, and nowhere to say it.
        to_nowhere(sys.stdout)
        return 1
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        print("knockout: the disk is full; what was committed is safe", file=sys.stderr)
        return 1
    with contextlib.suppress(OSError):
        print(f"knockout: {error}", file=sys.stderr)
    return error.exit_code if isinstance(error, KnockoutError) else 1


def _is_click_error(error: Exception) -> bool:
    return any(kind.__name__ == "ClickException" for kind in type(error).__mro__)
