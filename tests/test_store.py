"""The ledger: what goes in comes out, and nothing torn, shared or damaged is taken for good."""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import signal
import socket
import sqlite3
import sys
import time
import zlib
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from knockout.errors import KnockoutError, UsageError
from knockout.ledger import (
    INHERITED,
    NOT_ASKED,
    AuditRow,
    BenchmarkRow,
    CellKey,
    CellRow,
    ExtendedCell,
    ForkRow,
    Ledger,
    ProblemRow,
    RunLock,
    grade_cubes,
    pack_ids,
    totals,
    unpack_ids,
)
from knockout.ledger.check import faults
from knockout.ledger.lock import filesystem_of, is_network
from knockout.ledger.schema import COMPARED_TABLES, FORK_TOTALS
from knockout.method.interventions import Intervention, ban
from knockout.tokens.candidates import Candidate

CANDIDATES = [
    Candidate("a", ban((1,)), ('"a"',)),
    Candidate("b", ban((2, 3)), ('"b"', '"c"'), "control"),
    Candidate("A/A", ban((9,)), ("<padding 9>",), "canary"),
]


def ids(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def new_ledger(folder: Path, n_problems: int = 2, n_seeds: int = 2) -> Ledger:
    return Ledger.create(
        folder / "run.db",
        {"identity": "{}"},
        CANDIDATES,
        [BenchmarkRow("first", "acc", n_seeds, "f1"), BenchmarkRow("second", "acc", 1, "f2")],
        [ProblemRow(0, i, f"doc {i}", "2+2? \ud800", ids(5, 6)) for i in range(n_problems)]
        + [ProblemRow(1, 0, "x", "say", ids(7))],
    )


def cell(
    key: CellKey, steps: tuple[int, ...], correct: int | None = 1, n: int = 4, finish: str = "stop"
) -> CellRow:
    grade = "failed" if finish == "error" else "ok"
    tokens = np.arange(10, 10 + n, dtype=np.int32)
    return CellRow(
        key, 77, tokens, finish, correct, grade, "4", None, ids(*steps), n_early=0, n_checked=n
    )


def fork(
    key: CellKey, candidate: int, step: int, correct: int | None = 0, finish: str = "stop"
) -> ForkRow:
    return ForkRow(key, candidate, step, ids(50, 51, 52), finish, correct, "ok", "5\udfff", None)


def small_run(folder: Path) -> Path:
    """A run directory, made anew, of two cells with forks, audits and a session."""
    folder.mkdir()
    one, two = CellKey(0, 0, 0), CellKey(0, 1, 1)
    with new_ledger(folder) as ledger:
        ledger.commit(
            [cell(one, (2, INHERITED, INHERITED)), cell(two, (0, 1, INHERITED), correct=None)],
            [fork(one, 0, 2), fork(two, 0, 0)],
            [
                AuditRow(one, 1, 3, ids(10, 9), "stop", None),
                AuditRow(one, 2, -1, ids(1), "stop", None),
            ],
        )
        ledger.set_wall(ledger.add_session("2026-01-01T00:00:00", "here", 1), 2.5)
    (folder / "config.yaml").write_text("model: m  # Δ\n")
    return folder


@pytest.mark.parametrize(
    "candidate",
    [
        Candidate("plain", ban((3, 9)), ("a", "b"), "control"),
        Candidate("dose", Intervention("penalty", (3,), strength=-0.5), ("\ud800",)),
        Candidate("so", Intervention("replace", (3,), replacement=4, where="thinking"), ("a",)),
        Candidate("a + b", ban((3, 9)), ("a", "b"), members=("a", "b")),
        Candidate("late", Intervention("ban", (1,), first_step=4, end_step=9), ("a",)),
    ],
    ids=lambda c: c.name,
)
def test_a_candidate_comes_back_whole(candidate: Candidate, tmp_path: Path) -> None:
    path = tmp_path / "run.db"
    with Ledger.create(path, {}, [CANDIDATES[0]], [], []) as ledger:
        ledger.extend(candidates=[candidate])
        assert ledger.candidates == (CANDIDATES[0], candidate)
    with Ledger.open(path) as ledger:
        assert ledger.candidates == (CANDIDATES[0], candidate)
        plain = ledger.query("SELECT id FROM candidate WHERE intervention = '' ORDER BY id")
        assert plain == ([(0,), (1,)] if candidate.name == "plain" else [(0,)])


@given(st.integers(1, 31).flatmap(lambda bits: st.lists(st.integers(0, 2**bits - 1), max_size=200)))
@example([])
@example([2**16 - 1])
@example([0, 2**16])
@example([2**24 - 1, 3])
@example([2**24])
@example([-1, 5])
def test_packed_ids_come_back(values: list[int]) -> None:
    back = unpack_ids(pack_ids(np.array(values, dtype=np.int32)))
    assert back.dtype == np.int32
    assert back.tolist() == values


@pytest.mark.parametrize("vocabulary", [49_152, 150_000])
def test_packed_ids_are_small(vocabulary: int) -> None:
    rng = np.random.default_rng(0)
    text = rng.zipf(1.3, 20_000).clip(max=vocabulary - 1).astype("<i4")
    assert len(pack_ids(text)) < 0.95 * len(zlib.compress(text.tobytes(), 6))
    assert len(pack_ids(np.tile(text[:200], 100))) < 0.1 * len(pack_ids(text))


@pytest.mark.parametrize("values", [[], [7, 8, 49151], [3, 149_999, 0], [2**31 - 1]])
def test_ids_of_earlier_ledgers_are_read(values: list[int]) -> None:
    """They are four planes of bytes, without a mark."""
    planes = np.array(values, dtype="<i4").view(np.uint8).reshape(-1, 4).T
    assert unpack_ids(zlib.compress(planes.tobytes(), 6)).tolist() == values


@pytest.mark.parametrize("top", [100, 100_000, 2**30])
def test_damaged_ids_are_an_error(top: int) -> None:
    blob = pack_ids(np.arange(0, top, top // 50, dtype=np.int32))
    for broken in (blob[:-3], blob[:9] + bytes([blob[9] ^ 1]) + blob[10:], b""):
        with pytest.raises(ValueError, match="damaged"):
            unpack_ids(broken)
    for broken in (b"no zlib", b"\x01", b"\x01" + zlib.compress(b"odd"), b"\x02", b"\x07",
                   b"\x02" + zlib.compress(b"four")):  # fmt: skip
        with pytest.raises(ValueError, match="damaged"):
            unpack_ids(broken)


def test_what_goes_in_comes_out(tmp_path: Path) -> None:
    one, two = CellKey(0, 0, 0), CellKey(0, 1, 1)
    with new_ledger(tmp_path) as ledger:
        ledger.commit([cell(one, (2, INHERITED, INHERITED))], [fork(one, 0, 2)])
        ledger.commit(
            [cell(two, (INHERITED, 0, NOT_ASKED), correct=0)],
            audits=[AuditRow(two, 0, -1, ids(1), "stop", None)],
        )
    with Ledger.open(tmp_path / "run.db") as ledger:
        assert ledger.candidates == tuple(CANDIDATES)
        assert [b.name for b in ledger.benchmarks] == ["first", "second"]
        keys, steps = ledger.decided()
        assert keys == [one, two]
        assert steps.tolist() == [[2, -1, -1], [-1, 0, -2]]
        assert ledger.unfinished() == {two: set()}
        assert ledger.audited() == {(two, 0)}
        assert ledger.trajectory(one).tolist() == [10, 11, 12, 13]
        assert ledger.trajectory(one, 0).tolist() == [10, 11, 50, 51, 52]
        assert ledger.trajectory(one, 1).tolist() == [10, 11, 12, 13]
        with pytest.raises(KnockoutError, match="no trajectory"):
            ledger.trajectory(CellKey(1, 0, 0))


def test_counts(tmp_path: Path) -> None:
    one, two, bad = CellKey(0, 0, 0), CellKey(0, 1, 1), CellKey(1, 0, 0)
    with new_ledger(tmp_path) as ledger:
        ledger.commit(
            [
                cell(one, (2, INHERITED, INHERITED)),
                cell(two, (0, 1, INHERITED), correct=None, n=6, finish="length"),
                cell(bad, (NOT_ASKED,) * 3, correct=None, n=0, finish="error"),
            ],
            [fork(one, 0, 2), fork(two, 0, 0, finish="error", correct=None)],
            [
                AuditRow(one, 1, 3, ids(10, 11, 12, 9), "stop", None),
                AuditRow(one, 0, -1, ids(1, 2), "stop", None),
                AuditRow(one, 2, -1, ids(), "error", "boom"),
            ],
        )
        found = totals(ledger)
        assert (found.cells, found.failed_cells, found.planned_cells) == (3, 1, 5)
        assert (found.forks, found.failed_forks, found.owed_forks) == (2, 1, 1)
        assert found.inherited == 3
        assert found.tokens_generated == 4 + 6 + 0 + 3 + 3
        # Baselines, their copies for the inherited ones, and the forks with their prefixes.
        assert found.tokens_naive == (4 + 6) + (2 * 4 + 1 * 6) + (5 + 3)
        assert (found.audited, found.fork_errors, found.failed_audits) == (2, 1, 1)
        assert (found.unfinished, found.complete) == (1, False)
        assert ledger.failed_forks() == {two: {0}}
        assert ledger.forget_failures() == 3
        after = totals(ledger)
        assert (after.failed_cells, after.failed_forks, after.owed_forks) == (0, 0, 2)
        assert ledger.query("SELECT COUNT(*) FROM generation") == [(3,)]


def test_grades_as_arrays(tmp_path: Path) -> None:
    one, two, timed_out = CellKey(0, 0, 0), CellKey(0, 1, 1), CellKey(0, 0, 1)
    with new_ledger(tmp_path) as ledger:
        ledger.commit(
            [
                cell(one, (2, INHERITED, INHERITED)),
                cell(two, (0, 1, NOT_ASKED), correct=0),
                cell(timed_out, (INHERITED,) * 3, correct=None),
            ],
            [fork(one, 0, 2, correct=0), fork(two, 0, 0, correct=1), fork(two, 1, 1, correct=None)],
        )
        first, second = grade_cubes(ledger)
    assert first.problem_ids == ("doc 0", "doc 1")
    assert first.baseline.tolist() == [[1, -1], [-1, 0]]
    assert first.knockout[0].tolist() == [[0, -1], [-1, 1]]
    assert first.knockout[1].tolist() == [[1, -1], [-1, -1]]
    assert first.knockout[2].tolist() == [[1, -1], [-1, -1]]
    assert first.forked[0].tolist() == [[True, False], [False, True]]
    assert [c.group for c in first.candidates] == ["candidate", "control", "canary"]
    assert second.baseline.tolist() == [[-1]]


def test_regrading_needs_no_generation(tmp_path: Path) -> None:
    key = CellKey(0, 0, 0)
    with new_ledger(tmp_path) as ledger:
        ledger.commit([cell(key, (2, -1, -1), correct=None)], [fork(key, 0, 2)])
        ledger.regrade([(key, None, 1, "ok", "four"), (key, 0, 1, "ok", "five")])
        (cube, _) = grade_cubes(ledger)
        assert cube.baseline[0, 0] == 1
        assert cube.knockout[:, 0, 0].tolist() == [1, 1, 1]
        rows = ledger.query("SELECT candidate, extracted FROM generation ORDER BY candidate")
        assert rows == [(-1, "four"), (0, "five")]


def test_totals_of_forks_keep_up_with_the_forks(tmp_path: Path) -> None:
    one, two = CellKey(0, 0, 0), CellKey(0, 1, 1)
    scan = f"SELECT {FORK_TOTALS} FROM fork GROUP BY 1, 2, 3, 4 ORDER BY 1, 2, 3, 4"

    def agree(ledger: Ledger, n: int) -> None:
        kept = sorted(ledger.fork_totals())
        assert [tuple(total) for total in kept] == ledger.query(scan)
        assert sum(total.n for total in kept) == n

    with new_ledger(tmp_path) as ledger:
        agree(ledger, 0)
        ledger.commit(
            [cell(one, (2, 1, INHERITED)), cell(two, (0, 1, INHERITED))],
            [fork(one, 0, 2), fork(one, 1, 1), fork(two, 0, 0, finish="error", correct=None)],
        )
        agree(ledger, 3)
        assert ledger.fork_totals()[0].n_shared + ledger.fork_totals()[1].n_shared == 3
        ledger.regrade([(one, 1, None, "timeout", None), (one, 0, 1, "ok", "same grade")])
        agree(ledger, 3)
        assert totals(ledger).grades == {"ok": 4, "timeout": 1}
        ledger.forget_failures()
        agree(ledger, 2)


def test_a_failed_commit_leaves_nothing(tmp_path: Path) -> None:
    key = CellKey(0, 0, 0)
    with new_ledger(tmp_path) as ledger:
        ledger.commit([cell(key, (2, -1, -1))])
        with pytest.raises(KnockoutError):
            ledger.commit([cell(CellKey(0, 1, 0), (-1, -1, -1)), cell(key, (2, -1, -1))])
        assert ledger.decided()[0] == [key]
        ledger.commit([cell(CellKey(0, 1, 0), (-1, -1, -1))])


def test_an_interrupt_anywhere_leaves_the_ledger_usable(tmp_path: Path) -> None:
    with new_ledger(tmp_path) as ledger:
        session = ledger.add_session("2026-01-01", "host", 1)
        interrupted = 0
        for moment in range(1, 301):
            left = moment

            def interrupt(frame: FrameType, event: str, argument: object) -> Any:
                nonlocal left, interrupted
                left -= 1
                if left == 0:
                    interrupted += 1
                    raise KeyboardInterrupt
                return interrupt

            kept = None  # a traceback keeps what it passed through alive, as in a real interrupt
            sys.settrace(interrupt)
            try:
                ledger.set_wall(session, moment)
            except KeyboardInterrupt as error:
                kept = error
            finally:
                sys.settrace(None)
            ledger.set_wall(session, -moment)
            assert ledger.query("SELECT wall_s FROM session") == [(-moment,)]
            del kept
            ledger.set_wall(session, 0)
            assert ledger.query("SELECT wall_s FROM session") == [(0,)]
        assert 20 < interrupted < 300  # all of it was tried


def _fill_until_refused(folder: Path, answers: multiprocessing.Queue) -> None:
    """In a process of its own: a limit on file sizes stands for a full disk."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    ledger = new_ledger(folder, n_problems=400)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 18, 1 << 18))
    rng = np.random.default_rng(0)
    done = 0
    try:
        for p in range(400):
            tokens = rng.integers(0, 50_000, 4000).astype(np.int32)
            key = CellKey(0, p, 0)
            row = CellRow(key, 1, tokens, "stop", 1, "ok", None, None, ids(-1, -1, -1))
            ledger.commit([row])
            done += 1
    except KnockoutError as error:
        answers.put((done, str(error)))


def test_a_full_disk_is_told_and_loses_nothing_committed(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    worker = context.Process(target=_fill_until_refused, args=(tmp_path, answers))
    worker.start()
    done, message = answers.get(timeout=60)
    worker.join()
    assert done > 0
    assert "What was committed is safe" in message
    with Ledger.open(tmp_path / "run.db", write=True) as ledger:
        assert len(ledger.decided()[0]) == done


def test_a_process_killed_while_writing_leaves_a_valid_ledger(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    for delay in (0.0, 0.02, 0.05):
        folder = tmp_path / str(delay)
        folder.mkdir()
        ready = context.Event()
        worker = context.Process(target=_write_for_ever, args=(folder, ready))
        worker.start()
        assert ready.wait(60)
        time.sleep(delay)
        os.kill(worker.pid, signal.SIGKILL)  # type: ignore[arg-type]
        worker.join()
        with RunLock(folder), Ledger.open(folder / "run.db", write=True) as ledger:
            keys, _ = ledger.decided()
            assert keys == [CellKey(0, p, 0) for p in range(len(keys))]
            assert len(keys) > 0
            assert totals(ledger).forks == len(keys)


def _write_for_ever(folder: Path, ready: object) -> None:
    with RunLock(folder):
        ledger = new_ledger(folder, n_problems=100_000)
        for p in range(100_000):
            key = CellKey(0, p, 0)
            ledger.commit([cell(key, (2, -1, -1))], [fork(key, 0, 2)])
            ready.set()  # type: ignore[attr-defined]


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    with new_ledger(tmp_path, n_problems=500) as ledger:
        ledger.commit([cell(CellKey(0, p, 0), (-1, -1, -1), n=50) for p in range(500)])
    path = tmp_path / "run.db"
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(size - 4096)
        file.write(b"\xff" * 4096)
    with pytest.raises(KnockoutError, match="damaged"):
        Ledger.open(path, write=True)
    path.write_bytes(b"not a database at all, but long enough to be read as one" * 100)
    with pytest.raises(KnockoutError, match="damaged"):
        Ledger.open(path)


def test_other_formats_and_empty_folders(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no run here"):
        Ledger.open(tmp_path / "run.db")
    new_ledger(tmp_path).close()
    assert Ledger.is_begun(tmp_path / "run.db")
    db = sqlite3.connect(tmp_path / "run.db")
    db.execute("PRAGMA user_version = 999")
    db.close()
    with pytest.raises(UsageError, match="format 999"):
        Ledger.open(tmp_path / "run.db")
    assert not Ledger.is_begun(tmp_path / "none.db")


def test_nothing_begins_anew_where_a_ledger_lies(tmp_path: Path) -> None:
    path = tmp_path / "run.db"
    with new_ledger(tmp_path) as ledger:
        ledger.commit([cell(CellKey(0, 0, 0), (-1, -1, -1))])
        # A copy without the journal is an older state of the run, with its whole plan.
        (tmp_path / "copy.db").write_bytes(path.read_bytes())
        with Ledger.open(tmp_path / "copy.db") as copy:
            assert copy.candidates == tuple(CANDIDATES)
        ledger.checkpoint()
        (tmp_path / "copy.db").write_bytes(path.read_bytes())
        with Ledger.open(tmp_path / "copy.db") as copy:
            assert totals(copy).cells == 1
        path.rename(tmp_path / "elsewhere.db")
        with pytest.raises(UsageError, match=r"is missing, but its run\.db-wal is here"):
            Ledger.is_begun(path)
    path.touch()
    assert Ledger.is_begun(path)
    for write in (False, True):
        with pytest.raises(KnockoutError, match="the ledger is empty: a copy made without its"):
            Ledger.open(path, write=write)


@pytest.mark.parametrize("loss", ["file", "journal", "folder", "replaced"])
def test_a_ledger_that_goes_missing_is_noticed_and_saved(tmp_path: Path, loss: str) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    path = folder / "run.db"
    with new_ledger(folder, n_problems=100) as ledger:
        ledger.commit([cell(CellKey(0, p, 0), (-1, -1, -1)) for p in range(50)])
        ledger.in_place()
        if loss == "file":
            path.unlink()
        elif loss == "journal":
            path.with_name("run.db-wal").unlink()
        elif loss == "folder":
            folder.rename(tmp_path / "moved")
        else:
            (tmp_path / "other.db").write_bytes(b"another file")
            (tmp_path / "other.db").rename(path)
        with pytest.raises(KnockoutError, match="while the run worked, so it stops") as told:
            ledger.commit([cell(CellKey(0, 99, 0), (-1, -1, -1))])
    left = {"file": folder / "run.rescued.db", "replaced": folder / "run.rescued.db",
            "journal": path, "folder": tmp_path / "moved" / "run.db"}[loss]  # fmt: skip
    assert loss == "folder" or left.name in str(told.value)
    (tmp_path / "again").mkdir()
    os.rename(left, tmp_path / "again" / "run.db")
    with Ledger.open(tmp_path / "again" / "run.db", write=True) as ledger:
        assert totals(ledger).cells == 50
        assert list(faults(ledger)) == []


def test_appended_candidates_problems_and_seeds(tmp_path: Path) -> None:
    one, two = CellKey(0, 0, 0), CellKey(0, 1, 0)
    with new_ledger(tmp_path) as ledger:
        ledger.commit([cell(one, (2, INHERITED, INHERITED))], [fork(one, 0, 2)])
        ledger.extend(
            [Candidate("d", ban((5,)), ('"d"',))],
            [BenchmarkRow("third", "acc", 2, "f3")],
            [ProblemRow(0, 2, "doc 2", "more", ids(5)), ProblemRow(2, 0, "y", "say", ids(7))],
            {0: 4},
            {"identity": '{"new": 1}'},
        )
        assert [c.name for c in ledger.candidates] == ["a", "b", "A/A", "d"]
        assert [(b.name, b.n_seeds) for b in ledger.benchmarks] == [
            ("first", 4), ("second", 1), ("third", 2),
        ]  # fmt: skip
        assert ledger.decided()[1].tolist() == [[2, -1, -1, NOT_ASKED]]
        assert totals(ledger).planned_cells == 3 * 4 + 1 + 2
        ledger.commit(
            [cell(two, (INHERITED,) * 4)],
            [fork(one, 3, 1)],
            extended=[ExtendedCell(one, ids(2, INHERITED, INHERITED, 1))],
        )
    with Ledger.open(tmp_path / "run.db") as ledger:
        assert ledger.decided()[1].tolist() == [[2, -1, -1, 1], [-1, -1, -1, -1]]
        assert (totals(ledger).forks, totals(ledger).owed_forks) == (2, 0)
        assert ledger.meta_json("identity") == {"new": 1}
        assert ledger.trajectory(one, 3).tolist() == [10, 50, 51, 52]
        assert list(faults(ledger)) == []


def test_no_flipped_bit_changes_a_row_unnoticed(tmp_path: Path) -> None:
    """Damage at rest: whatever a reader would see otherwise, the check names."""
    with new_ledger(tmp_path, n_problems=40) as ledger:
        keys = [CellKey(0, p, 0) for p in range(40)]
        ledger.commit(
            [cell(key, (2, 1, INHERITED), n=30) for key in keys],
            [fork(key, c, 2 - c) for key in keys for c in (0, 1)],
            [AuditRow(key, 2, -1, ids(1, 2), "stop", None) for key in keys],
        )
        ledger.add_session("2026-01-01", "host", 1)
    path = tmp_path / "run.db"
    whole = path.read_bytes()
    shown = _everything(path)
    rng = np.random.default_rng(0)
    for n in range(300):
        broken = bytearray(whole)
        for bit in rng.integers(0, 8 * len(whole), size=1 + n % 5).tolist():
            broken[bit // 8] ^= 1 << bit % 8
        path.write_bytes(broken)
        try:
            with Ledger.open(path) as ledger:
                noticed = next(faults(ledger), None)
        except KnockoutError as error:
            noticed = str(error)
        if noticed is None:
            assert _everything(path) == shown


def _everything(path: Path) -> dict[str, list[tuple[Any, ...]]]:
    with Ledger.open(path) as ledger:
        tables = (*COMPARED_TABLES, "meta", "session", "fork_total")
        # Some bits of a compressed blob change nothing in what it holds.
        return {
            table: [
                tuple(
                    unpack_ids(value).tolist() if str(value).startswith("b'\\x01x") else value
                    for value in row
                )
                for row in ledger.query(f"SELECT * FROM {table}")
            ]
            for table in tables
        }


def test_reading_beside_the_writer(tmp_path: Path) -> None:
    with new_ledger(tmp_path) as writer, Ledger.open(tmp_path / "run.db") as reader:
        assert totals(reader).cells == 0
        writer.commit([cell(CellKey(0, 0, 0), (-1, -1, -1))])
        assert totals(reader).cells == 1
        with pytest.raises(KnockoutError):
            reader.commit([cell(CellKey(0, 1, 0), (-1, -1, -1))])


def test_the_journal_fits_the_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with new_ledger(tmp_path) as ledger:
        assert ledger.journal_mode == "wal"
        assert ledger.query("PRAGMA journal_mode") == [("wal",)]
    monkeypatch.setattr("knockout.ledger.connection.filesystem_of", lambda _: "nfs4")
    with Ledger.open(tmp_path / "run.db", write=True) as ledger:
        assert ledger.journal_mode == "delete"
        assert ledger.query("PRAGMA synchronous") == [(2,)]
        ledger.commit([cell(CellKey(0, 0, 0), (-1, -1, -1))])
    assert [is_network(k) for k in ("nfs", "nfs4", "cifs", "fuse.sshfs", "ext4", "tmpfs", "")] == [
        True, True, True, True, False, False, False,
    ]  # fmt: skip
    assert filesystem_of(tmp_path)


def _hold(folder: Path, ready: object) -> None:
    with RunLock(folder):
        ready.set()  # type: ignore[attr-defined]
        time.sleep(60)


def test_a_second_process_is_refused_and_a_dead_one_is_not_waited_for(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    first = context.Process(target=_hold, args=(tmp_path, ready))
    first.start()
    assert ready.wait(60)
    with pytest.raises(UsageError) as caught, RunLock(tmp_path):
        pass
    assert f"process {first.pid} on {socket.gethostname()}" in str(caught.value)
    assert RunLock(tmp_path).holder() == f"process {first.pid} on {socket.gethostname()}"
    first.kill()
    first.join()
    assert json.loads((tmp_path / "run.lock").read_text())["pid"] == first.pid
    assert RunLock(tmp_path).holder() is None
    with RunLock(tmp_path):
        assert json.loads((tmp_path / "run.lock").read_text())["pid"] == os.getpid()
    assert (tmp_path / "run.lock").read_text() == ""
