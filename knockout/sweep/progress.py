"""Progress of a run: live on a terminal and in notebooks, an occasional plain line elsewhere."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from typing import Any

from knockout.sweep.jobs import Snapshot

__all__ = ["Display"]

_LINE_EVERY_S = 30.0
_REFRESH_EVERY_S = 0.25


class Display:
    """Shows snapshots on stderr.

    Args:
        n_cells: Cells of the whole run.
        n_done: Cells that earlier sessions finished.
    """

    def __init__(self, n_cells: int, n_done: int) -> None:
        self.n_cells, self.n_done = n_cells, n_done
        self._forks_before: int | None = None
        self.started = time.monotonic()
        self._shown = 0.0 if sys.stderr.isatty() else self.started
        self._live: Any = None
        self._bar: Any = None  # in notebooks

    def __enter__(self) -> Display:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn
            from rich.table import Column

            self._live = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=12),
                # Wraps on a narrow terminal, so that nothing is cut off.
                TextColumn(
                    "{task.fields[line]}",
                    markup=False,
                    table_column=Column(ratio=1, overflow="fold"),
                ),
                expand=True,
                console=Console(stderr=True, no_color="NO_COLOR" in os.environ or None),
                transient=True,
            )
            self._live.start()
            self._task = self._live.add_task(
                "cells", total=self.n_cells, completed=self.n_done, line=""
            )
        elif "ipykernel" in sys.modules:
            from tqdm.auto import tqdm

            self._bar = tqdm(total=self.n_cells, initial=self.n_done, desc="cells", leave=False)
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            with contextlib.suppress(OSError):
                self._live.stop()
        if self._bar is not None:
            self._bar.close()

    def observe(self, snapshot: Snapshot) -> None:
        """Shows a snapshot, when it is time."""
        now = time.monotonic()
        live = self._live is not None or self._bar is not None
        if now - self._shown < (_REFRESH_EVERY_S if live else _LINE_EVERY_S):
            return
        self._shown = now
        line = self.line(snapshot, now - self.started)
        if self._live is not None:
            self._live.update(self._task, completed=snapshot.cells, line=line)
        elif self._bar is not None:
            self._bar.n = snapshot.cells
            self._bar.set_postfix_str(line)
        else:
            with contextlib.suppress(OSError):  # the reader is gone; the run continues
                print(f"cells {line}", file=sys.stderr, flush=True)

    def numbers(self, snapshot: Snapshot) -> dict[str, float]:
        """The same for a tracker."""
        elapsed = max(time.monotonic() - self.started, 1e-9)
        return {
            "cells": snapshot.cells,
            "cells_share": snapshot.cells / max(self.n_cells, 1),
            "forks": snapshot.forks,
            "waiting": snapshot.waiting,
            "running": snapshot.running,
            "tokens": snapshot.tokens,
            "tokens_per_s": snapshot.tokens / elapsed,
            **{f"answers_lost/{name}": net for name, net in snapshot.leading},
        }

    def line(self, snapshot: Snapshot, elapsed: float) -> str:
        """One line: cells, forks, speed, time left, and who leads so far."""
        if self._forks_before is None:
            self._forks_before = snapshot.forks
        rate = snapshot.tokens / max(elapsed, 1e-9)
        parts = [
            f"{snapshot.cells}/{self.n_cells}",
            f"{snapshot.forks} forks",
            f"{snapshot.running} running",
            f"{rate:.0f} tokens/s",
        ]
        if snapshot.waiting:
            parts.insert(2, f"{snapshot.waiting} waiting")
        left = self._tokens_left(snapshot)
        if left and rate > 0:
            parts.append(f"{_duration(left / rate)} left")
        if snapshot.leading:
            names = ", ".join(f"{name} \N{MINUS SIGN}{net}" for name, net in snapshot.leading)
            parts.append(f"answers lost: {names}")
        return ", ".join(parts)

    def _tokens_left(self, snapshot: Snapshot) -> float:
        """Cost model: the average of this session's cells and requests, times what is left.

        A cell to come costs its baseline and its forks; running work counts as half done.
        """
        cells = snapshot.cells - self.n_done
        requests = cells + snapshot.forks - (self._forks_before or 0)
        if cells <= 0:
            return 0.0
        each = snapshot.tokens / requests
        to_come = max(self.n_cells - snapshot.cells, 0) * snapshot.tokens / cells
        return to_come + each * (snapshot.waiting + snapshot.running / 2)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
