"""Lists for training: selection across benchmarks, freeze lists, and whose ids they are."""

from __future__ import annotations

import json
import types
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml

from knockout.errors import UsageError
from knockout.tokens.token_list import read_scores, read_token_list, vocabulary_fingerprint
from knockout.verdicts.export import freeze_list, ranked, render, selected, write

P, N, S = "strong_pillar", "neutral", "strong_stumbling_block"


def row(benchmark: str, name: str, ids: list[int], verdict: str, delta: float, **more: Any) -> Any:
    evidence = "equivalent" if verdict == N else "effect"
    return {
        "benchmark": benchmark,
        "candidate": name,
        "token_ids": ids,
        "tokens": [f"t{i}" for i in ids],
        "verdict": verdict,
        "evidence": evidence,
        "delta": delta,
        "ci_low": delta - 0.1,
        "ci_high": delta + 0.1,
        "p_value": 0.01 if verdict != N else 0.5,
        "p_adjusted": 0.02 if verdict != N else 0.9,
        "n_problems": 30,
        "n_seeds": 2,
        **more,
    }


TABLE = pd.DataFrame(
    [
        row("maths", "a", [1], P, -0.4),
        row("maths", "b", [2], N, 0.0),
        row("maths", "c", [3], N, 0.01),
        row("maths", "set", [4, 5], P, -0.2),
        row("maths", "d", [6], S, 0.3),
        row("words", "a", [1], P, -0.1),
        row("words", "b", [2], N, 0.02),
        row("words", "c", [3], N, float("nan"), evidence="undetermined"),
        row("words", "set", [4, 5], N, 0.0),
        row("words", "d", [6], P, -0.3),
        row("pooled", "b", [2], P, -0.9),
    ]
)


def names(**kwargs: Any) -> list[str]:
    return [item["candidate"] for item in selected(TABLE, **kwargs)]


def test_benchmarks_judge_overall_any_or_all() -> None:
    assert names(verdicts=[P]) == ["a", "set"]  # d is mixed
    assert names(verdicts=[P], across="any") == ["a", "set", "d"]
    assert names(verdicts=[P], across="all") == ["a"]
    assert names(verdicts=[N], across="any") == ["b", "c", "set"]
    assert names(verdicts=[N], across="all") == ["b", "c"]
    assert names(verdicts=[P], benchmark="words") == ["a", "d"]
    assert names(verdicts=[N], evidence=["equivalent"]) == ["b"]
    assert names(evidence=["undetermined"]) == ["c"]
    assert names(verdicts=[P], special_ids=[5]) == ["a"]
    with pytest.raises(UsageError, match="no benchmark 'x'"):
        names(benchmark="x")


def test_a_freeze_list_leaves_out_pillars_and_what_is_unknown() -> None:
    rocks = [3, 2, 1, 9, 4, 6, 2]
    kept, left = freeze_list(rocks, selected(TABLE))
    assert [item["token_ids"] for item in kept] == [[2]]
    # 4 is part of a pillar set, 6 is a pillar on one of two benchmarks.
    assert left == {"pillar": [1, 4, 6], "undetermined": [3], "not tested": [9]}
    more, _ = freeze_list(rocks, selected(TABLE), keep_undetermined=True)
    assert [item["token_ids"] for item in more] == [[3], [2]]


def test_ranking() -> None:
    rows = selected(TABLE)
    assert [r["candidate"] for r in ranked(rows, 2, "delta")] == ["a", "d"]
    assert [r["candidate"] for r in ranked(rows, 3, "p_value")] == ["a", "set", "d"]
    by_score = ranked(rows, 2, "kl", {2: 1.0, 5: 3.0})
    assert [r["candidate"] for r in by_score] == ["set", "b"]
    with pytest.raises(UsageError, match="found 'kl' to rank by"):
        ranked(rows, 2, "kl")


def tokenizer(**vocabulary: int) -> Any:
    return types.SimpleNamespace(get_vocab=lambda: dict(vocabulary))


OURS, THEIRS = tokenizer(a=0, b=1, c=2, d=7), tokenizer(a=0, b=2, c=1, d=7)
ABOUT = {
    "model": "m",
    "vocabulary": vocabulary_fingerprint(OURS),
    "run": {"identity_hash": "x"},
    "rule": {"rule": "fdr"},
    "selection": {"verdicts": [P]},
}


def test_the_fingerprint_is_of_ids_alone() -> None:
    other = tokenizer(d=7, c=2, b=1, a=0)
    other.chat_template = "something"
    assert vocabulary_fingerprint(other) == vocabulary_fingerprint(OURS)
    assert vocabulary_fingerprint(THEIRS) != vocabulary_fingerprint(OURS)


def test_json_describes_itself_and_reads_back(tmp_path: Path) -> None:
    rows = selected(TABLE, verdicts=[P])
    path = tmp_path / "list.json"
    write(rows, "json", path, ABOUT)
    found = json.loads(path.read_text())
    assert (found["schema"], found["version"], found["model"]) == ("knockout-token-list", 1, "m")
    assert found["token_ids"] == [1, 4, 5]
    first = found["candidates"][0]
    assert first["benchmarks"]["maths"]["ci_low"] == pytest.approx(-0.5)
    assert first["benchmarks"]["maths"]["n_problems"] == 30
    assert read_token_list(path) == read_token_list(path, OURS) == (1, 4, 5)
    with pytest.raises(UsageError, match=r"made for 'm'.*the ids mean other tokens"):
        read_token_list(path, THEIRS)
    assert read_token_list(path, THEIRS, force=True) == (1, 4, 5)
    path.write_text(json.dumps({**found, "version": 2}))
    with pytest.raises(UsageError, match="version 2; this release reads 1"):
        read_token_list(path)
    path.write_text(json.dumps({**found, "token_ids": ["1"]}))
    with pytest.raises(UsageError, match="no list of whole numbers"):
        read_token_list(path)


def test_other_files_are_read_too(tmp_path: Path) -> None:
    rows = selected(TABLE, verdicts=[P])
    (tmp_path / "ids.json").write_text(render(rows, "ids"))
    assert read_token_list(tmp_path / "ids.json", OURS) == (1, 4, 5)
    (tmp_path / "far.json").write_text("[9]")
    with pytest.raises(UsageError, match="token id 9; the tokenizer has 0 to 7"):
        read_token_list(tmp_path / "far.json", OURS)
    with pytest.raises(UsageError, match="no such file"):
        read_token_list(tmp_path / "none.json")
    (tmp_path / "text.txt").write_text("wait\n")
    with pytest.raises(UsageError, match="found 'wait'; expected a token id"):
        read_token_list(tmp_path / "text.txt")
    table = tmp_path / "s.csv"
    table.write_text("token_id,kl\n3,0.5\n4,1.5\n")
    assert read_scores(table, "kl") == {3: 0.5, 4: 1.5}
    assert read_token_list(table, column="token_id") == (3, 4)
    with pytest.raises(UsageError, match="no column 'x'; it has token_id, kl"):
        read_scores(table, "x")


def test_yaml_is_a_fragment_with_the_tokens_beside_the_ids() -> None:
    text = render(selected(TABLE, verdicts=[P]), "yaml", ABOUT)
    assert yaml.safe_load(text) == {"pillars": [1, 4, 5]}
    assert "- 4  # t4" in text
    assert yaml.safe_load(render([], "yaml", ABOUT)) == {"pillars": []}
    odd = [
        {"token_ids": [7, 8], "tokens": ["a\u2028- 9", "b"]},
        {"token_ids": [8], "tokens": ["b"]},
    ]
    assert yaml.safe_load(render(odd, "yaml", ABOUT)) == {"pillars": [7, 8]}
    with pytest.raises(ValueError, match="needs to know the model"):
        render([], "json")


def test_tables_have_a_row_a_candidate(tmp_path: Path) -> None:
    rows = selected(TABLE)
    write(rows, "parquet", tmp_path / "x.parquet")
    frame = pd.read_parquet(tmp_path / "x.parquet")
    assert frame["candidate"].tolist() == ["a", "b", "c", "set", "d"]
    assert list(frame["token_ids"][3]) == [4, 5]
    assert frame["evidence"].tolist() == [
        "effect",
        "equivalent",
        "undetermined",
        "equivalent",
        "effect",
    ]
    assert "words.ci_high" in frame
    assert (
        render(rows, "csv")
        .splitlines()[0]
        .startswith("candidate,token_ids,tokens,verdict,evidence")
    )
    with pytest.raises(UsageError, match="Parquet file cannot be printed"):
        render(rows, "parquet")


def test_the_yaml_key_says_what_the_list_is() -> None:
    from knockout.verdicts.export import list_name

    assert list_name({"verdicts": [P]}, ["effect"]) == "pillars"
    assert list_name({"verdicts": [S]}, ["effect"]) == "stumbling_blocks"
    assert list_name({"verdicts": [N]}, ["equivalent"]) == "neutral"
    assert list_name({"verdicts": [N]}, ["equivalent", "undetermined"]) == "neutral_or_undetermined"
    assert list_name({"verdicts": [N]}, ["undetermined"]) == "undetermined"
    assert list_name({"verdicts": [P, N]}, ["effect", "undetermined"]) == "tokens"
    assert list_name({"verdicts": [N], "group": "control"}, ["equivalent"]) == "controls"
    assert list_name({"verdicts": [], "freeze_list": {}}, ["equivalent"]) == "freeze_list"


def test_a_published_table_gives_scores_by_either_name(tmp_path: Path) -> None:
    path = tmp_path / "rocks.csv"
    path.write_text("rock_id,rock_freq,rock_mean_kl,ctrl_id\n3,7,0.5,9\n4,8,1.5,\n")
    assert read_scores(path, "mean_kl") == read_scores(path, "rock_mean_kl") == {3: 0.5, 4: 1.5}
    assert read_scores(path, "frequency") == {3: 7, 4: 8}
