"""Context consistency: how alike the places are at which a token type has a high loss.

The context of an occurrence is the bag of the tokens in a window around it (the occurrence itself
left out), each weighted by its surprisal −log(frequency), so that punctuation and articles do not
make all contexts look alike; scaled to length 1. The consistency of a type is the mean cosine over
all pairs of its contexts. With u_i the unit vectors and S their sum,

    mean over i ≠ j of u_i · u_j = (‖S‖² − n) / (n (n − 1)),

so one sum vector per type is enough: time and memory are linear in the occurrences, not quadratic.
It lies in [0, 1]: 0 where no two contexts share a token, 1 where all are the same.
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
    """Sum vectors of the contexts of every token type, filled rollout by rollout."""

    def __init__(self, weights: NDArray[np.float64], window: int = 8) -> None:
        """Starts empty.

        Args:
            weights: (V,) weight of each token in a context, ≥ 0.
            window: Tokens on each side.

        Raises:
            ValueError: The window holds nothing.
        """
        if window < 1:
            raise ValueError(f"window is {window}; expected 1 or more tokens on each side")
        self._weights = weights
        self._window = window
        size = len(weights)
        self._sums: Any = sparse.csr_array((size, size))
        self._counts = np.zeros(size, dtype=np.int64)

    def add(
        self,
        tokens: NDArray[np.int32],
        rollout: NDArray[np.int32],
        selected: NDArray[np.bool_],
    ) -> None:
        """Adds the contexts of the selected positions.

        Args:
            tokens: (N,) token ids of rollouts, one after another.
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
        lengths = np.sqrt(np.asarray(bags.multiply(bags).sum(axis=1)).ravel())
        used = lengths > 0
        scale = np.divide(1.0, lengths, out=np.zeros_like(lengths), where=used)
        types = tokens[centres]
        by_type: Any = sparse.coo_array(
            (scale, (types, np.arange(len(centres)))), shape=(size, len(centres))
        ).tocsr()
        self._sums = self._sums + by_type @ bags
        self._counts += np.bincount(types[used], minlength=size)

    def consistency(self) -> NDArray[np.float64]:
        """Mean pairwise cosine of each type. (V,); NaN for types with fewer than two contexts."""
        squares = np.asarray(self._sums.multiply(self._sums).sum(axis=1)).ravel()
        n = self._counts.astype(np.float64)
        pairs = n * (n - 1)
        values = np.full(len(n), np.nan)
        np.divide(squares - n, pairs, out=values, where=pairs > 0)
        return values.clip(0.0, 1.0)
