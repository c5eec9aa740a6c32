"""Looks up what a sweep file names: model, candidates, problems, identity. No engine runs yet."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from knockout.benchmarks import Benchmark, Chat, chat_for, encode_prompt, load_benchmark
from knockout.config.sweep import DEFAULT_MAX_TOKENS, BenchmarkSettings, Sweep
from knockout.engines.open import choose_kind
from knockout.errors import UsageError
from knockout.method.sampling import Sampling
from knockout.sweep.identity import identity, model_fingerprint, tokenizer_fingerprint
from knockout.sweep.owed import Plan, PlannedBenchmark, PlannedProblem
from knockout.tokens.candidates import Resolved, Vocabulary, resolve
from knockout.tokens.thinking import opened_by
from knockout.tokens.vocabulary import open_vocabulary
from knockout.verdicts.rules import find_rule

__all__ = ["Prepared", "prepare"]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A sweep, with everything looked up that needs no engine.

    Attributes:
        sweep: The sweep.
        folder: The model's checkpoint.
        tokenizer: Its tokenizer.
        vocabulary: Its ids.
        chat: How prompts were made.
        benchmarks: Loaded, groups expanded.
        resolved: Candidates and warnings.
        plan: What is to be generated.
        identity: What the run is.
        warnings: What the user should know before it starts.
    """

    sweep: Sweep
    folder: Path
    tokenizer: Any
    vocabulary: Vocabulary
    chat: Chat
    benchmarks: tuple[Benchmark, ...]
    resolved: Resolved
    plan: Plan
    identity: dict[str, Any]
    warnings: tuple[str, ...]


def prepare(sweep: Sweep) -> Prepared:
    """Looks up model, candidates and benchmarks; the engine is not started.

    Raises:
        UsageError, KnockoutError: Something that the sweep names is missing or does not fit.
    """
    find_rule(sweep.verdict.rule)
    folder, tokenizer, vocabulary = open_vocabulary(
        sweep.model, revision=sweep.revision, trust_remote_code=sweep.trust_remote_code
    )
    resolved = resolve(sweep.candidates, vocabulary)
    chat = chat_for(sweep.chat, tokenizer, repr(sweep.model))
    longest = _max_model_len(sweep, folder)
    think_ids = _think_ids(sweep, tokenizer)
    benchmarks: list[Benchmark] = []
    planned: list[PlannedBenchmark] = []
    warnings = list(resolved.warnings)
    for entry in sweep.benchmarks:
        settings = sweep.settings(entry)
        for benchmark in load_benchmark(
            settings.name,
            data_dir=settings.data_dir,
            include_path=sweep.include_path,
            limit=settings.limit,
            metric=settings.metric,
            num_fewshot=settings.num_fewshot,
            chat=chat,
            tokenizer=tokenizer,
        ):
            if benchmark.name in {other.name for other in benchmarks}:
                raise UsageError(
                    f"benchmarks: {benchmark.name} is listed twice: by name and as part of a group"
                )
            benchmarks.append(benchmark)
            planned.append(_plan(benchmark, settings, chat, tokenizer, longest, think_ids))
            warnings += benchmark.warnings
            warnings += _short_of_room(planned[-1], settings, benchmark)
    plan = Plan(
        run_seed=sweep.run_seed,
        benchmarks=tuple(planned),
        candidates=resolved.candidates,
        strategy=sweep.strategy,
        audit=sweep.audit,
    )
    record = identity(
        sweep,
        model=model_fingerprint(folder),
        tokenizer=tokenizer_fingerprint(tokenizer),
        benchmarks=[(b.name, b.fingerprint) for b in benchmarks],
        candidates=resolved.candidates,
    )
    record["engine"]["kind"] = choose_kind(sweep.engine.kind)
    return Prepared(
        sweep, folder, tokenizer, vocabulary, chat, tuple(benchmarks), resolved, plan, record,
        tuple(warnings),
    )  # fmt: skip


def _think_ids(sweep: Sweep, tokenizer: Any) -> tuple[int, ...]:
    """The token ids that close the thinking, if candidates act only in a part of the text."""
    if sweep.candidates.where == "everywhere" or not sweep.chat.think_end:
        return ()
    ids = tokenizer.encode(sweep.chat.think_end, add_special_tokens=False)
    return tuple(int(i) for i in ids)


def _plan(
    benchmark: Benchmark, settings: BenchmarkSettings, chat: Chat, tokenizer: Any, longest: int,
    think_ids: tuple[int, ...],
) -> PlannedBenchmark:  # fmt: skip
    s = settings.sampling
    problems = []
    for problem in benchmark.problems:
        prompt = encode_prompt(tokenizer, problem, chat)
        wanted = s.max_tokens or problem.max_tokens or DEFAULT_MAX_TOKENS
        room = min(wanted, longest - len(prompt))
        problems.append(
            PlannedProblem(
                problem.doc_id, tuple(prompt), tuple(problem.stop), room, benchmark.think_end,
                opened_by(problem.prompt, benchmark.think_end), benchmark.thinks, think_ids,
            )
        )  # fmt: skip
    sampling = Sampling(s.temperature, s.top_p, s.top_k, s.min_p)
    return PlannedBenchmark(benchmark.name, settings.seeds, sampling, tuple(problems))


def _short_of_room(
    planned: PlannedBenchmark, settings: BenchmarkSettings, benchmark: Benchmark
) -> list[str]:
    """Warns about prompts that together with max_tokens are longer than the engine allows."""
    wanted = settings.sampling.max_tokens
    short = [
        p.max_tokens
        for p, problem in zip(planned.problems, benchmark.problems, strict=True)
        if p.max_tokens < (wanted or problem.max_tokens or DEFAULT_MAX_TOKENS)
    ]
    if not short:
        return []
    return [
        f"{planned.name}: {len(short)} of {len(planned.problems)} prompts leave fewer than "
        f"max_tokens tokens in engine.max_model_len (at least {max(min(short), 0)})"
    ]


def _max_model_len(sweep: Sweep, folder: Path) -> int:
    """Longest prompt plus trajectory, in tokens, as the sweep and the checkpoint allow."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder, trust_remote_code=sweep.trust_remote_code)
    own = getattr(config.get_text_config(), "max_position_embeddings", None)
    limits = [n for n in (sweep.engine.max_model_len, own) if n]
    if not limits:
        raise UsageError(
            f"the model {sweep.model!r} names no length limit; set engine.max_model_len"
        )
    if len(limits) == 2 and limits[0] > limits[1]:
        raise UsageError(
            f"engine.max_model_len is {limits[0]}, but {sweep.model!r} allows {limits[1]}"
        )
    return int(min(limits))
