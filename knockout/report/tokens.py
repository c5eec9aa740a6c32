"""Texts of token ids, ready to be shown token by token."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

__all__ = ["TokenTexts", "Vocab"]

Vocab = dict[int, list[Any]]
"""Token id to [text, kind]; kind 0 is text, 1 a special token, 2 a piece that is no whole text."""

_TEXT, _SPECIAL, _PIECE = 0, 1, 2
# A character has at most four bytes; some emoji are several characters.
_LONGEST_CHARACTER = 8


class TokenTexts:
    """What each token id stands for.

    A token that is part of a character has no text of its own; it is shown by the vocabulary's
    piece. Without a tokenizer only the texts in the ledger are known; other tokens are shown by id.

    Args:
        tokenizer: A Hugging Face tokenizer, or None.
        special_ids: Ids that are shown as control tokens.
        known: Quoted texts of single ids, used if there is no tokenizer.
    """

    def __init__(
        self,
        tokenizer: Any = None,
        special_ids: Iterable[int] = (),
        known: dict[int, str] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._special = frozenset(special_ids)
        self._known = known or {}
        self._seen: Vocab = {}

    @property
    def has_tokenizer(self) -> bool:
        """Whether the texts come from the model's own tokenizer."""
        return self._tokenizer is not None

    @property
    def size(self) -> int:
        """Number of ids that have a text; 0 without a tokenizer."""
        return 0 if self._tokenizer is None else len(self._tokenizer)

    def entry(self, token: int) -> list[Any]:
        """[text, kind] of a token."""
        if token not in self._seen:
            self._seen[token] = self._look_up(token)
        return self._seen[token]

    def vocab(self, tokens: Iterable[int]) -> Vocab:
        """The entries of all tokens that occur, by rising id."""
        return {token: self.entry(token) for token in sorted({int(t) for t in tokens})}

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without special tokens around it; empty without a tokenizer."""
        if self._tokenizer is None:
            return []
        return [int(i) for i in self._tokenizer.encode(text, add_special_tokens=False)]

    def text(self, tokens: Sequence[int]) -> str:
        """The text of a trajectory, special tokens included; "" without a tokenizer."""
        if self._tokenizer is None:
            return ""
        return _clean(str(self._tokenizer.decode(list(tokens), skip_special_tokens=False)))

    def joined(self, tokens: Sequence[int]) -> list[list[Any]]:
        """Runs of tokens that only together make text, as [place, number of tokens, text].

        A character of another script or an emoji can be several byte tokens; alone each is no text.
        """
        if self._tokenizer is None:
            return []
        found: list[list[Any]] = []
        at = 0
        while at < len(tokens):
            end = at
            while end < len(tokens) and self.entry(tokens[end])[1] == _PIECE:
                end += 1
                text = str(self._tokenizer.decode(list(tokens[at:end]), skip_special_tokens=False))
                if end - at > 1 and "\N{REPLACEMENT CHARACTER}" not in text:
                    found.append([at, end - at, _clean(text)])
                    break
                if end - at >= _LONGEST_CHARACTER:
                    end = at + 1
                    break
            at = max(end, at + 1)
        return found

    def _look_up(self, token: int) -> list[Any]:
        if self._tokenizer is None:
            return [self._known.get(token, f"#{token}"), _PIECE]
        if not 0 <= token < len(self._tokenizer):
            return [f"padding {token}", _SPECIAL]
        piece = str(self._tokenizer.convert_ids_to_tokens(token))
        if token in self._special:
            return [_clean(piece), _SPECIAL]
        text = str(self._tokenizer.decode([token], clean_up_tokenization_spaces=False))
        if not text or "\N{REPLACEMENT CHARACTER}" in text:
            return [_clean(piece), _PIECE]
        # SentencePiece marks a word's start with U+2581 and drops it when one token is decoded.
        if piece.startswith("\u2581") and not text.startswith(" "):
            text = " " + text
        return [_clean(text), _TEXT]


def _clean(text: str) -> str:
    """Lone surrogates cannot be written to a file; they are shown by their escape."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
