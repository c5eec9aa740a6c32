"""Runs that grow: what they end with is what one run made at once holds."""

from __future__ import annotations

import io
import json
import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from child_runs import begin, fork_server, sweep_file
from rich.console import Console

import knockout
from knockout.config.file import load_sweep
from knockout.engines.base import Request
from knockout.engines.transformers import TransformersEngine
from knockout.errors import UsageError
from knockout.ledger import Ledger, totals
from knockout.ledger.check import faults
from knockout.sweep.merge import merge_runs
from knockout.sweep.run import run_sweep
from knockout.verdicts.terminal import render_verdicts

SMALL = {
    "limit": 6, "seeds": 1, "audit": 0.3,
    "candidates": {"strings": ["w1", "w2", "w3"]},
}  # fmt: skip
LARGE = {
    "limit": 9, "seeds": 2, "audit": 0.3,
    "candidates": {"strings": ["w4", "w2", "w1", "w5", "w3"], "sets": {"two": ["w6", "w7"]}},
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sweep")
    sweep_file(folder, n_problems=12)
    text = (folder / "words.yaml").read_text()
    (folder / "words2.yaml").write_text(text.replace("task: words", "task: words2"))
    return folder


def run(folder: Path, out: Path, *changes: dict[str, Any]) -> Path:
    content = yaml.safe_load((folder / "sweep.yaml").read_text())
    for change in changes:
        content |= change
    path = folder / "changed.yaml"
    path.write_text(yaml.safe_dump(content))
    run_sweep(load_sweep(path), out)
    return out


def content(out: Path) -> dict[str, list[tuple[Any, ...]]]:
    """Every row that a run holds of what it asks for, by names instead of places."""
    with Ledger.open(out / "run.db") as ledger:
        asked = ledger.asked()
        name = {c: ledger.candidates[c].name for c in asked.candidates} | {-1: "baseline"}
        limits = dict(zip(asked.benchmarks, asked.problems, strict=True))
        rows: dict[str, list[tuple[Any, ...]]] = {}
        for table in ("cell", "fork", "generation", "audit"):
            columns = [c for (c,) in ledger.query(f"SELECT name FROM pragma_table_info('{table}')")]
            rows[table] = []
            for values in ledger.query(f"SELECT * FROM {table}"):
                row = dict(zip(columns, values, strict=True))
                # A pair that is asked for later leaves the baseline, not its member's fork.
                for column in ("crc", "parent", "shared", "watched"):
                    row.pop(column, None)
                b, p, s = row["benchmark"], row.pop("problem"), row["seed"]
                if b not in limits or p >= limits[b] or s >= ledger.benchmarks[b].n_seeds:
                    continue
                if row.get("candidate", -1) not in name:
                    continue
                row["problem"] = ledger.doc_ids(b)[p]
                row["benchmark"] = ledger.benchmarks[b].name
                if "candidate" in row:
                    row["candidate"] = name[row["candidate"]]
                if table == "cell":
                    del row["steps"], row["n_inherited"], row["n_forks"], row["n_early"]
                    del row["n_checked"], row["n_coupling_errors"]
                rows[table].append(tuple(sorted(row.items())))
        keys, steps = ledger.decided()
        rows["steps"] = [
            (ledger.benchmarks[k.benchmark].name, k.problem, k.seed, name[c], int(of_cell[c]))
            for k, of_cell in zip(keys, steps, strict=True)
            if k.benchmark in limits
            and k.problem < limits[k.benchmark]
            and k.seed < ledger.benchmarks[k.benchmark].n_seeds
            for c in asked.candidates
        ]
        rows["plan"] = [
            (ledger.benchmarks[b], n) for b, n in zip(asked.benchmarks, asked.problems, strict=True)
        ] + [(ledger.candidates[c],) for c in asked.candidates]
        assert list(faults(ledger)) == []
    return {
        table: values if table == "plan" else sorted(values, key=repr)
        for table, values in rows.items()
    }


def verdicts(out: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((out / "verdicts.json").read_text())
    return [{k: v for k, v in row.items() if k != "looks"} for row in rows]


def summary(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "summary.json").read_text())
    return found


@pytest.fixture(scope="module")
def at_once(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(folder, tmp_path_factory.mktemp("at_once") / "run", LARGE)


@pytest.fixture(scope="module")
def grown(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = run(folder, tmp_path_factory.mktemp("grown") / "run", SMALL)
    return run(folder, out, LARGE)


def test_a_run_that_grew_is_one_made_at_once(grown: Path, at_once: Path) -> None:
    assert content(grown) == content(at_once)
    assert verdicts(grown) == verdicts(at_once)
    one, other = summary(grown), summary(at_once)
    assert one["replays"]["cells"] == 6
    assert one["replays"]["mismatches"] == other["replays"]["cells"] == 0
    differing = {key for key in one if one[key] != other[key]}
    assert differing <= {"wall_s", "sessions", "looks", "warnings", "replays"}
    assert one["complete"] is other["complete"] is True


def test_it_says_how_often_it_was_looked_at(grown: Path, at_once: Path, folder: Path) -> None:
    assert summary(grown)["looks"] == 2
    assert summary(at_once)["looks"] == 1
    assert any("look 2" in warning for warning in summary(grown)["warnings"])
    assert not any("look" in warning for warning in summary(at_once)["warnings"])
    rows = json.loads((grown / "verdicts.json").read_text())
    assert {row["looks"] for row in rows} == {2}
    shown = io.StringIO()
    table = knockout.load_run(grown).verdicts()
    Console(file=shown, width=100).print(render_verdicts(table, "title"))
    assert "Look 2 at a run that grew" in shown.getvalue()
    run(folder, grown, LARGE)  # the same again is no other look
    assert summary(grown)["looks"] == 2


KINDS = ("baseline", "replay", "fork", "audit")


class Counting:
    """Counts the tokens that the engine generates, by kind of request."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.kinds: list[str] = []
        add = TransformersEngine.add

        def counted(engine: TransformersEngine, request: Request) -> None:
            self.kinds += [k for k in KINDS if f".{k}." in request.key]  # not the start-up check
            add(engine, request)

        monkeypatch.setattr(TransformersEngine, "add", counted)


def test_what_is_there_is_not_made_again(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = run(folder, tmp_path / "run", SMALL, {"audit": 0.0})
    forks = summary(out)["forks"]
    counting = Counting(monkeypatch)
    run(folder, out, SMALL, {"audit": 0.0, "seeds": 2})
    assert counting.kinds.count("baseline") == 6
    assert "replay" not in counting.kinds
    assert counting.kinds.count("fork") == summary(out)["forks"] - forks
    counting.kinds.clear()
    forks = summary(out)["forks"]
    more = {"candidates": {"strings": ["w3", "w4", "w1", "w2"]}}
    run(folder, out, SMALL, {"audit": 0.0, "seeds": 2}, more)
    assert "baseline" not in counting.kinds
    assert counting.kinds.count("replay") == 12
    assert counting.kinds.count("fork") == summary(out)["forks"] - forks
    counting.kinds.clear()
    run(folder, out, SMALL, {"audit": 0.0, "seeds": 2})  # fewer
    run(folder, out, SMALL, {"audit": 0.0, "seeds": 2}, more)  # and back
    assert counting.kinds == []


def test_fewer_leaves_the_rest_out_of_the_verdicts(
    folder: Path, grown: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    shutil.copytree(grown, out)
    before = content(out)
    run(folder, out, SMALL)
    small = run(folder, tmp_path / "small", SMALL)
    assert content(out) == content(small)
    assert verdicts(out) == verdicts(small)
    assert summary(out)["complete"]
    with Ledger.open(out / "run.db") as ledger:
        assert totals(ledger).cells == 18
    assert len(knockout.load_run(out).verdicts()) == len(verdicts(small))
    from knockout.report.build import build_report

    build_report(out, out / "report.html")
    run(folder, out, LARGE)
    assert content(out) == before


def test_another_benchmark(folder: Path, tmp_path: Path) -> None:
    both = {"benchmarks": ["words2", {"name": "words", "seeds": 2}]}
    out = run(folder, tmp_path / "run", SMALL)
    run(folder, out, SMALL, both)
    at_once = run(folder, tmp_path / "at_once", SMALL, both)
    assert content(out) == content(at_once)
    assert verdicts(out) == verdicts(at_once)


def test_a_name_that_goes_to_another_set(folder: Path, tmp_path: Path) -> None:
    first = {"candidates": {"sets": {"a": ["w1", "w2"], "b": ["w3"]}}}
    swapped = {"candidates": {"sets": {"b": ["w1", "w2"], "a": ["w5"]}}}
    out = run(folder, tmp_path / "run", SMALL, first)
    run(folder, out, SMALL, swapped)
    assert content(out) == content(run(folder, tmp_path / "at_once", SMALL, swapped))
    run(folder, out, SMALL, first)
    assert content(out) == content(run(folder, tmp_path / "again", SMALL, first))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"run_seed": 4}, "run_seed: 0 there, 4 here"),
        (
            {"sampling": {"temperature": 0.8, "top_k": 12, "top_p": 0.95, "max_tokens": 10}},
            "sampling.temperature: 0.9 there, 0.8 here",
        ),
        (
            {"benchmarks": [{"name": "words", "sampling": {"top_k": 11}}]},
            "sampling.top_k: 12 there, 11 here",
        ),
        ({"strategy": "naive"}, 'strategy: "fork" there, "naive" here'),
        ({"adaptive": {"max_seeds": 3}}, "adaptive.max_seeds: nothing there, 3 here"),
        ({"engine": {"kind": "transformers", "dtype": "bfloat16"}}, "engine.dtype"),
    ],
    ids=str,
)
def test_what_makes_a_cell_is_refused_by_name(
    folder: Path, grown: Path, change: dict[str, Any], message: str
) -> None:
    before = (grown / "run.db").read_bytes()
    with pytest.raises(UsageError) as error:
        run(folder, grown, LARGE, change)
    assert message in str(error.value)
    assert "Give another --out" in str(error.value)
    assert (grown / "run.db").read_bytes() == before


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("w1 w1", "w1 w2", "words: 1 of its first 9 problems have another id, prompt"),
        ('"word": "w0"', '"word": "w4"', "with another document or metric, first"),
    ],
)
def test_another_problem_is_refused(
    folder: Path, tmp_path: Path, old: str, new: str, message: str
) -> None:
    copy = tmp_path / "sweep"
    shutil.copytree(folder, copy)
    task = (copy / "words.yaml").read_text().replace(str(folder), str(copy))
    (copy / "words.yaml").write_text(task)
    run(copy, tmp_path / "run", SMALL, {"limit": 9})
    records = (copy / "words.jsonl").read_text()
    assert old in records
    (copy / "words.jsonl").write_text(records.replace(old, new, 1))
    for limit in (9, 6, 12):
        with pytest.raises(UsageError) as error:
            run(copy, tmp_path / "run", SMALL, {"limit": limit})
        assert message.replace("first 9", f"first {min(limit, 9)}") in str(error.value)


def test_a_baseline_that_comes_out_otherwise_is_done_anew(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One stored baseline is changed, as rounding in another batch would; the replay sees it."""
    out = run(folder, tmp_path / "run", SMALL)
    truth = content(run(folder, tmp_path / "at_once", LARGE))
    with Ledger.open(out / "run.db", write=True) as ledger:
        from knockout.ledger.checksum import update
        from knockout.ledger.codec import pack_ids
        from knockout.ledger.connection import transaction

        key = ledger.decided()[0][2]
        wrong = ledger.trajectory(key)
        wrong[-1] = 1 + wrong[-1] % 50
        with transaction(ledger._db) as db:
            update(
                db, "generation", {"ids": pack_ids(wrong)},
                "benchmark = ? AND problem = ? AND seed = ? AND candidate = -1", key,
            )  # fmt: skip
    run(folder, out, LARGE)
    assert summary(out)["replays"]["mismatches"] == 1
    assert any(
        "differed from their stored tokens" in warning for warning in summary(out)["warnings"]
    )
    assert content(out) == truth


def test_a_run_of_naive_knockouts_grows_without_replays(folder: Path, tmp_path: Path) -> None:
    naive = {"strategy": "naive", "limit": 3}
    out = run(folder, tmp_path / "run", SMALL, naive)
    run(folder, out, LARGE, naive)
    assert summary(out)["replays"]["cells"] == 0
    assert content(out) == content(run(folder, tmp_path / "at_once", LARGE, naive))


def test_a_race_says_that_it_cannot_grow(folder: Path, tmp_path: Path) -> None:
    race = {"adaptive": {"max_seeds": 2}}
    out = run(folder, tmp_path / "run", SMALL, race)
    with pytest.raises(UsageError) as error:
        run(folder, out, LARGE, race)
    for message in ('candidate "w4": only here', "problems of words: 6 there, 9 here", "a race"):
        assert message in str(error.value)


KINDS_OF_CHANGE = {
    "limit": 8, "seeds": 2, "audit": 0.3,
    "candidates": {
        "strings": ["w3", "w1", "w2"], "dose": [1, -2], "replace": {"w5": "w6"}, "pairs": "all",
    },
}  # fmt: skip


def test_doses_replacements_and_pairs_join_a_run_of_bans(folder: Path, tmp_path: Path) -> None:
    out = run(folder, tmp_path / "run", SMALL)
    run(folder, out, KINDS_OF_CHANGE)
    at_once = run(folder, tmp_path / "at_once", KINDS_OF_CHANGE)
    replays = summary(out)["replays"]
    assert (replays["cells"], replays["mismatches"]) == (6, 0)
    assert content(out) == content(at_once)
    assert verdicts(out) == verdicts(at_once)
    one, other = knockout.load_run(out), knockout.load_run(at_once)
    assert len(one.interactions()) == 3
    assert one.interactions().equals(other.interactions())


def test_shards_that_grew_join_to_the_whole_that_grew(
    folder: Path, at_once: Path, tmp_path: Path
) -> None:
    sweeps = {}
    for name, change in (("small", SMALL), ("large", LARGE)):
        sweeps[name] = folder / f"{name}.yaml"
        sweeps[name].write_text(
            yaml.safe_dump(yaml.safe_load((folder / "sweep.yaml").read_text()) | change)
        )
    parts = [tmp_path / "1", tmp_path / "2"]
    for k, out in enumerate(parts, 1):
        for path in sweeps.values():
            run_sweep(load_sweep(path), out, shard=(k, 2))
    merge_runs(parts, tmp_path / "whole")
    assert content(tmp_path / "whole") == content(at_once)
    with Ledger.open(tmp_path / "whole" / "run.db") as ledger:
        assert totals(ledger).complete


def test_shards_that_shrank_join_to_the_whole_that_shrank(folder: Path, tmp_path: Path) -> None:
    fewer = SMALL | {"candidates": {"strings": ["w3", "w1"]}}
    sweeps = {}
    for name, change in (("small", SMALL), ("fewer", fewer)):
        sweeps[name] = folder / f"{name}.yaml"
        sweeps[name].write_text(
            yaml.safe_dump(yaml.safe_load((folder / "sweep.yaml").read_text()) | change)
        )
    one, two, wide = tmp_path / "1", tmp_path / "2", tmp_path / "wide"
    for k, out in enumerate((one, two), 1):
        run_sweep(load_sweep(sweeps["small"]), out, shard=(k, 2))
    shutil.copytree(two, wide)
    for k, out in enumerate((one, two), 1):
        run_sweep(load_sweep(sweeps["fewer"]), out, shard=(k, 2))
    merge_runs([one, two], tmp_path / "both")
    at_once = run(folder, tmp_path / "fewer", fewer)
    assert content(tmp_path / "both") == content(at_once)
    # What one part still asks for, the joined run asks for, and it owes nothing: both once asked it.
    merge_runs([one, wide], tmp_path / "mixed")
    whole = content(run(folder, tmp_path / "small", SMALL))
    mixed = content(tmp_path / "mixed")
    assert sorted(mixed.pop("plan"), key=repr) == sorted(whole.pop("plan"), key=repr)
    assert mixed == whole
    for name in ("both", "mixed"):
        with Ledger.open(tmp_path / name / "run.db") as ledger:
            assert totals(ledger).complete


N_KILLS = 50


@pytest.mark.timeout(1800)
def test_killed_at_random_moments_while_it_grows(
    folder: Path, at_once: Path, tmp_path: Path
) -> None:
    """SIGKILL at 50 moments of runs that grow in two steps; nothing is lost, nothing doubled."""
    context = fork_server()
    steps = []
    for n, change in enumerate((SMALL, {**SMALL, "seeds": 2, "limit": 9}, LARGE)):
        steps.append(folder / f"step{n}.yaml")
        made = yaml.safe_load((folder / "sweep.yaml").read_text()) | change
        steps[-1].write_text(yaml.safe_dump(made))
    seconds = {}
    for step in steps:  # an undisturbed chain: how long each step takes
        began = time.monotonic()
        process = begin(context, step, tmp_path / "timed")
        process.join(200)
        assert process.exitcode == 0, (tmp_path / "timed.txt").read_text()
        seconds[step] = time.monotonic() - began
    moments, killed, chains = random.Random(5), 0, 0
    while killed < N_KILLS:
        out = tmp_path / f"run{chains}"
        chains += 1
        for step in steps:
            code: int | None = -signal.SIGKILL
            while code == -signal.SIGKILL:
                process = begin(context, step, out)
                process.join(moments.uniform(0.3, 1.0) * seconds[step] if killed < N_KILLS else 200)
                process.kill()
                process.join()
                code = process.exitcode
                killed += code == -signal.SIGKILL
            assert code == 0, out.with_suffix(".txt").read_text()
        assert content(out) == content(at_once)
        assert verdicts(out) == verdicts(at_once)
