"""Which interventions would change a pick, from the exact logits of the step.

A ban never needs a second pick. Sorted by falling logit, the support of a row is a *prefix* of
the list, and so is the support under a ban (less the banned tokens): min_p, top_k and top_p only
move its end. A banned winner changes the pick. Otherwise the winner loses its place only where
the new end lies before it, or to a *beater*, a token behind the old end with a better score, that
the new end lets in and the ban does not take out. So a ban is judged by where the end moves, and
that follows from the places and masses of the banned entries alone.

A penalty on tokens outside the support changes nothing as long as the support keeps its end;
another one is picked again from a copy of the list. Where rounding decides or a list is too
short, whole rows are looked at. Nothing here makes a tensor of interventions by vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from knockout.method.sampling import Attempt, Rows, attempt, gumbel, in_parts, pick, settle_
from knockout.method.support import Top

__all__ = ["Watched", "bans_that_change", "pick_watched", "shift_"]

# Banned masses are summed as whole numbers of 2^-44 of the best token's, so that sums depend on
# no order and differences of running sums are exact; a set of the whole vocabulary still fits.
_UNIT = 2.0**44
# Nucleus edges closer than this share of the mass are decided by picking again.
_TIE = 1e-8
# The place of what is not listed, behind every list.
_FAR = 1 << 31


@dataclass(frozen=True, slots=True)
class Watched:
    """P watched interventions of n rows, laid out flat: each is of one row and has some entries.

    Attributes:
        row: (P,) int64, the row of each.
        place: (P,) int64, its place among those of its row.
        kind: (P,) int64: 0 a ban, 1 a penalty, 2 a replacement.
        strength: (P,) float64 λ of the penalties.
        entry: (N,) int64, the watched intervention of each entry, rising.
        token: (N,) int64 token ids.
        most: The most that one row has.
        penalties: Whether there may be penalties.
    """

    row: Tensor
    place: Tensor
    kind: Tensor
    strength: Tensor
    entry: Tensor
    token: Tensor
    most: int
    penalties: bool

    def __len__(self) -> int:
        return self.row.shape[0]

    def take(self, index: Tensor) -> Watched:
        """Those at index (k,), rising."""
        at = torch.full((len(self),), -1, dtype=torch.int64, device=index.device)
        at[index] = torch.arange(index.shape[0], device=index.device)
        entry = at[self.entry]
        mine = entry >= 0
        return Watched(
            self.row[index], self.place[index], self.kind[index], self.strength[index],
            entry[mine], self.token[mine], self.most, self.penalties,
        )  # fmt: skip

    def sum(self, values: Tensor) -> Tensor:
        """(P,) int64, sum over the entries of each. values (N,) int64 or bool."""
        sums = torch.zeros(len(self), dtype=torch.int64, device=values.device)
        return sums.index_add_(0, self.entry, values.to(torch.int64))


def pick_watched(
    logits: Tensor, rows: Rows, positions: Tensor, watched: Watched
) -> tuple[Tensor, Tensor]:
    """Picks a token for each row, and says which watched interventions would make another pick.

    Args:
        logits: (B, V) as for `pick`. Not changed.
        rows: Settings of the B rows.
        positions: (B,) int64; tokens that stand before the pick.
        watched: The P interventions, on top of what the logits contain already.

    Returns:
        (B,) int64 tokens, those of `pick`; (P,) bool, exactly what picking again under each of
        the interventions would say.

    Raises:
        BadLogits: As for `pick`.
    """
    first = attempt(logits, rows, positions)
    hit, truncated = _hit(first.picks, watched), rows.is_truncated[watched.row]
    matters = _matters(watched, hit, truncated)
    found, doubtful = hit & (watched.kind != 1), matters & ~truncated
    if rows.truncated is not None and first.top is not None:
        some, index = watched, None
        if rows.truncated.shape[0] < len(rows):  # only here a second wait
            index = truncated.nonzero()[:, 0]
            some = watched.take(index)
        place = rows.place[some.row]
        answer, doubt = _judged(first.top, first.score, first.picks[rows.truncated], place, some)
        if index is not None:
            answer, doubt = (torch.zeros_like(hit).index_put((index,), x) for x in (answer, doubt))
        found, doubtful = found | (matters & answer), doubtful | (matters & doubt)
    # The one wait for the device in a step.
    if torch.cat([first.trouble, doubtful]).any():
        settle_(first, logits, rows, positions)
        void = torch.zeros_like(rows.is_truncated)
        if rows.truncated is not None:
            void[rows.truncated] = first.void
        doubtful |= void[watched.row]
        index = doubtful.nonzero()[:, 0]
        if index.shape[0]:
            some = watched.take(index)
            found[index] = _changes(logits, rows, positions, first, void, some)
    return first.picks, found


def _hit(picks: Tensor, watched: Watched) -> Tensor:
    """(P,) bool, which contain their row's pick."""
    return watched.sum(watched.token == picks[watched.row[watched.entry]]) > 0


def _matters(watched: Watched, hit: Tensor, truncated: Tensor) -> Tensor:
    """(P,) bool, which bans and penalties cannot be told by whether they hit.

    Without truncation, lowering others than the winner changes nothing.
    """
    penalty = (watched.kind == 1) & (truncated | hit | (watched.strength < 0))
    return penalty | (truncated & ~hit & (watched.kind == 0))


def _changes(
    logits: Tensor, rows: Rows, positions: Tensor, first: Attempt, void: Tensor, watched: Watched
) -> Tensor:
    """(P,) bool, which interventions change the picks, whatever it takes.

    Args:
        logits, rows, positions: As for `pick_watched`.
        first: The picks, settled.
        void: (B,) bool, rows whose lists were too short for their pick.
        watched: The interventions.
    """
    hit, truncated = _hit(first.picks, watched), rows.is_truncated[watched.row]
    matters, width = _matters(watched, hit, truncated), logits.shape[1]
    found, again = hit & (watched.kind != 1), matters.clone()
    whole = matters & truncated & ((watched.kind == 0) | void[watched.row])
    for part in in_parts(torch.unique(watched.row[whole]), width):
        mine = (whole & torch.isin(watched.row, part)).nonzero()[:, 0]
        some = watched.take(mine)
        top = Top(logits[part], rows, part, width)
        score = top.x + gumbel(rows.seeds[part, None], positions[part, None], top.ids)
        place = torch.searchsorted(part, some.row)
        found[mine], again[mine] = _judged(top, score, first.picks[part], place, some)
    if watched.penalties and first.top is not None:
        lists = again & truncated & (watched.kind == 1)
        for index in in_parts(lists.nonzero()[:, 0], first.score.shape[1]):
            found[index], again[index] = _penalties_that_change(
                logits, rows, positions, first, watched.take(index)
            )
    for index in in_parts(again.nonzero()[:, 0], width):
        some = watched.take(index)
        changed = logits[some.row]
        shift = torch.where(some.kind == 1, -some.strength, -math.inf)[some.entry]
        shift_(changed, some.entry, some.token, shift)
        picks = pick(changed, rows.take(some.row), positions[some.row], arbitrary=True)
        found[index] = picks != first.picks[some.row]
    return found


def _judged(
    top: Top, score: Tensor, picks: Tensor, row: Tensor, some: Watched
) -> tuple[Tensor, Tensor]:
    """`bans_that_change`, where penalties are said to change nothing or to be in doubt."""
    answer, doubt = bans_that_change(top, score, picks, row, some)
    if not some.penalties:
        return answer, doubt
    ban = some.kind == 0
    return answer & ban, torch.where(ban, doubt, ~_leaves_the_support(top, row, some))


def _leaves_the_support(top: Top, row: Tensor, some: Watched) -> Tensor:
    """(P,) bool, which penalties surely leave a support that is seen whole as it is.

    Tokens that min_p and top_k drop do not count at all; without those two, tokens behind the
    nucleus count for their mass alone, and losing all of it must not move the nucleus.
    """
    keep, _ = top.support()
    end = torch.where(top.unlimited, keep.sum(1), top.kept().sum(1))
    at = top.place_of(row[some.entry], some.token)
    leaves = (some.sum(at < end[row][some.entry]) == 0) & (some.strength > 0)
    if top.may_be_unlimited:
        gone = some.sum((top.weight_of(row[some.entry], some.token) * _UNIT).round()) / _UNIT
        share, total = top.top_p[row], top.total[row]
        room = share * (total - gone) - top.cumulative[row, end[row] - 1]
        leaves &= ~top.unlimited[row] | (room > _TIE * total)
    return leaves


def _penalties_that_change(
    logits: Tensor, rows: Rows, positions: Tensor, first: Attempt, some: Watched
) -> tuple[Tensor, Tensor]:
    """Picks again from copies of the lists of truncated rows.

    Returns:
        (P,) bool each: whether the pick changes; whether that is in doubt.
    """
    top, length = first.top, first.score.shape[1]
    assert top is not None
    row, entry, token = rows.place[some.row], some.entry, some.token
    whose, list_of = some.row[entry], row[entry]
    lowered = logits[whose, token] - some.strength[entry].to(logits.dtype)
    x = lowered.to(torch.float64) / rows.temperature[whose]
    score = x + gumbel(rows.seeds[whose], positions[whose], token)
    start = torch.searchsorted(entry, torch.arange(len(some), device=entry.device))
    rank = torch.arange(entry.shape[0], device=entry.device) - start[entry]
    most = int(rank.max()) + 1 if len(rank) else 0

    def packed(values: Tensor, none: float) -> Tensor:
        out = values.new_full((len(some), most), none)
        out[entry, rank] = values
        return out

    new = (x - top.x[list_of, 0]).exp()
    gain = packed(new - top.weight_of(list_of, token), 0).sum(1)
    moved, order = top.moved(
        row, packed(top.place_of(list_of, token), length), packed(token, -1),
        packed(x, -math.inf), gain,
    )  # fmt: skip
    scores = torch.cat([first.score[row], packed(score, -math.inf)], dim=1).gather(1, order)
    scores = torch.where(moved.x > -math.inf, scores, -math.inf)  # not where a token was before
    scale = (top.x[row, 0] - moved.x[:, 0]).exp()
    mass = torch.where(
        moved.unlimited, (top.total[row] + packed(new, 0).sum(1)) * scale, moved.cumulative[:, -1]
    )
    picks, seen = [], torch.ones_like(moved.limited)
    for slack in (-_TIE * mass, _TIE * mass):
        keep, whole = moved.support(slack)
        place = torch.where(keep, scores, -math.inf).argmax(dim=1, keepdim=True)
        picks.append(moved.ids.gather(1, place)[:, 0])
        seen &= whole
    changed = picks[0] != first.picks[some.row]
    return changed, (picks[0] != picks[1]) | ~seen | ~mass.isfinite()


def bans_that_change(
    top: Top, score: Tensor, picks: Tensor, row: Tensor, bans: Watched
) -> tuple[Tensor, Tensor]:
    """Judges bans that leave the winner in, on the sorted lists of their rows.

    Args:
        top: Lists of n rows, L long.
        score: (n, L) score of each listed token.
        picks: (n,) the winners, listed.
        row: (P,) the list of each ban.
        bans: The P bans.

    Returns:
        (P,) bool each: whether the pick changes; whether that is in doubt, because rounding
        decides or the list is too short.
    """
    n, length = top.x.shape
    last, device = length - 1, row.device

    def find(lists: Tensor, values: Tensor, right: bool = False) -> Tensor:
        """Where (P,) values go in the rising (n, ·) lists of their rows."""
        packed = torch.zeros(n, bans.most, dtype=torch.float64, device=device)
        packed[row, bans.place] = values
        return torch.searchsorted(lists, packed, right=right)[row, bans.place]

    # The banned entries, those of each ban by rising place.
    at = top.place_of(row[bans.entry], bans.token)
    key = (bans.entry * (2 * _FAR) + torch.where(at < length, at, _FAR)).sort()
    entry, at = bans.entry, key.values % (2 * _FAR)
    start = torch.searchsorted(entry, torch.arange(len(bans), device=device))
    rank = torch.arange(entry.shape[0], device=device) - start[entry]
    inside = at.clamp(max=last)
    listed = at < length
    unit = (top.weight * _UNIT).round_().to(torch.int64)
    mass = torch.where(listed, unit[row[entry], inside], 0)
    running = torch.nn.functional.pad(mass.cumsum(0), (1, 0))

    def mass_before(end: Tensor) -> Tensor:
        return bans.sum(torch.where(at < end[entry], mass, 0)).to(torch.float64) / _UNIT

    def left(k: Tensor) -> Tensor:
        """After which place k tokens are left that are not banned."""
        return k + bans.sum(at - rank < k[entry])

    first = (left(torch.ones_like(row)) - 1).clamp(max=last)  # the best that is left
    rising = -top.x

    def at_least(bar: Tensor) -> Tensor:
        return find(rising, -bar, right=True)

    kept = at_least(top.x[row, first] + top.log_min_p[row])
    # Where fewer than k are left in the list, top_k takes all of it.
    edge = top.x[row, (left(top.top_k[row]) - 1).clamp(0, last)]
    kept = torch.where(top.limited[row], torch.minimum(kept, at_least(edge)), kept)

    unlimited = top.unlimited[row]
    ends: tuple[Tensor, ...] = (kept, kept)
    if top.any_nucleus:
        share, before = top.top_p[row], top.cumulative[row, kept]
        total = before - mass_before(kept)
        if top.may_be_unlimited:
            # Without top_k and min_p the mass of a banned token counts wherever it stands.
            weights = top.weight_of(row[bans.entry], bans.token)
            gone = bans.sum((weights * _UNIT).round()).to(torch.float64) / _UNIT
            total = torch.where(unlimited, top.total[row] - gone, total)
            before = torch.where(unlimited, top.total[row], before)
        after = top.cumulative[row[entry], inside + 1] - (
            (running[1:] - running[start[entry]]).to(torch.float64) / _UNIT
        )

        def nucleus(target: Tensor) -> Tensor:
            """How many places stand before the first one with `target` mass before it."""
            passed = bans.sum(listed & (after < target[entry]))
            banned = (running[start + passed] - running[start]).to(torch.float64) / _UNIT
            return find(top.cumulative, target + banned).clamp(max=length)

        ends = tuple(
            torch.where(
                share < 1,
                torch.minimum(kept, nucleus(share * total + slack)),
                kept,
            )
            for slack in (-_TIE * before, _TIE * before)
        )

    winner = top.place_of(torch.arange(n, device=device), picks)
    beats = score > score.gather(1, winner.clamp(max=last)[:, None])
    n_beaters = torch.nn.functional.pad(beats.to(torch.int64).cumsum(1), (1, 0))
    beaten = listed & beats[row[entry], inside]
    low, high = (
        (winner[row] >= end) | (n_beaters[row, end] > bans.sum(beaten & (at < end[entry])))
        for end in ends
    )
    doubt = low ^ high
    if length < top.width:
        lowest = top.x[row, (ends[1] - 1).clamp(min=0)]
        doubt |= torch.where(unlimited, lowest <= top.x[row, last], kept >= length)
    return low & high, doubt


def shift_(logits: Tensor, rows: Tensor, tokens: Tensor, shift: Tensor) -> None:
    """Adds to logits[rows[i], tokens[i]], in place and in their dtype. −∞ bans; no pair repeats."""
    logits[rows, tokens] += shift.to(logits.dtype)
