"""YAML from people: one reader that always answers, and says where the text is wrong."""

from __future__ import annotations

from typing import Any

import yaml

from knockout.errors import UsageError, shortened

__all__ = ["Yaml", "read_yaml"]

_DEEPEST = 64  # mappings and lists inside one another
_MOST_NODES = 200_000  # after aliases are followed, so that a short file cannot become a huge one


class _Loader(yaml.SafeLoader):
    """YAML's plain values; a date stays the text that it is."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (
            ValueError,
            TypeError,
            KeyError,
            IndexError,
            AttributeError,
            OverflowError,
        ) as error:
            value = shortened(str(node.value), 40)
            raise yaml.constructor.ConstructorError(
                None,
                None,
                f"{value} is no {str(node.tag).rpartition(':')[2]}: {shortened(str(error), 80)}",
                node.start_mark,
            ) from None


_Loader.yaml_implicit_resolvers = {
    first: [pair for pair in pairs if pair[0] != "tag:yaml.org,2002:timestamp"]
    for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


class Yaml:
    """A text in YAML that was read.

    Attributes:
        value: What it holds.
        node: Its tree, with the line of each key.
    """

    def __init__(self, value: Any, node: yaml.Node | None) -> None:
        self.value = value
        self.node = node


def read_yaml(text: str, name: str) -> Yaml:
    """Reads YAML.

    Args:
        text: The text.
        name: What to call it in messages.

    Raises:
        UsageError: With line and column: it is not valid, nested too deep, or its aliases lead
            back to themselves or stand for too much.
    """
    try:
        _check(text)
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
            value = None if node is None else loader.construct_document(node)
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{name}:{mark.line + 1}:{mark.column + 1}" if mark else name
        problem = shortened(str(error.problem or error.context))
        raise UsageError(f"{where}: not valid YAML: {problem}") from None
    except yaml.YAMLError as error:
        problem = shortened(" ".join(str(error).split()))
        raise UsageError(f"{name}: not valid YAML: {problem}") from None
    return Yaml(value, node)


def _check(text: str) -> None:
    """Refuses what would take long to build, before anything is built.

    Raises:
        yaml.MarkedYAMLError: With the place.
    """
    total = 0
    sizes: dict[str, int] = {}  # nodes that a finished anchor stands for
    opened: list[tuple[str | None, int]] = []  # anchor, nodes before it
    for event in yaml.parse(text, Loader=_Loader):
        if isinstance(event, yaml.AliasEvent):
            name = str(event.anchor)
            if any(anchor == name for anchor, _ in opened):
                raise _refusal(f"the alias *{name} stands inside what it names", event)
            total += sizes.get(name, 0)
        elif isinstance(event, yaml.NodeEvent):
            if isinstance(event, yaml.CollectionStartEvent):
                opened.append((event.anchor, total))
            elif event.anchor is not None:
                sizes[str(event.anchor)] = 1
            total += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = opened.pop()
            if anchor is not None:
                sizes[anchor] = total - before
        if len(opened) > _DEEPEST:
            raise _refusal(f"nested deeper than {_DEEPEST} levels", event)
        if total > _MOST_NODES:
            raise _refusal(f"more than {_MOST_NODES:,} values, counting what aliases name", event)


def _refusal(problem: str, event: Any) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)
