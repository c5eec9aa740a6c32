"""One OpenAI-style vLLM server: its health, what it serves, and completions as token ids."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import httpx

from knockout.config.urls import split_secret, without_secrets
from knockout.engines.answers import (
    Odd,
    Piece,
    read_completion,
    read_models,
    read_prompt_logprobs,
    read_tokens,
)
from knockout.errors import KnockoutError, UsageError

__all__ = ["Refused", "ServedModel", "Server", "Unavailable"]

_SHORT_S = 10.0
# A repeated request may succeed after these.
_PASSING = {408, 409, 425, 429}
# From overloaded servers: no request's own fault.
_BUSY = {429, 503}
# From servers that refuse every request: a wrong key, another model's name.
_HOPELESS = {401, 403, 404, 405}


class Refused(Exception):
    """The server will never answer this request.

    Attributes:
        always: Whether it would refuse any other too.
    """

    def __init__(self, message: str, *, always: bool = False) -> None:
        super().__init__(message)
        self.always = always


class Unavailable(Exception):
    """The server did not answer, or answered something odd; another try may succeed.

    Attributes:
        busy: Whether it says that it is overloaded.
    """

    def __init__(self, message: str, *, busy: bool = False) -> None:
        super().__init__(message)
        self.busy = busy


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What a server serves.

    Attributes:
        name: What requests call it.
        max_model_len: Longest prompt plus trajectory, in tokens.
        version: vLLM's.
    """

    name: str
    max_model_len: int
    version: str


class Server:
    """Talks to one server; used from many threads.

    Attributes:
        url: Without the trailing `/v1`, and without a user and password.
        n_open: Requests that were given to it and not answered; kept by the engine.
        down: Whether the last contact failed.
    """

    def __init__(self, url: str, *, timeout_s: float, connections: int) -> None:
        """Prepares connections; contacts nothing.

        Args:
            url: For example "http://127.0.0.1:8000" (with or without "/v1").
            timeout_s: Longest time for one completion, in seconds.
            connections: Requests at once.
        """
        if not url.startswith(("http://", "https://")):
            raise UsageError(
                f"engine.urls: found {without_secrets(url)!r}; expected http://HOST:PORT"
            )
        url, secret = split_secret(url)
        self.url = url.rstrip("/").removesuffix("/v1").rstrip("/")
        self.n_open = 0
        self.down = False
        key = os.environ.get("VLLM_API_KEY")
        self._client = httpx.Client(
            base_url=self.url,
            timeout=httpx.Timeout(timeout_s, connect=_SHORT_S),
            limits=httpx.Limits(max_connections=connections + 2),
            headers={"Authorization": f"Bearer {key}"} if key and secret is None else {},
            auth=secret,
        )

    def healthy(self) -> bool:
        """Whether it answers, and its engine lives."""
        try:
            return self._client.get("/health", timeout=_SHORT_S).status_code == 200
        except httpx.HTTPError:
            return False

    def served(self, wanted: str | None) -> ServedModel:
        """What it serves.

        Args:
            wanted: The name among several; None if there is one.

        Raises:
            UsageError: It serves another model, or is no vLLM server.
            KnockoutError: It does not answer.
        """
        try:
            answer = self._client.get("/v1/models", timeout=_SHORT_S)
            version = self._client.get("/version", timeout=_SHORT_S)
        except httpx.HTTPError as error:
            raise KnockoutError(
                f"engine.urls: {self.url} does not answer ({type(error).__name__}: {error}); "
                "is the server up?"
            ) from error
        if answer.status_code in (401, 403):
            raise UsageError(
                f"engine.urls: {self.url} wants a key: set VLLM_API_KEY to the server's --api-key"
            )
        if answer.status_code >= 500:
            raise KnockoutError(
                f"engine.urls: {self.url}/v1/models answers {answer.status_code}; is the server up?"
            )
        if answer.status_code != 200:
            raise UsageError(
                f"engine.urls: {self.url}/v1/models answers {answer.status_code}; expected a vLLM "
                "server with the OpenAI-style API"
            )
        try:
            models = read_models(answer.json())
        except ValueError as error:
            raise UsageError(
                f"engine.urls: {self.url}/v1/models answers {error}; expected a vLLM server"
            ) from None
        if wanted is None and len(models) > 1:
            wanted = next((n for n, m in models.items() if not m.get("parent")), None)
        name = wanted or next(iter(models))
        if name not in models:
            raise UsageError(
                f"engine.options.model is {name!r}; {self.url} serves {', '.join(models)}"
            )
        length = models[name].get("max_model_len")
        if type(length) is not int or length < 1:
            raise UsageError(f"engine.urls: {self.url} names no max_model_len; is it vLLM?")
        return ServedModel(name, length, _version(version))

    def encode(self, model: str, text: str) -> list[int] | None:
        """The server's own token ids of a text; None if it does not tell.

        Raises:
            KnockoutError: What it tells are no token ids.
        """
        body = {"model": model, "prompt": text, "add_special_tokens": False}
        try:
            answer = self._client.post("/tokenize", json=body, timeout=_SHORT_S)
        except httpx.HTTPError:
            return None
        if answer.status_code != 200:
            return None
        try:
            return read_tokens(answer.json())
        except ValueError as error:
            raise KnockoutError(
                f"engine.urls: {self.url}/tokenize answers {error}; expected token ids"
            ) from None

    def complete(self, body: dict[str, Any], vocab_size: int) -> Piece:
        """Sends one completion and waits for its end.

        Raises:
            Refused: The server says that the request is wrong.
            Unavailable: It failed, did not answer, or answered something else.
        """
        content = self._post(body)
        try:
            return read_completion(
                content,
                top=body["logprobs"],
                most=body["max_tokens"],
                vocab_size=vocab_size,
            )
        except Odd as odd:
            raise Unavailable(f"{self.url} answers {odd}") from None

    def prompt_logprobs(self, model: str, prompt: list[int]) -> list[float]:
        """The log-probability of each token of a prompt but the first, by the untouched model.

        Raises:
            Refused, Unavailable: As `complete`.
        """
        content = self._post(
            {"model": model, "prompt": prompt, "max_tokens": 1, "temperature": 0,
             "prompt_logprobs": 0, "return_token_ids": True}
        )  # fmt: skip
        try:
            return read_prompt_logprobs(content, prompt)
        except Odd as odd:
            raise Unavailable(f"{self.url} answers {odd}") from None

    def _post(self, body: dict[str, Any]) -> Any:
        try:
            answer = self._client.post("/v1/completions", json=body)
            content: Any = answer.json()
        except (httpx.HTTPError, ValueError, RecursionError) as error:
            raise Unavailable(f"{self.url}: {type(error).__name__}: {error}") from error
        if answer.status_code == 200:
            return content
        error_of = content.get("error", content) if isinstance(content, dict) else content
        told = error_of.get("message", error_of) if isinstance(error_of, dict) else error_of
        text = f"{self.url} answers {answer.status_code}: {told}"
        if answer.status_code >= 500 or answer.status_code in _PASSING:
            raise Unavailable(text, busy=answer.status_code in _BUSY)
        raise Refused(text, always=answer.status_code in _HOPELESS)

    def close(self) -> None:
        """Closes the connections."""
        self._client.close()


def _version(answer: httpx.Response) -> str:
    """vLLM's version; "" if the server does not tell."""
    try:
        content = answer.json() if answer.status_code == 200 else {}
    except ValueError:
        return ""
    return str(content.get("version", "")) if isinstance(content, dict) else ""
