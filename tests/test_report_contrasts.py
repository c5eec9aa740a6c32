"""Pairs and a second run in the report: figures, tables, files and Python say the same."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
from browser import Watch, chromium
from synthetic import write_run

import knockout
from knockout.errors import UsageError
from knockout.report.build import build_report
from knockout.report.plots import Plots, write_figures
from knockout.tokens.checkpoint import load_tokenizer, resolve_model


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    tokenizer = load_tokenizer(resolve_model("smollm2-135m"))
    folder = tmp_path_factory.mktemp("contrasts")
    a = write_run(folder / "early", tokenizer, benchmarks=(("maths", 30),), pairs=6)
    b = write_run(folder / "late", tokenizer, benchmarks=(("maths", 30),), pairs=6, seed=5)
    return a, b


def shown(value: float) -> str:
    """As the page prints a difference."""
    text = f"{value:+.3f}".replace("-", "−")
    return text if float(f"{value:.3f}") else "0.000"


def test_pairs_are_a_table_and_figures(runs: tuple[Path, Path]) -> None:
    folder, _ = runs
    build_report(folder)
    frame = knockout.load_run(folder).interactions()
    assert len(frame) == 6
    with chromium() as browser:
        page = browser.new_page()
        watch = Watch(page)
        page.goto((folder / "report.html").as_uri())
        table = page.get_by_role("region", name="Interactions of pairs")
        table.wait_for()
        rows = {
            line.locator("td").first.inner_text(): line.locator("td").all_inner_texts()
            for line in table.locator("tbody tr").all()
        }
        for row in frame.to_dict("records"):
            cells = rows[row["pair"]]
            assert cells[3] == shown(row["delta_pair"])
            assert cells[4] == shown(row["interaction"])
            assert cells[5] == f"[{shown(row['ci_low'])}, {shown(row['ci_high'])}]"
        figure = page.locator("figure", has=page.get_by_role("heading", name="Interactions"))
        figure.locator(".plot[data-drawn]").wait_for()
        assert figure.locator("svg .mark-symbol path").count() == 6
        assert page.locator("figure", has_text="Who stands in for whom").locator("svg").count() == 1
        assert watch.errors == []


def test_pairs_and_comparisons_are_drawn_in_python(runs: tuple[Path, Path], tmp_path: Path) -> None:
    pytest.importorskip("altair", reason="needs the extra `figures`")
    a, b = map(knockout.load_run, runs)
    drawn = a.plot.interactions().to_dict()["datasets"]["rows"]
    assert {row["pair"] for row in drawn} == set(a.interactions()["pair"])
    points = a.plot.comparison(b).to_dict()["datasets"]["rows"]
    frame = a.compare(b, alpha=a.sweep.verdict.alpha)
    assert {(p["candidate"], p["difference"]) for p in points} == set(
        zip(frame["candidate"], frame["difference"], strict=True)
    )
    names = {path.name for path in write_figures(a.folder, tmp_path, kinds=["svg"])}
    assert "interactions-maths.svg" in names
    with (tmp_path / "interactions-maths.csv").open(encoding="utf-8", newline="") as file:
        assert len(list(csv.DictReader(file))) == 6
    with pytest.raises(UsageError, match="no penalties"):
        a.plot.dose()


def test_a_run_without_pairs_says_so(tmp_path: Path, runs: tuple[Path, Path]) -> None:
    tokenizer = load_tokenizer(resolve_model("smollm2-135m"))
    plain = write_run(tmp_path / "plain", tokenizer)
    with pytest.raises(UsageError, match=r"no pairs \(`candidates.pairs` asks for them\)"):
        Plots(plain).interactions()


def test_two_runs_side_by_side(runs: tuple[Path, Path], tmp_path: Path) -> None:
    a, b = map(knockout.load_run, runs)
    made = a.report(tmp_path / "both.html", compare=b)
    frame = a.compare(b, alpha=a.sweep.verdict.alpha)
    assert frame["supported"].any() or frame["difference"].abs().max() > 0
    with chromium() as browser:
        page = browser.new_page()
        watch = Watch(page)
        page.goto(made.as_uri())
        page.get_by_role("link", name="Compare").click()
        page.wait_for_selector("main[data-page=compare]")
        assert page.inner_text("h1") == "early beside late"
        page.locator(".plot[data-drawn] svg").wait_for()
        lines = page.get_by_role("region", name="Differences").locator("tbody tr")
        found = {
            line.locator("td").first.inner_text(): line.locator("td").all_inner_texts()
            for line in lines.all()
        }
        assert len(found) == len(frame)
        for row in frame.to_dict("records"):
            assert found[row["candidate"]][4] == shown(row["difference"])
            assert found[row["candidate"]][1].startswith(row["change"])
            assert found[row["candidate"]][1].endswith("✓") == row["supported"]
        assert watch.errors == []


def test_runs_with_nothing_in_common_are_refused(runs: tuple[Path, Path], tmp_path: Path) -> None:
    def plain(**values: Any) -> Any:
        tokenizer = load_tokenizer(resolve_model("smollm2-135m"))
        return write_run(tmp_path / "other", tokenizer, **values)

    other = plain(benchmarks=(("one", 2), ("two", 2)))
    with pytest.raises(UsageError, match="belong together"):
        build_report(runs[0], tmp_path / "x.html", compare=other)
    assert not (tmp_path / "x.html").exists()
