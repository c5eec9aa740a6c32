"""Joining runs: shards, disjoint candidates, overlaps; killed at any moment; against one run at once."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sqlite3
import time
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest
from child_runs import dump, fork_server, sweep_file

import knockout
from knockout.cli.runs import parse_shard
from knockout.errors import KnockoutError, UsageError
from knockout.ledger import Ledger, totals
from knockout.ledger.check import faults
from knockout.sweep.merge import merge_runs
from knockout.sweep.run import run_sweep

Rows = dict[str, list[tuple[Any, ...]]]


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sweep_file(tmp_path_factory.mktemp("words"), n_problems=10, audit=0.5)


@pytest.fixture(scope="module")
def whole(words: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One run at once."""
    out = tmp_path_factory.mktemp("whole") / "run"
    run_sweep(knockout.Sweep.load(words), out)
    return out


@pytest.fixture(scope="module")
def shards(words: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("shards")
    for k in (1, 2, 3):
        run_sweep(knockout.Sweep.load(words), folder / str(k), shard=(k, 3))
    return [folder / str(k) for k in (1, 2, 3)]


def sound(out: Path) -> None:
    with Ledger.open(out / "run.db") as ledger:
        assert list(faults(ledger)) == []


def test_shards_are_disjoint_and_together_the_whole(
    shards: list[Path], whole: Path, tmp_path: Path
) -> None:
    cells = [{row[:3] for row in dump(shard)["cell"]} for shard in shards]
    assert sum(map(len, cells)) == len(set.union(*cells)) == len(dump(whole)["cell"])
    # Half merged is a run that owes the rest, and the rest can be merged into it.
    merge_runs(shards[:2], tmp_path / "half")
    with Ledger.open(tmp_path / "half" / "run.db") as ledger:
        assert not totals(ledger).complete
    counts = merge_runs([tmp_path / "half", shards[2]], tmp_path / "run")
    assert counts == {"runs": 2, "cells": 20, "forks": len(dump(whole)["fork"]),
                      "audits": len(dump(whole)["audit"]), "shared": 0}  # fmt: skip
    assert dump(tmp_path / "run") == dump(whole)
    sound(tmp_path / "run")
    with Ledger.open(tmp_path / "run" / "run.db") as ledger:
        assert totals(ledger).complete
        assert len(ledger.sessions()) == 3
    one, other = knockout.load_run(whole).verdicts(), knockout.load_run(tmp_path / "run").verdicts()
    assert one.equals(other)


def test_the_rest_of_a_merged_run_is_generated(
    words: Path, shards: list[Path], whole: Path, tmp_path: Path
) -> None:
    merge_runs(shards[1:], tmp_path / "run")
    run_sweep(knockout.Sweep.load(words), tmp_path / "run")
    assert dump(tmp_path / "run") == dump(whole)


def test_what_both_have_must_agree(shards: list[Path], whole: Path, tmp_path: Path) -> None:
    counts = merge_runs([whole, shards[0]], tmp_path / "agree")
    assert counts["shared"] == len(dump(shards[0])["cell"]) > 0
    assert dump(tmp_path / "agree") == dump(whole)
    other = Path(shutil.copytree(shards[0], tmp_path / "other"))
    with Ledger.open(other / "run.db", write=True) as ledger:
        key = ledger.decided()[0][0]
        now = 1 - int(ledger.cell_grade(key) or 0)
        ledger.regrade([(key, None, now, "ok", "else")])
        fork = next(iter(ledger.fork_rows(ledger.decided()[0][-1])))
    with sqlite3.connect(other / "run.db") as db:
        db.execute(
            "UPDATE generation SET ids = (SELECT ids FROM generation WHERE candidate = -1 LIMIT 1)"
            " WHERE benchmark = ? AND problem = ? AND seed = ? AND candidate = ?",
            (*fork.key, fork.candidate),
        )
    db.close()
    with pytest.raises(KnockoutError, match="disagree about") as told:
        merge_runs([whole, other], tmp_path / "no")
    assert "grade" in str(told.value)
    assert f"seed {fork.key.seed}" in str(told.value)
    assert "another trajectory" in str(told.value)
    assert not list((tmp_path / "no").glob("run.db*"))


def test_disjoint_candidates(words: Path, whole: Path, tmp_path: Path) -> None:
    strings = [[f"w{i}" for i in range(1, 4)], [f"w{i}" for i in range(4, 7)]]
    for n, some in enumerate(strings):
        run_sweep(
            knockout.Sweep.load(words, f"candidates.strings={json.dumps(some)}"), tmp_path / str(n)
        )
    merge_runs([tmp_path / "0", tmp_path / "1"], tmp_path / "run")
    sound(tmp_path / "run")
    one = knockout.load_run(whole).verdicts().sort_values("candidate", ignore_index=True)
    other = knockout.load_run(tmp_path / "run").verdicts()
    other = other.sort_values("candidate", ignore_index=True)
    assert one.drop(columns="looks").equals(other.drop(columns="looks"))
    assert set(other["looks"]) == {2}  # the first part was judged by itself
    with Ledger.open(tmp_path / "run" / "run.db") as ledger:
        assert totals(ledger).complete
        assert totals(ledger).tokens_naive == _totals(whole).tokens_naive
        assert totals(ledger).tokens_generated == _totals(whole).tokens_generated


def _totals(out: Path) -> Any:
    with Ledger.open(out / "run.db") as ledger:
        return totals(ledger)


def test_what_was_not_made_alike_is_refused(words: Path, whole: Path, tmp_path: Path) -> None:
    run_sweep(
        knockout.Sweep.load(words, "sampling.temperature=0.7"), tmp_path / "warm", shard=(1, 9)
    )
    with pytest.raises(UsageError, match=r"cannot be joined.*\n  sampling"):
        merge_runs([whole, tmp_path / "warm"], tmp_path / "out")
    other = Path(shutil.copytree(whole, tmp_path / "weights"))
    with Ledger.open(other / "run.db", write=True) as ledger:
        record = ledger.meta_json("weights")
        record["values"] = [value - 1 for value in record["values"]]
        ledger.note("weights", json.dumps(record))
    with pytest.raises(UsageError, match="different weights"):
        merge_runs([whole, other], tmp_path / "out")
    with pytest.raises(UsageError, match="at least two"):
        merge_runs([whole, whole], tmp_path / "out")
    with pytest.raises(UsageError, match="found files there"):
        merge_runs([whole, other], whole)
    with pytest.raises(UsageError, match="no run here"):
        merge_runs([whole, tmp_path / "none"], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_shards_are_read() -> None:
    assert parse_shard("2/8") == (2, 8)
    assert parse_shard(None) == (1, 1)
    for text in ("0/8", "9/8", "1", "a/b", "1/2/3", "-1/2", "1/0", "", "1/" + "9" * 5000):
        with pytest.raises(UsageError, match="--shard: found"):
            parse_shard(text)


def test_a_race_is_not_sharded(words: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="races"):
        run_sweep(
            knockout.Sweep.load(words, "adaptive={max_seeds: 2}"), tmp_path / "run", shard=(1, 2)
        )


def _merge(folders: list[Path], out: Path) -> None:
    from knockout.sweep import merge

    merge._ROWS = 4
    merge_runs(folders, out)


@pytest.mark.engine
def test_killed_at_random_moments(shards: list[Path], whole: Path, tmp_path: Path) -> None:
    """Fifty kills: what is left is no run or the whole one, and merging again makes the whole."""
    context: ForkServerContext = fork_server()
    expected = dump(whole)
    began = time.monotonic()
    process = context.Process(target=_merge, args=(shards, tmp_path / "timed"))
    process.start()
    process.join()
    took = time.monotonic() - began
    rng = random.Random(0)
    killed = 0
    out = tmp_path / "run"
    for _ in range(50):
        process = context.Process(target=_merge, args=(shards, out))
        process.start()
        process.join(rng.uniform(0.0, took))
        if process.is_alive():
            os.kill(process.pid or 0, signal.SIGKILL)
            killed += 1
        process.join()
        if (out / "run.db").exists():
            assert dump(out) == expected
            shutil.rmtree(out)
    assert killed > 15
    merge_runs(shards, out)
    assert dump(out) == expected
    sound(out)
