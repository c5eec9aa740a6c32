"""Loading tasks of lm-eval, and grading through them."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from knockout.benchmarks import Chat, encode_prompt, load_benchmark
from knockout.benchmarks.find import find_leaves, own_tasks
from knockout.benchmarks.saved import grade_file
from knockout.errors import KnockoutError, UsageError
from knockout.grading.graders import IfevalGrader, MathsGrader, TaskGrader
from knockout.grading.pool import GraderPool
from knockout.tokens.checkpoint import load_tokenizer, resolve_model

LOCAL = Path(__file__).parent / "data" / "tasks"
DATA = Path(
    os.environ.get("KNOCKOUT_TEST_DATA", Path(__file__).parents[1].parent / "shared" / "data")
)
MATHS_ROWS = [
    {"id": "a", "problem": "What is $1+1$?", "answer": "2"},
    {"id": "b", "problem": "What is $1-3$?", "answer": "-2"},
]


def write_rows(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(resolve_model("smollm2-135m"))


def test_maths_from_local_files(tmp_path: Path) -> None:
    write_rows(tmp_path / "math500.jsonl", MATHS_ROWS)
    (benchmark,) = load_benchmark("knockout_math500", data_dir=tmp_path)
    assert benchmark.metric == "exact_match"
    assert [p.doc_id for p in benchmark.problems] == ["a", "b"]
    assert benchmark.problems[0].prompt.startswith("What is $1+1$?")
    assert r"\boxed{}" in benchmark.problems[0].prompt
    assert benchmark.problems[0].stop == ()
    assert isinstance(benchmark.grader, MathsGrader)
    assert benchmark.grader.grade(1, r"\boxed{-2}", finished=True).correct == 1
    assert benchmark.grader.grade(1, r"\boxed{2}", finished=True).correct == 0


def test_fields_of_the_hub_are_understood(tmp_path: Path) -> None:
    rows = [
        {"ID": 61, "Problem": "1+1?", "Answer": "002"},
        {"ID": 62, "Problem": "p", "Answer": "3"},
    ]
    sys.path.insert(0, str(own_tasks()))
    try:
        import knockout_tasks
    finally:
        sys.path.pop(0)
    import datasets

    docs = knockout_tasks.maths_docs(datasets.Dataset.from_list(rows))
    assert docs[0] == {"id": "61", "problem": "1+1?", "answer": "002"}
    numbers = datasets.Dataset.from_list([{"problem_idx": 7, "problem": "p", "answer": 3}])
    assert knockout_tasks.maths_docs(numbers)[0] == {"id": "7", "problem": "p", "answer": "3"}
    with pytest.raises(KeyError, match="expected one of problem"):
        knockout_tasks.maths_docs(datasets.Dataset.from_list([{"x": 1, "answer": "1"}]))


def test_fingerprint_follows_what_is_asked(tmp_path: Path) -> None:
    def fingerprint(rows: list[dict[str, str]], **options: Any) -> str:
        write_rows(tmp_path / "math500.jsonl", rows)
        return load_benchmark("knockout_math500", data_dir=tmp_path, **options)[0].fingerprint

    first = fingerprint(MATHS_ROWS)
    assert fingerprint(MATHS_ROWS) == first
    assert fingerprint(MATHS_ROWS, limit=1) != first
    assert fingerprint([MATHS_ROWS[0], {**MATHS_ROWS[1], "answer": "-3"}]) != first
    assert fingerprint([MATHS_ROWS[0], {**MATHS_ROWS[1], "problem": "?"}]) != first


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([MATHS_ROWS[0], {"problem": "x"}], r"line 2: field 'answer'"),
        ([MATHS_ROWS[0], ["x"]], r"line 2: expected an object"),
        ([], "contains no records"),
    ],
)
def test_wrong_records_are_told(tmp_path: Path, rows: list[Any], message: str) -> None:
    write_rows(tmp_path / "math500.jsonl", rows)
    with pytest.raises(UsageError, match=message):
        load_benchmark("knockout_math500", data_dir=tmp_path)


def test_a_missing_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"aime24\.jsonl is missing.*problem, answer"):
        load_benchmark("knockout_aime24", data_dir=tmp_path)


def test_an_unreachable_hub_is_told_at_once(tmp_path: Path) -> None:
    program = (
        "from knockout.benchmarks import load_benchmark\n"
        "from knockout.errors import KnockoutError\n"
        "import time\n"
        "start = time.monotonic()\n"
        "try: load_benchmark('knockout_aime25')\n"
        "except KnockoutError as error: print(type(error).__name__, error)\n"
        "print(time.monotonic() - start)\n"
    )
    environment = {**os.environ, "HF_HOME": str(tmp_path), "HF_ENDPOINT": "http://127.0.0.1:9"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True
    )
    message, seconds = done.stdout.splitlines()
    assert message.startswith("KnockoutError knockout_aime25: the data set math-ai/aime25")
    assert "data_dir" in message
    assert "aime25.jsonl" in message
    assert float(seconds) < 60
    assert done.stderr == ""


def test_tasks_that_cannot_be_used_are_told() -> None:
    with pytest.raises(UsageError, match=r"multiple_choice.*generate_until"):
        load_benchmark("local_choice", include_path=LOCAL)
    with pytest.raises(UsageError, match="limit is 0"):
        load_benchmark("local_sums", include_path=LOCAL, limit=0)
    with pytest.raises(UsageError, match="no folder"):
        load_benchmark("local_sums", include_path=LOCAL / "nowhere")


def test_an_unknown_task_and_a_broken_file_are_told(tmp_path: Path) -> None:
    (tmp_path / "broken.yaml").write_text("task: [")
    with pytest.raises(UsageError, match=r"knockout_ifeval.*\n.*broken\.yaml cannot be read"):
        load_benchmark("knockout_ifevall", include_path=tmp_path)
    # A word that many of lm-eval's own files mention.
    with pytest.raises(UsageError, match="no benchmark 'words'"):
        load_benchmark("words")


def test_a_task_of_lm_eval_is_graded_by_itself() -> None:
    start = time.monotonic()
    (benchmark,) = load_benchmark("local_sums", include_path=LOCAL)
    assert time.monotonic() - start < 60
    assert benchmark.metric == "exact_match,strict-match"
    assert len(benchmark.problems) == 3
    first = benchmark.problems[0]
    assert first.stop == ("Question:", "</s>")
    assert first.max_tokens == 64
    assert first.prompt.count("Question:") == 3  # two examples and the problem
    assert first.prompt.endswith("Question: 10 + 20?\nAnswer:")
    assert isinstance(benchmark.grader, TaskGrader)
    with GraderPool([benchmark], timeout_s=20, memory_mb=2048) as pool:
        responses = {
            "right": (1, "Add. #### 1,500"),
            "wrong": (1, "Add. #### 1,501"),
            "unparsed": (1, "1500"),
            "think": (0, "<think>#### 1</think> #### 30"),
        }
        for key, (index, response) in responses.items():
            pool.submit(key, "local_sums", index, response, True)
        grades = {}
        while pool.n_open:
            grades.update(pool.poll())
            time.sleep(0.01)
    assert {k: (g.correct, g.status) for k, g in grades.items()} == {
        "right": (1, "ok"),
        "wrong": (0, "ok"),
        "unparsed": (0, "unparsed"),
        "think": (1, "ok"),
    }
    assert grades["right"].extracted == "1,500"


def test_another_filter_can_be_chosen() -> None:
    metric = "exact_match,flexible-extract"
    (benchmark,) = load_benchmark("local_sums", include_path=LOCAL, metric=metric, num_fewshot=0)
    assert benchmark.metric == metric
    assert benchmark.problems[0].prompt == "Question: 10 + 20?\nAnswer:"
    grader = pickle.loads(pickle.dumps(benchmark.grader))
    assert grader.grade(1, "It is 1500", finished=True).correct == 1
    with pytest.raises(UsageError, match="strict-match, flexible-extract"):
        load_benchmark("local_sums", include_path=LOCAL, metric="exact_match,none")


def test_metrics_that_are_no_grade_are_refused() -> None:
    (benchmark,) = load_benchmark("local_shares", include_path=LOCAL)
    assert benchmark.metric == "acc"
    with pytest.raises(UsageError, match=r"'share' is not 0 or 1.*first, acc"):
        load_benchmark("local_shares", include_path=LOCAL, metric="share")
    with pytest.raises(UsageError, match=r"no metric 'nope'; it has share, first, acc"):
        load_benchmark("local_shares", include_path=LOCAL, metric="nope")


def test_a_group_of_the_user_may_name_tasks_of_lm_eval(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("group: mine\ntask: [gsm8k, knockout_starter_arithmetic]\n")
    write_rows(tmp_path / "gsm8k.jsonl", [{"question": "3?", "answer": "#### 3"}] * 6)
    mine = load_benchmark("mine", include_path=tmp_path, data_dir=tmp_path, limit=2, num_fewshot=0)
    assert [b.name for b in mine] == ["gsm8k", "knockout_starter_arithmetic"]
    (tmp_path / "mine.yaml").write_text("group: mine\ntask: [knockout_nowhere]\n")
    with pytest.raises(UsageError, match="'knockout_nowhere', which is no task"):
        load_benchmark("mine", include_path=tmp_path)


def test_groups_and_tags_stand_for_their_tasks() -> None:
    group = load_benchmark("local_group", include_path=LOCAL, limit=2)
    assert [b.name for b in group] == ["local_sums", "knockout_starter_arithmetic"]
    tag = load_benchmark("local_tag", include_path=LOCAL, limit=1)
    assert [b.name for b in tag] == ["local_shares", "local_sums"]


def test_groups_inside_groups_are_what_lm_eval_makes_of_them() -> None:
    from lm_eval.tasks import TaskManager

    benchmarks = load_benchmark("local_nested", include_path=LOCAL, limit=2)
    inline = "local_nested::inner::local_inline"
    assert [b.name for b in benchmarks] == [
        "local_shares", inline, "local_sums", "knockout_starter_arithmetic"
    ]  # fmt: skip
    manager = TaskManager(include_path=[str(own_tasks()), str(LOCAL)], include_defaults=False)
    theirs = manager.load(["local_nested"])["tasks"]
    assert set(theirs) == {b.name for b in benchmarks}
    for benchmark in benchmarks:
        task = theirs[benchmark.name]
        task.set_fewshot_seed(1234)
        task.build_all_requests(limit=2)
        assert [p.prompt for p in benchmark.problems] == [i.args[0] for i in task.instances]
    grader = pickle.loads(pickle.dumps(benchmarks[1].grader))
    gold = theirs[inline].doc_to_target(benchmarks[1].problems[0].doc)
    assert grader.grade(0, gold, finished=True).correct == 1
    assert grader.grade(0, "no", finished=True).correct == 0


def test_tasks_that_a_stock_group_defines_are_found(tmp_path: Path) -> None:
    _, leaves = find_leaves("flan_held_in", None)
    assert len(leaves) == len(dict(leaves)) == 59  # of its 60, two have one name
    assert leaves[0][0] == "flan_held_in::anli_r1_flan::anli_r1_prompt-0"
    # lm-eval names no data set for it, so it only loads from a file.
    (tmp_path / "one.yaml").write_text(
        "group: one\ntask:\n- {task: anli_one, include: part, doc_to_text: '{{premise}}'}\n"
    )
    (tmp_path / "part").write_text(
        "output_type: generate_until\ndoc_to_target: 'Yes'\ndoc_to_text: x\ntest_split: test\n"
        "dataset_path: json\nmetric_list: [{metric: exact_match}]\n"
    )
    write_rows(tmp_path / "anli_one.jsonl", [{"premise": "All is well."}])
    (one,) = load_benchmark("one", include_path=tmp_path, data_dir=tmp_path)
    assert one.name == "one::anli_one"
    assert one.problems[0].prompt == "All is well."
    graded = "process_results: !function grading.graded\n"
    (tmp_path / "grading.py").write_text("def graded(doc, results): return {'acc': 1}\n")
    (tmp_path / "part").write_text((tmp_path / "part").read_text() + graded)
    with pytest.raises(UsageError, match="put the task into a file of its own"):
        load_benchmark("one", include_path=tmp_path, data_dir=tmp_path)


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ("[{doc_to_text: x}]", 'expected "task" or "group" with a name'),
        ("[{task: [local_sums]}]", 'expected "task" or "group" with a name'),
        ("[5]", "found 5"),
        ("[{group: mine}]", "contains itself"),
        ("[{group: inner, task: [knockout_nowhere]}]", "'knockout_nowhere', which is no task"),
        ("[{task: knockout_nowhere, num_fewshot: 1}]", "'knockout_nowhere', which is no task"),
        ("[]", "names no task"),
        ("[{task: x, include: nowhere}]", "nowhere cannot be read"),
    ],
)
def test_groups_that_are_wrong_are_told(tmp_path: Path, members: str, message: str) -> None:
    (tmp_path / "mine.yaml").write_text(f"group: mine\ntask: {members}\n")
    with pytest.raises(UsageError, match=message):
        load_benchmark("mine", include_path=tmp_path)


def test_a_stock_task_with_local_records(tmp_path: Path) -> None:
    write_rows(
        tmp_path / "gsm8k.jsonl", [{"question": f"{n}?", "answer": f"#### {n}"} for n in (3, 4)]
    )
    (benchmark,) = load_benchmark("gsm8k", data_dir=tmp_path, num_fewshot=1)
    assert benchmark.problems[0].prompt == "Question: 4?\nAnswer: #### 4\n\nQuestion: 3?\nAnswer:"
    assert benchmark.grader.grade(0, "so #### 3", finished=True).correct == 1


def test_chat_template(tokenizer: Any) -> None:
    chat = Chat(system="Be brief.")
    (benchmark,) = load_benchmark(
        "local_sums", include_path=LOCAL, num_fewshot=1, chat=chat, tokenizer=tokenizer
    )
    prompt = benchmark.problems[0].prompt
    assert prompt.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n")
    assert prompt.endswith("10 + 20?\nAnswer:<|im_end|>\n<|im_start|>assistant\n")
    assert prompt.count("<|im_start|>assistant") == 2  # the example's answer is a turn
    ids = encode_prompt(tokenizer, benchmark.problems[0], chat)
    assert tokenizer.decode(ids) == prompt
    plain = Chat(template=False)
    (bare,) = load_benchmark("local_sums", include_path=LOCAL, chat=plain, tokenizer=tokenizer)
    assert bare.fingerprint != benchmark.fingerprint
    tokenizer_without = type("NoTemplate", (), {"chat_template": None})()
    with pytest.raises(UsageError, match="chat template"):
        load_benchmark("local_sums", include_path=LOCAL, chat=chat, tokenizer=tokenizer_without)


def test_one_beginning_of_text_token() -> None:
    class Bos:
        bos_token = "<s>"

        def encode(self, text: str, add_special_tokens: bool) -> list[int]:
            return [1] * (add_special_tokens + text.startswith("<s>")) + [5]

    (benchmark,) = load_benchmark("local_sums", include_path=LOCAL, limit=1)
    problem = benchmark.problems[0]
    with_bos = type(problem)(
        **{n: getattr(problem, n) for n in problem.__slots__} | {"prompt": "<s>x"}
    )
    assert encode_prompt(Bos(), problem, Chat(template=False)) == (1, 5)
    assert encode_prompt(Bos(), with_bos, Chat(template=False)) == (1, 5)
    assert encode_prompt(Bos(), with_bos, Chat(template=True)) == (1, 5)


@pytest.mark.parametrize(
    ("name", "n"), [("knockout_starter_arithmetic", 80), ("knockout_starter_instructions", 50)]
)
def test_starter_tasks_need_no_network(name: str, n: int, tmp_path: Path) -> None:
    (benchmark,) = load_benchmark(name, data_dir=tmp_path)
    assert len(benchmark.problems) == n
    assert len({p.prompt for p in benchmark.problems}) == n
    if name.endswith("arithmetic"):
        for i, problem in enumerate(benchmark.problems):
            gold = problem.doc["answer"]
            assert benchmark.grader.grade(i, f"It is {gold}.", finished=True).correct == 1
            assert benchmark.grader.grade(i, f"It is {gold}1.", finished=True).correct == 0
    else:
        assert isinstance(benchmark.grader, IfevalGrader)


def test_real_files_load() -> None:
    if not (DATA / "ifeval.jsonl").is_file():
        pytest.skip(f"{DATA} is not here")
    suite = load_benchmark("knockout_suite", data_dir=DATA)
    assert {b.name: len(b.problems) for b in suite} == {
        "knockout_math500": 500,
        "knockout_aime24": 30,
        "knockout_aime25": 30,
        "knockout_hmmt25": 30,
        "knockout_ifeval": 541,
    }
    assert all(len({p.doc_id for p in b.problems}) == len(b.problems) for b in suite)


def test_saved_responses_are_graded_in_order(tmp_path: Path) -> None:
    rows: list[Any] = [
        {"answer": "7", "response": r"\boxed{8}"},
        {"answer": "7", "response": r"\boxed{7}"},
        {"doc": {"problem": "?", "answer": "7"}, "response": "no idea"},
        {"answer": "7", "response": None},
    ]
    path = write_rows(tmp_path / "saved.jsonl", rows)
    graded = list(grade_file("knockout_math500", path))
    assert [(g["correct"], g["status"]) for g in graded] == [
        (0, "ok"),
        (1, "ok"),
        (0, "unparsed"),
        (0, "error"),
    ]
    assert graded[0]["extracted"] == "8"
    doc = {"question": "3 + 4?", "answer": "7"}
    path = write_rows(tmp_path / "own.jsonl", [{"doc": doc, "response": "It is 7."}])
    assert [g["correct"] for g in grade_file("knockout_starter_arithmetic", path)] == [1]
    record = {"prompt": "x", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}
    path = write_rows(tmp_path / "ifeval.jsonl", [{"doc": record, "response": "a, b"}])
    assert [g["correct"] for g in grade_file("knockout_ifeval", path)] == [0]


@pytest.mark.parametrize(
    ("task", "line", "message"),
    [
        ("knockout_math500", "{", "line 2: not JSON"),
        ("knockout_math500", '{"answer": "7"}', 'line 2: expected an object with "response"'),
        ("knockout_math500", '{"response": "7"}', 'line 2: expected "answer"'),
        ("knockout_math500", '{"response": 7, "answer": "7"}', 'line 2: "response" should be text'),
    ],
)
def test_wrong_lines_are_told(tmp_path: Path, task: str, line: str, message: str) -> None:
    path = tmp_path / "saved.jsonl"
    path.write_text('{"answer": "7", "response": "7"}\n' + line + "\n")
    with pytest.raises(UsageError, match=message):
        list(grade_file(task, path))
    with pytest.raises(KnockoutError, match="cannot be read"):
        list(grade_file(task, tmp_path / "missing.jsonl"))


def test_a_benchmark_loads_with_an_unreadable_gold(tmp_path: Path) -> None:
    rows = [MATHS_ROWS[0], {"problem": "x", "answer": r"\frac{1}{", "id": "bad"}]
    write_rows(tmp_path / "math500.jsonl", rows)
    (benchmark,) = load_benchmark("knockout_math500", data_dir=tmp_path)
    assert benchmark.as_text == {1: "it cannot be read as an answer"}
    assert "1 of 2 gold answers are compared as text only (id bad" in benchmark.warnings[0]
    assert benchmark.grader.grade(1, "It is 7.", finished=True).correct == 0


def test_unreadable_golds_are_named_compared_as_text_and_counted(tmp_path: Path) -> None:
    rows = [
        {"answer": "9^{9^{9}}", "response": r"\boxed{7}"},
        {"answer": "9^{9^{9}}", "response": r"\boxed{9^{9^9}}"},
        {"answer": "7", "response": r"\boxed{7}"},
        {"answer": r"\frac{1}{", "response": r"\boxed{7}"},
        {"answer": r"\frac10", "response": r"\boxed{\frac{1}{0}}"},
        {"answer": "", "response": r"\boxed{7}"},
        {"answer": "7" * 5000, "response": r"\boxed{7}"},
        {"answer": "\ud800", "response": "\ud800"},
    ]
    said: list[str] = []
    began = time.monotonic()
    graded = list(
        grade_file(
            "knockout_math500",
            write_rows(tmp_path / "g.jsonl", rows),
            timeout_s=3,
            warn=said.append,
        )
    )
    assert time.monotonic() - began < 40
    assert [g["correct"] for g in graded[:-1]] == [0, 1, 1, 0, 1, 0, 0]
    assert [n for n, g in enumerate(graded) if "gold_as_text" in g] == [0, 1, 3, 4, 5, 6, 7]
    assert len(said) == 1
    assert "7 of 8 gold answers are compared as text only (line 1, '9^{9^{9}}': " in said[0]
    path = write_rows(tmp_path / "a.jsonl", [{"answer": "7.5", "response": r"\boxed{7.5}"}])
    graded = list(grade_file("knockout_aime24", path, warn=said.append))
    assert [(g["correct"], g["gold_as_text"]) for g in graded] == [(1, "it is not a whole number")]
    assert "line 1, '7.5'" in said[-1]


def test_plain_lm_eval_finds_and_grades_our_tasks() -> None:
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(own_tasks()), include_defaults=False)
    names = {"knockout_math500", "knockout_aime24", "knockout_aime25", "knockout_hmmt25"}
    assert {*names, "knockout_ifeval", "knockout_suite"} <= set(manager.all_tasks)
    assert manager.all_groups == ["knockout_suite"]
    task = manager.load(["knockout_starter_instructions"])["tasks"]["knockout_starter_instructions"]
    doc = {"key": 0, "prompt": "", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}
    assert task.process_results(doc, ["<think>a, b</think>c"])["prompt_level_strict_acc"]
