"""What docs/extending.md shows works for an installed package, in the processes that grade."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from child_runs import sweep_file

from knockout.benchmarks.load import load_benchmark
from knockout.config.file import load_sweep
from knockout.engines.open import choose_kind
from knockout.errors import UsageError
from knockout.grading.registry import find_grader
from knockout.ledger import Ledger
from knockout.registry import Registry
from knockout.sweep.run import run_sweep

PAGE = Path(__file__).parents[1] / "docs" / "extending.md"
DOC = {"question": "Who proved it?", "name": "Noether"}


def block(language: str, part: str = "A grader") -> str:
    section = PAGE.read_text(encoding="utf-8").split(f"\n## {part}\n")[1].split("\n## ")[0]
    return re.findall(rf"```{language}\n(.*?)```", section, re.DOTALL)[0]


def install(folder: Path, part: str = "A grader") -> None:
    """A part's module as an installed package."""
    entry_points = block("toml", part)
    module = entry_points.split("my_package.")[1].split('"')[0]
    (folder / "my_package").mkdir()
    (folder / "my_package" / "__init__.py").touch()
    (folder / "my_package" / f"{module}.py").write_text(block("python", part), encoding="utf-8")
    info = folder / "my_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-package\nVersion: 1.0\n")
    group, _, entry = entry_points.partition("\n")
    (info / "entry_points.txt").write_text(
        group.replace('project.entry-points."', "").replace('"]', "]")
        + "\n"
        + entry.replace('"', "")
    )


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """The page's grader as an installed package, with its task."""
    install(tmp_path)
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "who.yaml").write_text(block("yaml"), encoding="utf-8")
    return tmp_path


def test_a_grader_of_a_package_grades_in_the_workers(package: Path) -> None:
    answers = ["It was Emmy Noether.", "Hilbert", "nobody", None]
    (package / "answers.jsonl").write_text(
        "".join(json.dumps({"doc": DOC, "response": text}) + "\n" for text in answers)
    )
    command = ["-m", "knockout", "grade", "who", "answers.jsonl", "--include-path", "tasks"]
    path = os.pathsep.join([str(package), str(PAGE.parents[1])])
    done = subprocess.run(
        [sys.executable, *command],
        cwd=package,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(row["correct"], row["status"]) for row in rows] == [
        (1, "ok"),
        (0, "ok"),
        (0, "unparsed"),
        (0, "error"),
    ]


def test_an_unknown_grader_is_refused_by_name(package: Path) -> None:
    task = package / "tasks" / "who.yaml"
    task.write_text(task.read_text().replace("names}", "noone}"))
    (package / "who.jsonl").write_text(json.dumps(DOC) + "\n")
    with pytest.raises(UsageError, match="found knockout_grader 'noone'; expected one of maths"):
        load_benchmark("who", data_dir=package, include_path=package / "tasks")


def test_what_a_task_may_ask_for() -> None:
    assert find_grader("maths").fields == find_grader("integer").fields
    assert find_grader("ifeval").metric == "prompt_level_strict_acc"
    assert "it lacks kwargs" in str(
        find_grader("ifeval").check({"prompt": "", "instruction_id_list": []})
    )


def test_a_name_is_taken_once_but_its_module_may_be_read_again() -> None:
    kinds: Registry[int] = Registry("number", "knockout.no_such_group")
    kinds.add("one", 1, int)
    kinds.add("one", 1, int)
    with pytest.raises(UsageError, match=r"'one' exists already, from builtins\.int"):
        kinds.add("one", 2, str)
    assert (kinds.names(), kinds.find("one")) == (("one",), 1)
    with pytest.raises(UsageError, match="found number 'two'; expected one of one"):
        kinds.find("two")


def test_an_engine_of_a_package_runs_a_sweep(tmp_path: Path) -> None:
    """Every token and every divergence step is what the transformers engine gives."""
    install(tmp_path, "An engine")
    path = sweep_file(tmp_path, n_problems=6, audit=0.5)
    done = subprocess.run(
        [sys.executable, "-m", "knockout", "run", path.name, "--out", "plain", "engine.kind=plain"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(PAGE.parents[1])])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    run_sweep(load_sweep(path, ["engine.kind=transformers"]), tmp_path / "transformers")
    found = [
        json.loads((tmp_path / k / "summary.json").read_text()) for k in ("plain", "transformers")
    ]
    assert found[0]["engine"]["kind"] == "plain"
    assert found[0]["forks"] > 3
    assert found[0]["fork_errors"] == found[0]["coupling_errors"] == 0
    with (
        Ledger.open(tmp_path / "plain" / "run.db") as one,
        Ledger.open(tmp_path / "transformers" / "run.db") as other,
    ):
        assert sorted(map(repr, zip(*one.decided(), strict=True))) == sorted(
            map(repr, zip(*other.decided(), strict=True))
        )
        for key in one.decided()[0]:
            for c in range(-1, len(one.candidates)):
                assert one.trajectory(key, c).tolist() == other.trajectory(key, c).tolist()


def test_a_kind_of_engine_that_is_none_is_refused_by_name() -> None:
    with pytest.raises(
        UsageError,
        match=r"engine.kind: found 'plane'; expected one of auto, ray, vllm, transformers",
    ):
        choose_kind("plane")
