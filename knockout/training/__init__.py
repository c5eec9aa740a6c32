"""Selective on-policy distillation: which tokens a student is trained on, and the loss for it."""

from __future__ import annotations

from knockout.training.eos_merge import merge_actions
from knockout.training.loss import (
    Head,
    SelectiveLoss,
    head_of,
    reverse_kl,
    selective_reverse_kl,
)
from knockout.training.schedules import Constant, FollowKL, Linear, Schedule
from knockout.training.weights import (
    aligned_labels,
    budget_weights,
    freeze_weights,
    near,
    random_windows,
    token_table,
)

__all__ = [
    "Constant",
    "FollowKL",
    "Head",
    "Linear",
    "Schedule",
    "SelectiveLoss",
    "aligned_labels",
    "budget_weights",
    "freeze_weights",
    "head_of",
    "merge_actions",
    "near",
    "random_windows",
    "reverse_kl",
    "selective_reverse_kl",
    "token_table",
]
