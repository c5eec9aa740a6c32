"""The verdict table at 80 columns."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from synthetic import write_run

from knockout.config.file import load_sweep
from knockout.ledger import Ledger
from knockout.sweep.results import verdict_table
from knockout.tokens.checkpoint import load_tokenizer, resolve_model
from knockout.verdicts.terminal import render_verdicts


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Any:
    tokenizer = load_tokenizer(resolve_model("smollm2-135m"))
    folder: Path = write_run(tmp_path_factory.mktemp("run"), tokenizer, benchmarks=(("maths", 40),))
    with Ledger.open(folder / "run.db") as ledger:
        return verdict_table(ledger, load_sweep(folder / "config.yaml").verdict)


def printed(table: Any, width: int, *, terminal: bool = False) -> str:
    out = io.StringIO()
    colors: Any = "standard" if terminal else "auto"
    console = Console(file=out, width=width, force_terminal=terminal, color_system=colors)
    console.print(render_verdicts(table, "rule fdr"))
    return out.getvalue()


def test_nothing_but_names_is_cut_at_80_columns(table: Any) -> None:
    table = table.copy()
    table.loc[1, "candidate"] = '"' + 60 * "x" + '"'
    lines = printed(table, 80).splitlines()
    assert max(map(len, lines)) <= 80
    for row in table.to_dict("records"):
        line = next(li for li in lines if li.startswith(row["candidate"][:8]))
        assert f"{row['delta']:+.3f}" in line
        assert f"[{row['ci_low']:+.3f}, {row['ci_high']:+.3f}]" in line
        assert line.rstrip().endswith(("pillar", "stumbling", "equivalent", "undetermined"))
    assert sum("…" in line for line in lines) == 1


def test_effects_come_first_and_markup_stays_text(table: Any) -> None:
    table = table.copy()
    table.loc[2, "candidate"] = '"[red]\\n"'
    lines = printed(table, 100).splitlines()
    body = [line for line in lines if line.startswith('"')]
    assert body[0].rstrip().endswith("pillar")
    assert any(line.startswith('"[red]\\n"') for line in body)


def test_colour_only_on_a_terminal(table: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b" not in printed(table, 80)
    assert "\x1b[1;34m" in printed(table, 80, terminal=True)
    monkeypatch.setenv("NO_COLOR", "1")
    assert "34m" not in printed(table, 80, terminal=True)
