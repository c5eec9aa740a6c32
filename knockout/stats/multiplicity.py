"""Corrections for looking at many candidates: Holm, Benjamini-Hochberg, Benjamini-Yekutieli, e-BH.

m is the number of *planned* candidates: one that has no p-value yet counts as if it had p = 1.

An exact test of few differences cannot have a small p-value. `can_reach` takes out the candidates
that could not be discovered whichever way their differences had gone; the rest share the level.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

from .paired import Floats, flips_needed

__all__ = ["adjust_bh", "adjust_by", "adjust_holm", "can_reach", "ebh"]


def adjust_holm(p_values: ArrayLike, m: int | None = None) -> Floats:
    """Holm's step-down adjusted p-values (family-wise error).

    Args:
        p_values: (C,) p-values, NaN if there is none.
        m: Planned number of hypotheses, at least the number of p-values; None counts them all.

    Returns:
        (C,) adjusted p-values, NaN if there was none.

    Source: Holm, Scandinavian Journal of Statistics 6 (1979).

    Example:
        >>> float(adjust_holm([0.0003] + [0.5] * 149, m=200)[0])
        0.06
    """
    p, padded = _pad(p_values, m)
    order = np.argsort(padded, kind="stable")
    steps = padded[order] * np.arange(len(padded), 0, -1)
    adjusted = np.empty_like(padded)
    adjusted[order] = np.minimum(np.maximum.accumulate(steps), 1.0)
    return np.where(np.isnan(p), np.nan, adjusted[: len(p)])


def adjust_bh(p_values: ArrayLike, m: int | None = None) -> Floats:
    """Benjamini-Hochberg adjusted p-values (false discovery rate); arguments as for Holm.

    Candidates share baselines, which makes their statistics positively dependent; under that
    dependence the procedure keeps its level (Benjamini & Yekutieli 2001, theorem 1.2).
    """
    return _false_discovery(p_values, m, "bh")


def adjust_by(p_values: ArrayLike, m: int | None = None) -> Floats:
    """Benjamini-Yekutieli adjusted p-values: the rate holds under any dependence."""
    return _false_discovery(p_values, m, "by")


def ebh(e_values: ArrayLike, alpha: float, m: int | None = None) -> NDArray[np.bool_]:
    """The e-BH procedure: rejects the k largest e-values with k maximal and all ≥ m / (k alpha).

    Controls the false discovery rate at alpha under any dependence, and at any stopping time
    when the e-values come from e-processes (Wang & Ramdas, JRSS-B 84, 2022).

    Args:
        e_values: (C,) e-values, NaN if there is none: never rejected.
        alpha: Rate.
        m: Planned number of hypotheses; None counts all C.

    Returns:
        (C,) True if rejected.
    """
    e = np.asarray(e_values, dtype=np.float64)
    m = len(e) if m is None else _planned(int((~np.isnan(e)).sum()), m)
    e = np.where(np.isnan(e), 0.0, e)
    ordered = np.sort(e)[::-1]
    passes = np.flatnonzero(ordered * np.arange(1, len(e) + 1) * alpha >= m * (1 - 1e-12))
    if not len(passes):
        return np.zeros(len(e), dtype=np.bool_)
    return np.asarray(e >= ordered[passes[-1]], dtype=np.bool_)


def can_reach(differing: ArrayLike, alpha: float, unknown: int = 0) -> NDArray[np.bool_]:
    """The candidates whose differing problems can reach the level that their own number demands.

    With k problems that differ, the sign-flip test's p-value is at least 2^(1 − k). Let K be the
    smallest number for which at most K candidates can reach alpha / K. The others cannot be
    rejected by any correction over K, so they need not be corrected for. Which ones they are
    follows from the sizes of the differences alone, never from their signs, and given the sizes
    the p-values of the rest are as valid as before.

    Args:
        differing: (C,) units that differ, of each candidate that has data.
        alpha: Level of the correction.
        unknown: Planned candidates without data; they count as if they could reach any level.

    Returns:
        (C,) True for those that are corrected for.

    Source: Tarone, Biometrics 46 (1990); Gilbert, JRSS-C 54 (2005), for the false discovery rate.

    Example:
        >>> can_reach([0, 4, 7, 9, 30], alpha=0.05).tolist()
        [False, False, True, True, True]
    """
    k = np.asarray(differing, dtype=np.int64)
    family = 1
    while (k >= flips_needed(alpha / family)).sum() + unknown > family:
        family += 1
    return np.asarray(k >= flips_needed(alpha / family), dtype=np.bool_)


def _false_discovery(p_values: ArrayLike, m: int | None, method: str) -> Floats:
    p, padded = _pad(p_values, m)
    if not len(padded):
        return p
    adjusted = stats.false_discovery_control(padded, method="by" if method == "by" else "bh")
    return np.where(np.isnan(p), np.nan, np.asarray(adjusted)[: len(p)])


def _pad(p_values: ArrayLike, m: int | None) -> tuple[Floats, Floats]:
    p = np.asarray(p_values, dtype=np.float64)
    m = _planned(len(p), m)
    return p, np.concatenate([np.where(np.isnan(p), 1.0, p), np.ones(m - len(p))])


def _planned(present: int, m: int | None) -> int:
    if m is not None and m < present:
        raise ValueError(f"{m} candidates were planned but {present} are here")
    return present if m is None else m
