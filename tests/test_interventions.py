"""The intervention type: its checks, its record and its hash."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from knockout.method.interventions import Intervention, ban

IDS = st.sets(st.integers(0, 10**6), min_size=1, max_size=8).map(lambda s: tuple(sorted(s)))
PLACE = st.fixed_dictionaries(
    {
        "where": st.sampled_from(["everywhere", "thinking", "answer"]),
        "first_step": st.integers(0, 9),
        "end_step": st.none() | st.integers(10, 99),
    }
)


@st.composite
def interventions(draw: st.DrawFn) -> Intervention:
    ids, place = draw(IDS), draw(PLACE)
    kind = draw(st.sampled_from(["ban", "penalty", "replace"]))
    if kind == "penalty":
        strength = draw(st.floats(-50, 50).filter(bool))
        return Intervention("penalty", ids, strength=strength, **place)
    if kind == "replace":
        return Intervention("replace", ids, replacement=ids[-1] + 1, **place)
    return Intervention("ban", ids, **place)


@given(interventions())
def test_a_record_reads_back_through_json(one: Intervention) -> None:
    assert Intervention.from_record(json.loads(json.dumps(one.to_record()))) == one


@given(interventions(), interventions())
def test_the_digest_tells_interventions_apart(one: Intervention, other: Intervention) -> None:
    assert (one.digest == other.digest) == (one == other)


def test_the_digest_is_the_same_in_another_process() -> None:
    code = (
        "from knockout.method.interventions import Intervention;"
        "print(Intervention('penalty', (1, 2), strength=0.5, where='answer').digest)"
    )
    there = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    here = Intervention("penalty", (1, 2), strength=0.5, where="answer").digest
    assert there.stdout.strip() == here


@pytest.mark.parametrize(
    "values",
    [
        {"kind": "ban", "token_ids": ()},
        {"kind": "ban", "token_ids": (2, 1)},
        {"kind": "ban", "token_ids": (1, 1)},
        {"kind": "ban", "token_ids": (-1,)},
        {"kind": "ban", "token_ids": (1,), "strength": 1.0},
        {"kind": "penalty", "token_ids": (1,)},
        {"kind": "penalty", "token_ids": (1,), "strength": float("inf")},
        {"kind": "penalty", "token_ids": (1,), "strength": 0.0},
        {"kind": "replace", "token_ids": (1,)},
        {"kind": "replace", "token_ids": (1,), "replacement": 1},
        {"kind": "ban", "token_ids": (1,), "first_step": 3, "end_step": 3},
    ],
)
def test_values_that_do_not_go_together_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"expected|with|replac|range"):
        Intervention(**values)


def test_a_plain_ban_is_told_from_a_placed_one() -> None:
    assert ban((3,)).is_plain_ban
    assert not Intervention("ban", (3,), where="answer").is_plain_ban
