"""Telling an experiment tracker how far a run is: W&B, MLflow or TensorBoard.

A tracker works in a thread of its own. If it fails, it logs the reason once and ends; the run goes
on and never waits for it.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from knockout.errors import UsageError

__all__ = ["Tracking"]

log = logging.getLogger("knockout")

_PROJECT = "knockout"
_EVERY_S = 5.0
_MOST_WAITING = 1000
_END_S = 30.0


class _Backend(Protocol):
    def log(self, values: Mapping[str, float], step: int) -> None: ...

    def close(self) -> None: ...


class _Wandb:
    """A W&B run; WANDB_PROJECT, WANDB_MODE=offline and the other variables of W&B are heard."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        import os

        import wandb

        settings = wandb.Settings(silent=True, console="off")
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", _PROJECT),
            name=folder.name,
            dir=str(folder),
            config=dict(config),
            settings=settings,
        )

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


class _Mlflow:
    """An MLflow run at MLFLOW_TRACKING_URI, in the experiment of MLFLOW_EXPERIMENT_NAME."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        import os

        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._metric = Metric
        self._client = MlflowClient()
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", _PROJECT)
        found = self._client.get_experiment_by_name(name)
        experiment = found.experiment_id if found else self._client.create_experiment(name)
        self._id = self._client.create_run(experiment, run_name=folder.name).info.run_id
        params = [Param(key, str(value)[:500]) for key, value in config.items()]
        self._client.log_batch(self._id, params=params)

    def log(self, values: Mapping[str, float], step: int) -> None:
        now = int(1000 * time.time())
        metrics = [self._metric(key, float(value), now, step) for key, value in values.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def close(self) -> None:
        self._client.set_terminated(self._id)


class _Tensorboard:
    """Event files in `tensorboard` in the run directory."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(log_dir=str(folder / "tensorboard"))
        text = "\n".join(f"    {key}: {value}" for key, value in config.items())
        self._writer.add_text("sweep", text)

    def log(self, values: Mapping[str, float], step: int) -> None:
        for key, value in values.items():
            self._writer.add_scalar(key, value, step)

    def close(self) -> None:
        self._writer.close()


_BACKENDS: dict[str, Callable[[Path, Mapping[str, Any]], _Backend]] = {
    "wandb": _Wandb,
    "mlflow": _Mlflow,
    "tensorboard": _Tensorboard,
}


class Tracking:
    """Numbers of a run for a tracker; a context that costs the run nothing.

    Args:
        kind: "wandb", "mlflow" or "tensorboard", which is also the name of the package; None for none.
        folder: The run directory; its name is the run's.
        config: What the run is, for the tracker's own table.

    Raises:
        UsageError: The tracker's package is not installed.
    """

    def __init__(self, kind: str | None, folder: Path, config: Mapping[str, Any]) -> None:
        self._kind, self._folder, self._config = kind, folder.resolve(), config
        self._queue: queue.Queue[tuple[dict[str, float], int] | None] = queue.Queue(_MOST_WAITING)
        self._told = float("-inf")
        self._thread: threading.Thread | None = None
        if kind is None:
            return
        from importlib.util import find_spec

        if find_spec(kind) is None:
            raise UsageError(
                f"tracker: {kind} is not installed; `pip install {kind}`, or leave the key out"
            )

    def __enter__(self) -> Tracking:
        if self._kind is not None:
            self._thread = threading.Thread(target=self._work, name="tracker", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._thread is None:
            return
        with contextlib.suppress(queue.Full):
            self._queue.put(None, timeout=1)
        self._thread.join(timeout=_END_S)
        if self._thread.is_alive():
            log.warning("tracker: %s still sends after %.0f s; left to itself", self._kind, _END_S)

    def tell(self, values: Mapping[str, float], step: int, *, now: bool = False) -> None:
        """Hands numbers to the tracker, at most every few seconds unless `now`; never waits."""
        if self._thread is None or not self._thread.is_alive():
            return
        if not now and time.monotonic() - self._told < _EVERY_S:
            return
        self._told = time.monotonic()
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait((dict(values), step))

    def _work(self) -> None:
        assert self._kind is not None
        try:
            backend: _Backend = _BACKENDS[self._kind](self._folder, self._config)
            while (item := self._queue.get()) is not None:
                backend.log(*item)
            backend.close()
        except Exception as error:  # whatever a tracker raises, the run goes on without it
            reason = (str(error) or type(error).__name__).splitlines()[0]
            log.warning(
                "tracker: %s failed, and the run goes on without it: %s", self._kind, reason
            )
