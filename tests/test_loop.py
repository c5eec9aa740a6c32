"""The distillation loop on the planted model: its rollouts, its training, its claims."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats

from bench.loop import _require_skill
from bench.planted.claims import answer, paired
from bench.planted.decode import Planted
from bench.planted.distil import Distil, distil, evaluate, load, roll_out
from knockout.errors import KnockoutError
from knockout.planted import MODEL_FOLDER
from knockout.planted.language import Language, grade, problems
from knockout.planted.train import Training, train
from knockout.training.selection import Selection

LANGUAGE = Language()
PROMPTS = ["solve 7 + 5 max 9 :", "solve 0 gap 5 - 9 :", "solve 3 min 3 * 2 :"] * 20


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("loop") / "start"
    small = Training(hidden=32, layers=1, heads=2, steps=12, settling=3, rows=8)
    train(LANGUAGE, folder, small, lambda _: None)
    return folder


def test_labels_of_rollouts_are_the_next_tokens_up_to_the_end() -> None:
    model = Planted(MODEL_FOLDER)
    ids, labels = roll_out(model, PROMPTS, torch.Generator().manual_seed(0))
    start = len(PROMPTS[0].split())
    assert labels.shape == ids[:, 1:].shape
    for row, label in zip(ids.tolist(), labels.tolist(), strict=True):
        rest = row[start:]
        end = rest.index(model.eos) + 1
        own = [x for x in label if x != -100]
        assert own == rest[:end]
        assert label[: start - 1] == [-100] * (start - 1)


def test_evaluation_grades_as_the_language_does_and_a_model_is_at_no_distance_from_itself() -> None:
    asked = [p for p in problems(LANGUAGE, 3, 400) if len(p["question"].split()) == 9][:60]
    found = evaluate(
        LANGUAGE, MODEL_FOLDER, MODEL_FOLDER, asked, {"some": [5, 6], "none": []}, seed=4
    )
    model = Planted(MODEL_FOLDER)
    words = {i: word for word, i in model.ids.items()}
    generator = torch.Generator().manual_seed(4 * 1_000_003)
    ids, labels = roll_out(model, [p["question"] for p in asked], generator)
    right = 0
    for label, problem in zip(labels.tolist(), asked, strict=True):
        text = " ".join(words[x] for x in label if x not in (-100, model.eos))
        right += grade(text, problem["answer"])
    assert found["pass1"] == right / len(asked)
    assert 0.4 < found["pass1"] < 1.0
    assert found["kl"] == pytest.approx(0.0, abs=1e-5)
    assert math.isnan(found["kl_none"])
    assert ids.shape[0] == len(asked)


def test_parts_of_the_kl_add_up(start: Path) -> None:
    asked = list(problems(LANGUAGE, 3, 80))
    found = evaluate(LANGUAGE, start, MODEL_FOLDER, asked, {"low": list(range(40))})
    share = found["share_low"]
    whole = share * found["kl_low"] + (1 - share) * found["kl_not_low"]
    assert found["kl"] == pytest.approx(whole, rel=1e-4)
    assert found["kl"] > 0.1


def test_distilling_lowers_the_kl_and_a_frozen_vocabulary_changes_nothing(
    start: Path, tmp_path: Path
) -> None:
    settings = Distil(steps=40, rows=16, rate=3e-3, kept_at=(5,))
    distil(LANGUAGE, start, MODEL_FOLDER, tmp_path / "all", settings, Selection(), seed=1)
    assert len(json.loads((tmp_path / "all" / "history.json").read_text())["kl"]) == 40
    asked = list(problems(LANGUAGE, 3, 300))
    first, last = (
        evaluate(LANGUAGE, student, MODEL_FOLDER, asked, {})["kl"]
        for student in (start, tmp_path / "all" / "after")
    )
    assert last < 0.95 * first
    assert (tmp_path / "all" / "step-5" / "model.safetensors").is_file()

    everything = Selection(freeze_list=tuple(range(80)))
    few = Distil(steps=2, rows=4)
    distil(LANGUAGE, start, MODEL_FOLDER, tmp_path / "none", few, everything, seed=1)
    before, after = load(start).state_dict(), load(tmp_path / "none" / "after").state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_arms_are_compared_seed_by_seed() -> None:
    rng = np.random.default_rng(0)
    base = rng.normal(size=6)
    other = base + 0.3 + 0.01 * rng.normal(size=6)
    rows = [
        {"arm": arm, "seed": s, "kl": value}
        for arm, values in (("all", base), ("rocks", other))
        for s, value in enumerate(values)
    ]
    mean, low, high = paired(pd.DataFrame(rows), "rocks", "all", "kl")
    expected = stats.ttest_rel(other, base).confidence_interval(0.95)
    assert (low, high) == pytest.approx((expected.low, expected.high))
    assert mean == pytest.approx(float(np.mean(other - base)))
    assert all(math.isnan(x) for x in paired(pd.DataFrame(rows), "pillars", "all", "kl"))


@pytest.mark.parametrize(
    ("low", "high", "said"),
    [
        (-0.01, 0.03, "yes"),
        (-0.05, -0.01, "no"),
        (-0.05, 0.01, "undecided"),
        (math.nan,) * 2 + ("undecided",),
    ],
)
def test_a_claim_is_undecided_where_the_interval_says_neither(
    low: float, high: float, said: str
) -> None:
    assert answer(low, high, holds_above=-0.02, fails_below=0.0) == said


def test_a_student_that_guesses_is_refused(tmp_path: Path) -> None:
    (tmp_path / "verdicts.json").write_text('[{"pass1_baseline": 0.12}]')
    with pytest.raises(KnockoutError, match=r"0\.12.*guessing.*--start-steps"):
        _require_skill(tmp_path)
    (tmp_path / "verdicts.json").write_text('[{"pass1_baseline": 0.5}]')
    _require_skill(tmp_path)
