"""`knockout geometry`: one more forward pass over a mining run's rollouts."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from knockout.errors import KnockoutError, UsageError
from knockout.files import write_text
from knockout.geometry.geometry import Geometry, GradientSums, kl_gradient
from knockout.geometry.groups import GROUPS, choose_types
from knockout.geometry.halves import TypeMeans, rank_rocks, split, type_means
from knockout.mining.forward import ScoringModel, length_batches
from knockout.mining.kl import chunk_positions
from knockout.mining.shards import Shard, read_shard

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["MiningRun", "measure", "open_run", "table"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class MiningRun:
    """What geometry needs of a folder of `knockout mine`.

    Attributes:
        shards: Files of the scored rollouts.
        scores: The table of token scores, one row a type.
        models: "teacher" and "student" (and perhaps "before") to the names that were mined with.
        summary: What the run says of itself.
        rocks: Token ids of a list made elsewhere, best first; None to rank them on the prompts
            that types are chosen on.
    """

    shards: list[Path]
    scores: pd.DataFrame
    models: dict[str, str]
    summary: dict[str, Any]
    rocks: list[int] | None = None

    @property
    def choosing(self) -> list[Path]:
        """Shards of the prompts that types are chosen on."""
        return split(self.shards)[0]

    @property
    def measuring(self) -> list[Path]:
        """Shards of the prompts that they are measured on."""
        return split(self.shards)[1]

    @property
    def width(self) -> int:
        """One more than the largest id that occurs."""
        return int(self.scores["token_id"].max()) + 1


def open_run(folder: Path) -> MiningRun:
    """Opens a mining run.

    Raises:
        UsageError: The folder is not a finished mining run.
    """
    import pandas as pd

    shards = sorted((folder / "scores").glob("*.npz"))
    try:
        scores = pd.read_parquet(folder / "token_scores.parquet")
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        models = summary["models"]
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(
            f"{folder}: not a finished run of `knockout mine` ({error}); give its --out folder"
        ) from None
    if not shards:
        raise UsageError(f"{folder}: found no scored rollouts in {folder / 'scores'}")
    if len(shards) < 2:
        raise UsageError(
            f"{folder}: contains one prompt; types are chosen on half of the prompts and measured on "
            "the other half, so mine two or more"
        )
    return MiningRun(shards, scores, dict(models), summary)


@torch.inference_mode()
def measure(
    student: ScoringModel,
    teacher: ScoringModel,
    shards: list[Path],
    groups: dict[str, list[int]],
    *,
    tokens_per_batch: int = 4096,
    chunk: int | None = None,
) -> Geometry:
    """Runs both models over the rollouts and adds up gradients.

    Args:
        student: Whose logits the gradient is of.
        teacher: Shares its token ids.
        shards: Rollouts; their counts balance the types.
        groups: Group to token ids, as `choose_types` gives them.
        tokens_per_batch: Most tokens of a forward pass, padding included.
        chunk: Positions whose logits exist at once; None for about 512 MB of temporaries.

    Raises:
        KnockoutError: A rollout contains a token outside the models' shared ids.
    """
    width = min(student.vocab_size, teacher.vocab_size)
    chunk = chunk or chunk_positions(max(student.vocab_size, teacher.vocab_size))
    counts = torch.zeros(width, dtype=torch.int64)
    for path in shards:
        tokens = read_shard(path).tokens
        if len(tokens) and int(tokens.max()) >= width:
            raise KnockoutError(
                f"{path}: contains token {int(tokens.max())}, but the models share ids 0 to {width - 1}"
            )
        counts += torch.from_numpy(np.bincount(tokens, minlength=width))
    sums = GradientSums(counts, [v for group in GROUPS for v in groups.get(group, [])])
    budget = tokens_per_batch if student.split and teacher.split else 1
    for number, path in enumerate(shards, start=1):
        for emitted, sides in _passes(student, teacher, read_shard(path), budget):
            for start in range(0, len(emitted), chunk):
                part = slice(start, start + chunk)
                own, target = (head(states[part]) for states, head in sides)
                kl, gradient = kl_gradient(own.to(target.device), target)
                sums.add(emitted[part], kl.cpu(), gradient.cpu())
        log.info("geometry: %d of %d prompts, %d positions", number, len(shards), sums.n)
    try:
        return sums.finish()
    except ValueError as error:
        raise KnockoutError(f"{error}; run `knockout mine` again") from error


def _passes(
    student: ScoringModel, teacher: ScoringModel, shard: Shard, budget: int
) -> Iterator[tuple[torch.Tensor, list[Any]]]:
    """Emitted tokens of a batch of responses, and each model's states and head for them."""
    responses = [r for r in shard.responses() if len(r)]
    sequences = [np.concatenate([shard.prompt, r]) for r in responses]
    start = len(shard.prompt)
    for batch in length_batches([len(s) for s in sequences], budget):
        part = [sequences[i] for i in batch]
        sides = [
            (m.states(part, [start] * len(part)), m.head) if m.split else m.whole(part[0], start)
            for m in (student, teacher)
        ]
        yield torch.from_numpy(np.concatenate([responses[i] for i in batch])).long(), sides


def table(
    found: Geometry, groups: dict[str, list[int]], scores: pd.DataFrame, measured: TypeMeans
) -> pd.DataFrame:
    """One row a type: its group and geometry, and stagnation if a student before is known.

    All of it is measured on the prompts that the types were not chosen on. `delta_kl` is mean KL after minus before training, `remaining_kl` their quotient: near 1 for a
    type that training left where it was.
    """
    import pandas as pd

    group_of = {v: group for group, ids in groups.items() for v in ids}
    ids = found.type_ids.tolist()
    names = ["count", "mean_kl", "mean_norm", "norm", "coherence", "cos_global"]
    names += ["cos_global_rest", "cos_balanced", "cos_balanced_rest", "share_global"]
    frame = pd.DataFrame(
        {"group": [group_of[v] for v in ids], "token_id": ids}
        | {name: getattr(found, name).tolist() for name in names}
    )
    known = scores.set_index("token_id").reindex(ids)
    frame.insert(2, "token", known["token"].tolist())
    if measured.kl_before is not None:
        before, after = measured.kl_before[ids], measured.kl[ids]
        frame["mean_kl_before"] = before
        frame["delta_kl"] = after - before
        frame["remaining_kl"] = np.divide(
            after, before, out=np.full(len(after), np.nan), where=before > 0
        )
    return frame


def summary(rows: pd.DataFrame, found: Geometry, models: dict[str, str]) -> dict[str, Any]:
    """Medians by group and the two directions, for `geometry.json`."""
    numbers = rows.drop(columns=["token_id", "token"]).groupby("group", sort=False).median()
    return {
        "models": models,
        "n_positions": found.n_positions,
        "n_types": found.n_types,
        "norm_global": found.norm_global,
        "norm_balanced": found.norm_balanced,
        "cos_directions": found.cos_directions,
        "medians": json.loads(numbers.to_json(orient="index")),
    }


def write(out: Path, rows: pd.DataFrame, found: Geometry, models: dict[str, str]) -> None:
    """Writes geometry.csv, geometry.json and geometry.html."""
    from knockout.figures.write import write_figure
    from knockout.mining.plots import geometry_figure, rows_of

    text = json.dumps(summary(rows, found, models), indent=2, ensure_ascii=False)
    write_text(out / "geometry.json", text + "\n")
    spec = geometry_figure(GROUPS, "remaining_kl" in rows)
    write_figure(spec, rows_of(rows), out / "geometry.html")


def groups_of(
    run: MiningRun, n: int, seed: int, min_count: int, special: list[int]
) -> dict[str, list[int]]:
    """`choose_types` on the prompts of a mining run that are not measured."""
    width = run.width
    chosen_on = type_means(run.choosing, width)
    rocks = run.rocks
    if rocks is None:
        rocks = rank_rocks(run.choosing, width, run.summary, special)
    # As the authors: what was hard early in training; without that checkpoint, what is hard now.
    hard = chosen_on.kl if chosen_on.kl_before is None else chosen_on.kl_before
    return choose_types(
        chosen_on.count,
        np.nan_to_num(hard),
        [v for v in rocks if v < width],
        n,
        seed,
        min_count=min_count,
        excluded=[v for v in special if v < width],
    )
