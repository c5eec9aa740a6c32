"""What grades the responses of one benchmark, as values that travel to worker processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from knockout.grading.grade import Grade, answer_part

__all__ = ["Grader", "IfevalGrader", "MathsGrader", "TaskGrader", "metric_value"]

_ANSWERS = ("answer", "Answer", "target", "gold", "solution", "label")
_INVALID = "[invalid]"  # what lm-eval's regex filters give if nothing matches


class Grader(Protocol):
    """Grades the response to the problem with a given index."""

    def warm_up(self) -> None:
        """Imports and builds what the first grade would wait for."""

    def grade(self, index: int, response: str | None, *, finished: bool) -> Grade:
        """Grades one response; `finished` is False if it was cut by length."""


@dataclass(frozen=True)
class MathsGrader:
    """Compares with gold answers; see `knockout.grading.maths`.

    Attributes:
        golds: Of the problems, in their order.
        integer: Whether answers are whole numbers.
        think_end: See `answer_part`.
        think_open: See `answer_part`.
        as_text: Index and reason of each gold answer that is compared as text.
    """

    golds: list[str]
    integer: bool = False
    think_end: str | None = "</think>"
    think_open: bool = False
    as_text: Mapping[int, str] = field(default_factory=dict)

    def warm_up(self) -> None:
        from knockout.grading.maths import same_answer

        same_answer(gold="x+1", answer=r"\frac{2x+2}{2}")

    def expected(self, index: int) -> str:
        """The gold answer."""
        return self.golds[index]

    def grade(self, index: int, response: str | None, *, finished: bool) -> Grade:
        from knockout.grading.maths import grade_maths

        return grade_maths(
            gold=self.golds[index],
            response=response,
            integer=self.integer,
            think_end=self.think_end,
            think_open=self.think_open,
            finished=finished,
            as_text=index in self.as_text,
        )


@dataclass(frozen=True)
class IfevalGrader:
    """lm-eval's IFEval checker, prompt-level strict; see `knockout.grading.ifeval`."""

    docs: list[dict[str, Any]]
    think_end: str | None = "</think>"
    think_open: bool = False

    def warm_up(self) -> None:
        from knockout.grading.ifeval import preflight

        preflight()

    def expected(self, index: int) -> str:
        """The instructions to be followed, each with its arguments."""
        doc = self.docs[index]
        given = doc.get("kwargs") or [{}] * len(doc["instruction_id_list"])
        said = []
        for name, arguments in zip(doc["instruction_id_list"], given, strict=False):
            values = ", ".join(f"{k} {v}" for k, v in (arguments or {}).items() if v is not None)
            said.append(f"{name} ({values})" if values else str(name))
        return "; ".join(said)

    def grade(self, index: int, response: str | None, *, finished: bool) -> Grade:
        from knockout.grading.ifeval import grade_ifeval

        return grade_ifeval(
            doc=self.docs[index],
            response=response,
            think_end=self.think_end,
            think_open=self.think_open,
        )


@dataclass
class TaskGrader:
    """Any generate_until task of lm-eval: its own filters, then its own `process_results`.

    A task object cannot be pickled: its functions come from files that its YAML names. So the
    YAML's path travels with the plain part of the resolved configuration, and the task is rebuilt
    around the documents at hand; no data set is loaded again.

    Attributes:
        docs: Documents as the task's `process_docs` left them.
        yaml_path: The task's file; None for a task defined inline in a group.
        config: Configuration values without functions; they win over the file's.
        metric: Key of `process_results`.
        filter_name: Which filter pipeline's output is graded.
        think_end: See `answer_part`.
        think_open: See `answer_part`.
    """

    docs: list[dict[str, Any]]
    yaml_path: Path | None
    config: dict[str, Any]
    metric: str
    filter_name: str
    think_end: str | None = "</think>"
    think_open: bool = False
    _task: Any = field(default=None, repr=False, compare=False)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_task": None}

    def warm_up(self) -> None:
        self._task = self._task or _rebuild(self)

    def expected(self, index: int) -> str:
        """The document's answer, under the names that data sets give it; "" if it has none."""
        doc = self.docs[index]
        found = next((doc[key] for key in _ANSWERS if doc.get(key) not in (None, "")), "")
        return found if isinstance(found, str) else repr(found)

    def grade(self, index: int, response: str | None, *, finished: bool) -> Grade:
        if response is None:
            return Grade(0, "error", "no response")
        text = answer_part(response, think_end=self.think_end, think_open=self.think_open)
        if text is None:
            return Grade(0, "incomplete")
        self.warm_up()
        filtered, results = metric_value(self._task, self.docs[index], text, self.filter_name)
        shown = filtered if isinstance(filtered, str) else repr(filtered)
        if shown == _INVALID:
            return Grade(0, "unparsed" if finished else "incomplete")
        value = results[self.metric]
        if isinstance(value, (list, tuple)) or value not in (0, 1):
            return Grade(0, "error", f"metric {self.metric} gave {value!r}, which is not 0 or 1")
        return Grade(int(value), "ok", None if shown == text else shown)


def metric_value(
    task: Any, doc: Mapping[str, Any], response: str, filter_name: str
) -> tuple[Any, dict[str, Any]]:
    """Returns the filtered response and what the task's `process_results` makes of it."""
    from lm_eval.api.instance import Instance

    instance = Instance(
        request_type="generate_until",
        doc=dict(doc),
        arguments=("", {}),
        idx=0,
        metadata=(task.config.task, 0, 1),
    )
    instance.resps = [response]
    for pipeline in task._filters:
        if pipeline.name == filter_name:
            pipeline.apply([instance])
    filtered = instance.filtered_resps[filter_name]
    return filtered, dict(task.process_results(dict(doc), [filtered]))


def _rebuild(grader: TaskGrader) -> Any:
    """Builds the task around the grader's own documents."""
    import datasets
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.tasks._yaml_loader import load_yaml

    from knockout.grading.ifeval import prepare

    prepare()  # a task that uses IFEval's checker must not try to download
    config = dict(load_yaml(grader.yaml_path, resolve_func=True)) if grader.yaml_path else {}
    config.update(grader.config)
    for key in ("tag", "group", "task_list", "class", "process_docs", "fewshot_config"):
        config.pop(key, None)
    config.update(num_fewshot=0, training_split=None, validation_split=None, fewshot_split=None)
    config.update(test_split="test", custom_dataset=None)

    class LocalTask(ConfigurableTask):  # type: ignore[misc]
        def download(self, *args: Any, **kwargs: Any) -> None:
            self.dataset = {"test": datasets.Dataset.from_list(grader.docs[:1])}

    return LocalTask(config=config)
