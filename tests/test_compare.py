"""Two runs side by side, against arithmetic by hand; stored answers graded anew."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from child_runs import dump, sweep_file
from conftest import Command
from scipy import stats

import knockout
from knockout.errors import UsageError
from knockout.ledger import INHERITED, BenchmarkRow, CellKey, CellRow, ForkRow, Ledger, ProblemRow
from knockout.ledger.check import faults
from knockout.method.interventions import ban
from knockout.sweep.compare import COMPARISON, agreement, compare_runs
from knockout.sweep.regrade import regrade_run
from knockout.tokens.candidates import Candidate

N = 12


def a_run(
    folder: Path,
    grades: dict[str, list[int]],
    *,
    ids: dict[str, int] | None = None,
    tokenizer: str = "one",
    benchmark: str = "sums",
    first: int = 0,
    prompt: str = "say",
    temperature: float = 0.6,
) -> Path:
    """A run with one seed whose baselines are all right; `grades` are its knockouts'."""
    folder.mkdir()
    names = list(grades)
    known = ids or {name: 5 + i for i, name in enumerate(names)}
    candidates = [Candidate(name, ban((known[name],)), (f'"{name}"',)) for name in names]
    prompt_ids = np.array([1, 2], dtype=np.int32)
    with Ledger.create(
        folder / "run.db",
        {
            "identity": json.dumps(
                {
                    "tokenizer_fingerprint": tokenizer,
                    "sampling": {"temperature": temperature},
                    "benchmarks": [{"name": benchmark}],
                    "seeds": 1,
                }
            )
        },
        candidates,
        [BenchmarkRow(benchmark, "acc", 1, "f")],
        [
            ProblemRow(0, n, f"doc {first + n}", f"{prompt} {first + n}", prompt_ids)
            for n in range(N)
        ],
    ) as ledger:
        tokens = np.arange(4, dtype=np.int32)
        for n in range(N):
            key = CellKey(0, n, 0)
            steps = [1 if grades[name][n] == 0 else INHERITED for name in names]
            cell = CellRow(key, n, tokens, "stop", 1, "ok", "4", None, np.array(steps, np.int32))
            forks = [
                ForkRow(key, c, 1, tokens[1:], "stop", 0, "ok", "5", None)
                for c, step in enumerate(steps) if step >= 0
            ]  # fmt: skip
            ledger.commit([cell], forks)
    (folder / "config.yaml").write_text(
        f"model: m\nbenchmarks: [{benchmark}]\ncandidates: {{ids: [5]}}\n"
    )
    return folder


def lost(n: int) -> list[int]:
    """Grades of a knockout that loses the first n problems."""
    return [0] * n + [1] * (N - n)


def test_differences_intervals_and_changes(tmp_path: Path) -> None:
    a = a_run(tmp_path / "a", {"pillar": lost(10), "new": lost(0), "same": lost(3), "x": lost(1)})
    b = a_run(tmp_path / "b", {"pillar": lost(0), "new": lost(10), "same": lost(3), "y": lost(1)},
              ids={"pillar": 5, "new": 6, "same": 7, "y": 99})  # fmt: skip
    frame = compare_runs(a, b)
    assert tuple(frame.columns) == COMPARISON
    rows = {row["candidate"] or row["candidate_b"]: row for row in frame.to_dict("records")}
    pillar = rows["pillar"]
    assert (pillar["delta_a"], pillar["delta_b"]) == (pytest.approx(-10 / 12), 0.0)
    assert pillar["difference"] == pytest.approx(10 / 12)
    # Ten pairs that all differ one way: the exact two-sided sign test.
    assert pillar["p_value"] == pytest.approx(stats.binomtest(10, 10).pvalue)
    assert (pillar["n_problems"], pillar["paired"]) == (12, True)
    assert 0 < pillar["ci_low"] < 10 / 12 < pillar["ci_high"]
    assert (pillar["verdict_a"], pillar["verdict_b"]) == ("strong_pillar", "neutral")
    assert {name: row["change"] for name, row in rows.items()} == {
        "pillar": "went away", "new": "appeared", "same": "same", "x": "only in a", "y": "only in b",
    }  # fmt: skip
    same = rows["same"]
    assert (same["difference"], same["p_value"]) == (0.0, 1.0)
    assert same["ci_low"] < 0 < same["ci_high"]  # never of width zero
    # Benjamini and Hochberg over the three rows that have a test.
    p = [rows[name]["p_value"] for name in ("pillar", "new", "same")]
    adjusted = stats.false_discovery_control(p)
    found = [rows[name]["p_adjusted"] for name in ("pillar", "new", "same")]
    assert found == pytest.approx(adjusted.tolist())
    assert bool(pillar["supported"]) is True
    assert math.isnan(rows["x"]["difference"])
    assert agreement(frame)["sums"] == {
        "appeared": 1, "only in a": 1, "only in b": 1, "same": 1, "went away": 1, "supported": 2,
    }  # fmt: skip
    back = compare_runs(b, a)
    swapped = {row["candidate"]: row for row in back.to_dict("records")}["pillar"]
    assert swapped["difference"] == -pillar["difference"]
    assert swapped["ci_low"] == pytest.approx(-pillar["ci_high"])
    assert swapped["change"] == "appeared"


def test_that_one_is_called_and_the_other_not_is_no_difference(tmp_path: Path) -> None:
    """Six losses are significant, five are not; their difference is one problem."""
    a = a_run(tmp_path / "a", {"t": lost(6)})
    b = a_run(tmp_path / "b", {"t": lost(5)})
    (row,) = compare_runs(a, b).to_dict("records")
    assert row["change"] == "went away"
    assert row["p_value"] == 1.0
    assert bool(row["supported"]) is False


def test_other_vocabularies_are_matched_by_text(tmp_path: Path) -> None:
    a = a_run(tmp_path / "a", {"t": lost(4), "u": lost(1)}, ids={"t": 5, "u": 6})
    b = a_run(tmp_path / "b", {"t": lost(4), "u": lost(1)}, ids={"t": 6, "u": 5}, tokenizer="two")
    rows = compare_runs(a, b).to_dict("records")
    assert [(r["candidate"], r["candidate_b"], r["difference"]) for r in rows] == [
        ("t", "t", 0.0), ("u", "u", 0.0),
    ]  # fmt: skip
    assert [(r["token_ids"], r["token_ids_b"]) for r in rows] == [([5], [6]), ([6], [5])]
    # With one vocabulary the ids decide, whatever the candidates are called.
    c = a_run(tmp_path / "c", {"v": lost(4)}, ids={"v": 5})
    by_id = compare_runs(a, c).to_dict("records")
    assert (by_id[0]["candidate"], by_id[0]["candidate_b"]) == ("t", "v")


def test_runs_that_share_no_problem_are_compared_as_independent(tmp_path: Path) -> None:
    a = a_run(tmp_path / "a", {"t": lost(8), "u": lost(2)})
    b = a_run(tmp_path / "b", {"t": lost(1), "u": lost(2)}, benchmark="other", first=100)
    rows = compare_runs(a, b).to_dict("records")
    assert [(r["benchmark"], r["benchmark_b"], r["paired"]) for r in rows] == [
        ("sums", "other", False)
    ] * 2
    one, other = np.array(lost(8)) - 1.0, np.array(lost(1)) - 1.0
    assert rows[0]["difference"] == pytest.approx(other.mean() - one.mean())
    welch = stats.ttest_ind(other, one, equal_var=False)
    assert rows[0]["p_value"] < 0.05
    assert welch.pvalue < 0.05
    low, high = welch.confidence_interval()
    # With twelve problems ours is the wider one: it does not believe in a variance of one loss.
    assert low - 0.3 < rows[0]["ci_low"] <= low
    assert high <= rows[0]["ci_high"] < high + 0.3
    assert rows[1]["p_value"] > 0.9
    # Two tasks that count their problems alike share none for all that.
    c = a_run(tmp_path / "c", {"t": lost(8)}, benchmark="third", prompt="solve")
    assert not compare_runs(a, c)["paired"].any()


def test_the_interval_covers_and_the_test_keeps_its_level() -> None:
    """Seeded simulation: no difference between two runs of 40 problems, 3 seeds."""
    from knockout.stats.paired import pair
    from knockout.sweep.compare import _difference

    rng = np.random.default_rng(1)
    rejected = missed = 0
    for _ in range(400):
        hard = rng.uniform(size=(40, 1))
        arms = []
        for _ in range(2):
            base = (rng.uniform(size=(40, 3)) < hard).astype(np.int8)
            knock = (rng.uniform(size=(1, 40, 3)) < hard * 0.8).astype(np.int8)
            arms.append(pair(base, knock))
        row = _difference(arms[0], 0, arms[1], 0, [(n, n) for n in range(40)], 0.1)
        rejected += row["p_value"] <= 0.1
        missed += not row["ci_low"] <= 0 <= row["ci_high"]
    assert rejected <= 55  # 40 expected, standard deviation 6
    assert missed <= 55


def test_what_cannot_be_compared_is_refused(tmp_path: Path) -> None:
    a = a_run(tmp_path / "a", {"t": lost(1)})
    b = a_run(tmp_path / "b", {"u": lost(1)}, ids={"u": 77})
    with pytest.raises(UsageError, match="no candidate in common"):
        compare_runs(a, b)
    with pytest.raises(UsageError, match="has no benchmark 'none'; it has sums"):
        compare_runs(a, b, benchmarks={"none": "sums"})
    with pytest.raises(UsageError, match=r"no run here|config\.yaml"):
        compare_runs(a, tmp_path / "missing")


def test_the_command_line_compares(tmp_path: Path, knockout: Command) -> None:
    a = a_run(tmp_path / "a", {"pillar": lost(10), "same": lost(3)})
    b = a_run(tmp_path / "b", {"pillar": lost(0), "same": lost(3)})
    code, out, err = knockout("compare", a, b, "--out", tmp_path / "table.csv")
    assert code == 0, err
    assert "sums: 1 same, 1 went away, 1 supported; paired over the 12 shared problems" in err
    assert "The runs differ" not in err
    c = a_run(tmp_path / "c", {"pillar": lost(0)}, benchmark="other", first=100, tokenizer="two")
    code, _, told = knockout("compare", a, c)
    assert (code, "; not paired, 24 problems in all" in told) == (0, True)
    assert (
        'differ in the tokenizer or its chat template (fingerprint): "one" in A, "two" in B' in told
    )
    warmer = a_run(tmp_path / "warmer", {"pillar": lost(0)}, temperature=1.0)
    code, _, told = knockout("compare", a, warmer)
    assert "The runs differ in sampling.temperature: 0.6 in A, 1.0 in B" in told
    assert "went away (supported)" in out
    assert "strong_pillar → neutral" in out
    assert (tmp_path / "table.csv").read_text().startswith("benchmark,benchmark_b,candidate")
    code, out, _ = knockout("compare", a, b, "--json")
    assert json.loads(out)[0]["change"] == "went away"
    code, _, err = knockout("compare", a, b, "--benchmarks", "sums")
    assert (code, "expected A=B" in err) == (2, True)


# Regrading. -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("words")
    path = sweep_file(folder, n_problems=8)
    knockout.Sweep.load(path).run(folder / "run")
    return folder


def test_grading_anew_changes_nothing_where_nothing_changed(words: Path) -> None:
    before = dump(words / "run")
    found = regrade_run(words / "run")
    assert found == {
        "graded": len(before["cell"]) + len(before["fork"]),
        "changed": 0,
        "changes": {},
    }
    assert dump(words / "run") == before


def test_grading_anew_mends_what_another_grader_wrote(
    words: Path, tmp_path: Path, knockout: Command
) -> None:
    run = Path(shutil.copytree(words / "run", tmp_path / "run"))
    before = dump(run)
    with Ledger.open(run / "run.db", write=True) as ledger:
        key = next(k for k in ledger.decided()[0] if ledger.cell_grade(k) is not None)
        right = int(ledger.cell_grade(key) or 0)
        fork_key = next(k for k in ledger.decided()[0] if list(ledger.fork_rows(k)))
        fork = next(iter(ledger.fork_rows(fork_key)))
        ledger.regrade(
            [
                (key, None, 1 - right, "ok", "wrongly"),
                (fork_key, fork.candidate, None, "timeout", None),
            ]
        )
    spoiled = dump(run)
    assert spoiled != before
    code, out, err = knockout("regrade", run, "--dry-run", "--json")
    assert code == 0, err
    assert dump(run) == spoiled
    found = json.loads(out)
    assert found["changed"] == len(found["list"]) == 2
    kind = "wrong to right" if right else "right to wrong"
    assert found["changes"]["words"] == {"baseline": {kind: 1}, "knockout": {"gained": 1}}
    assert found["list"][0]["after"]["correct"] == right
    code, _, err = knockout("regrade", run)
    assert code == 0, err
    assert "2 of" in err
    assert dump(run) == before
    with Ledger.open(run / "run.db") as ledger:
        assert list(faults(ledger)) == []
        (look,) = ledger.meta_json("regraded")
        assert look["changed"] == 2


def test_other_data_is_not_graded(words: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(words, tmp_path / "moved"))
    rows: list[dict[str, Any]] = [
        json.loads(line) for line in (folder / "words.jsonl").read_text().splitlines()
    ]
    rows[0]["question"] = "w3 w3 w3"
    (folder / "words.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name in ("words.yaml", "run/config.yaml"):
        path = folder / name
        path.write_text(path.read_text().replace(str(words), str(folder)))
    with pytest.raises(UsageError, match="has another prompt than in the run"):
        regrade_run(folder / "run")
