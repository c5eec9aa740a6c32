"""Context consistency: how alike the places are at which a token type has a high loss.

The context of an occurrence is the bag of the tokens in a window around it (the occurrence itself
left out), each weighted by its surprisal −log(frequency), so that punctuation and articles do not
make all contexts look alike; scaled to length 1. The consistency of a type is the mean cosine over
all pairs of its contexts that come from different prompts: within a prompt a phrase is repeated
because of the prompt, or because the model loops, which says nothing about the type. With S_p the
sum of the n_p unit vectors of prompt p, S = Σ S_p and n = Σ n_p,

    mean over pairs of different prompts of u_i · u_j = (‖S‖² − Σ ‖S_p‖²) / (n² − Σ n_p²),

so one sum vector per type is enough: time and memory are linear in the occurrences, not quadratic.
It lies in [0, 1]: 0 if no two prompts share a token of context, 1 if all contexts are the
same.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

__all__ = ["ContextSums", "surprisal"]


def surprisal(counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """Weight of a context token, −log of its share. counts (V,) -> (V,); 0 for absent types."""
    total = counts.sum()
    weights = np.zeros(len(counts))
    present = counts > 0
    weights[present] = np.log(total / counts[present])
    return weights


class ContextSums:
    """Sum vectors of the contexts of every token type, filled prompt by prompt."""

    def __init__(self, weights: NDArray[np.float64], window: int = 8) -> None:
        """Starts empty.

        Args:
            weights: (V,) weight of each token in a context, ≥ 0.
            window: Tokens on each side.

        Raises:
            ValueError: The window contains nothing.
        """
        if window < 1:
            raise ValueError(f"window is {window}; expected 1 or more tokens on each side")
        self._weights = weights
        self._window = window
        size = len(weights)
        self._sums: Any = sparse.csr_array((size, size))
        self._counts = np.zeros(size)
        # What pairs of one prompt contribute, and how many they are (a context with itself too).
        self._inner = np.zeros(size)
        self._inner_pairs = np.zeros(size)

    def add(
        self,
        tokens: NDArray[np.int32],
        rollout: NDArray[np.int32],
        selected: NDArray[np.bool_],
    ) -> None:
        """Adds the contexts of the selected positions of one prompt.

        Args:
            tokens: (N,) token ids of the prompt's rollouts, one after another.
            rollout: (N,) which rollout each belongs to; a context does not leave its own.
            selected: (N,) which occurrences count.
        """
        size = len(self._weights)
        centres = np.flatnonzero(selected)
        offsets = np.concatenate([np.arange(-self._window, 0), np.arange(1, self._window + 1)])
        places = centres[:, None] + offsets
        inside = (places >= 0) & (places < len(tokens))
        places = places.clip(0, max(len(tokens) - 1, 0))
        inside &= rollout[places] == rollout[centres][:, None]
        rows, columns = np.nonzero(inside)
        around = tokens[places[rows, columns]]
        # Building from coordinates adds up a token that stands in the window more than once.
        bags: Any = sparse.coo_array(
            (self._weights[around], (rows, around)), shape=(len(centres), size)
        ).tocsr()
        lengths = np.sqrt(_squared_rows(bags))
        used = lengths > 0
        scale = np.divide(1.0, lengths, out=np.zeros_like(lengths), where=used)
        types = tokens[centres]
        by_type: Any = sparse.coo_array(
            (scale, (types, np.arange(len(centres)))), shape=(size, len(centres))
        ).tocsr()
        own: Any = by_type @ bags
        count = np.bincount(types[used], minlength=size)
        self._sums = self._sums + own
        self._counts += count
        self._inner += _squared_rows(own)
        self._inner_pairs += count.astype(np.float64) ** 2

    def consistency(self) -> NDArray[np.float64]:
        """Mean cosine of each type. (V,); NaN for types with contexts of fewer than two prompts."""
        pairs = self._counts**2 - self._inner_pairs
        values = np.full(len(pairs), np.nan)
        np.divide(_squared_rows(self._sums) - self._inner, pairs, out=values, where=pairs > 0)
        return values.clip(0.0, 1.0)


def _squared_rows(matrix: Any) -> NDArray[np.float64]:
    """Squared length of each row of a sparse matrix. (n, V) -> (n,)."""
    squares: NDArray[np.float64] = np.asarray(matrix.multiply(matrix).sum(axis=1)).ravel()
    return squares
