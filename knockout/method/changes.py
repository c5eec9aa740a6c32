"""Which interventions would change a pick, from the exact logits of the step.

A ban never needs a second pick. Sorted by falling logit, the support of a row is a *prefix* of
the list, and so is the support under a ban (less the banned tokens): min_p, top_k and top_p only
move its end. A banned winner changes the pick. Otherwise the winner loses its place only where
the new end lies before it, or to a *beater*, a token behind the old end with a better score, that
the new end lets in and the ban does not take out. So a ban is judged by where the end moves,
found by bisection over the list with sums over the banned entries alone.

Everything else (penalties, and pairs of unlike interventions) is picked again, exactly, and only
where it can matter. Nothing here makes a tensor of interventions by vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from knockout.method.sampling import Rows, gumbel, pick, split_rows
from knockout.method.support import Top

__all__ = ["Watched", "bans_that_change", "changes", "in_parts", "shift_"]

# Nucleus edges closer than this share of the mass are decided by picking again.
_TIE = 1e-10
# Entries of whole rows that are looked at together, each with some ten numbers beside it.
_CPU_ENTRIES = 1 << 19
_ACCELERATOR_ENTRIES = 1 << 22


@dataclass(frozen=True, slots=True)
class Watched:
    """P watched interventions of n rows, laid out flat: each is of one row and has some entries.

    Attributes:
        row: (P,) int64, the row of each.
        kind: (P,) int64: 0 a ban, 1 a penalty, 2 a replacement.
        strength: (P,) float64 λ of the penalties.
        entry: (N,) int64, the watched intervention of each entry, rising.
        token: (N,) int64 token ids.
    """

    row: Tensor
    kind: Tensor
    strength: Tensor
    entry: Tensor
    token: Tensor

    def __len__(self) -> int:
        return self.row.shape[0]

    def take(self, index: Tensor) -> Watched:
        """Those at index (k,), rising."""
        place = torch.full((len(self),), -1, dtype=torch.int64, device=index.device)
        place[index] = torch.arange(index.shape[0], device=index.device)
        entry = place[self.entry]
        mine = entry >= 0
        return Watched(
            self.row[index], self.kind[index], self.strength[index], entry[mine], self.token[mine]
        )

    def any(self, flags: Tensor) -> Tensor:
        """(P,) bool, whether any entry of each is flagged. flags (N,) bool."""
        count = torch.zeros(len(self), dtype=torch.int64, device=flags.device)
        return count.index_add_(0, self.entry, flags.to(torch.int64)) > 0


def changes(
    logits: Tensor, rows: Rows, positions: Tensor, picks: Tensor, watched: Watched
) -> Tensor:
    """Whether each watched intervention would make another pick.

    Args:
        logits: (n, V) what the picks were made from. Not changed.
        rows: Settings of the n rows.
        positions: (n,) int64; tokens that stand before the pick.
        picks: (n,) int64 what `pick` chose (before a replacement).
        watched: The P interventions, on top of what the logits contain already.

    Returns:
        (P,) bool, exactly what picking again under each of them would say.
    """
    hit = watched.any(watched.token == picks[watched.row[watched.entry]])
    found = hit & (watched.kind != 1)
    truncated = rows.is_truncated[watched.row]
    index = (truncated & ~hit & (watched.kind == 0)).nonzero()[:, 0]
    if index.shape[0]:
        found[index] = _bans(logits, rows, positions, picks, watched.take(index))
    # Without truncation, lowering others than the winner changes nothing.
    matters = (watched.kind == 1) & (truncated | hit | (watched.strength < 0))
    index = matters.nonzero()[:, 0]
    if index.shape[0]:
        found[index] = _picked_again(logits, rows, positions, picks, watched.take(index))
    return found


def _bans(logits: Tensor, rows: Rows, positions: Tensor, picks: Tensor, watched: Watched) -> Tensor:
    """`changes` for bans of others than the winner on truncated rows."""
    found = torch.zeros(len(watched), dtype=torch.bool, device=logits.device)
    used = torch.unique(watched.row)
    todo = _judge(logits, rows, positions, picks, watched, used, rows.prefix, found)
    if todo.shape[0]:
        open_rows = torch.unique(watched.row[todo])
        for part in in_parts(open_rows, logits.shape[1]):
            mine = todo[torch.isin(watched.row[todo], part)]
            some = watched.take(mine)
            out = torch.zeros(len(some), dtype=torch.bool, device=logits.device)
            _judge(logits, rows, positions, picks, some, part, logits.shape[1], out)
            found[mine] = out
    return found


def _judge(
    logits: Tensor,
    rows: Rows,
    positions: Tensor,
    picks: Tensor,
    watched: Watched,
    used: Tensor,
    prefix: int,
    found: Tensor,
) -> Tensor:
    """Judges bans from lists of `prefix` entries; fills found, returns what needs longer lists."""
    place = torch.zeros(logits.shape[0], dtype=torch.int64, device=logits.device)
    place[used] = torch.arange(used.shape[0], device=logits.device)
    top = Top(logits[used], rows, used, prefix)
    score = top.x + gumbel(rows.seeds[used, None], positions[used, None], top.ids)
    answer, unsure, short = bans_that_change(
        top, score, picks[used], place[watched.row], watched.entry, watched.token
    )
    found |= answer
    again = (unsure & ~short).nonzero()[:, 0]
    if again.shape[0]:
        found[again] = _picked_again(logits, rows, positions, picks, watched.take(again))
    return short.nonzero()[:, 0]


def bans_that_change(
    top: Top, score: Tensor, picks: Tensor, row: Tensor, entry: Tensor, token: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Judges bans that leave the winner in, on the sorted lists of their rows.

    Args:
        top: Lists of n rows, L long.
        score: (n, L) score of each listed token.
        picks: (n,) the winners, listed.
        row: (P,) row of each ban.
        entry: (N,) ban of each banned token.
        token: (N,) the banned tokens.

    Returns:
        (P,) bool each: whether the pick changes; whether rounding decides; whether the list is
        too short to tell.
    """
    n, length = top.x.shape
    n_bans, device = row.shape[0], row.device
    last = length - 1
    at = top.place_of(row[entry], token)  # (N,) place in the list, or L
    listed = at < length
    zero = torch.zeros(n_bans, dtype=torch.float64, device=device)
    weight = top.weight[row[entry], at.clamp(max=last)]
    gone = zero.clone()
    if top.may_be_unlimited:
        # Without top_k and min_p the mass of a banned token counts wherever it stands.
        gone = zero.index_add(
            0, entry, torch.where(listed, weight, top.weight_of(row[entry], token))
        )
    mine, at, weight = entry[listed], at[listed], weight[listed]

    def before(end: Tensor, values: Tensor) -> Tensor:
        """Sum over each ban's listed entries before `end` (P,)."""
        sums = torch.zeros(n_bans, dtype=values.dtype, device=device)
        return sums.index_add_(0, mine, torch.where(at < end[mine], values, 0))

    ones = torch.ones_like(at)
    banned_before = top.bisect(lambda end: end - before(end, ones) >= 1, n_bans)
    first = (banned_before - 1).clamp(max=last)  # the best token that is left
    kept = top.count_at_least(row, top.x[row, first] + top.log_min_p[row])
    k = top.top_k[row]
    limited = top.limited[row]
    reach = top.bisect(lambda end: end - before(end, ones) >= k, n_bans)
    edge = top.x[row, (reach - 1).clamp(0, last)]
    too_few = reach > length  # fewer than k are left in the list
    k_end = torch.minimum(kept, top.count_at_least(row, edge))
    kept = torch.where(limited & ~too_few, k_end, kept)

    unlimited = top.unlimited[row]
    share, total = top.top_p[row], top.cumulative[row, kept] - before(kept, weight)
    total = torch.where(unlimited, top.total[row] - gone, total)
    slack = _TIE * torch.where(unlimited, top.total[row], top.cumulative[row, kept])

    def nucleus(target: Tensor) -> Tensor:
        """How many places stand before the first one with `target` mass before it."""
        ends = top.bisect(
            lambda place: (
                top.cumulative[row, (place - 1).clamp(max=length)] - before(place - 1, weight)
                >= target
            ),
            n_bans,
        )
        return torch.maximum(ends - 1, first + 1)

    if top.any_nucleus:
        target = share * total
        ends = [
            torch.where(share < 1, torch.minimum(kept, nucleus(target + shift)), kept)
            for shift in (-slack, slack)
        ]
    else:
        ends = [kept, kept]

    winner = top.place_of(torch.arange(n, device=device), picks)
    goal = score.gather(1, winner.clamp(max=last)[:, None])
    beats = score > goal
    n_beaters = torch.nn.functional.pad(beats.to(torch.int64).cumsum(1), (1, 0))
    beaten = beats[row[mine], at].to(torch.int64)
    answers = [
        (winner[row] >= end) | (n_beaters[row, end] - before(end, beaten) > 0) for end in ends
    ]
    end = ends[1]
    if length < top.width:
        lowest = top.x[row, (end - 1).clamp(min=0)]
        short = torch.where(unlimited, lowest <= top.x[row, last], kept >= length)
        short |= banned_before > length
    else:
        short = torch.zeros_like(unlimited)
    return answers[0] & answers[1] & ~short, answers[0] ^ answers[1], short


def _picked_again(
    logits: Tensor, rows: Rows, positions: Tensor, picks: Tensor, watched: Watched
) -> Tensor:
    """Picks under each of the interventions, some rows at a time."""
    found = torch.zeros(len(watched), dtype=torch.bool, device=logits.device)
    everything = torch.arange(len(watched), device=logits.device)
    for part in in_parts(everything, logits.shape[1]):
        some = watched.take(part)
        changed = logits[some.row]
        shift = torch.where(some.kind == 1, -some.strength, -math.inf)[some.entry]
        shift_(changed, some.entry, some.token, shift)
        again = pick(changed, rows.take(some.row), positions[some.row], arbitrary=True)
        found[part] = again != picks[some.row]
    return found


def in_parts(index: Tensor, width: int) -> tuple[Tensor, ...]:
    """Splits (n,) indices of rows of `width` that are each picked from again, or sorted whole."""
    return split_rows(index, width, _CPU_ENTRIES, _ACCELERATOR_ENTRIES)


def shift_(logits: Tensor, rows: Tensor, tokens: Tensor, shift: Tensor) -> None:
    """Adds to logits[rows[i], tokens[i]], in place and in their dtype. −∞ bans; no pair repeats."""
    logits[rows, tokens] += shift.to(logits.dtype)
