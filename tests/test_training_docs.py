"""The pages on training: their code runs, or at least is Python that names what exists."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"
PAGES = [DOCS / "training.md", DOCS / "extending.md", *sorted((DOCS / "recipes").glob("*.md"))]
BLOCK = re.compile(r"(<!-- not run[^>]*-->\n)?```python\n(.*?)```", re.DOTALL)


def test_the_pages_have_code() -> None:
    assert len(PAGES) == 5
    assert all(BLOCK.search(page.read_text(encoding="utf-8")) for page in PAGES)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_runs_or_names_what_exists(page: Path) -> None:
    names: dict[str, object] = {}
    for skipped, code in BLOCK.findall(page.read_text(encoding="utf-8")):
        tree = ast.parse(code)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("knockout"):
                if node.module == "knockout.training.trl":
                    continue  # importing TRL is another test's
                module = importlib.import_module(str(node.module))
                assert all(hasattr(module, alias.name) for alias in node.names)
        if not skipped:
            exec(compile(tree, str(page), "exec"), names)
