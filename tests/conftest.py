"""What several test modules share."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from knockout import cli

Command = Callable[..., tuple[int, str, str]]

LONG = ("faults", "extend", "calibration", "grading_ifeval", "grading_maths", "docs")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the modules that take minutes first, so that none of them is left alone at the end."""
    first = {item.path for item in items if item.get_closest_marker("engine")}
    first |= {item.path for item in items if item.path.stem.removeprefix("test_") in LONG}
    items.sort(key=lambda item: item.path not in first)


@pytest.fixture
def knockout(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs the command line in this process; returns exit status, stdout and stderr."""

    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["knockout", *map(str, arguments)])
        capsys.readouterr()
        code = 0
        try:
            cli.main()
        except SystemExit as error:
            code = int(error.code or 0)
        out, err = capsys.readouterr()
        return code, out, err

    return call
