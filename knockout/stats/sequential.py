"""Racing: verdicts that stay valid when one looks after every round of seeds.

An e-value is a bet against a hypothesis that cannot be expected to win: E[e] ≤ 1 if it is true.
e ≥ 1/alpha rejects at level alpha. The bets here are capital processes for a bounded mean
(Waudby-Smith & Ramdas, JRSS-B 86, 2024): against "Δ ≥ δ", a unit with difference d multiplies the
capital by 1 − λ(d − δ), 0 < λ ≤ 1/(1 − δ), and the capital is averaged over a fixed set of λ
(the method of mixtures), so that neither the order of problems nor tuning matters.

**Why a whole round may be bet on at once.** Problems of one benchmark differ in their Δ_p, so
cells are not draws with one mean. They are independent given the problems (each cell has its own
seed), hence for a fixed λ a round's product has expectation Π_p (1 − λ(Δ_p − δ)), which is at most
(1 − λ(Δ − δ))^P ≤ 1 whenever the mean Δ of the Δ_p is ≥ δ, by the inequality of arithmetic and
geometric means. No order of cells is needed, and an inherited cell, d = 0, is known for free.

*Target `benchmark`* (these problems): rounds are independent given the problems, so the capital
is multiplied from round to round and is a supermartingale. Valid at every stopping time by
Ville's inequality.

*Target `population`* (problems are a sample): repeats of a problem are no new draws and must not
be multiplied. At round r each problem has its mean over r seeds, in [−1, 1], and problems are
independent draws: the product over problems is an e-value E_r. A look at round r adds w_r E_r to
the evidence, with weights fixed beforehand that sum to 1. The running sum never shrinks and its
expectation at the last planned round is ≤ 1, hence at every stopping time too. The price is a
factor of at most the number of planned rounds, log(16) = 2.8 units of log-evidence.
Means over seeds are small against the bounds ±1, so bounded bets starve on 30 problems. Effects
are therefore bet on with the null of the sign-flip test: given its size, each problem's sign is a
fair coin, so 1 + tanh(λd) has expectation 1 for every λ (de la Peña 1999), even one chosen from the
sizes. λ is a multiple of 1 / max|d|, where tanh is nearly linear; as log(1 + tanh x) ≤ x, evidence
shrinks under every other null of mean zero as well. Equivalence and intervals need the mean
itself and keep the bounded bets.

With several candidates, e-BH (Wang & Ramdas 2022) needs nothing but E[e] ≤ 1 for each: it holds
under any dependence and with a different stopping time for each candidate. A settled candidate's
e-value is frozen, so what was once rejected stays rejected.

A candidate whose verdict more rounds would hardly change may be dropped as futile (`futility`).
It makes no claim, so it counts as e = 0 from then on, which is a bet as fair as any.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from .futility import chance_by_rule, progress
from .multiplicity import ebh
from .paired import Floats, Pairs, Tally, tally_problems

__all__ = [
    "BETS",
    "SIGN_BETS",
    "Settlement",
    "bounded_p",
    "confidence_sequence",
    "log_capital",
    "log_sign_capital",
    "settle",
]

BETS: Floats = np.concatenate([2.0 ** (-np.arange(8, 0, -1) / 2), [0.8, 0.86, 0.92, 0.96, 0.98]])
"""The λ of the mixture, as shares of the largest admissible one: small ones for small effects among
many differing cells, large ones for the many units that do not differ at all."""

SIGN_BETS: Floats = 2.0 ** (np.arange(-8, 3) / 2)
"""The λ of the bets on signs, as multiples of 1 / the largest difference of a problem."""

Status = Literal["open", "pillar", "stumbling_block", "equivalent", "futile"]


@dataclass(frozen=True, slots=True)
class Settlement:
    """The state of each of C candidates after the rounds that were run.

    Attributes:
        status: (C,) "pillar", "stumbling_block", "equivalent", "futile" or "open".
        settled_round: (C,) int64, the round (from 1) after which it was settled; 0 while open.
        rounds: (C,) int64, rounds whose grades count: up to the settling one, else all.
        log_pillar: (C,) log e-value against "no effect or a gain" over those rounds.
        log_stumbling: (C,) the same against "no effect or a loss".
        log_equivalent: (C,) the same against |Δ| ≥ margin.
        chance: (C,) predictive probability of a claim of an effect by the last planned round, at
            the last look that asked for it; NaN if none did.
    """

    status: tuple[Status, ...]
    settled_round: NDArray[np.int64]
    rounds: NDArray[np.int64]
    log_pillar: Floats
    log_stumbling: Floats
    log_equivalent: Floats
    chance: Floats

    def log_evidence(self, candidate: int) -> float:
        """Log e-value of the claim by which a candidate was settled; NaN if none was made."""
        of = {
            "pillar": self.log_pillar,
            "stumbling_block": self.log_stumbling,
            "equivalent": self.log_equivalent,
        }
        found = of.get(self.status[candidate])
        return float("nan") if found is None else float(found[candidate])

    @property
    def p_values(self) -> Floats:
        """(C,) p-values of Δ = 0 that hold at any stopping time: 2 / the larger one-sided e."""
        log_e = np.maximum(self.log_pillar, self.log_stumbling)
        return np.asarray(np.exp(np.minimum(np.log(2) - log_e, 0.0)))


def log_capital(tally: Tally, null: float | Floats, side: Literal["below", "above"]) -> Floats:
    """Log e-value of one batch of independent units.

    Args:
        tally: Differences of C candidates, each in [−1, 1].
        null: δ in (−1, 1), one or (C,).
        side: "below" bets that Δ < δ, against "Δ ≥ δ"; "above" bets against "Δ ≤ δ".

    Returns:
        (C,) log of the capital averaged over `BETS`.
    """
    return np.asarray(_mixed(_log_bets(tally, null, side)))


def log_sign_capital(tally: Tally, side: Literal["below", "above"]) -> Floats:
    """Log e-value of one batch of units against "each sign is a fair coin, given its size".

    Args:
        tally: Differences of C candidates.
        side: "below" bets on losses, "above" on gains.

    Returns:
        (C,) log of the capital averaged over `SIGN_BETS`; 0 if nothing differs.
    """
    sizes = np.where(tally.counts > 0, np.abs(tally.values), 0.0)
    largest = sizes.max(axis=1, initial=0.0)
    towards = -tally.values if side == "below" else tally.values
    scaled = SIGN_BETS[None, :] / np.where(largest > 0, largest, 1.0)[:, None]
    x = np.where(tally.counts > 0, towards, 0.0)[:, :, None] * scaled[:, None, :]
    logs = np.log(2) - np.logaddexp(0.0, -2 * x)  # log(1 + tanh x)
    return np.asarray(_mixed(np.einsum("ca,cag->cg", tally.counts, logs)))


def bounded_p(tally: Tally) -> Floats:
    """Two-sided p-value of Δ = 0 without any symmetry: 2 / the larger one-sided bounded bet.

    The sign-flip test asks whether the ban does anything to any problem. This one asks whether the
    *mean* is 0, however unevenly problems move: units are independent draws from [−1, 1], and
    nothing else is assumed. It pays for that with power.

    Returns:
        (C,) p-values in (0, 1]; 1 if nothing differs, NaN without units.
    """
    larger = np.maximum(log_capital(tally, 0.0, "below"), log_capital(tally, 0.0, "above"))
    return np.where(tally.n > 0, np.exp(np.minimum(np.log(2) - larger, 0.0)), np.nan)


def settle(
    baseline: NDArray[np.int8],
    knockout: NDArray[np.int8],
    *,
    rule: Literal["fdr", "nominal"] = "fdr",
    alpha: float = 0.05,
    margin: float = 0.02,
    target: Literal["population", "benchmark"] = "population",
    m: int | None = None,
    max_rounds: int | None = None,
    counted: NDArray[np.bool_] | None = None,
    futility: float | None = None,
) -> Settlement:
    """Settles candidates after each round of seeds, replayed from the first.

    The result depends on the grades alone, so an interrupted run that resumes settles the same
    candidates at the same rounds. Grades of a candidate after its settling round are ignored.

    Args:
        baseline: (P, R) int8 grades of R rounds, −1 missing.
        knockout: (C, P, R) int8 grades, −1 missing. Call it with complete rounds only: a cell
            still being generated looks like one that failed.
        rule: "fdr": effects by e-BH over candidates, both directions together as 2m hypotheses;
            equivalence by e-BH of its own. "nominal": e ≥ 2/alpha for effects and e ≥ 1/alpha for
            equivalence, each candidate separately.
        alpha: Error rate, of each of the two families of claims.
        margin: Equivalence margin, in (0, 1); see |Δ| < margin.
        target: See the module's docstring.
        m: Planned candidates; None counts those here.
        max_rounds: Planned rounds, fixed before the first (target `population` only);
            None takes R. Rounds beyond it are ignored there.
        counted: (C,) bool, False for rows that are no hypotheses (canaries): they stay open.
        futility: Before the last planned round, a candidate is "futile" if the chance that its
            effect will be claimed by then is below this (`stats.futility`); None never drops any.

    Returns:
        The settlement after the last round.

    Raises:
        ValueError: for a margin outside (0, 1), or fewer planned candidates than are here.
    """
    if not 0 < margin < 1:
        raise ValueError(f"margin is {margin}, expected a number between 0 and 1")
    n_candidates, _, n_rounds = knockout.shape
    last = n_rounds if max_rounds is None else max_rounds
    if target == "population":
        n_rounds = min(n_rounds, last)
    hypotheses = np.ones(n_candidates, dtype=np.bool_) if counted is None else counted
    family = int(hypotheses.sum()) if m is None else m
    if family < hypotheses.sum():
        raise ValueError(f"{family} candidates were planned but {hypotheses.sum()} are here")

    race = _Race(target, last, margin, n_candidates)
    status = np.zeros(n_candidates, dtype=np.int64)
    settled = np.zeros(n_candidates, dtype=np.int64)
    evidence = np.full((4, n_candidates), -np.inf)
    chance = np.full(n_candidates, np.nan)
    looks = _looks(baseline, knockout, n_rounds, target)
    for r, tally in enumerate(looks, start=1):
        going = settled == 0
        fresh = race.advance(tally)
        evidence[:, going] = fresh[:, going]
        live = np.where(hypotheses, evidence, np.nan)
        # A candidate makes one kind of claim: counting it in both families would lower the
        # threshold of the others by a rejection that is never reported.
        effects = np.where((status >= 3) & hypotheses, -np.inf, live[:2])
        pillar, stumbling = _claims(effects, rule, alpha, family)
        for code, claim in ((1, pillar), (2, stumbling)):
            new = claim & (settled == 0)
            status[new], settled[new] = code, r
        same = np.where(np.isin(status, (1, 2, 4)), -np.inf, live[2:].min(axis=0))
        new = _claims(same[None], rule, alpha, family)[0] & (settled == 0)
        status[new], settled[new] = 3, r
        asked = np.flatnonzero(hypotheses & (settled == 0))
        if futility is not None and r < last and len(asked):
            chance[asked] = chance_by_rule(
                progress(baseline, knockout[asked], r), r, last, BETS,
                rule=rule, alpha=alpha, family=family, claims=int(np.isin(status, (1, 2)).sum()),
                by_problem=target == "population",
            )  # fmt: skip
            new = asked[chance[asked] < futility * (1 - 1e-9)]
            status[new], settled[new] = 4, r
    names: tuple[Status, ...] = ("open", "pillar", "stumbling_block", "equivalent", "futile")
    return Settlement(
        status=tuple(names[code] for code in status),
        settled_round=settled,
        rounds=np.where(settled > 0, settled, n_rounds),
        log_pillar=evidence[0],
        log_stumbling=evidence[1],
        log_equivalent=np.minimum(evidence[2], evidence[3]),
        chance=chance,
    )


def confidence_sequence(
    baseline: NDArray[np.int8],
    knockout: NDArray[np.int8],
    rounds: NDArray[np.int64],
    *,
    alpha: float | Floats = 0.05,
    target: Literal["population", "benchmark"] = "population",
    max_rounds: int | None = None,
) -> tuple[Floats, Floats]:
    """Interval of Δ that holds at every stopping time: the δ that no bet has refuted.

    Args:
        baseline: (P, R) int8 grades.
        knockout: (C, P, R) int8 grades.
        rounds: (C,) rounds that count for each candidate (`Settlement.rounds`).
        alpha: Error rate, half on each side; one or (C,).
        target: As in `settle`.
        max_rounds: As in `settle`.

    Returns:
        (C,) lower and upper limits in [−1, 1].
    """
    n_candidates, _, n_rounds = knockout.shape
    last = n_rounds if max_rounds is None else max_rounds
    tallies = list(_looks(baseline, knockout, n_rounds, target))
    goal = np.log(2 / np.asarray(alpha, dtype=np.float64))

    def excess(null: float | Floats, side: Literal["below", "above"]) -> Floats:
        """(C,) log evidence against each candidate's δ, above what refutes it."""
        looks = np.full(n_candidates, -np.inf)
        product = np.zeros((n_candidates, len(BETS)))
        for r, tally in enumerate(tallies, start=1):
            bets = _log_bets(tally, null, side)
            active = r <= rounds
            if target == "benchmark":
                product = np.where(active[:, None], product + bets, product)
            else:
                sums = np.logaddexp(looks, _mixed(bets) - np.log(last))
                looks = np.where(active, sums, looks)
        return np.asarray((_mixed(product) if target == "benchmark" else looks) - goal)

    return _edge(excess, n_candidates, "above"), _edge(excess, n_candidates, "below")


def _edge(
    excess: Callable[[float | Floats, Literal["below", "above"]], Floats],
    n_candidates: int,
    side: Literal["below", "above"],
) -> Floats:
    """The outermost δ that is refuted from one side: a grid shared by all, then the Illinois rule.

    Evidence grows with δ's distance, so a bracket is kept; the refuted end is returned, which
    leaves the interval valid whatever the remaining width.
    """
    sense = 1.0 if side == "below" else -1.0
    kept, gone = np.full(n_candidates, -sense), np.full(n_candidates, sense)
    under, over = np.full(n_candidates, -np.inf), np.full(n_candidates, np.inf)
    for null in sense * np.linspace(-1, 1, 33)[1:-1]:
        value = excess(null, side)
        refuted = value >= 0
        first = refuted & np.isinf(over)
        gone, over = np.where(first, null, gone), np.where(first, value, over)
        kept, under = np.where(refuted, kept, null), np.where(refuted, under, value)
    for _ in range(10):
        with np.errstate(invalid="ignore"):
            secant = gone - over * (gone - kept) / (over - under)
        middle = np.where(np.isfinite(secant), secant, (kept + gone) / 2)
        value = excess(middle, side)
        refuted = value >= 0
        # An end that does not move gets half its weight; otherwise one of them would never move.
        under, over = np.where(refuted, under / 2, value), np.where(refuted, value, over / 2)
        kept, gone = np.where(refuted, kept, middle), np.where(refuted, middle, gone)
    return gone


class _Race:
    """Evidence of every candidate, round by round, as if none stopped."""

    def __init__(self, target: str, last: int, margin: float, n_candidates: int) -> None:
        self.target = target
        self.last = last
        self.nulls: tuple[tuple[float, Literal["below", "above"]], ...] = (
            (0.0, "below"),
            (0.0, "above"),
            (margin, "below"),
            (-margin, "above"),
        )
        self.capital = np.zeros((4, n_candidates, len(BETS)))
        self.looks = np.full((4, n_candidates), -np.inf)

    def advance(self, tally: Tally) -> Floats:
        """(4, C) log e-values after a round."""
        bets = np.stack([_log_bets(tally, null, side) for null, side in self.nulls])
        if self.target == "benchmark":
            self.capital += bets
            return _mixed(self.capital)
        mixed = _mixed(bets)
        mixed[0], mixed[1] = log_sign_capital(tally, "below"), log_sign_capital(tally, "above")
        self.looks = np.logaddexp(self.looks, mixed - np.log(self.last))
        return self.looks


def _looks(
    baseline: NDArray[np.int8], knockout: NDArray[np.int8], n_rounds: int, target: str
) -> Iterator[Tally]:
    """What each round bets on: its own cells, or each problem's mean over the rounds so far."""
    n, won, lost = (np.zeros(knockout.shape[:2], dtype=np.int64) for _ in range(3))
    for r in range(n_rounds):
        mine, other = knockout[:, :, r], baseline[:, r]
        if target == "benchmark":
            n, won, lost = (np.zeros_like(n) for _ in range(3))
        n += (mine >= 0) & (other >= 0)
        won += (mine == 1) & (other == 0)
        lost += (mine == 0) & (other == 1)
        n_seeds = 1 if target == "benchmark" else r + 1
        yield tally_problems(Pairs(n=n, won=won, lost=lost, base=n, n_seeds=n_seeds))


def _log_bets(tally: Tally, null: float | Floats, side: str) -> Floats:
    """(C, G) log capital of each bet after one batch of units."""
    sense = 1.0 if side == "below" else -1.0
    delta = sense * np.atleast_1d(np.asarray(null, dtype=np.float64))
    largest = 1 / (1 - delta)
    moves = sense * tally.values[None, :] - delta[:, None]  # (1 or C, A)
    scaled = BETS[None, :] * largest[:, None]  # (1 or C, G)
    factors = 1 - scaled[:, None, :] * moves[:, :, None]
    logs = np.zeros_like(factors)
    if len(delta) == 1:
        np.log(np.maximum(factors, 1e-300), out=logs)
        return np.asarray(np.einsum("ca,ag->cg", tally.counts, logs[0]))
    seen = np.broadcast_to((tally.counts > 0)[:, :, None], factors.shape)
    np.log(np.maximum(factors, 1e-300), out=logs, where=seen)
    return np.asarray(np.einsum("ca,cag->cg", tally.counts, logs))


def _mixed(bets: Floats) -> Floats:
    """Log of the mean capital over the bets (last axis)."""
    top = bets.max(axis=-1)
    return np.asarray(top + np.log(np.exp(bets - top[..., None]).mean(axis=-1)))


def _claims(log_e: Floats, rule: str, alpha: float, family: int) -> NDArray[np.bool_]:
    """Which of (sides, C) hypotheses fall: by e-BH over all, or each candidate separately."""
    sides = len(log_e)
    with np.errstate(over="ignore"):
        e = np.exp(log_e)
    if rule == "nominal":
        return np.asarray(e * alpha >= sides * (1 - 1e-12), dtype=np.bool_)
    return ebh(e.ravel(), alpha, sides * family).reshape(e.shape)
