"""A real vLLM server on loopback, and small proxies before it that misbehave on purpose."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tiny import embedded

from knockout.integrations.vllm_name import write_vllm_name

QUIET = {
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "passive",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
MAX_LEN = 640


def vllm_environment(folder: Path, **more: str) -> dict[str, str]:
    """For vLLM's and lm-eval's own commands; gives the CPU build its name."""
    name = write_vllm_name(folder / "vllm-name")
    path = os.pathsep.join(filter(None, [str(name or ""), os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, **QUIET, "PYTHONPATH": path, **more}


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@contextlib.contextmanager
def vllm_server(folder: Path) -> Iterator[str]:
    """Starts one with our processor; yields its address at once, before it answers."""
    port = free_port()
    log = folder / "server.log"
    with log.open("w") as file:
        process = subprocess.Popen(
            [
                str(Path(sys.executable).parent / "vllm"), "serve", str(embedded()),
                "--logits-processors", "knockout.processors.vllm:KnockoutProcessor",
                "--served-model-name", "smol", "--host", "127.0.0.1", "--port", str(port),
                "--dtype", "float32", "--max-model-len", str(MAX_LEN), "--max-num-seqs", "16",
                "--block-size", "32", "--enforce-eager", "--max-logprobs", "-1",
                "--logprobs-mode", "processed_logprobs",
            ],
            stdout=file, stderr=subprocess.STDOUT, env=vllm_environment(folder),
        )  # fmt: skip
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(20)


def wait_until_healthy(url: str, log: Path, seconds: float = 420) -> None:
    end = time.monotonic() + seconds
    host = url.removeprefix("http://")
    while time.monotonic() < end:
        connection = http.client.HTTPConnection(host, timeout=2)
        with contextlib.suppress(OSError), contextlib.closing(connection):
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return
        time.sleep(0.5)
    raise AssertionError(f"the server did not come up:\n{log.read_text()[-3000:]}")


class Proxy:
    """Hands requests on to a server.

    Attributes:
        url: Its own address.
        bodies: Completions that came through.
        failing: Completions still to be answered with status 503.
        stopped: Whether it answers nobody any more.
    """

    def __init__(self, server: str, change: Callable[[dict[str, Any]], None] | None = None) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.failing = 0
        self.stopped = False
        proxy, host = self, server.removeprefix("http://")

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self.hand_on("GET", None)

            def do_POST(self) -> None:
                raw = self.rfile.read(int(self.headers["Content-Length"]))
                body = json.loads(raw)
                if self.path == "/v1/completions":
                    proxy.bodies.append(json.loads(raw))
                    if proxy.failing > 0:
                        proxy.failing -= 1
                        self.answer(503, b'{"error": {"message": "overloaded"}}')
                        return
                    if change is not None:
                        change(body)
                self.hand_on("POST", json.dumps(body).encode())

            def hand_on(self, method: str, body: bytes | None) -> None:
                if proxy.stopped:  # connections that were open before live on otherwise
                    self.close_connection = True
                    return
                connection = http.client.HTTPConnection(host, timeout=120)
                with contextlib.closing(connection):
                    kind = {"Content-Type": "application/json"}
                    connection.request(method, self.path, body, kind)
                    answer = connection.getresponse()
                    self.answer(answer.status, answer.read())

            def answer(self, status: int, content: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: Any) -> None:
                """Says nothing."""

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Answers nobody any more."""
        if self.stopped:
            return
        self.stopped = True
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()
