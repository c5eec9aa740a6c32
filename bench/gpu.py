"""The prepared check on one GPU: under 8 minutes, no network, no model to download.

    python -m bench gpu                   # every part, to bench/results/gpu.json
    python -m bench gpu kernels qwen3_4b  # some of them

Each part runs in its own process with a time limit; the results are written after each one, and
what could not be run is said with the reason. Without a GPU, parts that a CPU can do run in a small
shape, to show that they work, and the results go to runs/gpu-trial.json instead.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.gpu_parts import PARTS, Part
from bench.machine import RESULTS, describe

TOTAL_S = 465
TRIAL = Path("runs/gpu-trial.json")


def main(*names: str) -> None:
    """Runs the named parts, or all in their order."""
    unknown = sorted(set(names) - set(PARTS))
    if unknown:
        raise SystemExit(f"no part {', '.join(unknown)}; there are {', '.join(PARTS)}")
    gpu, why = found_gpu()
    print(f"GPU: {gpu['name']}" if gpu else f"no GPU found: {why}", flush=True)
    path = RESULTS / "gpu.json" if gpu else TRIAL
    path.parent.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {
        "command": " ".join(["python -m bench gpu", *names]),
        "machine": {**describe(), "gpu": gpu or f"no GPU found: {why}"},
        "parts": {},
        "not_run": {},
    }
    start = time.monotonic()
    for name in names or PARTS:
        part = PARTS[name]
        left = TOTAL_S - (time.monotonic() - start)
        if part.needs_gpu and gpu is None:
            result["not_run"][name] = f"no GPU found: {why}"
        elif left < 20:
            result["not_run"][name] = f"the {TOTAL_S} s of the whole check were used up"
        else:
            done, reason = run_part(name, part, min(part.limit_s, left), small=gpu is None)
            if done:
                result["parts"][name] = done
            if reason:
                result["not_run"][name] = reason
        result["wall_s"] = round(time.monotonic() - start, 1)
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        said = result["not_run"].get(name)
        print(f"{name}: {'not run, or not to its end: ' + said if said else 'done'}", flush=True)
    print(f"wrote {path}")


def found_gpu() -> tuple[dict[str, Any] | None, str]:
    """What the GPU is, or why there is none."""
    import torch

    if not torch.cuda.is_available():
        build = torch.version.cuda
        return None, "torch sees none" if build else "this torch is built without CUDA"
    one = torch.cuda.get_device_properties(0)
    return {
        "name": one.name,
        "memory_gib": round(one.total_memory / 2**30),
        "capability": f"{one.major}.{one.minor}",
        "cuda": torch.version.cuda,
        "count": torch.cuda.device_count(),
    }, ""


def run_part(
    name: str, part: Part, limit_s: float, *, small: bool
) -> tuple[dict[str, Any], str | None]:
    """What a part found by its end or its limit, and why it did not come to its end."""
    found: dict[str, Any] = {}
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        answers, log = Path(folder) / "answers.jsonl", Path(folder) / "log"
        with log.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "bench.gpu_parts", name, str(int(small)), str(answers)],
                env={**os.environ, "HF_HUB_OFFLINE": "1", **part.environment},
                stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
            reason = None
            try:
                if process.wait(limit_s):
                    reason = f"ended with status {process.returncode}"
            except subprocess.TimeoutExpired:
                reason = f"stopped at its limit of {limit_s:.0f} s"
            finally:
                if process.poll() is None or reason:
                    _end_group(process)
        lines = answers.read_text(encoding="utf-8").splitlines() if answers.exists() else []
        for line in lines:
            found |= json.loads(line)
        if reason:
            tail = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-6:]
            reason += ": " + " | ".join(line.strip()[:300] for line in tail)
    if found:
        found["wall_s"] = round(time.monotonic() - start, 1)
    return found, reason


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """Ends a part with the engine processes that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
