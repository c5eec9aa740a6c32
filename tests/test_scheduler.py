"""The scheduler with a real engine and a tiny random model: the same ledger whatever happens."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny import banning
from words import EOS, N_WORDS, word_model

from knockout.engines.base import Completion, EngineInfo, Request, generate
from knockout.engines.transformers import TransformersEngine
from knockout.errors import KnockoutError
from knockout.grading import Grade
from knockout.ledger import BenchmarkRow, CellKey, Ledger, ProblemRow, grade_cubes, totals
from knockout.ledger.schema import COMPARED_TABLES
from knockout.method.interventions import ban
from knockout.method.sampling import Sampling
from knockout.sweep.jobs import first_difference
from knockout.sweep.owed import Plan, PlannedBenchmark, PlannedProblem, Round, audit_mask, owed
from knockout.sweep.scheduler import Scheduler
from knockout.tokens.candidates import Candidate
from knockout.tokens.thinking import response_text

SAMPLED = Sampling(temperature=0.9, top_k=12, top_p=0.95)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return word_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def engine(model_folder: Path) -> Iterator[TransformersEngine]:
    engine = TransformersEngine(str(model_folder), dtype="float32", max_num_seqs=8)
    yield engine
    engine.close()


class WordGrader:
    """Right where an answer has an even number of words; gives grades late and out of order."""

    def __init__(self, delay: int = 0, ungraded: str | None = None) -> None:
        self.delay, self.ungraded = delay, ungraded
        self.queue: deque[tuple[str, Grade]] = deque()
        self.turn = 0

    @property
    def n_open(self) -> int:
        return len(self.queue)

    def submit(
        self, key: str, benchmark: str, problem_index: int, response: str | None, finished: bool
    ) -> None:
        assert response is not None
        if self.ungraded is not None and self.ungraded in response:
            grade = Grade(0, "timeout")
        else:
            right = int(finished and len(response.split()) % 2 == 0)
            grade = Grade(right, "ok" if finished else "incomplete", response[:20])
        self.queue.appendleft((key, grade))

    def poll(self) -> list[tuple[str, Grade]]:
        self.turn += 1
        if self.delay and self.turn % self.delay:
            return []
        done, self.queue = list(self.queue), deque()
        return done


def a_plan(sampling: Sampling = SAMPLED, **changes: Any) -> Plan:
    rng = np.random.default_rng(1)

    def problem(i: int) -> PlannedProblem:
        prompt = tuple(rng.integers(1, N_WORDS, 4 + i % 5).tolist())
        return PlannedProblem(f"d{i}", prompt, ("w9 w9",) if i % 2 else (), 10)

    candidates = [Candidate(f"w{i}", ban((i,)), (f'"w{i}"',)) for i in range(1, 9)]
    candidates += [
        Candidate(f"w{a} + w{b}", ban((a, b)), members=(f"w{a}", f"w{b}"))
        for a, b in combinations((1, 2, 3, 4, 5), 2)
    ]
    candidates.append(Candidate("some", ban((10, 11, 12)), ('"w10"', '"w11"', '"w12"'), "control"))
    candidates.append(Candidate("A/A", ban((63,)), ("<padding 63>",), "canary"))
    plan = Plan(
        run_seed=3,
        benchmarks=(
            PlannedBenchmark("one", 2, sampling, tuple(problem(i) for i in range(4))),
            PlannedBenchmark("two", 1, sampling, tuple(problem(i) for i in range(3))),
        ),
        candidates=tuple(candidates),
        audit=0.3,
    )
    return replace(plan, **changes)


def a_ledger(plan: Plan, folder: Path) -> Ledger:
    folder.mkdir(exist_ok=True)
    return Ledger.create(
        folder / "run.db",
        {},
        plan.candidates,
        [BenchmarkRow(b.name, "m", b.n_seeds, "f") for b in plan.benchmarks],
        [
            ProblemRow(n, i, p.doc_id, "", np.array(p.prompt, dtype=np.int32))
            for n, b in enumerate(plan.benchmarks)
            for i, p in enumerate(b.problems)
        ],
    )


def work(
    plan: Plan, ledger: Ledger, engine: Any, tokenizer: Any, grader: Any = None, **more: Any
) -> Scheduler:
    scheduler = Scheduler(
        plan, ledger, engine, grader or WordGrader(), tokenizer, max_num_seqs=8, **more
    )
    scheduler.run([plan.everything()])
    return scheduler


def dump(ledger: Ledger) -> dict[str, list[tuple[Any, ...]]]:
    return {
        table: ledger.query(f"SELECT * FROM {table} ORDER BY 1, 2, 3, 4")
        for table in COMPARED_TABLES
    }


@pytest.fixture(scope="module")
def undisturbed(
    engine: TransformersEngine, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Ledger]:
    plan = a_plan()
    with a_ledger(plan, tmp_path_factory.mktemp("undisturbed")) as ledger:
        work(plan, ledger, engine, engine.tokenizer)
        yield ledger


def test_every_cell_is_there_and_forks_equal_runs_from_scratch(
    undisturbed: Ledger, engine: TransformersEngine
) -> None:
    plan = a_plan()
    found = totals(undisturbed)
    assert found.complete
    assert found.cells == found.planned_cells == 4 * 2 + 3
    assert found.forks + found.inherited == 11 * len(plan.candidates)
    assert found.forks > 10
    assert found.inherited > 20
    assert found.audited > 10
    assert (found.fork_errors, found.coupling_errors, found.failed_cells) == (0, 0, 0)
    assert found.steps_checked > 0
    # The oracle: every knockout of three cells generated on its own, from its prompt.
    for key in (CellKey(0, 0, 0), CellKey(0, 3, 1), CellKey(1, 2, 0)):
        problem = plan.problem(key)
        alone = [
            Request(
                key=str(c), prompt=problem.prompt, seed=plan.seed(key), sampling=SAMPLED,
                max_tokens=problem.max_tokens, intervention=banning(candidate.token_ids), stop=problem.stop,
            )
            for c, candidate in enumerate(plan.candidates)
        ]  # fmt: skip
        for done in generate(engine, alone):
            c = int(done.key)
            assert undisturbed.trajectory(key, c).tolist() == done.tokens.tolist()
            assert not set(done.tokens.tolist()) & set(plan.candidates[c].token_ids)


def test_pairs_leave_the_fork_of_a_member(undisturbed: Ledger) -> None:
    """Each shares with its member's fork what it did not generate, and is it where that is all."""
    plan, whole, further = a_plan(), 0, 0
    for key in undisturbed.decided()[0]:
        rows = {row.candidate: row for row in undisturbed.fork_rows(key)}
        for row in rows.values():
            assert row.shared is not None
            if row.parent < 0:
                assert row.shared == row.step
                continue
            assert plan.candidates[row.parent].name in plan.candidates[row.candidate].members
            mine = undisturbed.trajectory(key, row.candidate)
            other = undisturbed.trajectory(key, row.parent)
            leaves = rows[row.parent].watched[row.candidate]
            assert row.shared == (len(other) if leaves < 0 else leaves)
            assert first_difference(mine, other) == leaves
            whole += leaves < 0
            further += leaves > row.step
    assert whole > 10
    assert further > 0


def test_grades_belong_to_their_trajectories(
    undisturbed: Ledger, engine: TransformersEngine
) -> None:
    plan = a_plan()
    for b, cube in enumerate(grade_cubes(undisturbed)):
        for p in range(len(cube.problem_ids)):
            for s in range(len(cube.seeds)):
                key = CellKey(b, p, s)
                for c in range(len(plan.candidates)):
                    ids = undisturbed.trajectory(key, c)
                    text = response_text(
                        engine.tokenizer, ids, stop=plan.problem(key).stop, eos_ids=(EOS,)
                    )
                    ended = ids[-1] == EOS or text != response_text(
                        engine.tokenizer, ids, eos_ids=(EOS,)
                    )
                    assert cube.knockout[c, p, s] == (ended and len(text.split()) % 2 == 0)


def test_order_and_delay_do_not_matter(
    undisturbed: Ledger, engine: TransformersEngine, tmp_path: Path
) -> None:
    plan = a_plan()
    with a_ledger(plan, tmp_path) as ledger:
        scheduler = Scheduler(
            plan, ledger, engine, WordGrader(delay=7), engine.tokenizer, max_num_seqs=1
        )
        scheduler.run([plan.everything()])
        assert dump(ledger) == dump(undisturbed)


def test_rounds_of_seeds_give_the_same_ledger(
    undisturbed: Ledger, engine: TransformersEngine, tmp_path: Path
) -> None:
    plan = a_plan()
    everyone = plan.everything().active
    with a_ledger(plan, tmp_path) as ledger:
        scheduler = Scheduler(plan, ledger, engine, WordGrader(), engine.tokenizer, 8)
        scheduler.run(Round(range(s, s + 1), everyone) for s in range(2))
        assert dump(ledger) == dump(undisturbed)


def test_settled_candidates_are_not_asked(engine: TransformersEngine, tmp_path: Path) -> None:
    plan = a_plan()
    active = plan.everything().active.copy()
    active[0, :5] = False
    active[1] = False
    with a_ledger(plan, tmp_path) as ledger:
        scheduler = Scheduler(plan, ledger, engine, WordGrader(), engine.tokenizer, 8)
        scheduler.run([Round(range(2), active)])
        keys, steps = ledger.decided()
        assert {key.benchmark for key in keys} == {0}
        assert (steps[:, :5] == -2).all()
        assert (steps[:, 5:] != -2).all()
        assert ledger.query("SELECT COUNT(*) FROM fork WHERE candidate < 5") == [(0,)]


@pytest.mark.parametrize("after", [1, 8, 20])
def test_stopping_and_going_on(
    undisturbed: Ledger, engine: TransformersEngine, tmp_path: Path, after: int
) -> None:
    plan = a_plan()
    turns = 0
    with a_ledger(plan, tmp_path) as ledger:

        def stop_soon(_: object) -> None:
            nonlocal turns
            turns += 1
            if turns == after:
                scheduler.stop()

        scheduler = Scheduler(
            plan, ledger, engine, WordGrader(delay=3), engine.tokenizer, 8, observe=stop_soon
        )
        assert scheduler.run([plan.everything()]) is False
        assert not totals(ledger).complete
        # What was still running is dropped by an engine that is closed; here it is shared.
        while engine.n_open:
            engine.step()
        before = totals(ledger).tokens_generated
        second = work(plan, ledger, engine, engine.tokenizer)
        assert dump(ledger) == dump(undisturbed)
        everything = totals(ledger)
        assert before + second.snapshot().tokens <= (
            everything.tokens_generated + everything.tokens_audit
        )


def test_finished_is_a_no_op(undisturbed: Ledger) -> None:
    plan = a_plan()
    assert list(owed(plan, undisturbed, plan.everything())) == []


def test_the_longest_problems_begin_first(
    undisturbed: Ledger, engine: TransformersEngine, tmp_path: Path
) -> None:
    plan = a_plan()
    one, two = plan.benchmarks
    roomy = replace(two, problems=tuple(replace(p, max_tokens=30) for p in two.problems))
    plan = replace(plan, benchmarks=(one, roomy), audit=0.0)
    with a_ledger(plan, tmp_path) as ledger:
        work_left = owed(plan, ledger, plan.everything())
        tried = [next(work_left).key for _ in range(7)]
        # One seed of every problem; the benchmark with more room goes first.
        assert tried == [CellKey(1, p, 0) for p in range(3)] + [CellKey(0, p, 0) for p in range(4)]
        first = replace(plan.everything(), seeds=range(1))
        Scheduler(plan, ledger, engine, WordGrader(), engine.tokenizer, 8).run([first])
        took = ledger.mean_tokens()
        for (b, p), tokens in took.items():  # the oracle: add up the trajectories
            key = CellKey(b, p, 0)
            forks = ledger.query(
                "SELECT candidate, shared FROM fork WHERE benchmark = ? AND problem = ?", (b, p)
            )
            parts = [len(ledger.trajectory(key, c)) - shared for c, shared in forks]
            assert tokens == len(ledger.trajectory(key)) + sum(parts)
        rest = [item.key for item in work_left]
        assert sorted(rest) == [CellKey(0, p, 1) for p in range(4)]
        lengths = [took[0, key.problem] for key in rest]
        assert lengths == sorted(lengths, reverse=True)
        assert len(set(lengths)) > 1


def test_more_audits_are_owed_when_more_are_wanted(undisturbed: Ledger) -> None:
    more = a_plan(audit=1.0)
    n = sum(len(item.audits) for item in owed(more, undisturbed, more.everything()))
    found = totals(undisturbed)
    assert n == found.forks + found.inherited - found.audited


def test_naive_makes_the_same_trajectories(
    undisturbed: Ledger, engine: TransformersEngine, tmp_path: Path
) -> None:
    plan = a_plan(strategy="naive")
    with a_ledger(plan, tmp_path) as ledger:
        work(plan, ledger, engine, engine.tokenizer)
        found, forked = totals(ledger), totals(undisturbed)
        assert (found.inherited, found.audited) == (0, 0)
        assert found.tokens_generated == found.tokens_naive == forked.tokens_naive
        assert forked.tokens_generated < found.tokens_generated
        for one, other in zip(grade_cubes(ledger), grade_cubes(undisturbed), strict=True):
            assert (one.baseline == other.baseline).all()
            assert (one.knockout == other.knockout).all()


@pytest.mark.parametrize("sampling", [Sampling(temperature=0), Sampling(temperature=1.0)])
def test_greedy_and_open_sampling(
    engine: TransformersEngine, tmp_path: Path, sampling: Sampling
) -> None:
    plan = a_plan(sampling, audit=1.0)
    with a_ledger(plan, tmp_path) as ledger:
        work(plan, ledger, engine, engine.tokenizer)
        found = totals(ledger)
        assert found.complete
        assert (found.fork_errors, found.early_forks) == (0, 0)
        assert found.audited == found.forks + found.inherited


def test_an_answer_that_cannot_be_graded_is_missing(
    engine: TransformersEngine, tmp_path: Path
) -> None:
    plan = a_plan()
    with a_ledger(plan, tmp_path) as ledger:
        work(plan, ledger, engine, engine.tokenizer, WordGrader(ungraded="w3"))
        found = totals(ledger)
        assert found.complete
        assert found.grades["timeout"] > 0
        missing = sum(int((cube.baseline < 0).sum()) for cube in grade_cubes(ledger))
        n = ledger.query("SELECT COUNT(*) FROM cell WHERE grade = 'timeout'")[0][0]
        assert missing == n > 0


class Faulty:
    """The real engine with a fault put between it and the scheduler."""

    def __init__(self, engine: Any, fault: str, after: int) -> None:
        self.engine, self.fault, self.after = engine, fault, after
        self.info: EngineInfo = engine.info

    @property
    def n_open(self) -> int:
        return int(self.engine.n_open)

    def add(self, request: Request) -> None:
        self.engine.add(request)

    def close(self) -> None:
        pass

    def step(self) -> list[Completion]:
        done = self.engine.step()
        if self.after > 0:
            self.after -= len(done)
            return done  # type: ignore[no-any-return]
        if self.fault == "raise" and done:
            raise RuntimeError("device lost")
        if self.fault == "lose":
            while self.engine.n_open:
                self.engine.step()
            return []
        return [replace(c, finish="error", error="NaN in the logits") for c in done]


@pytest.mark.parametrize(("fault", "told"), [("raise", "device lost"), ("lose", "it lost")])
def test_a_failing_engine_ends_the_run_and_loses_nothing(
    undisturbed: Ledger, engine: TransformersEngine, tmp_path: Path, fault: str, told: str
) -> None:
    plan = a_plan()
    with a_ledger(plan, tmp_path) as ledger:
        with pytest.raises(KnockoutError, match=told):
            work(plan, ledger, Faulty(engine, fault, 25), engine.tokenizer)
        assert totals(ledger).cells > 0
        while engine.n_open:
            engine.step()
        work(plan, ledger, engine, engine.tokenizer)
        assert dump(ledger) == dump(undisturbed)


def test_a_failed_trajectory_is_kept_with_its_reason_and_can_be_tried_again(
    undisturbed: Ledger, engine: TransformersEngine, tmp_path: Path
) -> None:
    plan = a_plan()
    with a_ledger(plan, tmp_path) as ledger:
        work(plan, ledger, Faulty(engine, "nan", 2), engine.tokenizer)
        found = totals(ledger)
        assert found.complete
        assert found.failed_cells > 0
        reasons = ledger.query("SELECT DISTINCT error FROM generation WHERE error IS NOT NULL")
        assert reasons == [("NaN in the logits",)]
        assert list(owed(plan, ledger, plan.everything())) == []
        for cube in grade_cubes(ledger):
            assert ((cube.baseline < 0) <= (cube.knockout < 0).all(axis=0)).all()
        assert ledger.forget_failures() > 0
        work(plan, ledger, engine, engine.tokenizer)
        assert dump(ledger) == dump(undisturbed)


def test_a_prompt_without_room_fails_without_the_engine(
    engine: TransformersEngine, tmp_path: Path
) -> None:
    plan = a_plan()
    one = plan.benchmarks[1]
    problems = (replace(one.problems[0], max_tokens=0), *one.problems[1:])
    plan = replace(plan, benchmarks=(replace(one, problems=problems),))
    with a_ledger(plan, tmp_path) as ledger:
        work(plan, ledger, engine, engine.tokenizer)
        found = totals(ledger)
        assert (found.cells, found.failed_cells, found.complete) == (3, 1, True)


def test_audits_are_chosen_by_hash() -> None:
    plan = a_plan(audit=0.3)
    keys = [CellKey(0, p, s) for p in range(4) for s in range(2)]
    masks = np.array([audit_mask(plan, key) for key in keys])
    fewer = replace(plan, candidates=plan.candidates[3:])
    assert (np.array([audit_mask(fewer, key) for key in keys]) == masks[:, 3:]).all()
    more = replace(plan, audit=0.6)
    assert (np.array([audit_mask(more, key) for key in keys]) >= masks).all()
    many = Plan(
        3, (PlannedBenchmark("x", 50, SAMPLED, (PlannedProblem("d", (1,), (), 8),)),),
        tuple(Candidate(str(i), ban((i,)), ("",)) for i in range(200)), audit=0.02,
    )  # fmt: skip
    share = np.mean([audit_mask(many, CellKey(0, 0, s)) for s in range(50)])
    assert 0.015 < share < 0.025  # 10,000 draws at 0.02: standard error 0.0014


@pytest.mark.parametrize(
    ("one", "other", "at"),
    [([], [], -1), ([1, 2], [1, 2], -1), ([1, 2], [1, 3], 1), ([1], [1, 2], 1), ([4, 1], [5], 0)],
)
def test_first_difference(one: list[int], other: list[int], at: int) -> None:
    as_ids = [np.array(values, dtype=np.int32) for values in (one, other)]
    assert first_difference(*as_ids) == at
