"""The tutorial does what it says: its blocks run, in order, in an empty folder."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")


def blocks(page: Path) -> list[tuple[str, str]]:
    return _BLOCK.findall(page.read_text())


@pytest.mark.engine
@pytest.mark.timeout(600)
def test_the_tutorial_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    binaries = str(Path(sys.executable).parent)
    monkeypatch.setenv("PATH", f"{binaries}{os.pathsep}{os.environ['PATH']}")
    names: dict[str, object] = {}
    ran = {"yaml": 0, "bash": 0, "python": 0}
    for language, text in blocks(DOCS / "tutorial.md"):
        ran[language] += 1
        if language == "yaml":
            (tmp_path / text.split()[1]).write_text(text)
        elif language == "bash":
            done = subprocess.run(
                ["bash", "-euc", text], capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
        else:
            exec(compile(text, "docs/tutorial.md", "exec"), names)
    assert min(ran.values()) >= 1
    assert (tmp_path / "neutral.json").is_file()
    assert (tmp_path / "lm-eval" / "baseline").is_dir()


@pytest.mark.parametrize(
    "page", sorted(DOCS.rglob("*.md")), ids=lambda page: str(page.relative_to(DOCS))
)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    links = [link for link in _LINK.findall(page.read_text()) if "://" not in link]
    for link in links:
        assert (page.parent / link).exists(), f"{page.name} links to {link}"


def test_sweeps_in_the_how_to_pages_are_valid() -> None:
    """Blocks that name a model and benchmarks are whole sweep files."""
    from knockout.config.file import parse_sweep

    found = 0
    for page in sorted((DOCS / "how-to").glob("*.md")):
        for language, text in blocks(page):
            if language == "yaml":
                whole = text if "model:" in text else f"model: m\n{text}"
                whole += "" if "benchmarks:" in text else "benchmarks: [b]\n"
                whole += "" if "candidates:" in text else "candidates: {ids: [1]}\n"
                parse_sweep(whole, page.name, ROOT)
                found += 1
    assert found >= 4
