"""The Python API, on a small real run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from small_run import SETTINGS, small_run

import knockout
from knockout.errors import UsageError


def test_importing_the_package_imports_nothing_heavy() -> None:
    code = (
        "import sys, knockout\n"
        "heavy = {'torch', 'transformers', 'vllm', 'pandas', 'pydantic', 'lm_eval', 'scipy'}\n"
        "sys.exit(', '.join(heavy & set(sys.modules)) or 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_public_names() -> None:
    assert knockout.__all__ == ["Run", "Sweep", "__version__", "load_run"]
    for name in knockout.__all__:
        assert getattr(knockout, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'sweep_all'"):
        knockout.sweep_all  # noqa: B018


BASE = {"model": "smollm2-135m", "benchmarks": ["b"]}


def made(**values: Any) -> knockout.Sweep:
    return knockout.Sweep(**{**BASE, "candidates": [5], **values})


@pytest.mark.parametrize(
    "given",
    [
        [5, 7],
        (5, 7),
        np.array([5, 7]),
        pd.Series([5.0, 7.0, None]).dropna(),
        pd.DataFrame({"token_id": [5, 7], "token": ["a", "b"]}),
        pd.DataFrame({"rock_id": [5, 7], "rock_freq": [1, 2]}),
        pd.DataFrame({"token_ids": [[5], [7]], "candidate": ["a", "b"]}),
        {"ids": np.array([5, 7])},
    ],
)
def test_candidates_are_what_a_notebook_has_at_hand(given: Any) -> None:
    assert made(candidates=given).candidates.ids == (5, 7)


def test_other_values_of_notebooks_are_taken(tmp_path: Path) -> None:
    sweep = made(benchmarks="b", seeds=np.int64(4), sampling={"temperature": np.float32(0.5)})
    assert (sweep.benchmarks[0].name, sweep.seeds, sweep.sampling.temperature) == ("b", 4, 0.5)
    path = tmp_path / "rocks.csv"
    assert made(candidates=path).candidates.file == path
    assert made(candidates=str(path)).candidates.file == path
    assert made(candidates=[" the", "."]).candidates.strings == (" the", ".")
    assert made(candidates=[[1, 2], 3]).candidates.sets == {"1 + 2": (1, 2)}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"candidates": [1.5]}, r"found 1\.5; expected token ids or texts"),
        ({"candidates": [True]}, "found True"),
        ({"candidates": []}, "`ids` is empty"),
        ({"candidates": pd.DataFrame({"a": [1], "b": [2]})}, "a table with columns a, b"),
        ({"seeds": "x"}, r"Sweep\(\.\.\.\): `seeds`: found 'x'; expected a whole number"),
        ({"sedes": 3}, "unknown key `sedes`; did you mean `seeds`"),
        ({"benchmarks": []}, "`benchmarks`: found \\[\\]; expected at least one"),
    ],
)
def test_a_wrong_argument_is_a_usage_error(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        made(**values)


@pytest.mark.engine
class TestRun:
    def test_the_baseline_may_be_named(self) -> None:
        run = knockout.load_run(small_run())
        assert set(run.trajectories(candidate="baseline", text=False)["kind"]) == {"baseline"}

    def test_frames_agree_with_the_files(self) -> None:
        run = knockout.load_run(small_run())
        table = run.verdicts()
        written = json.loads((small_run() / "verdicts.json").read_text())
        assert table["candidate"].tolist() == [row["candidate"] for row in written]
        assert table["delta"].tolist() == pytest.approx([row["delta"] for row in written])
        summary = json.loads((small_run() / "summary.json").read_text())
        assert run.summary()["tokens_generated"] == summary["tokens_generated"]
        assert run.sweep.seeds == SETTINGS["seeds"]

    def test_verdicts_take_another_rule(self) -> None:
        run = knockout.load_run(small_run())
        wide = run.verdicts(rule="nominal", alpha=0.01)
        own = run.verdicts(rule="nominal", alpha=0.2)
        assert (wide["ci_high"] - wide["ci_low"] >= own["ci_high"] - own["ci_low"]).all()
        with pytest.raises(UsageError, match=r"alpha is 2"):
            run.verdicts(alpha=2)

    def test_trajectories_share_their_baseline_up_to_the_step(self) -> None:
        run = knockout.load_run(small_run())
        frame = run.trajectories(inherited=True)
        base = frame[frame["kind"] == "baseline"].set_index(["problem", "seed"])
        forked = frame[frame["kind"] == "forked"]
        assert len(base) == 6
        assert len(forked) == run.summary()["forks"] > 0
        assert (frame["kind"] == "inherited").sum() == run.summary()["inherited"] > 0
        banned = {c: set(ids) for c, ids in run.verdicts()[["candidate", "token_ids"]].to_numpy()}
        for _, row in forked.iterrows():
            own = base.loc[(row["problem"], row["seed"])]
            assert np.array_equal(row["tokens"][: row["step"]], own["tokens"][: row["step"]])
            assert not np.array_equal(row["tokens"], own["tokens"])
            assert banned[row["candidate"]].isdisjoint(row["tokens"][row["step"] :].tolist())
        assert (frame["n_tokens"] == frame["tokens"].map(len)).all()
        assert frame["text"].str.len().gt(0).all()

    def test_trajectories_of_one_candidate(self) -> None:
        run = knockout.load_run(small_run())
        frame = run.trajectories(candidate="/marks: . ,/", text=False)
        assert set(frame["candidate"]) == {"baseline", "/marks: . ,/"}
        assert "text" not in frame
        with pytest.raises(UsageError, match="no candidate 'x' in this run; it has"):
            run.trajectories(candidate="x")
        with pytest.raises(UsageError, match="no benchmark 'aime' in this run"):
            run.trajectories(benchmark="aime")

    def test_the_same_sweep_resumes_and_another_is_refused(self) -> None:
        before = (small_run() / "run.db").stat().st_size
        run = knockout.Sweep(**SETTINGS).run(small_run())
        assert run.summary()["sessions"] == 1
        assert (small_run() / "run.db").stat().st_size == before
        with pytest.raises(UsageError, match="belongs to another sweep"):
            knockout.Sweep(**SETTINGS, run_seed=2).run(small_run())

    def test_a_sweep_file_loads_with_values_put_over_it(self) -> None:
        sweep = knockout.Sweep.load(small_run() / "config.yaml", "seeds=5")
        assert (sweep.seeds, sweep.limit) == (5, 3)
        assert type(sweep) is knockout.Sweep


def test_a_folder_without_a_run_is_refused(tmp_path) -> None:
    with pytest.raises(UsageError, match="no run here"):
        knockout.load_run(tmp_path)


@pytest.mark.engine
class TestLists:
    def test_exported_ids_are_those_of_the_command(self, tmp_path: Path) -> None:
        run = knockout.load_run(small_run())
        with pytest.warns(UserWarning, match="undetermined: measured too little"):
            ids = run.export(tmp_path / "list.json", format="json")
        table = run.verdicts()
        own = table[table["group"] == "candidate"]
        assert ids == sorted({t for row in own["token_ids"] for t in row})
        written = json.loads((tmp_path / "list.json").read_text(encoding="utf-8"))
        assert sorted(t for c in written["candidates"] for t in c["token_ids"]) == ids
        code = "from knockout.cli import main; main()"
        command = [sys.executable, "-c", code, "export", str(small_run()), "--format", "ids"]
        told = subprocess.run(command, check=True, capture_output=True, text=True)
        assert json.loads(told.stdout) == ids
        for wrong in ({"verdicts": "pillar"}, {"evidence": ["none"]}, {"format": "xml"}):
            with pytest.raises(UsageError, match="expected one of"):
                run.export(**wrong)
        with pytest.raises(UsageError, match="say how many with top"):
            run.export(by="p_value")

    def test_a_confirmation_splits_and_runs(self, tmp_path: Path) -> None:
        run = knockout.load_run(small_run())
        half = run.confirm(tmp_path / "half", candidates=['" the"'], split=True)
        assert half["candidate"].tolist() == ['" the"']
        assert (tmp_path / "half" / "confirm.csv").exists()
        fresh = run.confirm(tmp_path / "fresh", candidates=['" the"'], joint=(), seeds=1)
        assert fresh["candidate"].tolist() == ['" the"']
        assert fresh.attrs["shared_seeds"] == 0
        again = knockout.load_run(tmp_path / "fresh")
        own = again.verdicts().set_index("candidate")
        assert fresh["fresh_delta"][0] == pytest.approx(own["delta"]['" the"'])
        with pytest.raises(UsageError, match="no candidate 'x'"):
            run.confirm(tmp_path / "x", candidates=["x"])

    def test_a_sweep_shows_itself(self) -> None:
        shown = knockout.Sweep(**SETTINGS)._repr_html_()
        assert "knockout_starter_arithmetic" in shown
        assert "<td" in shown
        assert "run_seed" not in shown
