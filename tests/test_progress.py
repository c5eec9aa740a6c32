from __future__ import annotations

import os
import re
import subprocess
import sys

from knockout.sweep.jobs import Snapshot, Standing
from knockout.sweep.progress import Display


def snapshot(cells: int, forks: int, **rest: object) -> Snapshot:
    base = {"waiting": 0, "running": 0, "grading": 0, "tokens": 0}
    return Snapshot(cells=cells, forks=forks, **{**base, **rest})  # type: ignore[arg-type]


def test_time_left_counts_cells_to_come_and_forks_under_way() -> None:
    display = Display(n_cells=12, n_done=2)
    display.line(snapshot(2, 5), 0.1)  # what earlier sessions did
    line = display.line(snapshot(7, 10, tokens=1000, waiting=3, running=4), elapsed=10.0)
    # 5 cells to come at 1000 / 5 tokens, and 5 of 10 requests' worth: 1500 tokens at 100 a second.
    assert "100 tokens/s" in line
    assert "15 s left" in line
    assert line.startswith("7/12, 10 forks, 3 waiting, 4 running")


def test_nothing_is_foretold_before_the_first_cell_and_after_the_last() -> None:
    display = Display(n_cells=3, n_done=0)
    assert "left" not in display.line(snapshot(0, 0, tokens=50, running=3), 1.0)
    assert "left" not in display.line(snapshot(3, 4, tokens=500), 1.0)


def test_leading_candidates_are_those_that_lost_most_net_of_what_they_won() -> None:
    standing = Standing(['" the"', '"7"', "marks", '"x"'])
    for candidate, before, after in [(0, 1, 0), (0, 0, 1), (1, 1, 0), (1, 1, 0), (2, 1, 0)]:
        standing.count(candidate, before, after)
    standing.count(3, None, 0)
    standing.count(2, 1, 0, n=4)
    assert standing.leading() == (("marks", 5), ('"7"', 2))
    line = Display(9, 0).line(snapshot(1, 1, tokens=10, leading=standing.leading()), 1.0)
    assert line.endswith('answers lost: marks −5, "7" −2')


def test_a_terminal_of_80_columns_shows_who_leads() -> None:
    code = (
        "import time\n"
        "from knockout.sweep.jobs import Snapshot\n"
        "from knockout.sweep.progress import Display\n"
        "with Display(3393, 0) as display:\n"
        "    display.observe(Snapshot(1200, 84000, 310, 64, 3, 900000,"
        " (('\"[red] Wait\"', 31), ('\" the\"', 12))))\n"
        "    time.sleep(0.6)\n"
    )
    ours, theirs = os.openpty()
    environment = {**os.environ, "COLUMNS": "80", "TERM": "xterm", "NO_COLOR": "1"}
    child = subprocess.Popen([sys.executable, "-c", code], stderr=theirs, env=environment)
    os.close(theirs)
    shown = b""
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        shown += part
    os.close(ours)
    assert child.wait(60) == 0
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "\n", shown.decode()).replace("\r", "\n").split("\n")
    assert max(map(len, lines)) <= 80
    whole = " ".join(" ".join(lines).split())
    assert "1200/3393" in whole
    assert "[red] Wait" in whole
    assert '" the" −12' in whole
