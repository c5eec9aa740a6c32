"""A numerical fingerprint of the weights that an engine runs: log-probabilities of a fixed prompt.

Names and files do not say which weights a server has loaded, and a folder can be overwritten
between two starts. The prompt's ids depend on the width of the vocabulary alone.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from knockout.engines.base import Engine, Scores

__all__ = ["Fingerprint", "fingerprints", "probe_ids"]

_LENGTH = 25
# Largest median difference of log-probabilities, in nats. Kernels and batches differ by 1e-4 in
# float32; in bfloat16, and between formats, by some hundredths.
_TOLERANCE = 0.003
_ROUGH_TOLERANCE = 0.15


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What an engine's weights make of the probe.

    Attributes:
        values: Log-probability of each token of the probe after those before it.
        dtype: Number format, or "server" if it is not known.
    """

    values: tuple[float, ...]
    dtype: str

    def to_record(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {"values": [round(value, 6) for value in self.values], "dtype": self.dtype}

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Fingerprint:
        """The inverse of `to_record`."""
        return cls(tuple(map(float, record["values"])), str(record["dtype"]))

    def difference(self, other: Fingerprint) -> float:
        """Median difference of the log-probabilities, in nats."""
        if len(self.values) != len(other.values):
            return float("inf")
        pairs = zip(self.values, other.values, strict=True)
        # −∞ in both is no difference.
        return statistics.median(0.0 if a == b else abs(a - b) for a, b in pairs)

    def agrees(self, other: Fingerprint) -> bool:
        """Whether rounding alone can explain the difference."""
        exact = self.dtype == other.dtype == "float32"
        return self.difference(other) <= (_TOLERANCE if exact else _ROUGH_TOLERANCE)


@runtime_checkable
class Fingerprints(Protocol):
    """An engine whose weights are loaded in several places."""

    def fingerprints(self) -> dict[str, Fingerprint]:
        """The fingerprints, by the name of each place."""


def probe_ids(vocab_size: int) -> list[int]:
    """The probe: ids spread over the vocabulary."""
    return [(3 + i) * 37 % vocab_size for i in range(_LENGTH)]


def fingerprints(engine: Engine) -> dict[str, Fingerprint]:
    """The fingerprints of an idle engine's weights, by the name of each place where they are loaded.

    Returns:
        Nothing for an engine that cannot tell.
    """
    if isinstance(engine, Fingerprints):
        return engine.fingerprints()
    if not isinstance(engine, Scores):
        return {}
    ids = probe_ids(engine.info.vocab_size)
    scored = engine.score([(ids[:at], [ids[at]]) for at in range(1, len(ids))])
    return {engine.info.kind: Fingerprint(tuple(one.logprob for one in scored), engine.info.dtype)}
