"""The summary: what it counts, and what it finds suspicious."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from test_store import cell, fork, new_ledger

from knockout.config.sweep import Sweep
from knockout.ledger import INHERITED, NOT_ASKED, AuditRow, CellKey, Ledger
from knockout.sweep.summary import summarise

NONE = (INHERITED,) * 3


def a_sweep(temperature: float = 0.6) -> Sweep:
    return Sweep.model_validate(
        {
            "model": "m",
            "benchmarks": ["first", "second"],
            "candidates": {"ids": [1]},
            "sampling": {"temperature": temperature},
        }
    )


def two_repeats(ledger: Ledger, *lasts: int) -> None:
    """Two problems with two repeats each, whose trajectories end with these tokens."""
    rows = [cell(CellKey(0, p, s), NONE) for p in range(2) for s in range(2)]
    ledger.commit(
        [
            replace(row, tokens=np.append(row.tokens, last).astype(np.int32))
            for row, last in zip(rows, lasts, strict=True)
        ]
    )


@pytest.mark.parametrize(
    ("lasts", "temperature", "told"),
    [
        ((1, 1, 2, 2), 0.6, True),
        ((1, 1, 2, 3), 0.6, False),  # one problem that differs, at the same length
        ((1, 1, 2, 2), 0.0, False),  # greedy repeats are the same by rights
    ],
)
def test_repeats_that_are_all_identical_are_told(
    tmp_path: Path, lasts: tuple[int, ...], temperature: float, told: bool
) -> None:
    with new_ledger(tmp_path) as ledger:
        two_repeats(ledger, *lasts)
        warnings = summarise(ledger, a_sweep(temperature))["warnings"]
    assert any("seeds do not seem to reach" in warning for warning in warnings) == told


def test_repeats_of_other_lengths_are_not_identical(tmp_path: Path) -> None:
    with new_ledger(tmp_path) as ledger:
        ledger.commit([cell(CellKey(0, 0, 0), NONE, n=4), cell(CellKey(0, 0, 1), NONE, n=5)])
        assert summarise(ledger, a_sweep())["warnings"] == []


def test_the_canary_and_what_made_the_run(tmp_path: Path) -> None:
    one = CellKey(0, 0, 0)
    with new_ledger(tmp_path) as ledger:
        made = {
            "run_seed": 5,
            "model_fingerprint": "abc",
            "benchmark_fingerprints": {"first": "f1"},
            "sampling": {"temperature": 0.6},
        }
        ledger.note("identity", json.dumps(made))
        session = ledger.add_session("2026-01-01", "host", 1)
        engine = {"kind": "transformers", "model": "/somewhere", "versions": {"torch": "2"}}
        ledger.describe_session(session, {"knockout": "1.2", "engine": engine})
        ledger.commit(
            [cell(one, (INHERITED, INHERITED, 3)), cell(CellKey(0, 1, 0), (NOT_ASKED,) * 3)],
            [fork(one, 2, 3)],
            [AuditRow(one, 2, 1, np.array([1], dtype=np.int32), "stop", None)],
        )
        found = summarise(ledger, a_sweep())
    canary = found["canary"]
    assert (canary["forked"], canary["audited"], canary["fork_errors"]) == (1, 1, 1)
    assert (found["run_seed"], found["versions"]) == (5, ["1.2"])
    assert found["fingerprints"]["model"] == "abc"
    assert found["fingerprints"]["benchmarks"] == {"first": "f1"}
    assert found["engine"] == {"kind": "transformers", "versions": {"torch": "2"}}
    assert found["race"] is None
