"""One HTML file from a run directory."""

from __future__ import annotations

import base64
import hashlib
import json
import time
from importlib.resources import files
from pathlib import Path
from typing import Any

from knockout._version import __version__
from knockout.figures.theme import config
from knockout.figures.write import licence as figure_licence
from knockout.figures.write import scripts as figure_scripts
from knockout.files import write_text
from knockout.ledger import Ledger
from knockout.report.comparison import comparison_of
from knockout.report.data import details, overview, shown_config
from knockout.report.picks import measure_picks, picked_tokens, picks_of, read_picks
from knockout.report.plots import page_specs
from knockout.report.sample import Sample, pack, sample_pairs
from knockout.report.source import RunView, open_ledger, open_texts, read_run
from knockout.report.tokens import TokenTexts
from knockout.report.trajectories import (
    MOST_REPLACEMENTS,
    frequencies,
    most_common,
    replacements,
    some_rows,
)

__all__ = ["build_report", "join_pieces", "render_page", "themes"]

# Room for trajectories, besides the plotting library (0.8 MB) and the tables.
TRAJECTORY_BYTES = 2_400_000
# Most forks whose replacement is looked up, over all candidates; each costs a read of its tokens.
MOST_LOOKED_UP = 60_000

_SCRIPTS = (
    "core", "plots", "overview", "table", "candidate", "pair", "explore", "compare", "health", "main",
)  # fmt: skip


def build_report(
    folder: Path,
    out: Path | None = None,
    *,
    budget: int = TRAJECTORY_BYTES,
    compare: Path | None = None,
    picks: bool = False,
    model: str | None = None,
) -> dict[str, Any]:
    """Writes a run's report.

    Args:
        folder: The run directory.
        out: The file; `report.html` in the run directory by default.
        budget: Bytes that sampled trajectories may take in the file.
        compare: Another run, to be compared with this one on a page of its own.
        picks: Whether to measure the probabilities at the forks in the file first, with the
            run's model (see `knockout.report.picks`); those measured before are shown anyway.
        model: Where the run's model is, if not where it was.

    Returns:
        path, bytes, seconds, pairs (in the file) and forks (in the run).

    Raises:
        UsageError: There is no run, or the two have nothing in common.
        KnockoutError: Its ledger is damaged, or the file cannot be written.
    """
    started = time.monotonic()
    target = out or folder / "report.html"
    with open_ledger(folder) as ledger:
        run = read_run(folder, ledger)
        texts = open_texts(run.sweep, ledger)
        compared = comparison_of(folder, compare, run.sweep.verdict.alpha) if compare else None
        sample = sample_pairs(run, ledger, budget)
        if picks:
            pairs = [tuple(e["key"]) for own in sample.knockouts.values() for e in own]
            measure_picks(folder, run.sweep, ledger, pairs, model=model)
        chunks = report_chunks(run, ledger, texts, sample, compared)
    page = render_page(f"{run.folder.resolve().name} · knockout", chunks, live=False)
    write_text(target, page)
    return {
        "path": target,
        "bytes": len(page.encode("utf-8")),
        "seconds": time.monotonic() - started,
        "pairs": sample.n_pairs,
        "forks": sample.n_forks,
    }


def report_chunks(
    run: RunView,
    ledger: Ledger,
    texts: TokenTexts,
    sample: Sample,
    compared: dict[str, Any] | None = None,
) -> dict[str, str]:
    """The report's data by name, packed; the page unpacks a chunk when it needs it."""
    found, total = frequencies(ledger)
    head = overview(run, ledger, found, total, has_tokenizer=texts.has_tokenizer)
    measured = read_picks(run.folder)
    for cell in sample.baselines.values():
        join_pieces(cell["baseline"], texts)
    for entries in sample.knockouts.values():
        for entry in entries:
            join_pieces(entry, texts)
            entry["picks"] = picks_of(measured, tuple(entry["key"]), entry["step"])
            sample.tokens.update(picked_tokens(entry["picks"]))
    head["sample"] = {"pairs": sample.n_pairs, "forks": sample.n_forks}
    head["comparison"] = compared
    head |= {"figures": page_specs(head), "themes": themes()}
    head["config"] = shown_config((run.folder / "config.yaml").read_text(encoding="utf-8"))
    chunks = {"overview": pack(head)}
    used = set(sample.tokens)
    counted = candidate_replacements(run, ledger)
    for c in range(len(ledger.candidates)):
        detail = details(run, c)
        for b, of_benchmark in enumerate(detail):
            of_benchmark["replaced"] = counted.get((b, c), {"n": 0, "top": []})
            used.update(t for entry in of_benchmark["replaced"]["top"] for t in entry[:2] if t >= 0)
        chunks[f"c{c}"] = pack({"details": detail, "pairs": sample.knockouts.get(c, [])})
    for name, cell in sample.baselines.items():
        chunks[f"b{name}"] = pack(cell)
    used.update(token for candidate in ledger.candidates for token in candidate.token_ids)
    chunks["vocab"] = pack(texts.vocab(used))
    return chunks


def candidate_replacements(
    run: RunView, ledger: Ledger, only: int | None = None
) -> dict[tuple[int, int], dict[str, Any]]:
    """The most frequent replacements of each candidate (or of one) on each benchmark."""
    who = range(len(ledger.candidates)) if only is None else [only]
    slices = [run.forks.rows(b, c) for b in range(len(run.cells)) for c in who]
    each = min(MOST_REPLACEMENTS, max(MOST_LOOKED_UP // max(len(slices), 1), 10))
    rows = [int(row) for at in slices for row in some_rows(at, each)]
    counted = replacements(ledger, run.forks, rows)
    return {key: most_common(counts) for key, counts in counted.items()}


def join_pieces(side: dict[str, Any], texts: TokenTexts) -> None:
    """Adds to a trajectory which of its tokens only together make text, by step."""
    joined = texts.joined(side["ids"])
    if joined:
        side["joined"] = [[side["step"] + at, n, text] for at, n, text in joined]


def themes() -> dict[str, Any]:
    """Colours of the figures in both themes of the page."""
    return {"light": config(), "dark": config(dark=True)}


def render_page(
    title: str, chunks: dict[str, str], *, live: bool, settings: dict[str, Any] | None = None
) -> str:
    """The page, with its styles, scripts and data inside.

    Args:
        title: Of the page.
        chunks: Packed data by name.
        live: Whether the page asks a server for its data.
        settings: Further settings for the scripts; no secret of the run belongs here.
    """
    from jinja2 import Environment, StrictUndefined

    package = files("knockout.report")
    page = package / "page"
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, keep_trailing_newline=True
    )
    sources = [(page / f"{name}.js").read_text(encoding="utf-8") for name in _SCRIPTS]
    app = '"use strict";\n(() => {\n' + "\n".join(sources) + "\n})();\n"
    scripts = {**figure_scripts(), "app": app}
    for name, script in scripts.items():
        if "</script" in script.lower() or "<!--" in script:
            raise ValueError(f"the script {name} contains its own end tag")
    policy = [
        "default-src 'none'",
        "script-src " + " ".join(_hash(script) for script in scripts.values()),
        # Elements have styles of their own: the width of a meter, the place of a tooltip.
        "style-src 'unsafe-inline'",
        "img-src data: blob:",
        "connect-src 'self'" if live else "connect-src 'none'",
        "base-uri 'none'",
        "form-action 'none'",
    ]
    return environment.from_string((page / "page.html").read_text(encoding="utf-8")).render(
        title=title,
        policy="; ".join(policy),
        css=(page / "page.css").read_text(encoding="utf-8"),
        scripts=scripts,
        licence=figure_licence(),
        chunks=chunks,
        settings=_embedded_json({"live": live, **(settings or {})}),
        version=__version__,
    )


def _hash(script: str) -> str:
    digest = base64.b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode("ascii")
    return f"'sha256-{digest}'"


def _embedded_json(value: Any) -> str:
    """JSON that is safe inside a script element."""
    text = json.dumps(value, ensure_ascii=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text
