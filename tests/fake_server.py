"""A small server that speaks vLLM's HTTP and can misbehave in many ways.

It holds a real (tiny) model and our own processor, so that what it answers when it behaves is what
a vLLM server would answer.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from knockout.processors.rules import rule_from_extra_args
from knockout.processors.transformers import KnockoutLogitsProcessor

__all__ = ["MISBEHAVIOURS", "FakeServer"]

Answer = dict[str, Any]
Change = Callable[[Answer], Any]


def _set(*path: Any) -> Change:
    """Puts a value (the last argument) at a place of the answer."""

    def change(answer: Answer) -> Any:
        *keys, last, value = path
        here: Any = answer
        for key in keys:
            here = here[key]
        here[last] = value
        return answer

    return change


def _steps(change: Callable[[Any], Any]) -> Change:
    """Changes the log-probabilities of each step; such an answer is asked for by baselines only."""

    def changed(answer: Answer) -> Any:
        logprobs = answer["choices"][0].get("logprobs")
        if logprobs:
            logprobs["top_logprobs"] = change(logprobs["top_logprobs"])
        return answer

    return changed


# What a 200 may hold instead of an answer.
MISBEHAVIOURS: dict[str, Change] = {
    "a list": lambda _: [],
    "null": lambda _: None,
    "a number": lambda _: 7,
    "a text": lambda _: "ok",
    "an empty object": lambda _: {},
    "no choices": lambda _: {"id": "x", "object": "text_completion"},
    "choices null": _set("choices", None),
    "choices empty": _set("choices", []),
    "two choices": lambda a: {"choices": a["choices"] * 2},
    "a choice that is a text": _set("choices", 0, "Hello"),
    "token ids missing": lambda a: {"choices": [{"text": "Hello", "finish_reason": "stop"}]},
    "token ids null": _set("choices", 0, "token_ids", None),
    "token ids empty": _set("choices", 0, "token_ids", []),
    "a negative id": _set("choices", 0, "token_ids", [-1]),
    "an id outside the vocabulary": _set("choices", 0, "token_ids", [300]),
    "an id that is a text": _set("choices", 0, "token_ids", ["5"]),
    "an id that is a fraction": _set("choices", 0, "token_ids", [5.5]),
    "more tokens than asked for": _set("choices", 0, "token_ids", [5] * 200),
    "deep nesting": lambda _: json.loads("[" * 500 + "]" * 500),
}
# The same, of the parts that only baselines ask for.
MISBEHAVIOURS_OF_LOGPROBS: dict[str, Change] = {
    "log-probabilities null": _set("choices", 0, "logprobs", None),
    "steps null": _steps(lambda steps: None),
    "too few steps": _steps(lambda steps: steps[:-1]),
    "too few entries": _steps(lambda steps: [dict(list(step.items())[:1]) for step in steps]),
    "NaN": _steps(lambda steps: [dict.fromkeys(step, math.nan) for step in steps]),
    "texts": _steps(lambda steps: [dict.fromkeys(step, "-1.0") for step in steps]),
    "names without ids": _steps(lambda steps: [{f"x{k}": v for k, v in s.items()} for s in steps]),
}


class FakeServer:
    """Serves a checkpoint folder on loopback.

    Attributes:
        url: Its address.
        misbehave: How many more completions are changed (or answered with `status`).
        change: What happens to those.
        status: What those are answered with instead, with an error's body; 0 for none.
        raw: Bytes that those are answered with instead.
        picky: Decides which completions misbehave; all by default.
        well: What `/health` says.
        models: What `/v1/models` answers instead.
        tokenize: What `/tokenize` answers instead.
        password: What HTTP's basic authentication must give, if anything.
        n_completions: Completions that were asked for, probes not counted.
    """

    def __init__(self, folder: Path, password: str = "") -> None:
        self.misbehave, self.status, self.raw, self.well = 0, 0, b"", True
        self.change: Change = lambda answer: answer
        self.picky: Callable[[Answer], bool] = lambda body: True
        self.models: Any = None
        self.tokenize: Any = None
        self.password = password
        self.n_completions = 0
        self.spoil_probes = False
        self._lock = threading.Lock()
        self.load(folder)
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                if not self.allowed():
                    return
                if self.path == "/health":
                    self.answer(200 if fake.well else 503, b"")
                elif self.path == "/version":
                    self.send({"version": "fake"})
                else:
                    self.send(
                        fake.models or {"data": [{"id": "tiny", "max_model_len": fake.longest}]}
                    )

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if not self.allowed():
                    return
                if self.path == "/tokenize":
                    self.answer(404, b"{}") if fake.tokenize is None else self.send(fake.tokenize)
                    return
                status, content = fake.completion(body)
                self.answer(status, content)

            def allowed(self) -> bool:
                import base64

                wanted = base64.b64encode(fake.password.encode()).decode()
                if fake.password and self.headers.get("Authorization") != f"Basic {wanted}":
                    self.answer(401, b"{}")
                    return False
                return True

            def send(self, content: Any) -> None:
                raw = content if isinstance(content, bytes) else json.dumps(content).encode()
                self.answer(200, raw)

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
        self._http.handle_error = lambda *_: None  # type: ignore[method-assign]
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def load(self, folder: Path) -> None:
        """Serves these weights from now on, as a server that was restarted does."""
        with self._lock:
            self._model = AutoModelForCausalLM.from_pretrained(folder).float().eval()
            self.longest = int(self._model.config.max_position_embeddings)

    def __enter__(self) -> FakeServer:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def completion(self, body: Answer) -> tuple[int, bytes]:
        """Answers a completion, or misbehaves."""
        probe = "prompt_logprobs" in body
        with self._lock:
            self.n_completions += not probe
            spoil = self.misbehave > 0 and self.picky(body) and (self.spoil_probes or not probe)
            if spoil:
                self.misbehave -= 1
                if self.status:
                    error = {"error": {"message": "the fake server fails"}}
                    return self.status, json.dumps(error).encode()
                if self.raw:
                    return 200, self.raw
            answer: Any = self._prompt(body) if probe else self._generate(body)
        return 200, json.dumps(self.change(answer) if spoil else answer).encode()

    def _prompt(self, body: Answer) -> Answer:
        ids = body["prompt"]
        with torch.inference_mode():
            logprobs = self._model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
        steps: list[Any] = [None]
        for at, token in enumerate(ids[1:]):
            steps.append({str(token): {"logprob": float(logprobs[at, token]), "rank": 1}})
        return {"choices": [{"index": 0, "token_ids": [5], "prompt_logprobs": steps}]}

    def _generate(self, body: Answer) -> Answer:
        rule = rule_from_extra_args(body["vllm_xargs"])
        ids, out, steps = list(body["prompt"]), [], []
        top, finish = body.get("logprobs", 0), "length"
        with torch.inference_mode():
            for _ in range(body["max_tokens"]):
                row = self._model(torch.tensor([ids])).logits[:, -1].float()
                picked = KnockoutLogitsProcessor([rule])(torch.tensor([ids]), row)
                raw = picked.log_softmax(-1)[0].clamp(min=-9999.0)
                token = int(picked.argmax())
                best = raw.topk(top) if top else None
                if best is not None:
                    found = zip(best.indices.tolist(), best.values.tolist(), strict=True)
                    steps.append({f"token_id:{t}": v for t, v in found})
                    steps[-1].setdefault(f"token_id:{token}", float(raw[token]))
                ids.append(token)
                out.append(token)
                if token in body["stop_token_ids"]:
                    finish = "stop"
                    break
        choice: Answer = {"index": 0, "token_ids": out, "finish_reason": finish, "text": ""}
        if top:
            choice["logprobs"] = {"top_logprobs": steps}
        return {"choices": [choice]}


def until(condition: Callable[[], bool], seconds: float = 30) -> None:
    """Waits for something."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)
