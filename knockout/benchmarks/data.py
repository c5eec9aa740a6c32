"""Where a task's records come from: the hub, or local JSONL files."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from knockout.errors import KnockoutError, UsageError, shortened, shown
from knockout.grading.registry import find_grader

__all__ = ["hub_access", "local_overrides", "short_name"]

_TIMEOUT_S = 10.0


def short_name(task: str) -> str:
    """Stem of the task's file in `data_dir`: "math500" for "knockout_math500".

    A task that a group defines in its own file, "group::task", has the file of "task".
    """
    return task.rpartition("::")[2].removeprefix("knockout_")


def local_overrides(task: str, config: Mapping[str, Any], data_dir: Path | None) -> dict[str, Any]:
    """Returns the configuration that makes lm-eval read `<data_dir>/<short name>.jsonl`.

    Tasks whose records come with their files (the starter tasks, a user's local task) keep them,
    unless the folder has a file of theirs.

    Raises:
        UsageError: The file is missing, or one of its records is wrong; the message names both.
    """
    if data_dir is None:
        return {}
    path = data_dir / f"{short_name(task)}.jsonl"
    kind = str((config.get("metadata") or {}).get("knockout_grader", ""))
    required = find_grader(kind).fields if kind else {}
    if not path.is_file():
        if config.get("custom_dataset") or config.get("dataset_path") in ("json", "csv", "parquet"):
            return {}
        fields = ", ".join(required) or "the fields of " + str(config.get("dataset_path"))
        raise UsageError(
            f"data_dir: {path} is missing; expected one JSON record a line with {fields} "
            f"(the records of {config.get('dataset_path')})"
        )
    _check_records(path, required)
    split = config.get("test_split") or config.get("validation_split") or "test"
    return {
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": {split: str(path.resolve())}},
        "custom_dataset": None,
        "training_split": None,
        "fewshot_split": split,  # lm-eval never shows a document its own answer
    }


def _check_records(path: Path, fields: Mapping[str, type]) -> None:
    n = 0
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {shortened(str(error))}") from None
    # Not splitlines: a text in JSON may contain rarer line ends as they are.
    for row, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        n += 1
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            why = getattr(error, "msg", shortened(str(error)))
            raise UsageError(f"{path}, line {row}: not JSON that can be read ({why})") from error
        if not isinstance(record, dict):
            raise UsageError(f"{path}, line {row}: expected an object, found {shown(record, 60)}")
        for field, kind in fields.items():
            number = kind is str and isinstance(record.get(field), int)
            if not isinstance(record.get(field), kind) and not number:
                raise UsageError(
                    f"{path}, line {row}: field {field!r} should be a {kind.__name__}, "
                    f"found {shown(record.get(field), 60)}"
                )
    if not n:
        raise UsageError(f"{path} contains no records")


@contextlib.contextmanager
def hub_access(task: str, config: Mapping[str, Any]) -> Iterator[None]:
    """Loads inside the block; if the hub does not answer, only from the local cache.

    The hub's client would try for minutes, so it is asked once, briefly, before.

    Raises:
        KnockoutError: The data set cannot be had; the message says how to do without the hub.
    """
    import datasets
    import huggingface_hub
    import huggingface_hub.constants

    path = str(config.get("dataset_path") or "")
    on_hub = path and "/" in path and not Path(path).exists() and not config.get("custom_dataset")
    reason = ""
    if on_hub and not huggingface_hub.constants.HF_HUB_OFFLINE:
        try:
            huggingface_hub.HfApi().dataset_info(path, timeout=_TIMEOUT_S)
        except Exception as error:  # no network, no such data set, no permission
            reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"
    flags = [(huggingface_hub.constants, "HF_HUB_OFFLINE"), (datasets.config, "HF_HUB_OFFLINE")]
    before = [getattr(module, name) for module, name in flags]
    try:
        if reason:
            for module, name in flags:
                setattr(module, name, True)
        yield
    except (OSError, ValueError, RuntimeError) as error:
        if not on_hub:
            raise
        why = reason or f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"
        raise KnockoutError(
            f"{task}: the data set {path} cannot be loaded from the hub and is not in the local "
            f"cache ({why}). To run without the hub, put its records, one JSON object a line, into "
            f"{short_name(task)}.jsonl in a folder and set data_dir to that folder"
        ) from error
    finally:
        for (module, name), value in zip(flags, before, strict=True):
            setattr(module, name, value)
