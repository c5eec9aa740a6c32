"""Where candidates come from: rock mining, other token scores, and controls."""

from __future__ import annotations
