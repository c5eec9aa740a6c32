"""What the live pages ask for, read from the ledger when it has changed."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from knockout.report.build import candidate_replacements, join_pieces, themes
from knockout.report.data import details, overview, shown_config
from knockout.report.picks import picked_tokens, picks_of, read_picks
from knockout.report.plots import page_specs
from knockout.report.source import RunView, open_ledger, open_texts, read_run
from knockout.report.tables import LOST, SAME, UNGRADED, WON
from knockout.report.trajectories import PairKey, frequencies, pair

__all__ = ["LiveRun"]

_OUTCOMES = {LOST: "lost", SAME: "same", WON: "won", UNGRADED: "ungraded"}
_MOST_PAIRS = 2000
# A running sweep commits every few seconds; the verdicts of a large one take about as long.
_OLDEST_S = 5.0


class LiveRun:
    """A run directory as the server sees it; safe to use from several threads.

    Args:
        folder: The run directory.

    Raises:
        UsageError: There is no run.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = threading.Lock()
        self._read_at = -_OLDEST_S
        self._stamp: tuple[float, ...] = ()
        self._run: RunView | None = None
        self._overview: dict[str, Any] = {}
        with open_ledger(folder) as ledger:
            self.run = read_run(folder, ledger)
            self.texts = open_texts(self.run.sweep, ledger)
            self.candidates = ledger.candidates
            self.benchmarks = ledger.benchmarks

    def overview(self) -> dict[str, Any]:
        """The first page's data, with the texts of the candidates' tokens."""
        with self._lock:
            stamp = self._now()
            old = time.monotonic() - self._read_at >= _OLDEST_S
            if not self._overview or (old and stamp != self._stamp):
                self._read()
                self._stamp, self._read_at = stamp, time.monotonic()
            return self._overview

    def candidate(self, index: int) -> dict[str, Any] | None:
        """A candidate's details, and its pairs: what changed first, at most 2,000."""
        if not 0 <= index < len(self.candidates):
            return None
        with self._lock:
            run = self.run
        with open_ledger(self.folder) as ledger:
            counted = candidate_replacements(run, ledger, only=index)
        described = details(run, index)
        used = set(self.candidates[index].token_ids)
        for b, of_benchmark in enumerate(described):
            of_benchmark["replaced"] = counted.get((b, index), {"n": 0, "top": []})
            used.update(t for e in of_benchmark["replaced"]["top"] for t in e[:2] if t >= 0)
        return {
            "details": described,
            "pairs": self._pairs(run, index),
            "vocab": self.texts.vocab(used),
        }

    def pair(self, key: PairKey) -> dict[str, Any] | None:
        """A pair with its tokens; candidate −1 for a baseline alone."""
        with open_ledger(self.folder) as ledger:
            found = pair(ledger, key)
        if found is None:
            return None
        for side in (found["baseline"], found["knockout"]):
            if side is not None:
                join_pieces(side, self.texts)
        knockout = found["knockout"] or {"ids": []}
        if found["knockout"] is not None:
            found["picks"] = picks_of(read_picks(self.folder), key, knockout["step"])
        banned = self.candidates[key[3]].token_ids if 0 <= key[3] < len(self.candidates) else ()
        used = {*found["problem"]["ids"], *found["baseline"]["ids"], *knockout["ids"], *banned}
        used |= picked_tokens(found.get("picks"))
        return {**found, "vocab": self.texts.vocab(used)}

    def _pairs(self, run: RunView, index: int) -> list[dict[str, Any]]:
        forks = run.forks
        slices = [forks.rows(b, index) for b in range(len(run.cells))]
        rows = np.concatenate([np.arange(at.start, at.stop) for at in slices])
        changed = np.isin(forks.outcome[rows], (LOST, WON))
        chosen = np.concatenate([rows[changed], rows[~changed]])[:_MOST_PAIRS]
        return [
            {
                "key": [*forks.key(int(row)), index],
                "outcome": _OUTCOMES[int(forks.outcome[row])],
                "step": int(forks.step[row]),
            }
            for row in chosen
        ]

    def _now(self) -> tuple[float, ...]:
        found = []
        for name in ("run.db", "run.db-wal", "config.yaml"):
            path = self.folder / name
            if path.exists():
                stat = path.stat()
                found += [stat.st_mtime, float(stat.st_size)]
        return tuple(found)

    def _read(self) -> None:
        with open_ledger(self.folder) as ledger:
            self.run = read_run(self.folder, ledger)
            found, total = frequencies(ledger)
            head = overview(self.run, ledger, found, total, has_tokenizer=self.texts.has_tokenizer)
        head |= {"figures": page_specs(head), "themes": themes()}
        head["config"] = shown_config((self.folder / "config.yaml").read_text(encoding="utf-8"))
        used = {token for candidate in self.candidates for token in candidate.token_ids}
        head["vocab"] = self.texts.vocab(used)
        self._overview = head
