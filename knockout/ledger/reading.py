"""What is read from the ledger as a whole: counts, and grades as arrays."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from knockout.ledger.grades import GradeCube
from knockout.ledger.ledger import Ledger
from knockout.ledger.rows import INHERITED, NOT_ASKED

__all__ = ["Totals", "grade_cubes", "totals"]


@dataclass(frozen=True, slots=True)
class Totals:
    """Counts of the ledger. Tokens are generated ones; a shared prefix counts once.

    Attributes:
        cells: Stored baselines, failed ones included.
        failed_cells: Baselines that the engine failed on.
        planned_cells: Problems times planned seeds, of what the sweep asks for now.
        owed_cells: Those of them that are not stored yet.
        forks: Stored forks, failed ones included.
        failed_forks: Forks that the engine failed on.
        owed_forks: Knockouts that diverge and have no row yet, of what is asked for now.
        unasked: Candidates that came after a cell and that it has not been asked yet, added up
            over what is asked for now; 0 in a race, whose cells leave out what is settled.
        inherited: Knockouts that are their baseline.
        early_forks: Forks at a step at which a difference could not be excluded.
        tokens_generated: Baselines and forks.
        tokens_naive: Lengths of all trajectories added up, inherited ones too.
        tokens_audit: Generated for audits.
        steps_checked, coupling_errors: The coupling's self-check.
        audited, fork_errors: Audits, and those that differ.
        failed_audits: Audits that the engine failed on.
        unfinished: Baselines and forks that ran into max_tokens.
        respelled: Forks whose text encodes to ids with a banned one among them.
        grades: Number of baselines and forks by status.
        wall_s: Seconds that all sessions worked, starts of engines included.
        ended: Why a race ended (see `knockout.sweep.racing`); "" for other runs.
    """

    cells: int
    failed_cells: int
    planned_cells: int
    owed_cells: int
    forks: int
    failed_forks: int
    owed_forks: int
    unasked: int
    inherited: int
    early_forks: int
    tokens_generated: int
    tokens_naive: int
    tokens_audit: int
    steps_checked: int
    coupling_errors: int
    audited: int
    fork_errors: int
    failed_audits: int
    unfinished: int
    respelled: int
    grades: dict[str, int]
    wall_s: float
    ended: str

    @property
    def complete(self) -> bool:
        """Whether every planned cell is stored with all of its forks, or the race has ended."""
        # A race leaves out what it has settled, so there only its end counts.
        done = bool(self.ended) or (self.owed_cells == 0 and self.unasked == 0)
        return done and self.owed_forks == 0


def totals(ledger: Ledger) -> Totals:
    """Counts the ledger, without reading any token or fork."""
    cell = ledger.query(
        "SELECT COUNT(*), COALESCE(SUM(finish = 'error'), 0), COALESCE(SUM(n_forks), 0),"
        " COALESCE(SUM(n_inherited), 0), COALESCE(SUM(n_early), 0), COALESCE(SUM(n_tokens), 0),"
        " COALESCE(SUM(n_tokens * n_inherited), 0), COALESCE(SUM(n_checked), 0),"
        " COALESCE(SUM(n_coupling_errors), 0), COALESCE(SUM(finish = 'length'), 0) FROM cell"
    )[0]
    forks = ledger.fork_totals()

    def forks_with(finish: str) -> int:
        return sum(total.n for total in forks if total.finish == finish)

    audit = ledger.query(
        "SELECT COALESCE(SUM(finish <> 'error'), 0),"
        " COALESCE(SUM(differs_at >= 0 AND finish <> 'error'), 0),"
        " COALESCE(SUM(finish = 'error'), 0), COALESCE(SUM(n_tokens), 0) FROM audit"
    )[0]
    planned, owed_cells, owed_forks, unasked = _left(ledger)
    by_grade = ledger.query("SELECT grade, COUNT(*) FROM cell GROUP BY grade")
    grades: dict[str, int] = {}
    for status, n in [*by_grade, *((total.grade, total.n) for total in forks)]:
        grades[status] = grades.get(status, 0) + n
    n_forks = sum(total.n for total in forks)
    tokens, shared = sum(total.n_tokens for total in forks), sum(total.n_shared for total in forks)
    return Totals(
        cells=cell[0],
        failed_cells=cell[1],
        planned_cells=planned,
        owed_cells=owed_cells,
        forks=n_forks,
        failed_forks=forks_with("error"),
        owed_forks=owed_forks,
        unasked=unasked,
        inherited=cell[3],
        early_forks=cell[4],
        tokens_generated=cell[5] + tokens - shared,
        tokens_naive=cell[5] + cell[6] + tokens,
        tokens_audit=audit[3],
        steps_checked=cell[7],
        coupling_errors=cell[8],
        audited=audit[0],
        fork_errors=audit[1],
        failed_audits=audit[2],
        unfinished=cell[9] + forks_with("length"),
        respelled=sum(total.respelled for total in forks),
        grades=dict(sorted(grades.items())),
        wall_s=ledger.wall_s(),
        ended=str(ledger.meta_json("race", {}).get("ended") or ""),
    )


def grade_cubes(ledger: Ledger) -> list[GradeCube]:
    """The grades of each benchmark: baselines, knockouts, and which of them were forked.

    Of what the sweep asks for now. What is missing, failed, or could not be graded is −1.
    """
    cubes, asked = [], ledger.asked()
    chosen = np.array(asked.candidates, dtype=np.int64)
    for index, n in zip(asked.benchmarks, asked.problems, strict=True):
        benchmark = ledger.benchmarks[index]
        ids = ledger.doc_ids(index)
        cells = ledger.cells(index)
        # This also reads what was asked for before; the end leaves it out.
        n_seeds = max([benchmark.n_seeds, *(cell.seed + 1 for cell in cells)])
        shape = (len(ids), n_seeds)
        baseline = np.full(shape, -1, dtype=np.int8)
        steps = np.full((len(ledger.candidates), *shape), NOT_ASKED, dtype=np.int32)
        if cells:
            problem, seed, _, correct, _, _, own = zip(*cells, strict=True)
            baseline[problem, seed] = [-1 if one is None else one for one in correct]
            steps[:, problem, seed] = np.stack(own).T
        knockout = np.where(steps == INHERITED, baseline[None], np.int8(-1))
        # One text a cell: four times faster than a tuple a fork, of which there are millions.
        sql = (
            "SELECT problem, seed, group_concat(2 * candidate + correct) FROM fork"
            " WHERE benchmark = ? AND correct IS NOT NULL GROUP BY problem, seed"
        )
        for chunk in ledger.chunks(sql, (index,), size=1000):
            for p, s, text in chunk:
                packed = np.fromstring(text, dtype=np.int64, sep=",")
                knockout[packed >> 1, p, s] = packed & 1
        part = (chosen, slice(n), slice(benchmark.n_seeds))
        cubes.append(
            GradeCube(
                benchmark=benchmark.name,
                candidates=tuple(ledger.candidates[c] for c in asked.candidates),
                problem_ids=ids[:n],
                seeds=tuple(range(benchmark.n_seeds)),
                baseline=baseline[part[1:]],
                knockout=knockout[part],
                forked=(steps >= 0)[part],
            )
        )
    return cubes


def _left(ledger: Ledger) -> tuple[int, int, int, int]:
    """Cells that are asked for, and of them: cells, forks and divergence steps still to come."""
    asked = ledger.asked()
    keys, steps = ledger.decided()
    n_problems = dict(zip(asked.benchmarks, asked.problems, strict=True))
    n_seeds = {b: ledger.benchmarks[b].n_seeds for b in asked.benchmarks}
    planned = sum(n_problems[b] * n_seeds[b] for b in asked.benchmarks)
    failed, candidates = ledger.failed_cells(), np.array(asked.candidates, dtype=np.int64)
    inside = np.array(
        [
            k.benchmark in n_seeds
            and k.problem < n_problems[k.benchmark]
            and k.seed < n_seeds[k.benchmark]
            for k in keys
        ],
        dtype=np.bool_,
    )
    fine = inside & np.array([k not in failed for k in keys], dtype=np.bool_)
    racing = bool(ledger.meta_json("identity", {}).get("racing"))
    unasked = 0 if racing else int((steps[fine][:, candidates] == NOT_ASKED).sum())
    owed_forks = 0
    row = {key: n for n, key in enumerate(keys)}
    for key, have in ledger.unfinished().items():
        if inside[n := row[key]]:
            owed_forks += sum(steps[n, c] >= 0 and c not in have for c in asked.candidates)
    return planned, planned - int(inside.sum()), int(owed_forks), unasked
