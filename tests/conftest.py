"""What several test modules share."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from knockout import cli

Command = Callable[..., tuple[int, str, str]]


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
