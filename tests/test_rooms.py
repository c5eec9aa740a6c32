"""The rooms of the package and their one direction of imports."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import knockout

PACKAGE = Path(knockout.__file__).parent

# Top to bottom. A module imports from its own floor and from the floors below it.
FLOORS = (
    ("cli", "__main__"),
    ("api",),
    ("report", "view", "doctor"),
    ("integrations",),
    ("mining", "training", "geometry"),
    ("sweep",),
    ("verdicts",),
    ("ledger",),
    ("benchmarks",),
    ("grading",),
    ("engines",),
    ("processors",),
    ("tokens",),
    ("config", "figures"),
    ("method", "stats", "planted"),
    ("files", "registry"),
    ("errors", "_version"),
)
FLOOR = {room: height for height, rooms in enumerate(reversed(FLOORS)) for room in rooms}
SQL = re.compile(r"\s*(SELECT|INSERT INTO|UPDATE \w+ SET|DELETE FROM|PRAGMA|CREATE TABLE)\b")
ENTRANCE = {"__init__"}  # `import knockout` hands out the names of `api`, when they are asked for


def test_every_room_has_a_floor() -> None:
    found = {
        path.stem if path.is_file() else path.name
        for path in PACKAGE.iterdir()
        if path.suffix == ".py" or (path / "__init__.py").is_file()
    }
    assert found - ENTRANCE == set(FLOOR)


def test_imports_run_down_only() -> None:
    climbing = [
        f"{module} imports {target}"
        for module, target in _imports()
        if FLOOR[target.split(".")[1]] > FLOOR[module.split(".")[1]]
    ]
    assert not climbing


def test_sql_is_written_in_the_ledger_only() -> None:
    # The floor below the ledger and every floor above it ask the ledger, not SQLite.
    speaking = [
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if path.relative_to(PACKAGE).parts[0] != "ledger" and _names_sqlite(path)
    ]
    assert not speaking


def _names_sqlite(path: Path) -> bool:
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import) and any(name.name == "sqlite3" for name in node.names):
            return True
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and SQL.match(node.value):
            return True
    return False


def _imports() -> Iterator[tuple[str, str]]:
    """Every import of a module of ours by one of ours, also inside functions."""
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        if parts[1] in ENTRANCE or parts[1] == "tasks":
            continue
        module = ".".join(parts)
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom) and not node.level and node.module:
                names = [f"{node.module}.{name.name}" for name in node.names]
            elif isinstance(node, ast.Import):
                names = [name.name for name in node.names]
            else:
                continue
            for name in names:
                steps = name.split(".")
                if steps[0] == "knockout" and len(steps) > 1 and steps[1] in FLOOR:
                    yield module, name
