"""Interactions of pairs against brute force over all flips of signs."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from scipy.stats import false_discovery_control

from knockout.ledger.grades import GradeCube
from knockout.method.interventions import ban
from knockout.tokens.candidates import Candidate
from knockout.verdicts.interactions import INTERACTION_COLUMNS, build_interactions

NAMES = ("a", "b", "c")
CANDIDATES = (
    *(Candidate(name, ban((i,))) for i, name in enumerate(NAMES)),
    Candidate("a + b", ban((0, 1)), members=("a", "b")),
    Candidate("a + c", ban((0, 2)), members=("a", "c")),
    Candidate("b + c", ban((1, 2)), members=("b", "c")),
)


def cube(baseline: np.ndarray, knockout: np.ndarray) -> GradeCube:
    p, s = baseline.shape
    return GradeCube(
        "x", CANDIDATES, tuple(map(str, range(p))), tuple(range(s)),
        baseline.astype(np.int8), knockout.astype(np.int8), knockout >= 0,
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(4))
def test_it_equals_brute_force(seed: int) -> None:
    rng = np.random.default_rng(seed)
    baseline = rng.integers(0, 2, (7, 3))
    knockout = rng.integers(-1, 2, (6, 7, 3))
    found = build_interactions([cube(baseline, knockout)])
    assert tuple(found.columns) == INTERACTION_COLUMNS
    p_values = []
    for row in found.to_dict("records"):
        ab, a, b = (
            knockout[[c.name for c in CANDIDATES].index(row[k])]
            for k in ("pair", "first", "second")
        )
        values = []
        for p in range(7):
            cells = [
                ab[p, s] - a[p, s] - b[p, s] + baseline[p, s]
                for s in range(3)
                if min(ab[p, s], a[p, s], b[p, s]) >= 0
            ]
            if cells:
                values.append(np.mean(cells))
        assert row["n_problems"] == len(values)
        assert row["interaction"] == pytest.approx(np.mean(values))
        parts = row["delta_pair"] - row["delta_first"] - row["delta_second"]
        assert row["interaction"] == pytest.approx(parts)
        flips = [
            abs(np.dot(signs, values)) >= abs(sum(values)) - 1e-9
            for signs in product((-1, 1), repeat=len(values))
        ]
        p_values.append(np.mean(flips))
        assert row["p_value"] == pytest.approx(p_values[-1])
        assert -2 <= row["ci_low"] <= row["interaction"] <= row["ci_high"] <= 2
        assert (row["ci_low"] > 0 or row["ci_high"] < 0) == (p_values[-1] < 0.05)
    assert found["p_adjusted"].tolist() == pytest.approx(false_discovery_control(p_values))


def test_tokens_that_stand_in_for_each_other() -> None:
    """Each alone does nothing, both together lose everything; and two that lose the same answers."""
    baseline = np.ones((30, 2))
    knockout = np.ones((6, 30, 2))
    knockout[3] = 0  # a + b
    found = build_interactions([cube(baseline, knockout)]).set_index("pair")
    assert found.loc["a + b", "interaction"] == -1
    assert found.loc["a + b", "ci_high"] < 0
    assert found.loc["a + b", "p_adjusted"] < 1e-6
    assert found.loc["a + c", ["interaction", "p_value"]].tolist() == [0, 1]
    knockout[[0, 1]] = 0
    same = build_interactions([cube(baseline, knockout)]).set_index("pair")
    assert same.loc["a + b", "interaction"] == 1


def test_a_run_without_pairs_has_no_rows() -> None:
    one = cube(np.ones((2, 1)), np.ones((6, 2, 1)))
    singles = GradeCube(
        "x",
        CANDIDATES[:3],
        one.problem_ids,
        one.seeds,
        one.baseline,
        one.knockout[:3],
        one.forked[:3],
    )
    assert len(build_interactions([singles])) == 0
