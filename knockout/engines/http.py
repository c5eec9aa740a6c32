"""One OpenAI-style vLLM server: its health, what it serves, and completions as token ids."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import httpx

from knockout.errors import KnockoutError, UsageError

__all__ = ["Refused", "ServedModel", "Server", "Unavailable"]

_SHORT_S = 10.0
# Of requests that another try may answer.
_PASSING = {408, 409, 425, 429}
# Of servers that answer no request at all: a wrong key, another model's name.
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
    """The server did not answer now; another try may succeed."""


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
        url: Without the trailing `/v1`.
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
            raise UsageError(f"engine.urls: found {url!r}; expected http://HOST:PORT")
        self.url = url.rstrip("/").removesuffix("/v1").rstrip("/")
        self.n_open = 0
        self.down = False
        key = os.environ.get("VLLM_API_KEY")
        self._client = httpx.Client(
            base_url=self.url,
            timeout=httpx.Timeout(timeout_s, connect=_SHORT_S),
            limits=httpx.Limits(max_connections=connections + 2),
            headers={"Authorization": f"Bearer {key}"} if key else {},
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
            wanted: The name among several; None where there is one.

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
        if answer.status_code != 200:
            raise UsageError(
                f"engine.urls: {self.url}/v1/models answers {answer.status_code}; expected a vLLM "
                "server with the OpenAI-style API"
            )
        models = {entry["id"]: entry for entry in answer.json()["data"]}
        if wanted is None and len(models) > 1:
            wanted = next((n for n, m in models.items() if not m.get("parent")), None)
        name = wanted or next(iter(models))
        if name not in models:
            raise UsageError(
                f"engine.options.model is {name!r}; {self.url} serves {', '.join(models)}"
            )
        length = models[name].get("max_model_len")
        if not length:
            raise UsageError(f"engine.urls: {self.url} names no max_model_len; is it vLLM?")
        shown = version.json().get("version", "") if version.status_code == 200 else ""
        return ServedModel(name, int(length), str(shown))

    def encode(self, model: str, text: str) -> list[int] | None:
        """The server's own token ids of a text; None where it does not tell."""
        body = {"model": model, "prompt": text, "add_special_tokens": False}
        try:
            answer = self._client.post("/tokenize", json=body, timeout=_SHORT_S)
        except httpx.HTTPError:
            return None
        if answer.status_code != 200:
            return None
        return [int(token) for token in answer.json().get("tokens", [])]

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        """Sends one completion and waits for its end.

        Raises:
            Refused: The server says that the request is wrong.
            Unavailable: It failed or did not answer.
        """
        try:
            answer = self._client.post("/v1/completions", json=body)
            content: dict[str, Any] = answer.json()
        except (httpx.HTTPError, ValueError) as error:
            raise Unavailable(f"{self.url}: {type(error).__name__}: {error}") from error
        if answer.status_code == 200:
            return content
        error_of = content.get("error", content)
        told = error_of.get("message", error_of) if isinstance(error_of, dict) else error_of
        text = f"{self.url} answers {answer.status_code}: {told}"
        if answer.status_code >= 500 or answer.status_code in _PASSING:
            raise Unavailable(text)
        raise Refused(text, always=answer.status_code in _HOPELESS)

    def close(self) -> None:
        """Closes the connections."""
        self._client.close()
