"""The calibration study: its command, and that the committed results bear every claim."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.calibration import SECTIONS, main
from bench.calibration.claims import CLAIMS, check, write_readme

RESULTS = Path(__file__).parents[1] / "bench" / "results" / "calibration"


def test_every_claim_holds_in_the_committed_results() -> None:
    rows = check(RESULTS)
    assert len(rows) == len(CLAIMS)
    assert [row["claim"] for row in rows if not row["holds"]] == []


def test_the_committed_readme_is_made_from_the_committed_files(tmp_path: Path) -> None:
    for path in RESULTS.glob("*.csv"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    write_readme(tmp_path)
    assert (tmp_path / "README.md").read_text() == (RESULTS / "README.md").read_text()


@pytest.mark.parametrize("section", ["coverage", "equivalence", "discoveries", "racing"])
def test_a_section_runs_and_writes_its_file(tmp_path: Path, section: str) -> None:
    main("--quick", "--only", section, "--out", str(tmp_path))
    header = (tmp_path / f"{section}.csv").read_text().splitlines()[0]
    assert header == (RESULTS / f"{section}.csv").read_text().splitlines()[0]
    assert (tmp_path / "README.md").exists()
    assert section in SECTIONS
