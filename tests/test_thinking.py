"""The thinking of a response: tags of every kind, cut before special tokens are dropped."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from knockout.engines.trajectory import StopStrings
from knockout.grading.ifeval import grade_ifeval
from knockout.grading.maths import grade_maths
from knockout.tokens.thinking import after_thinking, known_end, opened_by, response_text

HARMONY = "<|channel|>final<|message|>"
SPECIAL = [
    "<|im_start|>", "<|im_end|>", "[THINK]", "[/THINK]", "<|channel|>", "<|message|>", "<|start|>",
    "<|end|>", "<|return|>", "</s>", "<|fim|>",
]  # fmt: skip
PLAIN = ["<think>", "</think>"]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """One token a character, besides special tokens, and tags that are tokens but not special."""
    letters = [chr(c) for c in range(32, 127)] + ["\n"]
    vocab = {c: i for i, c in enumerate(letters)}
    core = Tokenizer(models.WordLevel(vocab, unk_token="?"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    core.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in PLAIN])
    core.add_special_tokens([AddedToken(tag, special=True, normalized=False) for tag in SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="</s>", clean_up_tokenization_spaces=False
    )


CASES = [
    # (tag, opened by the prompt, response, answer or None)
    ("[/THINK]", False, r"[THINK]maybe \boxed{7} and on", None),
    ("[/THINK]", False, r"[THINK]\boxed{7}[/THINK]\boxed{8}", r"\boxed{8}"),
    ("[/THINK]", True, r"maybe \boxed{7}", None),
    ("[/THINK]", True, "hm[/THINK]\n\n8</s>", "8"),
    ("[/THINK]", False, "8<|fim|>9", "89"),
    ("</think>", False, "<think>a</think>\n\n8", "8"),
    ("</think>", False, "<think>a", None),
    ("</think>", True, "a", None),
    ("</think>", True, "a</think>b<|im_end|>", "b"),
    ("</think>", False, "8", "8"),
    ("</think>", False, "<think>a</think>8<|im_end|>\n<|im_start|>user\nx<think>b</think>9", "8"),
    ("</think>", False, "8<|im_end|>\n<|im_start|>assistant\n9", "8"),
    ("</think>", False, "<think>a<|im_end|>\n<|im_start|>user\nb</think>9", None),
    (HARMONY, False, "<|channel|>analysis<|message|>7<|end|>", None),
    (
        HARMONY,
        False,
        "<|channel|>analysis<|message|>7<|end|><|start|>assistant<|channel|>final<|message|>8<|return|>",
        "8",
    ),
    (HARMONY, False, "<|channel|>final<|message|>8", "8"),
    (HARMONY, True, "7<|end|><|start|>assistant<|channel|>final<|message|>8<|return|>", "8"),
    (HARMONY, True, "7", None),
    (
        HARMONY,
        False,
        "<|channel|>final<|message|>8<|return|><|start|>user<|message|>x<|end|>"
        "<|start|>assistant<|channel|>final<|message|>9<|return|>",
        "8",
    ),
    (HARMONY, False, "<|channel|>final<|message|>8<|end|><|start|>user<|message|>9", "8"),
    (HARMONY, False, "<|channel|>commentary to=f<|message|>7<|call|>", None),
]


@pytest.mark.parametrize(("think_end", "opened", "response", "answer"), CASES)
def test_answers_are_cut_from_tokens_and_from_texts(
    tokenizer: Any, think_end: str, opened: bool, response: str, answer: str | None
) -> None:
    ids = tokenizer.encode(response, add_special_tokens=False)
    eos = (tokenizer.eos_token_id,)
    text = response_text(tokenizer, ids, eos_ids=eos, think_end=think_end, opened=opened)
    assert after_thinking(text, think_end, opened=opened) == answer
    # The same from a saved response, whose special tokens are text, and twice over.
    saved = response.replace("<|fim|>", "")
    options: dict[str, Any] = {"think_end": think_end, "think_open": opened}
    for form in (text, saved):
        grade = grade_maths(gold="8", response=form, **options)
        expected = (
            ("incomplete", 0) if answer is None else ("ok", int(answer.strip("\\boxed{}") == "8"))
        )
        assert (grade.status, grade.correct) == expected
    doc = {"prompt": "", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}
    assert grade_ifeval(doc=doc, response=text, **options).correct == int(answer is not None)


def test_special_tokens_that_are_no_tags_are_dropped_as_before(tokenizer: Any) -> None:
    ids = tokenizer.encode("a<|fim|>b[THINK]c</s>", add_special_tokens=False)
    eos = (tokenizer.eos_token_id,)
    assert response_text(tokenizer, ids, eos_ids=eos, think_end="</think>") == "abc"
    assert response_text(tokenizer, ids, eos_ids=eos, think_end="[/THINK]") == "ab[THINK]c"


@pytest.mark.parametrize(
    ("think_end", "opened", "response", "ends"),
    [
        ("</think>", False, "<think>a\n\nb</think>\n\nc\n\nd", "<think>a\n\nb</think>\n\nc\n\n"),
        ("</think>", True, "a\n\nb</think>\n\nc\n\nd", "a\n\nb</think>\n\nc\n\n"),
        ("</think>", True, "a\n\nb", None),
        ("</think>", False, "a\n\nb", "a\n\n"),
        ("[/THINK]", False, "[THINK]a\n\nb[/THINK]c\n\nd", "[THINK]a\n\nb[/THINK]c\n\n"),
        (
            HARMONY,
            False,
            "<|channel|>analysis<|message|>a\n\nb<|end|><|start|>assistant"
            "<|channel|>final<|message|>c\n\nd",
            "<|channel|>analysis<|message|>a\n\nb<|end|><|start|>assistant"
            "<|channel|>final<|message|>c\n\n",
        ),
        ("", False, "<think>a\n\nb", "<think>a\n\n"),
    ],
)
def test_stop_strings_count_after_the_thinking(
    tokenizer: Any, think_end: str, opened: bool, response: str, ends: str | None
) -> None:
    stops = StopStrings(tokenizer, ("\n\n",), think_end)
    ids = tokenizer.encode(response, add_special_tokens=False)
    at = [n for n in range(1, len(ids) + 1) if stops.ends(ids[:n], opened=opened)]
    if ends is None:
        assert at == []
        return
    assert tokenizer.decode(ids[: at[0]]) == ends
    text = response_text(
        tokenizer, ids[: at[0]], stop=("\n\n",), think_end=think_end or None, opened=opened
    )
    if think_end:
        assert after_thinking(text, think_end, opened=opened) == ends.removesuffix("\n\n")[-1]


@pytest.mark.parametrize(
    ("prompt", "think_end", "is_open"),
    [
        ("<|im_start|>assistant\n<think>\n", "</think>", True),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", "</think>", False),
        ("<|im_start|>assistant\n", "</think>", False),
        ("[/INST][THINK]", "[/THINK]", True),
        ("<|start|>assistant<|channel|>analysis<|message|>", HARMONY, True),
        ("<|start|>assistant<|channel|>final<|message|>", HARMONY, False),
        ("<|start|>assistant", HARMONY, False),
        ("", "</think>", False),
    ],
)
def test_prompts_that_open_the_thinking(prompt: str, think_end: str, is_open: bool) -> None:
    assert opened_by(prompt, think_end) is is_open


def test_closing_tags_of_templates() -> None:
    assert known_end("{{ '<think>' }}...{{ '</think>' }}") == "</think>"
    assert known_end("[THINK]…[/THINK]") == "[/THINK]"
    assert known_end("<|start|>assistant<|channel|>analysis<|message|>") == HARMONY
    assert known_end("<|im_start|>{{ role }}") is None


@pytest.mark.parametrize(
    "piece", ["<think>", "</think>", "<|channel|>", "<|im_start|>", " ", "[THINK]"]
)
def test_long_responses_are_cut_in_time(piece: str) -> None:
    import time

    began = time.process_time()
    for think_end, opened in itertools.product(("</think>", "[/THINK]", HARMONY), (False, True)):
        after_thinking(piece * (1_000_000 // len(piece)), think_end, opened=opened)
    assert time.process_time() - began < 3
