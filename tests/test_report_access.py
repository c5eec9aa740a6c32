"""Every page under axe, in light and dark, wide and narrow; and from page to page by keyboard alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import chromium
from synthetic import write_run

from knockout.ledger import Ledger
from knockout.report.build import build_report
from knockout.tokens.checkpoint import load_tokenizer, resolve_model

axe = pytest.importorskip("axe_playwright_python.sync_playwright")


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """The report's address, and that of a pair whose grade changed."""
    tokenizer = load_tokenizer(resolve_model("smollm2-135m"))
    folder = tmp_path_factory.mktemp("access")
    sizes = (("maths", 30), ("formats", 20))
    a = write_run(folder / "a", tokenizer, benchmarks=sizes, pairs=6)
    b = write_run(folder / "b", tokenizer, benchmarks=sizes, pairs=6, seed=3)
    build_report(a, compare=b)
    with Ledger.open(a / "run.db") as ledger:
        key = ledger.query(
            "SELECT benchmark, problem, seed, f.candidate FROM fork f"
            " JOIN cell c USING (benchmark, problem, seed) WHERE f.correct < c.correct LIMIT 1"
        )[0]
    return (Path(a) / "report.html").as_uri(), "#/pair/" + "/".join(map(str, key))


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as running:
        yield running


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 1280), ("dark", 360)])
def test_axe_finds_nothing(browser: Any, report: tuple[str, str], scheme: str, width: int) -> None:
    address, pair = report
    context = browser.new_context(
        viewport={"width": width, "height": 900}, color_scheme=scheme, bypass_csp=True
    )
    page = context.new_page()
    page.goto(address)
    page.wait_for_selector("main h1")
    found = []
    for part in ("#/", "#/table", "#/health", "#/compare", "#/candidate/0", pair, "#/nonsense"):
        page.evaluate("(address) => { location.hash = address; }", part)
        name = part.split("/")[1] or "overview"
        page.wait_for_selector(f"main[data-page='{name}']")
        page.evaluate("for (const box of document.querySelectorAll('details')) box.open = true;")
        page.wait_for_timeout(300)
        answer = axe.Axe().run(page).response
        assert len(answer["passes"]) > 15
        found += [
            (part, rule["id"], node["html"][:200], node["any"] and node["any"][0]["message"])
            for rule in answer["violations"]
            for node in rule["nodes"][:3]
        ]
    context.close()
    assert found == []


def test_from_the_overview_to_a_token_by_keyboard_alone(
    browser: Any, report: tuple[str, str]
) -> None:
    page = browser.new_page()
    page.goto(report[0])
    page.wait_for_selector("main h1")

    def tab_to(selector: str, most: int = 80) -> None:
        for _ in range(most):
            page.keyboard.press("Tab")
            if page.evaluate("(s) => document.activeElement.matches(s)", selector):
                outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
                assert outline != "none", selector
                return
        raise AssertionError(f"{selector} is not reached")

    tab_to(".skip")
    tab_to("nav a[href='#/table']")
    page.keyboard.press("Enter")
    page.wait_for_selector("main[data-page=table]")
    assert page.evaluate("document.activeElement.id") == "main"
    tab_to("#sort-delta")
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "sort-delta"
    assert page.locator("th[aria-sort=ascending]").inner_text().startswith("Δ")
    tab_to("tbody a")
    page.keyboard.press("Enter")
    page.wait_for_selector("main[data-page=candidate]")
    tab_to("#pick-grade")
    tab_to("a[href*=pair]")
    page.keyboard.press("Enter")
    page.wait_for_selector("main[data-page=pair]")
    tab_to("summary")
    page.keyboard.press("Enter")
    assert page.locator("details[open]").count() == 1
    tab_to(".side .tokens")
    page.keyboard.press("End")
    assert "id " in page.inner_text(".status")
    page.go_back()
    page.wait_for_selector("main[data-page=candidate]")
    page.close()
