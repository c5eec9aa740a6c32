"""`knockout mine`: rollouts, forward passes, type scores, lists. Every stage resumes by prompt."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from knockout.engines.base import Engine
from knockout.errors import KnockoutError, UsageError
from knockout.method.sampling import Sampling
from knockout.mining.baselines import Baselines, require_same_model, write_baselines
from knockout.mining.identity import keep_identity, require_same_tokenizer
from knockout.mining.load import check_device, load_scoring_model
from knockout.mining.rollouts import Prompt, SetAside, missing, roll_out, shard_path
from knockout.mining.shards import Shard, read_shard, write_shard
from knockout.sweep.identity import model_fingerprint

__all__ = ["MineSettings", "Models", "mine", "open_models", "score_prompts"]

log = logging.getLogger(__name__)

# Prompts whose rollouts are sorted by length together; a killed run repeats at most these.
_WINDOW = 16


@dataclass(frozen=True, slots=True)
class MineSettings:
    """What changes the rollouts and their scores; the ranking's settings are `ListSettings`.

    Attributes:
        rollouts: Rollouts per prompt.
        max_tokens: Longest rollout.
        sampling: How the student samples; greedy by default.
        run_seed: Another value draws other rollouts.
        ratio_top_k: Candidate set of the information-efficiency ratio: the student's k best.
        dtype: Of the scoring passes; "auto" is float32 on a CPU, else bfloat16.
    """

    rollouts: int = 1
    max_tokens: int = 1024
    sampling: Sampling = field(default_factory=lambda: Sampling(temperature=0.0))
    run_seed: int = 0
    ratio_top_k: int = 20
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"

    def __post_init__(self) -> None:
        for name in ("rollouts", "max_tokens"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}; expected 1 or more")
        if self.rollouts > 1 and self.sampling.temperature == 0:
            raise UsageError(
                f"rollouts is {self.rollouts} and the temperature 0: greedy rollouts of a prompt "
                "are all the same; take one, or a temperature"
            )
        if self.ratio_top_k < 2:
            raise UsageError(f"ratio_top_k is {self.ratio_top_k}; expected 2 or more")


@dataclass(frozen=True, slots=True)
class Models:
    """Checkpoint folders and the tokenizer that they share.

    Attributes:
        names: "student", "teacher" and perhaps "before" to the name that the user gave.
        folders: The same keys to checkpoint folders.
        tokenizer: The student's.
        merge: Groups of ids that count as one action in every score: the ends of text, if the
            models have different ones.
    """

    names: dict[str, str]
    folders: dict[str, Path]
    tokenizer: Any
    merge: tuple[tuple[int, ...], ...] = ()


def open_models(teacher: str, student: str, before: str | None = None) -> Models:
    """Finds the checkpoints and checks that they share a tokenizer.

    A base student may end its texts with another token than its chat teacher; the ends of both are
    then merged into one action.

    Raises:
        UsageError: A model is not found, or the tokenizers differ.
    """
    from knockout.tokens.checkpoint import load_tokenizer, resolve_model
    from knockout.tokens.eos import stop_ids

    names = {"student": student, "teacher": teacher} | ({"before": before} if before else {})
    folders = {role: Path(resolve_model(name)) for role, name in names.items()}
    tokenizers = {role: load_tokenizer(folder) for role, folder in folders.items()}
    require_same_tokenizer(
        (f"{role if role != 'before' else 'student before'} {name}", tokenizers[role])
        for role, name in names.items()
    )
    merge: tuple[tuple[int, ...], ...] = ()
    if len({tokenizer.eos_token_id for tokenizer in tokenizers.values()}) > 1:
        ends = {
            end for role, folder in folders.items() for end in stop_ids(tokenizers[role], folder)
        }
        merge = (tuple(sorted(ends)),)
        log.info("the models end their texts differently; ids %s count as one end", merge[0])
    return Models(names, folders, tokenizers["student"], merge)


def mine(
    out: Path,
    models: Models,
    prompts: Sequence[Prompt],
    settings: MineSettings,
    open_engine: Callable[[Path], Engine],
    *,
    device: str | None = None,
    tokens_per_batch: int = 4096,
    source: Baselines | None = None,
) -> Callable[[], Iterator[Shard]]:
    """Makes, or completes, the scored shards of a run.

    Args:
        out: The run's folder.
        models: Teacher, student and perhaps the student before training.
        prompts: What to roll out.
        settings: What changes rollouts and scores.
        open_engine: Starts an engine for a checkpoint folder; called only when rollouts are owed.
        device: Of the scoring passes; None for a GPU if there is one; "auto" spreads a model
            over several.
        tokens_per_batch: Most tokens of a forward pass, padding included.
        source: A run whose baselines are the rollouts; `prompts` are then its own.

    Returns:
        A function that gives the scored shards one by one, from the start at each call.

    Raises:
        UsageError: The folder contains another run, or there is no such device.
        KnockoutError: A model fails, or no prompt can be rolled out.
    """
    check_device(device)  # before anything is generated
    out.mkdir(parents=True, exist_ok=True)
    what = _identity(models, prompts, settings)
    keep_identity(out / "identity.json", what | ({"run": source.identity} if source else {}))
    rolled, scored = out / "rollouts", out / "scores"
    aside = SetAside(out / "set_aside.json")
    if source is not None:
        require_same_model(source, models.folders["student"], models.names["student"])
        write_baselines(source, rolled, aside)
    elif owed := missing(rolled, len(prompts), aside):
        log.info("rollouts: %d prompts × %d to generate", len(owed), settings.rollouts)
        engine = open_engine(models.folders["student"])
        try:
            roll_out(
                engine,
                prompts,
                rolled,
                rollouts=settings.rollouts,
                sampling=settings.sampling,
                max_tokens=settings.max_tokens,
                run_seed=settings.run_seed,
                aside=aside,
            )
        finally:
            engine.close()
    if len(aside.reasons) == len(prompts):
        raise KnockoutError(
            f"{out}: every prompt was set aside: {next(iter(aside.reasons.values()))}"
        )
    if owed := missing(scored, len(prompts), aside):
        score_prompts(
            models,
            rolled,
            scored,
            owed,
            settings,
            device=device,
            tokens_per_batch=tokens_per_batch,
        )
    there = [i for i in range(len(prompts)) if i not in aside.reasons]
    return lambda: (read_shard(shard_path(scored, i)) for i in there)


def score_prompts(
    models: Models,
    rolled: Path,
    scored: Path,
    owed: Sequence[int],
    settings: MineSettings,
    *,
    device: str | None = None,
    tokens_per_batch: int = 4096,
) -> None:
    """Scores the shards in `rolled` that are owed, and writes them to `scored`.

    Raises:
        KnockoutError: A model cannot be loaded, or a token is outside the shared ids.
    """
    from knockout.mining.forward import score_sequences

    check = read_shard(shard_path(rolled, owed[0])).prompt.tolist()
    loaded = {
        role: load_scoring_model(
            folder, f"{role} {models.names[role]}", settings.dtype, device, check
        )
        for role, folder in models.folders.items()
    }
    students = [loaded[role] for role in ("student", "before") if role in loaded]
    positions, started = 0, time.monotonic()
    for start in range(0, len(owed), _WINDOW):
        window = owed[start : start + _WINDOW]
        shards = [read_shard(shard_path(rolled, index)) for index in window]
        responses = [shard.responses() for shard in shards]
        flat = [response for own in responses for response in own]
        prompts = [s.prompt for s, own in zip(shards, responses, strict=True) for _ in own]
        found = score_sequences(
            students,
            loaded["teacher"],
            prompts,
            flat,
            top_k=settings.ratio_top_k,
            tokens_per_batch=tokens_per_batch,
            merge=models.merge,
        )
        done = 0
        for index, shard, own in zip(window, shards, responses, strict=True):
            scores: dict[str, np.ndarray[Any, np.dtype[np.float32]]] = {}
            for prefix, side in zip(("", "before_"), found, strict=False):
                part = side[done : done + len(own)]
                for name in part[0]._fields:
                    values = [getattr(one, name).numpy() for one in part]
                    scores[prefix + name] = np.concatenate(values).astype(np.float32)
            done += len(own)
            if not np.isfinite(scores["reverse_kl"]).all():
                raise KnockoutError(
                    f"{shard.doc_id}: a reverse KL is not finite; the teacher gives no "
                    "probability to a token that the student can draw, or a model overflows in "
                    f"{settings.dtype}: try --dtype float32"
                )
            full = Shard(shard.doc_id, shard.prompt, shard.tokens, shard.lengths, scores)
            write_shard(shard_path(scored, index), full)
            positions += len(shard.tokens)
        rate = positions / max(time.monotonic() - started, 1e-9)
        log.info(
            "scores: %d of %d owed prompts, %d positions, %.0f a second",
            min(start + _WINDOW, len(owed)),
            len(owed),
            positions,
            rate,
        )


def _identity(models: Models, prompts: Sequence[Prompt], settings: MineSettings) -> dict[str, Any]:
    """What the folder's rollouts and scores depend on."""
    text = json.dumps([(p.source, p.doc_id, p.tokens, p.stop) for p in prompts])
    return {
        "models": {r: model_fingerprint(folder) for r, folder in models.folders.items()},
        "n_prompts": len(prompts),
        "prompts": hashlib.blake2b(text.encode(), digest_size=16).hexdigest(),
        **asdict(settings),
        "merge": [list(group) for group in models.merge],
    }
