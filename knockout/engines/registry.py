"""Kinds of engines by name. A new engine is one file; `docs/extending.md` has an example."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from knockout.registry import Registry

if TYPE_CHECKING:
    from knockout.engines.base import Engine

__all__ = ["Opener", "engine_kind", "engine_kinds", "find_engine"]

Opener = Callable[[str, dict[str, Any]], "Engine"]
"""Starts an engine: the model's folder or name, and the settings that were given.

The settings are those of the sweep's `engine` section that differ from their defaults, with
`options`, `seed`, `trust_remote_code` and `cache_dir`. An opener refuses what it cannot do with a
`UsageError`.
"""

_KINDS: Registry[Opener] = Registry("engine.kind", "knockout.engines")


def engine_kind(name: str) -> Callable[[Opener], Opener]:
    """Registers an opener under the name that `engine.kind` asks for."""

    def register(opener: Opener) -> Opener:
        _KINDS.add(name, opener, opener)
        return opener

    return register


def engine_kinds() -> tuple[str, ...]:
    """The kinds that are known, those of installed packages among them."""
    return _KINDS.names()


def find_engine(name: str) -> Opener:
    """The opener of this kind.

    Raises:
        UsageError: There is none.
    """
    return _KINDS.find(name)
