"""The tasks that a group of lm-eval stands for, those that it defines in its own file among them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lm_eval.config.group import GroupConfig
from lm_eval.tasks._index import Entry, Kind
from lm_eval.tasks._yaml_loader import load_yaml

from knockout.errors import UsageError, shortened

__all__ = ["Leaf", "known_leaf", "leaves_of"]

_DEFINING = {"dataset_path", "custom_dataset", "include", "doc_to_text"}


@dataclass(frozen=True)
class Leaf:
    """A task that a name stands for.

    Attributes:
        name: As it is written.
        overrides: What the groups around it change.
        inside: The groups' names, joined as lm-eval joins them; "" outside a group.
        folder: Of the group's file, which an `include` is relative to.
    """

    name: str
    overrides: dict[str, Any]
    inside: str = ""
    folder: Path | None = None


def leaves_of(
    name: str, index: Mapping[str, Any], overrides: dict[str, Any], around: tuple[str, ...] = ()
) -> Iterator[Leaf]:
    """The tasks of a name, by the rules of lm-eval's `_factory`; unknown names are among them."""
    entry = index.get(name)
    if entry is not None and entry.kind is Kind.TAG:
        for member in sorted(entry.tags):
            yield from leaves_of(member, index, overrides, around)
    elif entry is not None and entry.kind is Kind.GROUP:
        if name in around:
            raise UsageError(f"{around[0]}: the group {name!r} contains itself")
        config = dict(entry.cfg or {})
        if entry.yaml_path:
            config = _read(name, entry.yaml_path)
        yield from _members(name, config, index, overrides, entry.yaml_path, (*around, name))
    else:
        yield Leaf(name, overrides)


def _members(
    group: str,
    config: Mapping[str, Any],
    index: Mapping[str, Any],
    overrides: dict[str, Any],
    path: Path | None,
    around: tuple[str, ...],
) -> Iterator[Leaf]:
    """The tasks of a group; what it says beyond a group's own fields holds for its tasks."""
    fields = {field.name for field in dataclasses.fields(GroupConfig)}
    overrides = {**{k: v for k, v in config.items() if k not in fields}, **overrides}
    members = config.get("task")
    for member in members if isinstance(members, list) else []:
        if isinstance(member, str):
            if member in index:
                yield from leaves_of(member, index, overrides, around)
            else:
                yield Leaf(member, overrides)
            continue
        name = member.get("group", member.get("task")) if isinstance(member, dict) else None
        if not isinstance(name, str):
            shown = list(member) if isinstance(member, dict) else member
            raise UsageError(f'{group}: expected "task" or "group" with a name, found {shown!r}')
        if "group" in member and name not in index:
            yield from _members(f"{group}::{name}", member, index, overrides, path, around)
            continue
        structure = fields if "group" in member else {"task"}
        own = {**overrides, **{k: v for k, v in member.items() if k not in structure}}
        if name in index:
            yield from leaves_of(name, index, own, around)
        else:
            yield Leaf(name, own, group, path.parent if path else None)


def known_leaf(leaf: Leaf, index: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """A task that a group defines in its own file becomes known under `group::task`."""
    written = leaf.overrides
    if leaf.name in index or not leaf.inside or not _DEFINING & written.keys():
        return leaf.name, written
    name, config = f"{leaf.inside}::{leaf.name}", dict(written)
    included = config.pop("include", [])
    for part in reversed(included if isinstance(included, list) else [included]):
        config = {**_read(name, (leaf.folder or Path()) / part), **config}
    index[name] = Entry(name, Kind.TASK, None, {**config, "task": name})
    return name, {}


def _read(name: str, path: Path) -> dict[str, Any]:
    try:
        return dict(load_yaml(path, resolve_func=True))
    except Exception as error:  # a task file may run any code
        raise UsageError(
            f"{name}: {path} cannot be read: {type(error).__name__}: {shortened(str(error))}"
        ) from error
