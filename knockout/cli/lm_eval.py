"""`knockout lm-eval`: lm-eval's own command line with our model registered."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import typer

from knockout.config.libraries import quiet_libraries
from knockout.errors import UsageError

__all__ = ["PASS_ON", "export_lm_eval", "lm_eval"]

# For typer: everything after the command's name is lm-eval's.
PASS_ON = {
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    "allow_interspersed_args": False,
}


def lm_eval(context: typer.Context) -> None:
    """Runs lm-eval with the model `knockout` registered; all that follows is lm-eval's own.

    For example: knockout lm-eval run --model knockout --model_args
    pretrained=smollm2-135m,knockout_ids=11+13,engine=vllm --tasks knockout_starter_arithmetic.
    Without an --include_path the tasks of this project are there. `knockout lm-eval run --help`
    shows lm-eval's options.
    """
    quiet_libraries()
    # lm-eval's own vLLM model wants the engine in this process on a CPU too.
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    from knockout.integrations.vllm_name import ensure_vllm_name

    ensure_vllm_name()
    from lm_eval.__main__ import cli_evaluate

    import knockout.integrations.lm_eval_model  # noqa: F401  # registers the model
    from knockout.benchmarks.find import own_tasks

    arguments = list(context.args)
    if arguments and not any(a.startswith("--include") for a in arguments):
        arguments += ["--include_path", str(own_tasks())] if "--help" not in arguments else []
    sys.argv = ["knockout lm-eval", *arguments]
    cli_evaluate()


def export_lm_eval(directory: Path, out: Path | None) -> None:
    """`knockout export --format lm-eval`: all of a run as lm-eval's own result files."""
    if out is None:
        raise UsageError("--format lm-eval writes folders; name one with --out")
    quiet_libraries()
    from knockout.config.file import load_sweep
    from knockout.integrations.lm_eval_files import write_lm_eval
    from knockout.ledger import Ledger

    with Ledger.open(directory / "run.db") as ledger:
        n = write_lm_eval(directory, load_sweep(directory / "config.yaml"), ledger, out)
    print(f"{n} folders in {out}", file=sys.stderr)
