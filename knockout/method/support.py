"""The best tokens of each row in order, and where truncation ends their support.

Sorted by falling logit (ties by falling id) the support of a row is a prefix of the list: min_p
keeps what is not too far below the best, top_k what is not below the k-th, top_p what stands
before a share of the mass that those two leave.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from knockout.method.sampling import Rows

__all__ = ["Top"]


class Top:
    """The `length` highest logits of n rows, with what truncation needs of them.

    Attributes:
        ids: (n, L) int64 token ids.
        x: (n, L) float64 logits over temperature, falling.
        weight: (n, L) float64 exp(x − the row's best).
        cumulative: (n, L + 1) float64 weight that stands before each place.
        total: (n,) float64 weight of the whole row; only of rows without top_k and min_p.
        limited: (n,) bool, whether top_k is on.
        unlimited: (n,) bool, whether neither top_k nor min_p is on.
        width: V.
    """

    def __init__(self, part: Tensor, rows: Rows, index: Tensor, length: int) -> None:
        """Sorts.

        Args:
            part: (n, V) logits of the rows at index.
            rows: The settings.
            index: (n,) int64.
            length: How many entries to look at.
        """
        self.width = part.shape[1]
        length = min(length, self.width)
        values, ids = part.topk(length, dim=1)
        self.best = values[:, 0].float()
        # Ties are put in a fixed order, by falling id, regardless of topk.
        ids, order = ids.sort(dim=1, descending=True)
        values, by_value = values.gather(1, order).sort(dim=1, descending=True, stable=True)
        self.ids = ids.gather(1, by_value)
        self._part = part
        self._temperature = rows.temperature[index]
        self.x = values.to(torch.float64) / self._temperature[:, None]
        self.weight = (self.x - self.x[:, :1]).exp().nan_to_num_(0.0)
        self.cumulative = torch.nn.functional.pad(self.weight.cumsum(1), (1, 0))
        self.top_k, self.top_p = rows.top_k[index], rows.top_p[index]
        self.log_min_p = rows.log_min_p[index]
        self.limited = (self.top_k > 0) & (self.top_k < self.width)
        self.unlimited = ~self.limited & (self.log_min_p == -math.inf)
        # A top_k of the whole vocabulary or more limits nothing.
        self.may_be_unlimited = rows.has_open_top or length == self.width
        self.any_nucleus = rows.has_nucleus
        if self.may_be_unlimited:
            # The same sum however long the list is, so that a pick never depends on its batch.
            x = part.to(torch.float64) / self._temperature[:, None]
            self.total = (x - self.x[:, :1]).exp_().sum(dim=1)
        else:
            self.total = self.cumulative[:, -1]
        self._by_id: tuple[Tensor, Tensor] | None = None

    def support(self) -> tuple[Tensor, Tensor]:
        """(n, L) bool, which entries are in the support; (n,) bool, whether it is seen whole."""
        x, length = self.x, self.x.shape[1]
        keep = x >= x[:, :1] + self.log_min_p[:, None]
        edge = x.gather(1, (self.top_k - 1).clamp(0, length - 1)[:, None])
        keep &= (x >= edge) | ~self.limited[:, None]
        # What top_k and min_p keep must be seen whole: top_p is a share of its mass.
        complete = ~keep[:, -1] | self.unlimited
        if self.any_nucleus:
            before = self.cumulative[:, :-1]
            mass = self.cumulative.gather(1, keep.sum(1, keepdim=True))[:, 0]
            mass = torch.where(self.unlimited, self.total, mass)
            inside = (before < (self.top_p * mass)[:, None]) | (self.top_p >= 1)[:, None]
            inside[:, 0] = True
            keep &= inside
            lowest = torch.where(keep, x, math.inf).amin(dim=1)
            complete &= (x[:, -1] < lowest) | ~self.unlimited
        if length == self.width:
            complete = torch.ones_like(complete)
        # A row of −∞ or NaN is reported by the caller, not searched for its support.
        return keep, complete | ~self.best.isfinite()

    def place_of(self, row: Tensor, token: Tensor) -> Tensor:
        """Places of tokens in the lists of their rows, L where not listed. (N,), (N,) -> (N,)."""
        n, length = self.ids.shape
        if self._by_id is None:
            ids, place = self.ids.sort(dim=1)
            start = torch.arange(n, device=ids.device)[:, None] * self.width
            self._by_id = (ids + start).reshape(-1), place.reshape(-1)
        keys, place = self._by_id
        wanted = row * self.width + token
        at = torch.searchsorted(keys, wanted).clamp(max=n * length - 1)
        return torch.where(keys[at] == wanted, place[at], length)

    def weight_of(self, row: Tensor, token: Tensor) -> Tensor:
        """Weights of tokens, listed or not. (N,), (N,) -> (N,) float64."""
        x = self._part[row, token].to(torch.float64) / self._temperature[row]
        return (x - self.x[row, 0]).exp()

    def bisect(self, reached: Callable[[Tensor], Tensor], n: int) -> Tensor:
        """The least of 0 … L for which a rising condition holds, L + 1 if none. -> (n,)."""
        length = self.x.shape[1]
        low = torch.zeros(n, dtype=torch.int64, device=self.x.device)
        high = torch.full_like(low, length + 1)
        for _ in range((length + 1).bit_length()):
            middle = (low + high) // 2
            here = reached(middle.clamp(max=length)) | (middle > length)
            high = torch.where(here, middle, high)
            low = torch.where(here, low, (middle + 1).clamp(max=length + 1))
        return high

    def count_at_least(self, row: Tensor, bar: Tensor) -> Tensor:
        """How many entries of its row are at or above each bar. (P,), (P,) -> (P,)."""
        last = self.x.shape[1] - 1
        return self.bisect(
            lambda end: (self.x[row, end.clamp(max=last)] < bar) | (end > last), row.shape[0]
        )
