"""Finding tasks: ours, the user's, and lm-eval's own."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import knockout
from knockout.errors import UsageError

__all__ = ["describe_tasks", "find_leaves", "own_kind", "own_tasks"]


def own_tasks() -> Path:
    """The folder of this project's task files, for `lm_eval --include_path`."""
    return (Path(knockout.__file__).parent / "tasks").resolve()


def own_kind(name: str, include_path: Path | None = None) -> str:
    """The grader that a task asks for by name, or "" if lm-eval's metric grades it."""
    if include_path is not None:
        manager, leaves = find_leaves(name, include_path)
        config = manager.task_index[leaves[0][0]].cfg if len(leaves) == 1 else None
        return str(((config or {}).get("metadata") or {}).get("knockout_grader", ""))
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


def find_leaves(
    name: str, include_path: Path | None
) -> tuple[Any, list[tuple[str, dict[str, Any]]]]:
    """Returns lm-eval's task manager that knows a name, and the tasks that the name stands for.

    Each task is its name and what the groups around it override.

    Indexing all of lm-eval's tasks takes many seconds, so smaller indexes are tried first.

    Raises:
        UsageError: No task, group or tag has this name.
    """
    import lm_eval.tasks as stock
    from lm_eval.tasks._index import Kind

    from knockout.benchmarks.groups import known_leaf, leaves_of

    if include_path is not None and not include_path.is_dir():
        raise UsageError(f"include_path: {include_path} is no folder; expected lm-eval task files")
    paths = [own_tasks(), *([include_path] if include_path else [])]
    stock_folder = Path(stock.__file__).parent
    folders: list[Path] = []  # those of lm-eval's that mention what is still missing
    while True:
        manager = stock.TaskManager(
            include_path=[str(p) for p in (*folders, *paths)], include_defaults=False
        )
        found = list(leaves_of(name, manager.task_index, {}))
        missing = [leaf.name for leaf in found if leaf.name not in manager.task_index]
        more = [f for f in _mentioning(stock_folder, missing) if f not in folders]
        if not more:
            break
        folders = sorted({*folders, *more})
    known = manager.task_index.get(name)
    if len(folders) > 1 and known is not None and known.kind is Kind.TAG:
        # Each folder would take the tag from the one before.
        manager = stock.TaskManager(include_path=[str(p) for p in paths], include_defaults=True)
        found = list(leaves_of(name, manager.task_index, {}))
    # Of two tasks of one name, the last counts, as in lm-eval.
    leaves = list(dict(known_leaf(leaf, manager.task_index) for leaf in found).items())
    unknown = [leaf for leaf, _ in leaves if leaf not in manager.task_index]
    if not unknown and leaves:
        return manager, leaves
    if unknown and unknown != [name]:
        raise UsageError(f"{name}: the group names {unknown[0]!r}, which is no task")
    if not leaves:
        raise UsageError(f"{name}: the group names no task")
    shown = [p.name for p in stock_folder.iterdir() if p.is_dir()]
    near = difflib.get_close_matches(name, [*manager.all_tasks, *shown], n=3)
    raise UsageError(
        f"no benchmark {name!r} among lm-eval's tasks"
        + (f" and those in {include_path}" if include_path else "")
        + (f"; did you mean {' or '.join(near)}?" if near else "")
        + _broken_files(include_path)
    )


def _mentioning(folder: Path, names: Sequence[str]) -> list[Path]:
    """The subfolders with a task file that contains a name as a word; reading is fast, parsing not."""
    if not names:
        return []
    either = b"|".join(re.escape(name.encode()) for name in names)
    word = re.compile(rb"(?<![\w-])(?:" + either + rb")(?![\w-])")
    found: set[Path] = set()
    for top in sorted(p for p in folder.iterdir() if p.is_dir()):
        if any(word.search(path.read_bytes()) for path in top.rglob("*.yaml")):
            found.add(top)
    return sorted(found)


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
