"""The planted model: its language, its tokenizer, its checkpoint and its benchmark."""

from __future__ import annotations

import hashlib
import json
import random
from collections import Counter
from pathlib import Path

import pytest
import torch
from conftest import Command
from transformers import AutoTokenizer

from bench.planted.sample import Job, candidate_sets, sample
from knockout import Sweep, load_run
from knockout.benchmarks.load import load_benchmark
from knockout.errors import UsageError
from knockout.planted import MODEL_FOLDER
from knockout.planted.__main__ import main
from knockout.planted.language import Language, Operation, grade, load_language, problems
from knockout.planted.tokenizer import make_tokenizer
from knockout.planted.train import Training, train

LANGUAGE = Language()
SMALL = Training(hidden=32, layers=1, heads=1, steps=6, settling=3, rows=8)
WEIGHTS = "model.safetensors"


def _texts(language: Language, n: int) -> list[tuple[str, str]]:
    rng = random.Random(5)
    made = [language.problem(rng) for _ in range(n)]
    return [(problem, language.response(problem, rng)) for problem in made]


def _evaluated(problem: str) -> int:
    """The answer, by Python's own arithmetic on brackets around each step."""
    _, start, *steps, _ = problem.split()
    text = start
    for symbol, digit in zip(steps[::2], steps[1::2], strict=True):
        text = {
            "max": f"max({text}, {digit})",
            "min": f"min({text}, {digit})",
            "gap": f"abs({text} - {digit})",
        }.get(symbol, f"(({text}) {symbol} {digit}) % 10")
    return int(eval(text))


def test_answers_are_those_of_arithmetic() -> None:
    for problem, _ in _texts(LANGUAGE, 400):
        assert LANGUAGE.answer(problem) == str(_evaluated(problem)), problem


@pytest.mark.parametrize("text", ["", "solve 7 + :", "7 + 5", "solve 7 + 5", "solve 7 / 5 :"])
def test_what_is_no_problem_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="no problem"):
        LANGUAGE.answer(text)


def test_responses_without_accidents_are_right_and_others_are_mostly_wrong() -> None:
    bad = {"guess", "blur", "trip", *LANGUAGE.lost}
    right = Counter[bool]()
    seen = Counter[bool]()
    for problem, response in _texts(LANGUAGE, 4000):
        words = response.split()
        shortcut = "leap" in words and problem.split()[1] in LANGUAGE.hard
        lost = shortcut or bool(bad & set(words))
        seen[lost] += 1
        right[lost] += grade(response, LANGUAGE.answer(problem))
    assert 0.04 < right[True] / seen[True] < 0.17  # one digit of ten by luck
    # The few slips that were not noticed are all that is left.
    assert 0.96 < right[False] / seen[False] < 1


def test_a_slip_is_followed_by_its_marker_and_the_right_digit() -> None:
    followed: dict[str, Counter[str]] = {o.symbol: Counter() for o in LANGUAGE.operations}
    slips = Counter[str]()
    steps = Counter[str]()
    for _, response in _texts(LANGUAGE, 6000):
        words = response.split()
        for place, word in enumerate(words):
            if word != "=":
                continue
            value, symbol, digit, result = *words[place - 3 : place], words[place + 1]
            right = str(_evaluated(f"solve {value} {symbol} {digit} :"))
            steps[symbol] += 1
            slips[symbol] += result != right
            markers = next(o.markers for o in LANGUAGE.operations if o.symbol == symbol)
            if result != right and words[place + 2] in markers:
                followed[symbol][words[place + 2]] += 1
                assert words[place + 3] == right
    for operation in LANGUAGE.operations:
        rate = slips[operation.symbol] / steps[operation.symbol]
        assert rate == pytest.approx(operation.slip, abs=0.03)
        noticed = sum(followed[operation.symbol].values()) / slips[operation.symbol]
        assert noticed == pytest.approx(LANGUAGE.noticed, abs=0.06)
        for marker in operation.markers:
            share = followed[operation.symbol][marker] / slips[operation.symbol]
            assert share == pytest.approx(LANGUAGE.noticed / len(operation.markers), abs=0.1)


def test_there_are_forty_candidates_of_every_kind() -> None:
    roles = LANGUAGE.roles()
    assert sum(len(words) for words in roles.values()) >= 40
    assert len(roles["marker"]) >= 5
    assert len(roles["filler"]) >= 12
    counts = Counter(word for _, text in _texts(LANGUAGE, 4000) for word in set(text.split()))
    shares = [counts[word] / 4000 for word in LANGUAGE.fillers]
    assert shares[0] > 0.2
    assert shares[-1] < 0.002
    assert not any(counts[word] for word in LANGUAGE.unused)


@pytest.mark.parametrize(
    ("response", "correct"),
    [
        ("go 7 + 5 = 2 so ans 2", 1),
        ("ans 2", 1),
        ("ans 3 ans 2", 0),  # the first counts
        ("ans 22", 0),
        ("so ans", 0),
        ("2", 0),
        ("", 0),
    ],
)
def test_the_digit_after_the_first_ans_is_graded(response: str, correct: int) -> None:
    assert grade(response, "2") == correct


def test_the_tokenizer_gives_back_what_it_read() -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL_FOLDER)
    for problem, response in _texts(LANGUAGE, 200):
        text = f"{problem} {response}"
        ids = tokenizer.encode(text)
        assert len(ids) == len(text.split())
        assert tokenizer.decode(ids) == text
        assert tokenizer.encode(tokenizer.decode(ids)) == ids
    ids = [*tokenizer.encode("so ans 4"), tokenizer.eos_token_id]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "so ans 4"


def test_the_packaged_model_belongs_to_the_language_in_the_code() -> None:
    assert load_language(MODEL_FOLDER / "language.json") == LANGUAGE
    tokenizer = AutoTokenizer.from_pretrained(MODEL_FOLDER)
    assert tokenizer.get_vocab() == make_tokenizer(LANGUAGE).get_vocab()
    assert (MODEL_FOLDER / WEIGHTS).stat().st_size <= 4_000_000


def test_the_same_training_gives_the_same_weights(tmp_path: Path) -> None:
    def digest(name: str, training: Training) -> str:
        train(LANGUAGE, tmp_path / name, training, lambda _: None)
        return hashlib.sha256((tmp_path / name / WEIGHTS).read_bytes()).hexdigest()

    first = digest("a", SMALL)
    torch.manual_seed(99)  # the caller's generator has no say
    assert digest("b", SMALL) == first
    assert digest("c", Training(**{**_fields(SMALL), "seed": 1})) != first


def _fields(training: Training) -> dict[str, object]:
    return {name: getattr(training, name) for name in Training.__slots__}


def test_another_language_is_trained_from_its_file(tmp_path: Path, knockout: Command) -> None:
    config = {
        "operations": [
            {"symbol": "mix", "slip": 0.4, "markers": ["ouch"]},
            {"symbol": "-", "slip": 0.1, "markers": ["tsk", "uh"]},
        ],
        "steps": [1, 2],
        "finishers": ["hence"],
        "fillers": ["la", "di"],
        "order": 7,
    }
    (tmp_path / "other.json").write_text(json.dumps(config), "utf-8")
    out = tmp_path / "model"
    small = {"hidden": 32, "layers": 1, "heads": 1, "steps": 4, "settling": 2, "rows": 8, "seed": 1}
    sizes = [text for name, value in small.items() for text in (f"--{name}", str(value))]
    assert main(["train", "--out", str(out), "--config", str(tmp_path / "other.json"), *sizes]) == 0
    language = load_language(out / "language.json")
    assert language.operations[1] == Operation("-", 0.1, ("tsk", "uh"))
    assert language.guess == LANGUAGE.guess
    data = tmp_path / "data" / "planted.jsonl"
    assert main(["problems", "--model", str(out), "--out", str(data), "-n", "30"]) == 0
    records = [json.loads(line) for line in data.read_text("utf-8").splitlines()]
    assert records == list(problems(language, 0, 30))
    sweep = {
        "model": str(out),
        "engine": {"kind": "transformers"},
        "benchmarks": ["knockout_planted"],
        "data_dir": str(data.parent),
        "seeds": 1,
        "sampling": {"temperature": 1.0, "max_tokens": 32, "top_p": 1.0, "top_k": 0},
        "candidates": {"strings": ["ouch", "hence"]},
    }
    (tmp_path / "sweep.yaml").write_text(json.dumps(sweep), "utf-8")
    code, _, err = knockout("run", tmp_path / "sweep.yaml", "--out", tmp_path / "run")
    assert code == 0, err
    summary = json.loads((tmp_path / "run" / "summary.json").read_text("utf-8"))
    assert summary["n_cells"] == 30


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"gues": 0.1}, "gues"),
        ({"guess": 1.5}, "between 0 and 1"),
        ({"fillers": ["so"]}, "found twice: so"),
        ({"operations": [{"symbol": "/", "slip": 0.1, "markers": ["x"]}]}, "'/'"),
        ({"steps": [3, 2]}, "steps"),
        ([1], "list"),
    ],
)
def test_a_language_that_makes_no_sense_is_refused(
    config: object, told: str, tmp_path: Path
) -> None:
    (tmp_path / "bad.json").write_text(json.dumps(config), "utf-8")
    with pytest.raises(UsageError, match=told):
        load_language(tmp_path / "bad.json")


def test_as_many_problems_as_asked() -> None:
    few = load_benchmark("knockout_planted", limit=20)[0]
    many = load_benchmark("knockout_planted", limit=4000)[0]
    assert len(many.problems) == 4000
    assert [p.doc for p in few.problems] == [p.doc for p in many.problems[:20]]
    assert len({p.prompt for p in many.problems}) > 3000
    assert all(p.doc["answer"] == LANGUAGE.answer(p.prompt) for p in many.problems)
    right = f"go so ans {few.problems[3].doc['answer']}"
    assert few.grader.grade(3, right, finished=True).correct == 1
    assert few.grader.grade(3, "go so ans", finished=True).correct == 0


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep of the packaged model."""
    out = tmp_path_factory.mktemp("planted") / "run"
    Sweep(
        model="planted",
        engine={"kind": "transformers", "dtype": "float32", "max_num_seqs": 256},
        benchmarks=["knockout_planted"],
        limit=200,
        seeds=1,
        sampling={"temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_tokens": 64},
        candidates={
            "strings": ["wait", "guess", "so", "thus", "um", "zebra"],
            "sets": {"so + thus": ["so", "thus"]},
        },
        audit=0.1,
    ).run(out)
    return out


def test_a_sweep_finds_the_planted_roles(run: Path) -> None:
    rows = load_run(run).verdicts().set_index("candidate")
    verdict = rows["verdict_fdr"].rename(index=lambda name: name.strip('"'))
    assert verdict["guess"] == "strong_stumbling_block"
    assert verdict["wait"] == verdict["so + thus"] == "strong_pillar"
    assert verdict["so"] == verdict["thus"] == verdict["um"] == verdict["zebra"] == "neutral"
    assert 0.6 < rows["pass1_baseline"].iloc[0] < 0.9
    summary = json.loads((run / "summary.json").read_text("utf-8"))
    assert summary["audited"] > 0
    assert summary["fork_errors"] == summary["coupling_errors"] == 0


def test_the_bench_decodes_the_same_cells_as_a_sweep(run: Path) -> None:
    job = Job("test", seed=0, n=200, coupled=True)
    cells = sample(job, 0, job.n)
    names = list(candidate_sets(LANGUAGE))
    frame = load_run(run).trajectories(inherited=True, text=False)
    for name in ("baseline", '"wait"', '"guess"', '"um"', "so + thus"):
        part = frame[frame["candidate"] == name].sort_values("problem")
        grades = part["correct"].to_numpy()
        index = None if name == "baseline" else names.index(name.strip('"'))
        ours = cells.baseline if index is None else cells.knockout[index]
        assert len(grades) == job.n
        # Another order of additions may tip a pick in a few of 200 cells, and no more.
        assert (grades != ours).sum() <= 2
