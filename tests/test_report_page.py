"""The report in a real browser, with texts that try to break out of it."""

from __future__ import annotations

import csv
import re
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import Watch, chromium
from synthetic import NASTY, write_run

from knockout.errors import UsageError
from knockout.ledger import NOT_ASKED, CellKey, CellRow, Ledger
from knockout.report.build import build_report
from knockout.report.source import open_ledger, read_run
from knockout.tokens.checkpoint import load_tokenizer, resolve_model


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(resolve_model("smollm2-135m"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
    out = write_run(
        tmp_path_factory.mktemp("report"),
        tokenizer,
        benchmarks=(("maths", 40), ("formats", 20)),
        longest=20_000,
    )
    build_report(out)
    return out


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as running:
        yield running


@pytest.fixture
def page(browser: Any, folder: Path) -> Iterator[Any]:
    context = browser.new_context(viewport={"width": 1200, "height": 800}, accept_downloads=True)
    page = context.new_page()
    watch = Watch(page)
    page.goto((folder / "report.html").as_uri())
    page.wait_for_selector("main h1")
    yield page
    assert watch.errors == []
    assert watch.requests == [(folder / "report.html").as_uri()]
    context.close()


def go(page: Any, address: str) -> None:
    page.evaluate("(address) => { location.hash = address; }", address)
    page.wait_for_selector(f"main[data-page='{address.split('/')[1].split('?')[0] or 'overview'}']")


def test_first_page_says_what_came_out_and_draws(page: Any, folder: Path) -> None:
    with open_ledger(folder) as ledger:
        rows = read_run(folder, ledger).rows
    pillars = sum(
        r["verdict"] == "strong_pillar" and r["benchmark"] == "maths" and r["group"] == "candidate"
        for r in rows
    )
    assert pillars >= 1
    assert re.search(r"\d pillars?: ", page.inner_text("h1"))
    assert pillars >= 1
    page.wait_for_selector(".plot[data-drawn] svg")
    assert page.locator(".plot").count() >= 5
    first = page.locator("tbody tr", has_text="maths").first.inner_text()
    assert re.search(r"candidates\s", first)


def test_search_goes_to_the_candidate(page: Any, folder: Path) -> None:
    with open_ledger(folder) as ledger:
        candidate = ledger.candidates[3]
    page.fill("input[list=names]", str(candidate.token_ids[0]))
    page.keyboard.press("Enter")
    page.wait_for_selector("main[data-page=candidate]")
    assert candidate.name in page.inner_text("h1")


def test_a_click_anywhere_in_a_row_goes_to_the_candidate(page: Any) -> None:
    figure = page.locator(".plot[data-drawn]").first
    figure.wait_for()
    last = figure.locator("svg .mark-rect path").last
    last.scroll_into_view_if_needed()
    row = last.bounding_box()
    page.mouse.move(row["x"] + 0.8 * row["width"], row["y"] + row["height"] / 2)
    page.wait_for_selector("#tip:not([hidden])")
    assert "Δ" in page.inner_text("#tip")
    page.mouse.click(row["x"] + 0.8 * row["width"], row["y"] + row["height"] / 2)
    page.wait_for_selector("main[data-page=candidate]")


def test_choices_are_in_the_address_and_come_back(page: Any, folder: Path) -> None:
    page.locator("#pick-benchmark").select_option("formats")
    page.locator("#pick-rule").select_option("nominal")
    assert "benchmark=formats" in page.url
    assert "rule=nominal" in page.url
    go(page, "#/table?benchmark=maths&sort=delta&down=1&q=a&columns=delta,won")
    assert page.locator("#pick-benchmark").input_value() == "maths"
    assert page.locator("th[aria-sort=descending]").inner_text().startswith("Δ")
    heads = page.locator("main th").all_inner_texts()
    assert [h.split()[0] for h in heads] == ["candidate", "verdict", "Δ", "won"]
    assert page.title().startswith("All rows · ")
    go(page, "#/health")
    page.go_back()
    page.wait_for_selector("main[data-page=table]")
    assert page.locator("th[aria-sort=descending]").count() == 1
    page.go_back()
    page.wait_for_selector("main[data-page=overview]")
    assert page.locator("#pick-benchmark").input_value() == "formats"
    page.evaluate("location.hash = '#/nonsense'")
    page.get_by_role("heading", name="There is no such page").wait_for()


def test_a_figure_and_its_data_can_be_saved(page: Any, tmp_path: Path) -> None:
    page.locator(".plot[data-drawn]").first.wait_for()
    for name, begins in (("SVG", "<svg"), ("CSV", "candidate,")):
        with page.expect_download() as download:
            page.get_by_role(
                "button", name=f"save {'as SVG' if name == 'SVG' else 'the data'}"
            ).first.click()
        download.value.save_as(tmp_path / name)
        assert (tmp_path / name).read_text(encoding="utf-8").startswith(begins)


def test_pinned_columns_stay_on_screen(page: Any) -> None:
    page.set_viewport_size({"width": 900, "height": 700})
    everything = "delta,ci_low,p_value,p_adjusted,key_nominal,key_fdr,benchmark,group,pass1_knockout,mde,lost,won"
    go(page, f"#/table?columns={everything}")
    box = page.locator("[role=region]")
    box.evaluate("(node) => { node.scrollLeft = node.scrollWidth; }")
    assert box.evaluate("(node) => node.scrollLeft") > 100
    for column in ("candidate", "verdict"):
        place = page.locator("main th", has_text=column).first.bounding_box()
        assert 0 <= place["x"] < 500


def test_print_has_every_row_and_whole_figures(page: Any) -> None:
    go(page, "#/table")
    page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    total = int(page.inner_text("[role=status]").split()[0])
    assert page.locator("main tbody tr:not(.filler)").count() == total
    go(page, "#/")
    page.locator(".plot[data-drawn]").first.wait_for()
    page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    page.wait_for_timeout(300)
    widths = page.locator(".plot svg").evaluate_all("(all) => all.map((svg) => svg.clientWidth)")
    assert max(widths) <= 640


def test_the_table_filters_sorts_and_downloads(page: Any, tmp_path: Path, folder: Path) -> None:
    go(page, "#/table")
    rows = page.locator("main tbody tr:not(.filler)")
    everything = rows.count()
    page.locator("#pick-benchmark").select_option("formats")
    page.locator("#pick-group").select_option("control")
    assert rows.count() == 3 < everything
    page.locator("#pick-group").select_option("")
    page.get_by_role("button", name="Δ", exact=True).click()
    assert page.locator("th[aria-sort=ascending]").inner_text().startswith("Δ")
    shown = [float(t.replace("−", "-")) for t in rows.locator("td:nth-child(3)").all_inner_texts()]
    assert shown == sorted(shown)
    page.get_by_role("button", name="Δ ↑", exact=True).click()
    shown = [float(t.replace("−", "-")) for t in rows.locator("td:nth-child(3)").all_inner_texts()]
    assert shown == sorted(shown, reverse=True)
    with page.expect_download() as download:
        page.click("#csv")
    download.value.save_as(tmp_path / "table.csv")
    with (tmp_path / "table.csv").open(encoding="utf-8", newline="") as file:
        table = list(csv.DictReader(file))
    with open_ledger(folder) as ledger:
        expected = {
            r["candidate"]: r for r in read_run(folder, ledger).rows if r["benchmark"] == "formats"
        }
    assert {row["candidate"] for row in table} == set(expected)
    for row in table:
        assert float(row["delta"]) == pytest.approx(expected[row["candidate"]]["delta"])
    page.fill("#search", "no such token")
    assert rows.count() == 0


def test_from_the_table_to_a_pair_by_keyboard(page: Any) -> None:
    go(page, "#/table")
    page.locator("main tbody a").first.focus()
    page.keyboard.press("Enter")
    page.wait_for_selector("main[data-page=candidate]")
    page.locator("#pick-grade").select_option("lost")
    link = page.locator("main a[href*=pair]").first
    assert "lost" in page.locator("main tr:has(a[href*=pair])").first.inner_text()
    link.focus()
    page.keyboard.press("Enter")
    page.wait_for_selector("main[data-page=pair]")
    assert page.locator(".side[data-side=baseline] .grade.right").count() == 1
    assert page.locator(".side[data-side=knockout] .grade.wrong").count() == 1
    page.locator(".side .tokens").first.focus()
    page.keyboard.press("Home")
    first = page.inner_text(".status")
    page.keyboard.press("ArrowRight")
    assert page.inner_text(".status") != first
    assert "id " in first


def test_hostile_texts_stay_texts(page: Any, folder: Path) -> None:
    with open_ledger(folder) as ledger:
        rows = ledger.query(
            "SELECT benchmark, problem, seed, MIN(f.candidate) FROM fork f"
            " JOIN cell c USING (benchmark, problem, seed) WHERE f.correct <> c.correct"
            " AND benchmark = 0 AND problem BETWEEN 1 AND 14 GROUP BY problem"
        )
    assert len(rows) > 7
    seen = ""
    for key in rows:
        go(page, "#/pair/" + "/".join(map(str, key)))
        page.wait_for_function(
            "(text) => document.querySelector('h1').innerText.includes(text)",
            arg=f"maths/{key[1]} ",
        )
        page.click("summary")
        seen += page.inner_text("main")
        assert page.locator("main script, main img").count() == 0
    assert NASTY[0] in seen
    assert NASTY[1] in seen
    assert "\\u{202e}" in seen
    assert "\\u{200b}" in seen
    assert "\u202e" not in seen
    assert "lone surrogate \\ud800" in seen


def test_what_is_copied_has_its_spaces_and_whole_characters(page: Any, folder: Path) -> None:
    with open_ledger(folder) as ledger:
        run = read_run(folder, ledger)
        forks = run.forks
        # Baselines hold the nasty texts in turn; the parrot is several byte tokens.
        row = next(i for i in range(len(forks.step)) if forks.problem[i] + forks.seed[i] == 6)
        key = (*forks.key(row), int(forks.candidate[row]))
    go(page, "#/pair/" + "/".join(map(str, key)))
    page.wait_for_selector(".side .t")
    shown = page.evaluate(
        "[...document.querySelectorAll('.tokens')].map((n) => n.textContent).join('')"
    )
    assert "🦜" in shown
    assert "·" not in shown.replace(" · ", "")
    assert re.search(r"\w \w", shown)


def test_neighbours_of_a_pair_are_one_click_away(page: Any) -> None:
    go(page, "#/candidate/0")
    page.locator("main a[href*=pair]").first.click()
    page.wait_for_selector("main[data-page=pair]")
    first = page.inner_text("h1")
    page.get_by_role("link", name="next →").click()
    page.wait_for_function("(text) => document.querySelector('h1').innerText !== text", arg=first)
    page.get_by_role("link", name="← previous").click()
    page.wait_for_function("(text) => document.querySelector('h1').innerText === text", arg=first)
    assert "come again in the knockout" in page.inner_text("main")


def test_a_very_long_trajectory_opens_quickly(page: Any, folder: Path) -> None:
    with open_ledger(folder) as ledger:
        candidate, step = ledger.query(
            "SELECT candidate, step FROM fork WHERE benchmark = 0 AND problem = 0 AND seed = 0"
            " ORDER BY step LIMIT 1"
        )[0]
    started = time.monotonic()
    go(page, f"#/pair/0/0/0/{candidate}")
    page.wait_for_selector(".side .t")
    assert time.monotonic() - started < 10
    assert page.locator(".t").count() < 5_000
    more = page.get_by_role("button", name="show more").first
    before = page.locator(".t").count()
    more.click()
    assert page.locator(".t").count() > before
    assert f"step {step}" in page.inner_text(".forkline").replace("\u2009", "")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_never_scrolls_sideways(browser: Any, folder: Path, scheme: str) -> None:
    with open_ledger(folder) as ledger:
        key = ledger.query(
            "SELECT benchmark, problem, seed, f.candidate FROM fork f"
            " JOIN cell c USING (benchmark, problem, seed) WHERE f.correct < c.correct LIMIT 1"
        )[0]
    context = browser.new_context(viewport={"width": 360, "height": 740}, color_scheme=scheme)
    page = context.new_page()
    watch = Watch(page)
    page.goto((folder / "report.html").as_uri())
    page.wait_for_selector("main h1")
    assert page.evaluate("document.documentElement.dataset.theme") == scheme
    for address in (
        "#/",
        "#/table",
        "#/health",
        "#/candidate/0",
        "#/pair/" + "/".join(map(str, key)),
    ):
        go(page, address)
        page.wait_for_timeout(200)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), address
    assert page.locator(".side").count() == 2
    assert watch.errors == []
    context.close()


def test_text_has_enough_contrast(browser: Any, folder: Path) -> None:
    """WCAG AA: 4.5 to 1 for every colour that text has, on both backgrounds of both themes."""
    names = (
        "ink",
        "dim",
        "link",
        "strong_pillar",
        "strong_stumbling_block",
        "equivalent",
        "undetermined",
    )
    for scheme in ("light", "dark"):
        context = browser.new_context(color_scheme=scheme)
        page = context.new_page()
        page.goto((folder / "report.html").as_uri())
        page.wait_for_selector("main h1")
        value = (
            "(n) => getComputedStyle(document.documentElement).getPropertyValue('--' + n).trim()"
        )
        for name in names:
            for under in ("paper", "raised"):
                pair = (page.evaluate(value, name), page.evaluate(value, under))
                assert contrast(*pair) >= 4.5, (scheme, name, under)
        context.close()


def contrast(one: str, other: str) -> float:
    def light(color: str) -> float:
        digits = color.lstrip("#")
        if len(digits) == 3:
            digits = "".join(2 * d for d in digits)
        parts = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((light(one), light(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_an_unfinished_run_says_so(browser: Any, tokenizer: Any, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "half", tokenizer, complete=False)
    build_report(folder)
    page = browser.new_page()
    watch = Watch(page)
    page.goto((folder / "report.html").as_uri())
    page.wait_for_selector("main h1")
    assert "not finished: 20 of 40 cells" in page.inner_text("main")
    assert watch.errors == []
    page.close()


def test_a_run_with_failed_cells_says_that_and_no_more(
    browser: Any, tokenizer: Any, tmp_path: Path
) -> None:
    """Neither a race nor rounds of seeds are why these candidates have fewer results."""
    folder = write_run(tmp_path / "failed", tokenizer, benchmarks=(("maths", 6),), complete=False)
    with Ledger.open(folder / "run.db", write=True) as ledger:
        nothing = np.zeros(0, dtype=np.int32)
        steps = np.full(len(ledger.candidates), NOT_ASKED, dtype=np.int32)
        for p, s in product((3, 4, 5), range(2)):
            key = CellKey(0, p, s)
            cell = CellRow(key, 1, nothing, "error", None, "ungraded", None, "no memory", steps)
            ledger.commit([cell], [])
    build_report(folder)
    page = browser.new_page()
    watch = Watch(page)
    texts = {}
    for address in ("#/", "#/table", "#/health", "#/candidate/0"):
        page.goto((folder / "report.html").as_uri() + address)
        page.wait_for_selector("main h1")
        texts[address] = page.inner_text("main")
    assert "the engine failed on 6 baselines" in texts["#/health"]
    assert re.search(r"failed\s+6\s+of \d+ requests", texts["#/health"])
    everything = "\n".join(text.split("config.yaml")[0] for text in texts.values())
    for wrong in (
        r"\brac(e|ing)\b",
        "full re-runs? of 0",
        "0, – as many",
        r"\b(NaN|undefined|null%)\b",
    ):
        found = re.search(wrong, everything)
        assert found is None, found
    assert watch.errors == []
    page.close()


def test_a_run_without_cells_has_a_report(browser: Any, tokenizer: Any, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "none", tokenizer, benchmarks=(("one", 1),), complete=False)
    build_report(folder)
    page = browser.new_page()
    watch = Watch(page)
    for address in ("", "#/table", "#/health", "#/candidate/0"):
        page.goto((folder / "report.html").as_uri() + address)
        page.wait_for_selector("main h1")
    assert watch.errors == []
    page.close()


def test_equal_ledgers_make_equal_files(folder: Path, tmp_path: Path) -> None:
    build_report(folder, tmp_path / "again.html")
    assert (tmp_path / "again.html").read_bytes() == (folder / "report.html").read_bytes()


def test_no_run_is_said_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no run here"):
        build_report(tmp_path)


def test_a_large_run_takes_seconds_and_stays_below_five_megabytes(
    tokenizer: Any, tmp_path: Path
) -> None:
    """The whole size, 1,131 problems, takes about four times as long; writing it takes a minute."""
    folder = write_run(
        tmp_path / "large", tokenizer,
        benchmarks=(("math500", 125), ("aime24", 8), ("aime25", 8), ("hmmt25", 8), ("ifeval", 135)),
        n_seeds=4, n_candidates=100, n_controls=100, length=(150, 500), share=0.15,
    )  # fmt: skip
    started = time.process_time()
    made = build_report(folder)
    seconds = time.process_time() - started  # other processes do not count
    assert made["forks"] > 30_000
    assert made["bytes"] < 5_000_000
    assert seconds < 10
