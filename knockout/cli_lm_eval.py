"""`knockout lm-eval`: lm-eval's own command line with our model registered."""

from __future__ import annotations

import os
import sys

import typer

from knockout.cli_common import quiet_libraries

__all__ = ["PASS_ON", "lm_eval"]

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
