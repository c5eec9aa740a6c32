"""`python -m bench NAME [ARGUMENTS]`: one measurement; without a name, those of `make bench`."""

from __future__ import annotations

import importlib
import sys

STANDARD = ("processor", "forks", "lm_eval_runs")


def main() -> None:
    """Runs the named measurement, or the standard ones in turn."""
    names = sys.argv[1:2] or STANDARD
    for name in names:
        importlib.import_module(f"bench.{name}").main(*sys.argv[2:])


if __name__ == "__main__":
    main()
