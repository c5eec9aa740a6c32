"""The verdict table at 80 columns."""

from __future__ import annotations

import io
import re
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


def test_both_rules_are_shown_at_any_width(table: Any) -> None:
    table = table.copy()
    table.loc[1, ["verdict_nominal", "verdict_fdr", "verdict"]] = [
        "strong_pillar",
        *["neutral"] * 2,
    ]
    table.loc[1, "few_carry"] = True
    luck = {"maths": {"observed": 2, "mean": 0.4, "quantile_95": 1, "exceeds": True}}
    for width in (80, 120):
        out = io.StringIO()
        shown = render_verdicts(table, "rule fdr", rule="fdr", luck=luck)
        Console(file=out, width=width).print(shown)
        lines = out.getvalue().splitlines()
        header = next(line for line in lines if line.startswith("candidate"))
        assert header.index("nominal") < header.index("verdict")
        assert ("mde" in header) == (width == 120)
        line = next(li for li in lines if li.startswith(table.candidate[1]))
        assert re.search(r"pillar +(undetermined|equivalent)$", line)
        assert "!" in line
        text = " ".join(out.getvalue().split())
        assert "nominal calls: 2; luck alone brings 0.4 on average" in text
        assert "loss seen with 80 % power" in text
    assert "fdr" in printed_by_nominal(table)


def printed_by_nominal(table: Any) -> str:
    out = io.StringIO()
    Console(file=out, width=80).print(render_verdicts(table, "", rule="nominal"))
    return next(li for li in out.getvalue().splitlines() if li.startswith("candidate"))


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
