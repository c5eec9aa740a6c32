"""Where a knockout leaves its baseline, found on the host from what the engine reported.

A knockout shares the baseline's noise, so up to the first step at which it would pick another
token it *is* the baseline. Without truncation (and for greedy decoding) that is the first step at
which the baseline picked a banned token. With truncation a ban can also move the support: it
frees a place in top_k, renormalises top_p, lowers min_p's reference. Whether that changes the
pick follows from the highest raw log-probabilities of the baseline's steps.

What the list does not show is bounded, not guessed: the unlisted tokens' logits by the last
listed one, their mass by what the listed ones leave, their noise by its largest value. A step
counts as unchanged only where every possibility within these bounds (and within rounding) gives
the same pick; otherwise it is a divergence. So a fork is never late, and an early one only costs
tokens, since its continuation reproduces the baseline up to the true divergence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from knockout.method.sampling import Sampling, gumbel

__all__ = ["Divergences", "find_divergences", "first_pick", "logprobs_needed"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

# Raw log-probabilities are float32 differences of numbers of some tens: they are trusted to this.
_LOGPROB_ERROR = 4e-5
# Reported entries beyond those that a ban can bring in, so that ties at the edge are seen.
_SLACK = 4
# List length where nothing but the nucleus (or min_p) ends the support.
_OPEN_LIST = 64
# Joint bans longer than this do not lengthen the list further: they fork early instead.
_LONGEST_BAN = 64
_ROWS_AT_ONCE = 16384


@dataclass(frozen=True, slots=True)
class Divergences:
    """What the baseline of one cell says about its knockouts.

    Attributes:
        step: (C,) int32, the divergence step of each ban, counted from the first generated
            token; −1 where the knockout is inherited.
        early: (C,) bool, where the step is one at which the lists could not exclude a difference
            (the true divergence may be later or absent).
        n_checked: Steps at which the lists determine the baseline's own pick.
        n_coupling_errors: Those at which the engine emitted another token than that pick.
    """

    step: NDArray[np.int32]
    early: Bools
    n_checked: int
    n_coupling_errors: int


def logprobs_needed(sampling: Sampling, largest_ban: int = 1) -> int:
    """How many of the highest raw log-probabilities a baseline must report for each step.

    Args:
        sampling: How its tokens are picked.
        largest_ban: Token ids in the largest candidate.

    Returns:
        0 where a ban can only act through the banned token's own pick.
    """
    if not sampling.truncates:
        return 0
    support = sampling.top_k or _OPEN_LIST
    return support + min(largest_ban, _LONGEST_BAN) + _SLACK


def find_divergences(
    tokens: NDArray[np.integer],
    top_ids: NDArray[np.integer] | None,
    top_logprobs: NDArray[np.floating] | None,
    bans: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    seed: int,
    first_position: int,
    vocab_size: int,
) -> Divergences:
    """Finds the first step at which each knockout would pick another token than the baseline.

    Args:
        tokens: (T,) the baseline's trajectory.
        top_ids: (T, L) ids of the highest raw log-probabilities at each step, best first; may be
            None where `logprobs_needed` is 0.
        top_logprobs: (T, L) those log-probabilities (natural log, temperature 1, no ban).
        bans: C sets of token ids, none of them empty.
        sampling: How the tokens were picked.
        seed: The cell's seed.
        first_position: Tokens before the first generated one: the length of the prompt.
        vocab_size: Width of the logits.

    Returns:
        The divergence steps and the self-check of the coupling.

    Raises:
        ValueError: The settings truncate and no lists were given, or shapes do not fit.
    """
    emitted: Ints = np.asarray(tokens, dtype=np.int64)
    picked = first_pick(emitted, bans)
    never = len(emitted)
    early = np.zeros(len(bans), dtype=bool)
    if not sampling.truncates or not never:
        step = np.where(picked < never, picked, -1).astype(np.int32)
        return Divergences(step, early, 0, 0)
    if top_ids is None or top_logprobs is None:
        raise ValueError("truncated sampling needs the baseline's highest log-probabilities")
    if top_ids.shape != top_logprobs.shape or top_ids.shape[0] != never:
        raise ValueError(
            f"{never} tokens with lists of shape {top_ids.shape} and {top_logprobs.shape}"
        )
    steps = _Steps(emitted, top_ids, top_logprobs, sampling, seed, first_position, vocab_size)
    own = steps.check_own_pick()

    first = picked.copy()
    singles = np.array([c for c, ban in enumerate(bans) if len(ban) == 1], dtype=np.int64)
    if len(singles):
        ids = np.array([bans[c][0] for c in singles], dtype=np.int64)
        first[singles], early[singles] = _single_bans(steps, ids, picked[singles])
    for c, ban in enumerate(bans):
        if len(ban) > 1:
            first[c], early[c] = _joint_ban(steps, np.asarray(ban, dtype=np.int64), picked[c])
    step = np.where(first < never, first, -1).astype(np.int32)
    return Divergences(
        step,
        early,
        n_checked=int((own.same | own.differs).sum()),
        n_coupling_errors=int(own.differs.sum()),
    )


def first_pick(tokens: Ints, bans: Sequence[Sequence[int]]) -> Ints:
    """First step at which each ban's token was picked.

    Args:
        tokens: (T,) int64.
        bans: C sets of token ids, none of them empty.

    Returns:
        (C,) int64 steps, T where none was picked.
    """
    if not bans:
        return np.empty(0, dtype=np.int64)
    never = len(tokens)
    flat = np.concatenate([np.asarray(ban, dtype=np.int64) for ban in bans])
    starts = np.cumsum([0] + [len(ban) for ban in bans[:-1]])
    first = np.full(len(flat), never, dtype=np.int64)
    if never:
        kinds, at = np.unique(tokens, return_index=True)
        slot = np.searchsorted(kinds, flat).clip(max=len(kinds) - 1)
        first = np.where(kinds[slot] == flat, at[slot], never)
    return np.minimum.reduceat(first, starts)


def _single_bans(steps: _Steps, given: Ints, picked_of: Ints) -> tuple[Ints, Bools]:
    """First divergence of each one-token ban. given, picked_of (C,) -> (C,) step, (C,) early."""
    ids, index, back = np.unique(given, return_index=True, return_inverse=True)
    picked = picked_of[index]
    first = picked.copy()
    early = np.zeros(len(ids), dtype=bool)
    # Listed: each (step, place) where a candidate stands in the list before its first pick.
    candidate = np.searchsorted(ids, steps.ids).clip(max=len(ids) - 1)
    listed = ids[candidate] == steps.ids
    listed &= np.arange(len(steps.ids))[:, None] < picked[candidate]
    row, place = np.nonzero(listed)
    for part in range(0, len(row), _ROWS_AT_ONCE):
        r, j = row[part : part + _ROWS_AT_ONCE], place[part : part + _ROWS_AT_ONCE]
        banned = np.zeros((len(r), steps.x.shape[1]), dtype=bool)
        banned[np.arange(len(r)), j] = True
        found = steps.compare(r, banned, 0)
        # Rows rise, so the first hit of a candidate is its earliest.
        changed = np.flatnonzero(~found.same)
        who, at = np.unique(candidate[r[changed], j[changed]], return_index=True)
        sooner = r[changed][at] < first[who]
        first[who[sooner]] = r[changed][at][sooner]
        early[who[sooner]] = ~found.differs[changed][at][sooner]
    # Unlisted: the ban can matter only where the support reaches past the list.
    nothing = np.zeros(steps.x.shape, dtype=bool)
    wide = np.flatnonzero(~steps.compare(np.arange(len(steps.ids)), nothing, 1).same)
    for t in wide:
        if not (first > t).any():
            break
        here = (first > t) & ~np.isin(ids, steps.ids[t])
        first[here] = t
        early[here] = True
    return first[back], early[back]


def _joint_ban(steps: _Steps, ban: Ints, picked: int) -> tuple[int, bool]:
    """First divergence of a ban of several tokens."""
    banned = np.isin(steps.ids, ban)
    for part in range(0, min(picked, len(banned)), _ROWS_AT_ONCE):
        rows = np.arange(part, min(picked, part + _ROWS_AT_ONCE))
        found = steps.compare(rows, banned[rows], len(ban))
        if not found.same.all():
            at = int(np.argmin(found.same))
            return int(rows[at]), not bool(found.differs[at])
    return picked, False


@dataclass(frozen=True, slots=True)
class _Outcome:
    """same: the pick is surely the baseline's; differs: it surely is another one. (N,) each."""

    same: Bools
    differs: Bools


class _Steps:
    """The baseline's steps, with everything that does not depend on the ban computed once."""

    def __init__(
        self,
        tokens: Ints,
        top_ids: NDArray[np.integer],
        top_logprobs: NDArray[np.floating],
        sampling: Sampling,
        seed: int,
        first_position: int,
        vocab_size: int,
    ) -> None:
        self.sampling = sampling
        self.vocab_size = vocab_size
        self.seed = seed
        self.first_position = first_position
        self.ids = np.asarray(top_ids, dtype=np.int64)
        logprobs = np.asarray(top_logprobs, dtype=np.float64)
        n_steps, n_listed = self.ids.shape
        self.n_hidden = vocab_size - n_listed
        temperature = sampling.temperature
        self.error = _LOGPROB_ERROR / temperature
        self.x = logprobs / temperature
        positions = torch.arange(first_position, first_position + n_steps)[:, None]
        noise = gumbel(torch.tensor(seed), positions, torch.from_numpy(self.ids)).numpy()
        self.score = self.x + noise

        is_pick = self.ids == tokens[:, None]
        self.pick_listed = is_pick.any(axis=1)
        self.pick_place = is_pick.argmax(axis=1)
        pick_score = np.take_along_axis(self.score, self.pick_place[:, None], axis=1)[:, 0]
        self.pick_score = np.where(self.pick_listed, pick_score, np.nan)

        # For each place: how many entries are above it, and at or above it, within rounding.
        self.above = np.empty(self.ids.shape, dtype=np.int64)
        self.level = np.empty(self.ids.shape, dtype=np.int64)
        for j in range(n_listed):
            level = self.x[:, j : j + 1]
            self.above[:, j] = (self.x > level + self.error).sum(axis=1)
            self.level[:, j] = (self.x >= level - self.error).sum(axis=1)
        self.log_hidden_low, self.log_hidden_high = self._log_hidden_mass(logprobs)
        self._hidden_noise: dict[int, float] = {}
        rows, nothing = np.arange(n_steps), np.zeros(self.ids.shape, dtype=bool)
        own = self._support(rows, nothing, 0)
        self.own_sure, self.own_maybe, self.own_hidden, self.own_open = own

    def _log_hidden_mass(self, logprobs: Floats) -> tuple[Floats, Floats]:
        """Bounds on log Σ exp(ℓ/T) over the unlisted tokens, (T,) each.

        They are n tokens whose probabilities add up to the rest r and are at most the last listed
        one, q. Σ p^(1/T) is extreme where the rest is spread evenly, n (r/n)^(1/T), or piled up
        at q, r q^(1/T − 1).
        """
        if self.n_hidden <= 0:
            nothing = np.full(len(logprobs), -np.inf)
            return nothing, nothing
        rest = 1.0 - np.exp(logprobs).sum(axis=1)
        log_n, power = np.log(self.n_hidden), 1.0 / self.sampling.temperature

        def both(rest: Floats) -> tuple[Floats, Floats]:
            with np.errstate(divide="ignore"):
                log_rest = np.log(rest.clip(min=0.0))
            return log_n + power * (log_rest - log_n), log_rest + (power - 1.0) * logprobs[:, -1]

        return np.minimum(*both(rest - _LOGPROB_ERROR)), np.maximum(*both(rest + _LOGPROB_ERROR))

    def check_own_pick(self) -> _Outcome:
        """Compares what the engine emitted with the pick that the lists make, (T,)."""
        rows = np.arange(len(self.ids))
        return self._compare(rows, self.own_sure, self.own_maybe, self.own_hidden)

    def compare(self, rows: Ints, banned: Bools, n_unlisted: int) -> _Outcome:
        """Compares the pick under a ban with the baseline's.

        A token that surely was in the baseline's support lost there to the emitted one on the
        device itself, and a ban changes neither score: only newcomers can win.

        Args:
            rows: (N,) steps.
            banned: (N, L) which listed tokens are banned there.
            n_unlisted: Upper bound on the banned tokens that are not listed.
        """
        sure, maybe, hidden, _ = self._support(rows, banned, n_unlisted)
        place = self.pick_place[rows, None]
        beaten = self.own_sure[rows]
        np.put_along_axis(beaten, place, False, axis=1)
        found = self._compare(rows, sure, maybe & ~beaten, hidden)
        # Where min_p and top_k leave listed tokens only, a ban of others changes nothing at all.
        untouched = ~banned.any(axis=1) & ~self.own_open[rows]
        return _Outcome(found.same | untouched, found.differs & ~untouched)

    def _compare(self, rows: Ints, sure: Bools, maybe: Bools, hidden: Bools) -> _Outcome:
        """The emitted token against the members of a support (as `_support` returns it)."""
        place = self.pick_place[rows, None]
        listed = self.pick_listed[rows]
        goal = self.pick_score[rows]
        slack = self.error + 1e-9

        def at_pick(flags: Bools) -> Bools:
            return np.asarray(np.take_along_axis(flags, place, axis=1)[:, 0] & listed)

        score = self.score[rows]
        with np.errstate(invalid="ignore"):
            rivals = score >= goal[:, None] - slack
            winners = score > goal[:, None] + slack
        np.put_along_axis(rivals, place, False, axis=1)
        same = at_pick(sure) & ~(maybe & rivals).any(axis=1)
        # Unlisted tokens may be in the support: none may win even with its largest noise.
        for n in np.flatnonzero(same & hidden):
            t = int(rows[n])
            same[n] = self.x[t, -1] + self.hidden_noise(t) < goal[n] - slack
        gone = np.where(listed, ~at_pick(maybe), ~hidden)
        differs = gone | (listed & (sure & maybe & winners).any(axis=1))
        return _Outcome(same, differs & ~same)

    def hidden_noise(self, t: int) -> float:
        """Largest noise of an unlisted token at step t."""
        if t not in self._hidden_noise:
            position = torch.tensor(self.first_position + t)
            noise = gumbel(torch.tensor(self.seed), position, torch.arange(self.vocab_size))
            noise[torch.from_numpy(self.ids[t])] = -torch.inf
            self._hidden_noise[t] = float(noise.max())
        return self._hidden_noise[t]

    def _support(
        self, rows: Ints, banned: Bools, n_unlisted: int
    ) -> tuple[Bools, Bools, Bools, Bools]:
        """Which listed tokens surely are, and may be, in the support; whether unlisted ones may.

        Returns:
            (N, L) sure, (N, L) maybe, (N,) hidden, (N,) whether unlisted tokens may pass min_p
            and top_k (and so count in the nucleus' mass).
        """
        x, above, level = self.x[rows], self.above[rows], self.level[rows]
        n_listed = x.shape[1]
        left = ~banned
        has_hidden = np.full(len(rows), self.n_hidden > 0)
        sure, maybe, hidden = left.copy(), left.copy(), has_hidden.copy()
        # Within rounding of the last listed token, unlisted ones may stand level with it.
        at_end = (level == n_listed) & has_hidden[:, None]

        top = np.where(left, x, -np.inf).max(axis=1)
        # With every listed token banned the best one is unknown, but not above the last listed.
        sure &= np.isfinite(top)[:, None]
        top = np.where(np.isfinite(top), top, x[:, -1])
        if self.sampling.min_p > 0:
            bar = top + np.log(self.sampling.min_p)
            sure &= x >= bar[:, None] + self.error
            maybe &= x >= bar[:, None] - self.error
            hidden &= x[:, -1] >= bar - self.error
        k = self.sampling.top_k
        limited = 0 < k < self.vocab_size
        if limited:
            count = _running_sum(left.astype(np.float64))
            sure &= (np.take_along_axis(count, level, axis=1) <= k) & ~at_end
            maybe &= np.take_along_axis(count, above, axis=1) < k
            hidden &= np.take_along_axis(count, above[:, -1:], axis=1)[:, 0] < k
        open_ = hidden.copy()
        if self.sampling.top_p < 1:
            # Weights relative to the best token left, so that none of them vanishes beside it.
            with np.errstate(over="ignore"):
                weight = np.where(left, np.exp(x - top[:, None]), 0.0)
                last = np.exp(x[:, -1] - top)
                unlisted = np.exp(self.log_hidden_high[rows] - top)
                known = np.exp(self.log_hidden_low[rows] - top) - n_unlisted * last
            least, most = np.where(sure, weight, 0.0), np.where(maybe, weight, 0.0)
            total_low = least.sum(axis=1)
            total_high = most.sum(axis=1) + np.where(hidden, unlisted, 0.0)
            if not limited and self.sampling.min_p == 0:
                total_low += known.clip(min=0.0)
            trust = 2 * self.error + 1e-9
            cap_low = self.sampling.top_p * total_low * (1 - trust)
            cap_high = self.sampling.top_p * total_high * (1 + trust)
            before_high = np.take_along_axis(_running_sum(most), level, axis=1) - most
            before_low = np.take_along_axis(_running_sum(least), above, axis=1)
            sure &= (before_high < cap_low[:, None]) & ~at_end
            maybe &= before_low < cap_high[:, None]
            hidden &= before_low[:, -1] < cap_high
        return sure, maybe, hidden, open_


def _running_sum(values: Floats | Ints) -> Floats:
    """(N, L) -> (N, L + 1): what stands before each place, and the whole at the end."""
    out = np.zeros((values.shape[0], values.shape[1] + 1))
    np.cumsum(values, axis=1, out=out[:, 1:])
    return out
