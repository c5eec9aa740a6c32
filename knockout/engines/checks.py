"""Whether a completion can be an answer to its request."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import numpy as np

from knockout.engines.base import Completion, Request

__all__ = ["checked", "fault_of"]


def fault_of(request: Request, done: Completion, eos_ids: Collection[int]) -> str | None:
    """What is wrong with a completion that an engine calls finished; None if nothing is.

    Cheap enough for every completion: an engine that loses tokens, answers another request or
    lets a banned token through must not become a grade.
    """
    tokens, n_prefix = done.tokens, len(request.prefix)
    if done.n_generated < 1 or len(tokens) != n_prefix + done.n_generated:
        return (
            f"{len(tokens)} tokens, of which {done.n_generated} are said to be generated after a "
            f"prefix of {n_prefix}"
        )
    if len(tokens) > request.max_tokens:
        return f"{len(tokens)} tokens where at most {request.max_tokens} were asked for"
    if not np.array_equal(tokens[:n_prefix], np.asarray(request.prefix, dtype=np.int32)):
        return "a trajectory with another prefix"
    own = request.intervention
    if own is not None and own.is_plain_ban and np.isin(tokens[n_prefix:], own.token_ids).any():
        return "a banned token"
    if done.finish == "length" and len(tokens) < request.max_tokens:
        return f"{len(tokens)} of {request.max_tokens} tokens as if they were all"
    if done.finish == "stop" and not request.stop and int(tokens[-1]) not in eos_ids:
        return "a trajectory that stops without an end-of-text token"
    if request.watch:
        n = [0 if x is None else len(x) for x in (done.changes, done.early)]
        if n != [len(request.watch)] * 2:
            return f"{n[0]} and {n[1]} answers for {len(request.watch)} watched interventions"
        assert done.changes is not None
        if (
            (done.changes >= len(tokens)) | ((done.changes < n_prefix) & (done.changes != -1))
        ).any():
            return "a watched intervention that differs outside of what was generated"
    return None


def checked(request: Request, done: Completion, eos_ids: Collection[int]) -> Completion:
    """The completion, or a failed one that says why it cannot be true."""
    if done.finish == "error":
        return done
    fault = fault_of(request, done, eos_ids)
    if fault is None:
        return done
    prefix = np.asarray(request.prefix, dtype=np.int32)
    return replace(
        done, tokens=prefix, n_generated=0, finish="error", changes=None, early=None,
        error=f"the engine returned {fault}",
    )  # fmt: skip
