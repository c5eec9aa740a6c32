"""A small model whose tokens have known roles, so that a verdict can be checked.

`language` says what the tokens do, `tokenizer` makes the vocabulary, `train` makes the checkpoint
in `model/`. `python -m knockout.planted --help` trains another one.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["MODEL_FOLDER", "PLANTED"]

PLANTED = "planted"
"""Name of the model that comes with the package."""

MODEL_FOLDER = Path(__file__).parent / "model"
"""Its checkpoint: weights, tokenizer, and the language it was trained on."""
