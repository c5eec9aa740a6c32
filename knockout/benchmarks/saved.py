"""Grading saved responses: what `knockout grade` does."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from knockout.benchmarks.load import golds_warning
from knockout.errors import UsageError, shortened
from knockout.grading.graders import Grader, MathsGrader
from knockout.grading.registry import ToGrade, find_grader

__all__ = ["grade_file"]

log = logging.getLogger("knockout")

_POLL_S = 0.01


@dataclass(frozen=True)
class _Saved:
    name: str
    grader: Grader


def grade_file(
    task: str,
    path: Path,
    *,
    data_dir: Path | None = None,
    include_path: Path | None = None,
    metric: str | None = None,
    think_end: str | None = "</think>",
    workers: int = 1,
    timeout_s: float = 10.0,
    memory_mb: int = 2048,
    warn: Callable[[str], None] = log.warning,
) -> Iterator[dict[str, Any]]:
    r"""Grades a JSONL file of responses, in its order.

    Each line is `{"doc": {...}, "response": "..."}`; for maths tasks `{"answer": gold,
    "response": "..."}` does too, and neither these nor IFEval records need the data set.

    Args:
        task: A benchmark's name.
        path: The file; a "response" of null is a failed generation.
        data_dir: See `load_benchmark`; read for tasks that are neither maths nor IFEval.
        include_path: See `load_benchmark`.
        metric: See `load_benchmark`.
        think_end: What closes the thinking part.
        workers: Processes that grade.
        timeout_s: Wall time for one response.
        memory_mb: What grading may take in a process on top of its imports, in MiB.
        warn: Is told which gold answers are compared as text.

    Yields:
        `correct` (0 or 1), `extracted` and `status` for each line; also `gold_as_text`, why, where
        the gold answer cannot be read and is compared as text.

    Raises:
        UsageError: A line is wrong; the message names file and line. Nothing is graded then.
    """
    from knockout.grading.pool import GraderPool

    rows = _read(path)
    grader, as_text = _grader(
        task, path, rows, data_dir, include_path, metric, think_end, min(timeout_s, 5.0)
    )
    golds = [(f"line {n}", str(_stated_gold(row))) for n, row in rows]
    for warning in golds_warning(str(path), as_text, golds):
        warn(warning)
    pool = GraderPool(
        [_Saved(task, grader)], workers=workers, timeout_s=timeout_s, memory_mb=memory_mb
    )
    with pool:
        for index, (_, row) in enumerate(rows):
            pool.submit(str(index), task, index, row["response"], True)
        done: dict[int, dict[str, Any]] = {}
        for index in range(len(rows)):
            while index not in done:
                for key, g in pool.poll():
                    done[int(key)] = {
                        "correct": g.correct,
                        "extracted": g.extracted,
                        "status": g.status,
                        **({"gold_as_text": as_text[int(key)]} if int(key) in as_text else {}),
                    }
                if index not in done:
                    time.sleep(_POLL_S)
            yield done.pop(index)


def _read(path: Path) -> list[tuple[int, dict[str, Any]]]:
    """Returns (line number, record) for each line that is not blank."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 text: {error.reason}") from error
    rows = []
    for n, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:  # also a number of thousands of digits
            why = getattr(error, "msg", shortened(str(error)))
            raise UsageError(f"{path}, line {n}: not JSON that can be read ({why})") from error
        if not isinstance(row, dict) or "response" not in row:
            raise UsageError(f'{path}, line {n}: expected an object with "response"')
        if not isinstance(row["response"], str | None):
            raise UsageError(f'{path}, line {n}: "response" should be text, or null if it failed')
        rows.append((n, row))
    return rows


def _grader(
    task: str,
    path: Path,
    rows: list[tuple[int, dict[str, Any]]],
    data_dir: Path | None,
    include_path: Path | None,
    metric: str | None,
    think_end: str | None,
    gold_s: float,
) -> tuple[Grader, dict[int, str]]:
    """The grader, and which gold answers it compares as text, with the reasons."""
    from knockout.benchmarks.find import own_kind
    from knockout.benchmarks.load import task_grader

    kind = find_grader(name) if metric is None and (name := own_kind(task, include_path)) else None
    if kind is None:
        docs = [_doc(row, f"{path}, line {n}") for n, row in rows]
        own = task_grader(
            task,
            docs,
            data_dir=data_dir,
            include_path=include_path,
            metric=metric,
            think_end=think_end,
        )
        return own, {}
    if "answer" in kind.fields:
        docs = [{"answer": _gold(row, f"{path}, line {n}")} for n, row in rows]
    else:
        docs = [_doc(row, f"{path}, line {n}") for n, row in rows]
    for (n, _), doc in zip(rows, docs, strict=True):
        if why := kind.check(doc):
            raise UsageError(f'{path}, line {n}: "doc" cannot be graded by {kind.name}: {why}')
    grader = kind.build(ToGrade(docs, think_end, timeout_s=gold_s))
    return grader, dict(grader.as_text) if isinstance(grader, MathsGrader) else {}


def _doc(row: Mapping[str, Any], where: str) -> dict[str, Any]:
    doc = row.get("doc")
    if not isinstance(doc, dict):
        raise UsageError(f'{where}: expected an object "doc" with the problem\'s record')
    return doc


def _stated_gold(row: Mapping[str, Any]) -> Any:
    gold = row.get("answer")
    if gold is None and isinstance(row.get("doc"), dict):
        gold = row["doc"].get("answer", row["doc"].get("Answer"))
    return gold


def _gold(row: Mapping[str, Any], where: str) -> str:
    gold = _stated_gold(row)
    if isinstance(gold, bool) or not isinstance(gold, str | int | float):
        raise UsageError(f'{where}: expected "answer", or "doc" with an answer')
    return str(gold)
