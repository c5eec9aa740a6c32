"""Selective on-policy distillation: which tokens a student is trained on, and the loss for it."""

from __future__ import annotations

from knockout.training.divergence import Divergence, Listed, divergence, sampled_kl
from knockout.training.eos_merge import merge_actions
from knockout.training.heads import Head, head_of
from knockout.training.loss import SelectiveLoss, reverse_kl, selective_kl
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
    "Divergence",
    "FollowKL",
    "Head",
    "Linear",
    "Listed",
    "Schedule",
    "SelectiveLoss",
    "aligned_labels",
    "budget_weights",
    "divergence",
    "freeze_weights",
    "head_of",
    "merge_actions",
    "near",
    "random_windows",
    "reverse_kl",
    "sampled_kl",
    "selective_kl",
    "token_table",
]
