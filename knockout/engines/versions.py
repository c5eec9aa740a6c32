"""Versions of installed distributions, for the record."""

from __future__ import annotations

import contextlib
import importlib.metadata

__all__ = ["installed_versions"]


def installed_versions(*names: str) -> dict[str, str]:
    """Versions of our own distribution and of the named ones, as far as installed."""
    found = {}
    for name in ("knockout-harness", *names):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found
