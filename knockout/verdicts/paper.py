"""For papers: the verdict table as Markdown or LaTeX, a methods paragraph, a BibTeX entry."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from knockout._version import __version__
from knockout.verdicts.findings import interval_of
from knockout.verdicts.table import verdict_key

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["BIBTEX", "FORMATS", "methods", "paper_table"]

FORMATS = ("markdown", "latex", "csv")

BIBTEX = f"""\
@software{{knockout_harness,
  title   = {{knockout: inference-time knockout evaluation of tokens in language models}},
  author  = {{{{The knockout maintainers}}}},
  version = {{{__version__}}},
  license = {{Apache-2.0}}
}}
"""

_COLUMNS = ("benchmark", "candidate", "Δ", "interval", "p", "p adjusted", "verdict")
_LATEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{",
    "}": r"\}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "Δ": r"$\Delta$", "−": "$-$",
}  # fmt: skip


def paper_table(table: pd.DataFrame, rule: str, kind: str) -> str:
    """The table as text to paste.

    Args:
        table: Of `build_verdicts`.
        rule: Whose interval is shown.
        kind: "markdown" or "latex" with the columns that a paper needs, or "csv" with all of them.
    """
    if kind == "csv":
        return str(table.to_csv(index=False))
    rows = [_cells(row, rule) for row in table.to_dict("records")]
    if kind == "markdown":
        lines = [_COLUMNS, tuple("---" for _ in _COLUMNS), *rows]
        return "".join(
            f"| {' | '.join(c.replace('|', chr(92) + '|') for c in r)} |\n" for r in lines
        )
    body = "".join(f"{' & '.join(map(_escaped, row))} \\\\\n" for row in rows)
    head = " & ".join(map(_escaped, _COLUMNS))
    return f"\\begin{{tabular}}{{llrrrrl}}\n\\hline\n{head} \\\\\n\\hline\n{body}\\hline\n\\end{{tabular}}\n"


def _cells(row: Mapping[Any, Any], rule: str) -> tuple[str, ...]:
    low, high = interval_of(row, rule)
    interval = f"[{_signed(low)}, {_signed(high)}]" if low is not None and high is not None else "–"
    return (
        str(row["benchmark"]),
        str(row["candidate"]),
        _signed(row["delta"]),
        interval,
        _p(row["p_value"]),
        _p(row["p_adjusted"]),
        verdict_key(row).replace("_", " "),
    )


def _signed(value: float | None) -> str:
    if value is None or value != value:
        return "–"
    return f"{value:+.3f}".replace("-", "−")


def _p(value: float) -> str:
    if value != value:
        return "–"
    return (
        f"{value:.3f}" if value >= 0.001 else f"{value:.1e}".replace("e-0", "e-").replace("-", "−")
    )


def _escaped(text: str) -> str:
    return "".join(_LATEX.get(character, character) for character in text)


def methods(
    summary: Mapping[str, Any], *, rule: str, alpha: float, margin: float, target: str
) -> str:
    """A paragraph for the methods section, with the numbers of this run.

    Args:
        summary: The content of `summary.json`.
        rule, alpha, margin, target: How the verdicts were reached.
    """
    sampling = summary["sampling"]
    set_ = ", ".join(f"{k} {v:g}" for k, v in sampling.items() if isinstance(v, int | float))
    problems = ", ".join(
        f"{name} ({n} problems, {summary['seeds'][name]} seeds)"
        for name, n in summary["n_problems"].items()
    )
    engine = summary["engine"] or {}
    correction = (
        "Verdicts are called at the nominal level, without a correction"
        if rule == "nominal"
        else f"P-values are corrected by the rule `{rule}` over all candidates and controls that can reach the level"
    )
    audit = (
        f" Of {summary['audited']:,} knockouts generated again from scratch {summary['fork_errors']:,} differed."
        if summary["audited"]
        else ""
    )
    controls = f" and {summary['n_controls']} controls" if summary["n_controls"] else ""
    saved = summary["tokens_naive"] / max(summary["tokens_generated"], 1)
    return (
        f"We knocked out {summary['n_candidates']} candidate tokens{controls} of {summary['model']} on {problems}, "
        f"one at a time, by setting the logit of the token to minus infinity at every decoding step ({set_}; "
        f"{engine.get('kind', 'unknown engine')}, {engine.get('dtype', 'unknown number format')}). Baseline and "
        "knockout share counter-based Gumbel noise, so that a knockout is its baseline up to the first step at which "
        f"the ban changes the pick, and only the rest is generated: {summary['tokens_generated']:,} tokens instead of "
        f"{summary['tokens_naive']:,} ({saved:.1f} times fewer).{audit} The effect of a candidate is the mean over problems "
        "of the difference in grade, averaged over seeds; problems are the sampling unit (target: "
        f"{target}). P-values come from exact sign-flip tests over problems. {correction} (alpha = {alpha:g}). A neutral "
        f"candidate is called equivalent if two one-sided tests at alpha place its effect within ± {margin:g} of Pass@1, "
        f"and undetermined otherwise. Computed with knockout-harness {__version__}.\n"
    )
