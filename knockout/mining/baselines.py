"""The baselines of a run as rollouts, so that they are not paid twice."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from knockout.config.file import load_sweep
from knockout.errors import KnockoutError, UsageError
from knockout.ledger.ledger import Ledger
from knockout.ledger.rows import CellKey
from knockout.mining.rollouts import Prompt, SetAside, missing, shard_path
from knockout.mining.shards import Shard, write_shard

__all__ = ["Baselines", "open_baselines", "require_same_model", "write_baselines"]


@dataclass(frozen=True, slots=True)
class Baselines:
    """A run whose baselines serve as rollouts.

    Attributes:
        path: Its ledger.
        model: The model that it ran, as its configuration names it.
        identity: Hash of what its baselines depend on.
        prompts: Its problems.
        places: Benchmark and problem of each prompt, as the ledger counts them.
    """

    path: Path
    model: str
    identity: str
    prompts: list[Prompt]
    places: list[tuple[int, int]]


def open_baselines(run: Path, limit: int | None = None) -> Baselines:
    """Looks into a run directory.

    Args:
        run: A run directory; the run need not be complete.
        limit: The first problems of each benchmark only.

    Raises:
        UsageError: It is no run directory, or contains no finished baseline.
    """
    if not (run / "run.db").is_file():
        raise UsageError(f"{run}: no run.db; expected the directory of a run")
    model = load_sweep(run / "config.yaml").model
    prompts, places = [], []
    with Ledger.open(run / "run.db") as ledger:
        identity = ledger.meta().get("identity_hash", "")
        counts = ledger.n_problems()
        for index, benchmark in enumerate(ledger.benchmarks):
            done = {cell.problem for cell in ledger.cells(index, failed=False)}
            for problem in range(counts.get(index, 0)):
                if limit is not None and problem >= limit:
                    break
                stored = ledger.problem(index, problem)
                if stored is None or problem not in done:
                    continue
                tokens = tuple(int(i) for i in stored.prompt_ids)
                prompts.append(Prompt(benchmark.name, stored.doc_id, tokens))
                places.append((index, problem))
    if not prompts:
        raise UsageError(f"{run}: contains no finished baseline yet")
    return Baselines(run / "run.db", model, identity, prompts, places)


def write_baselines(source: Baselines, folder: Path, aside: SetAside) -> None:
    """Writes the baselines that a folder of rollouts lacks, one shard a problem.

    Args:
        source: The run.
        folder: Of the shards.
        aside: Takes problems whose baselines are all empty.

    Raises:
        KnockoutError: The ledger cannot be read.
    """
    owed = missing(folder, len(source.prompts), aside)
    if not owed:
        return
    with Ledger.open(source.path) as ledger:
        seeds: dict[tuple[int, int], list[int]] = {}
        for index in range(len(ledger.benchmarks)):
            for cell in ledger.cells(index, failed=False):
                seeds.setdefault((index, cell.problem), []).append(cell.seed)
        for index in owed:
            place, prompt = source.places[index], source.prompts[index]
            keys = [CellKey(*place, seed) for seed in sorted(seeds.get(place, []))]
            tokens = [t for key in keys if len(t := ledger.trajectory(key))]
            where = f"{prompt.source}/{prompt.doc_id}"
            if not tokens:
                aside.add(index, f"{where}: every baseline is empty")
                continue
            shard = Shard(
                doc_id=where,
                prompt=np.array(prompt.tokens, dtype=np.int32),
                tokens=np.concatenate(tokens).astype(np.int32),
                lengths=np.array([len(t) for t in tokens], dtype=np.int32),
            )
            write_shard(shard_path(folder, index), shard)


def require_same_model(source: Baselines, folder: Path, name: str) -> None:
    """Demands that a student is the model of the run.

    Raises:
        UsageError: It is another one.
        KnockoutError: The run does not say which it was.
    """
    from knockout.sweep.identity import model_fingerprint

    with Ledger.open(source.path) as ledger:
        theirs = ledger.meta_json("identity", {}).get("model_fingerprint")
    if theirs is None:
        raise KnockoutError(f"{source.path}: does not say which model it was made with")
    if theirs != model_fingerprint(folder):
        raise UsageError(
            f"student {name} is not the model of {source.path.parent} ({source.model}); its "
            "baselines are another model's"
        )
