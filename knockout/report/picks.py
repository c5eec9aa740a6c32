"""How likely the pick was at a fork, in both arms: one forward pass over each baseline.

A sweep keeps token ids, not probabilities. The probabilities at the forks are computed from the model
later, on request, and kept in the run directory (`picks.json`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from knockout.config.sweep import Sweep
from knockout.errors import UsageError
from knockout.files import write_text
from knockout.ledger import CellKey, Ledger
from knockout.method.interventions import Intervention
from knockout.method.sampling import Sampling
from knockout.report.trajectories import PairKey

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["FILE", "measure_picks", "picked_tokens", "picks_of", "read_picks"]

FILE = "picks.json"
_TEXT = tuple(range(1, 9))  # arbitrary ids for the check of the model's head


def read_picks(folder: Path) -> dict[str, Any]:
    """What was measured in a run so far: "b.p.s.c" to both arms; {} if nothing was."""
    path = folder / FILE
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))["picks"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return found if isinstance(found, dict) else {}


def picks_of(found: Mapping[str, Any], key: PairKey, step: int) -> dict[str, Any] | None:
    """Both arms of a pair, if they were measured at the step where it forks now."""
    arms = found.get(".".join(map(str, key)))
    return arms if arms and arms.get("step") == step else None


def picked_tokens(arms: Mapping[str, Any] | None) -> set[int]:
    """Ids that both arms name, so that the page knows their texts."""
    if arms is None:
        return set()
    own = [arms["baseline"], arms["knockout"]]
    ids = {token for arm in own for token, _ in arm["best"]}
    ids |= {arm[name] for arm in own for name in ("pick", "runner_up", "emitted")} - {None, -1}
    return ids


def measure_picks(
    folder: Path,
    sweep: Sweep,
    ledger: Ledger,
    keys: Iterable[PairKey],
    *,
    model: str | None = None,
    device: str | None = None,
) -> int:
    """Measures the picks at forks, and adds them to the run directory's `picks.json`.

    Args:
        folder: The run directory.
        sweep: What it ran with.
        ledger: Its ledger.
        keys: The pairs; those measured before are left as they are.
        model: A name or folder, if the run's own name finds no model.
        device: See `knockout.mining.load.check_device`.

    Returns:
        How many were measured now.

    Raises:
        UsageError: The model has other weights than the run's, or there is no such device.
        KnockoutError: It cannot be loaded.
    """
    known = read_picks(folder)
    wanted: dict[CellKey, list[tuple[int, int]]] = {}
    for key in keys:
        cell, candidate = CellKey(*key[:3]), key[3]
        outcome = ledger.outcome(cell, candidate)
        if outcome is not None and picks_of(known, key, outcome.step) is None:
            wanted.setdefault(cell, []).append((candidate, outcome.step))
    if not wanted:
        return 0
    scorer = _load(sweep, ledger, model, device)
    n = 0
    for cell, forks in sorted(wanted.items()):
        rows = _logits(scorer, ledger, cell, [step for _, step in forks])
        sampling = _sampling(sweep, ledger.benchmarks[cell.benchmark].name)
        problem, seed = ledger.problem(cell.benchmark, cell.problem), ledger.cell_seed(cell)
        assert problem is not None
        assert seed is not None
        tokens = ledger.trajectory(cell)
        for (candidate, step), row in zip(forks, rows, strict=True):
            change = ledger.candidates[candidate].intervention
            emitted = ledger.trajectory(cell, candidate)
            at = len(problem.prompt_ids) + step
            known[f"{'.'.join(map(str, cell))}.{candidate}"] = {
                "step": step,
                "baseline": _arm(row, sampling, seed, at, _at(tokens, step)),
                "knockout": _arm(_changed(row, change), sampling, seed, at, _at(emitted, step)),
            }
            n += 1
    text = json.dumps({"model": scorer.name, "picks": known}, separators=(",", ":"))
    write_text(folder / FILE, text + "\n")
    return n


def _arm(row: Tensor, sampling: Sampling, seed: int, at: int, emitted: int) -> dict[str, Any]:
    """One arm as the page shows it; `agrees` says whether this pass picks what was emitted."""
    from knockout.method.explain import explain

    found = asdict(explain(row, sampling, seed, at))
    numbers = {
        key: round(value, 4) if math.isfinite(value) else None
        for key, value in found.items()
        if isinstance(value, float)
    }
    best = [[token, round(p, 5)] for token, p in found["best"]]
    return {
        **found,
        **numbers,
        "best": best,
        "emitted": emitted,
        "agrees": found["pick"] == emitted,
    }


def _changed(row: Tensor, change: Intervention) -> Tensor:
    """The logits of the other arm. A replacement leaves them, and the pick, as they are."""
    row = row.clone()
    ids = list(change.token_ids)
    if change.kind == "ban":
        row[ids] = -math.inf
    elif change.strength is not None:
        row[ids] -= change.strength
    return row


def _at(tokens: Any, step: int) -> int:
    return int(tokens[step]) if step < len(tokens) else -1


def _logits(scorer: Any, ledger: Ledger, cell: CellKey, steps: list[int]) -> Tensor:
    """(n, V) logits from which the tokens at the steps of a baseline were picked."""
    import torch

    problem = ledger.problem(cell.benchmark, cell.problem)
    assert problem is not None
    prompt, own = problem.prompt_ids.tolist(), ledger.trajectory(cell).tolist()
    ids = torch.tensor([[*prompt, *own[: max(steps)]]], device=scorer.device)
    places = torch.tensor([len(prompt) + step - 1 for step in steps], device=scorer.device)
    with torch.inference_mode():
        if scorer.split:
            found = scorer.head(scorer.hidden(ids, torch.ones_like(ids))[0, places])
        else:
            found = scorer.model(ids, use_cache=False).logits[0, places]
    return found.float()  # type: ignore[no-any-return]


def _sampling(sweep: Sweep, benchmark: str) -> Sampling:
    entry = next((e for e in sweep.benchmarks if e.name == benchmark), None)
    s = sweep.sampling if entry is None else sweep.settings(entry).sampling
    return Sampling(s.temperature, s.top_p, s.top_k, s.min_p)


def _load(sweep: Sweep, ledger: Ledger, model: str | None, device: str | None) -> Any:
    from knockout.mining.load import load_scoring_model
    from knockout.sweep.identity import model_fingerprint
    from knockout.tokens.checkpoint import resolve_model

    name = model or sweep.model
    path = Path(resolve_model(name, revision=None if model else sweep.revision))
    known = ledger.meta_json("identity", {}).get("model_fingerprint")
    found = model_fingerprint(path)
    if known is not None and found != known:
        raise UsageError(
            f"{name}: its weights are not those of the run (fingerprint {found[:12]}, the run has "
            f"{known[:12]}); give the run's model"
        )
    return load_scoring_model(path, name, sweep.engine.dtype, device, _TEXT)
