"""The main job with the real model in vLLM: run twice, killed and resumed, against itself."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tiny import embedded

from knockout.ledger.schema import COMPARED_TABLES

pytest.importorskip("vllm")
pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

SWEEP = """
model: smollm2-135m
engine: {kind: vllm, dtype: float32, max_model_len: 512, max_num_seqs: 8, kv_cache_gib: 1}
benchmarks: [knockout_starter_arithmetic, knockout_starter_instructions]
limit: 12
seeds: 1
sampling: {temperature: 0.6, top_p: 0.95, top_k: 20, max_tokens: 40}
candidates: {strings: [" the", "1", " zebra"], sets: {marks: [".", ","]}}
audit: 0.25
"""


def start(sweep: Path, out: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "knockout", "run", str(sweep), "--out", str(out)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, "OMP_WAIT_POLICY": "passive"},
    )  # fmt: skip


def finish(process: subprocess.Popen[str]) -> None:
    output, _ = process.communicate(timeout=400)
    assert process.returncode == 0, output


def cells(out: Path) -> int:
    if not (out / "run.db").exists():
        return 0
    try:
        with sqlite3.connect(out / "run.db", timeout=5) as db:
            return int(db.execute("SELECT COUNT(*) FROM cell").fetchone()[0])
    except sqlite3.OperationalError:  # not laid out yet
        return 0


def dump(out: Path) -> dict[str, list[tuple[Any, ...]]]:
    with sqlite3.connect(out / "run.db") as db:
        return {t: sorted(db.execute(f"SELECT * FROM {t}"), key=repr) for t in COMPARED_TABLES}


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    embedded()
    path = tmp_path_factory.mktemp("sweep") / "sweep.yaml"
    path.write_text(SWEEP)
    return path


@pytest.fixture(scope="module")
def undisturbed(sweep: Path) -> Path:
    out = sweep.parent / "undisturbed"
    finish(start(sweep, out))
    return out


def test_forks_are_exact_and_the_summary_adds_up(undisturbed: Path) -> None:
    summary = json.loads((undisturbed / "summary.json").read_text())
    assert summary["complete"]
    assert summary["n_cells"] == 24
    assert summary["trajectories"] == 24 + summary["forks"] + summary["inherited"] == 24 * 5
    assert summary["coupling_errors"] == 0
    # Each fork's first token is compared with the baseline's there; audits are runs from scratch.
    assert 20 < summary["steps_checked"] <= summary["forks"]
    assert summary["audited"] > 5
    assert summary["fork_errors"] == 0
    assert summary["tokens_generated"] < summary["tokens_naive"]


def test_no_knockout_holds_its_banned_id(undisturbed: Path) -> None:
    from knockout.ledger import Ledger

    with Ledger.open(undisturbed / "run.db") as ledger:
        keys, steps = ledger.decided()
        checked = 0
        for key, of_cell in zip(keys, steps, strict=True):
            for c, candidate in enumerate(ledger.candidates):
                tokens = ledger.trajectory(key, c).tolist()
                assert set(candidate.token_ids).isdisjoint(tokens)
                checked += of_cell[c] >= 0
        assert checked > 20


def test_a_token_that_never_occurs_changes_nothing(undisturbed: Path) -> None:
    rows = json.loads((undisturbed / "verdicts.json").read_text())
    zebra = [row for row in rows if row["candidate"] == '" zebra"']
    assert len(zebra) == 3
    assert all(row["delta"] == 0 and row["n_forked"] == 0 for row in zebra)


def test_killed_and_resumed_equals_undisturbed(sweep: Path, undisturbed: Path) -> None:
    out = sweep.parent / "killed"
    process = start(sweep, out)
    while not cells(out) and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    at_kill = cells(out)
    assert 0 < at_kill < 24, "the run must be killed in the middle for this test to mean anything"
    finish(start(sweep, out))
    assert dump(out) == dump(undisturbed)
    for name in ("verdicts.csv", "verdicts.json"):
        assert (out / name).read_bytes() == (undisturbed / name).read_bytes()
