"""Lists of tokens for training, from a verdict table."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from knockout.errors import UsageError
from knockout.files import atomic_path
from knockout.verdicts import POOLED

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Format", "Verdict", "render", "selected", "write"]

Format = Literal["ids", "json", "csv", "parquet"]
Verdict = Literal["strong_pillar", "strong_stumbling_block", "neutral"]


def selected(
    table: pd.DataFrame,
    *,
    verdicts: Collection[str] = (),
    benchmark: str | None = None,
    groups: dict[str, str] | None = None,
    group: str = "candidate",
    special_ids: Collection[int] = (),
    with_special: bool = False,
) -> list[dict[str, Any]]:
    """Chooses candidates.

    Args:
        table: A verdict table with one row for each benchmark and candidate.
        verdicts: Wanted ones; empty for all.
        benchmark: Judges by this benchmark alone, which may be "pooled". Otherwise a candidate is a pillar (or stumbling
            block) where it is one on any benchmark, "mixed" where it is both, and neutral only
            where it is neutral on all.
        groups: Group of each candidate by name.
        group: Which group to take.
        special_ids: Ids of special tokens.
        with_special: Whether candidates that hold a special token are taken.

    Returns:
        One mapping a candidate: candidate, token_ids, tokens, verdict, benchmarks (its verdict,
        delta and p_adjusted on each).

    Raises:
        UsageError: No such benchmark.
    """
    names = list(dict.fromkeys(table["benchmark"]))
    if benchmark is not None and benchmark not in names:
        raise UsageError(f"no benchmark {benchmark!r} in this run; it has {', '.join(names)}")
    judged = table if benchmark is not None else table[table["benchmark"] != POOLED]
    chosen = []
    for name in dict.fromkeys(table["candidate"]):
        rows = judged[judged["candidate"] == name]
        if benchmark is not None:
            rows = rows[rows["benchmark"] == benchmark]
        first = rows.iloc[0]
        ids = [int(token) for token in first["token_ids"]]
        verdict = _overall(list(rows["verdict"]))
        if (
            (groups or {}).get(name, "candidate") != group
            or (verdicts and verdict not in verdicts)
            or (not with_special and not set(ids).isdisjoint(special_ids))
        ):
            continue
        chosen.append(
            {
                "candidate": name,
                "token_ids": ids,
                "tokens": list(first["tokens"]),
                "verdict": verdict,
                "benchmarks": {
                    row["benchmark"]: {
                        "verdict": row["verdict"],
                        "delta": _number(row["delta"]),
                        "p_adjusted": _number(row["p_adjusted"]),
                    }
                    for _, row in rows.iterrows()
                },
            }
        )
    return chosen


def _overall(verdicts: Sequence[str]) -> str:
    effects = {verdict for verdict in verdicts if verdict != "neutral"}
    if not effects:
        return "neutral"
    return effects.pop() if len(effects) == 1 else "mixed"


def _number(value: Any) -> float | None:
    return None if value is None or value != value else float(value)


def render(chosen: Sequence[dict[str, Any]], kind: Format) -> str:
    """The text of a list; Parquet has none.

    `ids` is a bare JSON list of token ids, rising and without repeats.
    """
    if kind == "ids":
        return json.dumps(sorted({token for row in chosen for token in row["token_ids"]})) + "\n"
    if kind == "json":
        return json.dumps(chosen, indent=2, ensure_ascii=False) + "\n"
    if kind == "csv":
        return str(_frame(chosen).to_csv(index=False, lineterminator="\n"))
    raise UsageError("a Parquet file cannot be printed; name one with --out")


def write(chosen: Sequence[dict[str, Any]], kind: Format, path: Path) -> None:
    """Writes a list, whole or not at all."""
    with atomic_path(path) as temporary:
        if kind == "parquet":
            _frame(chosen, lists=True).to_parquet(temporary, index=False)
        else:
            temporary.write_text(render(chosen, kind), encoding="utf-8", newline="\n")


def _frame(chosen: Sequence[dict[str, Any]], *, lists: bool = False) -> pd.DataFrame:
    """One row a candidate; lists become JSON where the format has none."""
    import pandas as pd

    def cell(value: list[Any]) -> Any:
        return value if lists else json.dumps(value, ensure_ascii=False)

    columns = ["candidate", "token_ids", "tokens", "verdict"]
    rows = []
    for row in chosen:
        flat = {
            "candidate": row["candidate"],
            "token_ids": cell(row["token_ids"]),
            "tokens": cell(row["tokens"]),
            "verdict": row["verdict"],
        }
        for benchmark, values in row["benchmarks"].items():
            flat |= {f"{benchmark}.{key}": value for key, value in values.items()}
        rows.append(flat)
    return pd.DataFrame(rows, columns=None if rows else columns)
