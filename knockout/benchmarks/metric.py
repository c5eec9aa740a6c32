"""Which of a task's numbers is the 0/1 grade."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from knockout.errors import UsageError
from knockout.grading.graders import metric_value

__all__ = ["PREFERRED", "choose_metric"]

PREFERRED = ("prompt_level_strict_acc", "exact_match", "acc", "pass@1", "pass_at_1", "math_verify")
"""Tried in this order; then the first metric that is 0 or 1 for every probe."""

_N_PROBED = 3


def choose_metric(
    task: Any, docs: Sequence[Mapping[str, Any]], wanted: str | None
) -> tuple[str, str]:
    """Returns (metric, filter).

    The first documents are graded with a few made-up responses; a metric that gives anything but
    0 or 1 for one of them is no grade.

    Args:
        task: An lm-eval task.
        docs: Its documents.
        wanted: "metric" or "metric,filter" as lm-eval writes them; None for the default.

    Raises:
        UsageError: There is no such metric or filter, or it is not 0/1.
    """
    name = task.config.task
    filters = [pipeline.name for pipeline in task._filters]
    metric, _, filter_name = (wanted or "").partition(",")
    filter_name = filter_name or filters[0]
    if filter_name not in filters:
        raise UsageError(
            f"{name}: metric {wanted!r} names the filter {filter_name!r}; "
            f"it has {', '.join(filters)}"
        )
    values = _probe(task, docs, filter_name)
    binary = [key for key, seen in values.items() if all(_is_binary(v) for v in seen)]
    if metric and metric not in values:
        raise UsageError(f"{name}: no metric {metric!r}; it has {', '.join(values)}")
    if metric and metric not in binary:
        odd = next(v for v in values[metric] if not _is_binary(v))
        raise UsageError(
            f"{name}: metric {metric!r} is not 0 or 1 for each response (it gave {odd!r}); "
            f"usable are: {', '.join(binary) or 'none'}"
        )
    chosen = metric or next((m for m in (*PREFERRED, *values) if m in binary), None)
    if chosen is None:
        raise UsageError(
            f"{name}: none of its metrics ({', '.join(values)}) is 0 or 1 for each response, "
            "which Pass@1 needs"
        )
    return chosen, filter_name


def _probe(task: Any, docs: Sequence[Mapping[str, Any]], filter_name: str) -> dict[str, list[Any]]:
    values: dict[str, list[Any]] = {}
    for doc in docs[:_N_PROBED]:
        target = task.doc_to_target(doc)
        target = str(target[0] if isinstance(target, list) and target else target)
        half = len(target) // 2
        for response in (target, f"It is {target[: half + 1]} or so", target[half:-1], "no", ""):
            _, results = metric_value(task, doc, response, filter_name)
            for key, value in results.items():
                values.setdefault(key, []).append(value)
    return values


def _is_binary(value: Any) -> bool:
    return not isinstance(value, (list, tuple, dict, str)) and value in (0, 1)
