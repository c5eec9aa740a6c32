"""Loading a benchmark: lm-eval's task, its prompts, its 0/1 metric and its grader."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from knockout.benchmarks.data import hub_access, local_overrides
from knockout.benchmarks.find import find_leaves
from knockout.benchmarks.metric import choose_metric
from knockout.benchmarks.prompts import chat_renderer
from knockout.benchmarks.types import Benchmark, Chat, Problem
from knockout.errors import KnockoutError, UsageError
from knockout.grading.graders import Grader, MathsGrader, TaskGrader
from knockout.grading.registry import ToGrade, find_grader
from knockout.tokens.thinking import known_end, opened_by

__all__ = ["golds_warning", "load_benchmark", "task_grader"]

_MOST_NAMED = 5
_FEWSHOT_SEED = 1234  # lm-eval's own default
_DEFAULT_THINK_END = "</think>"
_ID_FIELDS = ("unique_id", "id", "key")
_LENGTH_KEYS = ("max_gen_toks", "max_new_tokens", "max_tokens")


def load_benchmark(
    name: str,
    *,
    data_dir: Path | None = None,
    include_path: Path | None = None,
    limit: int | None = None,
    metric: str | None = None,
    num_fewshot: int | None = None,
    chat: Chat | None = None,
    tokenizer: Any = None,
) -> list[Benchmark]:
    """Loads a task of lm-eval, or all tasks of a group or tag.

    Args:
        name: A generate_until task, a group or a tag.
        data_dir: Folder with `<short name>.jsonl` files, read instead of the hub.
        include_path: Folder with more task files; they win over others of the same name.
        limit: First N documents; None for all.
        metric: The 0/1 metric, "name" or "name,filter"; None for the default (`PREFERRED`).
        num_fewshot: Worked examples in the prompt; None for the task's own number.
        chat: How prompts are made; None for plain prompts.
        tokenizer: For its chat template; may be None if `chat` is None.

    Returns:
        One benchmark a task, in the group's order.

    Raises:
        UsageError: No such task, or it cannot be used: it is not generate_until, its metric is
            not 0/1, a record or a gold answer is wrong.
        KnockoutError: Its data set cannot be reached.
    """
    from knockout.grading.ifeval import prepare

    if limit is not None and limit < 1:
        raise UsageError(f"{name}: limit is {limit}; expected at least 1, or null for all")
    prepare()  # importing lm-eval's ifeval must not try to download
    with _quiet():
        manager, leaves = find_leaves(name, include_path)
        benchmarks = []
        for leaf, overrides in leaves:
            task = _build(manager, leaf, _making(manager, leaf, overrides, limit), data_dir)
            _requests(task, leaf, limit, num_fewshot, chat, tokenizer)
            benchmarks.append(_benchmark(task, leaf, metric, chat, tokenizer))
        return benchmarks


def task_grader(
    name: str,
    docs: list[dict[str, Any]],
    *,
    data_dir: Path | None = None,
    include_path: Path | None = None,
    metric: str | None = None,
    think_end: str | None = _DEFAULT_THINK_END,
) -> Grader:
    """Returns what grades responses to the given documents of a single task.

    Raises:
        UsageError: It is a group, or it cannot be loaded; see `load_benchmark`.
        KnockoutError: Its data set cannot be reached.
    """
    from knockout.grading.ifeval import prepare

    prepare()
    with _quiet():
        manager, leaves = find_leaves(name, include_path)
        if len(leaves) != 1:
            raise UsageError(f"{name} stands for {len(leaves)} tasks; name one of them")
        task = _build(manager, *leaves[0], data_dir)
        think = _Thinking(think_end or _DEFAULT_THINK_END, False)
        return _lm_eval_grader(task, name, docs, metric, think)[0]


def _making(
    manager: Any, name: str, overrides: dict[str, Any], limit: int | None
) -> dict[str, Any]:
    """Tells a task that makes its problems (`metadata: {makes_problems: true}`) how many."""
    metadata = (manager.task_index[name].cfg or {}).get("metadata") or {}
    if limit is None or not metadata.get("makes_problems"):
        return overrides
    return {**overrides, "dataset_kwargs": {"n": limit}}


def _build(manager: Any, name: str, overrides: dict[str, Any], data_dir: Path | None) -> Any:
    entry = manager.task_index[name]
    config = {**(entry.cfg or {}), **overrides}
    kind = config.get("output_type", "generate_until")
    if kind != "generate_until":
        raise UsageError(
            f"{name} is a {kind} task; a knockout needs answers that are generated: "
            "choose a generate_until task"
        )
    overrides = {**overrides, **local_overrides(name, config, data_dir)}
    if overrides.get("dataset_path") == "json" or config.get("dataset_path") == "json":
        config["dataset_path"] = "json"
    try:
        with hub_access(name, config):
            task = manager._factory.build(entry, overrides=overrides, registry=manager.task_index)
    except KnockoutError:
        raise
    except Exception as error:  # a task file may run any code
        raise KnockoutError(
            f"{name}: lm-eval cannot load this task: {type(error).__name__}: {error}"
        ) from error
    if task.OUTPUT_TYPE != "generate_until":
        raise UsageError(f"{name} is a {task.OUTPUT_TYPE} task; choose a generate_until task")
    return task


def _requests(
    task: Any,
    name: str,
    limit: int | None,
    num_fewshot: int | None,
    chat: Chat | None,
    tokenizer: Any,
) -> None:
    """Makes lm-eval build its requests: few-shot examples and chat template as it does them."""
    if num_fewshot is not None:
        task.set_config("num_fewshot", num_fewshot)
    task.set_fewshot_seed(_FEWSHOT_SEED)
    use_template = chat is not None and chat.template
    if use_template and (tokenizer is None or not getattr(tokenizer, "chat_template", None)):
        raise UsageError("the tokenizer has no chat template; set chat.template to false")
    try:
        task.build_all_requests(
            limit=limit,
            system_instruction=chat.system if chat else None,
            apply_chat_template=use_template,
            fewshot_as_multiturn=use_template,
            chat_template=chat_renderer(tokenizer, chat) if chat and use_template else None,
        )
    except KnockoutError:
        raise
    except Exception as error:
        raise KnockoutError(
            f"{name}: its prompts cannot be built: {type(error).__name__}: {error}"
        ) from error


def _benchmark(
    task: Any, name: str, metric: str | None, chat: Chat | None, tokenizer: Any
) -> Benchmark:
    instances = task.instances
    if len({i.doc_id for i in instances}) != len(instances):
        raise UsageError(f"{name} asks several things of each document, which is not supported")
    docs = [dict(instance.doc) for instance in instances]
    problems = [
        _problem(name, index, doc_id, instance)
        for index, (doc_id, instance) in enumerate(
            zip(_doc_ids(docs, instances), instances, strict=True)
        )
    ]
    template = str(getattr(tokenizer, "chat_template", "") or "") if chat and chat.template else ""
    named = (chat.think_end if chat else None) or known_end(template)
    think_end = named or _DEFAULT_THINK_END
    think = _Thinking(think_end, any(opened_by(p.prompt, think_end) for p in problems))
    grader, chosen, as_text = _grader(task, name, docs, problems, metric, think)
    facts = [chosen, *([p.doc_id, p.doc, p.prompt, p.stop, p.max_tokens] for p in problems)]
    encoded = json.dumps([name, think.end, facts], sort_keys=True, default=repr).encode()
    fingerprint = hashlib.sha256(encoded).hexdigest()[:32]
    warnings = [
        *golds_warning(
            name, as_text, [(f"id {p.doc_id}", str(p.doc.get("answer"))) for p in problems]
        )
    ]
    thinks = think.is_open or known_end(template) is not None
    stops = sorted({stop for problem in problems for stop in problem.stop})
    if thinks and stops:
        warnings.append(
            f"{name}: the chat template thinks, so the stop strings {stops} count only after "
            f"{think_end!r}"
        )
    return Benchmark(
        name, chosen, problems, fingerprint, grader, think_end, thinks, as_text, tuple(warnings)
    )


def _problem(name: str, index: int, doc_id: str, instance: Any) -> Problem:
    prompt, kwargs = instance.args[:2]
    if len(instance.args) > 2 or not isinstance(prompt, str):
        raise UsageError(f"{name} needs more than text, which is not supported")
    until = kwargs.get("until") or ()
    stop = (until,) if isinstance(until, str) else tuple(str(s) for s in until if s)
    length = next((int(kwargs[key]) for key in _LENGTH_KEYS if kwargs.get(key)), None)
    return Problem(name, index, doc_id, dict(instance.doc), prompt, stop, length)


def _doc_ids(docs: Sequence[dict[str, Any]], instances: Sequence[Any]) -> list[str]:
    """The documents' own ids if they have unique ones, else their rows."""
    for field in _ID_FIELDS:
        ids = [str(doc[field]) for doc in docs if doc.get(field) is not None]
        if len(set(ids)) == len(docs):
            return ids
    return [str(instance.doc_id) for instance in instances]


@dataclass(frozen=True)
class _Thinking:
    end: str
    is_open: bool


def _grader(
    task: Any,
    name: str,
    docs: list[dict[str, Any]],
    problems: list[Problem],
    metric: str | None,
    think: _Thinking,
) -> tuple[Grader, str, dict[int, str]]:
    asked_for = str((task.config.metadata or {}).get("knockout_grader", ""))
    if not asked_for:
        return *_lm_eval_grader(task, name, docs, metric, think), {}
    kind = find_grader(asked_for)
    if metric not in (None, kind.metric):
        return *_lm_eval_grader(task, name, docs, metric, think), {}
    for problem in problems:
        if why := kind.check(problem.doc):
            raise UsageError(f"{name}, row {problem.index} (key {problem.doc_id}): {why}")
    grader = kind.build(ToGrade(docs, think.end, think.is_open))
    return grader, kind.metric, dict(grader.as_text) if isinstance(grader, MathsGrader) else {}


def _lm_eval_grader(
    task: Any, name: str, docs: list[dict[str, Any]], metric: str | None, think: _Thinking
) -> tuple[Grader, str]:
    try:
        chosen, filter_name = choose_metric(task, docs, metric)
    except KnockoutError:
        raise
    except Exception as error:
        raise KnockoutError(
            f"{name}: its own grading fails on a made-up response: {type(error).__name__}: {error}"
        ) from error
    source = (task.config.metadata or {}).get("config_source")
    if source == "inline" and callable(task.config.process_results):
        raise UsageError(
            f"{name} is defined inside a group and graded by a function, which cannot travel to the "
            "processes that grade; put the task into a file of its own"
        )
    grader = TaskGrader(
        docs=docs,
        yaml_path=Path(source) if source not in (None, "inline", "unknown") else None,
        config=_plain(vars(task.config)),
        metric=chosen,
        filter_name=filter_name,
        think_end=think.end,
        think_open=think.is_open,
    )
    return grader, chosen if len(task._filters) == 1 else f"{chosen},{filter_name}"


def golds_warning(
    name: str, as_text: Mapping[int, str], golds: Sequence[tuple[str, str]]
) -> Iterator[str]:
    """Says which gold answers are compared as text; `golds` are where each stands and what it is."""
    if not as_text:
        return
    named = [f"{golds[i][0]}, {_short(golds[i][1])}: {why}" for i, why in sorted(as_text.items())][
        :_MOST_NAMED
    ]
    more = f"; and {len(as_text) - len(named)} more" if len(as_text) > len(named) else ""
    yield (
        f"{name}: {len(as_text)} of {len(golds)} gold answers are compared as text only "
        f"({'; '.join(named)}{more})"
    )


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:60] + "…")


def _plain(config: dict[str, Any]) -> dict[str, Any]:
    """The values of a resolved configuration that can travel; functions stay in the task's file."""

    def travels(value: Any) -> bool:
        try:
            json.dumps(value)
        except (TypeError, ValueError):
            return False
        return value is not None

    return {key: value for key, value in config.items() if travels(value)}


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Holds back lm-eval's and datasets' progress bars and remarks."""
    import datasets

    logger = logging.getLogger("lm_eval")
    level, bars = logger.level, datasets.are_progress_bars_disabled()
    logger.setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)
        if not bars:
            datasets.enable_progress_bars()
