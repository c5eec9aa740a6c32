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
  {candidates}
  pairs: {pairs}
audit: {audit}
"""

LISTS = {
    "the commonest": "ids: [28, 30, 198, 216, 253, 260, 281, 282, 284, 288, 314, 325, 327, 338, 339, "
    "346, 351, 355, 359, 1072]",
    "the demo's and others": (
        'strings: [" is", " the", "=", ".", "\\n", " because", " zebra", " parliament", " of", ",", '
        '" to", "+", " so", " therefore", " first", " then", " can", " water", " two", " good"]'
    ),
}
"""Twenty tokens that the model uses most, and twenty of which some are rare."""


def main(engine: str = "vllm") -> None:
    """Runs each list alone and then with all its pairs; writes bench/results/pairs.json."""
    found = {name: measure(candidates, engine) for name, candidates in LISTS.items()}
    sweep = SWEEP.format(engine=engine, candidates="...", pairs="null | all", audit="0 | 0.1")
    write(
        "pairs",
        {
            "command": f"python -m bench pairs {engine}",
            "sweep": sweep.split("\n")[1:-1],
            "candidates": LISTS,
            "lists": found,
        },
    )


def measure(candidates: str, engine: str) -> dict[str, Any]:
    """Tokens of the singles and of the pairs of one list."""
    with tempfile.TemporaryDirectory() as folder:
        alone = run(Path(folder) / "alone", engine, candidates, "null", 0.0)
        both = run(Path(folder) / "both", engine, candidates, "all", 0.1)
    singles = alone["tokens_generated"] - both["tokens_baseline"]
    pairs = both["tokens_generated"] - alone["tokens_generated"]
    return {
        "n_pairs": both["n_pairs"],
        "tokens_baselines": both["tokens_baseline"],
        "tokens_singles": singles,
        "tokens_pairs": pairs,
        "pairs_over_singles": round(pairs / singles, 2),
        "tokens_pairs_from_the_baseline": both["from_the_baseline"],
        "pairs_that_are_a_members_fork": both["whole"],
        "pairs_forked": both["forked"],
        "audited": both["audited"],
        "fork_errors": both["fork_errors"],
        "coupling_errors": both["coupling_errors"],
    }


def run(out: Path, engine: str, candidates: str, pairs: str, audit: float) -> dict[str, Any]:
    """One run's summary, with counts of its pairs."""
    from knockout.config.file import parse_sweep
    from knockout.ledger import Ledger
    from knockout.sweep.run import run_sweep

    text = SWEEP.format(engine=engine, candidates=candidates, pairs=pairs, audit=audit)
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
