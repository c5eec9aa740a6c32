"""The pages over HTTP: one page, a few JSON answers, nothing that writes to the run."""

from __future__ import annotations

import hmac
import json
import re
import secrets
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from knockout.engines.base import Engine
from knockout.errors import KnockoutError, UsageError
from knockout.report.build import render_page
from knockout.view.explorer import Explorer
from knockout.view.live import LiveRun

__all__ = ["ViewServer", "serve"]

_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_MOST_BODY = 64 * 1024
_REFRESH_S = 10


class ViewServer(ThreadingHTTPServer):
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

    daemon_threads = True

    def __init__(
        self,
        folder: Path,
        host: str = "127.0.0.1",
        port: int = 0,
        open_engine: Callable[[], Engine] | None = None,
    ) -> None:
        self.live = LiveRun(folder)
        self.explorer: Explorer | None = None
        self.key = secrets.token_urlsafe(24)
        try:
            super().__init__((host, port), _Handler)
        except OSError as error:
            raise UsageError(
                f"cannot listen on {host} port {port}: {error.strerror or error}; "
                "give another --port or --host"
            ) from None
        self.host = host
        if open_engine is not None:
            self.explorer = Explorer(self.live, open_engine)
        self.page = render_page(
            f"{folder.resolve().name} · knockout",
            {},
            live=True,
            settings={
                "key": self.key,
                "explore": self.explorer is not None,
                "every": _REFRESH_S,
            },
        ).encode("utf-8")

    @property
    def url(self) -> str:
        """The address of the pages."""
        host = "127.0.0.1" if self.host in ("", "0.0.0.0") else self.host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.server_address[1]}/"

    def allows(self, host: str | None) -> bool:
        """Whether a request's Host header is one of ours; any is if we listen for other machines."""
        if self.host not in _LOOPBACK:
            return True
        name = re.sub(r":\d+$", "", host or "").strip("[]")
        return name.lower() in _LOOPBACK

    def server_close(self) -> None:
        """Stops listening and ends the explorer."""
        super().server_close()
        if self.explorer is not None:
            self.explorer.close()


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
    try:
        server.serve_forever(poll_interval=0.2)
    except KeyboardInterrupt:
        pass
    finally:
        server.server_close()


class _NotFoundError(Exception):
    """There is nothing at this address."""


class _Handler(BaseHTTPRequestHandler):
    server: ViewServer
    protocol_version = "HTTP/1.1"
    timeout = 30

    def do_GET(self) -> None:
        if not self.server.allows(self.headers.get("Host")):
            self._json({"error": "this server answers only to its own address"}, 403)
            return
        path = self.path.split("?")[0]
        if path == "/":
            self._send(self.server.page, "text/html; charset=utf-8", 200)
            return
        self._answer(lambda: self._get(path.removeprefix("/api/").split("/")))

    def do_POST(self) -> None:
        given = self.headers.get("X-Knockout", "")
        right = hmac.compare_digest(given.encode(), self.server.key.encode())
        if not right or not self.server.allows(self.headers.get("Host")):
            self.close_connection = True
            self._json({"error": "this request does not come from the page"}, 403)
            return
        self._answer(self._post)

    def _get(self, parts: list[str]) -> dict[str, Any]:
        live = self.server.live
        match parts:
            case ["overview"]:
                return live.overview()
            case ["candidate", index]:
                return _there(live.candidate(_number(index)))
            case ["pair", *key] if len(key) == 4:
                b, p, s, c = map(_number, key)
                return _there(live.pair((b, p, s, c)))
            case ["explore"] if self.server.explorer is not None:
                return self.server.explorer.jobs()
            case ["explore", number] if self.server.explorer is not None:
                return _there(self.server.explorer.state(_number(number)))
        raise _NotFoundError

    def _post(self) -> dict[str, Any]:
        explorer = self.server.explorer
        if explorer is None:
            raise UsageError("the pages are read-only; start `knockout view` with --model to go on")
        body = self._body()
        match self.path.removeprefix("/api/").split("/"):
            case ["explore"]:
                return {"id": explorer.submit(**_asked(body))}
            case ["explore", number, "stop"]:
                explorer.stop(_number(number))
                return {}
        raise _NotFoundError

    def _body(self) -> dict[str, Any]:
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > _MOST_BODY:
            self.close_connection = True
            raise UsageError(f"expected a body of at most {_MOST_BODY} bytes")
        try:
            body = json.loads(self.rfile.read(int(length)))
        except ValueError:
            body = None
        if not isinstance(body, dict):
            raise UsageError("expected a JSON object")
        return body

    def _answer(self, make: Callable[[], dict[str, Any]]) -> None:
        try:
            self._json(make(), 200)
        except _NotFoundError:
            self._json({"error": f"nothing at {self.path}"}, 404)
        except UsageError as error:
            self._json({"error": str(error)}, 400)
        except KnockoutError as error:
            self._json({"error": str(error)}, 500)

    def _json(self, value: dict[str, Any], status: int) -> None:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        self._send(text.encode("utf-8", "backslashreplace"), "application/json", status)

    def _send(self, body: bytes, kind: str, status: int) -> None:
        try:
            self.send_response(HTTPStatus(status))
            for name, value in {
                "Content-Type": kind,
                "Content-Length": str(len(body)),
                "Cache-Control": "no-store",
                "X-Content-Type-Options": "nosniff",
                "X-Frame-Options": "DENY",
                "Referrer-Policy": "no-referrer",
                "Cross-Origin-Resource-Policy": "same-origin",
            }.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:
        """Logs nothing for a request."""


def _asked(body: dict[str, Any]) -> dict[str, Any]:
    """Checks what the page sent."""
    key, step, ban = body.get("key"), body.get("step"), body.get("ban", [])
    side, replace, strength = body.get("side"), body.get("replace"), body.get("strength")
    fits = (
        isinstance(key, list)
        and len(key) == 4
        and all(type(part) is int for part in key)
        and type(step) is int
        and isinstance(ban, list)
        and all(type(token) is int for token in ban)
        and isinstance(side, str)
        and (replace is None or isinstance(replace, str))
        and (strength is None or type(strength) in (int, float))
    )
    if not fits or (not ban and replace is None):
        raise UsageError("expected key, side, step, and ban or replace")
    assert isinstance(key, list)
    b, p, s, c = key
    change = {"ban": tuple(ban), "replace": replace, "strength": strength}
    return {"key": (b, p, s, c), "side": side, "step": step, **change}


def _there(value: dict[str, Any] | None) -> dict[str, Any]:
    if value is None:
        raise _NotFoundError
    return value


def _number(text: str) -> int:
    if not re.fullmatch(r"-?\d{1,9}", text):
        raise _NotFoundError
    return int(text)
