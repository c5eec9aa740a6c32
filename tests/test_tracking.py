"""Trackers really written to and read back; and a run that does not care when one fails."""

from __future__ import annotations

import logging
import os
import queue
import subprocess
import sys
import time
from collections.abc import Iterator
from logging.handlers import QueueHandler
from pathlib import Path
from typing import Any

import pytest
from small_run import SETTINGS

import knockout
import knockout.sweep.tracking
from knockout.errors import UsageError
from knockout.sweep.tracking import Tracking

CONFIG = {"model": "m", "seeds": 3}


def told(kind: str, folder: Path) -> None:
    with Tracking(kind, folder, CONFIG) as tracking:
        for step in range(4):
            tracking.tell({"cells": step, "share": step / 4}, step, now=True)
        tracking.tell({"cells": 9.0}, 9)  # too soon after the last one


def leveldb_records(data: bytes) -> Iterator[bytes]:
    """Records of W&B's file: LevelDB's log format after a header of seven bytes."""
    at, whole = 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        if kind == 0:
            return
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # full, or the last part
            yield whole
            whole = b""


def test_mlflow_file_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "ml").as_uri())
    told("mlflow", tmp_path)
    client = mlflow.MlflowClient((tmp_path / "ml").as_uri())
    experiment = client.get_experiment_by_name("knockout")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.data.params == {"model": "m", "seeds": "3"}
    assert run.info.status == "FINISHED"
    history = client.get_metric_history(run.info.run_id, "share")
    assert [(m.step, m.value) for m in history] == [(0, 0.0), (1, 0.25), (2, 0.5), (3, 0.75)]


def test_wandb_offline(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    code = (
        "from pathlib import Path; from test_tracking import told; "
        f"told('wandb', Path({str(tmp_path)!r}))"
    )
    # In a process of its own: W&B keeps a service running as long as its process lives.
    environment = {
        **os.environ, "WANDB_MODE": "offline", "PYTHONPATH": os.pathsep.join(sys.path),
    }  # fmt: skip
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, timeout=100)
    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    from wandb.proto import wandb_internal_pb2

    rows = []
    for data in leveldb_records(file.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            items = {(i.key or "/".join(i.nested_key)): i.value_json for i in record.history.item}
            rows.append((float(items["_step"]), float(items["share"])))
    assert rows == [(0, 0.0), (1, 0.25), (2, 0.5), (3, 0.75)]


@pytest.mark.engine
def test_a_run_writes_tensorboard_events(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    out = tmp_path / "run"
    knockout.Sweep(**{**SETTINGS, "limit": 1, "seeds": 1}, tracker="tensorboard").run(out)
    events = EventAccumulator(str(out / "tensorboard"))
    events.Reload()
    (last,) = events.Scalars("summary/tokens_generated")
    assert last.value == knockout.load_run(out).summary()["tokens_generated"]
    # How a run is watched is no part of what it is.
    again = knockout.Sweep(**{**SETTINGS, "limit": 1, "seeds": 1}).run(out)
    assert again.summary()["sessions"] == 1


def test_a_failing_tracker_is_said_once_and_waited_for_by_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Only its own handler: how earlier tests in this process set up logging must not matter.
    said: queue.SimpleQueue[logging.LogRecord] = queue.SimpleQueue()
    logger = logging.getLogger("knockout")
    monkeypatch.setattr(logger, "handlers", [QueueHandler(said)])
    monkeypatch.setattr(logger, "propagate", False)

    def slow(folder: Path, config: Any) -> Any:
        time.sleep(0.5)
        raise ConnectionError("no network\nand more")

    monkeypatch.setitem(knockout.sweep.tracking._BACKENDS, "wandb", slow)
    with Tracking("wandb", tmp_path, {}) as one:
        began = time.monotonic()
        for step in range(5000):
            one.tell({"cells": step}, step, now=True)
        assert time.monotonic() - began < 0.4
    record = said.get_nowait()
    assert said.empty()
    assert record.getMessage().endswith("failed, and the run goes on without it: no network")


def test_a_tracker_that_is_not_there_is_refused_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match="pip install wandb"):
        Tracking("wandb", tmp_path, {})
    with pytest.raises(UsageError, match="tracker"):
        knockout.Sweep(**SETTINGS, tracker="neptune")
