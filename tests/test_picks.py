"""How likely the picks at the forks were: against the run's own tokens and transformers' own logits."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from browser import Watch, chromium
from small_run import small_run

import knockout
from knockout.errors import UsageError
from knockout.ledger import CellKey, Ledger
from knockout.report.build import build_report
from knockout.report.picks import read_picks
from knockout.tokens.checkpoint import resolve_model

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("picks") / "run"
    shutil.copytree(small_run(), folder)
    knockout.load_run(folder).report(picks=True)
    return folder


def test_both_arms_pick_what_the_run_emitted(measured: Path) -> None:
    found = read_picks(measured)
    run = knockout.load_run(measured)
    assert len(found) == run.summary()["forks"] > 0
    with Ledger.open(measured / "run.db") as ledger:
        for key, arms in found.items():
            *cell, c = map(int, key.split("."))
            whole = ledger.trajectory(CellKey(*cell), c)
            base = ledger.trajectory(CellKey(*cell))
            assert arms["knockout"]["pick"] == whole[arms["step"]]
            assert arms["baseline"]["pick"] == base[arms["step"]]
            assert arms["baseline"]["agrees"]
            banned = set(ledger.candidates[c].token_ids)
            assert banned.isdisjoint(token for token, _ in arms["knockout"]["best"])
            assert arms["baseline"]["margin"] > 0


def test_probabilities_are_those_of_the_model(measured: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(resolve_model("smollm2-135m"), dtype=torch.float32)
    key, arms = next(iter(read_picks(measured).items()))
    *cell, _ = map(int, key.split("."))
    with Ledger.open(measured / "run.db") as ledger:
        problem = ledger.problem(*cell[:2])
        assert problem is not None
        own = ledger.trajectory(CellKey(*cell))[: arms["step"]]
    ids = torch.tensor([[*problem.prompt_ids.tolist(), *own.tolist()]])
    with torch.inference_mode():
        logits = model(ids).logits[0, -1]
    # The run has temperature 0.6 and top_k 20.
    top = logits.topk(20)
    p = (top.values / 0.6).softmax(0)
    for (token, probability), expected, mine in zip(
        arms["baseline"]["best"], top.indices.tolist(), p.tolist(), strict=False
    ):
        assert token == expected
        assert probability == pytest.approx(mine, abs=1e-3)


def test_the_pair_page_shows_gold_probabilities_and_margins(measured: Path) -> None:
    key, arms = next(iter(read_picks(measured).items()))
    with Ledger.open(measured / "run.db") as ledger:
        b, p, *_ = map(int, key.split("."))
        problem = ledger.problem(b, p)
    assert problem is not None
    assert problem.gold
    with chromium() as browser:
        page = browser.new_page()
        watch = Watch(page)
        page.goto(f"{(measured / 'report.html').as_uri()}#/pair/{key.replace('.', '/')}")
        page.wait_for_selector(".picks")
        text = page.inner_text("main")
        assert f"Right answer: {problem.gold}" in text
        assert f"{100 * arms['baseline']['probability']:.1f} %" in page.inner_text(".picks table")
        assert page.locator(".picks td", has_text="●").count() == 2
        assert f"by {arms['baseline']['margin']:.2f} (noise included" in text
        assert watch.errors == []


def test_without_a_measurement_the_page_says_how(tmp_path: Path) -> None:
    made: dict[str, Any] = build_report(small_run(), tmp_path / "plain.html")
    key = next(iter(_forks()))
    with chromium() as browser:
        page = browser.new_page()
        page.goto(f"{made['path'].as_uri()}#/pair/{'/'.join(map(str, key))}")
        page.wait_for_selector(".forkline")
        assert "knockout report DIR --picks" in page.inner_text("main")


def test_another_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="its weights are not those of the run"):
        build_report(small_run(), tmp_path / "x.html", picks=True, model="planted")
    assert not (small_run() / "picks.json").exists()


def test_a_measurement_of_another_fork_is_not_shown(measured: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(measured, folder)
    whole = json.loads((folder / "picks.json").read_text(encoding="utf-8"))
    for arms in whole["picks"].values():
        arms["step"] += 1
    (folder / "picks.json").write_text(json.dumps(whole), encoding="utf-8")
    build_report(folder)
    key = next(iter(_forks()))
    with chromium() as browser:
        page = browser.new_page()
        page.goto(f"{(folder / 'report.html').as_uri()}#/pair/{'/'.join(map(str, key))}")
        page.wait_for_selector(".forkline")
        assert page.locator(".picks").count() == 0


def _forks() -> list[tuple[int, ...]]:
    with Ledger.open(small_run() / "run.db") as ledger:
        return ledger.query("SELECT benchmark, problem, seed, candidate FROM fork")
