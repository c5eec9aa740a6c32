"""Which tokens of its rollouts a student is trained on."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from knockout.errors import UsageError
from knockout.mining.registry import product_of
from knockout.training.divergence import Divergence
from knockout.training.schedules import Constant, FollowKL, Schedule

__all__ = ["Selection"]


@dataclass(frozen=True, slots=True)
class Selection:
    """Which tokens of its rollouts a student is trained on. All of them by default."""

    freeze_list: tuple[int, ...] = ()
    """Token ids to freeze: what `knockout export --freeze-list` writes."""
    pillars: tuple[int, ...] = ()
    """Token ids that are always trained on."""
    window: int = 0
    """Tokens to either side of a frozen one in which positions of high loss are frozen too."""
    threshold: float = math.inf
    """Loss above which a position of a window is frozen, in nats."""
    schedule: Schedule = field(default_factory=Constant)
    """λ, the weight of frozen positions, by step and KL. Only at λ = 0 is anything skipped."""
    control: bool = False
    """Moves the frozen windows to random places: the control arm of a freeze."""
    budget: float | None = None
    """Trains on this share of positions only, the best by `score`; instead of a freeze list."""
    score: str = "efficiency"
    """What the budget ranks by: a token score (`knockout.mining.registry`), several multiplied
    where joined by `*`: "soft_or", "entropy*kl"."""
    divergence: Divergence = field(default_factory=Divergence)
    """Which divergence is trained on; a window's threshold and the schedule look at it too."""
    max_tokens: int | None = None
    """Trains on the first tokens of each response only; what follows costs nothing at all."""
    merge: tuple[tuple[int, ...], ...] = ()
    """Groups of token ids that count as one action in the KL (ends of text)."""
    normalise: Literal["tokens", "trained"] = "tokens"
    """Divides the loss by all response tokens (those within `max_tokens`), so that a trained token
    weighs what it would weigh without freezing; or by the weight that is left, so that the whole
    loss keeps its size. Either is counted over all that the optimiser sees in a step."""
    watch_every: int = 10
    """Steps between measurements of the KL of skipped positions, which costs what skipping saved.
    0 for never."""
    seed: int = 0
    """Of the control's random places."""

    def __post_init__(self) -> None:
        if self.budget is not None and (self.freeze_list or self.control):
            raise UsageError(
                "found budget beside freeze_list or control; a selection takes one of them"
            )
        if self.budget is not None and not 0 < self.budget <= 1:
            raise UsageError(f"budget is {self.budget}; expected a share in (0, 1], 0.01 for 1 %")
        if self.control and not self.freeze_list:
            raise UsageError("control needs the freeze_list whose windows it moves")
        if self.window < 0 or math.isnan(self.threshold):
            raise UsageError(
                f"window is {self.window} and threshold {self.threshold}; expected 0 or more "
                "tokens and a number of nats"
            )
        if self.window > 0 and self.freeze_list and self.threshold == math.inf:
            raise UsageError(f"window is {self.window}, but no threshold says what a high loss is")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise UsageError(f"max_tokens is {self.max_tokens}; expected 1 or more, or None")
        product_of(self.score)  # refuses unknown names
        if isinstance(self.schedule, FollowKL) and self.watch_every < 1:
            raise UsageError(
                "the schedule FollowKL follows the KL of all tokens; watch_every is "
                f"{self.watch_every}, so that of skipped ones would never be measured"
            )

    def refuse_special(self, special_ids: list[int]) -> None:
        """Raises UsageError if the freeze list contains special ids (end of text, padding, ...)."""
        found = sorted(set(self.freeze_list) & set(special_ids))
        if found:
            raise UsageError(
                f"the freeze list contains special token ids {found}: a student that never learns to "
                "stop runs on; drop them, or allow them with allow_special=True"
            )
