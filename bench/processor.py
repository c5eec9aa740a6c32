"""What our pick costs: tokens/s beside the engine's own sampler, and the time of one step.

    python -m bench processor
    python -m bench processor batch_milliseconds    # one part, only printed; also step_seconds,
                                                    # on_an_accelerator, engine

All arms run in one engine, in turn, several times, so that a drifting machine hits them alike;
the ratios are medians over rounds. Prefill is not counted: a round's clock starts when every
request has its first token.
"""

from __future__ import annotations

import functools
import json
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bench.launches import Counted
from bench.machine import write
from knockout.engines.base import Request
from knockout.method import sampling as sampling_parts
from knockout.method.changes import Watched, pick_watched
from knockout.method.interventions import ban
from knockout.method.sampling import Rows, Sampling, pick
from knockout.processors.batch import Batch
from knockout.processors.rules import rule_from_extra_args

SAMPLING = Sampling(temperature=0.6, top_p=0.95, top_k=20)
OPEN = Sampling(temperature=0.6)
SETTINGS = {
    "top_k 20, top_p 0.95": SAMPLING,
    "top_p 0.95": Sampling(temperature=0.6, top_p=0.95),
    "min_p 0.05": Sampling(temperature=0.6, min_p=0.05),
    "no truncation": OPEN,
    "greedy": Sampling(temperature=0),
}
BATCHES = (8, 32, 64)
TOKENS = 24
ROUNDS = 5
PROMPTS = (
    "Tell me about the history of bread.",
    "What is the sum of 17 and 25? Explain each step.",
    "Write a short letter to a friend who moved away.",
    "List five uses of a brick.",
)


def main(*parts: str) -> None:
    """Measures all parts and writes bench/results/processor.json; single parts are only printed."""
    measured = {name: PARTS[name]() for name in parts or PARTS}
    if parts:
        print(json.dumps(measured, indent=1))
    else:
        write("processor", measured)


def batches() -> dict[str, dict[str, float]]:
    """Median milliseconds until 256 rows, each with its own ban, are laid out on one core."""
    rng, width, threads = random.Random(0), 151_936, torch.get_num_threads()
    torch.set_num_threads(1)
    out: dict[str, dict[str, float]] = {}
    for size in (1, 1_000, 5_000):
        args: list[dict[str, Any]] = [
            {
                "knockout_ids": sorted(rng.sample(range(width), size)), "knockout_seed": row,
                "knockout_temperature": 0.6, "knockout_top_p": 0.95, "knockout_top_k": 20,
            }
            for row in range(256)
        ]  # fmt: skip
        times: dict[str, list[float]] = {}

        def timed(name: str, run: Callable[[], Any], into: dict[str, list[float]] = times) -> Any:
            start = time.perf_counter()
            answer = run()
            into.setdefault(name, []).append((time.perf_counter() - start) * 1000)
            return answer

        for _ in range(9):
            rules = timed("requests read", lambda a=args: [rule_from_extra_args(one) for one in a])
            timed("first batch", functools.partial(Batch, rules, width))
            batch = timed("same rules again", functools.partial(Batch, rules, width))
            mixed = rng.sample(rules, len(rules))
            timed("rows in another order", functools.partial(batch.rearranged, mixed, width))
        out[f"256 bans of {size} ids"] = {
            name: round(statistics.median(values), 2) for name, values in times.items()
        }
        print(size, out[f"256 bans of {size} ids"])
    torch.set_num_threads(threads)
    return out


def one_step() -> dict[str, float]:
    """Median seconds of one pick of 64 rows over Qwen3's vocabulary."""
    torch.manual_seed(0)
    logits = torch.randn(64, 151_936) * 3
    positions = torch.arange(64)
    arms: dict[str, Any] = {}
    for name, s in SETTINGS.items():
        args = (logits, Rows([s] * 64, list(range(64))), positions)
        arms[name] = functools.partial(pick, *args)
        if s.truncates:
            for kind, what in ((0, "bans"), (1, "penalties")):
                arms[f"{name}, 20 {what} a row watched"] = functools.partial(
                    pick_watched, *args, _watched(64, 20, 151_936, kind)
                )
    arms["a full sort of the logits (for scale)"] = lambda: logits.sort(dim=1)
    times: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(7):
        for name, run in arms.items():
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    return {name: round(statistics.median(t[1:]), 4) for name, t in times.items()}


def _watched(rows: int, each: int, width: int, kind: int) -> Watched:
    """As many interventions of one random token on each row; penalties of 1."""
    n = rows * each
    tokens = torch.randint(width, (n,), generator=torch.Generator().manual_seed(0))
    return Watched(
        torch.arange(rows).repeat_interleave(each), torch.arange(each).repeat(rows),
        torch.full((n,), kind), torch.ones(n, dtype=torch.float64), torch.arange(n), tokens, each,
        kind == 1,
    )  # fmt: skip


def on_an_accelerator() -> dict[str, dict[str, float]]:
    """Operations, waits for the device and memory of a step of 256 rows over Qwen3's vocabulary.

    Counted on a CPU, with rows split as on an accelerator. vLLM's own sampler beside it.
    """
    rows, width = 256, 151_936
    logits = torch.randn(rows, width, generator=torch.Generator().manual_seed(0)) * 8
    positions, before = torch.arange(rows), (sampling_parts._OPEN, sampling_parts._SORTED)
    arms: dict[str, Callable[[], Any]] = {}
    for name, s in SETTINGS.items():
        args = (logits, Rows([s] * rows, list(range(rows))), positions)
        arms[name] = functools.partial(pick, *args)
        arms[f"{name}, 20 bans a row watched"] = functools.partial(
            pick_watched, *args, _watched(rows, 20, width, 0)
        )
    arms["vLLM's own sampling, top_k 20, top_p 0.95"] = functools.partial(_own, logits)
    out = {}
    try:
        sampling_parts._OPEN, sampling_parts._SORTED = (one[1:] * 2 for one in before)
        for name, run in arms.items():
            with Counted() as counted:
                run()
            out[name] = {
                "operations": counted.n, "waits": counted.waits,
                "peak_mib": round(counted.peak / 2**20, 1),
            }  # fmt: skip
            print(name, out[name])
    finally:
        sampling_parts._OPEN, sampling_parts._SORTED = before
    return out


def _own(logits: Tensor) -> Tensor:
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch, random_sample

    rows = logits.shape[0]
    cut = apply_top_k_top_p_pytorch(
        logits.clone(), torch.full((rows,), SAMPLING.top_k), torch.full((rows,), SAMPLING.top_p)
    )
    return random_sample(cut.softmax(dim=-1), {})


def in_engine() -> dict[str, Any]:
    """Tokens/s of each arm and batch size, and its ratio to the engine's own sampling."""
    from knockout.engines.vllm import VllmEngine

    engine = VllmEngine("smollm2-135m", max_model_len=512, max_num_seqs=max(BATCHES))
    try:
        out: dict[str, Any] = {"settings": {"sampling": str(SAMPLING), "tokens": TOKENS}}
        for batch in BATCHES:
            speeds: dict[str, list[float]] = {}
            for round_ in range(ROUNDS + 1):
                for arm in ARMS:
                    speed = _speed(engine, arm, batch)
                    if round_:  # the first round warms up
                        speeds.setdefault(arm, []).append(speed)
            own = speeds["engine's own sampling"]
            out[f"batch {batch}"] = {
                arm: {
                    "tokens_per_s": round(statistics.median(values), 1),
                    "ratio_to_own": round(
                        statistics.median(v / o for v, o in zip(values, own, strict=True)), 3
                    ),
                }
                for arm, values in speeds.items()
            }
            print(batch, out[f"batch {batch}"])
        return out
    finally:
        engine.close()


ARMS = (
    "engine's own sampling",
    "engine's own greedy",
    "engine's own sampling, no truncation",
    "coupled, no truncation",
    "coupled, no ban",
    "coupled, one ban for all",
    "coupled, another ban per request",
    "plain ban, engine samples",
)


def _speed(engine: Any, arm: str, batch: int) -> float:
    """Decodes TOKENS tokens for a batch and returns tokens/s after the first step of all."""
    from vllm import SamplingParams

    from knockout.engines.base import to_extra_args

    encode = engine.tokenizer.encode
    ids = [tuple(encode(PROMPTS[i % len(PROMPTS)])) for i in range(batch)]
    inner = engine._engine  # the bare engine: requests without our keys have no other way in
    for i, prompt in enumerate(ids):
        banned: tuple[int, ...] = ()
        if arm in ("coupled, one ban for all", "plain ban, engine samples"):
            banned = (28,)
        elif arm == "coupled, another ban per request":
            banned = (28 + i,)
        if arm.startswith("coupled"):
            request = Request(
                key=str(i),
                prompt=prompt,
                seed=i,
                sampling=OPEN if arm.endswith("no truncation") else SAMPLING,
                max_tokens=TOKENS,
                intervention=ban(banned) if banned else None,
            )
            params = SamplingParams(
                temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False,
                extra_args=to_extra_args(request),
            )  # fmt: skip
        elif arm == "engine's own greedy":
            params = SamplingParams(
                temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False
            )
        else:
            own = OPEN if arm.endswith("no truncation") else SAMPLING
            params = SamplingParams(
                temperature=own.temperature, top_p=own.top_p, top_k=own.top_k,
                max_tokens=TOKENS, ignore_eos=True, detokenize=False,
                extra_args={"knockout_ids": list(banned)} if banned else None,
            )  # fmt: skip
        inner.add_request(f"{arm}-{i}", {"prompt_token_ids": list(prompt)}, params)
    started: set[str] = set()
    while len(started) < batch:
        started.update(output.request_id for output in inner.step())
    produced, clock = 0, time.perf_counter()
    while inner.has_unfinished_requests():
        produced += len(inner.step())
    return produced / (time.perf_counter() - clock)


PARTS: dict[str, Callable[[], Any]] = {
    "batch_milliseconds": batches,
    "step_seconds": one_step,
    "on_an_accelerator": on_an_accelerator,
    "engine": in_engine,
}


if __name__ == "__main__":
    main()
