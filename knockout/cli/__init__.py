"""The `knockout` command. Nothing heavy is imported before a command needs it."""

from __future__ import annotations

import errno
import logging
import os
import sys
from typing import Annotated

import typer

from knockout._version import __version__
from knockout.cli import (
    archive,
    confirm,
    lm_eval,
    mine,
    plan,
    report,
    run,
    tools,
    training,
)
from knockout.errors import KnockoutError

__all__ = ["app", "main"]

app = typer.Typer(
    name="knockout",
    help="Finds out which tokens carry a language model's reasoning, by banning them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for command in (
    run.run,
    run.demo,
    run.status,
    run.verdicts,
    report.report,
    report.view,
    run.export,
    archive.export_run,
    archive.import_run,
    plan.plan,
    confirm.confirm,
    tools.grade,
    tools.candidates,
    mine.mine,
    mine.orthogonality,
    training.geometry,
    tools.doctor,
):
    app.command()(command)
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
    _log_to_stderr()
    try:
        # typer turns Ctrl-C into a status that it returns.
        if status := app(standalone_mode=False):
            sys.exit(status)
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


def _tell(error: BaseException) -> int:
    """Prints an error in one message; returns the exit status."""
    if isinstance(error, KeyboardInterrupt):
        print(
            "knockout: stopped; what a run had finished is in its ledger, and the same command "
            "goes on from there",
            file=sys.stderr,
        )
        return 130
    if isinstance(error, BrokenPipeError):
        # The reader went away (`| head`): nothing to say, and nowhere to say it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        print("knockout: the disk is full; what was committed is safe", file=sys.stderr)
        return 1
    print(f"knockout: {error}", file=sys.stderr)
    return error.exit_code if isinstance(error, KnockoutError) else 1


def _is_click_error(error: Exception) -> bool:
    return any(kind.__name__ == "ClickException" for kind in type(error).__mro__)
