"""Reading and writing sweep files: YAML, `--set`, and errors that name the file, line and key."""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from knockout.config.sweep import Sweep
from knockout.config.urls import without_secrets
from knockout.config.yaml import read_yaml
from knockout.errors import UsageError, shortened, shown

__all__ = ["complaints", "dump_sweep", "load_sweep", "parse_as", "parse_sweep", "sweep_record"]

KeyPath = tuple[str | int, ...]
Model = TypeVar("Model", bound=BaseModel)


def load_sweep(path: Path, sets: Sequence[str] = ()) -> Sweep:
    """Reads a sweep file.

    Args:
        path: The YAML file; relative paths in it are relative to its folder.
        sets: `key.path=value` each, the value in YAML, put over what the file says. Paths in
            them are relative to the file's folder too.

    Raises:
        UsageError: With file, line, key, what was found and what was expected.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UsageError(f"{path}: no such sweep file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: cannot be read: {error}") from None
    return parse_sweep(text, name=str(path), base=path.parent, sets=sets)


def parse_sweep(text: str, name: str, base: Path, sets: Sequence[str] = ()) -> Sweep:
    """Parses the text of a sweep file; see `load_sweep`."""
    return parse_as(Sweep, text, name, base, sets)


def parse_as(
    model: type[Model], text: str, name: str, base: Path, sets: Sequence[str] = ()
) -> Model:
    """Parses the text of a file that a model describes.

    Args:
        model: What the file may say.
        text: YAML.
        name: What to call the file in messages.
        base: Folder that relative paths are relative to.
        sets: As in `load_sweep`.

    Raises:
        UsageError: As in `load_sweep`.
    """
    found_yaml = read_yaml(text, name)
    data, lines = found_yaml.value, _lines(found_yaml.node, name)
    if not isinstance(data, dict):
        found = "nothing" if data is None else f"a {type(data).__name__}"
        raise UsageError(f"{name}: found {found}; expected keys such as `model:`")
    for item in sets:
        _set(data, item)
    try:
        return model.model_validate(data, context={"base": base})
    except ValidationError as error:
        raise UsageError(complaints(error, name, lines, model)) from None


def sweep_record(sweep: Sweep) -> dict[str, Any]:
    """The resolved sweep as JSON has it, without users and passwords of servers."""
    data = sweep.model_dump(mode="json")
    if data["engine"]["urls"]:
        data["engine"]["urls"] = [without_secrets(url) for url in data["engine"]["urls"]]
    return data


def dump_sweep(sweep: Sweep) -> str:
    """Returns the resolved sweep as YAML that reads back to an equal sweep, secrets left out."""
    data = sweep_record(sweep)
    for entry, dumped in zip(sweep.benchmarks, data["benchmarks"], strict=True):
        given = entry.model_dump(mode="json", exclude_unset=True)
        dumped.clear()
        dumped.update(given)
    data["benchmarks"] = [
        entry["name"] if list(entry) == ["name"] else entry for entry in data["benchmarks"]
    ]
    return yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=100)


def _lines(node: yaml.Node | None, name: str, path: KeyPath = ()) -> dict[KeyPath, int]:
    """Line number of each key; a key given twice is an error (YAML would keep the last)."""
    found: dict[KeyPath, int] = {}
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            here = (*path, str(key.value))
            line = key.start_mark.line + 1
            if here in found:
                raise UsageError(
                    f"{name}:{line}: found `{_show(here)}` twice (first in line {found[here]})"
                )
            found[here] = line
            found |= _lines(value, name, here)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            found[(*path, index)] = value.start_mark.line + 1
            found |= _lines(value, name, (*path, index))
    return found


def _set(data: dict[str, Any], item: str) -> None:
    key, equals, value = item.partition("=")
    keys = key.strip().split(".")
    if not equals or not all(keys):
        raise UsageError(
            f"--set {shortened(item)}: expected key.path=value, such as sampling.temperature=1"
        )
    try:
        parsed = read_yaml(value, "the value").value
    except UsageError as error:
        raise UsageError(f"--set {shortened(item)}: {error}") from None
    here: Any = data
    for depth, part in enumerate(keys):
        step: str | int = part
        if isinstance(here, list):
            if not part.isdecimal() or int(part) >= len(here):
                at = ".".join(keys[:depth])
                raise UsageError(
                    f"--set {shortened(item)}: `{at}` is a list of {len(here)}; found `{part}`"
                )
            step = int(part)
        elif not isinstance(here, dict):
            at = ".".join(keys[:depth])
            raise UsageError(
                f"--set {shortened(item)}: `{at}` is {shown(here)} and has no key `{part}`"
            )
        if depth == len(keys) - 1:
            here[step] = parsed
            return
        if isinstance(here, dict) and here.get(part) is None:
            here[part] = {}
        here = here[step]


def _worth_showing(error: ValidationError) -> list[Any]:
    """The errors, without the second view that a union gives of the same value."""
    chosen, seen = [], set()
    items = error.errors(include_url=False)
    places = [tuple(part for part in item["loc"] if not _is_union_tag(part)) for item in items]
    for item, place in zip(items, places, strict=True):
        # A list whose entries are wrong is also called too short.
        inner = any(len(p) > len(place) and p[: len(place)] == place for p in places)
        if place not in seen and not (inner and item["type"] == "too_short"):
            seen.add(place)
            chosen.append(item)
    return chosen


def _is_union_tag(part: str | int) -> bool:
    return isinstance(part, str) and part in {"constrained-int", "constrained-str", "int", "str"}


def _show(path: Sequence[str | int]) -> str:
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return shortened(text)


def complaints(
    error: ValidationError,
    name: str,
    lines: Mapping[KeyPath, int] | None = None,
    model: type[BaseModel] = Sweep,
) -> str:
    """What is wrong with a file of settings, a line each.

    Args:
        error: What pydantic found.
        name: Of the file, or of whatever contains the sweep.
        lines: Line of each key, if there are lines.
        model: What the file may say.
    """
    found = [_complaint(item, name, lines or {}, model) for item in _worth_showing(error)]
    return "\n".join(found)


def _complaint(item: Any, name: str, lines: Mapping[KeyPath, int], model: type[BaseModel]) -> str:
    path: KeyPath = tuple(part for part in item["loc"] if not _is_union_tag(part))
    line = next((lines[path[:n]] for n in range(len(path), 0, -1) if path[:n] in lines), None)
    where = f"{name}:{line}" if line else name
    key = _show(path)
    if item["type"] == "extra_forbidden":
        allowed = _keys_at(path[:-1], model)
        close = difflib.get_close_matches(str(path[-1]), allowed, n=1)
        hint = f"did you mean `{close[0]}`?" if close else f"known keys: {', '.join(allowed)}"
        return f"{where}: unknown key `{key}`; {hint}"
    if item["type"] == "missing":
        return f"{where}: `{key}` is missing"
    at = f"{where}: `{key}`" if key else where
    message = _in_words(str(item["msg"]))
    if message.startswith("found ") or isinstance(item["input"], BaseModel):
        return f"{at}: {message}"
    found = "nothing" if item["input"] is None else shown(item["input"])
    return f"{at}: found {found}; {message[:1].lower()}{message[1:]}"


# What pydantic says, and what it means to someone who writes YAML.
_WORDS = (
    ("Value error, ", ""),
    ("Input should be", "expected"),
    ("a valid tuple", "a list"),
    ("a valid dictionary", "a mapping"),
    ("a valid integer", "a whole number"),
    ("a valid number", "a number"),
    ("a valid string", "a text"),
    ("a valid boolean", "true or false"),
    (", unable to parse string as a number", ""),
    (", unable to parse string as an integer", ""),
    (", unable to interpret input", ""),
    ("Tuple should have at least 1 item after validation, not 0", "expected at least one"),
    ("String should have at least 1 character", "expected a text that is not empty"),
    ("Keys should be strings", "expected keys that are texts"),
)


def _in_words(message: str) -> str:
    for theirs, ours in _WORDS:
        message = message.replace(theirs, ours, 1)
    return shortened(message.split(" or instance of ")[0], 300)


def _keys_at(path: KeyPath, model: type[BaseModel]) -> list[str]:
    """The keys that a file may have at a place."""
    for part in path:
        if isinstance(part, int):
            continue
        field = model.model_fields.get(part)
        inner = _model_in(field.annotation) if field else None
        if inner is None:
            return []
        model = inner
    return list(model.model_fields)


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The model inside Optional, tuple and Annotated."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is not None:
        for argument in typing.get_args(annotation):
            if (found := _model_in(argument)) is not None:
                return found
    return None
