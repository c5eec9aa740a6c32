"""The planted model's tokenizer: one token a word, words apart by single spaces."""

from __future__ import annotations

from transformers import PreTrainedTokenizerFast

from knockout.planted.language import Language

__all__ = ["EOS", "PAD", "UNKNOWN", "make_tokenizer", "padded_width"]

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"


def make_tokenizer(language: Language) -> PreTrainedTokenizerFast:
    """Ids 0 to 2 are padding, end of text and unknown; then the language's words."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    ids = {word: i for i, word in enumerate((PAD, EOS, UNKNOWN, *language.words))}
    backend = Tokenizer(models.WordLevel(ids, unk_token=UNKNOWN))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        clean_up_tokenization_spaces=False,
        model_max_length=128,
    )


def padded_width(n_words: int) -> int:
    """Width of the logits: a multiple of 16 with room for ids that no text holds."""
    return (n_words // 16 + 1) * 16
