"""What a request asks of a logits processor, read from flat `extra_args` keys.

The keys are flat because the OpenAI-style server's `vllm_xargs` takes no nested values. A request
with `knockout_ids` alone is a *plain ban*: the engine goes on to sample as it likes. A request
with `knockout_temperature` is *coupled*: our own pick decides, and the engine must be told to be
greedy so that it takes it.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from knockout.method.interventions import Intervention, ban
from knockout.method.sampling import Sampling

__all__ = ["KEYS", "Rule", "Watch", "check_ids", "rule_from_extra_args", "watch_of"]

KEYS = (
    "knockout_ids",
    "knockout_seed",
    "knockout_temperature",
    "knockout_top_p",
    "knockout_top_k",
    "knockout_min_p",
    "knockout_name",
    "knockout_intervention",
    "knockout_watch",
    "knockout_report",
    "knockout_think_end",
    "knockout_start",
    "knockout_fail_token",
)
_PREFIX = "knockout_"
_COUPLED_ONLY = (
    "knockout_intervention",
    "knockout_watch",
    "knockout_report",
    "knockout_think_end",
    "knockout_start",
    "knockout_fail_token",
)
_MOST = 2**63 - 1  # of an int64; no logits have a higher id
_TRUNCATION = ("knockout_top_p", "knockout_top_k", "knockout_min_p")


@dataclass(frozen=True, slots=True)
class Watch:
    """What a request watches.

    Attributes:
        interventions: In the order in which they are reported.
        text: The same as JSON, as it travels; equal texts are one object in a process.
        highest: The highest token id in it; −1 if there is none.
        by_part: Whether any acts in the thinking or the answer alone.
    """

    interventions: tuple[Intervention, ...] = field(compare=False)
    text: str
    highest: int = field(init=False, compare=False)
    by_part: bool = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "highest", _highest(self.interventions))
        by_part = any(one.where != "everywhere" for one in self.interventions)
        object.__setattr__(self, "by_part", by_part)

    def __len__(self) -> int:
        return len(self.interventions)


@dataclass(frozen=True, slots=True)
class Rule:
    """One request's intervention and, if it is coupled, its sampling.

    Attributes:
        intervention: What is changed, if anything; a plain ban where not coupled.
        sampling: Settings of the coupled pick, or None if the engine samples.
        seed: Seed of the noise; 0 if nothing is sampled.
        name: What errors call the request.
        watch: The interventions that would change the pick are reported.
        report: How many of them a step can name.
        think_end: Token ids that close the thinking; () for none.
        start: Position of the trajectory's first step; None for the first generated token.
        fail_token: What comes out, marked in the log-probabilities, where a row cannot be sampled
            from; None if that is an error that ends the engine.
        highest: The highest token id in any of it; −1 if there is none.
    """

    intervention: Intervention | None
    sampling: Sampling | None
    seed: int
    name: str
    watch: Watch | None = None
    report: int = 0
    think_end: tuple[int, ...] = ()
    start: int | None = None
    fail_token: int | None = None
    highest: int = field(init=False, compare=False)
    _ids: dict[str, Tensor] = field(init=False, default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        # Made when the request arrives: a batch of many requests has no time for it.
        own = self.intervention
        if own is not None and own.token_ids[-1] <= _MOST:
            self._ids["cpu"] = torch.frombuffer(array("q", own.token_ids), dtype=torch.int64)
        highest = max(
            -1 if own is None else _highest((own,)),
            -1 if self.watch is None else self.watch.highest,
            -1 if self.fail_token is None else self.fail_token,
        )
        object.__setattr__(self, "highest", highest)

    def ids(self, device: torch.device | str) -> Tensor:
        """The token ids of its own intervention, (k,) int64, made once for each device."""
        found = self._ids.get(str(device))
        if found is None:
            found = self._ids[str(device)] = self._ids["cpu"].to(device)
        return found

    @property
    def banned(self) -> tuple[int, ...]:
        """The ids of a plain ban, () if there is none."""
        own = self.intervention
        return own.token_ids if own is not None and own.is_plain_ban else ()

    def check_width(self, width: int) -> None:
        """Refuses ids that the logits do not have: an intervention on them would do nothing.

        Args:
            width: Width of the logits.

        Raises:
            ValueError: Names the request, the id and the ids that there are.
        """
        if self.highest < width:
            return
        if self.intervention is not None:
            where = "knockout_ids" if self.banned else "knockout_intervention"
            _check_interventions((self.intervention,), width, f"{self}: {where}")
        if self.watch is not None:
            _check_interventions(self.watch.interventions, width, f"{self}: knockout_watch")
        if self.fail_token is not None:
            check_ids([self.fail_token], width=width, where=f"{self}: knockout_fail_token")

    @property
    def by_part(self) -> bool:
        """Whether it acts, or watches, in the thinking or the answer alone."""
        own = self.intervention
        if own is not None and own.where != "everywhere":
            return True
        return self.watch is not None and self.watch.by_part

    @property
    def coupled(self) -> bool:
        """Whether our own pick decides."""
        return self.sampling is not None

    def __str__(self) -> str:
        own = self.intervention
        ids = () if own is None else own.token_ids
        shown = ", ".join(map(str, ids[:8]))
        if len(ids) > 8:
            shown += f", ... ({len(ids)} ids)"
        what = "banned" if own is None or own.kind == "ban" else own.kind
        return f"request {self.name or '(unnamed)'} ({what}: {shown or 'nothing'})"


def _highest(interventions: Iterable[Intervention]) -> int:
    """The highest token id in any of them."""
    return max((max(one.token_ids[-1], one.replacement or 0) for one in interventions), default=-1)


def _check_interventions(interventions: Iterable[Intervention], width: int, where: str) -> None:
    for one in interventions:
        check_ids(one.token_ids, width=width, where=where)
        check_ids([] if one.replacement is None else [one.replacement], width=width, where=where)


def watch_of(interventions: tuple[Intervention, ...]) -> Watch:
    """Encodes a watch list; the last ones asked for are kept, since all baselines share one."""
    known = _encoded.get(id(interventions))
    if known is None or known.interventions is not interventions:
        if len(_encoded) >= _MOST_ENCODED:
            _encoded.clear()
        text = json.dumps([one.to_record() for one in interventions], separators=(",", ":"))
        known = _encoded[id(interventions)] = Watch(interventions, text)
    return known


# Each entry keeps its tuple alive, so that an id belongs to it alone.
_encoded: dict[int, Watch] = {}
_MOST_ENCODED = 4096


@lru_cache(maxsize=4096)
def _watch_from_text(text: str) -> Watch:
    return Watch(tuple(Intervention.from_record(one) for one in json.loads(text)), text)


@lru_cache(maxsize=4096)
def _intervention_from_text(text: str) -> Intervention:
    return Intervention.from_record(json.loads(text))


def check_ids(ids: Any, *, width: int | None = None, where: str = "knockout_ids") -> list[int]:
    """Returns token ids as a sorted list without repeats.

    Args:
        ids: What a user gave.
        width: Width of the logits, where known; ids must be below it.
        where: What the message calls the place they came from.

    Raises:
        ValueError: Not a list, or an entry is no token id; the message shows it.
    """
    if not isinstance(ids, list | tuple):
        raise ValueError(f"{where} is {ids!r}; expected a list of token ids")
    for token in ids:
        if type(token) is not int:
            raise ValueError(
                f"{where} holds {token!r} ({type(token).__name__}); expected whole numbers"
            )
        if token < 0 or (width is not None and token >= width):
            limit = "0 or more" if width is None else f"from 0 to {width - 1}"
            raise ValueError(f"{where} holds {token}; this model's token ids are {limit}")
    return sorted(set(ids))


def _number(args: Mapping[str, Any], key: str, default: float) -> float:
    value = args.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{key} is {value!r}; expected a number")
    return float(value)


def rule_from_extra_args(extra_args: Mapping[str, Any] | None) -> Rule | None:
    """Reads a request's rule; None if it carries none of our keys.

    Args:
        extra_args: `SamplingParams.extra_args`.

    Raises:
        ValueError: A key that starts with "knockout_" is unknown, or a value is out of place.
    """
    ours = {k: v for k, v in (extra_args or {}).items() if str(k).startswith(_PREFIX)}
    if not ours:
        return None
    if unknown := sorted(set(ours) - set(KEYS)):
        raise ValueError(f"unknown key {', '.join(unknown)}; known keys are {', '.join(KEYS)}")
    name = ours.get("knockout_name", "")
    if not isinstance(name, str):
        raise ValueError(f"knockout_name is {name!r}; expected a string")
    banned = tuple(check_ids(ours.get("knockout_ids", ())))

    if "knockout_temperature" not in ours:
        stray = [k for k in ("knockout_seed", *_TRUNCATION, *_COUPLED_ONLY) if k in ours]
        if stray:
            raise ValueError(f"{', '.join(stray)} without knockout_temperature changes nothing")
        if not banned:
            raise ValueError("knockout_ids is empty; expected at least one token id")
        return Rule(ban(banned), sampling=None, seed=0, name=name)

    top_k = ours.get("knockout_top_k", 0)
    if type(top_k) is not int:
        raise ValueError(f"knockout_top_k is {top_k!r}; expected a whole number")
    try:
        sampling = Sampling(
            temperature=_number(ours, "knockout_temperature", 1.0),
            top_p=_number(ours, "knockout_top_p", 1.0),
            top_k=top_k,
            min_p=_number(ours, "knockout_min_p", 0.0),
        )
    except ValueError as error:
        text = str(error)
        raise ValueError(text if text.startswith(_PREFIX) else _PREFIX + text) from None
    seed = ours.get("knockout_seed")
    if seed is None and sampling.greedy:
        seed = 0
    if seed is None:
        raise ValueError("knockout_temperature without knockout_seed; coupled noise needs a seed")
    if type(seed) is not int or not 0 <= seed < 2**63:
        raise ValueError(f"knockout_seed is {seed!r}; expected a whole number, 0 to 2^63 − 1")
    own, watch = _interventions(ours, banned)
    think_end = ours.get("knockout_think_end", ())
    _ = check_ids(think_end, where="knockout_think_end")
    scoped = [i for i in (own, *(watch.interventions if watch else ())) if i is not None]
    in_a_part = next((i.where for i in scoped if i.where != "everywhere"), None)
    if in_a_part and not think_end:
        raise ValueError(
            f"an intervention in the {in_a_part} alone needs knockout_think_end, the token ids that "
            "close the thinking"
        )
    bounded = in_a_part or any(i.first_step or i.end_step is not None for i in scoped)
    if "knockout_start" not in ours and bounded:
        raise ValueError(
            "an intervention between steps or in a part of the text needs knockout_start, the "
            "prompt's length"
        )
    return Rule(
        own, sampling, seed, name, watch=watch,
        report=_count(ours, "knockout_report", len(watch) if watch else 0),
        think_end=tuple(think_end),
        start=None if "knockout_start" not in ours else _count(ours, "knockout_start", 0),
        fail_token=(
            None if "knockout_fail_token" not in ours else _count(ours, "knockout_fail_token", 0)
        ),
    )  # fmt: skip


def _count(ours: Mapping[str, Any], key: str, default: int) -> int:
    value = ours.get(key, default)
    if type(value) is not int or value < 0:
        raise ValueError(f"{key} is {value!r}; expected a whole number, 0 or more")
    return value


def _interventions(
    ours: Mapping[str, Any], banned: tuple[int, ...]
) -> tuple[Intervention | None, Watch | None]:
    """A coupled request's own intervention and what it watches."""
    own = ban(banned) if banned else None
    key = "knockout_intervention"
    try:
        if (text := ours.get("knockout_intervention")) is not None:
            if own is not None:
                raise ValueError("it does not go with knockout_ids")
            own = _intervention_from_text(text)
        key, text = "knockout_watch", ours.get("knockout_watch")
        return own, None if text is None else _watch_from_text(text)
    except (TypeError, ValueError, KeyError) as error:
        raise ValueError(f"{key} is no intervention as JSON: {error}") from None
