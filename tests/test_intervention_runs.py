"""Whole runs of every kind of intervention, each knockout audited against one from scratch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from child_runs import sweep_file

import knockout
from knockout.config.file import load_sweep
from knockout.ledger import CellKey, Ledger
from knockout.sweep.run import run_sweep

CANDIDATES: dict[str, Any] = {
    "strings": ["w1", "w2", "w3", "w4"],
    "dose": [1, -2],
    "replace": {"w5": "w6"},
    "steps": [1, 8],
    "pairs": "all",
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sweep")
    path = sweep_file(folder, n_problems=8, candidates=CANDIDATES, audit=1.0)
    run_sweep(load_sweep(path), folder / "run")
    return folder / "run"


def test_every_knockout_is_what_a_run_from_scratch_gives(finished: Path) -> None:
    summary = json.loads((finished / "summary.json").read_text())
    assert summary["complete"]
    assert (summary["n_doses"], summary["n_pairs"]) == (8, 6)
    assert summary["audited"] == summary["forks"] + summary["inherited"] > 200
    assert summary["fork_errors"] == 0


def test_each_does_what_it_says_and_nothing_elsewhere(finished: Path) -> None:
    first, end = CANDIDATES["steps"]
    kinds = set()
    with Ledger.open(finished / "run.db") as ledger:
        keys, _ = ledger.decided()
        for c, candidate in enumerate(ledger.candidates):
            change = candidate.intervention
            for key in keys:
                ids = ledger.trajectory(CellKey(*key), c).tolist()
                base = ledger.trajectory(CellKey(*key)).tolist()
                assert ids[:first] == base[:first] or candidate.group == "canary"
                if change.kind != "penalty":
                    assert not set(ids[first:end]) & set(change.token_ids)
                kinds.add((candidate.family, change.kind))
    assert kinds == {
        ("singles", "ban"), ("dose", "penalty"), ("singles", "replace"), ("pairs", "ban"),
    }  # fmt: skip


def test_the_tables_name_them(finished: Path) -> None:
    run = knockout.load_run(finished)
    table = run.verdicts().set_index("candidate")
    assert table.loc['"w1" λ=-2', "strength"] == -2
    assert table.loc['"w5" → "w6"', "replacement"] == 6
    assert set(table["family"]) == {"singles", "dose", "pairs"}
    found = run.interactions()
    assert len(found) == 6
    deltas = table["delta"]
    for row in found.to_dict("records"):
        expected = deltas[row["pair"]] - deltas[row["first"]] - deltas[row["second"]]
        assert row["interaction"] == pytest.approx(expected)
