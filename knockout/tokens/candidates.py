"""Candidates: from files, ids, strings and sets to checked groups of token ids."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from knockout.config.sweep import CandidateSource
from knockout.errors import UsageError, shortened
from knockout.method.interventions import Intervention, ban
from knockout.tokens.eos import widen_stop_ban
from knockout.tokens.lists import Item, open_list
from knockout.tokens.special import special_ids
from knockout.tokens.variants import dosed, pairs_of, replacement_token, scoped

__all__ = [
    "Candidate",
    "Resolved",
    "Vocabulary",
    "canary",
    "display",
    "family",
    "resolve",
]

Group = Literal["candidate", "control", "canary"]
Family = Literal["singles", "dose", "pairs"]

# Names that vocabularies give to entries that no text uses.
_UNUSED = re.compile(r"reserved|unused|extra_id|placeholder", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A named intervention; most are plain bans of one token.

    Attributes:
        name: Unique in the run; for a single token its quoted text.
        intervention: What is changed.
        tokens: The text of each of its ids, quoted and unambiguous.
        group: What it is for. A canary bans an id that cannot occur, so that its row shows what
            a knockout without any effect looks like.
        members: The names of the two candidates that a pair joins; () for others.
    """

    name: str
    intervention: Intervention
    tokens: tuple[str, ...] = ()
    group: Group = "candidate"
    members: tuple[str, ...] = ()

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The ids that it changes, rising, without repeats."""
        return self.intervention.token_ids

    @property
    def family(self) -> Family:
        """The hypotheses that it is judged with; each family is corrected separately.

        Otherwise ten points of a dose-response curve, or all pairs, would make the single
        knockouts harder to see.
        """
        if self.members:
            return "pairs"
        return "dose" if self.intervention.kind == "penalty" else "singles"


@dataclass(frozen=True, slots=True)
class Resolved:
    """The candidates of a source, with what the user should know.

    Attributes:
        candidates: In the source's order: candidates (penalties before their ban), replacements,
            controls, pairs, the canary.
        warnings: One line each.
        notes: How each file was read, such as "100 token ids from rocks.csv, column rock_id".
    """

    candidates: tuple[Candidate, ...]
    warnings: tuple[str, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What is asked of a tokenizer and its model.

    Attributes:
        tokenizer: A Hugging Face tokenizer.
        width: Width of the logits, padding included.
        eos_ids: Ids that end a trajectory.
    """

    tokenizer: Any
    width: int
    eos_ids: tuple[int, ...]

    @property
    def n_named(self) -> int:
        """Ids from this one to the width are padding: the tokenizer has no text for them."""
        return min(len(self.tokenizer), self.width)

    def show(self, token: int) -> str:
        """The token's text, quoted; the vocabulary's own piece if it is no whole text."""
        if token >= self.n_named:
            return f"<padding {token}>"
        text = str(self.tokenizer.decode([token]))
        if not text or "\ufffd" in text:
            return f"<{self.tokenizer.convert_ids_to_tokens(token)}>"
        return display(text)

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without special tokens around it."""
        return [int(i) for i in self.tokenizer.encode(text, add_special_tokens=False)]

    def single(self, text: str) -> int | None:
        """The id of the one token that is exactly this text, or None."""
        ids = self.encode(text)
        return ids[0] if len(ids) == 1 and self.tokenizer.decode(ids) == text else None

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of special tokens, those that end the text included."""
        return special_ids(self.tokenizer) | frozenset(self.eos_ids)


def display(text: str) -> str:
    """Quotes a text so that every character is visible: spaces kept, the rest escaped.

    Example:
        >>> display(" the"), display("\\n"), display("a\\u00a0b")
        ('" the"', '"\\\\n"', '"a\\\\u00a0b"')
    """
    named = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t"}
    shown = [named[c] if c in named else c if c.isprintable() else _escaped(ord(c)) for c in text]
    return '"' + "".join(shown) + '"'


def _escaped(code: int) -> str:
    if code <= 0xFFFF:
        return f"\\u{code:04x}"
    code -= 0x10000
    return f"\\u{0xD800 + (code >> 10):04x}\\u{0xDC00 + (code & 0x3FF):04x}"


def family(text: str, vocabulary: Vocabulary) -> tuple[int, ...]:
    """The single-token variants of a text: with and without leading space, four cases."""
    stem = text.strip()
    cases = dict.fromkeys([stem, stem.lower(), stem.capitalize(), stem.upper()])
    found = {vocabulary.single(space + case) for case in cases for space in ("", " ")}
    return tuple(sorted(token for token in found if token is not None))


def resolve(source: CandidateSource, vocabulary: Vocabulary) -> Resolved:
    """Turns a source into candidates.

    Raises:
        UsageError: An id outside the vocabulary, an empty list, a set twice, a string of several
            tokens, a token that ends the text without `allow_eos`; the message names the place.
            A token that is listed twice is one candidate, with a warning.
    """
    builder = _Builder(vocabulary, source.family, source.allow_eos)
    if source.file is not None:
        builder.add_file(source.file, source.column, "candidate")
    builder.add_all(_inline("candidates.ids", source.ids or ()), "candidate")
    builder.add_all(_inline("candidates.strings", source.strings or ()), "candidate")
    for name, members in (source.sets or {}).items():
        builder.add_set(name, members)
    for replaced, replacement in (source.replace or {}).items():
        builder.add_replacement(replaced, replacement)
    if source.controls is not None:
        builder.add_file(source.controls.file, source.controls.column, "control")
    found = scoped(_with_unique_names(builder.found), source.where, source.steps)
    pairs = [] if source.pairs is None else pairs_of(found, source.pairs, vocabulary)
    found = [*dosed(found, source.dose or ()), *pairs]
    if source.canary and (extra := canary(vocabulary, builder.seen_ids)) is not None:
        found.append(extra)
    return Resolved(tuple(found), tuple(builder.warnings), tuple(builder.notes))


def canary(vocabulary: Vocabulary, taken: Iterable[int] = ()) -> Candidate | None:
    """The A/A candidate: the last id that no text can contain, or None."""
    taken = set(taken) | set(vocabulary.eos_ids)
    for token in range(vocabulary.width - 1, vocabulary.n_named - 1, -1):
        if token not in taken:
            return Candidate("A/A", ban((token,)), (vocabulary.show(token),), "canary")
    added = getattr(vocabulary.tokenizer, "added_tokens_decoder", {})
    for token, entry in sorted(added.items(), reverse=True):
        if token not in taken and token < vocabulary.width and _UNUSED.search(str(entry)):
            return Candidate("A/A", ban((token,)), (vocabulary.show(token),), "canary")
    return None


def _inline(key: str, values: Sequence[int | str]) -> list[Item]:
    return [Item(value, f"{key}[{index}]") for index, value in enumerate(values)]


class _Builder:
    """Collects candidates, and says where each was first found."""

    def __init__(self, vocabulary: Vocabulary, whole_family: bool, allow_eos: bool) -> None:
        self.vocabulary = vocabulary
        self.whole_family = whole_family
        self.allow_eos = allow_eos
        self.found: list[Candidate] = []
        self.warnings: list[str] = []
        self.notes: list[str] = []
        self.first: dict[tuple[int, ...], str] = {}
        self.special = vocabulary.special_ids

    @property
    def seen_ids(self) -> set[int]:
        return {token for candidate in self.found for token in candidate.token_ids}

    def add_file(self, path: Path, column: str | None, group: Group) -> None:
        found = open_list(path, column)
        self.notes.append(f"{group}s: {found.how}")
        self.add_all(found.items, group)

    def add_all(self, items: Iterable[Item], group: Group) -> None:
        """Adds entries; leaves out repeated ones, with one warning for all of them."""
        again = []
        for item in items:
            name, ids = self._entry(item)
            first = self.first.get(widen_stop_ban(ids, self.vocabulary.eos_ids)[0])
            if first is None:
                self._add(name, ids, item.where, group)
            else:
                again.append(f"{item.where}: {_ids(ids)} found twice, first at {first}")
        if again:
            more = f" (and {len(again) - 1} more)" if len(again) > 1 else ""
            self.warnings.append(f"{again[0]}; it counts once{more}")

    def _entry(self, item: Item) -> tuple[str, tuple[int, ...]]:
        """Name and ids of an entry."""
        if isinstance(item.value, tuple):
            ids = {self._token(Item(token, item.where)) for token in item.value}
            name = item.name or " + ".join(map(self.vocabulary.show, sorted(ids)))
            return name, tuple(sorted(ids))
        if isinstance(item.value, str) and self.whole_family:
            return f"family {display(item.value.strip())}", self._family(item)
        token = self._token(item)
        return self.vocabulary.show(token), (token,)

    def add_set(self, name: str, members: Sequence[int | str]) -> None:
        where = f"candidates.sets.{name}"
        if not members:
            raise UsageError(f"{where}: found an empty set; expected token ids or strings")
        ids: list[int] = []
        for item in _inline(where, members):
            if isinstance(item.value, str) and self.whole_family:
                ids += [token for token in self._family(item) if token not in ids]
                continue
            token = self._token(item)
            if token in ids:
                raise UsageError(f"{item.where}: token id {token} is in the set already")
            ids.append(token)
        self._add(name, tuple(sorted(ids)), where, "candidate")

    def add_replacement(self, replaced: int | str, replacement: int | str) -> None:
        where = f"candidates.replace.{replaced}"
        item = Item(replaced, where)
        if isinstance(replaced, str) and self.whole_family:
            ids, name = self._family(item), f"family {display(replaced.strip())}"
        else:
            ids = (self._token(item),)
            name = self.vocabulary.show(ids[0])
        into = replacement_token(self.vocabulary, replacement, where)
        if into in ids:
            raise UsageError(f"{where}: {name} is replaced by itself")
        for token in ids:
            self._judge(token, self.vocabulary.show(token), where)
        shown = tuple(self.vocabulary.show(token) for token in ids)
        change = Intervention("replace", ids, replacement=into)
        self.found.append(Candidate(f"{name} → {self.vocabulary.show(into)}", change, shown))

    def _token(self, item: Item) -> int:
        value = item.value
        if isinstance(value, str):
            return self._single(value, item.where)
        assert isinstance(value, int)
        if not 0 <= value < self.vocabulary.width:
            last = self.vocabulary.width - 1
            raise UsageError(
                f"{item.where}: token id {value} is outside the vocabulary; expected 0 to {last}"
            )
        return value

    def _single(self, text: str, where: str) -> int:
        token = self.vocabulary.single(text)
        if token is not None:
            return token
        pieces = self.vocabulary.encode(text)
        shown = " + ".join(f"{self.vocabulary.show(p)} ({p})" for p in pieces) or "nothing"
        raise UsageError(
            f"{where}: {shortened(display(text))} is not one token but {shortened(shown)}; give a string that is one "
            "token (a leading space matters), its id, a named set, or `family: true`"
        )

    def _family(self, item: Item) -> tuple[int, ...]:
        text = str(item.value)
        ids = family(text, self.vocabulary)
        if not ids:
            self._single(text.strip(), f"{item.where}: no variant of it is one token")
        return ids

    def _add(self, name: str, given: tuple[int, ...], where: str, group: Group) -> None:
        ids, note = widen_stop_ban(given, self.vocabulary.eos_ids)
        if ids in self.first:
            raise UsageError(f"{where}: {_ids(given)} found twice, first at {self.first[ids]}")
        self.first[ids] = where
        for token in given:
            self._judge(token, self.vocabulary.show(token), where)
        if note is not None:
            self.warnings.append(f"{where}: {note}")
        shown = tuple(self.vocabulary.show(token) for token in ids)
        self.found.append(Candidate(name, ban(ids), shown, group))

    def _judge(self, token: int, text: str, where: str) -> None:
        if token in self.vocabulary.eos_ids:
            if not self.allow_eos:
                raise UsageError(
                    f"{where}: token id {token}, {text}, ends the text; without it a trajectory "
                    "cannot end by itself. Set `candidates.allow_eos: true` to ban it anyway"
                )
            self.warnings.append(
                f"{where}: token id {token}, {text}, ends the text: this knockout mostly runs "
                "into max_tokens"
            )
        elif token >= self.vocabulary.n_named:
            self.warnings.append(
                f"{where}: token id {token} is padding of the vocabulary; no text contains it"
            )
        elif token in self.special:
            self.warnings.append(f"{where}: token id {token}, {text}, is a special token")


def _ids(ids: Sequence[int]) -> str:
    return f"token id {ids[0]}" if len(ids) == 1 else f"the token ids {list(ids)}"


def _with_unique_names(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Adds the id to names that would occur twice (two ids can have the same text)."""
    names = [candidate.name for candidate in candidates]
    unique = []
    for candidate in candidates:
        name = candidate.name
        if names.count(name) > 1:
            name = f"{name} #{'+'.join(map(str, candidate.token_ids))}"
        unique.append(replace(candidate, name=name))
    return unique
