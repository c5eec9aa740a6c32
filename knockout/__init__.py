"""Which tokens carry a language model's reasoning? Sweeps of inference-time knockouts.

    from knockout import Sweep, load_run

Importing this package imports nothing heavy: the names below are looked up when they are used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from knockout._version import __version__

if TYPE_CHECKING:
    from knockout.api import Run, Sweep, load_run

__all__ = ["Run", "Sweep", "__version__", "load_run"]


def __getattr__(name: str) -> Any:
    if name in ("Run", "Sweep", "load_run"):
        from knockout import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
