"""The rules of a batch's rows, applied to its logits: what every engine's adapter calls."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from knockout.errors import KnockoutError
from knockout.method.sampling import BadLogits, Rows, Sampling, ban_, one_hot_, pick
from knockout.processors.rules import Rule

__all__ = ["Batch"]

_GREEDY = Sampling(temperature=0)


class Batch:
    """The rules of a batch's rows as tensors: built when the batch changes, used for many steps.

    Attributes:
        coupled: Indices of the rows whose token we pick, ascending.
    """

    def __init__(
        self, rules: Sequence[Rule | None], width: int, device: torch.device | str = "cpu"
    ) -> None:
        """Lays out the rules.

        Args:
            rules: One for each row of the logits; None leaves a row untouched.
            width: Width of the logits. Ids at or above it cannot be emitted, so they are left out.
            device: The logits' device.
        """
        pairs = [
            (row, token)
            for row, rule in enumerate(rules)
            if rule is not None
            for token in rule.banned
            if token < width
        ]
        self._rules = rules
        self._bans: tuple[Tensor, Tensor] | None = None
        if pairs:
            rows, tokens = torch.tensor(pairs, dtype=torch.int64, device=device).unbind(1)
            self._bans = rows.contiguous(), tokens.contiguous()
        self.coupled = [row for row, rule in enumerate(rules) if rule is not None and rule.coupled]
        self.coupled_rows = torch.tensor(self.coupled, dtype=torch.int64, device=device)
        ours = [rule for rule in rules if rule is not None and rule.coupled]
        self._settings = Rows(
            [rule.sampling or _GREEDY for rule in ours], [rule.seed for rule in ours], device
        )

    def apply_(
        self, logits: Tensor, positions: Tensor, failures: dict[str, str] | None = None
    ) -> Tensor:
        """Bans and picks, in place: a coupled row becomes 0 at its pick and −∞ elsewhere.

        Args:
            logits: (B, V), any float dtype.
            positions: (len(coupled),) int64 on the logits' device; tokens that stand before the
                one to be picked.
            failures: Where given, rows that cannot be sampled from are noted here (request name
                to reason) and emit an arbitrary token, so that the others go on.

        Returns:
            (len(coupled),) int64 picks.

        Raises:
            KnockoutError: A row cannot be sampled from and `failures` is None; names the request.
        """
        if self._bans is not None:
            ban_(logits, *self._bans)
        if not self.coupled:
            return self.coupled_rows
        whole = len(self.coupled) == logits.shape[0]
        part = logits if whole else logits[self.coupled_rows]
        picks = self._pick(part, positions, failures)
        one_hot_(logits, self.coupled_rows, picks)
        return picks

    def _pick(self, part: Tensor, positions: Tensor, failures: dict[str, str] | None) -> Tensor:
        while True:
            try:
                return pick(part, self._settings, positions)
            except BadLogits as bad:
                rule = self._rules[self.coupled[bad.row]]
                assert rule is not None
                if failures is None:
                    raise KnockoutError(f"{rule}: {bad.reason}") from bad
                failures[rule.name] = bad.reason
                part[bad.row] = 0
