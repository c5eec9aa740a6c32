"""Values for JSON."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

__all__ = ["plain"]


def plain(value: Any) -> Any:
    """A value for JSON: numpy's numbers as Python's, NaN as None."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    return value
