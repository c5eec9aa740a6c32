"""The command line, end to end with a real engine, and what it says when something is wrong."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from words import word_model, word_task

from knockout.ledger import Ledger, RunLock
from knockout.ledger.schema import COMPARED_TABLES

FILES = ["config.yaml", "run.db", "run.log", "summary.json", "verdicts.csv", "verdicts.json"]
N_PROBLEMS = 60  # long enough that a run can be caught half-way on a quick machine

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sweep")
    word_model(folder / "model")
    word_task(folder, N_PROBLEMS)
    content = {
        "model": "./model",
        "engine": {"kind": "transformers", "dtype": "float32", "max_num_seqs": 2},
        "benchmarks": ["words"],
        "include_path": ".",
        "seeds": 2,
        "sampling": {"temperature": 0.9, "top_k": 12, "top_p": 0.95, "max_tokens": 10},
        "candidates": {
            "strings": [f"w{i}" for i in range(1, 7)],
            "sets": {"pair": ["w8", "w20"]},
        },
        "audit": 0.1,
    }
    path = folder / "words-sweep.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def start(*arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "knockout", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for_cells(folder: Path, n: int) -> None:
    """Until a run that goes on in another process has committed so many cells."""
    give_up = time.monotonic() + 200
    while time.monotonic() < give_up:
        try:
            with Ledger.open(folder / "run.db") as ledger:
                if ledger.query("SELECT COUNT(*) FROM cell")[0][0] >= n:
                    return
        except (Exception, sqlite3.Error):
            pass  # not made yet
        time.sleep(0.02)
    raise AssertionError(f"no {n} cells in {folder}")


def dump(folder: Path) -> dict[str, list[tuple[Any, ...]]]:
    with Ledger.open(folder / "run.db") as ledger:
        return {
            table: ledger.query(f"SELECT * FROM {table} ORDER BY 1, 2, 3, 4")
            for table in COMPARED_TABLES
        }


@pytest.fixture(scope="module")
def finished(sweep: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("finished") / "run"
    process = start("run", sweep, "--out", out)
    _, errors = process.communicate(timeout=280)
    assert process.returncode == 0, errors
    assert "Results are in" in errors
    return out


def test_help_is_quick_and_imports_nothing_heavy() -> None:
    heavy = [
        "torch",
        "numpy",
        "pandas",
        "pydantic",
        "yaml",
        "rich",
        "transformers",
        "vllm",
        "lm_eval",
        "scipy",
        "pyarrow",
    ]
    code = (
        "import sys, time; began = time.perf_counter(); from knockout.cli import main\n"
        "sys.argv = ['knockout', '--help']\n"
        "try: main()\n"
        f"finally: print(time.perf_counter() - began, [m for m in {heavy} if m in sys.modules])"
    )
    took = []
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        )
        seconds, _, found = done.stdout.strip().splitlines()[-1].partition(" ")
        assert found == "[]"
        took.append(float(seconds))
    assert min(took) < 0.5


def test_a_run_directory_holds_what_it_should(finished: Path) -> None:
    assert {p.name for p in finished.iterdir()} >= set(FILES)
    summary = json.loads((finished / "summary.json").read_text())
    n_cells = N_PROBLEMS * 2
    assert summary["complete"] is True
    assert (summary["n_cells"], summary["cells_done"]) == (n_cells, n_cells)
    assert summary["n_candidates"] == 7
    assert summary["trajectories"] == n_cells * (1 + 7 + 1)  # baseline, candidates, canary
    assert summary["forks"] + summary["inherited"] == n_cells * 8
    assert summary["tokens_generated"] < summary["tokens_naive"]
    assert summary["audited"] > 0
    assert (summary["fork_errors"], summary["coupling_errors"]) == (0, 0)
    assert summary["engine"]["kind"] == "transformers"
    assert summary["canary"]["token_ids"] == [63]
    rows = json.loads((finished / "verdicts.json").read_text())
    assert {row["candidate"] for row in rows} == {f'"w{i}"' for i in range(1, 7)} | {"pair", "A/A"}
    for row in rows:
        assert row["n_forked"] + row["n_inherited"] == n_cells
        assert row["delta"] == pytest.approx(
            row["pass1_knockout"] - row["pass1_baseline"], abs=1e-9
        )
    assert "nothing is left" not in (finished / "run.log").read_text()


def test_finished_is_a_no_op(finished: Path, sweep: Path, knockout: Command) -> None:
    before, table = dump(finished), (finished / "verdicts.json").read_bytes()
    began = time.monotonic()
    code, out, _ = knockout("run", sweep, "--out", finished, "--json")
    assert code == 0
    assert time.monotonic() - began < 60
    assert json.loads(out) == json.loads(table)
    assert (finished / "verdicts.json").read_bytes() == table
    assert dump(finished) == before
    assert "nothing is left to generate" in (finished / "run.log").read_text()


def test_killed_and_resumed_equals_undisturbed(
    finished: Path, sweep: Path, tmp_path: Path, knockout: Command
) -> None:
    out = tmp_path / "run"
    process = start("run", sweep, "--out", out)
    wait_for_cells(out, 1)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert dump(out) != dump(finished)
    code, _, errors = knockout("run", sweep, "--out", out)
    assert code == 0, errors
    assert dump(out) == dump(finished)
    for name in ("verdicts.csv", "verdicts.json"):
        assert (out / name).read_bytes() == (finished / name).read_bytes()


def test_ctrl_c_stops_cleanly_and_says_how_to_go_on(
    finished: Path, sweep: Path, tmp_path: Path, knockout: Command
) -> None:
    for attempt in range(5):  # on a busy machine the run can be over before it is caught
        out = tmp_path / f"run{attempt}"
        process = start("run", sweep, "--out", out)
        wait_for_cells(out, 1)
        process.send_signal(signal.SIGINT)
        printed, errors = process.communicate(timeout=60)
        if not json.loads((out / "summary.json").read_text())["complete"]:
            break
    assert process.returncode == 130, errors
    assert "resume with: knockout run" in errors
    assert "Traceback" not in errors + printed
    code, text, _ = knockout("status", out, "--json")
    assert (code, json.loads(text)["complete"]) == (0, False)
    assert knockout("run", sweep, "--out", out)[0] == 0
    assert dump(out) == dump(finished)


def test_another_sweep_is_refused_by_its_keys(
    finished: Path, sweep: Path, knockout: Command
) -> None:
    before = dump(finished)
    code, _, errors = knockout(
        "run", sweep, "--out", finished, "--set", "sampling.temperature=0.8", "--set",
        "candidates.strings=[w1]",
    )  # fmt: skip
    assert code == 2
    assert "belongs to another sweep" in errors
    assert "sampling.temperature: 0.9 there, 0.8 here" in errors
    assert "candidates" in errors  # which may change by themselves
    assert "--out" in errors
    assert dump(finished) == before


def test_a_second_process_is_refused(finished: Path, sweep: Path, knockout: Command) -> None:
    with RunLock(finished):
        code, _, errors = knockout("run", sweep, "--out", finished)
    assert code == 2
    assert f"process {os.getpid()} on " in errors


def test_a_folder_with_other_things_is_refused(
    sweep: Path, tmp_path: Path, knockout: Command
) -> None:
    (tmp_path / "thesis.tex").touch()
    code, _, errors = knockout("run", sweep, "--out", tmp_path)
    assert (code, "thesis.tex" in errors) == (2, True)
    code, _, errors = knockout("run", sweep, "--out", tmp_path / "thesis.tex")
    assert (code, "found a file" in errors) == (2, True)


def test_status_verdicts_and_export(finished: Path, tmp_path: Path, knockout: Command) -> None:
    code, out, _ = knockout("status", finished)
    assert code == 0
    assert f"{N_PROBLEMS * 2} of {N_PROBLEMS * 2}" in out
    code, out, _ = knockout("verdicts", finished)
    assert (code, '"w1"' in out, "pair" in out) == (0, True, True)
    code, out, _ = knockout("verdicts", finished, "--rule", "nominal", "--alpha", "0.5", "--json")
    assert code == 0
    assert all(row["verdict"] == row["verdict_nominal"] for row in json.loads(out))
    code, out, _ = knockout("export", finished)
    assert (code, json.loads(out)) == (0, [1, 2, 3, 4, 5, 6, 8, 20])
    code, _, _ = knockout(
        "export", finished, "--format", "parquet", "--out", tmp_path / "x.parquet"
    )
    assert (code, (tmp_path / "x.parquet").is_file()) == (0, True)


def test_export_for_a_model_whose_ids_mean_the_same(
    finished: Path, sweep: Path, tmp_path: Path, knockout: Command
) -> None:
    wanted = [1, 2, 3, 4, 5, 6, 8, 20]
    code, out, _ = knockout("export", finished, "--format", "yaml", "--for", sweep.parent / "model")
    assert (code, yaml.safe_load(out)) == (0, {"undetermined": wanted})
    assert '- 20  # "w20"' in out
    other = word_model(tmp_path / "other")
    tokenizer = other / "tokenizer.json"
    text = tokenizer.read_text()
    assert text.count('"w1":') == text.count('"w2":') == 1
    tokenizer.write_text(
        text.replace('"w1":', '"?":').replace('"w2":', '"w1":').replace('"?":', '"w2":')
    )
    for kind in ("ids", "yaml", "json", "csv"):
        code, out, errors = knockout("export", finished, "--format", kind, "--for", other)
        assert (code, out) == (2, "")
        assert f"--for {other}: its token ids mean other tokens" in errors
        assert "--force" in errors
    code, out, _ = knockout("export", finished, "--for", other, "--force")
    assert (code, json.loads(out)) == (0, wanted)
    code, _, errors = knockout("export", finished, "--for", tmp_path / "no-model")
    assert (code, "no-model" in errors) == (2, True)


def test_export_by_scores(finished: Path, tmp_path: Path, knockout: Command) -> None:
    scores = tmp_path / "scores.csv"
    scores.write_text("token_id,kl,text\n1,0.1,a\n3,2.5,b\n20,9.0,c\n4,,d\n6,0.2,e\n")
    first = ("export", finished, "--scores", scores, "--by", "kl", "--top")
    code, out, _ = knockout(*first, 1)
    assert (code, json.loads(out)) == (0, [8, 20])
    path = tmp_path / "top.yaml"
    code, out, errors = knockout(*first, 3, "--format", "yaml", "--out", path)
    assert (code, out) == (0, "")
    assert f"3 candidates in {path}" in errors
    assert yaml.safe_load(path.read_text()) == {"undetermined": [8, 20, 3, 6]}
    assert '"by": "kl"' in path.read_text()
    code, out, _ = knockout("export", finished, "--top", 2, "--by", "p_value", "--format", "csv")
    assert (code, len(out.splitlines())) == (0, 3)
    for given, told in [
        (("--scores", scores, "--top", 2), "no column 'delta'; it has token_id, kl, text"),
        (("--scores", scores, "--top", 2, "--by", "text"), "expected numbers in text"),
        (("--scores", scores, "--by", "kl"), "say how many with top"),
        (("--by", "kl", "--top", 2), "found 'kl' to rank by"),
        (("--scores", tmp_path / "none.csv", "--top", 2, "--by", "kl"), "none.csv"),
        (("--top", 0), "--top"),
    ]:
        code, out, errors = knockout("export", finished, *given)
        assert (code, out) == (2, ""), given
        assert told in errors
        assert "Traceback" not in errors


def test_export_of_a_freeze_list(finished: Path, tmp_path: Path, knockout: Command) -> None:
    rocks = tmp_path / "rocks.csv"
    rocks.write_text("rock_id,mine\n6,6\n1,1\n50,50\n")
    given = ("export", finished, "--freeze-list", rocks, "--rule", "nominal")
    table = json.loads(knockout("verdicts", finished, "--rule", "nominal", "--json")[1])
    pillars = {tuple(r["token_ids"]) for r in table if r["verdict"] == "strong_pillar"}
    wanted = [token for token in (1, 6) if (token,) not in pillars]
    code, out, errors = knockout(*given, "--keep-undetermined", "--format", "yaml")
    assert (code, yaml.safe_load(out)) == (0, {"freeze_list": wanted})
    assert f"{len(wanted)} of 3 rocks; left out: {2 - len(wanted)} pillar" in errors
    assert "1 not tested" in errors
    code, out, errors = knockout(*given, "--verdict", "neutral")
    assert (code, "a freeze list chooses by verdict itself" in errors) == (2, True)
    code, out, errors = knockout(*given, "--column", "ours")
    assert (code, "no column 'ours'; it has rock_id, mine" in errors) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["run", "none.yaml"], "none.yaml: no such sweep file"),
        (["run"], "SWEEP.yaml"),
        (["frobnicate"], "frobnicate"),
        (["status", "nowhere"], "no run here"),
        (["export", "nowhere", "--format", "xml"], "--format: found 'xml'"),
        (["export", "nowhere", "--verdict", "good"], "verdicts: found 'good'"),
        (["verdicts", "nowhere", "--rule", "x"], "--rule: found 'x'"),
        (["verdicts", "nowhere", "--alpha", "2"], "--alpha: found 2"),
        (["candidates", "none.json", "--model", "./no-model"], "no-model"),
    ],
)
def test_misuse_exits_2_in_one_message(
    arguments: list[str],
    told: str,
    knockout: Command,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, errors = knockout(*arguments)
    assert code == 2
    assert told in errors
    assert "Traceback" not in errors


def test_misuse_inside_a_sweep(sweep: Path, tmp_path: Path, knockout: Command) -> None:
    for change, told in [
        ("benchmarks=[no_such_task]", "no_such_task"),
        ("candidates.ids=[64]", "candidates.ids[0]: token id 64 is outside the vocabulary"),
        ("candidates.strings=[zebra w1]", "is not one token"),
        ("model=./nothing", "nothing"),
        ("chat.template=true", "no chat template"),
        ("engine.max_model_len=100000", "max_model_len"),
    ]:
        code, _, errors = knockout("run", sweep, "--out", tmp_path / "run", "--set", change)
        assert (code, told in errors) == (2, True), (change, errors)
        assert "Traceback" not in errors


def test_candidates_shows_how_a_list_resolves(
    sweep: Path, tmp_path: Path, knockout: Command
) -> None:
    (tmp_path / "ids.json").write_text("[3, 62]")
    model = sweep.parent / "model"
    code, out, errors = knockout("candidates", tmp_path / "ids.json", "--model", model, "--json")
    assert code == 0
    assert [(c["name"], list(c["token_ids"])) for c in json.loads(out)] == [
        ('"w3"', [3]), ("<padding 62>", [62]), ("A/A", [63]),
    ]  # fmt: skip
    assert "padding" in errors
    code, out, _ = knockout("candidates", tmp_path / "ids.json", "--model", model)
    assert '"w3"' in out


def test_a_full_disk_and_a_surprise_are_one_message_each(
    finished: Path, knockout: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("knockout.sweep.summary.summarise", full)
    code, _, errors = knockout("status", finished)
    assert (code, "the disk is full" in errors) == (1, True)

    def surprise(*_: object, **__: object) -> None:
        raise ZeroDivisionError("by zero")

    monkeypatch.setattr("knockout.sweep.summary.summarise", surprise)
    code, _, errors = knockout("status", finished)
    assert code == 1
    assert "internal error: ZeroDivisionError: by zero" in errors
    assert "Traceback" not in errors
    with pytest.raises(ZeroDivisionError):
        knockout("--debug", "status", finished)
