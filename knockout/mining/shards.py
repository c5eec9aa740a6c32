"""One file per prompt: its rollouts and, when scored, the scores of their positions."""

from __future__ import annotations

import zipfile
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from knockout.errors import KnockoutError
from knockout.files import atomic_path

__all__ = ["Shard", "read_shard", "write_shard"]


@dataclass(frozen=True, slots=True)
class Shard:
    """The rollouts of one prompt, one after another.

    Attributes:
        doc_id: Name of the problem within its benchmark.
        prompt: (P,) int32 token ids.
        tokens: (N,) int32 token ids of all responses.
        lengths: (R,) int32, tokens of each response; they add up to N.
        scores: Name to (N,); empty before scoring. Names are the fields of `PositionScores`, those
            of the student before training with the prefix "before_".
    """

    doc_id: str
    prompt: NDArray[np.int32]
    tokens: NDArray[np.int32]
    lengths: NDArray[np.int32]
    scores: dict[str, NDArray[np.float32]] = field(default_factory=dict)

    @property
    def rollout(self) -> NDArray[np.int32]:
        """(N,) index of the rollout that each position belongs to."""
        return np.repeat(np.arange(len(self.lengths), dtype=np.int32), self.lengths)

    @property
    def step(self) -> NDArray[np.int64]:
        """(N,) index of each position within its response."""
        starts = np.cumsum(self.lengths) - self.lengths
        return np.arange(len(self.tokens)) - np.repeat(starts, self.lengths)

    def responses(self) -> list[NDArray[np.int32]]:
        """The R responses, each (T,)."""
        return np.split(self.tokens, np.cumsum(self.lengths)[:-1])


def write_shard(path: Path, shard: Shard) -> None:
    """Writes a shard whole or not at all."""
    with atomic_path(path) as partial, partial.open("wb") as file:
        np.savez(
            file,
            allow_pickle=False,
            doc_id=np.array(shard.doc_id),
            prompt=shard.prompt,
            tokens=shard.tokens,
            lengths=shard.lengths,
            **{f"score_{name}": values for name, values in shard.scores.items()},
        )


def read_shard(path: Path) -> Shard:
    """Reads a shard.

    Raises:
        KnockoutError: The file is not a whole shard.
    """
    try:
        with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        return Shard(
            str(arrays["doc_id"]),
            arrays["prompt"],
            arrays["tokens"],
            arrays["lengths"],
            {k.removeprefix("score_"): v for k, v in arrays.items() if k.startswith("score_")},
        )
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise KnockoutError(
            f"{path}: not a whole shard of rollouts ({error}); delete it and run again"
        ) from error
