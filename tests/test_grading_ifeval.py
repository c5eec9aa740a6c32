"""IFEval's checker: offline, the same verdict every time, thinking left out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from knockout.errors import KnockoutError
from knockout.grading.ifeval import check_doc, grade_ifeval, preflight, prepare


def doc(instruction: str, **kwargs: Any) -> dict[str, Any]:
    return {"prompt": "x", "instruction_id_list": [instruction], "kwargs": [kwargs]}


NO_COMMA = doc("punctuation:no_comma")
SENTENCES = doc("length_constraints:number_sentences", relation="less than", num_sentences=3)


@pytest.mark.parametrize(
    ("record", "response", "correct", "status"),
    [
        (NO_COMMA, "<think>well, ok</think>\nNo commas here", 1, "ok"),
        (NO_COMMA, "one, two", 0, "ok"),
        (NO_COMMA, "<think>no comma", 0, "incomplete"),
        (NO_COMMA, "", 0, "ok"),
        (NO_COMMA, None, 0, "error"),
        (doc("startend:end_checker", end_phrase="the end"), "This is the end<|im_end|>", 1, "ok"),
        (doc("startend:end_checker", end_phrase="the end"), "This is the end of it", 0, "ok"),
        # Punkt knows that these full stops end no sentence.
        (SENTENCES, "Mr. Smith met Dr. Jones at 3 p.m. on Monday. They talked.", 1, "ok"),
        (SENTENCES, "One ran. Two ran. Three ran.", 0, "ok"),
        (
            doc(
                "change_case:capital_word_frequency",
                capital_relation="at least",
                capital_frequency=2,
            ),
            "WE saw THEM there.",
            1,
            "ok",
        ),
    ],
)
def test_verdicts(record: dict[str, Any], response: str | None, correct: int, status: str) -> None:
    grade = grade_ifeval(doc=record, response=response)
    assert (grade.correct, grade.status) == (correct, status)


def test_strict_needs_every_instruction() -> None:
    both = {
        "prompt": "x",
        "instruction_id_list": ["punctuation:no_comma", "change_case:english_lowercase"],
        "kwargs": [{}, {}],
    }
    assert grade_ifeval(doc=both, response="the dog runs over the green hill").correct
    assert not grade_ifeval(doc=both, response="The dog runs over the green hill").correct


def test_the_language_detector_says_the_same_every_time() -> None:
    record = doc("language:response_language", language="en")
    assert len({grade_ifeval(doc=record, response="Hello world").correct for _ in range(60)}) == 1


def test_records_are_checked() -> None:
    assert check_doc(NO_COMMA) is None
    assert "kwargs" in (check_doc({"prompt": "", "instruction_id_list": []}) or "")
    assert "same length" in (check_doc({**NO_COMMA, "kwargs": []}) or "")
    assert "no:such" in (check_doc(doc("no:such")) or "")


def test_preflight_in_a_new_process_without_data_and_network(tmp_path: Path) -> None:
    """Several processes at once find no data; none downloads, all get the same whole files."""
    program = (
        "import socket, sys\n"
        "def refuse(*a, **k): raise AssertionError('the network was tried')\n"
        "socket.create_connection = socket.socket.connect = refuse\n"
        "from knockout.grading.ifeval import preflight\n"
        "preflight()\n"
    )
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "HOME": str(tmp_path)}
    environment.pop("NLTK_DATA", None)

    def run(_: int) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True
        )

    with ThreadPoolExecutor(2) as pool:
        for done in pool.map(run, range(2)):
            assert done.returncode == 0, done.stderr
            assert "ownload" not in done.stdout + done.stderr
    files = sorted(p.name for p in tmp_path.rglob("english/*"))
    assert files == [
        "abbrev_types.txt",
        "collocations.tab",
        "ortho_context.tab",
        "sent_starters.txt",
    ]
    assert not list(tmp_path.rglob(".writing-*"))


def test_an_unwritable_cache_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "file"
    blocked.write_text(json.dumps("not a folder"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    with pytest.raises(KnockoutError, match="XDG_CACHE_HOME"):
        prepare()


def test_preflight_passes_here() -> None:
    preflight()
