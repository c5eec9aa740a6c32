"""A run written as lm-eval's own result files, read back as lm-eval's users read them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from small_run import small_run

import knockout
from knockout.config.file import load_sweep
from knockout.config.sweep import Sweep
from knockout.errors import UsageError
from knockout.integrations.lm_eval_files import write_lm_eval
from knockout.ledger import Ledger

pytestmark = pytest.mark.engine
TASK = "knockout_starter_arithmetic"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("lm-eval") / "out"
    with Ledger.open(small_run() / "run.db") as ledger:
        sweep = load_sweep(small_run() / "config.yaml")
        assert write_lm_eval(small_run(), sweep, ledger, out) == 4
        write_lm_eval(small_run(), sweep, ledger, out)  # replaces, never doubles
    return out


def read(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    (results,) = folder.glob("*/results_*.json")
    (samples,) = folder.glob(f"*/samples_{TASK}_*.jsonl")
    assert results.stem.removeprefix("results_") in samples.name
    return json.loads(results.read_text()), [
        json.loads(x) for x in samples.read_text().splitlines()
    ]


def test_one_folder_for_the_baseline_and_each_candidate(folders: Path) -> None:
    assert sorted(p.name for p in folders.iterdir()) == [
        "0000_the", "0001_zebra", "0002_marks", "baseline",
    ]  # fmt: skip


def test_scores_are_the_verdict_tables(folders: Path) -> None:
    table = knockout.load_run(small_run()).verdicts().set_index("candidate")
    for name, folder in zip(table.index, sorted(folders.iterdir())[:3], strict=True):
        results, samples = read(folder)
        score = results["results"][TASK]["exact_match,none"]
        assert math.isclose(score, table.loc[name, "pass1_knockout"])
        assert math.isclose(score, sum(s["exact_match"] for s in samples) / len(samples))
        assert results["config"]["model_args"]["knockout_ids"] == table.loc[name, "token_ids"]
        assert samples[0]["arguments"]["gen_args_0"]["arg_1"]["extra_args"] == {
            "knockout_ids": table.loc[name, "token_ids"]
        }
    results, _ = read(folders / "baseline")
    assert math.isclose(
        results["results"][TASK]["exact_match,none"], table["pass1_baseline"].iloc[0]
    )


def test_samples_hold_a_response_for_each_seed(folders: Path) -> None:
    _, samples = read(folders / "baseline")
    frame = knockout.load_run(small_run()).trajectories(candidate=())
    assert [s["doc_id"] for s in samples] == [0, 1, 2]
    for sample in samples:
        own = frame[frame["problem"] == sample["doc_id"]]
        assert sample["resps"] == [own["text"].tolist()]
        assert sample["knockout"]["grades"] == own["correct"].tolist()
        assert sample["knockout"]["seeds"] == [0, 1]
        assert sample["target"] == sample["doc"]["answer"]


def test_an_inherited_knockout_repeats_its_baseline(folders: Path) -> None:
    _, zebra = read(folders / "0001_zebra")
    _, base = read(folders / "baseline")
    for mine, theirs in zip(zebra, base, strict=True):
        if mine["knockout"]["divergence_step"] == [None, None]:
            assert mine["resps"] == theirs["resps"]
    assert any(s["knockout"]["divergence_step"] == [None, None] for s in zebra)


def test_lm_eval_prints_its_own_table_of_it(folders: Path) -> None:
    from lm_eval.utils import make_table

    results, _ = read(folders / "0002_marks")
    score = results["results"][TASK]["exact_match,none"]
    table = make_table(results)
    assert TASK in table
    assert f"{score:.4f}" in table


def test_datasets_loads_the_samples(folders: Path) -> None:
    import datasets

    (path,) = (folders / "0000_the").glob("*/samples_*.jsonl")
    rows = datasets.load_dataset("json", data_files=str(path), split="train")
    assert rows["doc_id"][:] == [0, 1, 2]


def test_other_data_are_refused(tmp_path: Path) -> None:
    sweep = load_sweep(small_run() / "config.yaml")
    other = Sweep.model_validate({**sweep.model_dump(exclude_unset=True), "limit": 2})
    with (
        Ledger.open(small_run() / "run.db") as ledger,
        pytest.raises(UsageError, match="not those of the run"),
    ):
        write_lm_eval(small_run(), other, ledger, tmp_path / "out")
