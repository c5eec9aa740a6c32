"""`knockout mine` and `knockout orthogonality`, for the command line to register."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from knockout.errors import UsageError, counted

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["mine", "orthogonality"]

_SHOWN = 20


def mine(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MINE.yaml] [KEY=VALUE]...",
            help="A file (docs/mine-file.md), and values put over it: list.top=50.",
        ),
    ] = None,
    from_run: Annotated[
        Path | None,
        typer.Option(
            "--from", metavar="RUN", help="A run whose baselines are the rollouts: prompts.run."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the list as JSON.")] = False,
) -> None:
    """Makes a candidate list: rolls out the student, scores every token, ranks the types.

    Writes rocks.csv, controls.csv, token_scores.csv (each also as Parquet), cutoff.csv,
    cutoff.html and summary.json into `out`. A killed run goes on with the same command; `list` and
    what makes a loss high may change without generating or scoring anew. With --from the baselines of
    a run are scored, so that no rollout is paid twice.
    """
    from knockout.config.mine import load_mine
    from knockout.mining.command import run_mine

    logging.getLogger("knockout.mining").setLevel(logging.INFO)
    given = list(arguments or ())
    path = Path(given.pop(0)) if given and "=" not in given[0] else None
    if more := [item for item in given if "=" not in item]:
        raise UsageError(f"{more[0]!r}: expected one file, then key=value")
    if from_run is not None:
        given.append(f"prompts.run={json.dumps(str(from_run.resolve()))}")
    config = load_mine(path, given)
    rocks = run_mine(config)
    if as_json:
        typer.echo(rocks.to_json(orient="records", force_ascii=False))
        return
    columns = ["rank", "rock_id", "rock_token", "rock_freq", "rock_mean_kl", config.list.by]
    _print(rocks[list(dict.fromkeys(c for c in columns if c in rocks))].head(_SHOWN))
    typer.echo(
        f"{counted(len(rocks), 'type')} in {config.out / 'rocks.csv'}; their controls in "
        f"{config.out / 'controls.csv'}"
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
    as_json: Annotated[bool, typer.Option("--json", help="Print the table as JSON.")] = False,
) -> None:
    """Does any cheap score predict a pillar? Relates token scores to harm and to pillarhood.

    Rank correlations (Spearman, Kendall) with −Δ in units of its noise and the area under the ROC curve for pillars,
    each with an interval and a corrected p-value, by benchmark.
    """
    from knockout.figures.write import write_figure
    from knockout.mining.orthogonality import SCORES, join_scores, read_verdicts
    from knockout.mining.orthogonality import orthogonality as relate
    from knockout.mining.plots import orthogonality_figure, rows_of
    from knockout.mining.shared_noise import read_moves
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
    moves = read_moves(folder)
    if not moves:
        typer.echo(
            f"{folder}: no run.db, so what its candidates share of their noise is unknown; the "
            "intervals are those of independent candidates, too short",
            err=True,
        )
    related = relate(joined, names, moves=moves, verdict=columns[rule], level=level)
    target = out or folder
    figure = orthogonality_figure(list(dict.fromkeys(related["benchmark"])))
    write_figure(figure, rows_of(related), target / "orthogonality.html")
    if as_json:
        typer.echo(related.to_json(orient="records"))
        return
    front = ["benchmark", "score", "n", "n_pillars", "spearman", "spearman_low", "spearman_high"]
    _print(related[[*front, "auc", "auc_low", "auc_high", "auc_p_adjusted"]])


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
