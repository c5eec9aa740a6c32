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
from knockout.files import write_text
from knockout.method.sampling import Sampling, cell_seed
from knockout.mining.shards import Shard, write_shard

__all__ = ["Prompt", "SetAside", "missing", "read_prompts", "roll_out", "shard_path"]

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


class SetAside:
    """Prompts of a run that cannot be rolled out, by index, with the reason; kept in a file.

    Delete the file to try them again.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.reasons: dict[int, str] = {}
        if path.exists():
            try:
                there = json.loads(path.read_text(encoding="utf-8"))
                self.reasons = {int(index): str(reason) for index, reason in there.items()}
            except (OSError, ValueError, AttributeError) as error:
                raise KnockoutError(f"{path}: cannot be read ({error}); delete it") from None

    def add(self, index: int, reason: str) -> None:
        """Sets a prompt aside, and says so."""
        log.warning("set aside: %s", reason)
        self.reasons[index] = reason
        text = json.dumps({str(i): r for i, r in sorted(self.reasons.items())}, indent=2)
        write_text(self.path, text + "\n")


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

    Returns:
        The prompts. A line that is something else is set aside with a warning that names it.

    Raises:
        UsageError: The file cannot be read, or no line is a prompt.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: cannot be read: {error}") from None
    prompts: list[Prompt] = []
    first: UsageError | None = None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        if limit is not None and len(prompts) == limit:
            break
        try:
            row = _row(line, f"{path} line {number}")
            tokens = _tokens(row, f"{path} line {number}", encode)
        except UsageError as error:
            first = first or error
            log.warning("set aside: %s", error)
            continue
        prompts.append(Prompt(path.name, str(row.get("id", number)), tokens))
    if not prompts:
        raise first or UsageError(f"{path}: found no prompt; expected a JSON object a line")
    return prompts


def _row(line: str, where: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        reason = getattr(error, "msg", str(error))
        raise UsageError(f"{where}: not valid JSON: {reason}") from None


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
        try:
            tokens = tuple(int(i) for i in encode(value)) if good else ()
        except UsageError:
            raise
        except (
            Exception
        ) as error:  # a template of the model's meets messages with errors of any kind
            raise UsageError(
                f"{where}: {given[0]} cannot be turned into a prompt: {type(error).__name__}: "
                f"{error}"
            ) from None
    if not tokens:
        raise UsageError(f"{where}: {given[0]} gives no token ids")
    return tokens


def shard_path(folder: Path, index: int) -> Path:
    """Where the shard of prompt `index` lies in a folder of shards."""
    return folder / f"{index:06d}.npz"


def missing(folder: Path, n_prompts: int, aside: SetAside | None = None) -> list[int]:
    """Indices of the prompts without a shard in a folder, those set aside left out."""
    without = aside.reasons if aside else {}
    return [i for i in range(n_prompts) if i not in without and not shard_path(folder, i).exists()]


def roll_out(
    engine: Engine,
    prompts: Sequence[Prompt],
    folder: Path,
    *,
    rollouts: int,
    sampling: Sampling,
    max_tokens: int,
    run_seed: int,
    aside: SetAside,
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
        aside: Takes the prompts that the engine refuses (too long), and those of which every
            rollout fails.
    """
    owed = missing(folder, len(prompts), aside)
    collected: dict[int, dict[int, Completion]] = {index: {} for index in owed}
    for index in owed:
        prompt = prompts[index]
        for repeat in range(rollouts):
            request = Request(
                key=f"{index}/{repeat}",
                prompt=prompt.tokens,
                seed=cell_seed(run_seed, prompt.source, prompt.doc_id, repeat),
                sampling=sampling,
                max_tokens=max_tokens,
                stop=prompt.stop,
            )
            try:
                engine.add(request)
            except (UsageError, ValueError) as error:
                if repeat:  # its first rollout was fine
                    raise
                aside.add(index, f"{prompt.source}, {prompt.doc_id}: {error}")
                del collected[index]
                break
    done = len(prompts) - len(owed)
    while engine.n_open:
        for completion in engine.step():
            index, repeat = (int(x) for x in completion.key.split("/"))
            own = collected[index]
            own[repeat] = completion
            if len(own) == rollouts:
                try:
                    write_shard(shard_path(folder, index), _shard(prompts[index], own))
                except KnockoutError as error:
                    aside.add(index, str(error))
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
