"""Maths grading, on the cases of tests/data/maths_cases.json and on real gold answers."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from knockout.grading.extract import last_answer
from knockout.grading.grade import Grade, answer_part
from knockout.grading.maths import check_gold, grade_maths, same_answer

CASES = json.loads((Path(__file__).parent / "data" / "maths_cases.json").read_text("utf-8"))
DATA = Path(
    os.environ.get("KNOCKOUT_TEST_DATA", Path(__file__).parents[1].parent / "shared" / "data")
)


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c['kind']}: {c['gold']} {c['response']}")
def test_case(case: dict[str, Any]) -> None:
    options = {k: case[k] for k in ("integer", "finished", "think_open") if k in case}
    grade = grade_maths(gold=case["gold"], response=case["response"], **options)
    assert (grade.correct, grade.status) == (case["correct"], case["status"])


def _kinds() -> list[tuple[str, dict[str, Any]]]:
    """The neighbours of faults, a file for each kind: a gold answer, right and wrong answers."""
    files = sorted((Path(__file__).parent / "data" / "maths").glob("*.json"))
    return [(f.stem, group) for f in files for group in json.loads(f.read_text("utf-8"))]


@pytest.mark.parametrize(
    ("kind", "group"), _kinds(), ids=lambda c: c if isinstance(c, str) else c["gold"]
)
def test_kind(kind: str, group: dict[str, Any]) -> None:
    graded = {
        answer: grade_maths(
            gold=group["gold"],
            response=rf"So it is $\boxed{{{answer}}}$.",
            integer=group.get("integer", False),
        ).correct
        for answer in [*group["right"], *group["wrong"]]
    }
    assert [a for a in group["right"] if not graded[a]] == []
    assert [a for a in group["wrong"] if graded[a]] == []


def test_where_a_response_says_its_answer() -> None:
    file = Path(__file__).parent / "data" / "maths_responses.json"
    cases = json.loads(file.read_text("utf-8"))
    wrong = [
        case
        for case in cases
        if grade_maths(gold=case["gold"], response=case["response"]).correct != case["correct"]
    ]
    assert len(cases) > 60
    assert wrong == []


def test_the_pairs_that_were_tried() -> None:
    path = DATA / "maths_pairs.jsonl"
    if not path.is_file():
        pytest.skip(f"{path} is not here")
    pairs = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    wrong = [
        pair
        for pair in pairs
        if grade_maths(gold=pair["answer"], response=pair["response"]).correct != pair["right"]
    ]
    assert len(pairs) >= 132
    assert wrong == []


@pytest.mark.parametrize(
    "text",
    [
        " ",
        "\n",
        "{",
        "}",
        "\\",
        "$",
        "7",
        "\\[",
        "\\boxed{",
        "\\boxed{1} ",
        "is ",
        "answer to ",
        "\n ",
        "= ",
    ],
    ids=repr,
)
@pytest.mark.parametrize(
    ("before", "after"), [("", ""), (r"\boxed{7}", ""), ("The answer is ", "x"), ("$$ 7", "7")]
)
def test_long_responses_are_graded_in_time(text: str, before: str, after: str) -> None:
    """A response that degenerates is wrong, not missing: nothing that reads it is quadratic."""
    began = time.process_time()
    grade_maths(gold="7", response=before + text * (1_000_000 // len(text)) + after)
    assert time.process_time() - began < 5


@pytest.mark.parametrize("name", ["math500", "aime24", "aime25", "hmmt25"])
def test_real_golds_equal_themselves_and_no_other(name: str) -> None:
    path = DATA / f"{name}.jsonl"
    if not path.is_file():
        pytest.skip(f"{path} is not here")
    golds = [json.loads(line)["answer"] for line in path.read_text("utf-8").splitlines()]
    integer = name.startswith("aime")
    for gold in golds:
        response = rf"So it is \boxed{{{gold}}}."
        assert grade_maths(gold=gold, response=response, integer=integer).correct, gold
        assert check_gold(gold, integer=integer) is None
    different = sorted(set(golds))
    for i, gold in enumerate(different):
        other = different[(i + 37) % len(different)]
        if other != gold:
            response = rf"\boxed{{{other}}}"
            assert not grade_maths(gold=gold, response=response, integer=integer).correct


@pytest.mark.parametrize(
    ("gold", "integer"), [(r"\frac{1}{", False), ("", False), ("7.5", True), ("4 10/3", False)]
)
def test_bad_golds_are_told(gold: str, integer: bool) -> None:
    assert check_gold(gold, integer=integer)


def test_arguments_cannot_be_swapped_by_position() -> None:
    with pytest.raises(TypeError):
        grade_maths("7", r"\boxed{7}")  # type: ignore[misc]
    with pytest.raises(TypeError):
        same_answer("7", "7")  # type: ignore[misc]


def test_grading_leaves_a_callers_alarm_alone_and_works_in_threads() -> None:
    grades: list[Grade] = []
    thread = threading.Thread(
        target=lambda: grades.append(grade_maths(gold="x+1", response=r"\boxed{1+x}"))
    )
    thread.start()
    thread.join()
    assert grades[0].correct
    signal.setitimer(signal.ITIMER_REAL, 500)
    try:
        grade_maths(gold="x+2", response=r"\boxed{2+x}")
        assert signal.getitimer(signal.ITIMER_REAL)[0] > 400
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def test_only_graded_answers_can_be_right() -> None:
    with pytest.raises(ValueError, match="timeout"):
        Grade(1, "timeout")


def test_answer_part() -> None:
    assert answer_part("a</think>b</think> c", think_end="</think>") == "c"
    assert answer_part("a", think_end="</think>") == "a"
    assert answer_part("a", think_end="</think>", think_open=True) is None
    assert answer_part("a</s>\n<|im_end|>\n", think_end=None) == "a"
    assert answer_part("[THINK]a", think_end="[/THINK]") is None


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (r"\boxed{a}\boxed{b}", "a, b"),
        (r"\boxed{a}. " + "No, that was wrong. " + r"\boxed{b}", "b"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"\boxed{\text{a}{b}}", r"\text{a}{b}"),
        ("x " * 500 + r"\boxed{" + "1" * 500 + "}", None),
        ("I do not know.", None),
    ],
)
def test_last_answer(text: str, found: str | None) -> None:
    assert last_answer(text) == found
