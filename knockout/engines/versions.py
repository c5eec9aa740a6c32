"""Versions of installed distributions, for the record."""

from __future__ import annotations

import contextlib
import importlib.metadata

from knockout._version import __version__

__all__ = ["installed_versions"]


def installed_versions(*names: str) -> dict[str, str]:
    """Our own version and those of the named distributions, as far as they are installed."""
    found = {"knockout-harness": __version__}  # an editable install's metadata may be older
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found
