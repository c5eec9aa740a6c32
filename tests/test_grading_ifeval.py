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


DATA = Path(
    os.environ.get("KNOCKOUT_TEST_DATA", Path(__file__).parents[1].parent / "shared" / "data")
)
RESPONSES = [
    "",
    "Hello world",
    "12345 !!!",
    "Here is my answer. It has two sentences, a comma and LOUD words.\n\nP.S. Bye.",
    '{"title": "<<a song>>"}',
    "* one\n* two\n* three\n\n***\n\nSECTION 1\nwords words words\n\nIs there anything else?",
]
GRADE_ALL = """
import json, random, sys
from pathlib import Path
import numpy as np
from knockout.grading.ifeval import grade_ifeval
records, responses = json.loads(Path(sys.argv[1]).read_text("utf-8"))
pairs = [(i, j) for i in range(len(records)) for j in range(len(responses))]
random.seed(int(sys.argv[2])); np.random.seed(int(sys.argv[2]))
if sys.argv[2] == "2":
    pairs.reverse()
before = random.getstate(), np.random.get_state()[1].tolist(), np.random.get_state()[2]
found = {f"{i} {j}": grade_ifeval(doc=records[i], response=responses[j]).correct for i, j in pairs}
assert before == (random.getstate(), np.random.get_state()[1].tolist(), np.random.get_state()[2])
print(json.dumps(found, sort_keys=True))
"""


def _in_two_processes(records: list[Any], tmp_path: Path) -> dict[str, int]:
    """The verdicts of two fresh processes, with other seeds, hashes and orders; they must agree."""
    path = tmp_path / "asked.json"
    path.write_text(json.dumps([records, RESPONSES]), encoding="utf-8")
    said = []
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", GRADE_ALL, str(path), seed],
            env=environment, capture_output=True, text=True, check=True,
        )  # fmt: skip
        said.append(json.loads(done.stdout))
    assert said[0] == said[1]
    return dict(said[0])


def test_a_grade_depends_on_record_and_response_alone(tmp_path: Path) -> None:
    path = DATA / "ifeval.jsonl"
    if not path.is_file():
        pytest.skip(f"{path} is not here")
    records = [json.loads(line) for line in path.read_text("utf-8").splitlines()[::3]]
    found = _in_two_processes(records, tmp_path)
    assert len(found) == len(records) * len(RESPONSES)
    assert 0 < sum(found.values()) < len(found)
    assert [check_doc(record) for record in records[::3] if check_doc(record)] == []


def test_what_a_record_leaves_out_is_drawn_from_the_record(tmp_path: Path) -> None:
    """Every instruction of the checker without its arguments, in two processes and many calls."""
    prepare()
    from lm_eval.tasks.ifeval.instructions_registry import INSTRUCTION_DICT

    records = [
        {"prompt": f"x{i}", "instruction_id_list": [name], "kwargs": [{}]}
        for name in INSTRUCTION_DICT
        for i in range(3)
        if "repeat" not in name
    ]
    usable = [record for record in records if check_doc(record) is None]
    assert len(usable) > 45
    found = _in_two_processes(usable, tmp_path)
    for i, record in enumerate(usable):
        for j in (3, 5):
            again = {grade_ifeval(doc=record, response=RESPONSES[j]).correct for _ in range(5)}
            assert again == {found[f"{i} {j}"]}


@pytest.mark.parametrize(
    ("instruction", "kwargs", "said"),
    [
        ("punctuation:no_comma", {"num_words": 3}, "punctuation:no_comma do not fit"),
        ("length_constraints:number_words", {"num_wrods": 3}, "num_wrods"),
        (
            "length_constraints:number_words",
            {"num_words": "three", "relation": "at least"},
            "three",
        ),
        ("length_constraints:number_words", {"num_words": 3, "relation": "about"}, "about"),
        ("language:response_language", {"language": "xx"}, "language:response_language"),
    ],
)
def test_wrong_arguments_are_told(instruction: str, kwargs: dict[str, Any], said: str) -> None:
    assert said in (check_doc(doc(instruction, **kwargs)) or "")


def test_null_arguments_are_none_at_all() -> None:
    assert check_doc(doc("punctuation:no_comma", num_words=None)) is None
