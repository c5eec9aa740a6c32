"""Confirmation without new tokens: chosen on one half of the problems, estimated on the other.

Fresh seeds keep the problems, so they confirm an effect on these problems. For a claim about
problems like these, the choice must not have seen the problems that it is tested on.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from knockout.config.file import load_sweep
from knockout.errors import UsageError
from knockout.ledger import Ledger, grade_cubes, totals
from knockout.ledger.grades import GradeCube
from knockout.sweep.confirm import Confirmation, choose_singles
from knockout.sweep.racing import race_rule
from knockout.verdicts.table import build_verdicts

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["halves", "split_run"]

SPLIT = (
    "chosen on one half of the problems, estimated on the other, with the seeds of the run: nothing "
    "was generated. What is confirmed is true of problems like these; half as many problems see "
    "larger effects only"
)


def split_run(
    directory: Path, *, candidates: Collection[str] = (), verdicts: Collection[str] = ()
) -> tuple[Confirmation, pd.DataFrame]:
    """Chooses on one half of each benchmark's problems, and judges the choice on the other.

    Args:
        directory: A finished run that did not race.
        candidates, verdicts: As in `confirm.derive`; verdicts are those of the first half.

    Returns:
        What was chosen, with the first half's table, and the second half's table. Its p-values are
        corrected over what was chosen.

    Raises:
        UsageError: The run is unfinished or raced, or nothing was chosen.
    """
    sweep = load_sweep(directory / "config.yaml")
    with Ledger.open(directory / "run.db") as ledger:
        if not totals(ledger).complete:
            raise UsageError(f"{directory}: the run is unfinished; finish it before confirming")
        if race_rule(ledger) is not None:
            raise UsageError(
                f"{directory}: it raced, so all of its problems decided which candidates continued, and "
                "neither half is unseen. Confirm on fresh seeds, without --split"
            )
        cubes = grade_cubes(ledger)
        planned: dict[str, int] = dict(
            Counter(str(c.family) for c in ledger.candidates if c.group != "canary")
        )
        identity = ledger.meta().get("identity_hash")
    parts = [halves(cube.benchmark, cube.problem_ids) for cube in cubes]
    first = build_verdicts(
        [_part(cube, half, None) for cube, half in zip(cubes, parts, strict=True)],
        sweep.verdict,
        planned=planned,
    )
    singles = choose_singles(first, candidates, verdicts)
    if not singles:
        raise UsageError(
            f"{directory}: nothing to confirm: no candidate was called on the first half of the "
            "problems. Choose with --candidates or --verdict"
        )
    fresh = build_verdicts(
        [_part(cube, ~half, set(singles)) for cube, half in zip(cubes, parts, strict=True)],
        sweep.verdict,
    )
    record = {
        "of": identity,
        "split": {
            cube.benchmark: {"first": int(half.sum()), "second": int((~half).sum())}
            for cube, half in zip(cubes, parts, strict=True)
        },
        "n_hypotheses": len(singles),
    }
    return Confirmation(sweep, first, tuple(singles), {}, (SPLIT,), record), fresh


def halves(benchmark: str, problem_ids: Collection[str]) -> NDArray[np.bool_]:
    """(P,) True for the half that chooses: by a hash of the problem's id, so always the same."""
    keys = [hashlib.sha256(f"{benchmark}\0{p}".encode()).digest() for p in problem_ids]
    first = np.zeros(len(keys), dtype=np.bool_)
    first[sorted(range(len(keys)), key=keys.__getitem__)[: len(keys) // 2]] = True
    return first


def _part(cube: GradeCube, problems: NDArray[np.bool_], names: set[str] | None) -> GradeCube:
    kept = [i for i, c in enumerate(cube.candidates) if names is None or c.name in names]
    return replace(
        cube,
        candidates=tuple(cube.candidates[i] for i in kept),
        problem_ids=tuple(p for p, yes in zip(cube.problem_ids, problems, strict=True) if yes),
        baseline=cube.baseline[problems],
        knockout=cube.knockout[kept][:, problems],
        forked=cube.forked[kept][:, problems],
    )
