"""Running vLLM servers as an engine: token ids in, token ids out, over HTTP.

Somebody else starts the servers, with our processor inside; see docs/how-to/server.md.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from knockout.engines.answers import Piece
from knockout.engines.base import Completion, EngineInfo, Request, n_reported, to_extra_args
from knockout.engines.canary import check_bans_hold
from knockout.engines.fingerprint import Fingerprint, probe_ids
from knockout.engines.http import Refused, ServedModel, Server, Unavailable
from knockout.engines.trajectory import Beginnings, Trajectory
from knockout.engines.versions import installed_versions
from knockout.errors import KnockoutError, UsageError, counted
from knockout.processors.names import NotProcessed, told, told_by_own
from knockout.tokens.checkpoint import load_tokenizer, resolve_model
from knockout.tokens.eos import stop_ids

__all__ = ["ServerEngine"]

_FLAG = "--logits-processors knockout.processors.vllm:KnockoutProcessor"
_PROBE = "Knock, knock.\n\nWho's there? x² + 1 = 0"
# Failures of one request, by servers that answered a probe between them, after which it is set
# aside.
_TRIES = 4
_FIRST_WAIT_S = 0.5
_LONGEST_WAIT_S = 30.0
# How long servers may be down before the engine stops; at its start less.
_OUTAGE_LIMIT_S = 1800.0
_START_LIMIT_S = 30.0
# A server that was just probed is not probed again.
_PROBED_S = 1.0
# Cells whose server is remembered; a fork follows its baseline within seconds.
_MOST_HOMES = 65_536

_Answer = Piece | Refused | Unavailable

log = logging.getLogger("knockout")


class ServerEngine:
    """Runs requests on one or several vLLM servers of the same model.

    A cell's requests (same prompt, same seed) go to one server, whose prefix cache has their
    common part; new cells go to the server with the least to do. What a server fails on is tried
    again with growing pauses, on another server if there is one; the noise belongs to the
    request, so it does not matter where it runs. The engine waits for servers that are down; it
    sets a request aside only if servers fail on it that answer others. Every server must have the
    same weights, also when it comes back.

    Attributes:
        info: What runs.
        tokenizer: The model's tokenizer, from the local checkpoint.
    """

    info: EngineInfo

    def __init__(
        self,
        model: str,
        *,
        urls: Sequence[str],
        max_model_len: int | None = None,
        max_num_seqs: int | None = None,
        outage_limit_s: float = _OUTAGE_LIMIT_S,
        trust_remote_code: bool = False,
        cache_dir: Path | None = None,
        options: dict[str, Any] | None = None,
    ) -> None:
        """Contacts the servers and checks that bans hold in each of them.

        Args:
            model: The model that they serve, for its tokenizer and configuration here.
            urls: Of the servers, for example ["http://127.0.0.1:8000"].
            max_model_len: Longest prompt plus trajectory; the servers' own limit by default.
            max_num_seqs: Requests in flight over all servers; 64 a server by default.
            outage_limit_s: How long to wait for servers that are down, in seconds.
            trust_remote_code: Whether code that comes with the model may run here.
            cache_dir: Where the embedded model is unpacked.
            options: `model` (the served name), `timeout_s` (longest time for one completion; 3600
                by default), `wait_s` (how long to wait for the servers to come up; 0).

        Raises:
            UsageError: A setting is wrong, or a server serves something else.
            KnockoutError: A server does not answer, or lacks our processor.
        """
        from transformers import AutoConfig

        if not urls:
            raise UsageError("engine.urls is empty; expected at least one http://HOST:PORT")
        settings = dict(options or {})
        wanted = settings.pop("model", None)
        timeout_s = float(settings.pop("timeout_s", 3600.0))
        wait_s = float(settings.pop("wait_s", 0.0))
        if settings:
            raise UsageError(
                f"engine.options: found {', '.join(sorted(settings))}; a server takes model, "
                "timeout_s and wait_s (give its other settings where you start it)"
            )
        path = resolve_model(model, cache_dir)
        self.tokenizer = load_tokenizer(path, trust_remote_code=trust_remote_code)
        at_once = max_num_seqs or 64 * len(urls)
        self._servers = [Server(u, timeout_s=timeout_s, connections=at_once) for u in urls]
        self._most_threads = at_once
        self._threads: list[threading.Thread] = []
        self._work: SimpleQueue[tuple[str, int, dict[str, Any]] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._answers: SimpleQueue[tuple[str, _Answer]] = SimpleQueue()
        self._paths: dict[str, Trajectory] = {}
        self._done: list[Completion] = []
        self._homes: OrderedDict[int, int] = OrderedDict()
        self._only: int | None = None
        self._outage_limit_s = outage_limit_s
        self._out_since: float | None = None
        self._told: Unavailable | None = None
        self._told_out = False
        self._fatal: KnockoutError | None = None
        self._probes = [threading.Lock() for _ in self._servers]
        self._probed = [(-math.inf, True) for _ in self._servers]
        self._prints: list[Fingerprint] = []
        try:
            served = [self._served(server, wanted, wait_s) for server in self._servers]
            self._names = [one.name for one in served]
            longest = min(one.max_model_len for one in served)
            if max_model_len is not None and max_model_len > longest:
                raise UsageError(
                    f"engine.max_model_len is {max_model_len}, but a server allows {longest}"
                )
            config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
            self.info = EngineInfo(
                kind="server",
                model=model,
                device="server",
                dtype="server",
                runner="",
                vocab_size=int(config.get_text_config(decoder=True).vocab_size),
                eos_ids=stop_ids(self.tokenizer, path),
                max_model_len=max_model_len or longest,
                versions={
                    **installed_versions(),
                    **{
                        f"vllm at {s.url}": o.version
                        for s, o in zip(self._servers, served, strict=True)
                    },
                },
                settings={"max_num_seqs": at_once, "served": self._names},
            )
            self._beginnings = Beginnings(self.info, self.tokenizer)
            for index in range(len(self._servers)):
                self._check(index)
        except BaseException:
            self.close()
            raise

    # Start-up ------------------------------------------------------------------------------------

    @staticmethod
    def _served(server: Server, wanted: str | None, wait_s: float) -> ServedModel:
        end = time.monotonic() + wait_s
        while not server.healthy():
            if time.monotonic() >= end:
                server.served(wanted)  # says what is wrong with it
                raise KnockoutError(f"engine.urls: {server.url}/health reports a failure")
            time.sleep(1.0)
        return server.served(wanted)

    def _check(self, index: int) -> None:
        """Refuses a server with another tokenizer, without our processor, or with other settings."""
        server = self._servers[index]
        theirs = server.encode(self._names[index], _PROBE)
        ours = self.tokenizer.encode(_PROBE, add_special_tokens=False)
        if theirs is not None and theirs != ours:
            raise UsageError(
                f"engine.urls: {server.url} serves {self._names[index]!r}, whose token ids are not "
                f"those of {self.info.model!r}; serve the sweep's model"
            )
        self._check_weights(index)
        self._only = index
        try:
            check_bans_hold(self)
        except KnockoutError as error:
            raise KnockoutError(
                f"{server.url}: {error} Start the server in an environment where knockout-harness "
                f"is installed, with `{_FLAG} --max-logprobs -1 --logprobs-mode processed_logprobs`"
            ) from error
        finally:
            self._only = None

    def _check_weights(self, index: int) -> None:
        """Refuses a server whose weights are not the first one's."""
        server = self._servers[index]
        try:
            found = self._print_of(index)
        except (Refused, Unavailable) as error:
            raise KnockoutError(
                f"engine.urls: {error}; expected a vLLM server that gives prompt_logprobs"
            ) from None
        self._prints.append(found)
        if not found.agrees(self._prints[0]):
            raise UsageError(
                f"engine.urls: {server.url} and {self._servers[0].url} serve different weights "
                f"(log-probabilities of the same prompt differ by {found.difference(self._prints[0]):.2g}"
                " in the median); serve one model from all of them"
            )

    def _print_of(self, index: int) -> Fingerprint:
        probe = probe_ids(self.info.vocab_size)
        values = self._servers[index].prompt_logprobs(self._names[index], probe)
        return Fingerprint(tuple(values), "server")

    def fingerprints(self) -> dict[str, Fingerprint]:
        """What the weights of each server are, by its address."""
        urls = (server.url for server in self._servers)
        return dict(zip(urls, self._prints, strict=True))

    # The engine ----------------------------------------------------------------------------------

    @property
    def n_open(self) -> int:
        """See `Engine`."""
        return len(self._paths) + len(self._done)

    def add(self, request: Request) -> None:
        """Sends a request, or queues it if `max_num_seqs` are in flight."""
        path = self._beginnings.begin(request, self._paths.keys())
        if finish := path.finish:
            self._done.append(path.completion(finish))
            return
        self._paths[request.key] = path
        self._send(path)

    def step(self) -> list[Completion]:
        """Waits a moment for answers; returns what finished.

        Raises:
            KnockoutError: No server has answered for `outage_limit_s`, or one has other weights.
        """
        self._check_outage()
        done, self._done = self._done, []
        wait_s = 0.0 if done else 0.05
        while self._paths:
            try:
                key, answer = self._answers.get(timeout=wait_s)
            except Empty:
                break
            wait_s = 1e-4
            completion = self._take(key, answer)
            if completion is not None:
                done.append(completion)
        return done

    def close(self) -> None:
        """Drops what is in flight and closes the connections; the servers go on."""
        self._closing.set()
        for _ in self._threads:
            self._work.put(None)
        for server in self._servers:
            server.close()
        self._paths.clear()
        self._done.clear()

    def _check_outage(self) -> None:
        if self._fatal is not None:
            raise self._fatal
        if not self._paths or self._out_since is None:
            return
        limit = self._outage_limit_s if self._only is None else _START_LIMIT_S
        out_s = time.monotonic() - self._out_since
        if out_s > limit:
            raise KnockoutError(
                f"no server has answered for {out_s:.0f} s, with {counted(len(self._paths), 'request')} in "
                f"flight; the last said: {self._told}. What had finished is in the ledger: start "
                "the servers again and give the same command (engine.outage_limit_s sets how long "
                "to wait)"
            )

    def _take(self, key: str, answer: _Answer) -> Completion | None:
        path = self._paths[key]
        if isinstance(answer, Refused) and answer.always:
            raise KnockoutError(f"{answer}. What had finished is in the ledger")
        if isinstance(answer, Refused | Unavailable):
            return self._paths.pop(key).completion("error", str(answer))
        try:
            if path.request.watch:
                said = told(*answer, self.info.vocab_size)
            else:
                said = told_by_own(answer.top_logprobs[:, 0].tolist())
        except NotProcessed as error:
            raise KnockoutError(
                f"a server does not say which interventions matter ({error}): start it with "
                "--logprobs-mode processed_logprobs"
            ) from error
        finish = path.extend(answer.tokens[: said.good], said.differing)
        if said.failed is not None and finish is None:
            return self._paths.pop(key).completion("error", said.failed)
        if finish is not None:
            return self._paths.pop(key).completion(finish)
        # The server's own stop strings ended it too early: continue from there.
        self._send(path)
        return None

    def _send(self, path: Trajectory) -> None:
        self._work.put((path.request.key, self._home(path.request), self._body(path)))
        if len(self._threads) < min(self._most_threads, len(self._paths)):
            # A daemon, so that a stopped program does not wait for a long answer.
            thread = threading.Thread(target=self._serve, name="knockout-server", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _body(self, path: Trajectory) -> dict[str, Any]:
        """The request as JSON. Sets everything for which a server may have other defaults.

        The server's stop strings only save tokens (it sees its own part of the text alone): whether
        a trajectory has ended is decided here, as for every engine.
        """
        request = path.request
        body: dict[str, Any] = {
            "prompt": [*request.prompt, *path.tokens],
            "max_tokens": path.limit - len(path.tokens),
            "temperature": 0,
            "top_p": 1,
            "top_k": 0,
            "min_p": 0,
            "presence_penalty": 0,
            "frequency_penalty": 0,
            "repetition_penalty": 1,
            "stop_token_ids": list(self.info.eos_ids),
            # In a thinking response they do not count yet, and the server does not know.
            "stop": [] if request.stop_after else list(request.stop),
            "include_stop_str_in_output": True,
            "skip_special_tokens": False,
            "spaces_between_special_tokens": False,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "vllm_xargs": to_extra_args(
                replace(request, prefix=tuple(path.tokens)),
                fail_token=(*self.info.eos_ids, 0)[0],
            ),
            # Of an unwatched one the token's own, which says whether it could be sampled.
            "logprobs": min(n_reported(request) + 2, self.info.vocab_size) if request.watch else 1,
        }
        return body

    # In the threads ------------------------------------------------------------------------------

    def _home(self, request: Request) -> int:
        """The server of a request's cell."""
        if self._only is not None:
            return self._only
        cell = hash((request.prompt, request.seed))
        with self._lock:
            home = self._homes.pop(cell, None)
            if home is None or self._servers[home].down:
                home = self._least_busy()
            self._homes[cell] = home
            if len(self._homes) > _MOST_HOMES:
                self._homes.popitem(last=False)
            self._servers[home].n_open += 1
        return home

    def _least_busy(self, but: int = -1) -> int:
        """Among the servers that are up, or among all if none is."""
        others = [i for i in range(len(self._servers)) if i != but] or [0]
        up = [i for i in others if not self._servers[i].down] or others
        return min(up, key=lambda i: self._servers[i].n_open)

    def _serve(self) -> None:
        """What a thread does."""
        while (item := self._work.get()) is not None:
            if not self._closing.is_set():
                self._answer(*item)

    def _answer(self, key: str, home: int, body: dict[str, Any]) -> None:
        """Sends one request until it is answered or refused, or has caused failures itself."""
        answer: _Answer = Unavailable("the engine was closed")
        index, failures, wait_s = home, 0, _FIRST_WAIT_S
        try:
            while not self._closing.is_set():
                server = self._servers[index]
                try:
                    answer = server.complete(
                        {**body, "model": self._names[index]}, self.info.vocab_size
                    )
                    self._answers_again(index)
                    return
                except Refused as refused:
                    answer = refused
                    return
                except Unavailable as unavailable:
                    answer = unavailable
                    self._failed(unavailable)
                    if self._is_well(index) and not unavailable.busy:
                        failures += 1
                        if failures == _TRIES:
                            answer = Unavailable(
                                f"failed {_TRIES} times on servers that answer others: {unavailable}"
                            )
                            self._answers_again(index)
                            return
                if self._only is None:
                    with self._lock:
                        index = self._least_busy(but=index)
                if self._closing.wait(wait_s):
                    return
                wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
        except Exception as error:  # a thread must never lose a request
            answer = Unavailable(f"{type(error).__name__}: {error}")
        finally:
            with self._lock:
                if self._only is None:
                    self._servers[home].n_open -= 1
            self._answers.put((key, answer))

    def _failed(self, why: Unavailable) -> None:
        with self._lock:
            self._told = why
            if self._out_since is None:
                self._out_since = time.monotonic()

    def _answers_again(self, index: int) -> None:
        with self._lock:
            self._servers[index].down = False
            if self._told_out and self._out_since is not None:
                out_s = time.monotonic() - self._out_since
                log.info("%s answers again after %.0f s", self._servers[index].url, out_s)
            self._out_since, self._told_out = None, False

    def _is_well(self, index: int) -> bool:
        """Whether a server that failed on a request answers a probe, with the run's weights."""
        server = self._servers[index]
        with self._probes[index]:
            at, well = self._probed[index]
            if time.monotonic() - at < _PROBED_S:
                return well
            try:
                well = server.healthy()
                found = self._print_of(index) if well else None
            except (Refused, Unavailable):
                well, found = False, None
            if found is not None and not found.agrees(self._prints[0]):
                well = False
                self._fatal = KnockoutError(
                    f"{server.url} serves other weights than it did when the run started. What had "
                    "finished is in the ledger; serve those weights again and give the same command"
                )
            self._probed[index] = time.monotonic(), well
            server.down = not well
        if not well and all(other.down for other in self._servers) and not self._told_out:
            self._told_out = True
            log.warning(
                "no server answers (%s); waiting up to %.0f s", self._told, self._outage_limit_s
            )
        return well
