"""The report of a large run in a real Chromium: first view, sorting, searching, all rows of the forest.

A synthetic run of 200 candidates, 1,131 problems and 3 seeds. Times are processor time of the page's
main thread (`ThreadTime` of the DevTools protocol), which other programs on the machine change little; the
wall clock is given beside it. Each step is measured five times, in a fresh page where it says so.

    python -m bench report [--scale 1.0]
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.machine import write
from bench.verdict_speed import N_CANDIDATES, SIZES, a_plan, write_ledger
from knockout.config.file import dump_sweep
from knockout.config.sweep import Sweep
from knockout.report.build import build_report

N_SEEDS = 3
TIMES = 5
LIMITS = {"first_view": 1.5, "sort": 0.3, "search_a_key": 0.3, "all_rows": 0.3}
"""Seconds of processor time that each may take."""
_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


class Page:
    """A page whose main thread's processor time can be read."""

    def __init__(self, browser: Any, address: str) -> None:
        self.context = browser.new_context(viewport={"width": 1440, "height": 900})
        self.page = self.context.new_page()
        self.tools = self.context.new_cdp_session(self.page)
        self.tools.send("Performance.enable", {"timeDomain": "threadTicks"})
        self.address = address

    def spent(self) -> float:
        """Processor time of the main thread so far, s."""
        metrics = self.tools.send("Performance.getMetrics")["metrics"]
        return float(next(m["value"] for m in metrics if m["name"] == "ThreadTime"))

    def cost(self, do: Callable[[Any], None]) -> tuple[float, float]:
        """Processor and wall time of an action, until the page has painted and is idle again."""
        before, began = self.spent(), time.perf_counter()
        do(self.page)
        # Two frames and an idle turn: what the action asked for is drawn.
        self.page.evaluate(
            "() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() =>"
            " requestIdleCallback(done))))"
        )
        wall = time.perf_counter() - began
        return self.spent() - before, wall


def first_view(page: Any, address: str) -> None:
    """From nothing to the headline and every figure drawn."""
    page.goto(address)
    page.wait_for_selector("main h1")
    page.wait_for_function(
        "() => { const all = [...document.querySelectorAll('.plot')];"
        " return all.length && all.every((plot) => plot.dataset.drawn"
        " || plot.getBoundingClientRect().top > 2 * innerHeight); }"
    )


def _key(page: Any, text: str) -> None:
    page.evaluate(
        "(text) => { const box = document.getElementById('search'); box.value = text;"
        " box.dispatchEvent(new Event('input', { bubbles: true })); }",
        text,
    )


def _all(page: Any) -> None:
    page.evaluate("delete document.querySelector('.plot').dataset.drawn")
    page.locator("#pick-rows").select_option("all")
    # A label for every row is drawn.
    page.wait_for_function(
        "(n) => document.querySelectorAll('.plot')[0].querySelectorAll('.mark-symbol path').length >= n",
        arg=N_CANDIDATES,
    )


def measure(address: str, browser: Any) -> dict[str, list[tuple[float, float]]]:
    """Every step, several times."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in LIMITS}
    for turn in range(TIMES):
        one = Page(browser, address)
        found["first_view"].append(one.cost(lambda page: first_view(page, address)))
        found["all_rows"].append(one.cost(_all))
        one.page.evaluate("location.hash = '#/table'")
        one.page.wait_for_selector("main[data-page=table] tbody a")
        for column in ("delta", "candidate"):
            found["sort"].append(one.cost(lambda page, c=column: page.click(f"#sort-{c}")))
        for text in ("t", "t1", "t11")[: 1 + turn % 3]:
            found["search_a_key"].append(one.cost(lambda page, t=text: _key(page, t)))
        one.context.close()
    return found


def main(*arguments: str) -> None:
    """Makes the run, its report, and measures it."""
    from playwright.sync_api import sync_playwright

    parser = argparse.ArgumentParser(prog="python -m bench report")
    parser.add_argument("--scale", type=float, default=1.0, help="Of the number of problems.")
    given = parser.parse_args(arguments)
    path = next((found for name in _NAMES if (found := shutil.which(name))), None)
    if path is None:
        raise SystemExit("no Chromium found; `make browser` installs it as root")
    plan = a_plan(given.scale, N_SEEDS)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        n_forks = write_ledger(plan, folder)
        sweep = Sweep.model_validate(
            {
                "model": "smollm2-135m",
                "benchmarks": list(SIZES),
                "seeds": N_SEEDS,
                "candidates": {"ids": list(range(N_CANDIDATES))},
            }
        )
        (folder / "config.yaml").write_text(dump_sweep(sweep), encoding="utf-8")
        began, worked = time.perf_counter(), time.process_time()
        made = build_report(folder)
        built = {"wall_s": time.perf_counter() - began, "cpu_s": time.process_time() - worked}
        with sync_playwright() as driver:
            browser = driver.chromium.launch(
                executable_path=path, args=["--no-sandbox", "--headless", "--disable-gpu"]
            )
            times = measure(made["path"].as_uri(), browser)
            browser.close()
    steps = {
        step: {
            "cpu_s": round(statistics.median(cpu for cpu, _ in values), 3),
            "most_cpu_s": round(max(cpu for cpu, _ in values), 3),
            "wall_s": round(statistics.median(wall for _, wall in values), 3),
            "limit_cpu_s": LIMITS[step],
            "times": len(values),
        }
        for step, values in times.items()
    }
    for step, row in steps.items():
        print(f"{step}: {row['cpu_s']} s of processor time (limit {row['limit_cpu_s']})")
    write(
        "report",
        {
            "candidates": N_CANDIDATES,
            "problems": sum(len(b.problems) for b in plan.benchmarks),
            "seeds": N_SEEDS,
            "forks": n_forks,
            "report_mb": round(made["bytes"] / 1e6, 2),
            "built": {key: round(value, 1) for key, value in built.items()},
            "steps": steps,
        },
    )


if __name__ == "__main__":
    import sys

    main(*sys.argv[1:])
