"""The rules of a batch's rows, applied to its logits: what every engine's adapter calls."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from knockout.errors import KnockoutError
from knockout.method.changes import Watched, pick_watched, shift_
from knockout.method.sampling import BadLogits, Rows, Sampling, ban_, in_parts, one_hot_, pick
from knockout.processors.layout import Scope, Seen, owned, seen
from knockout.processors.names import FAILED, Differing
from knockout.processors.rules import Rule

__all__ = ["Answer", "Batch", "mark_", "mark_failure_"]

_GREEDY = Sampling(temperature=0)
_T = TypeVar("_T")


class Batch:
    """The rules of a batch's rows as tensors: built when the batch changes, used for many steps.

    Attributes:
        coupled: Indices of the rows whose token we pick, ascending.
        coupled_rows: The same as a tensor.
        rules: Of those rows.
        by_part: Whether any of them acts, or watches, in the thinking or the answer alone.
    """

    def __init__(
        self, rules: Sequence[Rule | None], width: int, device: torch.device | str = "cpu"
    ) -> None:
        """Lays out the rules.

        Args:
            rules: One for each row of the logits; None leaves a row untouched.
            width: Width of the logits.
            device: The logits' device.

        Raises:
            ValueError: A rule has an id that the logits do not have.
        """
        for rule in rules:
            if rule is not None:
                rule.check_width(width)
        self._device, self._width = torch.device(device), width
        self._place(rules)
        self._plain = owned(self._plain_rules, device)
        if self._plain is not None:
            self._banned_rows = self._plain_rows.index_select(0, self._plain.member)
        self.by_part = any(rule.by_part for rule in self.rules)
        self._settings = Rows(
            [rule.sampling or _GREEDY for rule in self.rules],
            [rule.seed for rule in self.rules],
            device,
        )
        self._owned = owned(self.rules, device)
        self._seen = seen(self.rules, device)
        self._start = torch.tensor(
            [rule.start or 0 for rule in self.rules], dtype=torch.int64, device=device
        )

    def _place(self, rules: Sequence[Rule | None]) -> None:
        """Says which rows are whose."""
        plain = [(n, r) for n, r in enumerate(rules) if r is not None and not r.coupled]
        self._plain_rules = [rule for _, rule in plain]
        self._plain_rows = self._column([n for n, _ in plain])
        self.coupled = [n for n, rule in enumerate(rules) if rule is not None and rule.coupled]
        self.coupled_rows = self._column(self.coupled)
        self.rules = [rule for rule in rules if rule is not None and rule.coupled]

    def _column(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)

    def rearranged(
        self, rules: Sequence[Rule | None], width: int, device: torch.device | str = "cpu"
    ) -> Batch:
        """The batch of other rows: re-indexed if the same rules are in another order.

        This batch is used up: the new one takes its tensors over.

        Args:
            rules: As for a new batch.
            width: As for a new batch.
            device: As for a new batch.
        """
        out = copy(self)
        out._place(rules)
        coupled = _order(self.rules, out.rules)
        plain = _order(self._plain_rules, out._plain_rules)
        same = (width, torch.device(device)) == (self._width, self._device)
        if not same or coupled is None or plain is None:
            return Batch(rules, width, device)
        if self._plain is not None:
            # Its members stay as they were laid out; only their rows are others.
            out._plain_rules = self._plain_rules
            out._plain_rows = out._plain_rows[self._column(plain)]
            torch.index_select(out._plain_rows, 0, self._plain.member, out=self._banned_rows)
        to = self._column(coupled)
        source = to.argsort()
        out._settings, out._start = self._settings.take(source), self._start[source]
        if self._owned is not None:
            self._owned.rearrange_(to)
        out._seen = self._seen and self._seen.rearranged(to)
        return out

    def apply_(self, logits: Tensor, positions: Tensor, closed: Tensor | None = None) -> Tensor:
        """Intervenes and picks, in place: a coupled row becomes 0 at its token and −∞ elsewhere.

        A row that watches also has −1 in the columns that name the interventions that would have
        picked another token; see `mark_`. A row that cannot be sampled from becomes 0 at its rule's
        `fail_token`, with the reason beside it; see `mark_failure_`.

        Args:
            logits: (B, V), any float dtype.
            positions: (len(coupled),) int64 on the logits' device; tokens that stand before the
                one to be picked.
            closed: (len(coupled),) bool, whether each one's thinking has ended before this token;
                needed where `by_part`.

        Returns:
            (len(coupled),) int64 tokens.

        Raises:
            KnockoutError: A row cannot be sampled from and its rule has no `fail_token`; names
                the request.
        """
        failed: dict[int, str] = {}
        tokens, answer = self.decide_(logits, positions, failed, closed)
        for member, reason in failed.items():
            rule = self.rules[member]
            if rule.fail_token is None:
                raise KnockoutError(f"{rule}: {reason}")
            tokens[member] = rule.fail_token
        if self.coupled:
            one_hot_(logits, self.coupled_rows, tokens)
        if answer is not None:
            found = answer.found
            mark_(
                logits, self.coupled_rows[found.member], tokens[found.member], found, answer.differ
            )
        for member, reason in failed.items():
            mark_failure_(logits[self.coupled[member]], int(tokens[member]), reason)
        return tokens

    def decide_(
        self, logits: Tensor, positions: Tensor, failed: dict[int, str],
        closed: Tensor | None = None,
    ) -> tuple[Tensor, Answer | None]:  # fmt: skip
        """`apply_` without writing the answer into the rows, whose contents are then of no use.

        Members of `coupled` whose rows cannot be sampled from are noted in `failed` with the
        reason; their tokens are arbitrary, so that the others go on.
        """
        if self._plain is not None:
            ban_(logits, self._banned_rows, self._plain.token)
        if not self.coupled:
            return self.coupled_rows, None
        # Not decided when the batch is laid out: rows of no concern to us come and go without a word.
        whole = len(self.coupled) == logits.shape[0]
        part = logits if whole else logits[self.coupled_rows]
        if self.by_part and closed is None:
            raise ValueError(
                "an intervention acts in a part of the text, but the part is not known"
            )
        steps = _Steps(positions - self._start, closed if self.by_part else None)
        found = self._seen
        raw = part.clone() if found is not None and found.any_apart else part
        self._intervene_(part, steps)
        if found is None:
            picks = self._sound(part, failed, lambda: pick(part, self._settings, positions))
            return self._replaced(picks, steps), None
        watched = Watched(
            found.member, found.index, found.kind, found.strength, found.entry, found.token,
            found.most, found.penalties,
        )  # fmt: skip
        picks, differ = self._sound(
            part, failed, lambda: pick_watched(part, self._settings, positions, watched)
        )
        tokens = self._replaced(picks, steps)
        if found.scoped or found.any_apart:
            active = steps.active(found.scope, found.member)
            differ &= active
            if found.any_apart:
                self._differ_apart_(differ, raw, positions, active, tokens, found, watched)
        return tokens, Answer(found, differ, len(self.rules))

    def _intervene_(self, part: Tensor, steps: _Steps) -> None:
        own = self._owned
        if own is None:
            return
        if own.shift is None and own.scope is None:
            ban_(part, own.member, own.token)
            return
        shift = own.shift
        if shift is None:
            shift = torch.full(own.token.shape, -math.inf, device=part.device)
        if own.scope is not None:
            shift = torch.where(steps.active(own.scope, own.member), shift, 0.0)
        shift_(part, own.member, own.token, shift)

    def _replaced(self, picks: Tensor, steps: _Steps) -> Tensor:
        """What is emitted for each pick."""
        own = self._owned
        if (
            own is None
            or own.replaced_member is None
            or own.replaced_token is None
            or own.replacement is None
        ):
            return picks
        member = own.replaced_member
        hit = torch.eq(picks[member], own.replaced_token)
        if own.replaced_scope is not None:
            hit &= steps.active(own.replaced_scope, member)
        return picks.index_add(0, member, torch.where(hit, own.replacement - picks[member], 0))

    def _differ_apart_(
        self, differ: Tensor, raw: Tensor, positions: Tensor, active: Tensor, tokens: Tensor,
        found: Seen, watched: Watched,
    ) -> None:  # fmt: skip
        """Judges those that are no extension of their row's own intervention, in place."""
        for index in in_parts(found.apart.nonzero()[:, 0], self._width):
            some = watched.take(index)
            again = raw[some.row]
            shift = torch.where(some.kind == 1, -some.strength, -math.inf)
            shift = torch.where(active[index] & (some.kind != 2), shift, 0.0)[some.entry]
            shift_(again, some.entry, some.token, shift)
            settings = self._settings.take(some.row)
            picked = pick(again, settings, positions[some.row], arbitrary=True)
            hit = some.sum(some.token == picked[some.entry]) > 0
            hit &= (some.kind == 2) & active[index]
            emitted = torch.where(hit, found.replacement[index], picked)
            differ[index] = emitted != tokens[some.row]

    def _sound(self, part: Tensor, failed: dict[int, str], run: Callable[[], _T]) -> _T:
        """What `run` returns, rows that cannot be sampled from aside."""
        while True:
            try:
                return run()
            except BadLogits as bad:
                failed[bad.row] = bad.reason
                part[bad.row] = 0


def _order(before: Sequence[Rule], after: Sequence[Rule]) -> list[int] | None:
    """Where each rule has gone; None if these are not the same objects."""
    if len(before) != len(after):
        return None
    places: defaultdict[int, list[int]] = defaultdict(list)
    for place, rule in enumerate(after):
        places[id(rule)].append(place)
    found = [places[id(rule)].pop() if places[id(rule)] else None for rule in before]
    return None if None in found else [place for place in found if place is not None]


@dataclass(frozen=True, slots=True)
class _Steps:
    """Positions of the coupled rows.

    Attributes:
        step: (n,) int64.
        closed: (n,) bool, whether the thinking has ended; None if it does not matter.
    """

    step: Tensor
    closed: Tensor | None

    def active(self, scope: Scope, member: Tensor) -> Tensor:
        """(k,) bool, which of some interventions of members (k,) act now."""
        return scope.active(self.step[member], None if self.closed is None else self.closed[member])


@dataclass(frozen=True, slots=True)
class Answer:
    """Which watched interventions would have made another token come out.

    Attributes:
        found: What is watched.
        differ: (P,) bool.
        n_rows: Coupled rows.
    """

    found: Seen
    differ: Tensor
    n_rows: int

    def by_row(self) -> list[Differing]:
        """For each coupled row, the places in its watch list of those that differ."""
        index = self.differ.nonzero()[:, 0]
        rows: list[list[int]] = [[] for _ in range(self.n_rows)]
        for row, place in torch.stack(
            [self.found.member[index], self.found.index[index]], 1
        ).tolist():
            rows[row].append(place)
        return [Differing(named) for named in rows]


def mark_(logits: Tensor, rows: Tensor, tokens: Tensor, found: Seen, differ: Tensor) -> None:
    """Names the interventions that differ in the columns of rows that `one_hot_` made, in place.

    Intervention w of a watch list is named in column w of those that are not the emitted token's,
    as −1 (in a vocabulary of fewer columns: as −2^k in column w − k (V − 2)). The last such
    column says that more differ than the row can name. `names_of` reads it back.

    Args:
        logits: (B, V).
        rows: (P,) row of each watched intervention.
        tokens: (P,) what its row emits.
        found: What is watched.
        differ: (P,) bool.
    """
    room = logits.shape[1] - 2
    count = torch.nn.functional.pad(differ.to(torch.int64).cumsum(0), (1, 0))
    rank = count[1:] - count[found.start]
    named = differ & (rank <= found.report)
    column = found.index % room
    column = column + (column >= tokens)
    if found.most <= room:
        logits[rows, column] = torch.where(named, -1.0, -math.inf).to(logits.dtype)
    else:
        value = torch.zeros_like(logits)
        power = (found.index // room).to(logits.dtype).exp2()
        value.index_put_((rows, column), torch.where(named, power, 0.0), accumulate=True)
        logits.copy_(torch.where(value > 0, -value, logits))
    more = torch.zeros(logits.shape[0], dtype=torch.int64, device=logits.device)
    more.index_add_(0, rows, (differ & ~named).to(torch.int64))
    last = room + (room >= tokens)
    logits[rows, last] = torch.where(more[rows] > 0, -1.0, -math.inf).to(logits.dtype)


def mark_failure_(row: Tensor, token: int, reason: str) -> None:
    """Makes a row (V,) say that it could not be sampled from: half a step below its token.

    One entry there stands for a highest logit that is no number, two for a row with every token
    banned. No intervention is named so: those are whole steps below. `told` reads it back.
    """
    row.fill_(-math.inf)
    row[token] = 0.0
    for n in range(FAILED.index(reason) + 1):
        row[(token + 1 + n) % row.shape[0]] = -0.5
