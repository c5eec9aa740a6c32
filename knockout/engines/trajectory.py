"""A trajectory in progress: when it ends and what is returned then, the same for every engine."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from knockout.engines.base import Completion, EngineInfo, Finish, Request
from knockout.errors import UsageError
from knockout.method.interventions import Intervention
from knockout.processors.names import Differing
from knockout.processors.rules import check_ids
from knockout.processors.thinking import Thought
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
        # Only a token whose own text contains the last character of a stop string can complete it.
        # A lone token's leading space may be lost in decoding, so a stop that ends in one is
        # looked for at every token.
        self._always = any(stop.endswith(" ") for stop in stops)
        self._can_end: dict[int, bool] = {}

    def ends(self, tokens: list[int], *, opened: bool = False) -> bool:
        """Whether the last of the tokens completes a stop string.

        With `after`, only in the answer after the thinking, which the prompt may have opened.
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

    _thought: Thought | None = None

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
        self._changes = np.full(len(request.watch), -1, dtype=np.int32)
        self._early = np.zeros(len(request.watch), dtype=bool)

    @property
    def n_generated(self) -> int:
        """Tokens generated so far, prefix excluded."""
        return len(self.tokens) - len(self.request.prefix)

    @property
    def thought_closed(self) -> bool:
        """Whether the tokens that close the thinking have come; False if there are none."""
        if not self.request.think_end:
            return False
        if self._thought is None:
            prompt = self.request.prompt
            self._thought = Thought(self.request.think_end, prompt, len(prompt))
        for token in self.tokens[self._thought.seen :]:
            self._thought.take(token)
        return self._thought.closed

    @property
    def finish(self) -> Finish | None:
        """Why the trajectory ends with its last token, or None if it goes on."""
        if self.tokens:
            if self.tokens[-1] in self._eos_ids:
                return "stop"
            if self._stops is not None and self._stops.ends(self.tokens, opened=self._opened):
                return "stop"
        return "length" if len(self.tokens) >= self.limit else None

    def extend(self, tokens: Collection[int], differing: Sequence[Differing] = ()) -> Finish | None:
        """Appends generated tokens, up to the one that ends the trajectory.

        Args:
            tokens: n ids.
            differing: For each of them, if something is watched, which of the watched
                interventions would have picked another.

        Returns:
            Why it ended, or None.
        """
        ended: Finish | None = None
        for n, token in enumerate(tokens):
            if self.request.watch:
                self._note(differing[n])
            self.tokens.append(int(token))
            if ended := self.finish:
                break
        return ended

    def _note(self, differing: Differing) -> None:
        step = len(self.tokens)
        if differing.named:
            named = np.asarray(differing.named)
            first = named[self._changes[named] < 0]
            self._changes[first] = step
        if differing.and_more:
            rest = self._changes < 0
            self._changes[rest] = step
            self._early[rest] = True

    def completion(self, finish: Finish, error: str | None = None) -> Completion:
        """What the engine returns."""
        watched = bool(self.request.watch)
        return Completion(
            key=self.request.key,
            tokens=np.asarray(self.tokens, dtype=np.int32),
            n_generated=self.n_generated,
            finish=finish,
            changes=self._changes.copy() if watched else None,
            early=self._early.copy() if watched else None,
            error=error,
        )


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
    if "" in request.stop:
        raise UsageError(f"{where} has an empty stop string")
    try:
        for one in {id(i): i for i in (request.intervention, *request.watch) if i}.values():
            _check_intervention(one, width, where, bool(request.think_end))
        check_ids(request.prompt, width=width, where=f"{where}: the prompt")
        check_ids(request.prefix, width=width, where=f"{where}: the prefix")
        check_ids(request.think_end, width=width, where=f"{where}: the end of the thinking")
    except ValueError as error:
        raise UsageError(str(error)) from None


def _check_intervention(one: Intervention, width: int, where: str, has_end: bool) -> None:
    """Raises ValueError if an id is outside the logits, or the text's parts are not known."""
    what = {"ban": "the ban", "penalty": "the penalty", "replace": "the replacement"}[one.kind]
    if one.token_ids[-1] >= width or (one.replacement or 0) >= width:
        check_ids(list(one.token_ids), width=width, where=f"{where}: {what}")
        check_ids([one.replacement], width=width, where=f"{where}: {what}")
    if one.where != "everywhere" and not has_end:
        raise ValueError(
            f"{where}: {what} acts in the {one.where} alone, which needs think_end, the token ids "
            "that close the thinking"
        )


class Beginnings:
    """Begins an engine's trajectories; keeps one finder for each set of stop strings."""

    def __init__(self, info: EngineInfo, tokenizer: Any) -> None:
        self._info = info
        self._tokenizer = tokenizer
        self._stops: dict[tuple[str, tuple[str, ...]], StopStrings] = {}

    def begin(self, request: Request, open_keys: Collection[str]) -> Trajectory:
        """Makes a trajectory that starts with the request's prefix; it may be at its end already.

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
