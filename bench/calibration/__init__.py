"""Calibration study: do tests, intervals, freeze lists and racing keep what they promise?

    python -m bench calibration            # everything, on one core
    python -m bench calibration --quick    # a few minutes' worth less of everything, for the tests

Writes a CSV for each section into `bench/results/calibration`, and a README.md there whose claims and
numbers are made from them. `--only SECTION` makes some of them anew. With `--frequencies FILE.csv`
(columns `rock_freq` over 500 trajectories) racing also runs on the frequencies of a list of yours.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pandas as pd

from bench.calibration import many, races, single
from bench.calibration.claims import write_readme

__all__ = ["SECTIONS", "main"]

Row = single.Row
SECTIONS: dict[str, tuple[Callable[[int], Iterator[Row]], int, int]] = {
    # section: its function, its size in full and when quick
    "coverage": (single.coverage, 1000, 60),
    "fixed_problems": (single.fixed_problems, 1000, 60),
    "power": (single.power, 1500, 100),
    "equivalence": (single.equivalence, 2000, 100),
    "skew": (single.skew, 2000, 100),
    "discoveries": (many.discoveries, 100, 3),
    "references": (many.references, 60, 4),
    "luck": (many.luck, 60, 3),
    "freezing": (many.freezing, 24, 3),
    "confirmation": (many.confirmation, 100, 5),
    "peeking": (races.peeking, 24, 3),
    "racing": (races.racing, 30, 2),
}


def main(*arguments: str) -> None:
    """Runs the study."""
    parser = argparse.ArgumentParser(prog="bench calibration", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("bench/results/calibration"))
    parser.add_argument("--quick", action="store_true", help="small, for the tests")
    parser.add_argument("--only", action="append", choices=list(SECTIONS), help="default: all")
    parser.add_argument("--frequencies", type=Path, help="a list of yours, for racing")
    chosen = parser.parse_args(arguments)
    chosen.out.mkdir(parents=True, exist_ok=True)
    path = chosen.out / "settings.json"
    settings = json.loads(path.read_text()) if path.exists() else {}
    for name in chosen.only or SECTIONS:
        make, full, quick = SECTIONS[name]
        size = quick if chosen.quick else full
        started = time.process_time()
        rows = list(make(size))
        if name == "racing" and chosen.frequencies is not None:
            rates = pd.read_csv(chosen.frequencies)["rock_freq"].to_numpy(dtype=float) / 500
            rows += list(races.racing(size, rates))
        pd.DataFrame(rows).to_csv(chosen.out / f"{name}.csv", index=False, float_format="%.4f")
        spent = round(time.process_time() - started)
        settings[name] = {"size": size, "cpu_s": spent}
        path.write_text(json.dumps(settings, indent=1) + "\n")
        print(f"{name}: {len(rows)} rows, {spent} s", flush=True)
    write_readme(chosen.out)
