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


EXPLAINED = ("this is look 2 at the run", "undetermined")  # warnings that the tutorial speaks of


@pytest.mark.timeout(600)
def test_the_tutorial_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    binaries = str(Path(sys.executable).parent)
    monkeypatch.setenv("PATH", f"{binaries}{os.pathsep}{os.environ['PATH']}")
    names: dict[str, object] = {}
    ran = {"yaml": 0, "bash": 0, "python": 0}
    warned: list[str] = []
    printed = ""
    for language, text in blocks(DOCS / "tutorial.md"):
        if language == "text":
            continue
        ran[language] += 1
        if language == "yaml":
            (tmp_path / text.split()[1]).write_text(text)
        elif language == "bash":
            done = subprocess.run(
                ["bash", "-euc", text], capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
            warned += [line for line in done.stderr.splitlines() if "warning" in line.lower()]
            printed += done.stdout
        else:
            exec(compile(text, "docs/tutorial.md", "exec"), names)
    assert min(ran.values()) >= 1
    assert (tmp_path / "neutral.json").is_file()
    page = (DOCS / "tutorial.md").read_text()
    assert all(any(known in line and known in page for known in EXPLAINED) for line in warned)
    shown = next(text for language, text in blocks(DOCS / "tutorial.md") if language == "text")
    header, *rows = [line for line in shown.splitlines() if "  " in line]
    assert header in printed  # the table on the page is the one that is printed, up to rounding
    for row in rows:
        name, verdict = row.split("  ")[0], row.split()[-1]
        assert any(x.startswith(name) and x.split()[-1] == verdict for x in printed.splitlines())
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


def test_every_page_is_linked_from_the_readme() -> None:
    readme = (ROOT / "README.md").read_text()
    linked = {(ROOT / link).resolve() for link in _LINK.findall(readme) if "://" not in link}
    assert not [str(page.relative_to(ROOT)) for page in DOCS.rglob("*.md") if page not in linked]
    assert all(path.exists() for path in linked)


def test_the_example_is_the_tutorials_sweep() -> None:
    from knockout.config.file import parse_sweep

    (text,) = [text for language, text in blocks(DOCS / "tutorial.md") if language == "yaml"]
    example = (ROOT / "examples" / "planted.yaml").read_text()
    assert parse_sweep(example, "a", ROOT) == parse_sweep(text, "b", ROOT)
