"""A teacher behind a vLLM server: its log-probabilities of the student's rollouts, over HTTP.

vLLM's completions take a prompt as token ids and give, with `prompt_logprobs: k`, the log-probabilities
of the k most probable tokens at each place and of the token that stands there. A rollout is sent as
such a prompt. What comes back is a `Listed`: the loss takes the listed tokens as they are and all
others as one (`knockout.training.divergence`), so a larger k is a closer divergence; with
`Divergence(sampled=True)` k = 1 is enough.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import torch

from knockout.config.urls import split_secret, without_secrets
from knockout.errors import KnockoutError, UsageError
from knockout.training.divergence import Listed

__all__ = ["ServedTeacher", "stack"]


class ServedTeacher:
    """Asks one vLLM server for a teacher's log-probabilities.

    Example:
        ```python
        teacher = ServedTeacher("http://127.0.0.1:8000", top_k=20)
        listed = teacher([prompt + response], [len(prompt)])[0]  # (T, 21)
        loss = selective_kl(hidden, head_of(student), listed, None, weights)
        ```
    """

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        top_k: int = 20,
        timeout_s: float = 300.0,
        attempts: int = 4,
        at_once: int = 8,
    ) -> None:
        """Prepares the connection; contacts nothing.

        Args:
            url: For example "http://127.0.0.1:8000", with or without "/v1".
            model: The name that it serves; None asks it.
            top_k: Listed tokens at each place, beside the one that stands there. The server's
                `--max-logprobs` (20 by default) limits it.
            timeout_s: Longest time for one sequence, in seconds.
            attempts: How often a sequence is tried if the server does not answer or says 5xx.
            at_once: Sequences that are under way at once.

        Raises:
            UsageError: The address or a number makes no sense.
        """
        if not url.startswith(("http://", "https://")):
            raise UsageError(f"teacher: found {without_secrets(url)!r}; expected http://HOST:PORT")
        if top_k < 1 or attempts < 1 or at_once < 1:
            raise UsageError(
                f"top_k is {top_k}, attempts {attempts}, at_once {at_once}; expected 1 or more"
            )
        url, secret = split_secret(url)
        self.url = url.rstrip("/").removesuffix("/v1").rstrip("/")
        self.model, self.top_k = model, top_k
        self.attempts, self.at_once = attempts, at_once
        self._client = httpx.Client(base_url=self.url, timeout=timeout_s, auth=secret)

    def close(self) -> None:
        """Ends the connections."""
        self._client.close()

    def __call__(self, sequences: Sequence[Sequence[int]], starts: Sequence[int]) -> list[Listed]:
        """The teacher's log-probabilities for the tokens from `starts` on.

        Args:
            sequences: Token ids (L_i,) of prompt and response.
            starts: Index of each response's first token, at least 1.

        Returns:
            For each sequence (L_i − start_i, top_k + 1) on the CPU; the token that stands there is
            always listed.

        Raises:
            UsageError: The server refuses the request, and says why.
            KnockoutError: It does not answer, or its answer is no such list.
        """
        pairs = list(zip(sequences, starts, strict=True))
        if any(not 1 <= start <= len(ids) for ids, start in pairs):
            raise UsageError("a response starts at its second token or later; found another start")
        if self.model is None:
            names = [one["id"] for one in self._ask("GET", "/v1/models", None)["data"]]
            if len(names) != 1:
                raise UsageError(f"{self.url} serves {', '.join(names)}: say which is the teacher")
            self.model = str(names[0])
        with ThreadPoolExecutor(self.at_once) as pool:
            return list(pool.map(lambda pair: self._one(*pair), pairs))

    def _one(self, ids: Sequence[int], start: int) -> Listed:
        body = {
            "model": self.model,
            "prompt": [int(i) for i in ids],
            "max_tokens": 1,
            "temperature": 0,
            "prompt_logprobs": self.top_k,
        }
        answer = self._ask("POST", "/v1/completions", body)
        try:
            places = answer["choices"][0]["prompt_logprobs"]
            rows = [_row(place, int(token)) for place, token in zip(places, ids, strict=True)][
                start:
            ]
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise KnockoutError(
                f"{self.url}: its answer is no list of prompt log-probabilities ({error}); is it vLLM?"
            ) from None
        width = self.top_k + 1
        listed = torch.full((len(rows), width), -1, dtype=torch.int64)
        logp = torch.full((len(rows), width), -math.inf)
        for place, row in enumerate(rows):
            kept = row[:width]
            listed[place, : len(kept)] = torch.tensor([i for i, _ in kept])
            logp[place, : len(kept)] = torch.tensor([x for _, x in kept])
        return Listed(listed, logp)

    def _ask(self, method: str, path: str, body: dict[str, Any] | None) -> Any:
        last = ""
        for attempt in range(self.attempts):
            if attempt:
                time.sleep(min(30.0, 0.5 * 2.0**attempt))
            try:
                answer = self._client.request(method, path, json=body)
            except httpx.HTTPError as error:
                last = f"{type(error).__name__}: {error}"
                continue
            if answer.status_code >= 500 or answer.status_code == 429:
                last = f"status {answer.status_code}"
                continue
            if answer.status_code != 200:
                raise UsageError(
                    f"{self.url}{path}: status {answer.status_code}: {answer.text[:300]}"
                )
            try:
                return answer.json()
            except ValueError:
                last = "an answer that is no JSON"
        raise KnockoutError(f"{self.url}{path}: no answer in {self.attempts} attempts: {last}")


def _row(place: dict[str, Any] | None, token: int) -> list[tuple[int, float]]:
    """Ids and log-probabilities of a place, the token that stands there first; [] for the first."""
    if place is None:
        return []
    found = {int(i): float(value["logprob"]) for i, value in place.items()}
    if any(math.isnan(x) or x > 1e-3 for x in found.values()):
        raise ValueError("a log-probability is above 0, or not a number")
    own = found.pop(token)
    return [(token, own), *sorted(found.items(), key=lambda pair: (-pair[1], pair[0]))]


def stack(listed: Sequence[Listed], length: int, device: torch.device | str = "cpu") -> Listed:
    """Lists of several responses as one batch, for `Selector.loss`.

    Args:
        listed: Of `ServedTeacher`, (T_i, k) each.
        length: T, at least the longest.
        device: Where the batch lives.

    Returns:
        (B, T, k); past a response's end all ids are −1.
    """
    k = max((one.ids.shape[1] for one in listed), default=1)
    ids = torch.full((len(listed), length, k), -1, dtype=torch.int64)
    logp = torch.full((len(listed), length, k), -math.inf)
    for row, one in enumerate(listed):
        ids[row, : one.ids.shape[0], : one.ids.shape[1]] = one.ids
        logp[row, : one.ids.shape[0], : one.ids.shape[1]] = one.logp
    return Listed(ids.to(device), logp.to(device))
