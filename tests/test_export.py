"""Lists for training: who is on them, and in which form."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from knockout.errors import UsageError
from knockout.export import render, selected, write
from knockout.files import atomic_path, write_text
from knockout.verdicts import POOLED

NEUTRAL, PILLAR, BLOCK = "neutral", "strong_pillar", "strong_stumbling_block"


@pytest.fixture
def table() -> pd.DataFrame:
    verdicts = {
        # name: (ids, verdict on maths, on words, pooled)
        "a": ([5], NEUTRAL, NEUTRAL, PILLAR),
        "b": ([9, 3], PILLAR, NEUTRAL, NEUTRAL),
        "c": ([7], PILLAR, BLOCK, NEUTRAL),
        "end": ([0], NEUTRAL, PILLAR, PILLAR),
        "control": ([5, 8], NEUTRAL, NEUTRAL, NEUTRAL),
        "A/A": ([63], NEUTRAL, NEUTRAL, NEUTRAL),
    }
    rows: list[dict[str, Any]] = []
    for place, benchmark in enumerate(("maths", "words", POOLED), start=1):
        for name, found in verdicts.items():
            rows.append(
                {
                    "benchmark": benchmark, "candidate": name, "token_ids": found[0],
                    "tokens": [f'"t{i}"' for i in found[0]], "verdict": found[place],
                    "delta": float("nan") if name == "c" else -0.25, "p_adjusted": 0.5,
                }
            )  # fmt: skip
    return pd.DataFrame(rows)


GROUPS = {"control": "control", "A/A": "canary"}


def names(chosen: list[dict[str, Any]]) -> list[str]:
    return [row["candidate"] for row in chosen]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, ["a", "b", "c"]),
        ({"with_special": True}, ["a", "b", "c", "end"]),
        ({"group": "control"}, ["control"]),
        ({"verdicts": [NEUTRAL]}, ["a"]),
        ({"verdicts": [PILLAR]}, ["b"]),
        ({"verdicts": [PILLAR, NEUTRAL], "with_special": True}, ["a", "b", "end"]),
        ({"verdicts": [PILLAR], "benchmark": "maths"}, ["b", "c"]),
        ({"verdicts": [BLOCK], "benchmark": "words"}, ["c"]),
        ({"verdicts": [PILLAR], "benchmark": POOLED}, ["a"]),
    ],
)
def test_who_is_on_the_list(
    table: pd.DataFrame, options: dict[str, Any], expected: list[str]
) -> None:
    assert names(selected(table, groups=GROUPS, special_ids=[0, 2], **options)) == expected


def test_both_kinds_of_effect_are_mixed_and_missing_numbers_null(table: pd.DataFrame) -> None:
    row = next(r for r in selected(table, groups=GROUPS) if r["candidate"] == "c")
    assert row["verdict"] == "mixed"
    assert row["benchmarks"] == {
        "maths": {"verdict": PILLAR, "delta": None, "p_adjusted": 0.5},
        "words": {"verdict": BLOCK, "delta": None, "p_adjusted": 0.5},
    }


def test_an_unknown_benchmark(table: pd.DataFrame) -> None:
    with pytest.raises(UsageError, match="no benchmark 'x' in this run; it has maths, words"):
        selected(table, benchmark="x")


def test_every_form_holds_the_same(table: pd.DataFrame, tmp_path: Path) -> None:
    chosen = selected(table, groups=GROUPS, special_ids=[0])
    assert json.loads(render(chosen, "ids")) == [3, 5, 7, 9]
    assert json.loads(render(chosen, "json")) == chosen
    write(chosen, "csv", tmp_path / "list.csv")
    csv = pd.read_csv(tmp_path / "list.csv")
    assert [json.loads(ids) for ids in csv["token_ids"]] == [[5], [9, 3], [7]]
    assert list(csv["words.verdict"]) == [NEUTRAL, NEUTRAL, BLOCK]
    write(chosen, "parquet", tmp_path / "list.parquet")
    parquet = pd.read_parquet(tmp_path / "list.parquet")
    assert [list(ids) for ids in parquet["token_ids"]] == [[5], [9, 3], [7]]
    with pytest.raises(UsageError, match="--out"):
        render(chosen, "parquet")


def test_an_empty_list_is_still_a_list(table: pd.DataFrame, tmp_path: Path) -> None:
    nobody = selected(table, groups=GROUPS, verdicts=[BLOCK])
    assert json.loads(render(nobody, "ids")) == []
    assert render(nobody, "csv") == "candidate,token_ids,tokens,verdict\n"
    write(nobody, "parquet", tmp_path / "none.parquet")
    assert len(pd.read_parquet(tmp_path / "none.parquet")) == 0


def test_files_are_there_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "new" / "list.json"
    write_text(path, "old")
    with pytest.raises(KeyError), atomic_path(path) as temporary:
        temporary.write_text({}["nothing"])
    assert path.read_text() == "old"
    assert [p.name for p in path.parent.iterdir()] == ["list.json"]
    write_text(path, "new \ud800")
    assert path.read_text() == "new \\ud800"
    umask = os.umask(0)
    os.umask(umask)
    assert path.stat().st_mode & 0o777 == 0o666 & ~umask
