"""A teacher over HTTP: a server that speaks vLLM's format, and its model's own whole logits."""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import tiny_model

from knockout.errors import KnockoutError, UsageError
from knockout.training import Divergence, head_of, reverse_kl
from knockout.training.loss import selective_kl
from knockout.training.selection import Selection
from knockout.training.selector import Selector
from knockout.training.served import ServedTeacher, stack

VOCAB = 60
SEQUENCES = [[5, 9, 44, 8, 8, 3], [7, 20, 31], [12, 13, 14, 15, 16, 17, 18]]
STARTS = [3, 1, 2]


@contextlib.contextmanager
def server(answer: Any) -> Iterator[str]:
    """Answers POST /v1/completions with `answer(body)`: a status and an object."""

    class Handler(BaseHTTPRequestHandler):
        def _send(self, status: int, value: Any) -> None:
            data = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self) -> None:
            self._send(200, {"object": "list", "data": [{"id": "teacher", "object": "model"}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self._send(*answer(body))

        def log_message(self, *args: Any) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{http.server_port}/v1"
    finally:
        http.shutdown()
        http.server_close()
        thread.join()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM

    base = tmp_path_factory.mktemp("models")
    folders = [tiny_model(base / str(seed), VOCAB, seed=seed) for seed in (0, 1)]
    return tuple(  # type: ignore[return-value]
        AutoModelForCausalLM.from_pretrained(f, dtype=torch.float32) for f in folders
    )


def vllm_of(model: Any) -> Any:
    """What vLLM answers to a request for prompt log-probabilities."""

    def answer(body: dict[str, Any]) -> tuple[int, Any]:
        assert body["model"] == "teacher"
        assert body["max_tokens"] == 1
        ids = body["prompt"]
        with torch.no_grad():
            logp = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        places: list[Any] = [None]
        for t in range(1, len(ids)):
            row, order = logp[t - 1], logp[t - 1].argsort(descending=True)
            rank = {int(j): r for r, j in enumerate(order, start=1)}
            wanted = [ids[t], *order[: body["prompt_logprobs"]].tolist()]
            places.append(
                {
                    str(j): {"logprob": float(row[j]), "rank": rank[j], "decoded_token": f"<{j}>"}
                    for j in dict.fromkeys(wanted)
                }
            )
        return 200, {"choices": [{"index": 0, "text": "", "prompt_logprobs": places}]}

    return answer


def hidden_of(model: Any, ids: list[int], start: int) -> torch.Tensor:
    states = model.base_model(input_ids=torch.tensor([ids])).last_hidden_state[0]
    return states[start - 1 : len(ids) - 1]


def test_lists_are_the_teachers_own_log_probabilities(models: tuple[Any, Any]) -> None:
    _, teacher = models
    with server(vllm_of(teacher)) as url:
        asked = ServedTeacher(url, top_k=4)
        found = asked(SEQUENCES, STARTS)
        asked.close()
    for ids, start, one in zip(SEQUENCES, STARTS, found, strict=True):
        with torch.no_grad():
            logp = teacher(torch.tensor([ids])).logits[0].log_softmax(-1)[start - 1 : -1]
        assert one.ids.shape == (len(ids) - start, 5)
        assert one.ids[:, 0].tolist() == ids[start:]
        for row, own in enumerate(logp):
            known = one.ids[row] >= 0
            assert set(own.topk(4).indices.tolist()) <= set(one.ids[row][known].tolist())
            torch.testing.assert_close(one.logp[row][known], own[one.ids[row][known]])


def test_all_tokens_listed_is_the_exact_divergence_and_fewer_are_below_it(
    models: tuple[Any, Any],
) -> None:
    student, teacher = models
    ids, start = SEQUENCES[0], STARTS[0]
    hidden = hidden_of(student, ids, start).detach()
    with torch.no_grad():
        z, t = (m(torch.tensor([ids])).logits[0, start - 1 : -1] for m in models)
    exact = reverse_kl(z, t)
    values = []
    with server(vllm_of(teacher)) as url:
        for k in (1, 5, 20, VOCAB):
            listed = ServedTeacher(url, top_k=k)([ids], [start])[0]
            out = selective_kl(hidden, head_of(student), listed, None, torch.ones(len(exact)))
            values.append(out.kl)
            one = selective_kl(
                hidden,
                head_of(student),
                listed,
                None,
                torch.ones(len(exact)),
                chosen=Divergence(sampled=True),
                emitted=torch.tensor(ids[start:]),
            )
            ratio = z.log_softmax(-1) - t.log_softmax(-1)
            wanted = ratio.gather(1, torch.tensor(ids[start:])[:, None])[:, 0]
            torch.testing.assert_close(one.kl, wanted, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(values[-1], exact, rtol=1e-3, atol=1e-4)
    for few, more in itertools.pairwise(values):  # merging tokens lowers a divergence
        assert (few <= more + 1e-5).all()


def test_a_selection_trains_under_a_served_teacher(models: tuple[Any, Any]) -> None:
    student, teacher = models
    labels = torch.full((3, 5), -100)
    states = torch.zeros(3, 5, student.config.hidden_size)
    target = torch.zeros(3, 5, teacher.config.hidden_size)
    for row, (ids, start) in enumerate(zip(SEQUENCES, STARTS, strict=True)):
        n = len(ids) - start
        labels[row, :n] = torch.tensor(ids[start:])
        states[row, :n] = hidden_of(student, ids, start).detach()
        target[row, :n] = hidden_of(teacher, ids, start).detach()
    with server(vllm_of(teacher)) as url:
        listed = stack(ServedTeacher(url, top_k=VOCAB)(SEQUENCES, STARTS), 5)
    chosen = Selection((8, 31))
    served = Selector(chosen).loss(labels, states, head_of(student), listed, None, step=1)
    local = Selector(chosen).loss(
        labels, states, head_of(student), target, head_of(teacher), step=1
    )
    torch.testing.assert_close(served.loss, local.loss, rtol=1e-3, atol=1e-5)
    assert torch.equal(served.weights, local.weights)
    with pytest.raises(UsageError, match="a served teacher lists a few tokens"):
        Selector(Selection(budget=0.5)).loss(labels, states, head_of(student), listed, None, step=1)


def test_what_a_server_may_do_wrong_is_tried_again_or_named(models: tuple[Any, Any]) -> None:
    good = vllm_of(models[1])
    calls = []

    def busy_at_first(body: dict[str, Any]) -> tuple[int, Any]:
        calls.append(1)
        return (503, {}) if len(calls) == 1 else good(body)

    with server(busy_at_first) as url:
        assert len(ServedTeacher(url, top_k=2)(SEQUENCES[:1], STARTS[:1])) == 1
    assert len(calls) == 2
    for answer in (
        {"choices": []},
        {"choices": [{"prompt_logprobs": None}]},
        {"choices": [{"prompt_logprobs": [None, {"9": {"logprob": float("nan")}}]}]},
        [],
    ):
        with (
            server(lambda _, answer=answer: (200, answer)) as url,
            pytest.raises(KnockoutError, match="no list of prompt log-probabilities"),
        ):
            ServedTeacher(url)([[5, 9]], [1])
    with (
        server(lambda _: (400, {"error": "prompt_logprobs is 99, at most 20"})) as url,
        pytest.raises(UsageError, match=r"status 400.*at most 20"),
    ):
        ServedTeacher(url, top_k=99)([[5, 9]], [1])
    with pytest.raises(KnockoutError, match="no answer in 1 attempts"):
        ServedTeacher("http://127.0.0.1:9", attempts=1, model="m")([[5, 9]], [1])
    with pytest.raises(UsageError, match="expected http"):
        ServedTeacher("ftp://x")
    with pytest.raises(UsageError, match="starts at its second token"):
        ServedTeacher("http://127.0.0.1:9")([[5, 9]], [0])


def test_the_address_may_hold_a_path(tmp_path: Path) -> None:
    assert ServedTeacher("http://h:8000/v1/").url == "http://h:8000"
