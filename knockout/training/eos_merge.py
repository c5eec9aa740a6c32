"""Several ends of text as one action, for distributions that are at hand as log-probabilities.

A model may have two tokens that end an answer. A student that stops with the other one than its
teacher does is punished for stopping at all, and its responses grow. Adding their probabilities
before the KL removes that. The losses of `knockout.training` take the groups as `merge=`; this
module serves other losses and stored log-probabilities.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["merge_actions"]


def merge_actions(logp: Tensor, groups: Sequence[Sequence[int]]) -> Tensor:
    """Adds up probabilities within groups of token ids.

    Args:
        logp: (..., V) log-probabilities.
        groups: Disjoint groups of token ids, for example
            `[knockout.tokens.eos.stop_ids(tokenizer, folder)]`.

    Returns:
        (..., V): a group's first id carries the group's log-probability, its others −∞. The
        gradient of the sum reaches all of them.

    Example:
        >>> merge_actions(torch.tensor([0.5, 0.2, 0.3]).log(), [[0, 2]]).exp()
        tensor([0.8000, 0.2000, 0.0000])
    """
    merged = logp.clone()
    seen: set[int] = set()
    for group in groups:
        ids = list(dict.fromkeys(int(i) for i in group))
        if seen.intersection(ids):
            raise ValueError(f"token ids {sorted(seen.intersection(ids))} are in two groups")
        seen.update(ids)
        if len(ids) < 2:
            continue
        merged[..., ids[0]] = logp[..., ids].logsumexp(dim=-1)
        merged[..., ids[1:]] = -torch.inf
    return merged
