"""What comes in several kinds, by name: our own kinds, and those of installed packages."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Generic, TypeVar

from knockout.errors import UsageError

__all__ = ["Registry"]

T = TypeVar("T")


class Registry(Generic[T]):
    """Kinds by name.

    A package of your own adds a kind by naming the module that registers it in the entry-point
    group; the modules are imported when a name is asked for that is not known yet, or all names.

    Args:
        what: What a kind is called in messages.
        group: The entry-point group.
    """

    def __init__(self, what: str, group: str) -> None:
        self.what, self.group = what, group
        self._kinds: dict[str, T] = {}
        self._origins: dict[str, object] = {}
        self._complete = False

    def add(self, name: str, kind: T, origin: object) -> None:
        """Registers a kind.

        Args:
            name: Its name.
            kind: What the name stands for.
            origin: The function or class that defines it; its own module may be read twice.

        Raises:
            UsageError: The name is taken by something else.
        """
        origin = f"{getattr(origin, '__module__', '')}.{getattr(origin, '__qualname__', '')}"
        before = self._origins.setdefault(name, origin)
        if before != origin:
            raise UsageError(f"the {self.what} {name!r} exists already, from {before}")
        self._kinds[name] = kind

    def names(self) -> tuple[str, ...]:
        """All names, in the order in which they were registered."""
        if not self._complete:
            self._complete = True
            for entry in entry_points(group=self.group):
                entry.load()
        return tuple(self._kinds)

    def find(self, name: str) -> T:
        """The kind of this name.

        Raises:
            UsageError: There is none.
        """
        if name not in self._kinds and name not in self.names():
            raise UsageError(
                f"found {self.what} {name!r}; expected one of {', '.join(self._kinds)}"
            )
        return self._kinds[name]
