"""What a sweep makes of its list besides plain bans: scopes, replacements, dose-response, pairs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from typing import TYPE_CHECKING

from knockout.errors import UsageError, counted
from knockout.method.interventions import Intervention, Where, ban

if TYPE_CHECKING:
    from knockout.tokens.candidates import Candidate, Vocabulary

__all__ = ["dosed", "pairs_of", "replacement_token", "scoped"]


def scoped(
    candidates: Iterable[Candidate], where: Where, steps: tuple[int, int | None] | None
) -> list[Candidate]:
    """Lets candidates act only in a part of the trajectory; a canary stays as it is."""
    first, end = steps or (0, None)
    return [
        c
        if c.group == "canary"
        else replace(
            c, intervention=replace(c.intervention, where=where, first_step=first, end_step=end)
        )
        for c in candidates
    ]


def dosed(candidates: Iterable[Candidate], strengths: Sequence[float]) -> list[Candidate]:
    """Puts before each banned candidate its penalties: the points of a curve that the ban ends.

    Controls, canaries and replacements have none.
    """
    found = []
    for c in candidates:
        if c.group == "candidate" and c.intervention.kind == "ban":
            found += [
                replace(
                    c,
                    name=f"{c.name} λ={strength:g}",
                    intervention=replace(c.intervention, kind="penalty", strength=strength),
                )
                for strength in strengths
            ]
        found.append(c)
    return found


def replacement_token(vocabulary: Vocabulary, value: int | str, where: str) -> int:
    """The id that a replacement emits.

    Raises:
        UsageError: It is no single token, outside the vocabulary, or ends the text.
    """
    if isinstance(value, str):
        token = vocabulary.single(value)
        if token is None:
            pieces = " + ".join(vocabulary.show(p) for p in vocabulary.encode(value)) or "nothing"
            raise UsageError(f"{where}: the replacement {value!r} is not one token but {pieces}")
    else:
        token = value
    if not 0 <= token < vocabulary.n_named:
        raise UsageError(
            f"{where}: the replacement {token} is outside the vocabulary; expected 0 to "
            f"{vocabulary.n_named - 1}"
        )
    if token in vocabulary.eos_ids:
        raise UsageError(
            f"{where}: the replacement {token}, {vocabulary.show(token)}, ends the text, so every "
            "answer would end at the first hit; give a token that goes on"
        )
    return token


def pairs_of(
    candidates: Sequence[Candidate], wanted: str | Sequence[int | str], vocabulary: Vocabulary
) -> list[Candidate]:
    """All pairs of the banned candidates, or of those that are named.

    A pair whose ids are those of a candidate of the list (a set that contains the other member, or a
    set of just these two) is that candidate, and is left out.

    Args:
        candidates: The list with its scopes, without dose-response.
        wanted: "all", or candidates by name, text or token id.
        vocabulary: For names.

    Raises:
        UsageError: A name is no candidate, only one is named, or one bans all that another bans.
    """
    able = [c for c in candidates if c.group == "candidate" and c.intervention.kind == "ban"]
    chosen = able if isinstance(wanted, str) else _named(able, wanted, vocabulary)
    if len(chosen) < 2:
        raise UsageError(
            f"candidates.pairs: found {counted(len(chosen), 'banned candidate')}; a pair takes two"
        )
    pairs = [_pair(one, other) for one, other in combinations(chosen, 2)]
    for pair in pairs:
        if not isinstance(wanted, str) and pair.token_ids in {c.token_ids for c in chosen}:
            raise UsageError(
                f"candidates.pairs: one of {' and '.join(pair.members)} bans all that the other "
                "bans; they make no pair"
            )
    return [pair for pair in pairs if pair.token_ids not in {c.token_ids for c in able}]


def _named(
    able: Sequence[Candidate], wanted: Sequence[int | str], vocabulary: Vocabulary
) -> list[Candidate]:
    by_name: Mapping[str, Candidate] = {c.name: c for c in able}
    by_ids = {c.token_ids: c for c in able}
    found: list[Candidate] = []
    for n, value in enumerate(wanted):
        token = vocabulary.single(value) if isinstance(value, str) else value
        named = by_name.get(value) if isinstance(value, str) else None
        one = named or (None if token is None else by_ids.get((token,)))
        if one is None:
            raise UsageError(
                f"candidates.pairs[{n}]: {value!r} is no banned candidate of this sweep; it has "
                f"{', '.join(list(by_name)[:10])}"
            )
        if one in found:
            raise UsageError(f"candidates.pairs[{n}]: {value!r} is named twice")
        found.append(one)
    order = {c.name: i for i, c in enumerate(able)}
    return sorted(found, key=lambda c: order[c.name])


def _pair(one: Candidate, other: Candidate) -> Candidate:
    texts = dict(
        [
            *zip(one.token_ids, one.tokens, strict=True),
            *zip(other.token_ids, other.tokens, strict=True),
        ]
    )
    ids = tuple(sorted(texts))
    scope = one.intervention
    return replace(
        one,
        name=f"{one.name} + {other.name}",
        intervention=replace(
            ban(ids), where=scope.where, first_step=scope.first_step, end_step=scope.end_step
        ),
        tokens=tuple(texts[i] for i in ids),
        members=(one.name, other.name),
    )


def shown(intervention: Intervention, vocabulary: Vocabulary | None = None) -> str:
    """An intervention in words, without its ids: "ban", "penalty of 2 in the thinking"."""
    words: str = intervention.kind
    if intervention.strength is not None:
        words += f" of {intervention.strength:g}"
    if intervention.replacement is not None:
        into = intervention.replacement
        words += f" by {into if vocabulary is None else vocabulary.show(into)}"
    if intervention.where != "everywhere":
        words += f" in the {intervention.where}"
    first, end = intervention.first_step, intervention.end_step
    if end is not None:
        words += f" from step {first} to {end}"
    elif first:
        words += f" from step {first}"
    return words
