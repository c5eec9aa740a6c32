"""What a sweep file may say.

One frozen, typed model; unknown keys are errors. Every field is classed: it either changes what
is generated (it is part of the run's identity, so that a resume with another value is refused) or
only how the run is carried out. A test makes every new field choose.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from knockout.errors import shortened

__all__ = [
    "Adaptive",
    "BenchmarkEntry",
    "BenchmarkSettings",
    "CandidateSource",
    "ChatSettings",
    "EngineSettings",
    "FileColumn",
    "Grading",
    "SamplingOverride",
    "SamplingSettings",
    "Sweep",
    "VerdictRule",
    "identity_fields",
]

DEFAULT_MAX_TOKENS = 1024


def outputs(default: Any = ..., **constraints: Any) -> Any:
    """A field that changes what is generated."""
    return Field(default, json_schema_extra={"identity": True}, **constraints)


def handling(default: Any = ..., **constraints: Any) -> Any:
    """A field that changes only how the run is carried out, or what is computed from its ledger.

    Also a path whose content has its own fingerprint in the run's identity.
    """
    return Field(default, json_schema_extra={"identity": False}, **constraints)


def _no_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("expected a number, not true or false")
    return value


def _relative_to_file(value: Path, info: ValidationInfo) -> Path:
    base: Path = (info.context or {}).get("base", Path())
    try:
        return (base / value.expanduser()).resolve()
    except (OSError, RuntimeError) as error:  # no such user, a loop of links, a name too long
        raise ValueError(f"not a path here: {shortened(str(error))}") from None


def _no_half_characters(value: str) -> str:
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise ValueError("expected whole characters; this contains half of a surrogate pair")
    return value


Count = Annotated[int, Field(strict=True, ge=1, le=2**31 - 1)]
Whole = Annotated[int, Field(strict=True, ge=0, le=2**63 - 1)]
Number = Annotated[float, BeforeValidator(_no_bool)]
Share = Annotated[float, BeforeValidator(_no_bool), Field(ge=0, le=1)]
FilePath = Annotated[Path, AfterValidator(_relative_to_file)]
TokenId = Annotated[int, Field(strict=True, ge=-(2**31), le=2**31 - 1)]
Text = Annotated[str, Field(strict=True), AfterValidator(_no_half_characters)]


class _Model(BaseModel):
    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        validate_default=True,
    )


class EngineSettings(_Model):
    """The engine that generates, and how much it may hold at once."""

    kind: Text = outputs("auto")
    """`vllm`, `transformers`, or an installed package's; `auto` takes vLLM if it is installed, else
    transformers; `server` takes running ones; `ray` is `auto` in Ray's actors."""
    urls: tuple[Text, ...] | None = handling(None)
    """Running vLLM servers of the model, for `kind: server`: `[http://HOST:PORT, ...]`."""
    data_parallel: Count | None = handling(None)
    """Engines side by side, each with its own copy of the model, in Ray's actors; null for one, or
    with `kind: ray` for as many as there are GPUs for."""
    ray: Text | None = handling(None)
    """Address of a Ray cluster: `auto`, `HOST:PORT` or `ray://HOST:PORT`; null starts one here."""
    hang_limit_s: Annotated[Number, Field(gt=0)] | None = handling(None)
    """Seconds after which an engine in an actor that shows no sign of life is replaced; null: 900."""
    outage_limit_s: Annotated[Number, Field(ge=0)] | None = handling(None)
    """Seconds to wait for servers that do not answer, with growing pauses; then the run stops, and
    the same command goes on with it; null: 1800."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = outputs("auto")
    """Number format of weights and activations; `auto`: float32 on a CPU, else the checkpoint's."""
    max_model_len: Count | None = outputs(None)
    """Longest prompt plus trajectory, in tokens; null for what the model allows."""
    max_num_seqs: Count | None = handling(None)
    """Trajectories generated at once; null for the engine's own: 256 for vLLM on a GPU, else 64."""
    gpu_memory_utilization: Annotated[Number, Field(gt=0, le=1)] | None = handling(None)
    """Share of GPU memory that vLLM may take; null for the engine's choice."""
    tensor_parallel_size: Count | None = handling(None)
    """GPUs that share one copy of the model (vLLM); null for one."""
    block_size: Count | None = handling(None)
    """Tokens in a block of vLLM's prefix cache; null for the engine's choice."""
    kv_cache_gib: Annotated[Number, Field(gt=0)] | None = handling(None)
    """Memory for vLLM's cache on a CPU, in GiB; null for the engine's choice."""
    enforce_eager: bool | None = handling(None)
    """Without compilation and CUDA graphs; null: eager on a CPU, compiled on a GPU."""
    options: dict[str, Any] = outputs(default_factory=dict)
    """Further arguments of vLLM's engine, passed as they are."""


class SamplingSettings(_Model):
    """How tokens are sampled, in vLLM's order: temperature, min_p, top_k, top_p."""

    temperature: Annotated[Number, Field(ge=0)] = outputs(0.6)
    """0 is greedy; otherwise at least 0.01. The default is the published protocol's."""
    top_p: Annotated[Number, Field(gt=0, le=1)] = outputs(1.0)
    """Nucleus mass; 1 is off."""
    top_k: Whole = outputs(0)
    """Largest support, in tokens; 0 is off."""
    min_p: Annotated[Number, Field(ge=0, lt=1)] = outputs(0.0)
    """Least probability relative to the best token's; 0 is off."""
    max_tokens: Count | None = outputs(None)
    """Longest trajectory, in tokens; null for the task's own limit, or 1024 if it has none."""

    @field_validator("temperature")
    @classmethod
    def _not_nearly_greedy(cls, value: float) -> float:
        if 0 < value < 0.01:
            raise ValueError("expected 0 (greedy) or at least 0.01")
        return value


class SamplingOverride(_Model):
    """What one benchmark samples differently; keys left out are the sweep's."""

    temperature: Annotated[Number, Field(ge=0)] | None = outputs(None)
    """See `sampling.temperature`."""
    top_p: Annotated[Number, Field(gt=0, le=1)] | None = outputs(None)
    """See `sampling.top_p`."""
    top_k: Whole | None = outputs(None)
    """See `sampling.top_k`."""
    min_p: Annotated[Number, Field(ge=0, lt=1)] | None = outputs(None)
    """See `sampling.min_p`."""
    max_tokens: Count | None = outputs(None)
    """See `sampling.max_tokens`; null here means the task's own limit."""


class BenchmarkEntry(_Model):
    """A benchmark, and what it does differently from the sweep; keys left out are the sweep's."""

    name: Text = outputs(min_length=1)
    """A generate_until task or group of lm-eval, or one of ours."""
    limit: Count | None = outputs(None)
    """The first N problems only; null for all."""
    seeds: Count | None = outputs(None)
    """Repeats of each problem; with `adaptive`, its most rounds."""
    sampling: SamplingOverride | None = outputs(None)
    """Sampling settings that differ for this benchmark."""
    metric: Text | None = outputs(None)
    """Which 0/1 metric of the task is the grade; null for the sensible one."""
    data_dir: FilePath | None = handling(None)
    """Folder with the benchmark's records as JSONL."""
    num_fewshot: Whole | None = outputs(None)
    """Worked examples in the prompt; null for the task's own number."""


class FileColumn(_Model):
    """A list of token ids or strings in a file."""

    file: FilePath = handling()
    """CSV, TSV, Parquet, JSON, YAML or text: token ids, texts (JSON-quoted where white space
    matters), or a list of `knockout export`. The run says how it was read."""
    column: Text | None = handling(None)
    """The column of a table, or a key of objects in JSON; null: the only one, or the one that is
    called `token_id`, `rock_id`, `id` or `token_ids`."""


class CandidateSource(_Model):
    """Where the candidates come from; at least one of file, ids, strings, sets and replace is given."""

    file: FilePath | None = handling(None)
    """CSV, TSV, Parquet, JSON, YAML or text: token ids, texts (JSON-quoted where white space
    matters), or a list of `knockout export`. The run says how it was read."""
    column: Text | None = handling(None)
    """The column of a table, or a key of objects in JSON; null: the only one, or the one that is
    called `token_id`, `rock_id`, `id` or `token_ids`."""
    ids: tuple[TokenId, ...] | None = handling(None)
    """Token ids, each its own candidate."""
    strings: tuple[Text, ...] | None = handling(None)
    """Strings, each its own candidate; a string must be one token unless `family` is true."""
    sets: dict[Text, tuple[TokenId | Text, ...]] | None = handling(None)
    """Named candidates of several tokens that are banned together: ids or strings."""
    family: bool = handling(False)
    """A string bans all its single-token variants: with and without a leading space,
    lower case, capitalised, upper case."""
    controls: FileColumn | None = handling(None)
    """Tokens that are knocked out for comparison, in the same kinds of file."""
    replace: dict[TokenId | Text, TokenId | Text] | None = handling(None)
    """Further candidates that are not banned: when the first token is picked, the second is emitted,
    as in `{" wait": " so"}`."""
    where: Literal["everywhere", "thinking", "answer"] = handling("everywhere")
    """The part of a trajectory in which all of them act; `thinking` and `answer` need
    `chat.think_end`. The thinking ends with the token ids that `chat.think_end` is encoded to (or
    in a prompt that closes it); a response without them is thinking to its end."""
    steps: tuple[Whole, Count | None] | None = handling(None)
    """The steps at which all of them act, `[from, to]`: counted from 0, the second not included, null
    for the end; null for all."""
    dose: tuple[Number, ...] | None = handling(None)
    """Adds for each banned candidate a penalty of each of these sizes, in logits, for example
    `[0.5, 1, 2, 4]`; the ban is the last point of the curve. A negative one boosts."""
    pairs: Literal["all"] | tuple[TokenId | Text, ...] | None = handling(None)
    """Adds all pairs of the banned candidates, or of those named here by name, text or id."""
    allow_eos: bool = handling(False)
    """Whether a token that ends the text may be banned; such a knockout never stops by itself."""
    canary: bool = handling(True)
    """Adds an A/A row: a ban of an id that cannot occur, if the vocabulary has one."""

    @model_validator(mode="after")
    def _some_source(self) -> CandidateSource:
        kinds = ("ids", "strings", "sets", "replace")
        if self.file is None and not any(getattr(self, n) for n in kinds):
            empty = next((n for n in kinds if getattr(self, n) is not None), "")
            found = f"`{empty}` is empty" if empty else "nothing"
            raise ValueError(f"found {found}; expected a file, ids, strings, sets or replace")
        if self.column is not None and self.file is None:
            raise ValueError("found a column without a file; `column` names a column of `file`")
        return self

    @field_validator("dose")
    @classmethod
    def _some_dose(cls, value: tuple[float, ...] | None) -> tuple[float, ...] | None:
        if value is not None and (not value or 0 in value or len(set(value)) < len(value)):
            raise ValueError(
                "expected penalties other than 0, each once (the ban is added to them)"
            )
        return value

    @field_validator("steps")
    @classmethod
    def _a_range(cls, value: tuple[int, int | None] | None) -> tuple[int, int | None] | None:
        if value is not None and value[1] is not None and value[1] <= value[0]:
            raise ValueError("expected `[from, to]` with from below to")
        return value

    @field_validator("pairs")
    @classmethod
    def _two_or_more(cls, value: Any) -> Any:
        if isinstance(value, tuple) and len(value) < 2:
            raise ValueError("expected two candidates or more, or `all`")
        return value


class ChatSettings(_Model):
    """How prompts are made for chat and thinking models."""

    template: bool | None = outputs(None)
    """Whether the tokenizer's chat template wraps the prompt; null: yes if it has one."""
    system: Text | None = outputs(None)
    """System message; null for none."""
    args: dict[str, Any] = outputs(default_factory=dict)
    """Further arguments of the template, for example `enable_thinking: false`."""
    think_end: Text | None = outputs(None)
    """What closes the thinking part; only what follows it is graded. For example `</think>`."""


class VerdictRule(_Model):
    """How the ledger becomes verdicts; nothing is generated again when this changes."""

    rule: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")] = handling("fdr")
    """`fdr` corrects over all candidates (Benjamini-Hochberg), `nominal` does not; `holm` and `by`
    are stricter, and packages can add rules (docs/extending.md)."""
    alpha: Annotated[Number, Field(gt=0, lt=1)] = handling(0.05)
    """Error level."""
    target: Literal["population", "benchmark"] = handling("population")
    """`population`: problems are a sample. `benchmark`: these very problems, so that only the
    sampling noise counts (needs two seeds)."""
    margin: Annotated[Number, Field(gt=0, lt=1)] = handling(0.02)
    """Half-width, in Pass@1, of the range that counts as no effect."""


class Adaptive(_Model):
    """Racing: seeds come in rounds of one, and settled candidates drop out.

    A candidate is settled on a benchmark by `verdict`, which is then part of what the run is.
    """

    max_seeds: Count = outputs()
    """Most seeds of a problem, and so most rounds; takes the place of `seeds`. If a
    benchmark sets `seeds`, that number counts instead."""
    futility: Annotated[Number, Field(gt=0, lt=1)] | None = outputs(None)
    """Drops a candidate once the predicted chance that its effect is seen by `max_seeds` is below
    this, for example 0.05. Off (null), as such a neutral mostly stays `undetermined`, and a race
    should tell a token that does nothing from one that was measured too little."""
    max_tokens: Count | None = handling(None)
    """Generated tokens, audits included, after which no new round starts; null for no limit."""
    max_hours: Annotated[Number, Field(gt=0)] | None = handling(None)
    """Hours of running, over all sessions, after which no new round starts; null for no limit."""


class Grading(_Model):
    """Worker processes that grade beside generation."""

    workers: Count | None = handling(None)
    """Most processes; they start as answers queue up. By default a quarter of the cores, 1 to 8."""
    timeout_s: Annotated[Number, Field(gt=0)] = handling(10.0)
    """Seconds that grading one answer may take; then it counts as not graded, not as wrong."""
    memory_mb: Annotated[int, Field(strict=True, ge=256)] = handling(4096)
    """Address space that a worker may take, in MiB."""


class BenchmarkSettings(_Model):
    """What holds for one benchmark once its entry and the sweep are merged."""

    name: str = outputs()
    """The entry's name; a group stands for several benchmarks."""
    limit: int | None = outputs()
    """First N problems, or null for all."""
    seeds: int = outputs()
    """Repeats of each problem."""
    sampling: SamplingSettings = outputs()
    """Sampling with the overrides applied."""
    metric: str | None = outputs()
    """Which metric is the grade."""
    data_dir: Path | None = handling()
    """Folder with JSONL records."""
    num_fewshot: int | None = outputs()
    """Worked examples in the prompt."""


def _entry(value: Any) -> Any:
    return {"name": value} if isinstance(value, str) else value


class Sweep(_Model):
    """A whole sweep. Relative paths are relative to the sweep file."""

    model: Text = outputs(min_length=1)
    """The embedded model's name, a hub name, or a local folder."""
    revision: Text | None = outputs(None)
    """Branch, tag or commit of a hub model."""
    trust_remote_code: bool = outputs(False)
    """Whether code that comes with a hub model or data set may run on this machine. A local task's own
    `!function` runs in any case: see docs/security.md."""
    engine: EngineSettings = outputs(default_factory=EngineSettings)
    """The engine."""
    benchmarks: tuple[Annotated[BenchmarkEntry, BeforeValidator(_entry)], ...] = outputs(
        min_length=1
    )
    """Names of tasks, or mappings with a name and overrides."""
    data_dir: FilePath | None = handling(None)
    """Folder with the benchmarks' records as JSONL, instead of the hub."""
    include_path: FilePath | None = handling(None)
    """Folder with further lm-eval task files."""
    limit: Count | None = outputs(None)
    """First N problems of each benchmark; null for all."""
    seeds: Count = outputs(3)
    """Repeats of each problem; with `adaptive`, its `max_seeds` counts instead."""
    run_seed: Whole = outputs(0)
    """Another value draws other randomness for the whole run."""
    sampling: SamplingSettings = outputs(default_factory=SamplingSettings)
    """How tokens are sampled."""
    chat: ChatSettings = outputs(default_factory=ChatSettings)
    """How prompts are made."""
    candidates: CandidateSource = handling()
    """The tokens to knock out (the run's identity contains what they resolve to)."""
    strategy: Literal["fork", "naive"] = outputs("fork")
    """`fork` continues from the divergence step; `naive` generates every knockout from scratch."""
    audit: Share = handling(0.02)
    """Share of knockouts that are generated again from scratch and compared."""
    verdict: VerdictRule = handling(default_factory=VerdictRule)
    """How verdicts are reached."""
    adaptive: Adaptive | None = outputs(None)
    """Racing; null runs all seeds for all candidates."""
    grading: Grading = handling(default_factory=Grading)
    """How answers are graded."""
    tracker: Literal["wandb", "mlflow", "tensorboard"] | None = handling(None)
    """Where the run's progress is sent to as well; the package of that name must be installed."""

    @field_validator("model")
    @classmethod
    def _local_folder(cls, value: str, info: ValidationInfo) -> str:
        base = (info.context or {}).get("base", Path())
        try:
            path = Path(value).expanduser()
            if value.startswith((".", "/", "~")) or (base / path).is_dir():
                return str((base / path).resolve())
        except (OSError, RuntimeError) as error:
            raise ValueError(f"not a path here: {shortened(str(error))}") from None
        return value

    @model_validator(mode="after")
    def _end_of_thinking(self) -> Sweep:
        if self.candidates.where != "everywhere" and not self.chat.think_end:
            raise ValueError(
                f"found `candidates.where: {self.candidates.where}` without `chat.think_end`; say "
                'what closes the thinking, for example `chat: {think_end: "</think>"}`'
            )
        return self

    @model_validator(mode="after")
    def _distinct_benchmarks(self) -> Sweep:
        names = [entry.name for entry in self.benchmarks]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"found the benchmark {twice[0]!r} twice; expected each once")
        return self

    def settings(self, entry: BenchmarkEntry) -> BenchmarkSettings:
        """Merges a benchmark's overrides over the sweep; a key that is given counts, even null."""

        def merged(key: str) -> Any:
            given = key in entry.model_fields_set and (key != "seeds" or entry.seeds is not None)
            return getattr(entry if given else self, key)

        sampling = self.sampling
        if entry.sampling is not None:
            over = {
                key: value
                for key, value in entry.sampling.model_dump(exclude_unset=True).items()
                if value is not None or key == "max_tokens"
            }
            sampling = sampling.model_copy(update=over)
        seeds = merged("seeds")
        if self.adaptive is not None and entry.seeds is None:
            seeds = self.adaptive.max_seeds
        return BenchmarkSettings(
            name=entry.name,
            limit=merged("limit"),
            seeds=seeds,
            sampling=sampling,
            metric=entry.metric,
            data_dir=merged("data_dir"),
            num_fewshot=entry.num_fewshot,
        )


def identity_fields(model: BaseModel) -> dict[str, Any]:
    """Returns the values that change what is generated, nested as in the sweep file."""

    def wanted() -> Iterator[tuple[str, Any]]:
        for name, field in type(model).model_fields.items():
            extra = field.json_schema_extra
            if isinstance(extra, dict) and extra.get("identity"):
                value = getattr(model, name)
                if isinstance(value, BaseModel):
                    value = identity_fields(value)
                elif isinstance(value, tuple):
                    value = [identity_fields(v) if isinstance(v, BaseModel) else v for v in value]
                yield name, value

    return dict(wanted())
