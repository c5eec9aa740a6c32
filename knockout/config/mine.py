"""What a file of `knockout mine` may say.

As for sweeps: one frozen, typed model; unknown keys are errors; every field is classed by whether it
changes the rollouts and their scores (another value is another run) or only the list that is made of
them, or how the work is done.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from knockout.config.file import parse_as
from knockout.config.sweep import (
    ChatSettings,
    Count,
    EngineSettings,
    FilePath,
    Number,
    SamplingSettings,
    Text,
    Whole,
    _Model,
    handling,
    outputs,
)
from knockout.errors import UsageError

__all__ = [
    "ListKeys",
    "Mine",
    "PromptSource",
    "RolloutSettings",
    "ScoringSettings",
    "load_mine",
]


class PromptSource(_Model):
    """Where the prompts come from: benchmarks, a file, or both; or the baselines of a run."""

    benchmarks: tuple[Text, ...] = handling(())
    """Benchmarks whose problems are prompts."""
    file: FilePath | None = handling(None)
    """JSONL with one of `prompt` (text), `messages` (a chat) or `prompt_ids` a line."""
    run: FilePath | None = handling(None)
    """Directory of a run of the student: its baselines are the rollouts, and none is generated."""
    data_dir: FilePath | None = handling(None)
    """Folder with the benchmarks' records as JSONL."""
    limit: Count | None = handling(None)
    """The first N prompts of each source only; null for all."""

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if self.run is not None and (self.benchmarks or self.file is not None):
            raise ValueError("found run beside benchmarks or file; a run brings its own prompts")
        return self


class RolloutSettings(_Model):
    """How the student answers; of a run's baselines nothing here counts."""

    per_prompt: Count = outputs(1)
    """Rollouts of each prompt; more than one needs a temperature."""
    max_tokens: Count = outputs(1024)
    """Longest rollout, in tokens."""
    seed: Whole = outputs(0)
    """Another value draws other rollouts."""
    sampling: SamplingSettings = outputs(default_factory=lambda: SamplingSettings(temperature=0.0))
    """How tokens are sampled; greedy unless said otherwise (`max_tokens` stands above)."""

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        if self.sampling.max_tokens is not None:
            raise ValueError("found sampling.max_tokens; give rollouts.max_tokens")
        return self


class ScoringSettings(_Model):
    """The forward passes of teacher and student, and what makes a position's loss high."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = outputs("auto")
    """Number format; `auto`: float32 on a CPU, else bfloat16."""
    device: Text | None = handling(None)
    """`cpu`, `cuda`, `cuda:N`, or `auto` to spread models over several GPUs; null for a GPU where
    there is one."""
    batch_tokens: Count = handling(4096)
    """Most tokens of a forward pass, padding included."""
    ratio_top_k: Annotated[int, Field(strict=True, ge=2)] = outputs(20)
    """Candidate set of the information-efficiency ratio: the student's k best."""
    quantile: Annotated[Number, Field(ge=0, lt=1)] = handling(0.8)
    """A loss above this quantile of all positions is high."""
    window: Count = handling(8)
    """Tokens of context on each side."""
    scores: tuple[Text, ...] = handling(())
    """Token scores that get a column each, such as `soft_or` or one of your own."""


class ListKeys(_Model):
    """What turns scores into a list; changing it generates and scores nothing anew."""

    top: Count = handling(100)
    """Length of the list."""
    by: Text = handling("rock_score_ctx")
    """Score to rank by: a column of the type scores, or a token score of the registry."""
    drop_most_frequent: Whole = handling(0)
    """Leave out this many of the most frequent types. 0, since the published list contains them too
    and the context consistency already weighs them down."""
    min_count: Count = handling(5)
    """Least occurrences of a listed type: persistent ones if the score is about those."""
    seed: Whole = handling(0)
    """Draws controls and resamples."""
    keep_special: Annotated[bool, Field(strict=True)] = handling(False)
    """Let special tokens be listed."""


class Mine(_Model):
    """A mining run. `teacher` and `out` are required, and a student unless `prompts.run` names it."""

    teacher: Text = outputs()
    """A folder, a hub name, or `smollm2-135m`."""
    student: Text | None = outputs(None)
    """Student after training; null for the model of `prompts.run`."""
    student_before: Text | None = outputs(None)
    """Student before training: adds persistence and ΔKL."""
    out: FilePath = handling()
    """Folder of this mining run; the same one resumes."""
    prompts: PromptSource = outputs(default_factory=PromptSource)
    """Where the prompts come from."""
    chat: ChatSettings = outputs(default_factory=ChatSettings)
    """How prompts are made; `think_end` is not used."""
    rollouts: RolloutSettings = outputs(default_factory=RolloutSettings)
    """How the student answers."""
    engine: EngineSettings = handling(default_factory=EngineSettings)
    """What generates the rollouts."""
    scoring: ScoringSettings = outputs(default_factory=ScoringSettings)
    """The forward passes of teacher and student."""
    list: ListKeys = handling(default_factory=ListKeys)
    """What turns scores into a list."""

    @model_validator(mode="after")
    def _has_prompts(self) -> Self:
        source = self.prompts
        if source.run is None and not source.benchmarks and source.file is None:
            raise ValueError("no prompts: give prompts.benchmarks, prompts.file or prompts.run")
        if self.student is None and source.run is None:
            raise ValueError("no student: give one, or prompts.run, whose model it then is")
        return self


def load_mine(path: Path | None, sets: Sequence[str] = ()) -> Mine:
    """Reads a file of `knockout mine`.

    Args:
        path: The YAML file; relative paths in it are relative to its folder. None if the values
            say everything; paths are then relative to the working folder.
        sets: `key.path=value` each, put over what the file says.

    Raises:
        UsageError: With file, line, key, what was found and what was expected.
    """
    if path is None:
        if not sets:
            raise UsageError("nothing to mine: give a file (docs/mine-file.md), or key=value")
        return parse_as(Mine, "{}", "knockout mine", Path(), sets)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: cannot be read: {error}") from None
    return parse_as(Mine, text, str(path), path.parent, sets)
