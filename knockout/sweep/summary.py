"""`summary.json`: what a run did, counted from its ledger, and what is suspicious about it."""

from __future__ import annotations

from typing import Any

from knockout.config.sweep import Sweep
from knockout.ledger import Ledger, Totals, totals
from knockout.sweep.looks import looks
from knockout.sweep.racing import race_record
from knockout.sweep.results import luck_of

__all__ = ["summarise"]

# Above these shares the user is warned. A coupling error means that a fork's first own token is the
# baseline's: the engine's two passes disagree about a pick; in float32 there are next to none.
_MOST_COUPLING_ERRORS = 0.001
_MOST_FORK_ERRORS = 0.02
_MOST_UNFINISHED = 0.2


def summarise(ledger: Ledger, sweep: Sweep) -> dict[str, Any]:
    """Counts a run.

    Args:
        ledger: The run's.
        sweep: What it ran with.

    Returns:
        The content of `summary.json`; trajectories and tokens are counted in the ledger, so
        that an interruption changes no count.
    """
    state = totals(ledger)
    asked = ledger.asked()
    benchmarks = {i: ledger.benchmarks[i] for i in asked.benchmarks}
    n_problems = dict(zip(asked.benchmarks, asked.problems, strict=True))
    candidates = [ledger.candidates[c] for c in asked.candidates]
    records = [session.record for session in ledger.sessions()]
    engine = next((r["engine"] for r in reversed(records) if r.get("engine")), None)
    if engine is not None:
        engine.pop("model", None)  # the folder on that machine
    meta = ledger.meta()
    made = ledger.meta_json("identity", {})
    return {
        "model": sweep.model,
        "engine": engine,
        "benchmarks": [b.name for b in benchmarks.values()],
        "n_problems": {b.name: n_problems[i] for i, b in benchmarks.items()},
        "seeds": {b.name: b.n_seeds for b in benchmarks.values()},
        "strategy": sweep.strategy,
        "n_candidates": sum(c.group == "candidate" for c in candidates),
        "n_controls": sum(c.group == "control" for c in candidates),
        "n_seeds": max(b.n_seeds for b in benchmarks.values()),
        "n_cells": state.planned_cells,
        "n_doses": sum(c.family == "dose" for c in candidates),
        "n_pairs": sum(c.family == "pairs" for c in candidates),
        "cells_done": state.cells - state.failed_cells,
        "cells_failed": state.failed_cells,
        "trajectories": state.cells + state.forks + state.inherited,
        "forks": state.forks,
        "forks_failed": state.failed_forks,
        "forks_owed": state.owed_forks,
        "early_forks": state.early_forks,
        "inherited": state.inherited,
        "tokens_generated": state.tokens_generated,
        "tokens_naive": state.tokens_naive,
        "tokens_audit": state.tokens_audit,
        "coupling_errors": state.coupling_errors,
        "steps_checked": state.steps_checked,
        "audited": state.audited,
        "fork_errors": state.fork_errors,
        "audits_failed": state.failed_audits,
        "unfinished": state.unfinished,
        "grades": state.grades,
        "timeouts": state.grades.get("timeout", 0),
        "golds_as_text": ledger.meta_json("golds_as_text", {}),
        "respelled": state.respelled,
        "canary": _canary(ledger),
        "race": race_record(ledger),
        "luck": luck_of(ledger, sweep.verdict),
        "looks": looks(ledger),
        "replays": replays(ledger),
        "wall_s": round(state.wall_s, 3),
        "sessions": len(records),
        "complete": state.complete,
        "identity_hash": meta.get("identity_hash"),
        "run_seed": made.get("run_seed"),
        "sampling": made.get("sampling"),
        "fingerprints": {
            "model": made.get("model_fingerprint"),
            "tokenizer": made.get("tokenizer_fingerprint"),
            "benchmarks": made.get("benchmark_fingerprints"),
        },
        "versions": sorted({r["knockout"] for r in records if "knockout" in r}),
        "warnings": _warnings(ledger, sweep, state),
    }


def replays(ledger: Ledger) -> dict[str, int]:
    """Baselines that were decoded again, to find where later candidates diverge.

    Returns:
        `cells`: how many; `tokens`: of them; `mismatches`: those that differed from the stored
        tokens, so that the cell was done again.
    """
    return {"cells": 0, "tokens": 0, "mismatches": 0} | dict(ledger.meta_json("replays", {}))


def _canary(ledger: Ledger) -> dict[str, Any] | None:
    """What the A/A row shows; None if the vocabulary has no id that cannot occur."""
    for index, candidate in enumerate(ledger.candidates):
        if candidate.group == "canary":
            audited, differ = ledger.audit_counts(index)
            return {
                "candidate": candidate.name,
                "token_ids": list(candidate.token_ids),
                "forked": ledger.forked_cells(index),
                "audited": audited,
                "fork_errors": differ,
            }
    return None


def _warnings(ledger: Ledger, sweep: Sweep, state: Totals) -> list[str]:
    found = []
    if state.coupling_errors > _MOST_COUPLING_ERRORS * state.steps_checked:
        found.append(
            f"{state.coupling_errors} of {state.steps_checked} forks begin with the baseline's own "
            "token: its logits differ when they are computed again. float32, or an engine that "
            "does not depend on the batch, helps"
        )
    if state.fork_errors > _MOST_FORK_ERRORS * state.audited:
        found.append(
            f"{state.fork_errors} of {state.audited} audited knockouts differ from a run from "
            "scratch: rounding differs between prefill and decoding"
        )
    generated = state.cells + state.forks
    if state.unfinished > _MOST_UNFINISHED * generated:
        found.append(
            f"{state.unfinished} of {generated} trajectories ran into max_tokens; one "
            "without an answer by then counts as wrong"
        )
    if state.unasked:
        found.append(
            f"{state.unasked} knockouts of older cells could not be placed: their "
            "baselines could not be decoded again. The same command tries again"
        )
    if wrong := replays(ledger)["mismatches"]:
        found.append(
            f"{wrong} baselines differed from their stored tokens when they were decoded again for "
            "new candidates; those cells were done again. float32, or an engine that does not depend on "
            "the batch, helps"
        )
    if (n := looks(ledger)) > 1 and sweep.adaptive is None:
        found.append(
            f"this is look {n} at the run: it was extended after its verdicts had been seen. Each "
            "look is another chance for a false claim; for claims that you rely on, judge at level "
            f"alpha / {n}, confirm on fresh seeds (`knockout confirm`), or race"
        )
    if state.failed_cells or state.failed_forks:
        found.append(
            f"the engine failed on {state.failed_cells} baselines and {state.failed_forks} forks; "
            "they are missing from the verdicts (the same command tries again)"
        )
    ungraded = sum(state.grades.get(status, 0) for status in ("timeout", "error"))
    if ungraded:
        found.append(
            f"{ungraded} answers could not be graded (time limit or an error of the grader); they "
            "are missing from the verdicts, not wrong"
        )
    return found + _identical_repeats(ledger, sweep)


def _identical_repeats(ledger: Ledger, sweep: Sweep) -> list[str]:
    """Benchmarks whose repeats are all the same although they were sampled: a lost seed."""
    found = []
    sampled = {e.name: sweep.settings(e).sampling.temperature > 0 for e in sweep.benchmarks}
    for index, benchmark in enumerate(ledger.benchmarks):
        if sampled.get(benchmark.name, True) and ledger.repeats_equal(index):
            found.append(
                f"{benchmark.name}: all repeats of every problem are identical although the "
                "temperature is above 0; seeds do not seem to reach the engine"
            )
    return found
