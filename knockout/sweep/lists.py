"""A run's candidates as a list for training: what `knockout export` and `Run.export` choose."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from knockout.config.file import load_sweep
from knockout.errors import UsageError, counted
from knockout.ledger import Ledger
from knockout.sweep.results import verdict_table
from knockout.tokens.token_list import read_scores, read_token_list
from knockout.verdicts.export import Format, freeze_list, ranked, selected, write
from knockout.verdicts.rules import rule_names

__all__ = ["Chosen", "choose", "describe", "write_list"]

_KNOWN: Mapping[str, tuple[str, ...]] = {
    "verdicts": ("strong_pillar", "strong_stumbling_block", "neutral"),
    "evidence": ("effect", "equivalent", "undetermined"),
    "across": ("overall", "any", "all"),
    "group": ("candidate", "control"),
}


@dataclass(frozen=True, slots=True)
class Chosen:
    """Candidates that were chosen from a run.

    Attributes:
        rows: One for each candidate (see `knockout.verdicts.export.selected`).
        selection: How they were chosen.
        rule: The rule that judged them.
        notes: What the user should know.
        preliminary: Whether the run is unfinished.
        model: The swept model.
        run: `identity_hash` and `made_by` of the run.
    """

    rows: list[dict[str, Any]]
    selection: dict[str, Any]
    rule: Any
    notes: tuple[str, ...]
    preliminary: bool
    model: str
    run: dict[str, str]

    @property
    def token_ids(self) -> list[int]:
        """All ids, rising, without repeats."""
        return sorted({token for row in self.rows for token in row["token_ids"]})


def choose(
    directory: Path,
    *,
    verdicts: Collection[str] = (),
    evidence: Collection[str] = (),
    rule: str | None = None,
    benchmark: str | None = None,
    across: str = "overall",
    group: str = "candidate",
    special: bool = False,
    rocks: Path | None = None,
    column: str = "rock_id",
    keep_undetermined: bool = False,
    top: int | None = None,
    by: str = "delta",
    scores: Path | None = None,
) -> Chosen:
    """Chooses candidates of a run.

    Args:
        directory: The run directory.
        verdicts: Wanted ones; empty for all.
        evidence: "effect", "equivalent", "undetermined"; empty for all.
        rule: Instead of the run's own.
        benchmark: Judges by this one alone.
        across: "overall", or the wanted verdict on "any" or "all" benchmarks.
        group: "candidate" or "control".
        special: Keeps candidates that contain special tokens.
        rocks: A file of mined tokens: those of them that are neither pillars nor undetermined.
        column: Of the ids in that file.
        keep_undetermined: Keeps undetermined rocks too.
        top: The first N only, ranked by `by`.
        by: "delta", "p_value", "p_adjusted", or a column of `scores`.
        scores: Token scores of `mine`.

    Raises:
        UsageError: There is no run, or a value is unknown or does not go with another.
    """
    asked = {"verdicts": verdicts, "evidence": evidence, "across": (across,), "group": (group,)}
    for name, values in asked.items():
        for value in values:
            if value not in _KNOWN[name]:
                raise UsageError(
                    f"{name}: found {value!r}; expected one of {', '.join(_KNOWN[name])}"
                )
    if rule is not None and rule not in rule_names():
        raise UsageError(f"rule: found {rule!r}; expected one of {', '.join(rule_names())}")
    if rocks is not None and (verdicts or evidence):
        raise UsageError("a freeze list chooses by verdict itself; leave verdicts and evidence out")
    if top is None and (scores is not None or by != "delta"):
        raise UsageError("by and scores rank for top; say how many with top")
    sweep = load_sweep(directory / "config.yaml")
    judged_by = sweep.verdict.model_copy(update={"rule": rule} if rule else {})
    with Ledger.open(directory / "run.db") as ledger:
        meta = ledger.meta()
        table = verdict_table(ledger, judged_by)
        chosen = selected(
            table,
            verdicts=verdicts,
            evidence=evidence,
            benchmark=benchmark,
            across=across,  # type: ignore[arg-type]
            groups={c.name: c.group for c in ledger.candidates},
            group=group,
            special_ids=ledger.meta_json("special_ids", []),
            with_special=special,
        )
    selection: dict[str, Any] = {
        "verdicts": list(verdicts),
        "evidence": list(evidence),
        "benchmark": benchmark,
        "across": across,
        "group": group,
    }
    notes = []
    if rocks is not None:
        listed = read_token_list(rocks, column=column)
        chosen, left = freeze_list(listed, chosen, keep_undetermined=keep_undetermined)
        selection["freeze_list"] = {"n_rocks": len(listed), "left_out": left}
        told = ", ".join(f"{len(ids)} {reason}" for reason, ids in left.items())
        notes.append(f"{len(chosen)} of {len(listed)} rocks; left out: {told}")
    if top is not None:
        chosen = ranked(chosen, top, by, None if scores is None else read_scores(scores, by))
        selection |= {"top": top, "by": by}
    if (n := sum(row["evidence"] == "undetermined" for row in chosen)) > 0:
        # Absence of evidence is not evidence of absence.
        notes.append(
            f"warning: {n} of {counted(len(chosen), 'candidate')} undetermined: measured too little "
            "to say that it does nothing. "
            "--evidence equivalent and --evidence effect leave undetermined candidates out"
        )
    return Chosen(
        rows=chosen,
        selection=selection,
        rule=judged_by,
        notes=tuple(notes),
        preliminary=bool(table["preliminary"].any()),
        model=sweep.model,
        run={key: meta.get(key, "") for key in ("identity_hash", "made_by")},
    )


def describe(
    chosen: Chosen, for_model: str | None = None, *, force: bool = False
) -> dict[str, Any]:
    """What a self-describing list says of its origin; loads the model's tokenizer.

    Args:
        chosen: The list.
        for_model: Another model, whose ids must mean the same tokens.
        force: Takes it even if they do not.

    Raises:
        UsageError: They do not.
    """
    return {
        "model": chosen.model,
        "vocabulary": _vocabulary(chosen.model, for_model, force),
        "run": chosen.run,
        "rule": chosen.rule.model_dump(mode="json"),
        "selection": chosen.selection,
    }


def write_list(chosen: Chosen, kind: Format, path: Path) -> None:
    """Writes a list in one of the formats of `knockout export`."""
    write(chosen.rows, kind, path, describe(chosen) if kind in ("json", "yaml") else None)


def _vocabulary(model: str, other: str | None, force: bool) -> str:
    """Fingerprint of the swept model's vocabulary, compared with another's if one is named."""
    from knockout.tokens.token_list import vocabulary_fingerprint
    from knockout.tokens.vocabulary import open_vocabulary

    own = vocabulary_fingerprint(open_vocabulary(model)[1])
    if other is not None and not force:
        theirs = vocabulary_fingerprint(open_vocabulary(other)[1])
        if theirs != own:
            raise UsageError(
                f"--for {other}: its token ids mean other tokens than those of {model} (vocabulary "
                f"{theirs}, not {own}); sweep that model, or give --force"
            )
    return own
