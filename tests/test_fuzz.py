"""A part of `python -m tests.fuzz`, which throws 5,000 inputs at each reader."""

from __future__ import annotations

import pytest
from fuzz import TARGETS, faults


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("target", TARGETS)
def test_no_input_ends_in_anything_but_a_refusal(target: str) -> None:
    assert not list(faults(target, 150, seed=1))
