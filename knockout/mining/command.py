"""The whole of `knockout mine`: from a configuration to the files of a list."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from knockout.config.mine import Mine
from knockout.errors import KnockoutError, UsageError
from knockout.method.sampling import Sampling
from knockout.mining.baselines import open_baselines
from knockout.mining.lists import ListSettings, make_lists
from knockout.mining.mine import MineSettings, Models, mine, open_models
from knockout.mining.registry import product_of, score_names
from knockout.mining.rollouts import Prompt, read_prompts
from knockout.mining.scores import ScoreSettings, score_types
from knockout.tokens.special import special_ids

if TYPE_CHECKING:
    import pandas as pd

    from knockout.engines.base import Engine

__all__ = ["run_mine"]


def run_mine(config: Mine) -> pd.DataFrame:
    """Makes, or completes, a mining run and its list.

    Args:
        config: What to mine.

    Returns:
        The list, as in `rocks.csv`.

    Raises:
        UsageError: A setting makes no sense here, or the folder contains another run.
        KnockoutError: A model or the engine fails, or no type qualifies.
    """
    source = (
        open_baselines(config.prompts.run, config.prompts.limit) if config.prompts.run else None
    )
    student = config.student or (source.model if source else "")
    scores, by = config.scoring.scores, config.list.by
    for name in scores:
        product_of(name)
    if by not in scores and all(part in score_names() for part in by.split("*")):
        scores = (*scores, by)
    rolled = config.rollouts
    settings = MineSettings(
        rolled.per_prompt,
        rolled.max_tokens,
        Sampling(
            temperature=rolled.sampling.temperature,
            top_p=rolled.sampling.top_p,
            top_k=rolled.sampling.top_k,
            min_p=rolled.sampling.min_p,
        ),
        rolled.seed,
        config.scoring.ratio_top_k,
        config.scoring.dtype,
    )
    models = open_models(config.teacher, student, config.student_before)
    prompts = source.prompts if source else _prompts(models.tokenizer, config)

    def open_engine(folder: Path) -> Engine:
        from knockout.engines.open import open_engine as start

        options = config.engine.model_dump()
        options["options"] = options["options"] or None
        return start(str(folder), **options)

    shards = mine(
        config.out,
        models,
        prompts,
        settings,
        open_engine,
        device=config.scoring.device,
        tokens_per_batch=config.scoring.batch_tokens,
        source=source,
    )
    try:
        found = score_types(
            shards,
            _largest_width(models),
            _show(models.tokenizer),
            ScoreSettings(config.scoring.quantile, config.scoring.window, scores),
        )
    except ValueError as error:
        raise KnockoutError(f"{config.out}: {error}; no rollout has a token") from None
    keys = config.list
    summary = {
        "models": models.names,
        "n_prompts": len(prompts),
        "rollouts": rolled.per_prompt,
        "run": str(config.prompts.run) if config.prompts.run else None,
        "merge": [list(group) for group in models.merge],
        "quantile": config.scoring.quantile,
        "window": config.scoring.window,
        "scores": list(scores),
    }
    return make_lists(
        config.out,
        found,
        ListSettings(
            keys.top, keys.by, keys.drop_most_frequent, keys.min_count, keys.seed, keys.keep_special
        ),
        sorted(special_ids(models.tokenizer)),
        summary,
    )


def _prompts(tokenizer: Any, config: Mine) -> list[Prompt]:
    """The prompts of all sources, as token ids."""
    from knockout.benchmarks import chat_for, encode_prompt, load_benchmark

    source = config.prompts
    chat = chat_for(config.chat, tokenizer, "the student")
    found: list[Prompt] = []
    for name in source.benchmarks:
        for one in load_benchmark(
            name, data_dir=source.data_dir, limit=source.limit, chat=chat, tokenizer=tokenizer
        ):
            found += [
                Prompt(one.name, p.doc_id, encode_prompt(tokenizer, p, chat), p.stop)
                for p in one.problems
            ]
    if source.file is not None:
        found += read_prompts(source.file, _encoder(tokenizer, chat), source.limit)
    return found


def _encoder(tokenizer: Any, chat: Any) -> Callable[[Any], Sequence[int]]:
    """Text or chat to token ids."""
    from knockout.benchmarks import chat_renderer

    def encode(value: Any) -> Sequence[int]:
        if isinstance(value, str) and not chat.template:
            return list(tokenizer.encode(value))
        messages = [{"role": "user", "content": value}] if isinstance(value, str) else list(value)
        if isinstance(value, str) and chat.system is not None:
            messages.insert(0, {"role": "system", "content": chat.system})
        if not getattr(tokenizer, "chat_template", None):
            raise UsageError("prompts contain messages, but the student has no chat template")
        text = chat_renderer(tokenizer, chat)(messages)
        return list(tokenizer.encode(text, add_special_tokens=False))

    return encode


def _show(tokenizer: Any) -> Callable[[int], str]:
    """The quoted text of a token id."""
    from knockout.tokens.candidates import Vocabulary

    return Vocabulary(tokenizer, len(tokenizer), ()).show


def _largest_width(models: Models) -> int:
    """The widest logits of the models; ids of scored tokens are below it."""
    from transformers import AutoConfig

    return max(
        int(AutoConfig.from_pretrained(folder).get_text_config().vocab_size)
        for folder in models.folders.values()
    )
