"""The live pages: what the server answers and refuses, and forks explored with the real model."""

from __future__ import annotations

import http.client
import json
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import Watch, chromium
from synthetic import write_run
from tiny import banning

from knockout.config.file import dump_sweep
from knockout.config.sweep import Sweep
from knockout.engines.base import Engine, Request, generate
from knockout.engines.open import open_engine
from knockout.errors import UsageError
from knockout.ledger import BenchmarkRow, CellKey, CellRow, ForkRow, Ledger, ProblemRow
from knockout.method.interventions import ban
from knockout.method.sampling import Sampling
from knockout.tokens.candidates import Candidate
from knockout.tokens.checkpoint import load_tokenizer, resolve_model
from knockout.view.server import ViewServer, serve

SEED = 1234
SAMPLING = Sampling(temperature=0.6, top_p=0.95, top_k=20)
LENGTH = 24


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(resolve_model("smollm2-135m"))


@contextmanager
def serving(folder: Path, **more: Any) -> Iterator[ViewServer]:
    server = ViewServer(folder, **more)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield server
    finally:
        server.stop()
        thread.join()


def ask(
    server: ViewServer, path: str, body: Any = None, **headers: str
) -> tuple[int, dict[str, Any]]:
    connection = http.client.HTTPConnection("127.0.0.1", server.address[1], timeout=60)
    method = "GET" if body is None else "POST"
    sent = None if body is None else body if isinstance(body, str) else json.dumps(body)
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request(method, path, sent, named)
    answer = connection.getresponse()
    text = answer.read().decode("utf-8")
    connection.close()
    return answer.status, json.loads(text) if text.startswith("{") else {"text": text}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
    return write_run(tmp_path_factory.mktemp("view"), tokenizer, complete=False)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ViewServer]:
    with serving(folder) as running:
        yield running


def test_listens_on_loopback_alone(server: ViewServer) -> None:
    assert server.address[0] == "127.0.0.1"
    assert server.url == f"http://127.0.0.1:{server.address[1]}/"


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", ""]
)
def test_another_host_is_refused(server: ViewServer, host: str) -> None:
    for path in ("/", "/api/overview"):
        status, answer = ask(server, path, Host=host)
        assert status == 403
        assert "error" in answer


def test_own_hosts_are_answered(server: ViewServer) -> None:
    port = server.address[1]
    for host in ("127.0.0.1", f"127.0.0.1:{port}", f"localhost:{port}", f"[::1]:{port}"):
        assert ask(server, "/api/overview", Host=host)[0] == 200


@pytest.mark.parametrize(
    "path",
    ["/api/nothing", "/api/candidate/99", "/api/candidate/x", "/api/pair/0/0/0", "/run.db",
     "/../run.db", "/api/pair/9/9/9/9", "/api/explore/1"],
)  # fmt: skip
def test_what_is_not_there_is_not_found(server: ViewServer, path: str) -> None:
    assert ask(server, path)[0] == 404


def test_posts_need_the_pages_key_and_a_model(server: ViewServer) -> None:
    asked = {"key": [0, 0, 0, -1], "side": "baseline", "step": 0, "ban": [5]}
    assert ask(server, "/api/explore", asked)[0] == 403
    assert ask(server, "/api/explore", asked, X_Knockout="guess")[0] == 403
    status, answer = ask(server, "/api/explore", asked, X_Knockout=server.key)
    assert status == 400
    assert "--model" in answer["error"]


def test_a_port_in_use_is_said(server: ViewServer, folder: Path) -> None:
    with pytest.raises(UsageError, match="--port"):
        ViewServer(folder, port=server.address[1])


def test_ctrl_c_ends_it_quietly(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    told: list[str] = []
    interrupt = threading.Timer(1.0, signal.raise_signal, (signal.SIGINT,))
    interrupt.start()
    serve(folder, host="::1", port=0, told=told.append)
    assert len(told) == 1
    assert told[0].startswith("http://[::1]:")
    assert capfd.readouterr() == ("", "")


def test_no_run_is_said(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no run here"):
        ViewServer(tmp_path)


def test_every_fork_can_be_opened(server: ViewServer, folder: Path) -> None:
    pairs = [p for c in range(10) for p in ask(server, f"/api/candidate/{c}")[1]["pairs"]]
    with Ledger.open(folder / "run.db") as ledger:
        forks = ledger.query("SELECT benchmark, problem, seed, candidate FROM fork")
        assert sorted(tuple(p["key"]) for p in pairs) == sorted(forks)
        b, p, s, c = forks[0]
        answer = ask(server, f"/api/pair/{b}/{p}/{s}/{c}")[1]
        whole = ledger.trajectory(CellKey(b, p, s), c).tolist()
    shared = answer["baseline"]["ids"][: answer["knockout"]["step"]]
    assert shared + answer["knockout"]["ids"] == whole
    assert {str(token) for token in whole} <= set(answer["vocab"])


def test_what_is_committed_meanwhile_is_seen(tmp_path: Path, tokenizer: Any) -> None:
    folder = write_run(tmp_path / "run", tokenizer, complete=False)
    with serving(folder) as server:
        before = ask(server, "/api/overview")[1]
        assert not before["run"]["complete"]
        with Ledger.open(folder / "run.db", write=True) as ledger:
            key = CellKey(0, 11, 1)
            steps = np.full(len(ledger.candidates), -1, dtype=np.int32)
            tokens = np.array([400, 401, 402], dtype=np.int32)
            ledger.commit([CellRow(key, 1, tokens, "stop", 1, "ok", "7", None, steps)])
        # The verdicts of a large run take seconds, so they are read at most every five.
        time.sleep(5.1)
        after = ask(server, "/api/overview")[1]
    assert after["run"]["cells_done"] == before["run"]["cells_done"] + 1
    assert after["cost"]["inherited"] == before["cost"]["inherited"] + 10


def test_live_pages_in_a_browser(server: ViewServer) -> None:
    with chromium() as browser:
        page = browser.new_page()
        watch = Watch(page)
        page.goto(server.url)
        page.wait_for_selector("main h1")
        assert "live" in page.inner_text("header")
        page.goto(f"{server.url}#/candidate/0")
        page.wait_for_selector("main a[href*=pair]")
        page.locator("main a[href*=pair]").first.click()
        page.wait_for_selector(".side .t")
        page.locator(".side .t").first.click()
        assert page.locator("#ban").count() == 0
        assert watch.errors == []
        assert all(url.startswith(server.url) for url in watch.requests)


def test_an_open_table_follows_the_run_to_its_end(tmp_path: Path, tokenizer: Any) -> None:
    benchmarks = (("maths", 4), ("formats", 4))
    folder = write_run(tmp_path / "run", tokenizer, benchmarks=benchmarks, complete=False)
    table = "document.querySelector('main table')?.innerText"
    with serving(folder) as server, chromium() as browser:
        page = browser.new_page()
        page.goto(f"{server.url}#/table")
        page.wait_for_selector("main tbody tr:not(.filler) td")
        before = page.evaluate(table)
        with Ledger.open(folder / "run.db", write=True) as ledger:
            steps = np.full(len(ledger.candidates), -1, dtype=np.int32)
            tokens = np.array([400, 401, 402], dtype=np.int32)
            for b, p, s in product(range(2), (2, 3), range(2)):
                key = CellKey(b, p, s)
                ledger.commit([CellRow(key, 1, tokens, "stop", 1, "ok", "7", None, steps)])
        with serving(folder) as fresh:
            other = browser.new_page()
            other.goto(f"{fresh.url}#/table")
            other.wait_for_selector("main tbody tr:not(.filler) td")
            assert " of 16 cells" not in other.inner_text("header")
            now = other.evaluate(table)
        assert now != before
        page.wait_for_function(f"now => {table} === now", arg=now, timeout=60_000)
        assert page.inner_text("#run-about") == other.inner_text("#run-about")


@pytest.fixture(scope="module")
def real(
    tmp_path_factory: pytest.TempPathFactory, tokenizer: Any
) -> tuple[Path, dict[str, list[int]]]:
    """A run of one cell that SmolLM2 really generated, with a fork and two forks to be explored."""
    folder = tmp_path_factory.mktemp("real")
    prompt = "Once upon a time there was a dragon who lived in"
    ids = tuple(tokenizer.encode(prompt, add_special_tokens=False))

    def request(key: str, **more: Any) -> Request:
        return Request(key, ids, SEED, SAMPLING, LENGTH, **more)

    engine = open_engine("smollm2-135m", kind="transformers", dtype="float32", max_num_seqs=4)
    try:
        base = next(generate(engine, [request("base")])).tokens
        assert len(base) == LENGTH
        banned = int(base[3])
        step = base.tolist().index(banned)
        # From scratch: the explorer must come to the same by continuing.
        runs = [
            request("ban", intervention=banning((banned,))),
            request("replace", prefix=(*base[:2].tolist(), *tokenizer.encode(" blue"))),
        ]
        done = {c.key: c.tokens.tolist() for c in generate(engine, runs)}
    finally:
        engine.close()
    sweep = Sweep.model_validate(
        {
            "model": "smollm2-135m",
            "engine": {"kind": "transformers", "dtype": "float32"},
            "benchmarks": ["colours"],
            "seeds": 1,
            "sampling": {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "max_tokens": LENGTH},
            "candidates": {"ids": [banned]},
        }
    )
    (folder / "config.yaml").write_text(dump_sweep(sweep), encoding="utf-8")
    key = CellKey(0, 0, 0)
    with Ledger.create(
        folder / "run.db",
        {
            "identity": "{}",
            "identity_hash": "0",
            "special_ids": json.dumps(tokenizer.all_special_ids),
        },
        [Candidate("banned", ban((banned,)), ("banned",))],
        [BenchmarkRow("colours", "exact_match", 1, "f")],
        [ProblemRow(0, 0, "colours/0", prompt, np.array(ids, dtype=np.int32))],
    ) as ledger:
        fork = np.array(done["ban"][step:], dtype=np.int32)
        ledger.commit(
            [CellRow(key, SEED, base, "length", 1, "ok", None, None, np.array([step], np.int32))],
            [ForkRow(key, 0, step, fork, "length", 0, "ok", None, None)],
        )
    return folder, {"base": base.tolist(), **done, "banned": [banned]}


def real_engine() -> Engine:
    return open_engine("smollm2-135m", kind="transformers", dtype="float32", max_num_seqs=1)


@pytest.mark.engine
def test_explored_forks_equal_runs_from_scratch(real: tuple[Path, dict[str, list[int]]]) -> None:
    folder, runs = real
    step = runs["base"].index(runs["banned"][0])

    def explore(server: ViewServer, **asked: Any) -> dict[str, Any]:
        body = {"key": [0, 0, 0, 0], "side": "baseline", **asked}
        status, answer = ask(server, "/api/explore", body, X_Knockout=server.key)
        assert status == 200, answer
        for _ in range(600):
            state = ask(server, f"/api/explore/{answer['id']}")[1]
            if state["state"] in ("done", "failed", "stopped"):
                return state
            time.sleep(0.2)
        raise AssertionError(state)

    with serving(folder, open_engine=real_engine) as server:
        ban = explore(server, step=step, ban=runs["banned"])
        assert ban["state"] == "done", ban
        assert runs["base"][:step] + ban["ids"] == runs["ban"]
        assert runs["banned"][0] not in ban["ids"]
        replace = explore(server, step=2, replace=" blue")
        assert runs["base"][:2] + replace["ids"] == runs["replace"]
        # A penalty beyond every logit is a ban.
        weak = explore(server, step=step, ban=runs["banned"], strength=1e6)
        assert runs["base"][:step] + weak["ids"] == runs["ban"]
        for wrong in (
            {"step": 10_000, "ban": [5]},
            {"step": 1, "replace": "#-1"},
            {"step": 1, "replace": "#12 34"},
            {"step": 1, "replace": "#9999999"},
            {"step": 1, "ban": [5], "strength": 0},
            {"step": 1, "ban": [5], "strength": "2"},
            {"step": 1, "ban": ["5"]},
            {"step": 1},
            {"step": 1, "ban": [5], "side": "other"},
            {"step": True, "ban": [5]},
        ):
            body = {"key": [0, 0, 0, 0], "side": "baseline", **wrong}
            assert ask(server, "/api/explore", body, X_Knockout=server.key)[0] == 400, wrong
        for text in ("nonsense", "[1]"):
            assert ask(server, "/api/explore", text, X_Knockout=server.key)[0] == 400
        outside = explore(server, step=1, ban=[10**6])
        assert outside["state"] == "failed"
        assert "1000000" in outside["message"]


@pytest.mark.engine
def test_the_fork_explorer_in_a_browser(real: tuple[Path, dict[str, list[int]]]) -> None:
    folder, runs = real
    step = runs["base"].index(runs["banned"][0])
    with chromium() as browser, serving(folder, open_engine=real_engine) as server:
        page = browser.new_page()
        watch = Watch(page)
        page.goto(f"{server.url}#/pair/0/0/0/0")
        page.wait_for_selector(".side .t")
        page.locator(f"[data-side=baseline] .t[data-step='{step}']").click()
        page.click("#ban")
        page.wait_for_selector(".explored[data-state=done]", timeout=120_000)
        shown = page.locator(".explored .t").evaluate_all(
            "(all) => all.map((t) => Number(t.dataset.id))"
        )
        assert runs["base"][:step] + shown == runs["ban"]
        assert "explored=" in page.url
        page.reload()
        page.wait_for_selector(".explored[data-state=done]")
        again = page.locator(".explored .t").evaluate_all(
            "(all) => all.map((t) => Number(t.dataset.id))"
        )
        assert again == shown
        page.locator(f"[data-side=baseline] .t[data-step='{step}']").click()
        page.fill("#replacement", "#-1")
        page.press("#replacement", "Enter")
        page.wait_for_selector(".explored[data-state=failed]")
        assert "expected an id as #123" in page.inner_text(".explored")
        # Every continuation is listed, and one that runs is stopped by its button or by leaving.
        page.locator(".jobs summary").click()
        assert page.locator(".jobs tbody tr").count() == 1
        assert page.locator(".jobs tbody tr").first.inner_text().split("\t")[4] == "done"
        assert server.explorer is not None
        held = threading.Event()
        go = server.explorer._go

        def slowly(job: Any, engine: Any) -> None:
            held.wait(30)
            go(job, engine)

        server.explorer._go = slowly  # type: ignore[method-assign]
        for leave in ("button", "link", "close"):
            held.clear()
            page.locator("[data-side=baseline] .t").nth(1).click()
            page.click("#ban")
            page.wait_for_selector(".explored[data-state=running]")
            number = int(page.url.split("explored=")[1].split("&")[0])
            if leave == "button":
                page.get_by_role("button", name="Stop: ").click()
            elif leave == "link":
                page.evaluate("location.hash = '#/health'")
            else:
                page.goto("about:blank")
            for _ in range(100):
                if server.explorer._jobs[number].stopping:
                    break
                time.sleep(0.1)
            held.set()
            for _ in range(100):
                if ask(server, f"/api/explore/{number}")[1]["state"] == "stopped":
                    break
                time.sleep(0.1)
            assert ask(server, f"/api/explore/{number}")[1]["state"] == "stopped", leave
            page.goto(f"{server.url}#/pair/0/0/0/0")
            page.wait_for_selector(".explored", state="detached")
            page.wait_for_selector(".side .t")
        # The browser says of the refused request what the page says too.
        assert all("400" in text for text in watch.errors)
