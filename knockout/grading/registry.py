"""The graders that a task can ask for by name. A new one is one file.

A task's YAML asks with `metadata: {knockout_grader: NAME}`; a task that asks for none is graded by
lm-eval's own metric. `grader` puts a builder in the registry, and a package's entry point in the
group `knockout.graders` makes its module known to every command. `docs/extending.md` has an example.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from knockout.grading.graders import Grader, IfevalGrader, MathsGrader
from knockout.registry import Registry

__all__ = ["GraderKind", "ToGrade", "find_grader", "grader"]


@dataclass(frozen=True, slots=True)
class ToGrade:
    """What a grader is built for.

    Attributes:
        docs: The records of the problems, in their order.
        think_end: See `answer_part`.
        think_open: See `answer_part`.
        timeout_s: Wall time that the builder may spend on one record.
    """

    docs: list[dict[str, Any]]
    think_end: str | None = "</think>"
    think_open: bool = False
    timeout_s: float = 5.0


Builder = Callable[[ToGrade], Grader]


@dataclass(frozen=True, slots=True)
class GraderKind:
    """One entry of the registry.

    Attributes:
        name: What a task's `knockout_grader` names.
        build: Makes the grader, a value that can be pickled.
        metric: Name of the grade in the verdicts' metadata.
        fields: Fields that a record must have, with their types.
        check: Says why a record cannot be graded, or None.
    """

    name: str
    build: Builder
    metric: str
    fields: Mapping[str, type] = field(default_factory=dict)
    check: Callable[[dict[str, Any]], str | None] = lambda doc: None


_KINDS: Registry[GraderKind] = Registry("knockout_grader", "knockout.graders")


def grader(
    name: str,
    *,
    metric: str | None = None,
    fields: Mapping[str, type] | None = None,
    check: Callable[[dict[str, Any]], str | None] | None = None,
) -> Callable[[Builder], Builder]:
    """Registers a function from `ToGrade` to a `Grader` under a name; see `GraderKind`."""

    def register(build: Builder) -> Builder:
        kind = GraderKind(name, build, metric or name, fields or {}, check or (lambda doc: None))
        _KINDS.add(name, kind, build)
        return build

    return register


def find_grader(name: str) -> GraderKind:
    """The grader of this name.

    Raises:
        UsageError: There is none.
    """
    return _KINDS.find(name)


_MATHS = {"problem": str, "answer": str}


def _maths(asked: ToGrade, integer: bool) -> MathsGrader:
    from knockout.grading.golds import unreadable_golds

    golds = [str(doc["answer"]) for doc in asked.docs]
    as_text = unreadable_golds(golds, integer=integer, timeout_s=asked.timeout_s)
    return MathsGrader(golds, integer, asked.think_end, asked.think_open, as_text)


@grader("maths", metric="exact_match", fields=_MATHS)
def maths(asked: ToGrade) -> Grader:
    """Gold answers in LaTeX, compared by value."""
    return _maths(asked, integer=False)


@grader("integer", metric="exact_match", fields=_MATHS)
def integer(asked: ToGrade) -> Grader:
    """Gold answers that are whole numbers."""
    return _maths(asked, integer=True)


def _check_ifeval(doc: dict[str, Any]) -> str | None:
    from knockout.grading.ifeval import check_doc

    return check_doc(doc)


@grader(
    "ifeval",
    metric="prompt_level_strict_acc",
    fields={"prompt": str, "instruction_id_list": list, "kwargs": list},
    check=_check_ifeval,
)
def ifeval(asked: ToGrade) -> Grader:
    """lm-eval's IFEval checker."""
    from knockout.grading.ifeval import preflight

    preflight()
    return IfevalGrader(asked.docs, asked.think_end, asked.think_open)
