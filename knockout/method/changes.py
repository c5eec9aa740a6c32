"""Which interventions would change a pick, from the exact logits of the step.

A ban never needs a second pick. Sorted by falling logit, the support of a row is a *prefix* of
the list, and so is the support under a ban (less the banned tokens): min_p, top_k and top_p only
move its end. A banned winner changes the pick. Otherwise the winner loses its place only where
the new end lies before it, or to a *beater*, a token behind the old end with a better score, that
the new end lets in and the ban does not take out. So a ban is judged by where the end moves, and
that follows from the places and masses of the banned entries alone.

Everything else (penalties, and pairs of unlike interventions) is picked again, exactly, and only
where it can matter. Nothing here makes a tensor of interventions by vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from knockout.method.sampling import Rows, attempt, gumbel, in_parts, pick, settle_
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
    """

    row: Tensor
    place: Tensor
    kind: Tensor
    strength: Tensor
    entry: Tensor
    token: Tensor
    most: int

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
            entry[mine], self.token[mine], self.most,
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
    hit = _hit(first.picks, watched)
    matters = _matters(rows, watched, hit)
    found, doubtful = hit & (watched.kind != 1), matters & (watched.kind == 1)
    if rows.truncated is not None and first.top is not None:
        some, index = watched, None
        if rows.truncated.shape[0] < len(rows):  # only here a second wait
            index = rows.is_truncated[watched.row].nonzero()[:, 0]
            some = watched.take(index)
        answer, doubt = bans_that_change(
            first.top, first.score, first.picks[rows.truncated], rows.place[some.row], some
        )
        if index is not None:
            answer, doubt = (torch.zeros_like(hit).index_put((index,), x) for x in (answer, doubt))
        bans = matters & (watched.kind == 0)
        found, doubtful = found | (bans & answer), doubtful | (bans & doubt)
    # The one wait for the device in a step.
    if torch.cat([first.trouble, doubtful]).any():
        settle_(first, logits, rows, positions)
        if rows.truncated is not None:
            void = torch.zeros_like(rows.is_truncated)
            void[rows.truncated] = first.void
            doubtful |= void[watched.row]
        index = doubtful.nonzero()[:, 0]
        if index.shape[0]:
            found[index] = _changes(logits, rows, positions, first.picks, watched.take(index))
    return first.picks, found


def _hit(picks: Tensor, watched: Watched) -> Tensor:
    """(P,) bool, which contain their row's pick."""
    return watched.sum(watched.token == picks[watched.row[watched.entry]]) > 0


def _matters(rows: Rows, watched: Watched, hit: Tensor) -> Tensor:
    """(P,) bool, which bans and penalties cannot be told by whether they hit.

    Without truncation, lowering others than the winner changes nothing.
    """
    truncated = rows.is_truncated[watched.row]
    penalty = (watched.kind == 1) & (truncated | hit | (watched.strength < 0))
    return penalty | (truncated & ~hit & (watched.kind == 0))


def _changes(
    logits: Tensor, rows: Rows, positions: Tensor, picks: Tensor, watched: Watched
) -> Tensor:
    """(P,) bool, which interventions would make another pick than these, from whole rows."""
    hit = _hit(picks, watched)
    found, matters = hit & (watched.kind != 1), _matters(rows, watched, hit)
    bans, width = matters & (watched.kind == 0), logits.shape[1]
    again = matters & (watched.kind == 1)
    for part in in_parts(torch.unique(watched.row[bans]), width):
        mine = (bans & torch.isin(watched.row, part)).nonzero()[:, 0]
        some = watched.take(mine)
        top = Top(logits[part], rows, part, width)
        score = top.x + gumbel(rows.seeds[part, None], positions[part, None], top.ids)
        place = torch.searchsorted(part, some.row)
        found[mine], again[mine] = bans_that_change(top, score, picks[part], place, some)
    for part in in_parts(again.nonzero()[:, 0], width):
        found[part] = _picked_again(logits, rows, positions, picks, watched.take(part))
    return found


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

    best_left = left(torch.ones_like(row))
    first = (best_left - 1).clamp(max=last)
    rising = -top.x

    def at_least(bar: Tensor) -> Tensor:
        return find(rising, -bar, right=True)

    kept = at_least(top.x[row, first] + top.log_min_p[row])
    k = top.top_k[row]
    reach = left(k)
    edge = top.x[row, (reach - 1).clamp(0, last)]
    # Where fewer than k are left in the list, top_k takes all of it.
    cut = top.limited[row] & (reach <= length)
    kept = torch.where(cut, torch.minimum(kept, at_least(edge)), kept)

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
                torch.minimum(kept, torch.maximum(nucleus(share * total + slack), first + 1)),
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
        doubt |= best_left > length
    return low & high, doubt


def _picked_again(
    logits: Tensor, rows: Rows, positions: Tensor, picks: Tensor, watched: Watched
) -> Tensor:
    """(P,) bool, which of these interventions pick another token, each on its own copy of a row."""
    changed = logits[watched.row]
    shift = torch.where(watched.kind == 1, -watched.strength, -math.inf)[watched.entry]
    shift_(changed, watched.entry, watched.token, shift)
    again = pick(changed, rows.take(watched.row), positions[watched.row], arbitrary=True)
    return again != picks[watched.row]


def shift_(logits: Tensor, rows: Tensor, tokens: Tensor, shift: Tensor) -> None:
    """Adds to logits[rows[i], tokens[i]], in place and in their dtype. −∞ bans; no pair repeats."""
    logits[rows, tokens] += shift.to(logits.dtype)
