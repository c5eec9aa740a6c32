"""Which of several engines gets a request, and what happens to it when engines die.

Rules only: no Ray, no clock, no input or output. `knockout.engines.ray` applies them.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from knockout.engines.base import Request

__all__ = ["Dispatch", "Limits"]

_MOST_HOMES = 65_536

Cell = tuple[int, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Limits:
    """How many deaths of engines are tolerated.

    Attributes:
        suspect_after: Deaths after which a request is suspect. What ran at one death runs together
            again, then in groups of a quarter of an engine's places, then a sixteenth, ..., so that
            few other requests die with the one that kills engines.
        most_deaths: Deaths after which a request is set aside, wherever it ran. One that is
            suspect and dies alone is set aside at once.
        most_in_a_row: Times that an engine may die without a result in between; it is not
            replaced after that. Isolating one request takes fewer: among 4,096 it takes
            eight.
    """

    suspect_after: int = 2
    most_deaths: int = 8
    most_in_a_row: int = 10


@dataclass(slots=True)
class _Lane:
    """The requests of one place in the list of engines; a new engine inherits it."""

    waiting: deque[Request] = field(default_factory=deque)
    suspects: deque[Request] = field(default_factory=deque)
    running: dict[str, Request] = field(default_factory=dict)
    up: bool = False
    deaths_in_a_row: int = 0


class Dispatch:
    """Hands requests to engines, numbered from 0, and takes back those of dead ones.

    A cell's requests go to one engine, its home, because its prefix is cached there. A new cell
    goes to whichever engine asks first, up to an even share. An engine without waiting requests of its
    own that is less than half full takes from the one with most waiting: empty places cost more
    than a cold prefix. A dead engine's requests go to the one that takes its place, unless
    another runs out of work first.

    Requests of a home and new ones keep the order in which they were added.

    Attributes:
        served: Requests that each engine finished.
        n_lost: Engines that died.
        n_moved: Requests that were given to another engine than their home.
        places: Requests that an engine runs at once.
    """

    def __init__(self, n_engines: int, places: int, limits: Limits | None = None) -> None:
        """Starts with nothing to do and no engine up.

        Args:
            n_engines: How many engines there are.
            places: Requests that each of them runs at once.
            limits: How many deaths of engines are tolerated.
        """
        self.served = [0] * n_engines
        self.n_lost = self.n_moved = 0
        self.places = places
        self._limits = limits or Limits()
        self._lanes = [_Lane() for _ in range(n_engines)]
        self._new: deque[Request] = deque()
        self._homes: OrderedDict[Cell, int] = OrderedDict()
        self._deaths: dict[str, int] = {}
        self._open: set[str] = set()

    @property
    def keys(self) -> set[str]:
        """Keys of the requests that were added and have neither finished nor been set aside."""
        return self._open

    def home(self, request: Request) -> int | None:
        """The engine with the prefix of the request's cell in its cache, if any."""
        return self._homes.get(_cell(request))

    def running(self, n: int) -> int:
        """How many requests engine n was given and has not finished."""
        return len(self._lanes[n].running)

    def is_given_up(self, n: int) -> bool:
        """Whether engine n died too often in a row to be started again."""
        return self._lanes[n].deaths_in_a_row >= self._limits.most_in_a_row

    def add(self, request: Request) -> None:
        """Queues a request, at its cell's engine or for the first that asks."""
        self._open.add(request.key)
        home = self.home(request)
        if home is None or self.is_given_up(home):
            self._new.append(request)
        else:
            self._lanes[home].waiting.append(request)

    def started(self, n: int) -> None:
        """Engine n is up and has no requests."""
        self._lanes[n].up = True

    def next_batch(self, n: int) -> list[Request]:
        """The requests to give to engine n, which is up; they count as running from now on."""
        lane = self._lanes[n]
        batch = self._batch(n, lane)
        lane.running.update((request.key, request) for request in batch)
        return batch

    def finished(self, n: int, keys: Iterable[str]) -> None:
        """Engine n has finished these."""
        lane = self._lanes[n]
        for key in keys:
            del lane.running[key]
            self._deaths.pop(key, None)
            self._open.discard(key)
            self.served[n] += 1
            lane.deaths_in_a_row = 0

    def lost(self, n: int) -> list[tuple[Request, int]]:
        """Engine n is dead: its requests run again, or are set aside.

        Returns:
            The requests that are set aside, each with the number of engines that died while it
            ran.
        """
        lane, limits = self._lanes[n], self._limits
        lane.up = False
        lane.deaths_in_a_row += 1
        self.n_lost += 1
        alone = len(lane.running) == 1
        aside: list[tuple[Request, int]] = []
        for key, request in reversed(lane.running.items()):
            deaths = self._deaths[key] = self._deaths.get(key, 0) + 1
            if deaths >= limits.most_deaths or (alone and deaths > limits.suspect_after):
                aside.append((request, deaths))
                del self._deaths[key]
                self._open.discard(key)
            elif deaths >= limits.suspect_after:
                lane.suspects.appendleft(request)
            else:
                lane.waiting.appendleft(request)
        lane.running.clear()
        if aside:
            lane.deaths_in_a_row = 0  # the requests were to blame
        return aside

    def _batch(self, n: int, lane: _Lane) -> list[Request]:
        if any(self._deaths.get(key, 0) >= self._limits.suspect_after for key in lane.running):
            return []
        if lane.suspects:
            # The engine runs empty first, so that nothing else dies with them.
            return [] if lane.running else self._suspects_of(lane)
        batch: list[Request] = []
        # Some beyond its places, so that a free one is filled within a turn.
        free = self.places + self.places // 8 + 1 - len(lane.running)
        while len(batch) < free and lane.waiting:
            batch.append(lane.waiting.popleft())
        for _ in range(min(free - len(batch), self._share(lane, len(batch)), len(self._new))):
            request = self._new.popleft()
            self._settle(request, n)
            batch.append(request)
        if not batch and len(lane.running) < max(1, self.places // 2):
            batch = self._taken_from_the_busiest(free) or self._taken_from_the_dead(lane)
        return batch

    def _settle(self, request: Request, n: int) -> None:
        self._homes[_cell(request)] = n
        if len(self._homes) > _MOST_HOMES:
            self._homes.popitem(last=False)

    def _share(self, lane: _Lane, taken: int) -> int:
        """A fair share of the new requests, if there are few."""
        others = [x for x in self._lanes if x is not lane and x.up and not x.suspects]
        mine = len(lane.running) + taken
        load = mine + sum(len(x.running) + len(x.waiting) for x in others)
        return max(0, math.ceil((load + len(self._new)) / (len(others) + 1)) - mine)

    def _suspects_of(self, lane: _Lane) -> list[Request]:
        """The next group of those that ran in as many engines that died."""
        suspects = lane.suspects
        deaths = self._deaths[suspects[0].key]
        size = max(1, self.places >> 2 * (deaths - self._limits.suspect_after + 1))
        group: list[Request] = []
        while suspects and len(group) < size and self._deaths[suspects[0].key] == deaths:
            group.append(suspects.popleft())
        return group

    def _taken_from_the_busiest(self, most: int) -> list[Request]:
        """The later half of what waits at the engine where most does."""
        busiest = max(self._lanes, key=lambda lane: len(lane.waiting))
        n = min(most, math.ceil(len(busiest.waiting) / 2))
        taken = [busiest.waiting.pop() for _ in range(n)][::-1]
        self.n_moved += n
        return taken

    def _taken_from_the_dead(self, lane: _Lane) -> list[Request]:
        """Suspects of an engine that may never come back; only for one that runs nothing."""
        for other in self._lanes:
            if other.suspects and not other.up and not lane.running:
                group = self._suspects_of(other)
                self.n_moved += len(group)
                return group
        return []


def _cell(request: Request) -> Cell:
    return request.seed, request.prompt
