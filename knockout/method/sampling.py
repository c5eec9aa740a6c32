"""Coupled sampling: noise, ban, truncation and pick as pure tensor functions.

A token is sampled as arg max_j (ℓ_j / T + g_j) over the support that truncation leaves, with g_j
standard Gumbel noise (the Gumbel-max trick: Gumbel 1954; Maddison, Tarlow and Minka 2014). The
noise is a function of (seed, position, token id) alone, so neither the batch, nor the engine, nor
a ban changes it: two policies that share a seed share their noise, and differ only where their
supports or logits do.

Nothing here knows of engines, files or tokenizers.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from knockout.method.support import Top

__all__ = [
    "Attempt",
    "BadLogits",
    "Rows",
    "Sampling",
    "attempt",
    "ban_",
    "cell_seed",
    "gumbel",
    "in_parts",
    "mix64",
    "one_hot_",
    "pick",
    "settle_",
]

# SplitMix64: the Weyl increment and the multipliers of its finaliser (Steele, Lea and Flood,
# "Fast splittable pseudorandom number generators", OOPSLA 2014), as signed 64-bit numbers.
_WEYL = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)

# How many entries beyond top_k are looked at, so that ties at its edge are seen; and how many
# where top_k is off. A row whose support reaches the end of its list is done on the whole row.
_TIE_ROOM = 16
_OPEN_PREFIX = 512
# Entries of whole rows that are worked on together, on a CPU and elsewhere: the first should stay
# in the cache, the others want few kernels within their memory. Rows that are sorted whole have
# some ten numbers an entry.
_OPEN = (1 << 18, 1 << 24)
_SORTED = (1 << 19, 1 << 22)


class BadLogits(ValueError):
    """A row cannot be sampled from.

    Attributes:
        row: Index of the row in the logits.
        reason: What is wrong with it.
    """

    def __init__(self, row: int, reason: str) -> None:
        super().__init__(f"row {row}: {reason}")
        self.row = row
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a token is chosen from logits, in vLLM's order: temperature, min_p, top_k, top_p.

    Attributes:
        temperature: 0 for greedy (the other settings then change nothing), else at least 0.01
            (below it vLLM itself clamps, so that a smaller value would not mean what it says).
        top_p: Nucleus mass in (0, 1]; 1 is off.
        top_k: Largest support; 0 is off. Ties at its edge are all kept.
        min_p: Least probability relative to the best token's, in [0, 1); 0 is off.

    Raises:
        ValueError: A value is out of range; the message names it.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        if isinstance(self.top_k, bool) or not isinstance(self.top_k, int) or self.top_k < 0:
            raise ValueError(f"top_k is {self.top_k!r}; expected a whole number, 0 (off) or more")
        if not (self.temperature == 0 or 0.01 <= self.temperature < math.inf):
            raise ValueError(f"temperature is {self.temperature}; expected 0 (greedy) or ≥ 0.01")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; expected 0 < top_p ≤ 1")
        if not 0 <= self.min_p < 1:
            raise ValueError(f"min_p is {self.min_p}; expected 0 ≤ min_p < 1")

    @property
    def greedy(self) -> bool:
        """Whether the pick is the highest logit."""
        return self.temperature == 0

    @property
    def truncates(self) -> bool:
        """Whether the support can be smaller than the vocabulary, so that a ban can move it."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)


def cell_seed(run_seed: int, benchmark: str, problem: str, repeat: int) -> int:
    """Returns the 63-bit seed of a cell, the same on every machine and for every candidate."""
    text = f"{run_seed}\x1f{benchmark}\x1f{problem}\x1f{repeat}".encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift of int64 (torch's own keeps the sign)."""
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def mix64(z: Tensor) -> Tensor:
    """SplitMix64's finaliser on int64 (products wrap modulo 2^64)."""
    z = (z ^ _shift_right(z, 30)) * _MIX_1
    z = (z ^ _shift_right(z, 27)) * _MIX_2
    return z ^ _shift_right(z, 31)


def gumbel(seeds: Tensor, positions: Tensor, tokens: Tensor) -> Tensor:
    """Standard Gumbel noise as a function of (seed, position, token id).

    The bits are those of SplitMix64 started at a hash of (seed, position) and read at index token
    id; 52 of them make a uniform number in (0, 1), taken near 0 if the noise is large, so that
    noise up to 36.7 is resolved. Integer arithmetic alone decides the bits, so they are the same
    on every device; the two logarithms are float64.

    Args:
        seeds: int64, broadcastable.
        positions: int64, broadcastable; tokens that stand before the one to be picked.
        tokens: int64, broadcastable.

    Returns:
        float64 of the broadcast shape.
    """
    key = mix64(mix64(seeds + _WEYL) ^ (positions + 1) * _WEYL)
    bits = _shift_right(mix64(key + (tokens + 1) * _WEYL), 12)
    uniform = bits.to(torch.float64).add_(0.5).mul_(2.0**-52)
    return uniform.neg_().log1p_().neg_().log_().neg_()


class Rows:
    """The settings of a batch's rows, as tensors on the logits' device.

    Built when the batch changes and used for many steps: only positions change at each step.

    Attributes:
        seeds: (B,) int64.
        greedy, open, truncated: (n,) int64 indices of the rows of each kind, or None for none.
        place: (B,) int64, where a row is among the truncated ones; 0 for others.
    """

    def __init__(
        self,
        samplings: Sequence[Sampling],
        seeds: Sequence[int],
        device: torch.device | str = "cpu",
    ) -> None:
        if len(samplings) != len(seeds):
            raise ValueError(f"{len(samplings)} settings for {len(seeds)} seeds")

        def column(values: Sequence[float], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        def rows_where(flags: Sequence[bool]) -> Tensor | None:
            found = [row for row, flag in enumerate(flags) if flag]
            return column(found, torch.int64) if found else None

        self.seeds = column(seeds, torch.int64)
        self.temperature = column([s.temperature for s in samplings], torch.float64)
        self.top_p = column([s.top_p for s in samplings], torch.float64)
        self.top_k = column([s.top_k for s in samplings], torch.int64)
        self.log_min_p = column([s.min_p for s in samplings], torch.float64).log_()
        greedy, truncates = [s.greedy for s in samplings], [s.truncates for s in samplings]
        self.greedy, self.truncated = rows_where(greedy), rows_where(truncates)
        self.open = rows_where([not g and not t for g, t in zip(greedy, truncates, strict=True)])
        cut = [s for s, flag in zip(samplings, truncates, strict=True) if flag]
        has_open_top = any(s.top_k == 0 for s in cut)
        self.has_unlimited = any(s.top_k == 0 and s.min_p == 0 for s in cut)
        largest = max((s.top_k for s in cut), default=0)
        self.prefix = max(largest + _TIE_ROOM, _OPEN_PREFIX if has_open_top else 0)
        self.has_nucleus = any(s.top_p < 1 for s in cut)
        self.is_truncated = torch.tensor(truncates, dtype=torch.bool, device=device)
        self.place = _places(self.is_truncated)

    def take(self, index: Tensor) -> Rows:
        """The settings of the rows at index (k,), which may repeat."""
        taken = object.__new__(Rows)
        for name in ("seeds", "temperature", "top_p", "top_k", "log_min_p", "is_truncated"):
            setattr(taken, name, getattr(self, name)[index])
        greedy = taken.temperature == 0

        def where(flags: Tensor) -> Tensor | None:
            found = flags.nonzero()[:, 0]
            return found if found.shape[0] else None

        taken.greedy, taken.truncated = where(greedy), where(taken.is_truncated)
        taken.open = where(~greedy & ~taken.is_truncated)
        taken.place = _places(taken.is_truncated)
        taken.prefix, taken.has_unlimited = self.prefix, self.has_unlimited
        taken.has_nucleus = self.has_nucleus
        return taken

    def __len__(self) -> int:
        return self.seeds.shape[0]


def _places(flags: Tensor) -> Tensor:
    return (flags.cumsum(0) - 1).clamp_(min=0)


def in_parts(index: Tensor, width: int, entries: tuple[int, int] = _SORTED) -> tuple[Tensor, ...]:
    """Splits row indices (n,) so that rows of `width` have at most so many entries together."""
    if not index.shape[0]:
        return ()
    return torch.split(index, max(1, entries[index.device.type != "cpu"] // width))


def ban_(logits: Tensor, rows: Tensor, tokens: Tensor) -> None:
    """Sets logits[rows[i], tokens[i]] to −∞, in place.

    Args:
        logits: (B, V), any float dtype.
        rows: (N,) int64.
        tokens: (N,) int64, each in [0, V).
    """
    logits[rows, tokens] = -math.inf


def one_hot_(logits: Tensor, rows: Tensor, picks: Tensor) -> None:
    """Makes each of the rows 0 at its pick and −∞ elsewhere, in place.

    An engine that then takes the highest logit takes our pick.

    Args:
        logits: (B, V), any float dtype.
        rows: (n,) int64.
        picks: (n,) int64.
    """
    logits[rows] = -math.inf
    logits[rows, picks] = 0.0


@dataclass(frozen=True, slots=True)
class Attempt:
    """Picks that are on their way: nothing has waited for the device yet.

    Attributes:
        picks: (B,) int64.
        best: (B,) float32 highest logits; a row where it is not finite cannot be sampled from.
        void: (n,) bool, which of the n truncated rows have a support that was not seen whole.
        top: The best tokens of the truncated rows; None if there are none.
        score: (n, L) float64, logit over temperature plus noise of those tokens.
    """

    picks: Tensor
    best: Tensor
    void: Tensor
    top: Top | None
    score: Tensor

    @property
    def trouble(self) -> Tensor:
        """(n + B,) bool; `settle_` is needed if any is set."""
        return torch.cat([self.void, ~self.best.isfinite()])


def attempt(logits: Tensor, rows: Rows, positions: Tensor) -> Attempt:
    """The first half of `pick`, whose arguments it takes, without waiting for the device."""
    if logits.shape[0] != len(rows) or positions.shape != (len(rows),):
        raise ValueError(
            f"logits {tuple(logits.shape)} and positions {tuple(positions.shape)} for {len(rows)} rows"
        )
    picks = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
    best = torch.empty(len(rows), dtype=torch.float32, device=logits.device)
    if rows.greedy is not None:
        part = _take(logits, rows.greedy)
        picks[rows.greedy] = part.argmax(dim=1)
        best[rows.greedy] = part.gather(1, picks[rows.greedy, None])[:, 0].float()
    if rows.open is not None:
        for index in in_parts(rows.open, logits.shape[1], _OPEN):
            part = _take(logits, index)
            picks[index] = _pick_open(part, rows, index, positions[index])
            best[index] = part.amax(dim=1).float()
    if rows.truncated is None:
        return Attempt(picks, best, best[:0] > 0, None, best[:0])
    part = _take(logits, rows.truncated)
    chosen, complete, top, score = _pick_truncated(
        part, rows, rows.truncated, positions[rows.truncated], rows.prefix
    )
    picks[rows.truncated], best[rows.truncated] = chosen, top.best
    return Attempt(picks, best, ~complete, top, score)


def settle_(
    found: Attempt, logits: Tensor, rows: Rows, positions: Tensor, *, arbitrary: bool = False
) -> None:
    """The second half of `pick`: void picks are made again from whole rows, in place.

    Raises:
        BadLogits: As for `pick`.
    """
    bad = ~found.best.isfinite()
    if bad.any() and not arbitrary:
        raise _bad_logits(found.best, bad)
    if rows.truncated is None or not found.void.any():
        return
    width = logits.shape[1]
    for again in in_parts(rows.truncated[found.void], width):
        found.picks[again] = _pick_truncated(logits[again], rows, again, positions[again], width)[0]


def pick(logits: Tensor, rows: Rows, positions: Tensor, *, arbitrary: bool = False) -> Tensor:
    """Picks a token for each row: the coupled sample, or the highest logit where greedy.

    Ties: greedy takes the lowest id; top_k keeps all tokens that equal the k-th; at the edge of
    the nucleus higher ids stay (where vLLM leaves the choice to an unstable sort).

    Args:
        logits: (B, V) float32, bfloat16 or float16, bans applied. Not changed.
        rows: The settings of the B rows.
        positions: (B,) int64; tokens that stand before the one to be picked (prompt included).
        arbitrary: Rows that cannot be sampled from get an arbitrary token instead of an error.

    Returns:
        (B,) int64 token ids.

    Raises:
        BadLogits: A row has NaN or +∞ among its best entries, or nothing but −∞.
    """
    found = attempt(logits, rows, positions)
    # The one wait for the device in a step; in nearly all of them there is no trouble.
    if found.trouble.any():
        settle_(found, logits, rows, positions, arbitrary=arbitrary)
    return found.picks


def _bad_logits(best: Tensor, bad: Tensor) -> BadLogits:
    row = int(bad.nonzero()[0, 0])
    value = float(best[row])
    reason = (
        "every token is banned" if value == -math.inf else "its highest logit is NaN or infinite"
    )
    return BadLogits(row, reason)


def _take(logits: Tensor, index: Tensor) -> Tensor:
    """The rows at index, without a copy where these are all rows."""
    return logits if index.shape[0] == logits.shape[0] else logits[index]


def _pick_open(part: Tensor, rows: Rows, index: Tensor, positions: Tensor) -> Tensor:
    """Picks over the whole vocabulary. part (n, V), index and positions (n,) -> (n,)."""
    tokens = torch.arange(part.shape[1], device=part.device)
    score = gumbel(rows.seeds[index, None], positions[:, None], tokens)
    score += part.to(torch.float64) / rows.temperature[index, None]
    return score.argmax(dim=1)


def _pick_truncated(
    part: Tensor, rows: Rows, index: Tensor, positions: Tensor, prefix: int
) -> tuple[Tensor, Tensor, Top, Tensor]:
    """Picks within the support, looking only at the `prefix` highest logits of each row.

    Args:
        part: (n, V) logits of the rows at index (n,).
        prefix: How many entries to look at.

    Returns:
        (n,) picks; (n,) bool, whether the support was seen whole (else the pick is void); the
        lists; (n, L) float64 scores.
    """
    top = Top(part, rows, index, prefix)
    keep, complete = top.support()
    score = top.x + gumbel(rows.seeds[index, None], positions[:, None], top.ids)
    place = torch.where(keep, score, -math.inf).argmax(dim=1, keepdim=True)
    return top.ids.gather(1, place)[:, 0], complete, top, score
