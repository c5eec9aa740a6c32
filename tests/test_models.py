from __future__ import annotations

import json
import multiprocessing
import os
from pathlib import Path

import pytest
import torch
from tiny import embedded, tiny_model

from knockout.errors import KnockoutError, UsageError
from knockout.tokens import checkpoint
from knockout.tokens.checkpoint import EMBEDDED, eos_token_ids, load_tokenizer, resolve_model


def test_the_embedded_model_is_a_normal_checkpoint() -> None:
    folder = embedded()
    assert resolve_model(EMBEDDED.upper()) == str(folder)
    tokenizer = load_tokenizer(folder)
    # Ids that others found in the original tokenizer.
    assert tokenizer.encode("The answer is wa") == [504, 2988, 314, 4398]
    assert tokenizer.encode(" exaggerated") == [24098]
    assert eos_token_ids(folder, tokenizer) == (2,)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert str(text).endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_the_embedded_model_knows_a_capital() -> None:
    """The unpacked weights are the right ones: noise or a wrong layout would not know this."""
    from transformers import AutoModelForCausalLM

    tokenizer = load_tokenizer(embedded())
    model = AutoModelForCausalLM.from_pretrained(embedded(), dtype=torch.float32)
    ids = torch.tensor([tokenizer.encode("The capital of France is")])
    with torch.no_grad():
        best = int(model(ids).logits[0, -1].argmax())
    assert tokenizer.decode([best]) == " Paris"


def _resolve(cache: str, barrier: object) -> None:
    """What a process of the race does, with a small stand-in for the 135M weights."""
    checkpoint._unpack = _write_slowly
    barrier.wait()  # type: ignore[attr-defined]
    folder = Path(checkpoint.resolve_model(EMBEDDED, Path(cache)))
    assert json.loads((folder / "config.json").read_text()) == {"whole": True}
    assert (folder / "weights").stat().st_size == 1000


def _write_slowly(source: Path, target: Path) -> None:
    assert source.is_dir()
    with (target / "weights").open("wb") as file:
        for _ in range(10):
            file.write(b"x" * 100)
            file.flush()
            os.sched_yield()
    (target / "config.json").write_text('{"whole": true}')


def test_processes_that_unpack_at_once_do_not_disturb_each_other(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(3)
    processes = [
        context.Process(target=_resolve, args=(str(tmp_path / "new"), barrier)) for _ in range(3)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert len(list((tmp_path / "new").iterdir())) == 1  # no leftovers beside the checkpoint


def test_an_interrupted_unpacking_leaves_nothing_that_looks_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(source: Path, target: Path) -> None:
        (target / "config.json").write_text("{}")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "_unpack", fail)
    with pytest.raises(KnockoutError, match="No space left on device"):
        resolve_model(EMBEDDED, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_cache_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(KnockoutError, match="set XDG_CACHE_HOME"):
        resolve_model(EMBEDDED, tmp_path / "file" / "cache")


def test_the_cache_is_the_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert checkpoint.cache_folder() == tmp_path / "knockout"


def test_a_local_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "model")
    assert resolve_model(str(folder)) == str(folder)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("./no/such/folder", "no such folder; expected 'smollm2-135m'"),
        ("smollm", "no such folder; expected 'smollm2-135m'"),
        ("too/many/parts", "no such folder"),
    ],
)
def test_a_missing_model_is_misuse(name: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        resolve_model(name)


def test_a_folder_without_a_config_and_a_file_are_misuse(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"without a config\.json"):
        resolve_model(str(tmp_path))
    (tmp_path / "weights.gguf").write_text("")
    with pytest.raises(UsageError, match="a file; expected"):
        resolve_model(str(tmp_path / "weights.gguf"))


def test_an_unreachable_hub_is_told_within_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    # A port that refuses connections stands for a machine without a network.
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(KnockoutError, match="'someone/some-model' is not a folder here") as caught:
        resolve_model("someone/some-model")
    assert not isinstance(caught.value, UsageError)
    assert "check the network" in str(caught.value)


def test_a_folder_without_a_tokenizer_is_told(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(KnockoutError, match="no tokenizer can be loaded from"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": [5, 4]}, {"eos_token_id": 9}, (2, 4, 5)),
        ({}, {"eos_token_id": 9}, (2, 9)),
        (None, {"eos_token_id": [9, 8]}, (2, 8, 9)),
        (None, {"text_config": {"eos_token_id": 7}}, (2, 7)),
        (None, {}, (2,)),
    ],
)
def test_every_declared_end_token_counts(
    tmp_path: Path,
    generation: dict[str, object] | None,
    config: dict[str, object],
    expected: tuple[int, ...],
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert eos_token_ids(tmp_path, load_tokenizer(embedded())) == expected
