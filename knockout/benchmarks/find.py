"""Finding tasks: ours, the user's, and lm-eval's own."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import knockout
from knockout.errors import UsageError

__all__ = ["Leaf", "describe_tasks", "find_leaves", "own_kind", "own_tasks"]

Leaf = tuple[str, dict[str, Any]]
"""A task's name and what a group overrides in it."""


def own_tasks() -> Path:
    """The folder of this project's task files, for `lm_eval --include_path`."""
    return (Path(knockout.__file__).parent / "tasks").resolve()


def own_kind(name: str) -> str:
    """How one of our tasks is graded ("maths", "integer", "ifeval"), or "" for all others."""
    from lm_eval.tasks._yaml_loader import load_yaml

    path = own_tasks() / f"{name}.yaml"
    if Path(name).name != name or not path.is_file():
        return ""
    metadata = load_yaml(path, resolve_func=False).get("metadata") or {}
    return str(metadata.get("knockout_grader", ""))


def describe_tasks(everything: bool = False) -> list[dict[str, str]]:
    """Tasks by name: `task`, `graded_as`, `problems` (of embedded ones), and `about`.

    Args:
        everything: Whether to list lm-eval's own too, which are only named.
    """
    from lm_eval.tasks._yaml_loader import load_yaml

    rows = []
    for path in sorted(own_tasks().glob("knockout_*.yaml")):
        task = load_yaml(path, resolve_func=False)
        data = own_tasks() / "data" / f"{path.stem.removeprefix('knockout_')}.jsonl"
        embedded = data.is_file()
        members = task.get("group") and ", ".join(map(str, task["task"]))
        rows.append(
            {
                "task": path.stem,
                "graded_as": own_kind(path.stem) or ("group" if members else "by its own metric"),
                "problems": str(data.read_text("utf-8").count("\n")) if embedded else "",
                "about": members or ("embedded" if embedded else str(task.get("dataset_path", ""))),
            }
        )
    if everything:
        from lm_eval.tasks import TaskManager

        own = {row["task"] for row in rows}
        rows += [
            {"task": name, "graded_as": "by its own metric", "problems": "", "about": "lm-eval"}
            for name in TaskManager().all_tasks
            if name not in own
        ]
    return rows


def find_leaves(name: str, include_path: Path | None) -> tuple[Any, list[Leaf]]:
    """Returns lm-eval's task manager that knows a name, and the tasks that the name stands for.

    Indexing all of lm-eval's tasks takes many seconds, so smaller indexes are tried first.

    Raises:
        UsageError: No task, group or tag has this name.
    """
    import lm_eval.tasks as stock

    if include_path is not None and not include_path.is_dir():
        raise UsageError(f"include_path: {include_path} is no folder; expected lm-eval task files")
    paths = [own_tasks(), *([include_path] if include_path else [])]
    stock_folder = Path(stock.__file__).parent
    known: list[str] = []
    missing = [name]
    # Ours and the user's; with lm-eval's folders that mention the name; all of lm-eval's.
    for step in range(3):
        extra = _mentioning(stock_folder, missing) if step else []
        if step and not extra:
            break
        manager = stock.TaskManager(
            include_path=[str(p) for p in (*(extra if step == 1 else []), *paths)],
            include_defaults=step == 2,
        )
        known = manager.all_tasks
        leaves = list(_leaves(name, manager.task_index, {}))
        missing = [leaf for leaf, _ in leaves if leaf not in manager.task_index] or missing
        if leaves and all(leaf in manager.task_index for leaf, _ in leaves):
            return manager, leaves
    if missing != [name]:
        raise UsageError(f"{name}: the group names {missing[0]!r}, which is no task")
    folders = [p.name for p in stock_folder.iterdir() if p.is_dir()]
    near = difflib.get_close_matches(name, [*known, *folders], n=3)
    raise UsageError(
        f"no benchmark {name!r} among lm-eval's tasks"
        + (f" and those in {include_path}" if include_path else "")
        + (f"; did you mean {' or '.join(near)}?" if near else "")
        + _broken_files(include_path)
    )


def _mentioning(folder: Path, names: Sequence[str]) -> list[Path]:
    """The subfolders with a task file that holds a name as a word; reading is fast, parsing not."""
    either = b"|".join(re.escape(name.encode()) for name in names)
    word = re.compile(rb"(?<![\w-])(?:" + either + rb")(?![\w-])")
    found: set[Path] = set()
    for top in sorted(p for p in folder.iterdir() if p.is_dir()):
        if any(word.search(path.read_bytes()) for path in top.rglob("*.yaml")):
            found.add(top)
    return sorted(found)


def _leaves(name: str, index: Mapping[str, Any], overrides: dict[str, Any]) -> Iterator[Leaf]:
    from lm_eval.tasks._index import Kind

    entry = index.get(name)
    if entry is None:
        if overrides.get("task") == name or overrides.get("_member"):
            yield name, overrides
        return
    if entry.kind is Kind.TAG:
        for member in sorted(entry.tags):
            yield from _leaves(member, index, overrides)
    elif entry.kind is Kind.GROUP:
        for member in (entry.cfg or {}).get("task") or []:
            own = dict(member) if isinstance(member, dict) else {}
            target = own.pop("group", None) or own.pop("task", None) or member
            yield from _leaves(str(target), index, {**overrides, **own, "_member": True})
    else:
        yield name, {k: v for k, v in overrides.items() if k != "_member"}


def _broken_files(folder: Path | None) -> str:
    """lm-eval skips task files that it cannot read without a word; this names them."""
    if folder is None:
        return ""
    from lm_eval.tasks._yaml_loader import load_yaml

    broken = []
    for path in sorted(folder.rglob("*.yaml")):
        try:
            load_yaml(path, resolve_func=False)
        except Exception as error:
            broken.append(f"\n{path} cannot be read: {str(error).splitlines()[0]}")
    return "".join(broken)
