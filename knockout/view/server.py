"""The pages over HTTP: one page, a few JSON answers, nothing that writes to the run."""

from __future__ import annotations

import hmac
import json
import re
import secrets
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pydantic
import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from knockout.engines.base import Engine
from knockout.errors import KnockoutError, UsageError
from knockout.report.build import render_page
from knockout.view.explorer import Explorer
from knockout.view.live import LiveRun

__all__ = ["ViewServer", "serve"]

_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_MOST_BODY = 64 * 1024
_REFRESH_S = 10
_HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class ViewServer:
    """Serves a run directory.

    A page of another site could send requests here through the user's browser. Such a request
    names another host (DNS rebinding) or lacks the page's key, and is refused.

    Args:
        folder: The run directory.
        host: Address to listen on.
        port: 0 for any free one.
        open_engine: Starts the engine of the fork explorer; None leaves the pages read-only.

    Raises:
        UsageError: There is no run, or the address cannot be listened on.
    """

    def __init__(
        self,
        folder: Path,
        host: str = "127.0.0.1",
        port: int = 0,
        open_engine: Callable[[], Engine] | None = None,
    ) -> None:
        self.live = LiveRun(folder)
        self.key = secrets.token_urlsafe(24)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._socket = socket.create_server((host, port), family=family)
        except OSError as error:
            raise UsageError(
                f"cannot listen on {host} port {port}: {error.strerror or error}; "
                "give another --port or --host"
            ) from None
        self.host = host
        self.address: tuple[str, int] = self._socket.getsockname()[:2]
        self.explorer = None if open_engine is None else Explorer(self.live, open_engine)
        settings = {"key": self.key, "explore": open_engine is not None, "every": _REFRESH_S}
        title = f"{folder.resolve().name} · knockout"
        self._page = render_page(title, {}, live=True, settings=settings)
        config = uvicorn.Config(
            self._app(),
            headers=list(_HEADERS.items()),
            lifespan="off",
            access_log=False,
            log_config=None,
            timeout_graceful_shutdown=1,
        )
        self._server = uvicorn.Server(config)

    @property
    def url(self) -> str:
        """The address of the pages."""
        host = "127.0.0.1" if self.host in ("", "0.0.0.0") else self.host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.address[1]}/"

    def run(self) -> None:
        """Answers until `stop` or Ctrl-C, then ends the explorer."""
        try:
            self._server.run([self._socket])
        except KeyboardInterrupt:
            pass
        finally:
            self._socket.close()
            if self.explorer is not None:
                self.explorer.close()

    def stop(self) -> None:
        """Ends `run`, from another thread."""
        self._server.should_exit = True

    def _app(self) -> Starlette:
        live, explorer = self.live, self.explorer
        routes = [
            Route("/", lambda _: HTMLResponse(self._page)),
            _get("/api/overview", live.overview),
            _get("/api/candidate/{index}", live.candidate),
            _get("/api/pair/{b}/{p}/{s}/{c}", lambda *key: live.pair(key)),
            Route("/api/explore", self._submit, methods=["POST"]),
            Route("/api/explore/{number}/stop", self._stop, methods=["POST"]),
        ]
        if explorer is not None:
            routes += [
                _get("/api/explore", explorer.jobs),
                _get("/api/explore/{number}", explorer.state),
            ]
        guard = Middleware(BaseHTTPMiddleware, dispatch=self._guard)
        refusals: dict[Any, Any] = {
            HTTPException: _refuse,
            UsageError: _refuse,
            KnockoutError: _refuse,
        }
        return Starlette(routes=routes, middleware=[guard], exception_handlers=refusals)

    async def _guard(self, request: Request, answer: RequestResponseEndpoint) -> Response:
        if self.host in _LOOPBACK:  # else we listen for other machines, by whatever name
            name = re.sub(r":\d+$", "", request.headers.get("Host", "")).strip("[]")
            if name.lower() not in _LOOPBACK:
                return _json({"error": "this server answers only to its own address"}, 403)
        given = request.headers.get("X-Knockout", "")
        if request.method == "POST" and not hmac.compare_digest(given.encode(), self.key.encode()):
            return _json({"error": "this request does not come from the page"}, 403)
        return await answer(request)

    async def _submit(self, request: Request) -> Response:
        explorer = self._writable()
        length = request.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > _MOST_BODY:
            raise UsageError(f"expected a body of at most {_MOST_BODY} bytes")
        try:
            asked = _Asked.model_validate_json(await request.body())
        except pydantic.ValidationError:
            asked = None
        if asked is None or (not asked.ban and asked.replace is None):
            raise UsageError("expected a JSON object with key, side, step, and ban or replace")
        return _json({"id": await run_in_threadpool(explorer.submit, **dict(asked))})

    def _stop(self, request: Request) -> Response:
        self._writable().stop(_number(request.path_params["number"]))
        return _json({})

    def _writable(self) -> Explorer:
        if self.explorer is None:
            raise UsageError("the pages are read-only; start `knockout view` with --model to go on")
        return self.explorer


def serve(
    folder: Path,
    host: str = "127.0.0.1",
    port: int = 8000,
    open_engine: Callable[[], Engine] | None = None,
    told: Callable[[str], None] = print,
) -> None:
    """Serves a run's pages until Ctrl-C.

    Raises:
        UsageError: There is no run, or the address cannot be listened on.
    """
    server = ViewServer(folder, host, port, open_engine)
    told(f"{server.url} shows {folder}; Ctrl-C ends it")
    server.run()


class _Asked(pydantic.BaseModel, strict=True):
    """What the page sends to explore a fork."""

    key: tuple[int, int, int, int]
    side: str
    step: int
    ban: tuple[int, ...] = ()
    replace: str | None = None
    strength: float | None = None


def _get(path: str, make: Callable[..., dict[str, Any] | None]) -> Route:
    """A route that answers with what `make` returns for the numbers in the path."""

    def endpoint(request: Request) -> Response:
        found = make(*map(_number, request.path_params.values()))
        if found is None:
            raise HTTPException(404)
        return _json(found)

    return Route(path, endpoint)


def _number(text: str) -> int:
    if not re.fullmatch(r"-?\d{1,9}", text):
        raise HTTPException(404)
    return int(text)


def _refuse(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        return _json({"error": f"nothing at {request.url.path}"}, error.status_code)
    return _json({"error": str(error)}, 400 if isinstance(error, UsageError) else 500)


def _json(value: dict[str, Any], status: int = 200) -> Response:
    """JSON that may contain lone surrogates, which Starlette's own cannot encode."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return Response(text.encode("utf-8", "backslashreplace"), status, media_type="application/json")
