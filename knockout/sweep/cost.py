"""What a sweep will cost, before its knockouts are generated.

A fork generates what follows its divergence step, so its cost depends on where its tokens first
occur. Two sources tell that: baseline trajectories (the very tokens), or frequencies (how often a
token occurs per trajectory, positions assumed uniform). With truncation a ban also diverges if it
only moves the support, so a token that is never picked but often among the most likely can fork.
Neither source shows that share, so it enters as a measured number, `SUPPORT_MOVES`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["Cost", "cost_from_frequency", "cost_from_trajectories", "rates_of", "with_pairs"]

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Cost:
    """Expected cost of each candidate, per cell.

    Attributes:
        forks: (C,) share of cells that fork.
        tokens: (C,) generated tokens.
        length: Mean length of a baseline trajectory, in tokens.
    """

    forks: Floats
    tokens: Floats
    length: float


def rates_of(trajectories: Sequence[NDArray[np.integer]], bans: Sequence[Sequence[int]]) -> Floats:
    """(C,) how often a token of each ban occurs per trajectory, on average."""
    counts = np.zeros(len(bans))
    for tokens in trajectories:
        kinds, n = np.unique(tokens, return_counts=True)
        of = dict(zip(kinds.tolist(), n.tolist(), strict=True))
        counts += [sum(of.get(int(token), 0) for token in ban) for ban in bans]
    return counts / max(len(trajectories), 1)


def cost_from_trajectories(
    trajectories: Sequence[NDArray[np.integer]],
    bans: Sequence[Sequence[int]],
    *,
    truncates: bool,
    support_moves: float = 0.0,
) -> Cost:
    """Predicts from baseline trajectories; assumes that a fork ends where its baseline ended.

    Args:
        trajectories: Token ids of baselines of the benchmark.
        bans: C sets of token ids.
        truncates: Whether the sampling settings truncate.
        support_moves: Divergences by a moved support per occurrence of the token (measured; see
            `bench/`). Without truncation there are none.

    Returns:
        Means over the trajectories.
    """
    forks, tokens = np.zeros(len(bans)), np.zeros(len(bans))
    extra = rates_of(trajectories, bans) * support_moves if truncates else np.zeros(len(bans))
    for trajectory in trajectories:
        length = len(trajectory)
        first = first_pick(np.asarray(trajectory, dtype=np.int64), bans)
        hazard = extra / max(length, 1)
        # With a constant hazard before the first pick (or the end): P(fork) and E[what is left].
        missed = np.exp(-hazard * first)
        forks += np.where(first < length, 1.0, 1.0 - missed)
        expected_start = np.where(
            hazard > 0, (1.0 - missed) / np.where(hazard > 0, hazard, 1.0), first
        )
        tokens += length - expected_start
    n = max(len(trajectories), 1)
    mean_length = sum(map(len, trajectories)) / n
    return Cost(forks / n, tokens / n, mean_length)


def cost_from_frequency(rates: ArrayLike, length: float) -> Cost:
    """Predicts from frequencies, occurrences spread uniformly and independently (Poisson).

    With rate λ per trajectory a fork happens with probability 1 − e^(−λ), and the part after the
    first occurrence is 1 − (1 − e^(−λ)) / λ of the trajectory on average.

    Args:
        rates: (C,) occurrences per trajectory.
        length: Mean length of a trajectory, in tokens.

    Example:
        >>> cost_from_frequency([0.0, 1.0], 100.0).tokens.round(1).tolist()
        [0.0, 36.8]
    """
    rate = np.asarray(rates, dtype=np.float64)
    forks = -np.expm1(-rate)
    share = 1.0 - np.where(rate > 0, forks / np.where(rate > 0, rate, 1.0), 1.0)
    return Cost(forks, share * length, length)


def with_pairs(cost: Cost, members: Mapping[int, tuple[int, int]]) -> Cost:
    """Lets pairs start where they leave the fork of a member, instead of the baseline.

    A pair leaves the fork of the member that matters first where the other one first matters. That
    fork's rest is taken to be like the baseline's, so the pair generates what follows the later of
    the two steps: T − max(a, b) = (T − a) + (T − b) − (T − min(a, b)), the tokens of both members
    less those of the union banned from the baseline on.

    Args:
        cost: As if all candidates left the baseline.
        members: For each pair the places of its members.

    Returns:
        The same with the tokens of the pairs lowered. Shares are still of cells in which a candidate
        leaves the baseline.
    """
    tokens = cost.tokens.copy()
    for pair, (one, other) in members.items():
        tokens[pair] = max(0.0, cost.tokens[one] + cost.tokens[other] - cost.tokens[pair])
    return replace(cost, tokens=tokens)


def first_pick(tokens: NDArray[np.int64], bans: Sequence[Sequence[int]]) -> NDArray[np.int64]:
    """First step at which each ban's token was picked.

    Args:
        tokens: (T,) int64.
        bans: C sets of token ids, none of them empty.

    Returns:
        (C,) int64 steps, T if none was picked.
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
    return np.asarray(np.minimum.reduceat(first, starts))
