"""What our pick costs: tokens/s beside the engine's own sampler, and the time of one step.

    python -m bench processor

All arms run in one engine, in turn, several times, so that a drifting machine hits them alike;
the ratios are medians over rounds. Prefill is not counted: a round's clock starts when every
request has its first token.
"""

from __future__ import annotations

import functools
import statistics
import time
from typing import Any

import torch

from bench.machine import write
from knockout.engines.base import Request
from knockout.method.sampling import Rows, Sampling, pick

SAMPLING = Sampling(temperature=0.6, top_p=0.95, top_k=20)
BATCHES = (8, 32, 64)
TOKENS = 24
ROUNDS = 5
PROMPTS = (
    "Tell me about the history of bread.",
    "What is the sum of 17 and 25? Explain each step.",
    "Write a short letter to a friend who moved away.",
    "List five uses of a brick.",
)


def main() -> None:
    """Measures and writes bench/results/processor.json."""
    result: dict[str, Any] = {"step_seconds": one_step(), "engine": in_engine()}
    write("processor", result)


def one_step() -> dict[str, float]:
    """Median seconds of one pick of 64 rows over Qwen3's vocabulary."""
    torch.manual_seed(0)
    logits = torch.randn(64, 151_936) * 3
    positions = torch.arange(64)
    settings = {
        "top_k 20, top_p 0.95": SAMPLING,
        "no truncation": Sampling(temperature=0.6),
        "greedy": Sampling(temperature=0),
    }
    arms: dict[str, Any] = {
        name: functools.partial(pick, logits, Rows([s] * 64, list(range(64))), positions)
        for name, s in settings.items()
    }
    arms["a full sort of the logits (for scale)"] = lambda: logits.sort(dim=1)
    times: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(7):
        for name, run in arms.items():
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    return {name: round(statistics.median(t[1:]), 4) for name, t in times.items()}


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
                sampling=SAMPLING,
                max_tokens=TOKENS,
                banned=banned,
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
            params = SamplingParams(
                temperature=SAMPLING.temperature, top_p=SAMPLING.top_p, top_k=SAMPLING.top_k,
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


if __name__ == "__main__":
    main()
