"""A fleet of 1 to 256 engines, simulated: makespan, idle places, stragglers, deaths, moved forks.

Discrete events with the dispatch rules of `knockout.engines.dispatch` and `knockout.sweep.scheduler`: forks go
to the engine that holds their prefix, new cells to the first with room, an engine that is half
empty with nothing waiting takes half of what waits longest elsewhere, and no more requests are open
than the engines run. Steps cost what SmolLM2 in float32 cost vLLM on a CPU of two cores: 125 ms
with 8 requests running, 620 ms with 64, and 3.7 ms a token of prefill.

    python -m bench fleet [--cells 9048]
"""

from __future__ import annotations

import argparse
import heapq
import math
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bench.machine import write

PLACES, LOOKAHEAD = 64, 8
STEP_S, STEP_S_A_REQUEST, PREFILL_S = 0.054, 0.00884, 0.0037
MEDIAN_TOKENS, SPREAD, MOST_TOKENS, PROMPT = 600.0, 0.8, 4096, 150
SEEDS, OF_PROBLEM = 8, 0.65
"""Cells of a problem, and the share of the variance of log lengths that lies between problems."""
RESTART_S = 120.0
SIZES = (1, 4, 16, 64, 256)


@dataclass(frozen=True)
class Setting:
    """What is varied.

    Attributes:
        engines: How many.
        steal_below: An engine with fewer running requests than this share of its places takes
            from others; below 0 never.
        budget: Requests open at once, as a share of all places.
        anywhere: Forks go to any engine, whose cache holds nothing of them.
        in_file_order: Cells begin in the order of the benchmark, and not the longest first.
        slow: Share of the engines that are half as fast.
        deaths_per_day: Of each engine; its requests are generated again.
    """

    engines: int
    steal_below: float = 0.5
    budget: float = 1.0
    anywhere: bool = False
    in_file_order: bool = False
    slow: float = 0.0
    deaths_per_day: float = 0.0


@dataclass
class Engine:
    """One engine: all of its running requests advance together.

    Attributes:
        clock: Tokens that each request has generated since the start.
        running: Heap of (clock at which it ends, request).
    """

    speed: float
    at: float = 0.0
    stall: float = 0.0
    clock: float = 0.0
    down_until: float = 0.0
    version: int = 0
    place_seconds: float = 0.0
    running: list[tuple[float, int]] = field(default_factory=list)
    waiting: deque[int] = field(default_factory=deque)

    def step_s(self) -> float:
        """Seconds of a step as it is now."""
        return (STEP_S + STEP_S_A_REQUEST * len(self.running)) / self.speed

    def advance(self, now: float) -> None:
        """Moves the clock on to a time."""
        begin = max(self.at, min(self.down_until, now))
        self.place_seconds += len(self.running) * (now - begin)
        left = now - begin
        paused = min(self.stall, left)
        self.stall -= paused
        if self.running:
            self.clock += (left - paused) / self.step_s()
        self.at = now

    def next_end(self) -> float:
        """When its next request finishes."""
        if not self.running:
            return math.inf
        begin = max(self.at, self.down_until) + self.stall
        return begin + max(0.0, self.running[0][0] - self.clock) * self.step_s()


def simulate(setting: Setting, n_cells: int, forks_a_cell: float, seed: int = 0) -> dict[str, Any]:
    """Runs one sweep; returns what it took."""
    rng = np.random.default_rng(seed)

    problem = np.arange(n_cells) // SEEDS
    effect = rng.standard_normal(problem[-1] + 1)

    def lengths(problem: np.ndarray) -> np.ndarray:
        noise = rng.standard_normal(len(problem))
        z = math.sqrt(OF_PROBLEM) * effect[problem] + math.sqrt(1 - OF_PROBLEM) * noise
        return np.clip(MEDIAN_TOKENS * np.exp(SPREAD * z), 8, MOST_TOKENS).astype(int)

    # Requests: baselines first, then each cell's forks. Everything is drawn beforehand, so that
    # all settings do the same work.
    base = lengths(problem)
    n_forks = rng.poisson(forks_a_cell, n_cells)
    home_cell = np.concatenate([np.arange(n_cells), np.repeat(np.arange(n_cells), n_forks)])
    first_fork = n_cells + np.concatenate([[0], np.cumsum(n_forks)])
    share = rng.random(len(home_cell))
    prefix = np.where(np.arange(len(home_cell)) < n_cells, 0, share * base[home_cell]).astype(int)
    total = np.concatenate([base, lengths(problem[home_cell[n_cells:]])])
    tokens = np.maximum(8, total - prefix)
    order = np.arange(n_cells)
    if not setting.in_file_order:
        of_cell = np.bincount(home_cell, weights=tokens)
        later = order[order % SEEDS > 0]
        known = of_cell[problem[later] * SEEDS]
        order = np.concatenate([order[::SEEDS], later[np.argsort(-known, kind="stable")]])
    speeds = np.where(rng.random(setting.engines) < setting.slow, 0.5, 1.0)
    engines = [Engine(float(s)) for s in speeds]
    budget = round(setting.engines * PLACES * setting.budget) + LOOKAHEAD
    home: dict[int, int] = {}
    cached: set[tuple[int, int]] = set()
    ready: deque[int] = deque()
    new: deque[int] = deque()
    next_cell = n_open = moved = deaths = 0
    redone = prefilled = 0.0
    events: list[tuple[float, int, int]] = []
    if setting.deaths_per_day:
        for n in range(setting.engines):
            heapq.heappush(events, (rng.exponential(86400 / setting.deaths_per_day), n, -1))

    def feed() -> None:
        nonlocal next_cell, n_open
        while n_open < budget:
            if ready:
                request = ready.popleft()
                if setting.anywhere:
                    new.append(request)
                else:
                    engines[home[int(home_cell[request])]].waiting.append(request)
            elif next_cell < n_cells:
                new.append(int(order[next_cell]))
                next_cell += 1
            else:
                return
            n_open += 1

    def fill(n: int, now: float) -> None:
        nonlocal moved, prefilled
        engine = engines[n]
        if now < engine.down_until:
            return
        while len(engine.running) < PLACES:
            if engine.waiting:
                request = engine.waiting.popleft()
            elif new:
                request = new.popleft()
                home.setdefault(int(home_cell[request]), n)
            elif len(engine.running) < setting.steal_below * PLACES:
                other = max(engines, key=lambda e: len(e.waiting))
                if not other.waiting:
                    break
                engine.waiting.append(other.waiting.pop())
                moved += 1
                continue
            else:
                break
            cell = int(home_cell[request])
            if (cell, n) not in cached:
                cached.add((cell, n))
                cold = PROMPT + int(prefix[request])
                engine.stall += cold * PREFILL_S / engine.speed
                prefilled += cold
            heapq.heappush(engine.running, (engine.clock + float(tokens[request]), request))

    def schedule(n: int) -> None:
        engine = engines[n]
        engine.version += 1
        heapq.heappush(events, (engine.next_end(), n, engine.version))

    left = len(home_cell)
    now = 0.0
    feed()
    for n in range(setting.engines):
        fill(n, 0.0)
        schedule(n)
    since_scan = 0
    while left:
        now, n, version = heapq.heappop(events)
        engine = engines[n]
        if version == -1:
            engine.advance(now)
            deaths += 1
            for end, request in engine.running:
                redone += float(tokens[request]) - (end - engine.clock)
                engine.waiting.appendleft(request)
            engine.running, engine.stall = [], 0.0
            cached = {pair for pair in cached if pair[1] != n}
            engine.down_until = now + RESTART_S
            heapq.heappush(events, (engine.down_until, n, -2))
            heapq.heappush(
                events, (now + RESTART_S + rng.exponential(86400 / setting.deaths_per_day), n, -1)
            )
            continue
        if version >= 0 and version != engine.version:
            continue
        engine.advance(now)
        if version >= 0:
            if not engine.running:
                continue
            _, request = heapq.heappop(engine.running)
            left -= 1
            n_open -= 1
            if request < n_cells:
                ready.extend(range(int(first_fork[request]), int(first_fork[request + 1])))
        feed()
        fill(n, now)
        schedule(n)
        since_scan += 1
        if since_scan >= PLACES:  # others may have got work, or may take some
            since_scan = 0
            for m, other in enumerate(engines):
                if m != n and len(other.running) < PLACES and now >= other.down_until:
                    other.advance(now)
                    before = len(other.running)
                    fill(m, now)
                    if len(other.running) != before:
                        schedule(m)
    capacity = setting.engines * PLACES * now
    used = sum(engine.place_seconds for engine in engines)
    generated = float(tokens.sum())
    return {
        "hours": round(now / 3600, 3),
        "idle_places": round(1 - used / capacity, 4),
        "tokens_generated": round(generated),
        "tokens_done_again": round(redone),
        "prefill_tokens_per_generated": round(prefilled / generated, 4),
        "forks_moved": round(moved / max(1, int(n_forks.sum())), 4),
        "deaths": deaths,
    }


def main(*arguments: str) -> None:
    """Simulates every size, then what goes wrong at three of them."""
    parser = argparse.ArgumentParser(prog="python -m bench fleet")
    parser.add_argument("--cells", type=int, default=9048)
    parser.add_argument("--forks", type=float, default=20.0, help="Of a cell, on average.")
    given = parser.parse_args(arguments)
    cases: list[tuple[str, Setting]] = [("as it is", Setting(n)) for n in SIZES]
    for n in SIZES[2:]:
        cases += [
            ("no engine takes from others", Setting(n, steal_below=-1.0)),
            ("only an empty engine takes", Setting(n, steal_below=1 / PLACES)),
            ("forks go anywhere", Setting(n, anywhere=True)),
            ("cells begin in the benchmark's order", Setting(n, in_file_order=True)),
            ("twice as many requests open", Setting(n, budget=2.0)),
            ("a tenth of the engines half as fast", Setting(n, slow=0.1)),
            ("each engine dies once in five days", Setting(n, deaths_per_day=0.2)),
        ]
    rows: list[dict[str, Any]] = []
    for name, setting in cases:
        began = time.perf_counter()
        row = {"case": name, "engines": setting.engines}
        row |= simulate(setting, given.cells, given.forks)
        one = next((r for r in rows if r["engines"] == 1), row)
        row["efficiency"] = round(one["hours"] / (row["hours"] * setting.engines), 3)
        rows.append(row)
        print(row, f"{time.perf_counter() - began:.1f} s", flush=True)
    write("fleet", {"cells": given.cells, "forks_a_cell": given.forks, "rows": rows})


if __name__ == "__main__":
    import sys

    main(*sys.argv[1:])
