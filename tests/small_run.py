"""One small finished run with the embedded model, for the tests that only read a run."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import knockout

SETTINGS = {
    "model": "smollm2-135m",
    "engine": {"kind": "transformers", "max_model_len": 200, "max_num_seqs": 16},
    "benchmarks": ["knockout_starter_arithmetic"],
    "limit": 3,
    "seeds": 2,
    "sampling": {"temperature": 0.6, "top_k": 20, "max_tokens": 20},
    "candidates": {"strings": [" the", " zebra"], "sets": {"/marks: . ,/": [".", ","]}},
    "audit": 0.0,
}


@functools.cache
def small_run() -> Path:
    """The run directory."""
    out = Path(tempfile.mkdtemp(prefix="knockout-small-run-")) / "run"
    knockout.Sweep(**SETTINGS).run(out)
    return out
