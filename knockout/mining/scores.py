"""From scored positions to one row per token type, in a stream over prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from knockout.mining.context import ContextSums, surprisal
from knockout.mining.shards import Shard

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["ScoreSettings", "TypeScores", "score_types"]

_MEANS = ("reverse_kl", "entropy", "agree", "teacher_gap", "signal", "noise", "grad_norm")
_BEFORE = ("before_reverse_kl", "before_entropy", "before_agree")


@dataclass(frozen=True, slots=True)
class ScoreSettings:
    """What turns scored positions into type scores.

    Attributes:
        quantile: A position has a high loss where its reverse KL is above this quantile of all
            scored positions; before and after training each by their own quantile.
        window: Tokens on each side of an occurrence that make its context.
        extra: Token scores of the registry, or products of them, that get a column of their own:
            the mean over occurrences. A score that looks at a batch sees one prompt's rollouts.
    """

    quantile: float = 0.8
    window: int = 8
    extra: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.quantile < 1:
            raise ValueError(f"quantile is {self.quantile}; expected 0 ≤ quantile < 1")


@dataclass(frozen=True, slots=True)
class TypeScores:
    """Scores of every token type, and what the resampling of prompts needs.

    Attributes:
        table: One row per type that occurs, by falling total KL; columns as in docs/mining.md.
        prompt_kl: (n_prompts, V) sparse: the KL of each prompt's persistent occurrences by type.
        prompt_count: (n_prompts, V) sparse: how many they are.
        prompt_total: (n_prompts, V) sparse: the KL of all occurrences.
        prompt_seen: (n_prompts, V) sparse: how many all occurrences are.
        threshold: Reverse KL above which a position has a high loss, in nats.
        threshold_before: The same before training; None without a student before training.
    """

    table: pd.DataFrame
    prompt_kl: Any
    prompt_count: Any
    prompt_total: Any
    prompt_seen: Any
    threshold: float
    threshold_before: float | None


def score_types(
    shards: Callable[[], Iterable[Shard]],
    vocab_size: int,
    token_text: Callable[[int], str],
    settings: ScoreSettings | None = None,
) -> TypeScores:
    """Adds up positions by token type.

    The shards are read twice, one at a time: once for sums and thresholds, once for what depends
    on the thresholds. Beside vocabulary-sized sums only the losses are kept, 4 bytes a position.

    Args:
        shards: Gives the scored shards, from the start at each call.
        vocab_size: V.
        token_text: The text of a token id, for the column `token`.
        settings: Threshold and window.

    Raises:
        ValueError: There is no scored position.
    """
    settings = settings or ScoreSettings()
    sums = _Sums(vocab_size, settings.extra)
    for shard in shards():
        sums.add(shard)
    if not sums.n:
        raise ValueError("no scored position")
    threshold = float(np.quantile(np.concatenate(sums.losses), settings.quantile))
    before = sums.losses_before
    threshold_before = (
        float(np.quantile(np.concatenate(before), settings.quantile)) if before else None
    )
    sums.losses, sums.losses_before = [], []

    contexts = ContextSums(surprisal(sums.count), settings.window)
    n_high = np.zeros(vocab_size, dtype=np.int64)
    rows_kl, rows_count, rows_total, rows_seen = [], [], [], []
    for shard in shards():
        kl = shard.scores["reverse_kl"]
        lasting = kl > threshold
        n_high += np.bincount(shard.tokens[lasting], minlength=vocab_size)
        if threshold_before is not None:
            lasting = lasting & (shard.scores["before_reverse_kl"] > threshold_before)
        contexts.add(shard.tokens, shard.rollout, lasting)
        types = shard.tokens[lasting]
        rows_kl.append(_sparse_row(types, kl[lasting], vocab_size))
        rows_total.append(_sparse_row(shard.tokens, kl, vocab_size))
        rows_count.append(_sparse_row(types, np.ones(len(types)), vocab_size))
        rows_seen.append(_sparse_row(shard.tokens, np.ones(len(shard.tokens)), vocab_size))
    prompt_kl: Any = sparse.vstack(rows_kl, format="csr")
    prompt_count: Any = sparse.vstack(rows_count, format="csr")
    prompt_total: Any = sparse.vstack(rows_total, format="csr")
    table = _table(
        sums,
        n_high=n_high,
        n_persistent=np.asarray(prompt_count.sum(axis=0)).ravel().astype(np.int64),
        persistent_kl=np.asarray(prompt_kl.sum(axis=0)).ravel(),
        consistency=contexts.consistency(),
        token_text=token_text,
    )
    prompt_seen: Any = sparse.vstack(rows_seen, format="csr")
    return TypeScores(
        table, prompt_kl, prompt_count, prompt_total, prompt_seen, threshold, threshold_before
    )


class _Sums:
    """Vocabulary-sized sums of the first pass."""

    def __init__(self, vocab_size: int, extra: Sequence[str] = ()) -> None:
        self.size = vocab_size
        self.extra = extra
        self.n = 0
        self.n_outputs = 0
        self.output_share = np.zeros(vocab_size)
        self.count = np.zeros(vocab_size, dtype=np.int64)
        self.n_prompts = np.zeros(vocab_size, dtype=np.int64)
        self.position = np.zeros(vocab_size)
        self.totals: dict[str, NDArray[np.float64]] = {}
        self.losses: list[NDArray[np.float32]] = []
        self.losses_before: list[NDArray[np.float32]] = []

    def add(self, shard: Shard) -> None:
        """Adds the positions of a scored shard."""
        tokens = shard.tokens
        count = np.bincount(tokens, minlength=self.size)
        self.n += len(tokens)
        self.count += count
        self.n_prompts += count > 0
        length = np.repeat(shard.lengths, shard.lengths)
        self.position += np.bincount(tokens, weights=shard.step / length, minlength=self.size)
        for name in (*_MEANS, *_BEFORE):
            if name in shard.scores:
                total = self.totals.setdefault(name, np.zeros(self.size))
                total += np.bincount(tokens, weights=shard.scores[name], minlength=self.size)
        lengths = shard.lengths[shard.lengths > 0]
        self.n_outputs += len(lengths)
        self.output_share += np.bincount(tokens, weights=1 / length, minlength=self.size)
        for name in self.extra:
            values = _by_registry(name, shard)
            total = self.totals.setdefault(name, np.zeros(self.size))
            total += np.bincount(tokens, weights=values, minlength=self.size)
        self.losses.append(shard.scores["reverse_kl"])
        if "before_reverse_kl" in shard.scores:
            self.losses_before.append(shard.scores["before_reverse_kl"])


def _by_registry(name: str, shard: Shard) -> NDArray[np.float64]:
    """(N,) of a registered token score; an infinite one counts as the largest finite one."""
    import torch

    from knockout.mining.kl import PositionScores
    from knockout.mining.registry import score_positions

    found = PositionScores(
        *(torch.from_numpy(shard.scores[field].copy()) for field in PositionScores._fields)
    )
    values = score_positions(name, found).double().numpy()
    finite = np.isfinite(values)
    if not finite.all():
        values = np.where(finite, values, values[finite].max(initial=0.0))
    return values


def _sparse_row(types: NDArray[np.int32], values: NDArray[Any], size: int) -> Any:
    """(1, size) sparse row with the values added up by type, in float64."""
    found, inverse = np.unique(types, return_inverse=True)
    data = np.bincount(inverse, weights=values, minlength=len(found))
    return sparse.csr_array((data, (np.zeros(len(found), dtype=np.int64), found)), shape=(1, size))


def _table(
    sums: _Sums,
    *,
    n_high: NDArray[np.int64],
    n_persistent: NDArray[np.int64],
    persistent_kl: NDArray[np.float64],
    consistency: NDArray[np.float64],
    token_text: Callable[[int], str],
) -> pd.DataFrame:
    """One row per type that occurs, by falling total KL."""
    import pandas as pd

    ids = np.flatnonzero(sums.count)
    count = sums.count[ids]
    mean = {name: total[ids] / count for name, total in sums.totals.items()}
    signal, noise = sums.totals["signal"][ids], sums.totals["noise"][ids]
    ratio = np.zeros(len(ids))
    np.divide(signal, noise, out=ratio, where=(signal > 0) & (noise > 0))
    ratio[(signal > 0) & (noise == 0)] = np.inf
    columns: dict[str, Any] = {
        "token_id": ids,
        "token": [token_text(int(i)) for i in ids],
        "frequency": count,
        "share": count / sums.n,
        "output_share": sums.output_share[ids] / sums.n_outputs,
        "n_prompts": sums.n_prompts[ids],
        "mean_position": sums.position[ids] / count,
        "mean_kl": mean["reverse_kl"],
        "total_kl": sums.totals["reverse_kl"][ids],
        "grad_norm": mean["grad_norm"],
        "grad_share": sums.totals["grad_norm"][ids] / max(sums.totals["grad_norm"].sum(), 1e-300),
        "entropy": mean["entropy"],
        "agreement": mean["agree"],
        "teacher_gap": mean["teacher_gap"],
        "signal": mean["signal"],
        "noise": mean["noise"],
        "efficiency_ratio": ratio,
    }
    if "before_reverse_kl" in mean:
        columns |= {
            "mean_kl_before": mean["before_reverse_kl"],
            "entropy_before": mean["before_entropy"],
            "agreement_before": mean["before_agree"],
            "delta_kl": mean["reverse_kl"] - mean["before_reverse_kl"],
        }
    columns |= {
        "n_high": n_high[ids],
        "n_persistent": n_persistent[ids],
        "persistence": n_persistent[ids] / count,
        "persistent_kl": persistent_kl[ids],
        "consistency": consistency[ids],
        "rock_score": sums.totals["reverse_kl"][ids],
        "rock_score_ctx": persistent_kl[ids] * consistency[ids],
    }
    columns |= {name: mean[name] for name in sums.extra if name not in columns}
    frame = pd.DataFrame(columns)
    return frame.sort_values(["total_kl", "token_id"], ascending=[False, True], ignore_index=True)
