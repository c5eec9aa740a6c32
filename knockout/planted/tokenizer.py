"""The planted model's tokenizer: one token a word, words apart by single spaces."""

from __future__ import annotations

from typing import Any

from knockout.planted.language import Language

__all__ = ["EOS", "PAD", "UNKNOWN", "make_tokenizer", "padded_width"]

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"


def make_tokenizer(language: Language) -> Any:
    """A fast tokenizer of transformers; ids 0 to 2 are padding, end and unknown, then the words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    ids = {word: i for i, word in enumerate((PAD, EOS, UNKNOWN, *language.words))}
    backend = Tokenizer(models.WordLevel(ids, unk_token=UNKNOWN))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    make: Any = PreTrainedTokenizerFast  # transformers' own carry no types
    return make(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        clean_up_tokenization_spaces=False,
        model_max_length=128,
    )


def padded_width(n_words: int) -> int:
    """Width of the logits: a multiple of 16 with room for ids that no text contains."""
    return (n_words // 16 + 1) * 16
