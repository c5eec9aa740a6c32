"""The pages on sweep files and outputs name what there is."""

from __future__ import annotations

import re
import sqlite3
from pathlib import Path

import pytest
from test_store import new_ledger

from knockout.config.file import parse_sweep
from knockout.config.page import mine_file_page, sweep_file_page
from knockout.config.sweep import Sweep
from knockout.ledger.checksum import install
from knockout.ledger.schema import upgrade
from knockout.sweep.confirm import COMPARED
from knockout.sweep.summary import summarise
from knockout.verdicts.table import COLUMNS

DOCS = Path(__file__).parents[1] / "docs"


def section(page: str, title: str) -> str:
    text = (DOCS / page).read_text(encoding="utf-8")
    return text.split(f"\n## {title}\n")[1].split("\n## ")[0]


def named(text: str) -> set[str]:
    return set(re.findall(r"`([^`\n]+)`", text))


def test_the_page_on_sweep_files_is_made_from_the_code() -> None:
    page = (DOCS / "sweep-file.md").read_text(encoding="utf-8")
    assert page == sweep_file_page(), "run `python -m knockout.config.page docs`"
    page = (DOCS / "mine-file.md").read_text(encoding="utf-8")
    assert page == mine_file_page(), "run `python -m knockout.config.page docs`"


def test_the_page_on_sweep_files_names_every_key_and_its_example_is_valid() -> None:
    page = sweep_file_page()
    assert set(Sweep.model_fields) <= named(page)
    example = page.split("```yaml\n")[1].split("```")[0]
    sweep = parse_sweep(example, "example", Path("/x"))
    assert sweep.adaptive is not None
    assert sweep.settings(sweep.benchmarks[1]).seeds == 5
    assert sweep.settings(sweep.benchmarks[0]).seeds == 16


def test_every_column_of_the_verdicts_is_described() -> None:
    assert set(COLUMNS) <= named(section("outputs.md", "Verdicts"))


def test_every_key_of_the_summary_is_described(tmp_path: Path) -> None:
    sweep = parse_sweep("{model: m, benchmarks: [first], candidates: {ids: [1]}}", "x", tmp_path)
    with new_ledger(tmp_path) as ledger:
        keys = set(summarise(ledger, sweep))
    assert keys <= named(section("outputs.md", "Summary"))


def test_every_column_of_a_confirmation_is_described() -> None:
    text = named(section("outputs.md", "Confirmation"))
    for column in COMPARED:
        assert column in text or column.split("_", 1)[1] in text


@pytest.fixture(scope="module")
def tables() -> dict[str, set[str]]:
    with sqlite3.connect(":memory:") as db:
        install(db)
        upgrade(db, 0)
        names = [
            name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        ]
        found = {
            name: {row[1] for row in db.execute(f"PRAGMA table_info({name})")} for name in names
        }
    db.close()
    return found


def test_every_table_of_the_ledger_is_described(tables: dict[str, set[str]]) -> None:
    rows = {
        next(iter(re.findall(r"^\| `(\w+)`", line)), ""): line
        for line in section("outputs.md", "The ledger").splitlines()
    }
    for table, columns in tables.items():
        assert columns <= named(rows[table]), table
