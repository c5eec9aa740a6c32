"""The fork explorer: from any step of a trajectory, ban or replace a token and go on."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from knockout.engines.base import Engine, Request
from knockout.errors import KnockoutError, UsageError
from knockout.ledger import CellKey
from knockout.method.interventions import Intervention
from knockout.method.sampling import Sampling
from knockout.report.source import open_ledger
from knockout.report.trajectories import PairKey
from knockout.view.live import LiveRun

__all__ = ["Exploration", "Explorer"]

# Tokens of the first piece; each next one is twice as long. A piece's end is where the page sees
# progress and a stop is heard, and its price is another prefill of what stands before it.
_FIRST_PIECE = 8
_LONGEST_PIECE = 256
_MOST_WAITING = 8
_MOST_KEPT = 64
# A page asks several times a second; a browser wakes one in the background once a minute.
_LEFT_AFTER_S = 90.0


@dataclass(slots=True)
class Exploration:
    """A continuation that was asked for.

    Attributes:
        request: Up to the step and the replacement, with what is banned from there.
        step: Tokens that come from the trajectory.
        state: "waiting", "running", "done", "stopped" or "failed".
        message: For the page.
        ids: Tokens from the step on.
        stopping: Whether it is to end after the piece it is at.
        asked: What the page asked for, to show it in a list.
        heard: When the page last asked how far it is (monotonic, s).
    """

    request: Request
    step: int
    asked: dict[str, Any] = field(default_factory=dict)
    state: str = "waiting"
    message: str = "Waiting for the engine …"
    ids: list[int] = field(default_factory=list)
    stopping: bool = False
    heard: float = field(default_factory=time.monotonic)

    @property
    def unwanted(self) -> bool:
        """Whether it was stopped, or its page was left."""
        return self.stopping or time.monotonic() - self.heard > _LEFT_AFTER_S


class Explorer:
    """Runs explorations one after another in a thread of its own, which also owns the engine.

    Args:
        live: The run.
        open_engine: Starts the engine; called in the thread, at the first exploration.
    """

    def __init__(self, live: LiveRun, open_engine: Callable[[], Engine]) -> None:
        self._live = live
        self._open = open_engine
        self._jobs: dict[int, Exploration] = {}
        self._queue: queue.Queue[Exploration | None] = queue.Queue()
        self._lock = threading.Lock()
        self._next = 0
        self._thread = threading.Thread(target=self._work, name="explorer", daemon=True)
        self._thread.start()

    def submit(
        self,
        key: PairKey,
        side: str,
        step: int,
        ban: tuple[int, ...] = (),
        replace: str | None = None,
        strength: float | None = None,
    ) -> int:
        """Asks for a continuation; returns its number.

        Raises:
            UsageError: There is no such trajectory or step, or the replacement is no token.
        """
        with self._lock:
            if (
                sum(job.state in ("waiting", "running") for job in self._jobs.values())
                >= _MOST_WAITING
            ):
                raise UsageError("too many continuations are waiting; stop some first")
        asked = {"key": list(key), "side": side, "step": step, "ban": list(ban)}
        asked |= {"replace": replace, "strength": strength}
        job = Exploration(self._request(key, side, step, ban, replace, strength), step, asked)
        with self._lock:
            self._next += 1
            number = self._next
            self._jobs[number] = job
            for old in list(self._jobs)[:-_MOST_KEPT]:
                if self._jobs[old].state not in ("waiting", "running"):
                    del self._jobs[old]
        self._queue.put(job)
        return number

    def state(self, number: int) -> dict[str, Any] | None:
        """How far a continuation is, with all its tokens so far."""
        with self._lock:
            job = self._jobs.get(number)
            if job is None:
                return None
            job.heard = time.monotonic()
            ids = list(job.ids)
            found = {"state": job.state, "message": job.message, "ids": ids}
        asked = job.request.intervention
        banned = [] if asked is None else list(asked.token_ids)
        return {**found, "banned": banned, "vocab": self._live.texts.vocab({*ids, *banned})}

    def jobs(self) -> dict[str, Any]:
        """All continuations that are kept, the newest first, without their tokens."""
        with self._lock:
            listed = [
                {"id": n, **job.asked, "state": job.state, "tokens": len(job.ids)}
                for n, job in reversed(self._jobs.items())
            ]
        used = {token for job in listed for token in job["ban"]}
        return {"jobs": listed, "vocab": self._live.texts.vocab(used)}

    def stop(self, number: int) -> None:
        """Ends a continuation after the piece it is at."""
        with self._lock:
            if number in self._jobs:
                self._jobs[number].stopping = True

    def close(self) -> None:
        """Ends the thread and frees the engine."""
        with self._lock:
            for job in self._jobs.values():
                job.stopping = True
        self._queue.put(None)
        self._thread.join(timeout=60)

    def _request(
        self,
        key: PairKey,
        side: str,
        step: int,
        ban: tuple[int, ...],
        replace: str | None,
        strength: float | None,
    ) -> Request:
        cell, candidate = CellKey(*key[:3]), key[3]
        knocked_out = side == "knockout"
        if side not in ("baseline", "knockout") or (knocked_out and candidate < 0):
            raise UsageError(f"side is {side!r}; expected baseline or knockout")
        with open_ledger(self._live.folder) as ledger:
            tokens = ledger.trajectory(cell, candidate if knocked_out else None).tolist()
            problem, seed = ledger.problem(cell.benchmark, cell.problem), ledger.cell_seed(cell)
        if problem is None or seed is None:
            raise UsageError(f"no cell {cell} in this run")
        if not 0 <= step <= len(tokens):
            raise UsageError(f"step is {step}; the trajectory has steps 0 to {len(tokens)}")
        prefix = tokens[:step] + ([] if replace is None else self._tokens_of(replace))
        own = self._live.candidates[candidate].token_ids if knocked_out else ()
        sampling, most = self._settings(cell.benchmark, len(tokens))
        return Request(
            key="explore",
            prompt=tuple(problem.prompt_ids.tolist()),
            seed=seed,
            sampling=sampling,
            max_tokens=max(most, len(prefix) + 1),
            prefix=tuple(prefix),
            intervention=_ban_of((*own, *ban))
            if strength is None
            else _penalty(own, ban, strength),
        )

    def _tokens_of(self, text: str) -> list[int]:
        if text.startswith("#") and text != "#":
            known = self._live.texts.size
            if not text[1:].isdecimal() or int(text[1:]) >= known:
                raise UsageError(
                    f"found {text!r}; expected an id as #123, below {known}, or a text"
                )
            return [int(text[1:])]
        ids = self._live.texts.encode(text)
        if not ids:
            raise UsageError(
                f"the replacement {text!r} has no tokens; give a text, or an id as #123"
            )
        return ids

    def _settings(self, benchmark: int, at_least: int) -> tuple[Sampling, int]:
        sweep = self._live.run.sweep
        name = self._live.benchmarks[benchmark].name
        entry = next((e for e in sweep.benchmarks if e.name == name), None)
        s = sweep.sampling if entry is None else sweep.settings(entry).sampling
        sampling = Sampling(s.temperature, s.top_p, s.top_k, s.min_p)
        # The ledger does not know a limit that the task sets: the longest baseline comes close.
        longest = int(np.max(self._live.run.cells[benchmark].n_tokens, initial=at_least))
        return sampling, s.max_tokens or longest

    def _work(self) -> None:
        engine: Engine | None = None
        try:
            while (job := self._queue.get()) is not None:
                if job.unwanted:
                    self._tell(job, "stopped", "Stopped.")
                    continue
                try:
                    self._tell(
                        job,
                        "running",
                        "The engine works …"
                        if engine is not None
                        else "The model is loading; this takes up to a minute …",
                    )
                    if engine is None:
                        engine = self._open()
                    self._go(job, engine)
                except KnockoutError as error:
                    self._tell(job, "failed", str(error))
                except Exception as error:  # the page must hear of it, and the thread go on
                    self._tell(job, "failed", f"{type(error).__name__}: {error}")
        finally:
            if engine is not None:
                engine.close()

    def _go(self, job: Exploration, engine: Engine) -> None:
        """Continues piece by piece: coupled noise makes the pieces one trajectory."""
        asked = job.request
        step, tokens, piece = job.step, list(asked.prefix), _FIRST_PIECE
        finish = "length"
        while len(tokens) < asked.max_tokens:
            if job.unwanted:
                self._tell(job, "stopped", f"Stopped after {len(tokens) - step} tokens.")
                return
            part = Request(
                key=asked.key,
                prompt=asked.prompt,
                seed=asked.seed,
                sampling=asked.sampling,
                max_tokens=min(len(tokens) + piece, asked.max_tokens),
                prefix=tuple(tokens),
                intervention=asked.intervention,
            )
            engine.add(part)
            done = []
            while engine.n_open:
                done += engine.step()
            if done[0].finish == "error":
                raise KnockoutError(done[0].error or "the engine failed")
            n_before = len(tokens)
            tokens = done[0].tokens.tolist()
            with self._lock:
                job.ids = tokens[step:]
                job.message = f"{len(tokens) - step} tokens so far …"
            finish = done[0].finish
            if finish == "stop" or len(tokens) == n_before:
                break
            piece = min(2 * piece, _LONGEST_PIECE)
        how = "it ended by itself" if finish == "stop" else "it ran into max_tokens"
        rest = "The task's stop strings and its grader are not applied here."
        self._tell(job, "done", f"{len(tokens) - step} tokens; {how}. {rest}")

    def _tell(self, job: Exploration, state: str, message: str) -> None:
        with self._lock:
            job.state, job.message = state, message


def _ban_of(ids: tuple[int, ...]) -> Intervention | None:
    return Intervention("ban", tuple(sorted(set(ids)))) if ids else None


def _penalty(own: tuple[int, ...], ids: tuple[int, ...], strength: float) -> Intervention:
    """A penalty on a baseline; it cannot be combined with a knockout's own ban."""
    if own:
        raise UsageError("a penalty can be tried on the baseline only; ban or replace here")
    try:
        return Intervention("penalty", tuple(sorted(set(ids))), strength=strength)
    except ValueError as error:
        raise UsageError(f"λ: {error}") from None
