"""Many cells in pieces, by two processes, each piece kept in a file so that a stop loses little.

Two ways of drawing. `independent` draws each token with torch.multinomial; where a baseline draws a
banned token, the knockout draws again without it and goes on with chance of its own (rejection
sampling, exact whatever the model). It shares neither noise nor code with the product. `coupled`
draws with the product's noise (`knockout.method.sampling.gumbel`) and a cell's seed, so its cells
are those of a sweep; `python -m bench truth check` compares them with the product's own engine.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import combinations
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bench.planted.decode import Cells, Draw, Planted, decode
from knockout.method.sampling import cell_seed, gumbel
from knockout.planted import MODEL_FOLDER
from knockout.planted.language import Language, load_language, problems

__all__ = ["BENCHMARK", "Job", "candidate_sets", "coupled", "independent", "run", "sample"]

BENCHMARK = "knockout_planted"
_PIECE = 600  # baselines in a piece


def candidate_sets(language: Language) -> dict[str, tuple[str, ...]]:
    """Name to words: single tokens, then pairs (with " + "), then lists."""
    roles = language.roles()
    singles = {word: (word,) for words in roles.values() for word in words}
    strong = [*roles["marker"][:2], *roles["interchangeable marker"], *roles["finisher"]]
    pairs = {f"{a} + {b}": (a, b) for a, b in combinations(strong, 2)}
    lists = {
        "all markers": (*roles["marker"], *roles["interchangeable marker"]),
        "all fillers": roles["filler"],
        "all accidents": (*roles["accident"], *roles["lost"], *roles["guess"]),
    }
    return {**singles, **pairs, **lists}


def independent(seed: int) -> Draw:
    """Draws with torch's own generator."""
    generator = torch.Generator().manual_seed(seed)

    def draw(logits: Tensor, cells: Tensor, redrawn: Tensor, position: int) -> Tensor:
        del cells, redrawn, position
        return torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]

    return draw


def coupled(seeds: Sequence[int]) -> Draw:
    """Draws with the product's noise, at temperature 1 without truncation."""
    of = torch.tensor(seeds, dtype=torch.int64)

    def draw(logits: Tensor, cells: Tensor, redrawn: Tensor, position: int) -> Tensor:
        del redrawn
        tokens = torch.arange(logits.shape[1])
        noise = gumbel(of[cells, None], torch.tensor(position), tokens)
        return (logits.double() + noise).argmax(dim=1)

    return draw


@dataclass(frozen=True, slots=True)
class Job:
    """What is sampled.

    Attributes:
        name: Of the folder of its pieces.
        folder: The planted checkpoint.
        seed: Of the problems.
        n: Problems.
        repeats: Cells of each.
        coupled: Which way of drawing.
        only: Ban this candidate in every trajectory from its first step, and nothing else.
        names: Candidates that are decoded; all where empty.
    """

    name: str
    folder: Path = MODEL_FOLDER
    seed: int = 0
    n: int = 1000
    repeats: int = 1
    coupled: bool = False
    only: str | None = None
    names: tuple[str, ...] = ()


def run(job: Job, work: Path, processes: int = 2) -> Cells:
    """Samples what is not there yet and returns all (problem by problem, repeat by repeat)."""
    step = max(1, _PIECE // job.repeats)
    parts = [(job, work, first, min(first + step, job.n)) for first in range(0, job.n, step)]
    owed = [part for part in parts if not _path(*part).is_file()]
    if owed:
        context = multiprocessing.get_context("spawn")
        with context.Pool(processes) as pool:
            for done, _ in enumerate(pool.imap_unordered(_piece, owed), start=1):
                print(f"{job.name}: {done} of {len(owed)} pieces", flush=True)
    loaded = [np.load(_path(*part)) for part in parts]
    return Cells(*(np.concatenate([x[f.name] for x in loaded], axis=-1) for f in fields(Cells)))


def _path(job: Job, work: Path, first: int, last: int) -> Path:
    return work / job.name / f"{first:06d}-{last:06d}.npz"


def _piece(part: tuple[Job, Path, int, int]) -> None:
    torch.set_num_threads(1)
    job, _, first, last = part
    cells = sample(job, first, last)
    path = _path(*part)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".part")
    with unfinished.open("wb") as file:
        np.savez_compressed(file, **{f.name: getattr(cells, f.name) for f in fields(Cells)})
    unfinished.replace(path)


def sample(job: Job, first: int, last: int) -> Cells:
    """The cells of problems first to last."""
    model, language = Planted(job.folder), load_language(job.folder / "language.json")
    records = list(problems(language, job.seed, last))[first:]
    cells = [(record, repeat) for record in records for repeat in range(job.repeats)]
    sets = candidate_sets(language)
    if job.names:
        sets = {name: sets[name] for name in job.names}
    names = list(sets)
    only = None if job.only is None else names.index(job.only)
    lengths = [len(record["question"].split()) for record, _ in cells]
    whole: dict[str, np.ndarray] = {}
    for length in sorted(set(lengths)):
        index = [i for i, n in enumerate(lengths) if n == length]
        chosen = [cells[i] for i in index]
        if job.coupled:
            seeds = [cell_seed(job.seed, BENCHMARK, r["id"], repeat) for r, repeat in chosen]
            draw = coupled(seeds)
        else:
            draw = independent(
                int(np.random.SeedSequence([job.seed, first, length]).generate_state(1)[0])
            )
        part = decode(
            model,
            [record["question"] for record, _ in chosen],
            [record["answer"] for record, _ in chosen],
            list(sets.values()),
            draw,
            from_scratch=only,
        )
        for f in fields(Cells):
            values = getattr(part, f.name)
            if f.name not in whole:
                whole[f.name] = np.zeros((*values.shape[:-1], len(cells)), values.dtype)
            whole[f.name][..., index] = values
    return Cells(**whole)
