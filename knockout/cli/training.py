"""`knockout geometry`, for the command line to register."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from knockout.errors import UsageError

__all__ = ["geometry"]


def geometry(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A folder of `knockout mine`.")],
    teacher: Annotated[
        str | None, typer.Option(help="Teacher; default: the one that was mined with.")
    ] = None,
    student: Annotated[
        str | None, typer.Option(help="Student; default: the one that was mined with.")
    ] = None,
    candidates: Annotated[
        Path | None,
        typer.Option(
            help="The rocks, as a list of ids or a table; default: ranked on half of DIR."
        ),
    ] = None,
    column: Annotated[str | None, typer.Option(help="Column of the ids in that table.")] = None,
    top: Annotated[int, typer.Option(min=1, help="Types of each group.")] = 50,
    min_count: Annotated[int, typer.Option(min=1, help="Least occurrences of a type.")] = 5,
    seed: Annotated[int, typer.Option(min=0, help="Draws the random types.")] = 0,
    dtype: Annotated[
        str, typer.Option(help="Of the models: auto, float32, bfloat16, float16.")
    ] = "auto",
    device: Annotated[str | None, typer.Option(help="Of the models; default: a GPU.")] = None,
    batch_tokens: Annotated[
        int, typer.Option(min=1, help="Most tokens of a forward pass, padding included.")
    ] = 4096,
    out: Annotated[Path | None, typer.Option(help="Where to write; default: DIR.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the table as JSON.")] = False,
) -> None:
    """Where do token types pull the student's logits? Compares rocks with rare and random types.

    Goes over the rollouts of a mining run once more and adds up the gradient of the reverse KL
    with respect to the logits by token type. Types are chosen on every other prompt and measured on
    the rest. Writes geometry.csv, geometry.json and geometry.html:
    lengths, coherence, cosines with the global and the frequency-balanced direction, and, where
    the run knows the student before training, how much of each type's KL is left.
    """
    from knockout.geometry.halves import type_means
    from knockout.geometry.run import groups_of, measure, open_run, table, write
    from knockout.mining.load import check_device, load_scoring_model
    from knockout.mining.mine import open_models
    from knockout.mining.shards import read_shard
    from knockout.tokens.special import special_ids

    logging.getLogger("knockout.geometry").setLevel(logging.INFO)
    check_device(device)
    run = open_run(folder)
    models = open_models(teacher or run.models["teacher"], student or run.models["student"])
    if candidates is not None:
        from knockout.tokens.token_list import read_token_list

        run = replace(run, rocks=list(read_token_list(candidates, column=column)))
    special = sorted(special_ids(models.tokenizer))
    groups = groups_of(run, top, seed, min_count, special)
    if not groups["rock"]:
        raise UsageError(f"{folder}: no rock occurs {min_count} times; lower --min-count")
    check = read_shard(run.shards[0]).prompt.tolist()

    def load(role: str) -> Any:
        name = f"{role} {models.names[role]}"
        return load_scoring_model(models.folders[role], name, dtype, device, check)

    found = measure(
        load("student"),
        load("teacher"),
        run.measuring,
        groups,
        tokens_per_batch=batch_tokens,
    )
    rows = table(found, groups, run.scores, type_means(run.measuring, run.width))
    target = out or folder
    write(target, rows, found, models.names)
    if as_json:
        typer.echo(rows.to_json(orient="records", force_ascii=False))
        return
    medians = rows.drop(columns=["token_id", "token"]).groupby("group", sort=False).median()
    typer.echo(medians.T.to_string(float_format="{:.4g}".format))
    typer.echo(f"medians of {len(rows)} types; each in {target / 'geometry.csv'}")
