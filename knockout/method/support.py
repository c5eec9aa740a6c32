"""The best tokens of each row in order, and where truncation ends their support.

Sorted by falling logit (ties by falling id) the support of a row is a prefix of the list: min_p
keeps what is not too far below the best, top_k what is not below the k-th, top_p what stands
before a share of the mass that those two leave.
"""

from __future__ import annotations

import math
from copy import copy
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from knockout.method.sampling import Rows

__all__ = ["Top"]


def _in_order(ids: Tensor, values: Tensor) -> Tensor:
    """(n, L) order by falling value, ties by falling id."""
    by_id = ids.argsort(dim=1, descending=True)
    by_value = values.gather(1, by_id).argsort(dim=1, descending=True, stable=True)
    return by_id.gather(1, by_value)


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
        floor: (n,) float64, tokens that are not listed lie at or below it; None if all are listed.
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
        order = _in_order(ids, values)
        self.ids = ids.gather(1, order)
        self._part = part
        self._temperature = rows.temperature[index]
        self._set(values.gather(1, order).to(torch.float64) / self._temperature[:, None])
        self.floor = None if length == self.width else self.x[:, -1]
        self.top_k, self.top_p = rows.top_k[index], rows.top_p[index]
        self.log_min_p = rows.log_min_p[index]
        self.limited = (self.top_k > 0) & (self.top_k < self.width)
        self.unlimited = ~self.limited & (self.log_min_p == -math.inf)
        # A top_k of the whole vocabulary or more limits nothing.
        self.may_be_unlimited = rows.has_unlimited or length == self.width
        self.any_nucleus = rows.has_nucleus
        if self.may_be_unlimited:
            # The same sum however long the list is, so that a pick never depends on its batch.
            x = part.to(torch.float64) / self._temperature[:, None]
            self.total = (x - self.x[:, :1]).exp_().sum(dim=1)
        else:
            self.total = self.cumulative[:, -1]

    def _set(self, x: Tensor) -> None:
        self.x = x
        self.weight = (x - x[:, :1]).exp().nan_to_num_(0.0)
        self.cumulative = torch.nn.functional.pad(self.weight.cumsum(1), (1, 0))
        self._by_id: tuple[Tensor, Tensor] | None = None

    def moved(
        self, row: Tensor, at: Tensor, ids: Tensor, x: Tensor, gain: Tensor
    ) -> tuple[Top, Tensor]:
        """Lists in which up to m tokens have other logits.

        Args:
            row: (P,) the list that each starts from.
            at: (P, m) the places that the tokens leave, L where they are not listed.
            ids: (P, m) the tokens; −1 for none.
            x: (P, m) their new logits over temperature; −∞ for none.
            gain: (P,) weight that the rows gain by it.

        Returns:
            P lists, L + m long; (P, L + m) where each entry was in the old list and the m tokens
            behind it. Entries below `floor` are not in their order, as others may lie between.
        """
        out = copy(self)
        left = torch.nn.functional.pad(self.x[row], (0, 1)).scatter_(1, at, -math.inf)[:, :-1]
        ids, x = torch.cat([self.ids[row], ids], dim=1), torch.cat([left, x], dim=1)
        order = _in_order(ids, x)
        out.ids = ids.gather(1, order)
        out._set(x.gather(1, order))
        for name in ("best", "top_k", "top_p", "log_min_p", "limited", "unlimited", "_temperature"):
            setattr(out, name, getattr(self, name)[row])
        out.floor = None if self.floor is None else self.floor[row]
        out.total = (self.total[row] + gain) * (self.x[row, 0] - out.x[:, 0]).exp()
        return out, order

    def kept(self) -> Tensor:
        """(n, L) bool, which entries min_p and top_k keep."""
        x = self.x
        keep = x >= x[:, :1] + self.log_min_p[:, None]
        edge = x.gather(1, (self.top_k - 1).clamp(0, x.shape[1] - 1)[:, None])
        return keep & ((x >= edge) | ~self.limited[:, None])

    def support(self, slack: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Which entries are in the support.

        Args:
            slack: (n,) weight that is added to what the nucleus asks for.

        Returns:
            (n, L) bool; (n,) bool, whether the support is seen whole.
        """
        kept = keep = self.kept()
        if self.any_nucleus:
            mass = self.cumulative.gather(1, kept.sum(1, keepdim=True))[:, 0]
            target = self.top_p * torch.where(self.unlimited, self.total, mass)
            if slack is not None:
                target = target + slack
            inside = self.cumulative[:, :-1] < target[:, None]
            inside |= (self.top_p >= 1)[:, None]
            inside[:, 0] = True
            keep = kept & inside
        if self.floor is None:
            return keep, torch.ones_like(self.limited)
        # What top_k and min_p keep must be seen whole: top_p is a share of its mass.
        seen = torch.where(self.unlimited[:, None], keep, kept)
        lowest = torch.where(seen, self.x, math.inf).amin(dim=1)
        # Its end is seen where an entry that is not below the floor is left out; the floor itself
        # may have moved.
        ends = (~seen & (self.x >= self.floor[:, None])).any(dim=1)
        # A row of −∞ or NaN is reported by the caller, not searched for its support.
        return keep, ((lowest > self.floor) & ends) | ~self.best.isfinite()

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
