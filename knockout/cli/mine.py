"""`knockout mine` and `knockout orthogonality`, for the command line to register."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from knockout.errors import KnockoutError, UsageError

if TYPE_CHECKING:
    import pandas as pd

    from knockout.mining.rollouts import Prompt

__all__ = ["mine", "orthogonality"]

_SHOWN = 20


def mine(
    teacher: Annotated[str, typer.Option(help="Teacher: a folder, a hub name, or smollm2-135m.")],
    student: Annotated[str, typer.Option(help="Student after training.")],
    out: Annotated[Path, typer.Option(help="Folder of this mining run; the same one resumes.")],
    student_before: Annotated[
        str | None, typer.Option(help="Student before training: adds persistence and ΔKL.")
    ] = None,
    benchmark: Annotated[
        list[str] | None, typer.Option(help="Benchmark that gives prompts; repeatable.")
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(help="JSONL with prompt, messages or prompt_ids a line, instead or besides."),
    ] = None,
    data_dir: Annotated[
        Path | None, typer.Option(help="Folder with the benchmarks' records as JSONL.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="First N prompts of each source.")
    ] = None,
    chat_template: Annotated[
        bool, typer.Option(help="Wrap prompts in the student's chat template, if it has one.")
    ] = True,
    chat_args: Annotated[
        str, typer.Option(help="Arguments of the template as JSON: '{\"enable_thinking\": false}'.")
    ] = "{}",
    rollouts: Annotated[int, typer.Option(min=1, help="Rollouts per prompt.")] = 1,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest rollout, in tokens.")] = 1024,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Nucleus of the rollouts; 1 is off.")] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="Support of the rollouts; 0 is off.")] = 0,
    run_seed: Annotated[int, typer.Option(min=0, help="Another value, other rollouts.")] = 0,
    engine: Annotated[str, typer.Option(help="auto, vllm or transformers.")] = "auto",
    max_model_len: Annotated[
        int | None, typer.Option(min=1, help="Longest prompt plus rollout of the engine.")
    ] = None,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Rollouts generated at once.")] = 64,
    dtype: Annotated[
        str, typer.Option(help="Of engine and scoring: auto, float32, bfloat16, float16.")
    ] = "auto",
    device: Annotated[
        str | None, typer.Option(help="Of the scoring; auto spreads models over several GPUs.")
    ] = None,
    batch_tokens: Annotated[
        int, typer.Option(min=1, help="Most tokens of a scoring pass, padding included.")
    ] = 4096,
    ratio_top_k: Annotated[
        int, typer.Option(min=2, help="Candidate set of the information-efficiency ratio.")
    ] = 20,
    quantile: Annotated[
        float, typer.Option(help="A loss above this quantile of all positions is high.")
    ] = 0.8,
    window: Annotated[int, typer.Option(min=1, help="Tokens of context on each side.")] = 8,
    top: Annotated[int, typer.Option(min=1, help="Length of the list.")] = 100,
    by: Annotated[str, typer.Option(help="Score to rank by.")] = "rock_score_ctx",
    drop_most_frequent: Annotated[
        int, typer.Option(min=0, help="Leave out the m most frequent types.")
    ] = 0,
    min_count: Annotated[
        int, typer.Option(min=1, help="Least persistent occurrences of a listed type.")
    ] = 5,
    list_seed: Annotated[int, typer.Option(min=0, help="Draws controls and resamples.")] = 0,
    keep_special: Annotated[bool, typer.Option(help="Let special tokens be listed.")] = False,
    embed_plotly: Annotated[
        bool, typer.Option(help="Plots that need no network (5 MB each).")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print the list as JSON.")] = False,
) -> None:
    """Makes a candidate list: rolls out the student, scores every token, ranks the types.

    Writes rocks.csv, controls.csv, token_scores.csv (each also as Parquet), cutoff.csv,
    cutoff.html and summary.json into --out. A killed run goes on with the same command; settings
    of the list (--top, --by, --quantile, ...) may change without generating or scoring anew.
    """
    from knockout.method.sampling import Sampling
    from knockout.mining.lists import ListSettings, make_lists
    from knockout.mining.mine import MineSettings, open_models
    from knockout.mining.mine import mine as run
    from knockout.mining.scores import ScoreSettings, score_types
    from knockout.tokens.special import special_ids

    logging.getLogger("knockout.mining").setLevel(logging.INFO)
    from knockout.mining.load import DTYPES

    if dtype not in DTYPES:
        raise UsageError(f"--dtype is {dtype!r}; expected {', '.join(DTYPES)}")
    try:
        sampling = Sampling(temperature=temperature, top_p=top_p, top_k=top_k)
        score_settings = ScoreSettings(quantile, window)
    except ValueError as error:
        raise UsageError(str(error)) from None
    settings = MineSettings(rollouts, max_tokens, sampling, run_seed, ratio_top_k, dtype)  # type: ignore[arg-type]
    listing = ListSettings(top, by, drop_most_frequent, min_count, list_seed, keep_special)
    models = open_models(teacher, student, student_before)
    template = chat_template and bool(getattr(models.tokenizer, "chat_template", None))
    arguments = _template_arguments(chat_args)
    found = _prompts(
        models.tokenizer, benchmark or [], prompts, data_dir, limit, template, arguments
    )

    def open_engine(folder: Path) -> Any:
        from knockout.engines.open import open_engine as start

        return start(
            str(folder),
            kind=engine,
            dtype=dtype,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
        )

    shards = run(
        out, models, found, settings, open_engine, device=device, tokens_per_batch=batch_tokens
    )
    width = _largest_width(models.folders.values())
    try:
        scores = score_types(shards, width, _show(models.tokenizer), score_settings)
    except ValueError as error:
        raise KnockoutError(f"{out}: {error}; no rollout has a token") from None
    summary = {"models": models.names, "n_prompts": len(found), "rollouts": rollouts}
    rocks = make_lists(
        out,
        scores,
        listing,
        sorted(special_ids(models.tokenizer)),
        summary | {"quantile": quantile, "window": window},
        embed_plotly=embed_plotly,
    )
    if as_json:
        typer.echo(rocks.to_json(orient="records", force_ascii=False))
        return
    columns = ["rank", "rock_id", "rock_token", "rock_freq", "rock_mean_kl", by]
    _print(rocks[list(dict.fromkeys(c for c in columns if c in rocks))].head(_SHOWN))
    typer.echo(
        f"{len(rocks)} types in {out / 'rocks.csv'}; their controls in {out / 'controls.csv'}"
    )


def orthogonality(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Directory of a run.")],
    scores: Annotated[
        Path, typer.Option(help="Token scores: token_scores.csv of `mine`, or a published list.")
    ],
    score: Annotated[
        list[str] | None, typer.Option(help="A column to look at; repeatable. Default: all known.")
    ] = None,
    rule: Annotated[str, typer.Option(help="Whose pillars: fdr or nominal.")] = "fdr",
    level: Annotated[float, typer.Option(help="Of the intervals.")] = 0.95,
    out: Annotated[
        Path | None, typer.Option(help="Folder for orthogonality.csv and .html; default: DIR.")
    ] = None,
    embed_plotly: Annotated[bool, typer.Option(help="A plot that needs no network (5 MB).")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print the table as JSON.")] = False,
) -> None:
    """Does any cheap score predict a pillar? Relates token scores to harm and to pillarhood.

    Rank correlations (Spearman, Kendall) with −Δ in units of its noise and the area under the ROC curve for pillars,
    each with an interval and a corrected p-value, by benchmark.
    """
    from knockout.files import write_text
    from knockout.mining.orthogonality import SCORES, join_scores, read_verdicts
    from knockout.mining.orthogonality import orthogonality as relate
    from knockout.mining.plots import orthogonality_figure, write_figure
    from knockout.tokens.token_list import read_score_table

    columns = {"fdr": "verdict", "nominal": "verdict_nominal"}
    if rule not in columns or not 0 < level < 1:
        raise UsageError(
            f"--rule is {rule!r} and --level {level}; expected fdr or nominal, and 0 < level < 1"
        )
    verdicts, table = read_verdicts(folder), read_score_table(scores)
    if columns[rule] not in verdicts:
        raise UsageError(f"{folder}: its verdicts have no column {columns[rule]}")
    names = score or [name for name in SCORES if name in table]
    if lacking := [name for name in names if name not in table]:
        raise UsageError(
            f"{scores}: no column {', '.join(lacking)}; it has {', '.join(map(str, table.columns))}"
        )
    joined = join_scores(verdicts, table, names)
    if joined[names].isna().all(axis=None):
        raise UsageError(f"{scores}: has no row for any candidate of {folder}")
    related = relate(joined, names, verdict=columns[rule], level=level)
    target = out or folder
    write_text(target / "orthogonality.csv", related.to_csv(index=False))
    write_figure(orthogonality_figure(related), target / "orthogonality.html", embed=embed_plotly)
    if as_json:
        typer.echo(related.to_json(orient="records"))
        return
    front = ["benchmark", "score", "n", "n_pillars", "spearman", "spearman_low", "spearman_high"]
    _print(related[[*front, "auc", "auc_low", "auc_high", "auc_p_adjusted"]])


def _prompts(
    tokenizer: Any,
    benchmarks: Sequence[str],
    path: Path | None,
    data_dir: Path | None,
    limit: int | None,
    template: bool,
    arguments: dict[str, Any],
) -> list[Prompt]:
    """The prompts of all sources, as token ids."""
    from knockout.mining.rollouts import Prompt, read_prompts

    if not benchmarks and path is None:
        raise UsageError("no prompts: give --benchmark or --prompts")
    found: list[Prompt] = []
    if benchmarks:
        from knockout.benchmarks import Chat, encode_prompt, load_benchmark

        chat = Chat(template=template, args=arguments)
        for name in benchmarks:
            for one in load_benchmark(
                name,
                data_dir=data_dir,
                limit=limit,
                chat=chat,
                tokenizer=tokenizer,
            ):
                found += [
                    Prompt(one.name, p.doc_id, encode_prompt(tokenizer, p, chat), p.stop)
                    for p in one.problems
                ]
    if path is not None:
        found += read_prompts(path, _encoder(tokenizer, template, arguments), limit)
    return found


def _template_arguments(text: str) -> dict[str, Any]:
    """The value of --chat-args."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise UsageError(f"--chat-args is {text!r}: not valid JSON: {error.msg}") from None
    if not isinstance(value, dict):
        raise UsageError(f"--chat-args is {text!r}; expected a JSON object")
    return value


def _encoder(
    tokenizer: Any, template: bool, arguments: dict[str, Any]
) -> Callable[[Any], Sequence[int]]:
    """Text or chat to token ids."""

    def encode(value: Any) -> Sequence[int]:
        if isinstance(value, str) and not template:
            return list(tokenizer.encode(value))
        messages = [{"role": "user", "content": value}] if isinstance(value, str) else value
        if not getattr(tokenizer, "chat_template", None):
            raise UsageError("prompts hold messages, but the student has no chat template")
        text = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, **arguments
        )
        return list(tokenizer.encode(text, add_special_tokens=False))

    return encode


def _show(tokenizer: Any) -> Callable[[int], str]:
    """The quoted text of a token id."""
    from knockout.tokens.candidates import Vocabulary

    return Vocabulary(tokenizer, len(tokenizer), ()).show


def _largest_width(folders: Any) -> int:
    """The widest logits of the models; ids of scored tokens are below it."""
    from transformers import AutoConfig

    return max(int(AutoConfig.from_pretrained(f).get_text_config().vocab_size) for f in folders)


def _print(table: pd.DataFrame) -> None:
    """Prints a table."""
    from rich.console import Console
    from rich.table import Table

    shown = Table()
    for column in table.columns:
        numeric = table[column].dtype.kind in "iuf"
        shown.add_column(str(column), justify="right" if numeric else "left", overflow="fold")
    for row in table.itertuples(index=False):
        shown.add_row(*[f"{x:.4g}" if isinstance(x, float) else str(x) for x in row])
    Console(markup=False).print(shown)
