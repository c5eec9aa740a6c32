"""What a knockout changes at a step: one small type, with a stable hash.

An intervention is a function of a row of logits, the step and the tokens so far. Everything above
(requests, ledger, verdicts, report) carries it whole and never takes it apart.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["Intervention", "Kind", "Where", "ban"]

Kind = Literal["ban", "penalty", "replace"]
Where = Literal["everywhere", "thinking", "answer"]


@dataclass(frozen=True, slots=True)
class Intervention:
    """A change of the policy on a set of token ids.

    Attributes:
        kind: "ban" sets their logits to −∞; "penalty" subtracts `strength` from their logits
            before temperature and truncation; "replace" leaves the pick alone, but emits
            `replacement` whenever one of them is picked.
        token_ids: Rising, without repeats, at least one.
        strength: λ of a penalty, in logits; negative boosts. None for other kinds.
        replacement: The id that a replacement emits. None for other kinds.
        where: The part of the trajectory in which it acts. "thinking" is everything up to and
            including the tokens that close the thinking, "answer" everything after them.
        first_step: First step of the trajectory at which it acts, counted from 0.
        end_step: First step at which it no longer acts, or None for never.

    Raises:
        ValueError: The values do not go together; the message says which.
    """

    kind: Kind
    token_ids: tuple[int, ...]
    strength: float | None = None
    replacement: int | None = None
    where: Where = "everywhere"
    first_step: int = 0
    end_step: int | None = None

    def __post_init__(self) -> None:
        ids = self.token_ids
        if not ids or list(ids) != sorted(set(ids)) or ids[0] < 0:
            raise ValueError(f"token_ids is {ids!r}; expected ids of at least 0, rising, once each")
        if (self.kind == "penalty") != (self.strength is not None):
            raise ValueError(f"a {self.kind} with strength {self.strength}")
        if self.strength is not None and (not math.isfinite(self.strength) or self.strength == 0):
            raise ValueError(f"strength is {self.strength}; expected a finite number other than 0")
        if (self.kind == "replace") != (self.replacement is not None):
            raise ValueError(f"a {self.kind} with replacement {self.replacement}")
        if self.replacement is not None and (self.replacement < 0 or self.replacement in ids):
            raise ValueError(f"replacement {self.replacement} is negative or replaces itself")
        if self.first_step < 0 or (self.end_step is not None and self.end_step <= self.first_step):
            raise ValueError(f"steps {self.first_step} to {self.end_step} are no range")

    @property
    def is_plain_ban(self) -> bool:
        """Whether it bans its ids at every step, the published knockout."""
        return self == ban(self.token_ids)

    def to_record(self) -> dict[str, Any]:
        """A JSON mapping that leaves out what is at its default; `from_record` reads it back."""
        record: dict[str, Any] = {"kind": self.kind, "token_ids": list(self.token_ids)}
        defaults = Intervention("ban", self.token_ids)
        for name in ("strength", "replacement", "where", "first_step", "end_step"):
            if (value := getattr(self, name)) != getattr(defaults, name):
                record[name] = value
        return record

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Intervention:
        """Reads `to_record`'s mapping."""
        return cls(**{**record, "token_ids": tuple(record["token_ids"])})

    @property
    def digest(self) -> str:
        """Stable hash, 16 hex digits; equal interventions share it in every process and version."""
        text = json.dumps(self.to_record(), sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def ban(token_ids: tuple[int, ...]) -> Intervention:
    """The plain ban of a set of ids.

    Example:
        >>> ban((5, 9)).to_record()
        {'kind': 'ban', 'token_ids': [5, 9]}
    """
    return Intervention("ban", token_ids)
