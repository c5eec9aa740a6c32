"""A run that the first version made opens, resumes, extends and is reported.

`data/first_version_run` was made by version 0.1.0 (commit b10f897) with the embedded model and the
starter problems of this project, and interrupted with 5 of its 19 forks in the ledger.
"""

from __future__ import annotations

import json
import shutil
import sqlite3
from pathlib import Path
from typing import Any

import pytest

import knockout
from knockout.ledger import Ledger, totals
from knockout.ledger.archive import export_run, import_run
from knockout.ledger.check import faults
from knockout.ledger.schema import SCHEMA_VERSION

FIXTURE = Path(__file__).parent / "data" / "first_version_run"


@pytest.fixture
def old(tmp_path: Path) -> Path:
    return Path(shutil.copytree(FIXTURE, tmp_path / "old"))


def rows(path: Path, table: str, columns: str = "*") -> list[tuple[Any, ...]]:
    db = sqlite3.connect(path)
    try:
        return db.execute(f"SELECT {columns} FROM {table} ORDER BY 1, 2, 3, 4").fetchall()
    finally:
        db.close()


def test_it_is_read_without_being_changed(old: Path) -> None:
    before = (old / "run.db").read_bytes()
    with Ledger.open(old / "run.db") as ledger:
        state = totals(ledger)
        assert (state.cells, state.planned_cells) == (12, 12)
        assert (state.forks, state.owed_forks) == (5, 14)
        assert list(faults(ledger)) == []
        assert ledger.candidates[2].token_ids == (28, 30)
    assert len(knockout.load_run(old).verdicts()) == 3
    assert (old / "run.db").read_bytes() == before


def test_a_writer_upgrades_it_and_keeps_every_row(old: Path, tmp_path: Path) -> None:
    kept = {t: rows(old / "run.db", t) for t in ("cell", "fork", "generation", "problem")}
    with Ledger.open(old / "run.db", write=True) as ledger:
        assert ledger.query("PRAGMA user_version") == [(SCHEMA_VERSION,)]
        assert list(faults(ledger)) == []
        for table, before in kept.items():
            after = ledger.query(f"SELECT * FROM {table} ORDER BY 1, 2, 3, 4")
            assert [
                row[: len(old_row)] for row, old_row in zip(after, before, strict=True)
            ] == before
        # What a fork of the first version shared with its baseline is what it did not generate.
        assert ledger.query("SELECT COUNT(*) FROM fork WHERE shared <> step OR parent <> -1") == [
            (0,)
        ]
        names = ledger.query("SELECT name FROM pragma_table_info('cell')")
    # Laid out as a new ledger is.
    with Ledger.create(tmp_path / "new.db", {"identity": "{}"}, [], [], []) as new:
        assert new.query("SELECT name FROM pragma_table_info('cell')") == names


def test_its_archive_is_read(old: Path, tmp_path: Path) -> None:
    export_run(old, tmp_path / "archive")
    import_run(tmp_path / "archive", tmp_path / "back")
    with Ledger.open(old / "run.db") as one, Ledger.open(tmp_path / "back" / "run.db") as other:
        assert totals(one) == totals(other)
        assert one.decided()[0] == other.decided()[0]


def test_it_is_resumed_and_reported(old: Path) -> None:
    columns = "benchmark, problem, seed, candidate, step, n_tokens, correct"
    before = rows(old / "run.db", "fork", columns)
    knockout.Sweep.load(old / "config.yaml").run(old)
    with Ledger.open(old / "run.db") as ledger:
        state = totals(ledger)
        assert state.complete
        assert state.forks == 19
        assert list(faults(ledger)) == []
    after = rows(old / "run.db", "fork", columns)
    assert set(before) < set(after)
    assert (old / "verdicts.json").is_file()
    from knockout.report.build import build_report

    build_report(old, old / "report.html")
    assert (old / "report.html").stat().st_size > 10_000


@pytest.mark.engine
@pytest.mark.timeout(1200)
def test_it_grows_by_a_candidate_a_problem_and_a_seed(old: Path, tmp_path: Path) -> None:
    """What it ends with is what one run made at once holds: knockouts, steps, grades, verdicts."""
    more = (
        "limit=5",
        "seeds=4",
        "candidates.strings=[' a', ' is', ' the']",
        "engine.max_num_seqs=20",
    )
    kept = rows(old / "run.db", "generation", "benchmark, problem, seed, ids")
    knockout.Sweep.load(old / "config.yaml", *more).run(old)
    assert set(kept) <= set(rows(old / "run.db", "generation", "benchmark, problem, seed, ids"))
    knockout.Sweep.load(FIXTURE / "config.yaml", *more).run(tmp_path / "once")
    found = []
    for run in (old, tmp_path / "once"):
        with Ledger.open(run / "run.db") as ledger:
            assert (totals(ledger).complete, totals(ledger).cells) == (True, 20)
            assert list(faults(ledger)) == []
            name = {n: candidate.name for n, candidate in enumerate(ledger.candidates)}
            forks = ledger.query(
                "SELECT problem, seed, candidate, step, n_tokens, correct FROM fork"
            )
        found.append(sorted((p, s, name[c], *rest) for p, s, c, *rest in forks))
    assert found[0] == found[1]
    columns = ["candidate", "delta", "ci_low", "ci_high", "p_value", "n_forked", "verdict_fdr"]
    one, once = (
        knockout.load_run(run).verdicts().sort_values("candidate", ignore_index=True)[columns]
        for run in (old, tmp_path / "once")
    )
    assert one.equals(once)
    summary = json.loads((old / "summary.json").read_text())
    # Each old baseline was decoded again for the new candidate, and came out as version 0.1.0 made it.
    assert (summary["replays"]["cells"], summary["replays"]["mismatches"]) == (12, 0)
    assert summary["audited"] > 0
    assert (summary["fork_errors"], summary["coupling_errors"]) == (0, 0)
