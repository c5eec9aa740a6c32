"""The protocol of engines: they take requests at any time and return completions as they finish."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from knockout.method.interventions import Intervention
from knockout.method.sampling import Sampling
from knockout.processors.rules import watch_of

if TYPE_CHECKING:
    from knockout.engines.scoring import Pair, Scored

__all__ = [
    "Completion",
    "Engine",
    "EngineInfo",
    "Finish",
    "Request",
    "Scores",
    "Several",
    "generate",
    "n_reported",
    "to_extra_args",
]

# Engines sort and return this many numbers a step; a token is seldom in more interventions.
_MOST_REPORTED = 32

Finish = Literal["stop", "length", "error"]


@dataclass(frozen=True, slots=True)
class Request:
    """One trajectory to generate.

    Attributes:
        key: Unique among the requests in flight; the completion carries it back.
        prompt: Token ids of the prompt.
        prefix: Token ids of the trajectory that are fixed already (a fork's inherited part). They
            count towards `max_tokens`, and the position of the first generated token is
            `len(prompt) + len(prefix)`.
        seed: 63-bit seed of the cell; the same for the baseline and all of its knockouts.
        sampling: Temperature and truncation of the coupled pick.
        max_tokens: Longest trajectory, prefix included.
        intervention: What is changed at each generated step; None for the untouched policy.
        watch: Interventions for which the completion says where the pick under them (instead of
            the request's own) would differ.
        think_end: Token ids that close the thinking, for interventions that act in the thinking
            or in the answer alone; () for none.
        stop: Strings that end the trajectory. Checked on the text of the whole trajectory, so
            that a stop string may span the fork point; the token that completes it is the last.
        stop_after: What closes the thinking: stop strings count only in the answer after it, or
            if there is no thinking. "" if they count everywhere.
    """

    key: str
    prompt: tuple[int, ...]
    seed: int
    sampling: Sampling
    max_tokens: int
    prefix: tuple[int, ...] = ()
    intervention: Intervention | None = None
    stop: tuple[str, ...] = ()
    stop_after: str = ""
    watch: tuple[Intervention, ...] = ()
    think_end: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished trajectory.

    Attributes:
        key: The request's key.
        tokens: (T,) int32, the whole trajectory, prefix included. An end-of-text token that
            ended it is its last token.
        n_generated: How many of them this request generated: T − len(prefix).
        finish: "stop" (end-of-text token or stop string), "length", or "error".
        changes: (W,) int32, for each watched intervention the first generated step (its index in
            the whole trajectory) at which the pick would differ, −1 if there is none; None
            if nothing was watched.
        early: (W,) bool, whether more would differ at that step than an answer can name, so that
            those not named are assumed to differ; None if nothing was watched.
        error: What went wrong, if finish is "error"; tokens are then those before it.
    """

    key: str
    tokens: NDArray[np.int32]
    n_generated: int
    finish: Finish
    changes: NDArray[np.int32] | None = None
    early: NDArray[np.bool_] | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What runs, for the ledger, the summary and `doctor`.

    Attributes:
        kind: "vllm", "transformers", ...
        model: The name the user gave.
        device: For example "cpu" or "cuda".
        dtype: For example "float32".
        runner: "v1" or "v2" for vLLM, "" elsewhere.
        vocab_size: Width of the logits, padding included.
        eos_ids: Token ids that end a trajectory.
        max_model_len: Longest prompt plus trajectory, in tokens.
        versions: Distribution name to version.
        settings: Engine settings that may change rounding, for the record; `max_num_seqs`, the requests
            that run at once, also says how many to hand over (64 where it is missing).
    """

    kind: str
    model: str
    device: str
    dtype: str
    runner: str
    vocab_size: int
    eos_ids: tuple[int, ...]
    max_model_len: int
    versions: dict[str, str] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)


@runtime_checkable
class Engine(Protocol):
    """What every engine is. It is used from one thread.

    Attributes:
        info: What runs.
        tokenizer: The model's tokenizer.
    """

    info: EngineInfo
    tokenizer: Any

    def add(self, request: Request) -> None:
        """Queues a request; allowed at any time, also while others run.

        Raises:
            UsageError: The request is wrong in itself (an id outside the vocabulary, a key twice).
        """

    def step(self) -> list[Completion]:
        """Advances all running requests by (about) one token; returns those that finished."""

    @property
    def n_open(self) -> int:
        """Requests added and not yet returned."""

    def close(self) -> None:
        """Frees the engine. Harmless when called twice."""


@runtime_checkable
class Scores(Protocol):
    """What an engine may offer too, for lm-eval's log-likelihood tasks and the check of weights."""

    def score(self, pairs: Sequence[Pair], banned: Sequence[int] = ()) -> list[Scored]:
        """Log-likelihoods of continuations under a ban; nothing may be open.

        Args:
            pairs: Token ids of each context (not empty) and its continuation.
            banned: Token ids whose logits are −∞.

        Returns:
            One result a pair.
        """


@runtime_checkable
class Several(Protocol):
    """An engine of several copies; `max_num_seqs` is that of one."""

    n_engines: int


def generate(engine: Engine, requests: Iterable[Request]) -> Iterator[Completion]:
    """Runs requests to their end and yields completions as they finish (in no fixed order)."""
    for request in requests:
        engine.add(request)
    while engine.n_open:
        yield from engine.step()


def to_extra_args(request: Request, fail_token: int | None = None) -> dict[str, Any]:
    """The `extra_args` of a coupled engine request; `rule_from_extra_args` reads them back.

    Args:
        request: What is asked.
        fail_token: What comes out where a row cannot be sampled from, marked as such in the
            log-probabilities; best one that ends the request.
    """
    sampling = request.sampling
    args: dict[str, Any] = {
        "knockout_name": request.key,
        "knockout_seed": request.seed,
        "knockout_temperature": sampling.temperature,
        "knockout_top_p": sampling.top_p,
        "knockout_top_k": sampling.top_k,
        "knockout_min_p": sampling.min_p,
    }
    own = request.intervention
    if own is not None and own.is_plain_ban:
        args["knockout_ids"] = list(own.token_ids)
    elif own is not None:
        args["knockout_intervention"] = json.dumps(own.to_record())
    if request.watch:
        args["knockout_watch"] = watch_of(request.watch).text
        args["knockout_report"] = n_reported(request)
    if own is not None or request.watch:
        args["knockout_start"] = len(request.prompt)
        if request.think_end:
            args["knockout_think_end"] = list(request.think_end)
    if fail_token is not None:
        args["knockout_fail_token"] = fail_token
    return args


def n_reported(request: Request) -> int:
    """How many watched interventions one step can name; the others that differ count as early."""
    return min(len(request.watch), _MOST_REPORTED)
