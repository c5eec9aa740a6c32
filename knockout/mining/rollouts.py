"""Prompts, and the student's rollouts of them, kept one file per prompt."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from knockout.engines.base import Completion, Engine, Request
from knockout.errors import KnockoutError, UsageError
from knockout.method.sampling import Sampling, cell_seed
from knockout.mining.shards import Shard, write_shard

__all__ = ["Prompt", "missing", "read_prompts", "roll_out", "shard_path"]

log = logging.getLogger(__name__)

_TOLD_EVERY = 16


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt to roll out.

    Attributes:
        source: Benchmark or file that it comes from.
        doc_id: Its name there.
        tokens: Token ids, at least one.
        stop: Strings that end a rollout.
    """

    source: str
    doc_id: str
    tokens: tuple[int, ...]
    stop: tuple[str, ...] = ()


def read_prompts(
    path: Path,
    encode: Callable[[str | list[dict[str, str]]], Sequence[int]],
    limit: int | None = None,
) -> list[Prompt]:
    """Reads prompts from a JSONL file.

    Each line is an object with one of `prompt_ids` (token ids, used as they are), `messages` (a
    chat) or `prompt` (text); an `id` is optional.

    Args:
        path: The file.
        encode: Turns a text or a chat into token ids.
        limit: Read the first ones only.

    Raises:
        UsageError: The file cannot be read, or a line is something else; names the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: cannot be read: {error}") from None
    prompts: list[Prompt] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        if limit is not None and len(prompts) == limit:
            break
        where = f"{path} line {number}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise UsageError(f"{where}: not valid JSON: {error.msg}") from None
        tokens = _tokens(row, where, encode)
        prompts.append(Prompt(path.name, str(row.get("id", number)), tokens))
    if not prompts:
        raise UsageError(f"{path}: found no prompt; expected a JSON object a line")
    return prompts


def _tokens(row: Any, where: str, encode: Callable[..., Sequence[int]]) -> tuple[int, ...]:
    keys = ("prompt_ids", "messages", "prompt")
    given = [k for k in keys if k in row] if isinstance(row, dict) else []
    if len(given) != 1:
        found = ", ".join(given) or "none of them"
        raise UsageError(f"{where}: found {found}; expected one of {', '.join(keys)}")
    value = row[given[0]]
    if given[0] == "prompt_ids":
        good = isinstance(value, list) and all(type(i) is int and i >= 0 for i in value)
        tokens = tuple(value) if good else ()
    else:
        good = isinstance(value, str if given[0] == "prompt" else list) and bool(value)
        tokens = tuple(int(i) for i in encode(value)) if good else ()
    if not tokens:
        raise UsageError(f"{where}: {given[0]} gives no token ids")
    return tokens


def shard_path(folder: Path, index: int) -> Path:
    """Where the shard of prompt `index` lies in a folder of shards."""
    return folder / f"{index:06d}.npz"


def missing(folder: Path, n_prompts: int) -> list[int]:
    """Indices of the prompts without a shard in a folder."""
    return [i for i in range(n_prompts) if not shard_path(folder, i).exists()]


def roll_out(
    engine: Engine,
    prompts: Sequence[Prompt],
    folder: Path,
    *,
    rollouts: int,
    sampling: Sampling,
    max_tokens: int,
    run_seed: int,
) -> None:
    """Generates what the folder lacks; a prompt's file is written when its last rollout is done.

    Args:
        engine: Runs the student.
        prompts: All prompts of the run, in its order.
        folder: Where the shards lie.
        rollouts: Rollouts per prompt; the seeds are those of a sweep's baseline.
        sampling: How tokens are sampled.
        max_tokens: Longest rollout.
        run_seed: Another value draws other rollouts.

    Raises:
        KnockoutError: No rollout of a prompt came to an end without an error.
    """
    owed = missing(folder, len(prompts))
    collected: dict[int, dict[int, Completion]] = {index: {} for index in owed}
    for index in owed:
        prompt = prompts[index]
        for repeat in range(rollouts):
            seed = cell_seed(run_seed, prompt.source, prompt.doc_id, repeat)
            engine.add(
                Request(
                    key=f"{index}/{repeat}",
                    prompt=prompt.tokens,
                    seed=seed,
                    sampling=sampling,
                    max_tokens=max_tokens,
                    stop=prompt.stop,
                )
            )
    done = len(prompts) - len(owed)
    while engine.n_open:
        for completion in engine.step():
            index, repeat = (int(x) for x in completion.key.split("/"))
            own = collected[index]
            own[repeat] = completion
            if len(own) == rollouts:
                write_shard(shard_path(folder, index), _shard(prompts[index], own))
                del collected[index]
                done += 1
                if done % _TOLD_EVERY == 0 or done == len(prompts):
                    log.info("rollouts: %d of %d prompts", done, len(prompts))


def _shard(prompt: Prompt, completions: dict[int, Completion]) -> Shard:
    """The rollouts of a prompt in the order of their repeats, without those that failed."""
    ordered = [completions[repeat] for repeat in sorted(completions)]
    good = [c.tokens for c in ordered if c.finish != "error" and len(c.tokens)]
    if len(good) < len(ordered):
        reason = next((c.error for c in ordered if c.error), "no token came out")
        where = f"{prompt.source}, {prompt.doc_id}"
        if not good:
            raise KnockoutError(f"{where}: every rollout failed: {reason}")
        log.warning("%s: %d rollouts failed: %s", where, len(ordered) - len(good), reason)
    return Shard(
        doc_id=f"{prompt.source}/{prompt.doc_id}",
        prompt=np.array(prompt.tokens, dtype=np.int32),
        tokens=np.concatenate(good).astype(np.int32),
        lengths=np.array([len(t) for t in good], dtype=np.int32),
    )
