"""Tables and paragraphs for papers, on the older run that is kept as a fixture."""

from __future__ import annotations

import csv
import io
import re
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from knockout.cli import app

OLD = Path(__file__).parent / "data" / "first_version_run"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    shutil.copytree(OLD, tmp_path / "run")
    return tmp_path / "run"


def say(*arguments: str) -> str:
    done = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_the_three_tables_have_the_same_rows(run: Path) -> None:
    whole = list(csv.DictReader(io.StringIO(say("verdicts", str(run), "--format", "csv"))))
    marked = say("verdicts", str(run), "--format", "markdown").splitlines()
    latex = say("verdicts", str(run), "--format", "latex")
    assert len(marked) == len(whole) + 2
    assert latex.count("\\\\\n") == len(whole) + 1
    for row, line in zip(whole, marked[2:], strict=True):
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        assert cells[0] == row["benchmark"]
        assert float(cells[2].replace("−", "-")) == pytest.approx(float(row["delta"]), abs=5e-4)


def test_latex_has_no_bare_special_character(run: Path) -> None:
    body = say("verdicts", str(run), "--format", "latex").split("\\hline\n")[2]
    for line in body.splitlines():
        plain = re.sub(r"\\[a-z]+\{\}|\\[&%$#_{}]|\$[^$]*\$", "", line.removesuffix(r" \\"))
        assert plain.count("&") == 6
        assert not set(plain) & set("%$#_{}~^\\")


def test_a_methods_paragraph_has_the_numbers_of_the_run(run: Path) -> None:
    text = say("cite", str(run))
    assert "@software{knockout_harness" in text
    said = say("status", str(run), "--json")
    generated = re.search(r'"tokens_generated": (\d+)', said)
    assert generated is not None
    assert f"{int(generated[1]):,} tokens instead of" in text
