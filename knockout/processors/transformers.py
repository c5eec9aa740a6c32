"""The same bans and picks for users who call transformers' `generate` themselves."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import LogitsProcessor

from knockout.processors.batch import Batch
from knockout.processors.rules import Rule
from knockout.processors.thinking import closed_before

__all__ = ["KnockoutLogitsProcessor"]


class KnockoutLogitsProcessor(LogitsProcessor):
    """Bans tokens and makes coupled picks inside `model.generate(logits_processor=[...])`.

    Coupled rules want `do_sample=False` (and no beams), so that generate takes our pick. One
    object serves one call of `generate`.

    Example:
        >>> from knockout.processors import rule_from_extra_args
        >>> rule = rule_from_extra_args({"knockout_ids": [3]})
        >>> processor = KnockoutLogitsProcessor([rule])
        >>> processor(torch.tensor([[1, 2]]), torch.zeros(1, 5)).tolist()
        [[0.0, 0.0, 0.0, -inf, 0.0]]
    """

    def __init__(
        self, rules: Sequence[Rule | None], attention_mask: torch.Tensor | None = None
    ) -> None:
        """Takes the rules of a batch.

        Args:
            rules: One for each row of the batch; None leaves a row untouched.
            attention_mask: (B, T) of the prompts, where these are padded on the left: padding
                does not count towards a token's position.
        """
        self._rules = list(rules)
        self._padding = None if attention_mask is None else (attention_mask == 0).sum(dim=1)
        self._batch: Batch | None = None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Returns the scores with bans and picks applied.

        Args:
            input_ids: (B, T) all tokens so far, padding included.
            scores: (B, V) logits.

        Raises:
            ValueError: The batch has another size than the rules, or an id is outside the logits.
            KnockoutError: A coupled row is NaN or wholly banned.
        """
        if scores.shape[0] != len(self._rules):
            raise ValueError(
                f"{len(self._rules)} rules for {scores.shape[0]} rows; give one rule for each row "
                "(beams and num_return_sequences make more rows)"
            )
        if self._batch is None:
            self._batch = Batch(self._rules, scores.shape[1], scores.device)
        batch, rows = self._batch, self._batch.coupled_rows
        positions = torch.full((len(self._rules),), input_ids.shape[1], device=scores.device)
        padding = torch.zeros_like(positions)
        if self._padding is not None:
            padding = self._padding.to(scores.device)
            positions -= padding
        closed = None
        if batch.by_part:
            start = torch.tensor([rule.start or 0 for rule in batch.rules], device=scores.device)
            closed = closed_before(
                input_ids[rows], start + padding[rows], positions[rows] + padding[rows],
                [rule.think_end for rule in batch.rules],
            )  # fmt: skip
        scores = scores.clone()
        batch.apply_(scores, positions[rows], closed=closed)
        return scores
