"""Whether the tokens that close the thinking stand before a step.

The closing tag is matched as token ids. It counts from the trajectory's first step on, and in the
last few tokens of the prompt, where templates close the thinking of models that shall not think.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["Thought", "closed_before"]

# A template that closes the thinking itself adds no more than line ends behind it.
_SLACK = 3


class Thought:
    """Follows one trajectory, token by token.

    Attributes:
        closed: Whether the thinking has ended.
        seen: Tokens taken so far, without those that it began with.
    """

    def __init__(self, tag: Sequence[int], prompt: Sequence[int], start: int) -> None:
        """Begins at the prompt.

        Args:
            tag: Token ids that close the thinking, at least one.
            prompt: What the engine was given: the prompt and perhaps a prefix.
            start: Where in it the trajectory begins.
        """
        self._tag, self.seen = list(tag), 0
        self._recent = [-1] * len(self._tag)
        self.closed = False
        for token in prompt[max(0, start - len(self._tag) - _SLACK) :]:
            self.take(token)
        self.seen = 0

    def take(self, token: int) -> None:
        """Takes the next token."""
        self._recent.append(token)
        del self._recent[0]
        self.closed = self.closed or self._recent == self._tag
        self.seen += 1


def closed_before(
    tokens: Tensor, start: Tensor, end: Tensor, tags: Sequence[Sequence[int]]
) -> Tensor:
    """`Thought` for rows of tokens that are all there, on their device.

    Args:
        tokens: (n, T) integers.
        start: (n,) int64, where each trajectory begins.
        end: (n,) int64, how many tokens count.
        tags: Of each row; () for none.

    Returns:
        (n,) bool.
    """
    longest = max(map(len, tags), default=0)
    if not longest:
        return torch.zeros(len(tags), dtype=torch.bool, device=tokens.device)
    width = torch.tensor([len(tag) for tag in tags], device=tokens.device)
    padded = torch.tensor(
        [[-1] * (longest - len(tag)) + list(tag) for tag in tags], device=tokens.device
    )[:, None]
    windows = torch.nn.functional.pad(tokens, (longest, 0), value=-2).unfold(1, longest, 1)
    hit = ((windows == padded) | (padded < 0)).all(dim=2)  # of the window that ends at each place
    place = torch.arange(hit.shape[1], device=tokens.device)
    first = (start - width - _SLACK).clamp(min=0) + width
    hit &= (place >= first[:, None]) & (place <= end[:, None]) & (width > 0)[:, None]
    return hit.any(dim=1)
