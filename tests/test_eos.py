"""End-of-text tokens as one action."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from knockout.tokens.eos import chat_end_ids, stop_ids, widen_stop_ban

WORDS = ["<end>", "<turn>", "<other>", "knockout", "?", "user", "assistant"]
TEMPLATE = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }}{{ '<turn>' }}{% endfor %}"


def tokenizer(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    core = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="?"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    found = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<end>", additional_special_tokens=["<turn>", "<other>"]
    )
    found.chat_template = template
    return found


def test_the_end_of_a_turn_is_found_in_the_template() -> None:
    assert chat_end_ids(tokenizer()) == (1,)
    assert chat_end_ids(tokenizer(None)) == ()
    assert chat_end_ids(tokenizer(TEMPLATE.replace("<turn>", " user"))) == ()
    assert chat_end_ids(tokenizer("{{ raise_exception('no') }}")) == ()


def test_all_sources_are_joined(tmp_path: Path) -> None:
    assert stop_ids(tokenizer()) == (0, 1)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0]}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert stop_ids(tokenizer(None), tmp_path) == (0, 2)
    assert stop_ids(tokenizer(), tmp_path) == (0, 1, 2)


@pytest.mark.parametrize(
    ("banned", "stops", "ids", "note"),
    [
        ([5], (0, 1), (5,), None),
        ([1, 0], (0, 1), (0, 1), None),
        ([5], (), (5,), None),
        ([1, 5], (0, 1), (0, 1, 5), "token id 0 ends the text as token id 1 does; both are"),
        ([1], (0, 1, 2), (0, 1, 2), "token ids 0, 2 end the text as token id 1 does; all are"),
        ([1, 2], (0, 1, 2), (0, 1, 2), "token id 0 ends the text as token ids 1, 2 do; all are"),
    ],
)
def test_a_ban_of_one_becomes_a_ban_of_all(
    banned: list[int], stops: tuple[int, ...], ids: tuple[int, ...], note: str | None
) -> None:
    found, said = widen_stop_ban(banned, stops)
    assert found == ids
    assert (said is None) is (note is None)
    if note is not None:
        assert said is not None
        assert said.startswith(note)
