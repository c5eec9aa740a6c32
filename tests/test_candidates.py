"""Candidate lists: what they resolve to, and what is said about wrong ones."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from knockout.config.sweep import CandidateSource
from knockout.errors import UsageError
from knockout.method.interventions import Intervention, ban
from knockout.tokens.candidates import Resolved, Vocabulary, canary, display, family, resolve

CORPUS = ["wait Wait WAIT wait the cat . The cat waits , so the cat waited \n \n"] * 20
SPECIAL = ["<|end|>", "<|turn|>", "<|reserved_0|>"]
PADDING = 4


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=290,
            special_tokens=SPECIAL,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|end|>")
    return Vocabulary(tokenizer, len(tokenizer) + PADDING, (0, 1))


def from_source(vocabulary: Vocabulary, **source: Any) -> Resolved:
    return resolve(CandidateSource.model_validate({"canary": False, **source}), vocabulary)


def ids_of(found: Resolved) -> list[tuple[int, ...]]:
    return [candidate.token_ids for candidate in found.candidates]


def test_strings_keep_their_space(vocabulary: Vocabulary) -> None:
    texts = ["the", " the", "\n", "."]
    found = from_source(vocabulary, strings=texts)
    assert [c.name for c in found.candidates] == ['"the"', '" the"', '"\\n"', '"."']
    ids = [list(c.token_ids) for c in found.candidates]
    assert [vocabulary.tokenizer.decode(i) for i in ids] == texts
    assert ids[0] != ids[1]


def test_a_family_is_all_single_token_variants(vocabulary: Vocabulary) -> None:
    everything = {vocabulary.tokenizer.decode([i]): i for i in range(len(vocabulary.tokenizer))}
    wanted = {"wait", " wait", "Wait", " Wait", "WAIT", " WAIT"}
    expected = sorted(i for text, i in everything.items() if text in wanted)
    assert len(expected) >= 3
    found = from_source(vocabulary, strings=["wait"], family=True)
    assert ids_of(found) == [tuple(expected)]
    assert found.candidates[0].name == 'family "wait"'
    assert family(" WAIT", vocabulary) == tuple(expected)


def test_the_embedded_models_family_of_wait() -> None:
    from knockout.tokens.vocabulary import open_vocabulary

    _, tokenizer, smol = open_vocabulary("smollm2-135m")
    assert family("wait", smol) == (5847, 14006, 22297, 33359)
    assert smol.single(" exaggerated") == 24098
    assert smol.single("exaggerated") is None
    with pytest.raises(UsageError, match=r"is not one token but .* \+ "):
        from_source(smol, strings=["exaggerated"])
    # User text can be a special token.
    assert tokenizer.encode("<|im_end|>") == [2]
    with pytest.raises(UsageError, match="allow_eos"):
        from_source(smol, strings=["<|im_end|>"])


def test_sets_are_banned_together(vocabulary: Vocabulary) -> None:
    token = vocabulary.single(" wait")
    assert token is not None
    found = from_source(vocabulary, sets={"mine": [250, " wait", 240]}, ids=[240])
    assert ids_of(found) == [(240,), tuple(sorted([250, token, 240]))]
    assert found.candidates[1].name == "mine"
    assert len(found.candidates[1].tokens) == 3


def test_the_canary_cannot_occur(vocabulary: Vocabulary) -> None:
    width = vocabulary.width
    assert canary(vocabulary).token_ids == (width - 1,)  # type: ignore[union-attr]
    found = from_source(vocabulary, ids=[240, width - 1], canary=True)
    assert found.candidates[-1].group == "canary"
    assert found.candidates[-1].token_ids == (width - 2,)
    snug = Vocabulary(vocabulary.tokenizer, len(vocabulary.tokenizer), (0,))
    reserved = canary(snug)
    assert reserved is not None
    assert vocabulary.tokenizer.convert_ids_to_tokens(reserved.token_ids[0]) == "<|reserved_0|>"
    assert canary(snug, taken=[2]) is None


def test_padding_and_special_tokens_are_told(vocabulary: Vocabulary) -> None:
    found = from_source(vocabulary, ids=[vocabulary.width - 1, 2])
    assert "is padding of the vocabulary" in found.warnings[0]
    assert "candidates.ids[0]" in found.warnings[0]


def test_end_of_text_needs_a_yes_and_takes_all_its_twins(vocabulary: Vocabulary) -> None:
    with pytest.raises(UsageError, match=r"candidates\.ids\[0\].*ends the text.*allow_eos"):
        from_source(vocabulary, ids=[1])
    found = from_source(vocabulary, ids=[1], allow_eos=True)
    assert ids_of(found) == [(0, 1)]
    assert any("max_tokens" in line for line in found.warnings)
    assert any("one action" in line for line in found.warnings)
    twice = from_source(vocabulary, ids=[1, 0], allow_eos=True)
    assert ids_of(twice) == [(0, 1)]
    assert "candidates.ids[1]: token id 0 found twice" in twice.warnings[-1]


def test_names_are_unique_where_texts_are_not(vocabulary: Vocabulary) -> None:
    halves = [vocabulary.encode("é")[0], vocabulary.encode("ü")[1]]
    found = from_source(vocabulary, ids=halves, sets={'" wait"': [240]}, strings=[" wait"])
    names = [c.name for c in found.candidates]
    assert len(set(names)) == 4
    assert sum("#" in name for name in names) >= 2


@pytest.mark.parametrize(
    ("text", "shown"),
    [(" the", '" the"'), ("\n", '"\\n"'), ("\u00a0", '"\\u00a0"'), ('"\\', '"\\"\\\\"'),
     ("\U000e0001", '"\\udb40\\udc01"'), ("é½", '"é½"'), ("\u200b", '"\\u200b"')],
)  # fmt: skip
def test_display_reads_back_and_hides_nothing(text: str, shown: str) -> None:
    assert display(text) == shown
    assert json.loads(display(text)) == text


def test_csv_and_parquet_columns(tmp_path: Path, vocabulary: Vocabulary) -> None:
    table = pd.DataFrame({"id": [240, 241, 242], "token": ["a", "b", "c"], "x": [0.5, 11, 12]})
    table.to_csv(tmp_path / "t.csv", index=False)
    table.to_parquet(tmp_path / "t.parquet")
    for name in ("t.csv", "t.parquet"):
        found = from_source(vocabulary, file=tmp_path / name, column="id")
        assert ids_of(found) == [(240,), (241,), (242,)]
    (tmp_path / "two.csv").write_text("rock,ctrl\n240,250\n241,\n")
    found = from_source(
        vocabulary,
        file=tmp_path / "two.csv",
        column="rock",
        controls={"file": tmp_path / "two.csv", "column": "ctrl"},
    )
    assert [(c.token_ids, c.group) for c in found.candidates] == [
        ((240,), "candidate"), ((241,), "candidate"), ((250,), "control"),
    ]  # fmt: skip
    with pytest.raises(
        UsageError, match=r"t\.parquet row 1, column x: found '0\.5'; expected a token id"
    ):
        from_source(vocabulary, file=tmp_path / "t.parquet", column="x")
    with pytest.raises(UsageError, match=r"t\.parquet: no column 'rock'; it has id, token, x"):
        from_source(vocabulary, file=tmp_path / "t.parquet", column="rock")


@pytest.mark.parametrize(
    ("name", "content", "column", "how"),
    [
        ("a.txt", "240\n241\n", None, "2 token ids from a.txt"),
        ("a.txt", "\ufeff240\r\n241\r\n", None, "2 token ids from a.txt"),
        ("a.txt", "240, 241", None, "2 token ids from a.txt"),
        ("a.txt", "[240, 241]\n", None, "2 token ids from a.txt"),
        ("list", "240 241\n", None, "2 token ids from list"),
        ("a.json", "[240, 241]", None, "2 token ids from a.json"),
        ("a.json", '\ufeff{"token_ids": [240, 241]}', None, "2 token ids from a.json, key token_ids"),
        ("a.json", '[{"id": 240}, {"id": 241}]', None, "2 token ids from a.json, key id"),
        ("a.jsonl", '{"id": 240, "x": 1}\n{"id": 241}\n', "id", "2 token ids from a.jsonl, key id"),
        ("a.yaml", "freeze_list:\n  - 240  # the\n  - 241\n", None, "2 token ids from a.yaml, key freeze_list"),
        ("a.csv", "\ufeffid,x\r\n240,a\r\n241,b\r\n", None, "2 token ids from a.csv, column id"),
        ("a.csv", "240\n241\n", None, "2 token ids from a.csv"),
        ("a.csv", "id;x\n240;1,5\n241;2\n", "id", "2 token ids from a.csv, column id"),
        ("a.csv", "id,x\n240.0,1\n241.0,2\n,3\n", "id", "2 token ids from a.csv, column id"),
        ("a.csv", 'id,x\n"240",1\n"241",2\n', "id", "2 token ids from a.csv, column id"),
        ("a.tsv", "id\tx\n240\t1\n241\t2\n", "id", "2 token ids from a.tsv, column id"),
    ],
)  # fmt: skip
def test_every_form_of_ids_is_read_and_echoed(
    tmp_path: Path, vocabulary: Vocabulary, name: str, content: str, column: str | None, how: str
) -> None:
    for encoding in ("utf-8", "utf-16"):
        (tmp_path / name).write_text(content.removeprefix("\ufeff"), encoding=encoding, newline="")
        found = from_source(vocabulary, file=tmp_path / name, column=column)
        assert ids_of(found) == [(240,), (241,)]
        assert found.notes == (f"candidates: {how}",)
    (tmp_path / name).write_text(content, encoding="utf-8", newline="")
    assert ids_of(from_source(vocabulary, file=tmp_path / name, column=column)) == [(240,), (241,)]


@pytest.mark.parametrize(
    ("name", "content", "column"),
    [
        ("a.json", '[" wait", "."]', None),
        ("a.json", '[{"token": " wait"}, {"token": "."}]', None),
        ("a.yaml", '- " wait"\n- "."\n', None),
        ("a.csv", "token,n\n wait,1\n.,2\n", "token"),
        ("a.csv", 'token,n\n"  wait",1\n.,2\n'.replace("  ", " "), "token"),
        ("a.csv", 'token,n\n"""\u0020wait""",1\n""".""",2\n', "token"),
        ("a.txt", '" wait"\r\n.\r\n', None),
    ],
)  # fmt: skip
def test_every_form_of_texts_is_read(
    tmp_path: Path, vocabulary: Vocabulary, name: str, content: str, column: str | None
) -> None:
    (tmp_path / name).write_text(content, encoding="utf-8", newline="")
    found = from_source(vocabulary, file=tmp_path / name, column=column)
    texts = [vocabulary.tokenizer.decode(list(c.token_ids)) for c in found.candidates]
    assert texts == [" wait", "."]
    assert found.notes[0].startswith("candidates: 2 texts from a.")


def test_quoted_digits_are_texts_and_said_to_be(tmp_path: Path, vocabulary: Vocabulary) -> None:
    digits = [vocabulary.single("1"), vocabulary.single("5")]
    for name, content in (("a.txt", '"1"\n"5"\n'), ("a.json", '["1", "5"]')):
        (tmp_path / name).write_text(content)
        found = from_source(vocabulary, file=tmp_path / name)
        assert ids_of(found) == [(token,) for token in digits]
        assert found.notes == (f"candidates: 2 texts from {name} (in quotes, so not ids)",)


def test_our_own_exports_read_back(tmp_path: Path, vocabulary: Vocabulary) -> None:
    from knockout.tokens.token_list import document
    from knockout.verdicts.export import write

    rows: list[dict[str, Any]] = [
        {"candidate": name, "token_ids": ids, "tokens": [vocabulary.show(i) for i in ids],
         "verdict": "neutral", "evidence": "equivalent", "benchmarks": {}}
        for name, ids in (('" a"', [240]), ("both", [241, 242]), ('"b, c"', [243]))
    ]  # fmt: skip
    about: dict[str, Any] = {
        "model": "m", "vocabulary": "v", "run": {}, "rule": {}, "selection": {"verdicts": []},
    }  # fmt: skip
    assert document(rows, **about)["token_ids"] == [240, 241, 242, 243]
    for kind in ("ids", "json", "csv", "parquet", "yaml"):
        path = tmp_path / f"list.{'json' if kind == 'ids' else kind}"
        write(rows, kind, path, about)  # type: ignore[arg-type]
        found = from_source(vocabulary, file=path)
        if kind in ("ids", "yaml"):
            assert ids_of(found) == [(240,), (241,), (242,), (243,)]
        else:
            assert ids_of(found) == [(240,), (241, 242), (243,)]
            assert found.candidates[1].name == "both"
            assert "2 token ids and 1 set of token ids from list." in found.notes[0]


def test_one_token_in_two_sources_is_one_candidate(tmp_path: Path, vocabulary: Vocabulary) -> None:
    token = vocabulary.single(" wait")
    (tmp_path / "a.csv").write_text(f"id\n{token}\n240\n{token}\n")
    found = from_source(vocabulary, file=tmp_path / "a.csv", strings=[" wait"], ids=[240])
    assert ids_of(found) == [(token,), (240,)]
    assert len(found.warnings) == 3
    assert "candidates.strings[0]: token id" in found.warnings[2]
    assert "found twice, first at" in found.warnings[2]


def test_special_tokens_without_a_role_are_known() -> None:
    from knockout.tokens.special import special_ids
    from knockout.tokens.vocabulary import open_vocabulary

    _, tokenizer, smol = open_vocabulary("smollm2-135m")
    table = json.loads(tokenizer.backend_tokenizer.to_str())["added_tokens"]
    marked = {entry["id"] for entry in table if entry["special"]}
    assert len(marked) == 17
    assert special_ids(tokenizer) == smol.special_ids == marked
    assert tokenizer.convert_tokens_to_ids("<file_sep>") in smol.special_ids


def test_a_text_file_of_strings(tmp_path: Path, vocabulary: Vocabulary) -> None:
    path = tmp_path / "words.txt"
    path.write_text('" wait"\n\n.\n"\\n"\n"\\u0020the"\n', encoding="utf-8")
    found = from_source(vocabulary, file=path)
    texts = [vocabulary.tokenizer.decode(list(c.token_ids)) for c in found.candidates]
    assert texts == [" wait", ".", "\n", " the"]


@pytest.mark.parametrize(
    ("name", "text", "column", "message"),
    [
        ("a.json", "[240, true]", None, "a.json entry 2: found true; expected a token id"),
        ("a.yaml", "[0x" + "f" * 6000 + "]", None, "a.yaml entry 1: found a int too long to show"),
        ("a.json", "[240.0]", None, "a.json entry 1: found 240.0"),
        ("a.json", '["12"]', None, 'a.json entry 1: "12" is not one token'),
        ("a.json", '["\\ud800"]', None, "a.json entry 1: found half of a surrogate pair"),
        ("a.json", "[" * 2000, None, "a.json"),
        ("a.json", "[" + "9" * 5000 + "]", None, "a.json: cannot be read"),
        ("a.json", '[{"x": 1}, {"y": 2}]', None, "a.json: which column? Name one with `column:`; it has x, y"),
        ("a.json", '[[1], ["x"]]', None, "a.json entry 2: found ['x']; expected a list of token ids"),
        ("a.yaml", "a: &a [*a]", None, "the alias *a stands inside what it names"),
        ("a.json", "[null]", None, "a.json entry 1: found None"),
        ("a.json", "{}", None, "a.json: found a mapping with keys none; expected a list"),
        ("a.json", "3", None, "a.json: found a int; expected a list"),
        ("a.json", "[1,\n 2", None, "a.json line 2: not valid JSON"),
        ("a.json", "[]", None, "a.json: found no entries"),
        ("a.json", "[-1]", None, "a.json entry 1: token id -1 is outside the vocabulary; expected 0 to"),
        ("a.json", "[240, 99999]", None, "a.json entry 2: token id 99999 is outside"),
        ("a.json", "[240]", "id", "a.json: found column: id; the list's entries have no keys"),
        ("a.txt", "240", "id", "a.txt: found column: id; only CSV"),
        ("a.csv", "id,x\n240,1\n240.5,2\n", "id", "a.csv line 3, column id: found '240.5'"),
        ("a.csv", "id,x\n,1\n240,2\n", "id", "a.csv line 2, column id: found an empty cell"),
        ("a.csv", "x\n" + "240\n" * 3 + "24o\n", None, "a.csv line 5, column x: found '24o'; expected a token id (a whole number), as 3 others are"),
        ("a.csv", "a,a,b\n1,2,3\n", "a", "a.csv: more than one column 'a'"),
        ("a.csv", "a,b\n1,2,3\n", "a", "a.csv line 2: found 3 cells under a header of 2"),
        ("a.csv", "id\n" + "9" * 5000, None, "expected a token id"),
        ("a.csv", "id,x\n", "id", "a.csv: found no entries"),
        ("a.csv", "id,x\n1,2\n", "ix", "a.csv: no column 'ix'; it has id, x"),
        ("a.csv", "y,x\n1,2\n", None, "a.csv: which column?"),
        ("a.csv", "id,x\n²,2\n", "id", "found '²'"),
        ("a.txt", "", None, "a.txt: found no entries"),
        ("a.txt", ".\n the\n", None, "a.txt line 2: white space around 'the'"),
        ("a.txt", '"\\q"\n', None, "a.txt line 1: \"\\q\" is not a JSON string"),
        ("a.txt", '""\n', None, "a.txt line 1: found an empty string"),
        ("a.txt", "zebra\n", None, 'a.txt line 1: "zebra" is not one token but '),
        ("a.parquet", "no", "id", "a.parquet: not a Parquet file"),
    ],
)  # fmt: skip
def test_complaints_name_file_and_row(
    tmp_path: Path, vocabulary: Vocabulary, name: str, text: str, column: str | None, message: str
) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(UsageError) as caught:
        from_source(vocabulary, file=tmp_path / name, column=column)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file(tmp_path: Path, vocabulary: Vocabulary) -> None:
    with pytest.raises(UsageError, match=r"none\.csv: no such file"):
        from_source(vocabulary, file=tmp_path / "none.csv", column="x")


def test_twice_across_sources_and_inside_a_set(vocabulary: Vocabulary) -> None:
    with pytest.raises(
        UsageError, match=r"candidates\.sets\.a: token id 240 found twice, first at "
    ):
        from_source(vocabulary, ids=[240], sets={"a": [240]})
    with pytest.raises(UsageError, match=r"sets\.a\[1\]: token id 240 is in the set already"):
        from_source(vocabulary, sets={"a": [240, 240]})
    with pytest.raises(UsageError, match=r"sets\.a: found an empty set"):
        from_source(vocabulary, sets={"a": []})


def test_a_family_without_single_tokens(vocabulary: Vocabulary) -> None:
    with pytest.raises(UsageError, match="no variant of it is one token"):
        from_source(vocabulary, strings=["zebra"], family=True)


# Beside plain bans ---------------------------------------------------------------------------------


def test_a_dose_response_curve_ends_with_the_ban(vocabulary: Vocabulary) -> None:
    found = from_source(
        vocabulary, strings=[" wait", "."], dose=[0.5, -1, 4], sets={"both": [" wait", "."]}
    ).candidates
    wait = vocabulary.single(" wait")
    assert wait is not None
    assert [c.name for c in found[:4]] == [
        '" wait" λ=0.5', '" wait" λ=-1', '" wait" λ=4', '" wait"',
    ]  # fmt: skip
    assert [c.intervention for c in found[:4]] == [
        *(Intervention("penalty", (wait,), strength=s) for s in (0.5, -1.0, 4.0)),
        ban((wait,)),
    ]
    assert [c.family for c in found] == ["dose", "dose", "dose", "singles"] * 3
    assert len({c.intervention.digest for c in found}) == len(found) == 12


def test_scopes_hold_for_all_but_the_canary(vocabulary: Vocabulary, tmp_path: Path) -> None:
    (tmp_path / "controls.txt").write_text("the\n")
    found = from_source(
        vocabulary, strings=[" wait"], dose=[1], replace={".": ","}, where="answer",
        steps=[3, None], controls={"file": tmp_path / "controls.txt"}, canary=True,
    ).candidates  # fmt: skip
    assert [(c.group, c.intervention.kind) for c in found] == [
        ("candidate", "penalty"), ("candidate", "ban"), ("candidate", "replace"),
        ("control", "ban"), ("canary", "ban"),
    ]  # fmt: skip
    *others, last = (c.intervention for c in found)
    assert {(i.where, i.first_step, i.end_step) for i in others} == {("answer", 3, None)}
    assert last.is_plain_ban


def test_a_replacement_emits_another_token(vocabulary: Vocabulary) -> None:
    (one,) = from_source(vocabulary, replace={" wait": "."}).candidates
    wait, dot = vocabulary.single(" wait"), vocabulary.single(".")
    assert wait is not None
    assert one.intervention == Intervention("replace", (wait,), replacement=dot)
    assert one.name == '" wait" → "."'
    (one,) = from_source(vocabulary, replace={"wait": dot}, family=True).candidates
    assert set(one.token_ids) > {wait}


def test_pairs_ban_both_members(vocabulary: Vocabulary) -> None:
    texts = [" wait", ".", "the"]
    found = from_source(
        vocabulary, strings=texts, sets={"marks": [",", "."]}, pairs="all", dose=[1]
    ).candidates
    singles = {c.name: set(c.token_ids) for c in found if c.family == "singles"}
    pairs = [c for c in found if c.family == "pairs"]
    assert len(singles) == 4
    # "." is in the set, so that pair would be the set itself.
    assert len(pairs) == 5
    assert {p.members for p in pairs} <= {(a, b) for a in singles for b in singles}
    for pair in pairs:
        assert set(pair.token_ids) == singles[pair.members[0]] | singles[pair.members[1]]
        assert pair.intervention.is_plain_ban
        assert pair.name == " + ".join(pair.members)
        assert len(pair.tokens) == len(pair.token_ids)
    named = from_source(vocabulary, strings=texts, pairs=["the", " wait"]).candidates[-1]
    assert named.members == ('" wait"', '"the"')
    by_id = from_source(vocabulary, strings=texts, pairs=list(named.token_ids)).candidates[-1]
    assert by_id == named


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"strings": ["the"], "replace": {" wait": "<|end|>"}}, "ends the text"),
        ({"replace": {" wait": "the cat"}}, "the replacement 'the cat' is not one token but"),
        ({"replace": {" wait": 99999}}, "outside the vocabulary"),
        ({"replace": {" wait": " wait"}}, "is replaced by itself"),
        ({"replace": {"the cat": "."}}, "is not one token but"),
        ({"strings": ["the"], "pairs": "all"}, "found 1 banned candidate; a pair takes two"),
        ({"strings": ["the", "."], "pairs": ["the", "zebra"]}, "'zebra' is no banned candidate"),
        ({"strings": ["the", "."], "pairs": ["the", '"the"']}, "is named twice"),
        (
            {"strings": ["."], "sets": {"marks": [",", "."]}, "pairs": [".", "marks"]},
            'one of "." and marks bans all that the other bans',
        ),
    ],
    ids=str,
)
def test_what_does_not_go_together_is_refused(
    vocabulary: Vocabulary, source: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        from_source(vocabulary, **source)
