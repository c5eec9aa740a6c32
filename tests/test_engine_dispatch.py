"""Who gets which request, and what becomes of it when engines die: rules only, without Ray."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from knockout.engines.base import Request
from knockout.engines.dispatch import Dispatch, Limits
from knockout.method.sampling import Sampling

GREEDY = Sampling(temperature=0)


def request(key: str, cell: int = 0) -> Request:
    return Request(key, (1, 2, cell), cell, GREEDY, 8)


def an_engine_each(n_engines: int, places: int, limits: Limits | None = None) -> Dispatch:
    dispatch = Dispatch(n_engines, places, limits)
    for n in range(n_engines):
        dispatch.started(n)
    return dispatch


def keys(batch: list[Request]) -> list[str]:
    return [request.key for request in batch]


def test_requests_of_a_cell_go_to_its_home_in_the_order_they_came() -> None:
    dispatch = an_engine_each(2, places=8)
    for cell in range(6):
        dispatch.add(request(f"base{cell}", cell))
    first, second = keys(dispatch.next_batch(0)), keys(dispatch.next_batch(1))
    assert first == ["base0", "base1", "base2"]
    assert second == ["base3", "base4", "base5"]
    for fork in range(2):
        for cell in (5, 0, 1):
            dispatch.add(request(f"fork{fork} {cell}", cell))
    assert keys(dispatch.next_batch(0)) == ["fork0 0", "fork0 1", "fork1 0", "fork1 1"]
    assert keys(dispatch.next_batch(1)) == ["fork0 5", "fork1 5"]
    assert dispatch.n_moved == 0


def test_forks_go_before_new_cells() -> None:
    dispatch = an_engine_each(1, places=8)
    dispatch.add(request("base0", 0))
    dispatch.next_batch(0)
    for i, cell in enumerate([1, 0, 2, 0]):
        dispatch.add(request(f"{i}", cell))
    assert keys(dispatch.next_batch(0)) == ["1", "3", "0", "2"]


def test_places_are_filled_and_a_few_more() -> None:
    dispatch = an_engine_each(2, places=16)
    for i in range(100):
        dispatch.add(request(f"{i}", i))
    assert len(dispatch.next_batch(0)) == 16 + 2 + 1
    assert dispatch.next_batch(0) == []
    dispatch.finished(0, ["3", "4"])
    assert keys(dispatch.next_batch(0)) == ["19", "20"]
    assert dispatch.served == [2, 0]


def test_few_new_cells_are_shared_out_evenly() -> None:
    dispatch = an_engine_each(3, places=64)
    for i in range(10):
        dispatch.add(request(f"{i}", i))
    assert [len(dispatch.next_batch(n)) for n in range(3)] == [4, 4, 2]


def test_an_engine_that_is_down_takes_no_share() -> None:
    dispatch = Dispatch(2, 64)
    dispatch.started(1)
    for i in range(10):
        dispatch.add(request(f"{i}", i))
    assert len(dispatch.next_batch(1)) == 10


def with_waiting(at_home: int, places: int = 8, elsewhere: int = 0) -> Dispatch:
    """Engine 0 is full and `at_home` more wait for it; engine 1 runs `elsewhere`."""
    dispatch = an_engine_each(2, places)
    for i in range(2):
        dispatch.add(request(f"base{i}", i))
    assert keys(dispatch.next_batch(0)) == ["base0"]
    assert keys(dispatch.next_batch(1)) == ["base1"]
    dispatch.finished(0, ["base0"])
    dispatch.finished(1, ["base1"])
    for i in range(places + places // 8 + 1):
        dispatch.add(request(f"full{i}", 0))
    dispatch.next_batch(0)
    for i in range(at_home):
        dispatch.add(request(f"w{i}", 0))
    for i in range(elsewhere):
        dispatch.add(request(f"other{i}", 1))
    if elsewhere:
        assert len(dispatch.next_batch(1)) == elsewhere
    return dispatch


@pytest.mark.parametrize(
    ("at_home", "elsewhere", "taken"),
    [
        (6, 0, ["w3", "w4", "w5"]),  # half, the later one, in order
        (5, 3, ["w2", "w3", "w4"]),  # of an odd number the larger half
        (1, 0, ["w0"]),
        (6, 4, []),  # half of its places are in use
        (0, 0, []),
        (40, 3, [f"w{i}" for i in range(33, 40)]),  # 8 + 1 + 1 places less 3
    ],
)
def test_an_engine_less_than_half_full_takes_from_the_busiest(
    at_home: int, elsewhere: int, taken: list[str]
) -> None:
    dispatch = with_waiting(at_home, elsewhere=elsewhere)
    assert keys(dispatch.next_batch(1)) == taken
    assert dispatch.n_moved == len(taken)
    dispatch.finished(0, [f"full{i}" for i in range(10)])
    left = [f"w{i}" for i in range(at_home) if f"w{i}" not in taken]
    assert keys(dispatch.next_batch(0)) == left[:10]


def test_with_work_of_its_own_an_engine_takes_nothing() -> None:
    dispatch = with_waiting(6)
    dispatch.add(request("mine", 1))
    assert keys(dispatch.next_batch(1)) == ["mine"]
    assert dispatch.n_moved == 0


def test_a_dead_home_keeps_its_cells_unless_another_is_idle() -> None:
    dispatch = with_waiting(4, elsewhere=5)
    assert dispatch.lost(0) == []
    assert dispatch.next_batch(1) == []  # busy enough
    dispatch.add(request("later", 0))
    dispatch.started(0)
    # What was running comes first, then what waited, in the order it came.
    expected = [f"full{i}" for i in range(10)] + [f"w{i}" for i in range(4)] + ["later"]
    batch = keys(dispatch.next_batch(0))
    assert batch == expected[:10]
    dispatch.finished(0, batch)
    assert keys(dispatch.next_batch(0)) == expected[10:]


def test_an_idle_engine_takes_over_from_a_dead_one() -> None:
    dispatch = with_waiting(0)
    dispatch.lost(0)
    taken: list[str] = []
    while batch := keys(dispatch.next_batch(1)):
        taken += batch
        dispatch.finished(1, batch)
    assert sorted(taken) == sorted(f"full{i}" for i in range(10))
    assert not dispatch.keys


def test_suspects_run_alone_and_the_guilty_one_is_set_aside() -> None:
    dispatch = an_engine_each(1, places=16)
    for i in range(16):
        dispatch.add(request(f"r{i}", i))

    def die() -> list[str]:
        batch = keys(dispatch.next_batch(0))
        assert dispatch.lost(0) == []
        dispatch.started(0)
        return batch

    assert len(die()) == 16
    assert len(die()) == 16
    assert die() == ["r0", "r1", "r2", "r3"]
    dispatch.add(request("new", 99))
    assert keys(dispatch.next_batch(0)) == ["r0"]
    assert dispatch.next_batch(0) == [], "nothing joins a suspect"
    assert [(r.key, deaths) for r, deaths in dispatch.lost(0)] == [("r0", 4)]
    assert not dispatch.is_given_up(0)
    dispatch.started(0)
    order: list[list[str]] = []
    while batch := keys(dispatch.next_batch(0)):
        order.append(batch)
        dispatch.finished(0, batch)
    assert [len(batch) for batch in order] == [1, 1, 1, 4, 4, 4, 1]
    assert order[-1] == ["new"]


def test_suspects_of_an_engine_that_stays_away_run_on_an_idle_one() -> None:
    dispatch = an_engine_each(2, places=4)
    dispatch.add(request("a", 0))
    for _ in range(2):
        dispatch.next_batch(0)
        dispatch.lost(0)
        dispatch.started(0)
    dispatch.add(request("b", 1))
    assert keys(dispatch.next_batch(1)) == ["b"]
    assert dispatch.next_batch(1) == [], "the engine is up and will run it itself"
    dispatch.next_batch(0)
    dispatch.finished(1, ["b"])
    dispatch.finished(0, ["a"])
    dispatch.add(request("c", 0))
    for _ in range(2):
        dispatch.next_batch(0)
        dispatch.lost(0)
        if dispatch.n_lost < 4:
            dispatch.started(0)
    assert keys(dispatch.next_batch(1)) == ["c"]


def test_an_engine_that_dies_without_end_is_given_up_and_its_cells_move() -> None:
    dispatch = an_engine_each(2, places=4, limits=Limits(most_in_a_row=3))
    dispatch.add(request("a", 0))
    dispatch.next_batch(0)
    dispatch.finished(0, ["a"])
    for _ in range(2):
        dispatch.lost(0)
        assert not dispatch.is_given_up(0)
    dispatch.lost(0)
    assert dispatch.is_given_up(0)
    assert not dispatch.is_given_up(1)
    dispatch.add(request("fork", 0))
    assert keys(dispatch.next_batch(1)) == ["fork"]
    assert dispatch.home(request("x", 0)) == 1


def test_a_result_clears_an_engine() -> None:
    dispatch = an_engine_each(1, places=4, limits=Limits(most_in_a_row=2))
    for i in range(5):
        dispatch.lost(0)
        dispatch.started(0)
        assert not dispatch.is_given_up(0)
        dispatch.add(request(f"{i}", i))
        dispatch.next_batch(0)
        dispatch.finished(0, [f"{i}"])


@st.composite
def histories(draw: st.DrawFn) -> tuple[int, int, list[tuple[str, int]]]:
    n_engines, places = draw(st.integers(1, 4)), draw(st.integers(1, 9))
    what = st.sampled_from(["add", "turn", "finish", "die", "start"])
    steps = draw(st.lists(st.tuples(what, st.integers(0, 11)), max_size=120))
    return n_engines, places, steps


@settings(max_examples=200, deadline=None)
@given(histories())
def test_nothing_is_lost_and_nothing_doubled_whatever_dies(
    history: tuple[int, int, list[tuple[str, int]]],
) -> None:
    n_engines, places, steps = history
    dispatch = an_engine_each(n_engines, places, Limits(most_in_a_row=10**9))
    up = [True] * n_engines
    running: list[list[str]] = [[] for _ in range(n_engines)]
    added, ended = 0, Counter[str]()

    def turn(n: int) -> None:
        batch = keys(dispatch.next_batch(n))
        assert not {key for lane in running for key in lane} & set(batch)
        assert not ended.keys() & set(batch)
        running[n] += batch
        assert dispatch.running(n) == len(running[n]) <= places + places // 8 + 1

    for what, i in steps:
        n = i % n_engines
        if what == "add":
            dispatch.add(request(f"{added}", i))
            added += 1
        elif what == "start":
            if not up[n]:
                dispatch.started(n)
                up[n] = True
        elif what == "die":
            if up[n]:
                ended.update(request.key for request, _ in dispatch.lost(n))
                running[n], up[n] = [], False
        elif up[n] and what == "turn":
            turn(n)
        elif up[n] and running[n]:
            done = [running[n].pop(i % len(running[n]))]
            dispatch.finished(n, done)
            ended.update(done)
    assert len(dispatch.keys) + ended.total() == added
    # Left alone, even by all engines but one, the rest is finished.
    survivor = next((n for n in range(n_engines) if up[n]), None)
    if survivor is None:
        survivor = 0
        dispatch.started(0)
    for n in range(n_engines):
        if n != survivor and up[n]:
            ended.update(request.key for request, _ in dispatch.lost(n))
            running[n] = []
    for _ in range(4 * added + 4):
        turn(survivor)
        if running[survivor]:
            done = [running[survivor].pop(0)]
            dispatch.finished(survivor, done)
            ended.update(done)
    assert not dispatch.keys
    assert set(ended.values()) <= {1}
    assert ended.total() == added


@settings(max_examples=150, deadline=None)
@given(
    n_requests=st.integers(1, 150),
    guilty=st.sets(st.integers(0, 149), max_size=4),
    n_engines=st.integers(1, 3),
    places=st.sampled_from([1, 2, 5, 16, 64, 200]),
    choose=st.randoms(use_true_random=False),
)
def test_only_those_that_kill_engines_are_set_aside(
    n_requests: int, guilty: set[int], n_engines: int, places: int, choose: Any
) -> None:
    dispatch = an_engine_each(n_engines, places)
    running: list[list[str]] = [[] for _ in range(n_engines)]
    for i in range(n_requests):
        dispatch.add(request(f"{i}", i % 40))
    aside, done = Counter[str](), Counter[str]()
    kills: Callable[[str], bool] = lambda key: int(key) in guilty  # noqa: E731
    for _ in range(100 * (n_requests + 10)):
        if not dispatch.keys:
            break
        n = choose.randrange(n_engines)
        running[n] += keys(dispatch.next_batch(n))
        if any(map(kills, running[n])):
            aside.update(request.key for request, _ in dispatch.lost(n))
            assert not dispatch.is_given_up(n)
            running[n] = []
            dispatch.started(n)
        elif running[n]:
            key = running[n].pop(choose.randrange(len(running[n])))
            dispatch.finished(n, [key])
            done.update([key])
    assert aside == Counter(str(i) for i in guilty if i < n_requests)
    assert done == Counter(str(i) for i in range(n_requests) if i not in guilty)
