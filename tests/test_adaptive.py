"""Racing with a real engine: what settles drops out, and stopping or a budget changes no decision."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from conftest import Command
from test_scheduler import WordGrader, a_ledger, a_plan, dump
from words import word_model, word_task

from knockout.config.sweep import Adaptive, VerdictRule
from knockout.engines.transformers import TransformersEngine
from knockout.errors import KnockoutError
from knockout.grading import Grade
from knockout.ledger import CellKey, CellRow, Ledger, grade_cubes, totals
from knockout.method.interventions import ban
from knockout.sweep.confirm import derive
from knockout.sweep.jobs import Snapshot
from knockout.sweep.owed import Plan, PlannedBenchmark
from knockout.sweep.racing import complete_rounds, race_record, race_rounds, race_warnings, stand
from knockout.sweep.results import verdict_table
from knockout.sweep.run import _forget_failures
from knockout.sweep.scheduler import Scheduler
from knockout.tokens.candidates import Candidate
from knockout.verdicts.race import settle_cube

RULE = VerdictRule(rule="nominal", alpha=0.1, margin=0.3)
ROUNDS = 5


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TransformersEngine]:
    folder = word_model(tmp_path_factory.mktemp("tiny"))
    engine = TransformersEngine(str(folder), dtype="float32", max_num_seqs=8)
    yield engine
    engine.close()


def race_plan() -> Plan:
    """Two benchmarks: one where bans often matter, one of single tokens where they hardly do."""
    plan = a_plan()
    one = plan.benchmarks[0]
    problems = tuple(replace(one.problems[i % 4], doc_id=f"d{i}", max_tokens=24) for i in range(12))
    short = tuple(
        replace(p, doc_id=f"{n}{p.doc_id}", max_tokens=1) for n in range(3) for p in problems
    )
    return replace(
        plan,
        benchmarks=(
            PlannedBenchmark("long", ROUNDS, one.sampling, problems),
            PlannedBenchmark("short", ROUNDS - 1, one.sampling, short),
        ),
        candidates=(
            *(Candidate(f"w{i}", ban((i,)), (f'"w{i}"',)) for i in (8, 1, 2, 3, 4, 22, 52, 55)),
            *plan.candidates[-2:],
        ),
        asked=(),
        audit=0.1,
    )


class HasW8(WordGrader):
    """Right where an answer holds w8, so that its ban is a loss; other bans shift where it comes."""

    def submit(
        self, key: str, benchmark: str, problem_index: int, response: str | None, finished: bool
    ) -> None:
        assert response is not None
        self.queue.appendleft((key, Grade(int("w8" in response.split()), "ok")))


def race(
    plan: Plan,
    ledger: Ledger,
    engine: Any,
    adaptive: Adaptive | None = None,
    hours: Callable[[], float] = lambda: 0.0,
    stop_after: int = 0,
) -> bool:
    turns = 0

    def observe(_: Snapshot) -> None:
        nonlocal turns
        turns += 1
        if turns == stop_after:
            scheduler.stop()

    scheduler = Scheduler(plan, ledger, engine, HasW8(), engine.tokenizer, 8, observe)
    rounds = race_rounds(plan, ledger, RULE, adaptive or Adaptive(max_seeds=ROUNDS), hours)
    done = scheduler.run(rounds)
    while engine.n_open:  # what was still running goes with an engine that is closed
        engine.step()
    return done


@pytest.fixture(scope="module")
def undisturbed(
    engine: TransformersEngine, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Ledger]:
    plan = race_plan()
    with a_ledger(plan, tmp_path_factory.mktemp("race")) as ledger:
        assert race(plan, ledger, engine)
        yield ledger


def test_settled_candidates_get_no_more_forks(undisturbed: Ledger) -> None:
    long, short = grade_cubes(undisturbed)
    settled = settle_cube(long, ROUNDS, RULE, max_rounds=ROUNDS)
    assert settled.status[0] == "pillar"
    assert "equivalent" in settled.status
    assert "open" in settled.status[:-1]
    assert len(set(settled.settled_round.tolist())) > 2
    keys, steps = undisturbed.decided()
    for key, of_cell in zip(keys, steps, strict=True):
        if key.benchmark == 0:
            out = (settled.settled_round > 0) & (settled.settled_round <= key.seed)
            assert (of_cell == -2).tolist() == out.tolist()
    for c, last in enumerate(settled.settled_round.tolist()):
        after = undisturbed.query(
            "SELECT COUNT(*) FROM fork WHERE benchmark = 0 AND candidate = ? AND seed >= ?",
            (c, last or ROUNDS),
        )
        assert after == [(0,)]
    assert short.baseline.shape == (36, ROUNDS - 1)


def test_a_benchmark_with_nothing_open_makes_no_more_baselines(undisturbed: Ledger) -> None:
    done = complete_rounds(undisturbed)
    assert done["long"] == ROUNDS
    assert done["short"] < ROUNDS - 1
    record = race_record(undisturbed)
    assert record is not None
    assert record["open"]["short"] == 0
    assert undisturbed.query("SELECT MAX(seed) FROM cell WHERE benchmark = 1") == [
        (done["short"] - 1,)
    ]
    assert record["ended"] == "max_seeds"
    found = totals(undisturbed)
    assert found.complete
    assert found.cells < found.planned_cells
    assert (found.fork_errors, found.coupling_errors) == (0, 0)
    assert found.audited > 0


def test_when_and_why_each_was_settled(undisturbed: Ledger) -> None:
    record = race_record(undisturbed)
    assert record is not None
    undisturbed.note("identity", json.dumps({"racing": RULE.model_dump()}))
    table = verdict_table(undisturbed, RULE)
    rows = table[table.settled_round > 0]
    assert [
        (row.benchmark, row.candidate, row.settled_round, row.settled_as)
        for row in rows.itertuples()
    ] == [
        (one["benchmark"], one["candidate"], one["settled_round"], one["settled_as"])
        for one in record["settled"]
    ]
    assert rows.reason.str.startswith("settled after round ").all()
    still = table[(table.settled_as == "open") & (table.group != "canary")]
    assert (still.reason == f"open after round {ROUNDS}: max_seeds").all()
    assert not table.preliminary.any()
    # Another rule is asked of the same rounds: nobody's evidence grows after settling.
    other = verdict_table(undisturbed, RULE.model_copy(update={"rule": "fdr", "alpha": 0.01}))
    assert (other.settled_round == table.settled_round).all()
    assert (other.n_forked == table.n_forked).all()
    assert other.p_value.equals(table.p_value)


@pytest.mark.parametrize("after", [35, 110])
def test_stopping_and_going_on(
    undisturbed: Ledger, engine: TransformersEngine, tmp_path: Path, after: int
) -> None:
    plan = race_plan()
    with a_ledger(plan, tmp_path) as ledger:
        stops = 0
        while not race(plan, ledger, engine, stop_after=after):
            stops += 1
            assert stops < 50
        assert stops > 0
        assert dump(ledger) == dump(undisturbed)
        assert race_record(ledger) == race_record(undisturbed)


def test_futile_candidates_get_no_more_forks_either(
    engine: TransformersEngine, tmp_path: Path
) -> None:
    plan, adaptive = race_plan(), Adaptive(max_seeds=ROUNDS, futility=0.3)
    with (
        a_ledger(plan, tmp_path / "one") as ledger,
        a_ledger(plan, tmp_path / "two") as interrupted,
    ):
        assert race(plan, ledger, engine, adaptive)
        identity = {"racing": RULE.model_dump(), "adaptive": adaptive.model_dump()}
        ledger.note("identity", json.dumps(identity))
        table = verdict_table(ledger, RULE)
        futile = table[table.settled_as == "futile"]
        assert (futile.settled_round < ROUNDS).all()
        assert (futile.verdict == "neutral").all()
        assert futile.reason.str.startswith("futile: after round ").all()
        place = {c.name: i for i, c in enumerate(plan.candidates)}
        for row in futile[futile.benchmark == "long"].itertuples():
            assert ledger.query(
                "SELECT COUNT(*) FROM fork WHERE benchmark = 0 AND candidate = ? AND seed >= ?",
                (place[row.candidate], row.settled_round),
            ) == [(0,)]
        record = race_record(ledger)
        assert record is not None
        dropped = [one for one in record["settled"] if one["settled_as"] == "futile"]
        assert len(dropped) == len(futile) > 0
        assert all(one["chance"] < 0.3 and "log10_e" not in one for one in dropped)
        while not race(plan, interrupted, engine, adaptive, stop_after=60):
            pass
        assert dump(interrupted) == dump(ledger)
        assert race_record(interrupted) == record


def test_an_unfinished_round_does_not_count(
    undisturbed: Ledger, engine: TransformersEngine, tmp_path: Path
) -> None:
    """Inherited cells arrive before forks, so that a round half done pulls every Δ towards 0."""
    plan = race_plan()
    with a_ledger(plan, tmp_path) as ledger:
        ledger.note("identity", json.dumps({"racing": RULE.model_dump()}))
        for _ in range(20):
            assert not race(plan, ledger, engine, stop_after=40)
            done = complete_rounds(ledger)["long"]
            begun = ledger.query("SELECT MAX(seed) FROM cell WHERE benchmark = 0")[0][0] + 1
            if 0 < done < begun:
                break
        assert 0 < done < begun
        table = verdict_table(ledger, RULE)
        assert table.preliminary.all()
        assert (table.n_seeds[table.benchmark == "long"] <= done).all()
        assert not totals(ledger).complete
        assert stand(ledger, RULE).done[0] == done


def test_a_budget_of_tokens_ends_it_and_a_larger_one_goes_on(
    undisturbed: Ledger, engine: TransformersEngine, tmp_path: Path
) -> None:
    plan = race_plan()
    with a_ledger(plan, tmp_path) as ledger:
        small = Adaptive(max_seeds=ROUNDS, max_tokens=1)
        assert race(plan, ledger, engine, small)
        first, cells = race_record(ledger), totals(ledger).cells
        assert first is not None
        # Nothing had been spent before the first round, which is then finished.
        assert (first["ended"], first["rounds"]) == ("max_tokens", {"long": 1, "short": 1})
        assert totals(ledger).complete
        assert race(plan, ledger, engine, small)
        assert (race_record(ledger), totals(ledger).cells) == (first, cells)
        assert race(plan, ledger, engine)
        assert dump(ledger) == dump(undisturbed)
        assert race_record(ledger) == race_record(undisturbed)


def test_a_budget_of_hours_waits_for_the_round_that_has_begun(
    engine: TransformersEngine, tmp_path: Path
) -> None:
    plan = race_plan()
    with a_ledger(plan, tmp_path) as ledger:
        clock = iter([0.1, 0.2, 0.3])
        adaptive = Adaptive(max_seeds=ROUNDS, max_hours=0.25)
        assert not race(plan, ledger, engine, adaptive, lambda: next(clock), stop_after=5)
        assert ledger.query("SELECT COUNT(*) FROM cell") > [(0,)]
        assert not totals(ledger).complete
        # Far too late, but the round is finished; the next one is not begun.
        assert race(plan, ledger, engine, adaptive, lambda: 9.0)
        record = race_record(ledger)
        assert record is not None
        assert (record["ended"], record["rounds"]["long"]) == ("max_hours", 1)


def test_a_round_asked_for_too_early_is_an_error(tmp_path: Path) -> None:
    plan = race_plan()
    with a_ledger(plan, tmp_path) as ledger:
        rounds = race_rounds(plan, ledger, RULE, Adaptive(max_seeds=ROUNDS), lambda: 0.0)
        first = next(rounds)
        assert first.seeds == range(1)
        assert np.asarray(first.active).all()
        with pytest.raises(KnockoutError, match="round 1 is not complete"):
            next(rounds)


def test_failures_before_a_decision_are_not_tried_again(tmp_path: Path) -> None:
    plan = race_plan()
    steps = np.full(len(plan.candidates), -2, dtype=np.int32)
    none = np.empty(0, dtype=np.int32)

    def failed(problem: int, seed: int) -> CellRow:
        key = CellKey(0, problem, seed)
        return CellRow(key, 1, none, "error", None, "failed", None, "lost", steps)

    with a_ledger(plan, tmp_path) as ledger:
        ledger.commit([failed(0, 0), failed(1, 0)])
        _forget_failures(ledger, raced=True)  # nothing was decided yet
        assert totals(ledger).cells == 0
        ledger.commit([failed(0, 0), failed(0, 1)])
        _forget_failures(ledger, raced=True)  # of the last round alone
        assert ledger.decided()[0] == [CellKey(0, 0, 0)]
        _forget_failures(ledger, raced=False)
        assert totals(ledger).cells == 0


def test_the_command_line_races(tmp_path: Path, knockout: Command) -> None:
    word_model(tmp_path / "model")
    word_task(tmp_path, 16)
    content = {
        "model": "./model",
        "engine": {"kind": "transformers", "dtype": "float32", "max_num_seqs": 8},
        "benchmarks": ["words"],
        "include_path": ".",
        "sampling": {"temperature": 0.9, "top_k": 12, "top_p": 0.95, "max_tokens": 8},
        "candidates": {"strings": [f"w{i}" for i in range(1, 7)]},
        "adaptive": {"max_seeds": 4, "max_tokens": 100_000},
        "verdict": {"rule": "fdr", "margin": 0.5},
    }
    sweep, out = tmp_path / "sweep.yaml", tmp_path / "run"
    sweep.write_text(yaml.safe_dump(content))
    code, _, errors = knockout("run", sweep, "--out", out)
    assert code == 0, errors
    summary = json.loads((out / "summary.json").read_text())
    race = summary["race"]
    assert summary["complete"] is True
    assert summary["cells_done"] == 16 * race["rounds"]["words"]
    assert race["max_rounds"] == {"words": 4}
    assert race["settled"]
    rows = json.loads((out / "verdicts.json").read_text())
    when = {row["candidate"]: row["settled_round"] for row in rows if row["settled_round"]}
    assert when == {one["candidate"]: one["settled_round"] for one in race["settled"]}
    code, text, _ = knockout("status", out)
    assert (code, "race" in text, "equivalent" in text) == (0, True, True)
    code, text, _ = knockout("verdicts", out)
    assert (code, " round" in text) == (0, True)
    # The rule is part of what a race is, budgets are not.
    code, _, errors = knockout("run", sweep, "--out", out, "--set", "verdict.alpha=0.1")
    assert (code, "racing.alpha: 0.05 there, 0.1 here" in errors) == (2, True)
    before = (out / "verdicts.json").read_bytes()
    code, _, errors = knockout("run", sweep, "--out", out, "--set", "adaptive.max_tokens=200000")
    assert (code, (out / "verdicts.json").read_bytes() == before) == (0, True), errors
    # The resolved sweep of a run directory is enough to make the run again.
    again = tmp_path / "elsewhere" / "again"
    code, _, errors = knockout("run", out / "config.yaml", "--out", again)
    assert code == 0, errors
    with Ledger.open(out / "run.db") as one, Ledger.open(again / "run.db") as other:
        assert dump(one) == dump(other)
        assert one.meta() == other.meta()
    # A confirmation does not race: as many seeds as the race came to.
    plan = derive(out, candidates=['"w1"'])
    assert plan.sweep.adaptive is None
    assert [plan.sweep.settings(e).seeds for e in plan.sweep.benchmarks] == [
        race["rounds"]["words"]
    ]


def test_a_race_warns_where_it_cannot_pay() -> None:
    rule = VerdictRule()
    assert race_warnings(rule, "maths", 500, 16, 200) == []
    (few,) = race_warnings(VerdictRule(margin=0.05), "maths", 500, 3, 200)
    assert "3 seeds saves hardly any forks" in few
    found = " ".join(race_warnings(rule, "aime", 30, 16, 200))
    assert "finds hardly anything" in found
    assert "no candidate can be shown to lie within ±0.02" in found
    (nothing,) = race_warnings(rule, "aime", 8, 4, 200)
    assert "cannot settle anything" in nothing
    assert race_warnings(VerdictRule(target="benchmark", margin=0.05), "aime", 30, 16, 200) == []
