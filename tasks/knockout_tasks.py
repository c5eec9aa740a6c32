"""Functions that the task files name; lm-eval loads this file by its path."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets

_ANSWER = ("answer", "Answer")
_PROBLEM = ("problem", "Problem", "question")
_ID = ("unique_id", "id", "ID", "problem_idx")


def maths_docs(dataset: datasets.Dataset) -> datasets.Dataset:
    """Gives the records of all sources the same fields: id, problem, answer (text)."""
    records = [
        {"id": str(_first(row, _ID, i)), "problem": _first(row, _PROBLEM), "answer": _answer(row)}
        for i, row in enumerate(dataset)
    ]
    return datasets.Dataset.from_list(records)


def maths_results(doc: Mapping[str, Any], results: Sequence[str]) -> dict[str, int]:
    """Grades a response with math-verify."""
    from knockout.grading.maths import grade_maths

    return {"exact_match": grade_maths(gold=doc["answer"], response=results[0]).correct}


def integer_results(doc: Mapping[str, Any], results: Sequence[str]) -> dict[str, int]:
    """Grades a response whose answer is a whole number."""
    from knockout.grading.maths import grade_maths

    grade = grade_maths(gold=doc["answer"], response=results[0], integer=True)
    return {"exact_match": grade.correct}


def ifeval_results(doc: Mapping[str, Any], results: Sequence[str]) -> dict[str, bool]:
    """Grades what follows the thinking with lm-eval's IFEval checker."""
    from knockout.grading.grade import answer_part
    from knockout.grading.ifeval import drawn_from, prepare

    prepare()
    from lm_eval.tasks.ifeval.utils import process_results

    text = answer_part(results[0], think_end="</think>") or ""
    with drawn_from(doc):
        graded = process_results(doc, [text])
    return {name: graded[name] for name in ("prompt_level_strict_acc", "prompt_level_loose_acc")}


def starter_arithmetic(**_: Any) -> dict[str, datasets.Dataset]:
    """The embedded arithmetic and word problems."""
    return _embedded("starter_arithmetic.jsonl")


def starter_instructions(**_: Any) -> dict[str, datasets.Dataset]:
    """The embedded instruction-following prompts."""
    return _embedded("starter_instructions.jsonl")


def planted(seed: int = 0, n: int = 20_000, **_: Any) -> dict[str, datasets.Dataset]:
    """Fresh problems of the planted model: the first n of a seed."""
    from knockout.planted.language import Language, problems

    return {"test": datasets.Dataset.from_list(list(problems(Language(), seed, n)))}


def planted_results(doc: Mapping[str, Any], results: Sequence[str]) -> dict[str, int]:
    """Grades the digit after the first `ans`."""
    from knockout.planted.language import grade

    return {"exact_match": grade(results[0], doc["answer"])}


def _embedded(name: str) -> dict[str, datasets.Dataset]:
    path = Path(__file__).parent / "data" / name
    lines = path.read_text(encoding="utf-8").splitlines()
    return {"test": datasets.Dataset.from_list([json.loads(line) for line in lines])}


def _first(row: Mapping[str, Any], names: Sequence[str], otherwise: Any = None) -> Any:
    for name in names:
        if row.get(name) is not None:
            return row[name]
    if otherwise is None:
        raise KeyError(f"found the fields {', '.join(row)}; expected one of {', '.join(names)}")
    return otherwise


def _answer(row: Mapping[str, Any]) -> str:
    """The gold answer as text; some sources box it or hold it as a number."""
    return str(_first(row, _ANSWER, row.get("solution"))).strip()
