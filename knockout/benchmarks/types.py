"""Problems, benchmarks, and how their prompts are made."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from knockout.grading.graders import Grader

__all__ = ["Benchmark", "Chat", "Problem"]


@dataclass(frozen=True, slots=True)
class Chat:
    """How prompts are made for chat and thinking models.

    Attributes:
        template: Whether the tokenizer's chat template wraps the prompt.
        system: System message, or None.
        args: Further arguments of the template, for example `enable_thinking`.
        think_end: What closes the thinking part of a response; the one that the chat template names if it is None, else
            "</think>".
    """

    template: bool = True
    system: str | None = None
    args: dict[str, Any] = field(default_factory=dict)
    think_end: str | None = "</think>"


@dataclass(frozen=True, slots=True)
class Problem:
    """One document of a benchmark.

    Attributes:
        benchmark: Name of its benchmark.
        index: Place in `Benchmark.problems`.
        doc_id: The document's own id, or its row; unique within the benchmark.
        doc: The document, as the task's `process_docs` left it.
        prompt: Text after few-shot examples and chat template.
        stop: Strings that end a response.
        max_tokens: The task's own limit for a response, or None.
    """

    benchmark: str
    index: int
    doc_id: str
    doc: dict[str, Any]
    prompt: str
    stop: tuple[str, ...]
    max_tokens: int | None


@dataclass(frozen=True, slots=True)
class Benchmark:
    """One lm-eval task, ready to generate for.

    Attributes:
        name: The task's name.
        metric: The 0/1 metric that is the grade; "metric,filter" if the task filters responses.
        problems: In the task's order.
        fingerprint: Hash of documents, prompts, stop strings and metric.
        grader: Grades a response by the problem's index; travels to worker processes.
        think_end: What closes the thinking of a response.
        thinks: Whether responses are expected to think: stop strings count only after it.
        as_text: Index and reason of each problem whose gold answer is compared as text.
        warnings: What the user should know.
    """

    name: str
    metric: str
    problems: list[Problem]
    fingerprint: str
    grader: Grader
    think_end: str = "</think>"
    thinks: bool = False
    as_text: dict[int, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
