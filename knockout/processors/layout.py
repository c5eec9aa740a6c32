"""Interventions as tensors: what a batch adds to logits, replaces, and watches.

Everything that depends on one request alone is made once and kept with its rule; a batch only
joins the parts of its rules.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from knockout.method.interventions import Intervention
from knockout.processors.rules import Rule

__all__ = ["Owned", "Seen", "owned", "seen"]

_KINDS = {"ban": 0, "penalty": 1, "replace": 2}
_PARTS = {"everywhere": 0, "thinking": 1, "answer": 2}
_NEVER_ENDS = 2**62
_AT_ONCE = 2**15

# What one watch list means on top of one own intervention; see `_seen_of`.
_seen_cache: dict[tuple[object, ...], _OneSeen] = {}
_MOST_SEEN = 1024


@dataclass(frozen=True, slots=True)
class Scope:
    """When each of k interventions acts.

    Attributes:
        first, end: (k,) int64 steps.
        part: (k,) int64: 0 everywhere, 1 in the thinking alone, 2 in the answer alone.
    """

    first: Tensor
    end: Tensor
    part: Tensor

    def active(self, step: Tensor, closed: Tensor | None) -> Tensor:
        """Which act.

        Args:
            step: (k,) int64.
            closed: (k,) bool, whether the thinking has ended before it; None if no part counts.

        Returns:
            (k,) bool.
        """
        now = (step >= self.first) & (step < self.end)
        if closed is None:
            return now
        return now & ((self.part == 0) | ((self.part == 2) == closed))

    def take(self, index: Tensor) -> Scope:
        """Of those at index (n,)."""
        return Scope(self.first[index], self.end[index], self.part[index])


def _is_scoped(one: Intervention) -> bool:
    return one.first_step > 0 or one.end_step is not None or one.where != "everywhere"


def _scope(some: Sequence[Intervention], device: torch.device | str) -> Scope:
    ends = [_NEVER_ENDS if one.end_step is None else one.end_step for one in some]
    return Scope(
        torch.tensor([one.first_step for one in some], dtype=torch.int64, device=device),
        torch.tensor(ends, dtype=torch.int64, device=device),
        torch.tensor([_PARTS[one.where] for one in some], dtype=torch.int64, device=device),
    )


@dataclass(frozen=True, slots=True)
class Owned:
    """The own interventions of some members.

    Attributes:
        member, token: (N,) int64 entries that are shifted.
        shift: (N,) float32 what is added to their logits; None if all of it is −∞.
        scope: Of each entry; None if all act always.
        replaced_member, replaced_token, replacement: (R,) int64 entries that are replaced after
            the pick; None if there are none.
        replaced_scope: Of those.
    """

    member: Tensor
    token: Tensor
    shift: Tensor | None
    scope: Scope | None
    replaced_member: Tensor | None
    replaced_token: Tensor | None
    replacement: Tensor | None
    replaced_scope: Scope | None

    def rearrange_(self, to: Tensor) -> None:
        """Makes member m the member to[m], in place."""
        for members in (self.member, self.replaced_member):
            # Some at a time: fresh memory for all of them costs more than the look-up.
            for some in () if members is None else torch.split(members, _AT_ONCE):
                some.copy_(to.index_select(0, some))


def owned(rules: Sequence[Rule], device: torch.device | str) -> Owned | None:
    """Lays out the own interventions of members; None if there are none."""
    have = [(m, rule) for m, rule in enumerate(rules) if rule.intervention is not None]
    if not have:
        return None

    def spread(values: Sequence[float], sizes: Sequence[int], dtype: torch.dtype) -> Tensor:
        column = torch.tensor(values, dtype=dtype, device=device)
        times = torch.tensor(sizes, dtype=torch.int64, device=device)
        return column.repeat_interleave(times, output_size=sum(sizes))

    def join(some: Sequence[tuple[int, Rule]]) -> tuple[Tensor, Tensor, list[int]]:
        ids = [rule.ids(device) for _, rule in some]
        sizes = [one.shape[0] for one in ids]
        token = torch.cat(ids) if ids else torch.empty(0, dtype=torch.int64, device=device)
        return spread([m for m, _ in some], sizes, torch.int64), token, sizes

    def scope_of(some: Sequence[tuple[int, Rule]], sizes: Sequence[int]) -> Scope | None:
        interventions = [rule.intervention for _, rule in some if rule.intervention is not None]
        if not any(map(_is_scoped, interventions)):
            return None
        return _scope(interventions, device).take(spread(range(len(some)), sizes, torch.int64))

    shifts = [(m, r) for m, r in have if r.intervention and r.intervention.kind != "replace"]
    member, token, sizes = join(shifts)
    shift = None
    if any(rule.intervention and rule.intervention.kind == "penalty" for _, rule in shifts):
        amounts = [
            -rule.intervention.strength
            if rule.intervention and rule.intervention.strength is not None
            else -math.inf
            for _, rule in shifts
        ]
        shift = spread(amounts, sizes, torch.float32)
    out = Owned(member, token, shift, scope_of(shifts, sizes), None, None, None, None)
    replacing = [(m, r) for m, r in have if r.intervention and r.intervention.kind == "replace"]
    if not replacing:
        return out
    member, token, sizes = join(replacing)
    to = [(r.intervention and r.intervention.replacement) or 0 for _, r in replacing]
    return replace(
        out,
        replaced_member=member,
        replaced_token=token,
        replacement=spread(to, sizes, torch.int64),
        replaced_scope=scope_of(replacing, sizes),
    )


@dataclass(frozen=True, slots=True)
class _OneSeen:
    """One watch list on top of one own intervention, as tensors."""

    kind: Tensor
    strength: Tensor
    replacement: Tensor
    scope: Scope
    apart: Tensor
    entry: Tensor
    token: Tensor
    any_apart: bool
    scoped: bool
    penalties: bool


def _on_top(own: Intervention | None, other: Intervention) -> tuple[int, ...] | None:
    """The ids that `other` changes beyond `own`; None if it is no extension of it."""
    if own is None:
        return other.token_ids
    if (
        own.kind, own.strength, own.replacement, own.where, own.first_step, own.end_step
    ) != (
        other.kind, other.strength, other.replacement, other.where, other.first_step,
        other.end_step,
    ):  # fmt: skip
        return None
    mine, more = set(own.token_ids), set(other.token_ids)
    return tuple(sorted(more - mine)) if mine <= more else None


def _seen_of(rule: Rule, device: torch.device | str) -> _OneSeen:
    assert rule.watch is not None
    key = (rule.intervention, rule.watch.text, str(device))
    found = _seen_cache.get(key)
    if found is not None:
        return found
    if len(_seen_cache) >= _MOST_SEEN:
        _seen_cache.clear()
    some = rule.watch.interventions
    ids = [_on_top(rule.intervention, one) for one in some]
    flat = [one.token_ids if more is None else more for one, more in zip(some, ids, strict=True)]

    def whole(values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    found = _OneSeen(
        kind=whole([_KINDS[one.kind] for one in some]),
        strength=torch.tensor(
            [one.strength or 0.0 for one in some], dtype=torch.float64, device=device
        ),
        replacement=whole([-1 if one.replacement is None else one.replacement for one in some]),
        scope=_scope(some, device),
        apart=torch.tensor([more is None for more in ids], device=device),
        entry=whole([w for w, tokens in enumerate(flat) for _ in tokens]),
        token=whole([t for tokens in flat for t in tokens]),
        any_apart=any(more is None for more in ids),
        scoped=any(map(_is_scoped, some)),
        penalties=any(one.kind == "penalty" for one in some),
    )
    _seen_cache[key] = found
    return found


@dataclass(frozen=True, slots=True)
class Seen:
    """The watched interventions of some members, one after the other: P in all.

    Attributes:
        member: (P,) int64.
        index: (P,) int64 place in the member's own watch list.
        kind, strength, replacement: (P,) what each does.
        scope: Of each; `scoped` says whether any does not act always.
        apart: (P,) bool, those that are no extension of the member's own intervention.
        entry, token: (N,) int64.
        start: (P,) int64, the first of the same member's.
        report: (P,) int64, how many the member can name.
        any_apart: Whether any is apart.
        most: Interventions of the longest list.
        penalties: Whether any is a penalty.
    """

    member: Tensor
    index: Tensor
    kind: Tensor
    strength: Tensor
    replacement: Tensor
    scope: Scope
    apart: Tensor
    entry: Tensor
    token: Tensor
    start: Tensor
    report: Tensor
    any_apart: bool
    scoped: bool
    most: int
    penalties: bool

    def rearranged(self, to: Tensor) -> Seen:
        """The same where member m has become to[m]."""
        return replace(self, member=to.index_select(0, self.member))


def seen(rules: Sequence[Rule], device: torch.device | str) -> Seen | None:
    """Lays out what members watch; None if nothing is watched."""
    have = [(m, rule) for m, rule in enumerate(rules) if rule.watch is not None]
    if not have:
        return None
    ones = [_seen_of(rule, device) for _, rule in have]
    sizes, starts, at = [len(one.kind) for one in ones], [], 0
    for size in sizes:
        starts.append(at)
        at += size

    def spread(values: Sequence[int]) -> Tensor:
        column = torch.tensor(values, dtype=torch.int64, device=device)
        return column.repeat_interleave(torch.tensor(sizes, device=device), output_size=at)

    start = spread(starts)
    return Seen(
        member=spread([m for m, _ in have]),
        index=torch.arange(at, device=device) - start,
        kind=torch.cat([one.kind for one in ones]),
        strength=torch.cat([one.strength for one in ones]),
        replacement=torch.cat([one.replacement for one in ones]),
        scope=Scope(
            torch.cat([one.scope.first for one in ones]),
            torch.cat([one.scope.end for one in ones]),
            torch.cat([one.scope.part for one in ones]),
        ),
        apart=torch.cat([one.apart for one in ones]),
        entry=torch.cat([one.entry + n for one, n in zip(ones, starts, strict=True)]),
        token=torch.cat([one.token for one in ones]),
        start=start,
        report=spread([rule.report for _, rule in have]),
        any_apart=any(one.any_apart for one in ones),
        scoped=any(one.scoped for one in ones),
        most=max(sizes),
        penalties=any(one.penalties for one in ones),
    )
