"""What an intervention in a part of the text must give, from requests that act everywhere.

Noise is keyed by position, so a trajectory may be cut where the thinking closes: on the one side it
is the knockout, on the other the untouched policy.
"""

from __future__ import annotations

from dataclasses import replace

from knockout.engines.base import Engine, Request, generate
from knockout.method.interventions import Intervention

__all__ = ["by_hand", "check_where", "found_by"]


def found_by(engine: Engine, request: Request) -> list[int]:
    (done,) = generate(engine, [request])
    assert done.error is None
    return [int(token) for token in done.tokens]


def cut(tokens: list[int], tag: tuple[int, ...]) -> int | None:
    """How many tokens stand up to and including the first tag."""
    ends = range(len(tag), len(tokens) + 1)
    return next((n for n in ends if tuple(tokens[n - len(tag) : n]) == tag), None)


def by_hand(engine: Engine, plain: Request, one: Intervention, tag: tuple[int, ...]) -> list[int]:
    everywhere = replace(one, where="everywhere")
    before, after = (everywhere, None) if one.where == "thinking" else (None, everywhere)
    first = found_by(engine, replace(plain, intervention=before))
    at = cut(first, tag)
    if at is None or at == len(first):
        return first
    return found_by(engine, replace(plain, prefix=tuple(first[:at]), intervention=after))


def check_where(
    engine: Engine, plain: Request, tag: tuple[int, ...], watch: tuple[Intervention, ...]
) -> set[str]:
    """Compares runs from scratch, what a baseline says of them, and forks with the cut ones.

    Returns:
        The parts in which some intervention changed something.
    """
    baseline = found_by(engine, plain)
    (told,) = generate(engine, [replace(plain, watch=watch, think_end=tag)])
    assert [int(token) for token in told.tokens] == baseline
    assert told.changes is not None
    active: set[str] = set()
    for one, step in zip(watch, told.changes.tolist(), strict=True):
        want = by_hand(engine, plain, one, tag)
        own = replace(plain, intervention=one, think_end=tag)
        assert found_by(engine, own) == want, one
        differ = [n for n, (a, b) in enumerate(zip(baseline, want, strict=False)) if a != b]
        assert step == (differ[0] if differ else -1), one
        if differ:
            active.add(one.where)
            assert found_by(engine, replace(own, prefix=tuple(baseline[:step]))) == want
    return active
