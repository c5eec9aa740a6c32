"""Exported runs come back row for row; a check finds what does not fit together."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from test_store import fork, small_run

from knockout.errors import KnockoutError, UsageError
from knockout.ledger import CellKey, Ledger, totals
from knockout.ledger.archive import TABLES, export_run, import_run
from knockout.ledger.check import faults


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return small_run(tmp_path / "run")


def everything(folder: Path) -> Iterator[tuple[str, list[tuple[Any, ...]]]]:
    with Ledger.open(folder / "run.db") as ledger:
        for table in (*TABLES, "fork_total"):
            yield (
                table,
                ledger.query(
                    f"SELECT * FROM {table} ORDER BY 1, 2, 3, 4"
                    if table != "meta"
                    else "SELECT * FROM meta ORDER BY 1"
                ),
            )
        yield "totals", [(totals(ledger),)]


def test_a_run_comes_back_row_for_row(run: Path, tmp_path: Path) -> None:
    counts = export_run(run, tmp_path / "out")
    assert (counts["cell"], counts["fork"], counts["generation"], counts["audit"]) == (2, 2, 4, 2)
    assert import_run(tmp_path / "out", tmp_path / "back") == counts
    assert dict(everything(tmp_path / "back")) == dict(everything(run))
    assert (tmp_path / "back" / "config.yaml").read_bytes() == (run / "config.yaml").read_bytes()
    # The files mean what they say without our code.
    rows = pq.read_table(tmp_path / "out" / "generation.parquet").to_pylist()
    assert [row["ids"] for row in rows if row["candidate"] == 0] == [[50, 51, 52]] * 2
    cells = pq.read_table(tmp_path / "out" / "cell.parquet").to_pylist()
    assert [row["steps"] for row in cells] == [[2, -1, -1], [0, 1, -1]]
    with Ledger.open(tmp_path / "back" / "run.db", write=True) as ledger:
        assert ledger.journal_mode == "wal"
        ledger.commit(forks=[fork(CellKey(0, 1, 1), 1, 1)])
        assert totals(ledger).owed_forks == 0
        assert list(faults(ledger)) == []


def test_nothing_is_overwritten_and_nothing_half_made(run: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="found files there"):
        export_run(run, run)
    export_run(run, tmp_path / "out")
    with pytest.raises(UsageError, match="found files there"):
        import_run(tmp_path / "out", run)
    with pytest.raises(UsageError, match="no exported run"):
        import_run(run, tmp_path / "new")
    fork_file = tmp_path / "out" / "fork.parquet"
    whole = fork_file.read_bytes()
    fork_file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(KnockoutError, match=r"fork\.parquet: cannot be read"):
        import_run(tmp_path / "out", tmp_path / "new")
    fork_file.write_bytes((tmp_path / "out" / "cell.parquet").read_bytes())
    with pytest.raises(KnockoutError, match=r"fork\.parquet: found format 2 with columns"):
        import_run(tmp_path / "out", tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        ("UPDATE generation SET ids = x'00' WHERE candidate = 0 AND problem = 0", "generation 0/0/0/0: damaged"),
        ("DELETE FROM generation WHERE candidate = -1 AND problem = 1", "cell 0/1/1: no trajectory"),
        ("UPDATE cell SET steps = x'000000' WHERE problem = 1", "cell 0/1/1: 3 bytes of steps"),
        ("UPDATE cell SET correct = 1 WHERE problem = 1", "cell 0/1/1: its checksum"),
        ("UPDATE generation SET extracted = '7' WHERE problem = 1 AND candidate = 0", "generation 0/1/1/0: its checksum"),
        ("UPDATE candidate SET token_ids = '[8]' WHERE id = 1", "candidate 1: its checksum"),
        ("DROP TRIGGER fork_added", "trigger fork_added"),
        ("UPDATE session SET wall_s = 9", "session 1: its checksum"),
        ("UPDATE cell SET n_forks = 0 WHERE problem = 0", "cell 0/0/0: 1 forks where 0"),
        ("UPDATE fork_total SET n = n + 1", "fork_total"),
    ],
)  # fmt: skip
def test_a_check_reads_every_row(run: Path, damage: str, told: str) -> None:
    with Ledger.open(run / "run.db") as ledger:
        assert list(faults(ledger)) == []
    db = sqlite3.connect(run / "run.db")
    db.execute(damage)
    db.commit()
    db.close()
    with Ledger.open(run / "run.db") as ledger:
        found = list(faults(ledger))
    assert any(fault.startswith(told) for fault in found)
    assert len(found) <= 2
