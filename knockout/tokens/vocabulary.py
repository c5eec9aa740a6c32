"""A model's vocabulary, found without loading its weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from knockout.tokens.candidates import Vocabulary
from knockout.tokens.checkpoint import load_tokenizer, resolve_model
from knockout.tokens.eos import stop_ids

__all__ = ["open_vocabulary"]


def open_vocabulary(
    model: str, *, revision: str | None = None, trust_remote_code: bool = False
) -> tuple[Path, Any, Vocabulary]:
    """Finds a model's folder, its tokenizer, and what its token ids are.

    Raises:
        UsageError, KnockoutError: There is no such model, or it has no tokenizer.
    """
    from transformers import AutoConfig

    folder = Path(resolve_model(model, revision=revision))
    tokenizer = load_tokenizer(folder, trust_remote_code=trust_remote_code)
    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    width = int(config.get_text_config().vocab_size)
    return folder, tokenizer, Vocabulary(tokenizer, width, stop_ids(tokenizer, folder))
