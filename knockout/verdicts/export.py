"""Lists of tokens for training, from a verdict table."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from knockout.errors import UsageError
from knockout.files import atomic_path
from knockout.verdicts.table import POOLED

if TYPE_CHECKING:
    import pandas as pd

__all__ = [
    "Across",
    "Format",
    "Verdict",
    "freeze_list",
    "list_name",
    "ranked",
    "render",
    "selected",
    "write",
]

Format = Literal["ids", "json", "yaml", "csv", "parquet"]
Verdict = Literal["strong_pillar", "strong_stumbling_block", "neutral"]
Across = Literal["overall", "any", "all"]

_NUMBERS = ("delta", "ci_low", "ci_high", "p_value", "p_adjusted")


def selected(
    table: pd.DataFrame,
    *,
    verdicts: Collection[str] = (),
    evidence: Collection[str] = (),
    benchmark: str | None = None,
    across: Across = "overall",
    groups: dict[str, str] | None = None,
    group: str = "candidate",
    special_ids: Collection[int] = (),
    with_special: bool = False,
) -> list[dict[str, Any]]:
    """Chooses candidates.

    Args:
        table: A verdict table with one row for each benchmark and candidate.
        verdicts: Wanted ones; empty for all.
        evidence: Wanted kinds: "effect", "equivalent", "undetermined"; empty for all. Over several
            benchmarks it is the table's `evidence_overall` (`verdicts.overall`).
        benchmark: Judges by this benchmark alone, which may be "pooled"; otherwise pooled rows do
            not vote.
        across: How several benchmarks judge. "overall": a candidate is a pillar (or stumbling
            block) if it is one on any benchmark, "mixed" if it is both, and neutral only if
            it is neutral on all. "any" and "all": it has a wanted verdict on any of them, or
            on all.
        groups: Group of each candidate by name.
        group: Which group to take.
        special_ids: Ids of special tokens.
        with_special: Whether candidates that contain a special token are taken.

    Returns:
        One mapping a candidate: candidate, token_ids, tokens, verdict, evidence, benchmarks (on
        each: verdict, evidence, delta, ci_low, ci_high, p_value, p_adjusted, n_problems, n_seeds).

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
        found = [str(v) for v in rows["verdict"]]
        verdict = _overall(found)
        kinds = [str(kind) for kind in rows["evidence"]]
        kind = _evidence(kinds)
        if benchmark is None and "evidence_overall" in first:
            kind = str(first["evidence_overall"])
        passes = {
            "overall": verdict in verdicts,
            "any": any(v in verdicts for v in found),
            "all": all(v in verdicts for v in found),
        }[across]
        if (
            (groups or {}).get(name, "candidate") != group
            or (verdicts and not passes)
            or (evidence and kind not in evidence)
            or (not with_special and not set(ids).isdisjoint(special_ids))
        ):
            continue
        chosen.append(
            {
                "candidate": name,
                "token_ids": ids,
                "tokens": list(first["tokens"]),
                "verdict": verdict,
                "evidence": kind,
                "benchmarks": {
                    row["benchmark"]: {
                        "verdict": row["verdict"],
                        "evidence": row["evidence"],
                        **{key: _number(row[key]) for key in _NUMBERS},
                        "n_problems": int(row["n_problems"]),
                        "n_seeds": int(row["n_seeds"]),
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


def _evidence(kinds: Sequence[str]) -> str:
    """The weakest: undetermined, then equivalent, then effect."""
    return next((k for k in ("undetermined", "equivalent") if k in kinds), "effect")


def ranked(
    chosen: Sequence[dict[str, Any]],
    top: int,
    by: str,
    scores: dict[int, float] | None = None,
) -> list[dict[str, Any]]:
    """The first candidates by a number.

    Args:
        chosen: Rows of `selected`.
        top: How many.
        by: Without scores one of delta (largest |Δ| on any benchmark first), p_value or p_adjusted
            (smallest first).
        scores: Score of token ids, highest first; a set has the highest of its ids, and candidates
            without a score come last.
    """
    if scores is None and by not in ("delta", "p_value", "p_adjusted"):
        raise UsageError(
            f"found {by!r} to rank by; expected delta, p_value or p_adjusted, or a file of scores"
        )

    def key(row: dict[str, Any]) -> float:
        if scores is not None:
            return -max(scores.get(token, -math.inf) for token in row["token_ids"])
        values = [cell[by] for cell in row["benchmarks"].values() if cell[by] is not None]
        if by == "delta":
            return -max(map(abs, values), default=-1.0)
        return min(values, default=math.inf)

    return sorted(chosen, key=key)[:top]


def freeze_list(
    rocks: Sequence[int], chosen: Sequence[dict[str, Any]], *, keep_undetermined: bool = False
) -> tuple[list[dict[str, Any]], dict[str, list[int]]]:
    """Mined rocks that may be frozen: all but pillars and those about which nothing is known.

    Args:
        rocks: Token ids of the mined list.
        chosen: Rows of `selected` without a filter on verdicts.
        keep_undetermined: Freezes rocks whose evidence is undetermined too.

    Returns:
        Rows of one rock each, in the order of `rocks`, and the rocks left out by reason: "pillar"
        (one on any benchmark, alone or in a set), "undetermined", "not tested".
    """
    by_token: dict[int, list[dict[str, Any]]] = {}
    for row in chosen:
        for token in row["token_ids"]:
            by_token.setdefault(token, []).append(row)
    kept: list[dict[str, Any]] = []
    left: dict[str, list[int]] = {"pillar": [], "undetermined": [], "not tested": []}
    for token in dict.fromkeys(rocks):
        rows = by_token.get(token, [])
        alone = [row for row in rows if row["token_ids"] == [token]]
        cells = [cell["verdict"] for row in rows for cell in row["benchmarks"].values()]
        if "strong_pillar" in cells:
            left["pillar"].append(token)
        elif not alone:
            left["not tested"].append(token)
        elif alone[0]["evidence"] == "undetermined" and not keep_undetermined:
            left["undetermined"].append(token)
        else:
            kept.append(alone[0])
    return kept, left


def _number(value: Any) -> float | None:
    return None if value is None or value != value else float(value)


def render(
    chosen: Sequence[dict[str, Any]], kind: Format, about: dict[str, Any] | None = None
) -> str:
    """The text of a list; Parquet has none.

    `ids` is a bare JSON list of token ids, rising and without repeats. `json` is the document of
    `knockout.tokens.token_list` and `yaml` a fragment for a trainer's configuration; both need `about`,
    the keyword arguments of `knockout.tokens.token_list.document`.
    """
    if kind == "ids":
        return json.dumps(sorted({token for row in chosen for token in row["token_ids"]})) + "\n"
    if kind in ("json", "yaml"):
        if about is None:
            raise ValueError(f"{kind} needs to know the model and the run")
        from knockout.tokens.token_list import document

        found = document(chosen, **about)
        if kind == "json":
            return json.dumps(found, indent=2, ensure_ascii=False) + "\n"
        return _yaml(found)
    if kind == "csv":
        return str(_frame(chosen).to_csv(index=False, lineterminator="\n"))
    raise UsageError("a Parquet file cannot be printed; name one with --out")


def list_name(selection: Mapping[str, Any], evidence: Collection[str]) -> str:
    """What a list is: freeze_list, pillars, stumbling_blocks, neutral, undetermined, or tokens.

    Args:
        selection: How its rows were chosen.
        evidence: Of each row. Neutrals are called so only if none is undetermined.
    """
    if "freeze_list" in selection:
        return "freeze_list"
    if selection.get("group") == "control":
        return "controls"
    verdicts = set(selection.get("verdicts") or ())
    if verdicts == {"strong_pillar"}:
        return "pillars"
    if verdicts == {"strong_stumbling_block"}:
        return "stumbling_blocks"
    if set(evidence) == {"undetermined"}:
        return "undetermined"
    if verdicts == {"neutral"}:
        return "neutral_or_undetermined" if "undetermined" in evidence else "neutral"
    return "tokens"


def _yaml(found: dict[str, Any]) -> str:
    """A fragment whose ids carry their tokens as comments; its key says what the list is."""
    key = list_name(found["selection"], [row.get("evidence", "") for row in found["candidates"]])
    lines = [
        f"# {found['model']}, vocabulary {found['vocabulary']}",
        f"# {json.dumps(found['selection'], ensure_ascii=False)}",
        f"{key}:" if found["candidates"] else f"{key}: []",
    ]
    # In the order of the candidates, which is that of a ranking; an id may be in several of them.
    texts: dict[int, str] = {}
    for row in found["candidates"]:
        texts |= zip(row["token_ids"], row["tokens"], strict=True)
    for token, text in texts.items():
        # A comment ends at any of YAML's line breaks; none of them is printable.
        lines.append(f"  - {token}  # {text if text.isprintable() else json.dumps(text)}")
    return "\n".join(lines) + "\n"


def write(
    chosen: Sequence[dict[str, Any]],
    kind: Format,
    path: Path,
    about: dict[str, Any] | None = None,
) -> None:
    """Writes a list, whole or not at all; `about` as in `render`."""
    with atomic_path(path) as temporary:
        if kind == "parquet":
            _frame(chosen, lists=True).to_parquet(temporary, index=False)
        else:
            temporary.write_text(render(chosen, kind, about), encoding="utf-8", newline="\n")


def _frame(chosen: Sequence[dict[str, Any]], *, lists: bool = False) -> pd.DataFrame:
    """One row a candidate; lists become JSON if the format has none."""
    import pandas as pd

    def cell(value: list[Any]) -> Any:
        return value if lists else json.dumps(value, ensure_ascii=False)

    columns = ["candidate", "token_ids", "tokens", "verdict", "evidence"]
    rows = []
    for row in chosen:
        flat = {
            "candidate": row["candidate"],
            "token_ids": cell(row["token_ids"]),
            "tokens": cell(row["tokens"]),
            "verdict": row["verdict"],
            "evidence": row["evidence"],
        }
        for benchmark, values in row["benchmarks"].items():
            flat |= {f"{benchmark}.{key}": value for key, value in values.items()}
        rows.append(flat)
    return pd.DataFrame(rows, columns=None if rows else columns)
