"""Counts what a step costs an accelerator: operations, waits for the device, and memory."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Counted"]

_WAITS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::_unique2", "aten::masked_select"}


class Counted(TorchDispatchMode):
    """Counts while it is entered.

    Attributes:
        n: Operations, views aside.
        waits: Those that wait for the device to know a value or a size.
        peak: Most bytes of tensors made meanwhile and alive together.
    """

    def __init__(self) -> None:
        super().__init__()
        self.n = self.waits = self.peak = self._alive = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.n += not func.is_view
        # A mask as an index waits too: how many it selects is only known on the device.
        masks = func._schema.name.startswith("aten::index") and any(
            index.dtype == torch.bool for index in _tensors(args[1])
        )
        self.waits += masks or func._schema.name in _WAITS
        for tensor in _tensors((args, kwargs)):
            self._known.add(tensor.untyped_storage()._cdata)
        out = func(*args, **(kwargs or {}))
        for tensor in _tensors(out):
            self._follow(tensor.untyped_storage())
        return out

    def _follow(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self._known.add(key)
        self._alive += size
        self.peak = max(self.peak, self._alive)
        weakref.finalize(storage, self._freed, key, size)

    def _freed(self, key: int, size: int) -> None:
        self._known.discard(key)
        self._alive -= size


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors(one)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
