"""A trajectory under way: when it ends, and what is returned then. The same for every engine."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from knockout.engines.base import Completion, EngineInfo, Finish, Request
from knockout.errors import UsageError
from knockout.processors.rules import check_ids
from knockout.tokens.thinking import after_thinking, opened_by

__all__ = ["Beginnings", "StopStrings", "Trajectory", "check_request"]


class StopStrings:
    """Finds stop strings in the text of a trajectory, token by token.

    Whether a trajectory ends at a token depends on its last tokens alone, never on where
    generation began, so that a baseline and its forks end alike and a match may span the fork
    point. The window is wide enough for a match of byte tokens (four to a character).
    """

    def __init__(self, tokenizer: Any, stops: tuple[str, ...], after: str = "") -> None:
        self._tokenizer = tokenizer
        self._after = after
        self._stops = stops
        self._window = 4 * max(map(len, stops)) + 4
        # Only a token whose own text holds the last character of a stop string can complete it.
        # A lone token's leading space may be lost in decoding, so a stop that ends in one is
        # looked for at every token.
        self._always = any(stop.endswith(" ") for stop in stops)
        self._can_end: dict[int, bool] = {}

    def ends(self, tokens: list[int], *, opened: bool = False) -> bool:
        """Whether the last of the tokens completes a stop string.

        With `after`, only in the answer behind the thinking, which the prompt may have opened.
        """
        if not self._may_end(tokens[-1]):
            return False
        text = self._decode(tokens[-self._window :])
        if not any(stop in text for stop in self._stops):
            return False
        if not self._after:
            return True
        answer = after_thinking(self._decode(tokens), self._after, opened=opened)
        return answer is not None and any(stop in answer for stop in self._stops)

    def _may_end(self, token: int) -> bool:
        if self._always:
            return True
        known = self._can_end.get(token)
        if known is None:
            text = self._decode([token])
            known = "\N{REPLACEMENT CHARACTER}" in text or any(s[-1] in text for s in self._stops)
            self._can_end[token] = known
        return known

    def _decode(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(
            tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text


class Trajectory:
    """One request's tokens so far.

    Attributes:
        request: What was asked.
        tokens: The trajectory, prefix included.
        limit: Longest trajectory: `max_tokens`, or what the model's context leaves.
    """

    def __init__(
        self,
        request: Request,
        *,
        eos_ids: Collection[int],
        max_model_len: int,
        stops: StopStrings | None,
        opened: bool = False,
    ) -> None:
        self.request = request
        self._opened = opened
        self.tokens = list(request.prefix)
        self.limit = min(request.max_tokens, max_model_len - len(request.prompt))
        self._eos_ids = eos_ids
        self._stops = stops
        # (capacity, L), grown by doubling: a long run holds millions of these steps.
        self._top_ids = np.empty((0, request.logprobs), dtype=np.int32)
        self._top_logprobs = np.empty((0, request.logprobs), dtype=np.float32)

    @property
    def n_generated(self) -> int:
        """Tokens generated so far, prefix excluded."""
        return len(self.tokens) - len(self.request.prefix)

    @property
    def finish(self) -> Finish | None:
        """Why the trajectory ends with its last token, or None where it goes on."""
        if self.tokens:
            if self.tokens[-1] in self._eos_ids:
                return "stop"
            if self._stops is not None and self._stops.ends(self.tokens, opened=self._opened):
                return "stop"
        return "length" if len(self.tokens) >= self.limit else None

    def extend(
        self,
        tokens: Collection[int],
        top_ids: NDArray[np.int32] | None,
        top_logprobs: NDArray[np.float32] | None,
    ) -> Finish | None:
        """Appends generated tokens, up to the one that ends the trajectory.

        Args:
            tokens: n ids.
            top_ids: (n, L) int32 and
            top_logprobs: (n, L) float32 of those steps, or None.

        Returns:
            Why it ended, or None.
        """
        ended: Finish | None = None
        taken = 0
        for token in tokens:
            self.tokens.append(int(token))
            taken += 1
            if ended := self.finish:
                break
        if top_ids is not None and top_logprobs is not None:
            end = self.n_generated
            if end > len(self._top_ids):
                self._top_ids = _grown(self._top_ids, end)
                self._top_logprobs = _grown(self._top_logprobs, end)
            self._top_ids[end - taken : end] = top_ids[:taken]
            self._top_logprobs[end - taken : end] = top_logprobs[:taken]
        return ended

    def completion(self, finish: Finish, error: str | None = None) -> Completion:
        """What the engine returns."""
        top_ids = top_logprobs = None
        if self.request.logprobs:
            top_ids = self._top_ids[: self.n_generated].copy()
            top_logprobs = self._top_logprobs[: self.n_generated].copy()
        return Completion(
            key=self.request.key,
            tokens=np.asarray(self.tokens, dtype=np.int32),
            n_generated=self.n_generated,
            finish=finish,
            top_ids=top_ids,
            top_logprobs=top_logprobs,
            error=error,
        )


def _grown(array: NDArray[Any], rows: int) -> NDArray[Any]:
    """The array with room for at least `rows` rows."""
    larger = np.empty((max(rows, 2 * len(array), 64), array.shape[1]), dtype=array.dtype)
    larger[: len(array)] = array
    return larger


def check_request(request: Request, info: EngineInfo, open_keys: Collection[str]) -> None:
    """Refuses a request that no engine could run.

    Raises:
        UsageError: The message names the request and what is wrong with it.
    """
    width = info.vocab_size
    where = f"request {request.key!r}"
    if request.key in open_keys:
        raise UsageError(f"{where} is in flight already; keys must be unique")
    if not request.prompt:
        raise UsageError(f"{where} has an empty prompt")
    if not 0 <= request.seed < 2**63:
        raise UsageError(f"{where}: seed {request.seed} is not in 0 to 2^63 − 1")
    if not 0 <= request.logprobs <= width:
        raise UsageError(f"{where}: logprobs is {request.logprobs}; expected 0 to {width}")
    if "" in request.stop:
        raise UsageError(f"{where} has an empty stop string")
    try:
        check_ids(request.banned, width=width, where=f"{where}: the ban")
        check_ids(request.prompt, width=width, where=f"{where}: the prompt")
        check_ids(request.prefix, width=width, where=f"{where}: the prefix")
    except ValueError as error:
        raise UsageError(str(error)) from None


class Beginnings:
    """Begins an engine's trajectories; keeps what finds a set of stop strings, once made."""

    def __init__(self, info: EngineInfo, tokenizer: Any) -> None:
        self._info = info
        self._tokenizer = tokenizer
        self._stops: dict[tuple[str, tuple[str, ...]], StopStrings] = {}

    def begin(self, request: Request, open_keys: Collection[str]) -> Trajectory:
        """Makes a trajectory that holds the request's prefix; it may be at its end already.

        Raises:
            UsageError: The request is wrong in itself; see `check_request`.
        """
        check_request(request, self._info, open_keys)
        stops, opened, after = None, False, request.stop_after
        if request.stop:
            stops = self._stops.get((after, request.stop))
            if stops is None:
                stops = StopStrings(self._tokenizer, request.stop, after)
                self._stops[after, request.stop] = stops
            if after:
                end = self._tokenizer.decode(list(request.prompt[-32:]), skip_special_tokens=False)
                opened = opened_by(str(end), after)
        return Trajectory(
            request, eos_ids=self._info.eos_ids, max_model_len=self._info.max_model_len,
            stops=stops, opened=opened,
        )  # fmt: skip
