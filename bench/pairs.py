"""What all pairs of 20 candidates cost beside the 20 alone, and whether they are what they should be.

    python -m bench pairs [ENGINE]

The demo's model and tasks, some problems of each. Pairs leave the fork of a member; a tenth of all
knockouts, pairs among them, is run again from scratch and compared token for token.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from bench.machine import write

SWEEP = """
model: smollm2-135m
engine: {{kind: {engine}, dtype: float32, max_model_len: 512, max_num_seqs: 32}}
benchmarks:
  - {{name: knockout_starter_arithmetic, limit: 2}}
  - {{name: knockout_starter_instructions, limit: 2}}
seeds: 1
sampling: {{temperature: 0.6, top_p: 0.95, top_k: 20, max_tokens: 48}}
candidates:
  ids: [28, 30, 198, 216, 253, 260, 281, 282, 284, 288, 314, 325, 327, 338, 339, 346, 351, 355, 359, 1072]
  pairs: {pairs}
audit: {audit}
"""


def main(engine: str = "vllm") -> None:
    """Runs the singles and then the singles with all pairs; writes bench/results/pairs.json."""
    with tempfile.TemporaryDirectory() as folder:
        alone = run(Path(folder) / "alone", engine, "null", 0.0)
        both = run(Path(folder) / "both", engine, "all", 0.1)
    baseline = both["tokens_baseline"]
    singles = alone["tokens_generated"] - baseline
    pairs = both["tokens_generated"] - alone["tokens_generated"]
    write(
        "pairs",
        {
            "command": "python -m bench pairs",
            "sweep": SWEEP.format(engine=engine, pairs="null | all", audit="0 | 0.1").split("\n")[
                1:-1
            ],
            "n_pairs": both["n_pairs"],
            "tokens_baselines": baseline,
            "tokens_singles": singles,
            "tokens_pairs": pairs,
            "pairs_over_singles": round(pairs / singles, 2),
            "tokens_pairs_from_the_baseline": both["from_the_baseline"],
            "pairs_that_are_a_members_fork": both["whole"],
            "pairs_forked": both["forked"],
            "audited": both["audited"],
            "fork_errors": both["fork_errors"],
            "coupling_errors": both["coupling_errors"],
        },
    )


def run(out: Path, engine: str, pairs: str, audit: float) -> dict[str, Any]:
    """One run's summary, with counts of its pairs."""
    from knockout.config.file import parse_sweep
    from knockout.ledger import Ledger
    from knockout.sweep.run import run_sweep

    text = SWEEP.format(engine=engine, pairs=pairs, audit=audit)
    run_sweep(parse_sweep(text, "bench", Path(), []), out)
    summary: dict[str, Any] = json.loads((out / "summary.json").read_text())
    whole = forked = from_baseline = baseline = 0
    with Ledger.open(out / "run.db") as ledger:
        for key in ledger.decided()[0]:
            baseline += len(ledger.trajectory(key))
            for row in ledger.fork_rows(key):
                if not ledger.candidates[row.candidate].members:
                    continue
                whole += len(row.tokens) + row.step == row.shared
                forked += len(row.tokens) + row.step != row.shared
                from_baseline += len(row.tokens)
    return summary | {
        "whole": whole, "forked": forked, "from_the_baseline": from_baseline,
        "tokens_baseline": baseline,
    }  # fmt: skip
