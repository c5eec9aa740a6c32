"""Confirmation on fresh seeds, end to end with a real engine."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import yaml
from numpy.typing import NDArray
from words import word_model, word_task

from knockout.config.sweep import VerdictRule
from knockout.errors import UsageError
from knockout.ledger import Ledger, grade_cubes
from knockout.ledger.grades import GradeCube
from knockout.method.interventions import ban
from knockout.sweep.confirm import COMPARED, derive
from knockout.sweep.split import halves
from knockout.tokens.candidates import Candidate
from knockout.verdicts.table import build_verdicts

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run in which, at a lax level, some tokens are called."""
    folder = tmp_path_factory.mktemp("confirm")
    word_model(folder / "model")
    word_task(folder, 20)
    # An answer ends with w8, so that its ban makes answers longer, which then hold more words.
    rows = [{"question": f"w{1 + i} w{7 + i}", "word": f"w{(52, 55)[i % 2]}"} for i in range(20)]
    (folder / "words.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = (folder / "words.yaml").read_text()
    task = task.replace('["w9 w9"]', '["w8"]').replace("(w[1-8])", "(w52|w55)")
    (folder / "words.yaml").write_text(task)
    content = {
        "model": "./model",
        "engine": {"kind": "transformers", "dtype": "float32", "max_num_seqs": 16},
        "benchmarks": ["words"],
        "include_path": ".",
        "seeds": 2,
        "sampling": {"temperature": 0.9, "top_k": 12, "top_p": 0.95, "max_tokens": 24},
        "candidates": {"strings": [f"w{i}" for i in range(1, 9)]},
        "audit": 0,
        "verdict": {"rule": "nominal", "alpha": 0.2, "margin": 0.1},
    }
    (folder / "sweep.yaml").write_text(yaml.safe_dump(content))
    from knockout.config.file import load_sweep
    from knockout.sweep.run import run_sweep

    run_sweep(load_sweep(folder / "sweep.yaml"), folder / "run")
    return folder / "run"


def seeds_of(folder: Path) -> set[int]:
    with Ledger.open(folder / "run.db") as ledger:
        return {seed for (seed,) in ledger.query("SELECT cell_seed FROM cell")}


def test_called_candidates_and_lists_on_fresh_seeds(first: Path, knockout: Command) -> None:
    before = {r["candidate"]: r for r in json.loads((first / "verdicts.json").read_text())}
    called = [n for n, r in before.items() if r["verdict_nominal"] != "neutral"]
    neutral = [n for n, r in before.items() if r["verdict"] == "neutral" and n != "A/A"]
    assert '"w8"' in called
    assert neutral
    code, out, errors = knockout("confirm", first, "--json")
    assert code == 0, errors
    found = json.loads(out)
    folder = first / "confirm"
    assert json.loads((folder / "confirm.json").read_text()) == found
    # Nothing of the first run is used but the choice.
    assert len(seeds_of(folder)) == len(seeds_of(first)) == 40
    assert seeds_of(folder).isdisjoint(seeds_of(first))
    assert (found["first_run_seed"], found["fresh_run_seed"], found["shared_seeds"]) == (0, 1, 0)
    rows = {row["candidate"]: row for row in found["rows"]}
    assert set(rows) == {*called, "all neutrals", "all candidates"}
    assert rows["all candidates"]["token_ids"] == list(range(1, 9))
    assert rows["all neutrals"]["token_ids"] == sorted(
        t for name in neutral for t in before[name]["token_ids"]
    )
    fresh = {r["candidate"]: r for r in json.loads((folder / "verdicts.json").read_text())}
    for name in called:
        assert rows[name]["first_delta"] == before[name]["delta"]
        assert rows[name]["fresh_delta"] == fresh[name]["delta"]
        assert rows[name]["shrinkage"] == pytest.approx(
            fresh[name]["delta"] / before[name]["delta"], abs=1e-4
        )
        assert rows[name]["confirmed"] == (fresh[name]["verdict"] == before[name]["verdict"])
    for name in ("all neutrals", "all candidates"):
        members = neutral if name == "all neutrals" else [*called, *neutral]
        assert rows[name]["first_delta"] is rows[name]["confirmed"] is None
        assert rows[name]["sum_of_singles"] == pytest.approx(
            sum(before[m]["delta"] for m in members), abs=1e-9
        )
    assert found["n_hypotheses"] == len(called) + 2
    assert found["n_called"] == len(called)
    assert found["rule"]["target"] == "benchmark"
    assert "these very problems" in found["notes"][-1]
    with (folder / "confirm.csv").open(newline="", encoding="utf-8") as file:
        table = list(csv.DictReader(file))
    assert tuple(table[0]) == COMPARED
    assert [row["candidate"] for row in table] == [row["candidate"] for row in found["rows"]]
    # The trajectories of a joint knockout hold none of its tokens.
    with Ledger.open(folder / "run.db") as ledger:
        c = next(i for i, one in enumerate(ledger.candidates) if one.name == "all candidates")
        keys, _ = ledger.decided()
        for key in keys:
            assert not set(ledger.trajectory(key, c).tolist()) & set(range(1, 9))
    # The same command again makes nothing new; one that asks for less looks at what it asks for.
    code, out, errors = knockout("confirm", first)
    assert (code, "calls confirmed" in out) == (0, True), errors
    assert "nothing is left to generate" in (folder / "run.log").read_text()
    code, _, errors = knockout("confirm", first, "--no-joint")
    assert code == 0, errors
    fewer = json.loads((folder / "confirm.json").read_text())
    assert "all candidates" not in {row["candidate"] for row in fewer["rows"]}


def test_split_chooses_on_one_half_and_estimates_on_the_other(
    first: Path, knockout: Command
) -> None:
    code, out, errors = knockout("confirm", first, "--split", "--candidates", '"w8"', "--json")
    assert code == 0, errors
    assert "nothing was generated" in errors
    found = json.loads(out)
    assert json.loads((first / "split" / "confirm.json").read_text()) == found
    assert found["split"] == {"words": {"first": 10, "second": 10}}
    row = next(row for row in found["rows"] if row["candidate"] == '"w8"')
    with Ledger.open(first / "run.db") as ledger:
        (cube,) = grade_cubes(ledger)
    half = halves("words", cube.problem_ids)
    c = next(i for i, one in enumerate(cube.candidates) if one.name == '"w8"')
    for name, part in (("first", half), ("fresh", ~half)):
        delta = cube.knockout[c][part].mean() - cube.baseline[part].mean()
        assert row[f"{name}_delta"] == pytest.approx(delta)
    # Half a problem set is the same whatever its order.
    again = halves("words", cube.problem_ids[::-1])[::-1]
    assert (again == half).all()
    code, _, errors = knockout("confirm", first, "--split", "--seeds", 3)
    assert (code, "--split generates nothing" in errors) == (2, True)


def test_fresh_seeds_speak_about_these_problems_and_a_split_about_others() -> None:
    """30 problems that move by ±.3 in a third of the cases, on average by nothing."""
    rng = np.random.default_rng(8)
    c, p, s = 400, 30, 8
    moves = np.where(rng.random((c, p, 1)) < 0.3, rng.choice([-0.3, 0.3], (c, p, 1)), 0.0)

    def draw() -> GradeCube:
        base = np.full((p, s), 0, np.int8)
        base[:, ::2] = 1
        up = (rng.random((c, p, s)) < np.maximum(2 * moves, 0)) & (base == 0)
        down = (rng.random((c, p, s)) < np.maximum(-2 * moves, 0)) & (base == 1)
        grades = np.where(up, 1, np.where(down, 0, base)).astype(np.int8)
        infos = tuple(Candidate(f"c{i}", ban((i,))) for i in range(c))
        ids = tuple(str(i) for i in range(p))
        return GradeCube("maths", infos, ids, tuple(range(s)), base, grades, grades != base)

    def called(cube: GradeCube, part: NDArray[np.bool_]) -> NDArray[np.str_]:
        kept = GradeCube(
            "maths", cube.candidates, tuple(np.array(cube.problem_ids)[part]), cube.seeds,
            cube.baseline[part], cube.knockout[:, part], cube.forked[:, part],
        )  # fmt: skip
        return np.array(build_verdicts([kept], VerdictRule(rule="nominal")).verdict)

    one, two, everything = draw(), draw(), np.ones(p, np.bool_)
    first, fresh = called(one, everything), called(two, everything)
    chosen = first != "neutral"
    assert 5 < chosen.sum() < 40
    assert np.mean(fresh[chosen] == first[chosen]) > 0.2
    # Chosen on one half, tested on the other: no more than the level, half of it of this sign.
    half = halves("maths", one.problem_ids)
    first, other = called(one, half), called(one, ~half)
    chosen = first != "neutral"
    assert (
        np.mean(other[chosen] == first[chosen]) < 0.025 + 2 * (0.025 / max(chosen.sum(), 1)) ** 0.5
    )


def test_choosing(first: Path, tmp_path: Path) -> None:
    (tmp_path / "rocks.json").write_text("[5, 3, 5]")
    plan = derive(
        first, candidates=['"w2"'], joint=[f"rocks={tmp_path / 'rocks.json'}", "twin=all"], seeds=5
    )
    assert plan.singles == ('"w2"',)
    assert plan.joint == {"rocks": (3, 5), "twin": tuple(range(1, 9))}
    assert [plan.sweep.settings(e).seeds for e in plan.sweep.benchmarks] == [5]
    assert plan.record["cells_fresh"] == 20 * 5
    assert plan.sweep.candidates.sets == {
        '"w2"': (2,), "rocks": (3, 5), "twin": tuple(range(1, 9)),
    }  # fmt: skip
    same = derive(first, candidates=['"w2"'], joint=["again=" + str(tmp_path / "one.json")]) if (
        (tmp_path / "one.json").write_text("[2]")
    ) else None  # fmt: skip
    assert same is not None
    assert same.joint == {}
    assert "same tokens" in same.notes[0]
    everyone = derive(first, verdicts=["neutral", "strong_pillar", "strong_stumbling_block"])
    assert len(everyone.singles) == 8


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"candidates": ["w99"]}, "no candidate 'w99'"),
        ({"joint": ["all"]}, "expected NAME=all"),
        ({"joint": ["x=verdict:good"]}, "expected strong_pillar"),
        ({"joint": ['"w1"=all'], "candidates": ['"w1"']}, "a candidate has this name"),
        ({"joint": ["x=all", "x=all"]}, "contains this name twice"),
        ({"run_seed": 0}, "used these seeds"),
    ],
)
def test_what_cannot_be_confirmed(first: Path, arguments: dict[str, object], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        derive(first, **arguments)  # type: ignore[arg-type]


def test_greedy_and_unfinished_runs_are_refused(
    first: Path, tmp_path: Path, knockout: Command
) -> None:
    text = (first / "config.yaml").read_text()
    with Ledger.open(first / "run.db") as ledger:
        ledger.query("VACUUM INTO ?", (str(tmp_path / "run.db"),))
    (tmp_path / "config.yaml").write_text(text.replace("temperature: 0.9", "temperature: 0.0"))
    with pytest.raises(UsageError, match="greedily"):
        derive(tmp_path)
    (tmp_path / "config.yaml").write_text(text)
    with Ledger.open(tmp_path / "run.db", write=True) as ledger:
        ledger.query("DELETE FROM cell WHERE problem = 0 AND seed = 0")
    with pytest.raises(UsageError, match="unfinished"):
        derive(tmp_path)
    # Its table says so too, in every form.
    code, out, errors = knockout("verdicts", tmp_path)
    assert (code, "PRELIMINARY" in out, "preliminary" in errors) == (0, True, True)
    code, out, errors = knockout("verdicts", tmp_path, "--json")
    assert all(row["preliminary"] for row in json.loads(out))
    code, out, errors = knockout("export", tmp_path)
    assert (code, "preliminary" in errors) == (0, True)
