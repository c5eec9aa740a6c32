"""Runs vLLM's Model Runner V2 on a CPU under Triton's interpreter; started by test_engines.py.

The argument is the model. Reads requests as JSON from the standard input and writes the completions'
tokens to the standard output. vLLM itself does not support this combination: the stand-ins below are what it takes.
"""

from __future__ import annotations

import json
import os
import sys
from types import SimpleNamespace


def main() -> None:
    os.environ.update(
        TRITON_INTERPRET="1", VLLM_USE_V2_MODEL_RUNNER="1", VLLM_ENABLE_V1_MULTIPROCESSING="0"
    )
    from triton.backends import backends

    backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True))
    from vllm.v1.sample.ops import topk_topp_sampler

    # This kernel fails when interpreted; the plain torch way is used without it.
    topk_topp_sampler.HAS_TRITON = False

    from tiny import as_json, banning

    from knockout.engines.base import Request, generate
    from knockout.engines.vllm import VllmEngine
    from knockout.method.interventions import ban
    from knockout.method.sampling import Sampling

    requests = [
        Request(
            key=r["key"],
            prompt=tuple(r["prompt"]),
            prefix=tuple(r["prefix"]),
            seed=r["seed"],
            sampling=Sampling(**r["sampling"]),
            max_tokens=r["max_tokens"],
            watch=tuple(ban((t,)) for t in r["watch"]),
            intervention=banning(r["banned"]),
        )
        for r in json.load(sys.stdin)
    ]
    engine = VllmEngine(sys.argv[1], max_model_len=64, max_num_seqs=8, kv_cache_gib=0.25)
    found = as_json(generate(engine, requests))
    runner = engine.info.runner
    engine.close()
    print("RESULT " + json.dumps({"runner": runner, "found": found}))


if __name__ == "__main__":
    main()
