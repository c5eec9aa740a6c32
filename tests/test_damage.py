"""Every file of a finished run, damaged in turn: each command reads it, or says in a line what is wrong."""

from __future__ import annotations

import random
import shutil
import warnings
from contextlib import chdir
from pathlib import Path

import pytest
import yaml

from knockout.cli import app
from knockout.errors import KnockoutError

SETTINGS = {
    "model": "planted",
    "engine": {"kind": "transformers", "max_num_seqs": 64},
    "benchmarks": ["knockout_planted"],
    "limit": 4,
    "seeds": 1,
    "sampling": {"temperature": 1.0, "max_tokens": 32},
    "candidates": {"strings": ["wait", "well"]},
    "audit": 0.0,
}
COMMANDS = {
    "verdicts": "verdicts RUN --json",
    "status": "status RUN --check --json",
    "cite": "cite RUN",
    "list": "list . --json",
    "export": "export RUN --top 1 --format csv",
    "compare": "compare RUN WHOLE --json",
    "merge": "merge RUN WHOLE --out joined",
    "regrade": "regrade RUN --json",
    "report": "report RUN --out page.html",
    "export-run": "export-run RUN --out archive",
    "run": "run SWEEP --out RUN --json",
}
QUICK = ("verdicts", "status", "export", "compare", "cite", "report")
BITS = ("bits 1", "bits 2", "bits 3")
KINDS = ("none", "empty", "half", "text", "utf-16", "blanks", *BITS, "gone")


def damage(path: Path, kind: str) -> None:
    raw, dice = path.read_bytes(), random.Random(f"{path.name} {kind}")
    if kind == "gone":
        path.unlink()
    if kind in ("gone", "none"):
        return
    if kind == "empty":
        raw = b""
    elif kind == "half":
        raw = raw[: len(raw) // 2]
    elif kind == "text":
        raw = b"not what was here\n"
    elif kind == "utf-16":
        raw = raw[:4096].decode("latin-1").encode("utf-16")
    elif kind == "blanks":
        at = dice.randrange(max(len(raw), 1))
        raw = raw[:at] + bytes(min(512, len(raw) - at)) + raw[at + 512 :]
    else:
        changed = bytearray(raw)
        for _ in range(64):
            if changed:
                changed[dice.randrange(len(changed))] ^= 1 << dice.randrange(8)
        raw = bytes(changed)
    path.write_bytes(raw)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a sweep and its finished run."""
    folder = tmp_path_factory.mktemp("home")
    (folder / "sweep.yaml").write_text(yaml.safe_dump(SETTINGS))
    assert said(folder, "run", "run.db") == ""
    return folder


def attempt(home: Path, folder: Path, name: str, kind: str, command: str) -> str:
    """What a command says of a copy of the run in which one file is damaged."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(home, folder)
    shutil.copytree(folder / "run", folder / "whole")
    damage(folder / "run" / name, kind)
    return said(folder, command, name)


def said(folder: Path, command: str, name: str) -> str:
    """A command's message, empty if it went well; fails if the message is not as it ought to be."""
    words = {"RUN": "run", "WHOLE": "whole", "SWEEP": "sweep.yaml"}
    line = [words.get(word, word) for word in COMMANDS[command].split()]
    with chdir(folder), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            assert not app(line, standalone_mode=False)
        except KnockoutError as error:
            text = str(error)
            assert "run/" in text or name in text, f"names no file: {text}"
            # `--check` names rows, one a line; any other message is one line.
            assert text.count("\n") <= 12, text
            assert len(text) <= 2000, text[:300]
            return text
    return ""


@pytest.mark.parametrize("command", COMMANDS)
def test_a_damaged_ledger_is_named(home: Path, tmp_path: Path, command: str) -> None:
    assert attempt(home, tmp_path / "f", "run.db", "none", command) == ""
    kinds = KINDS if command in QUICK else ("empty", "half", "gone")
    told = {kind: attempt(home, tmp_path / "f", "run.db", kind, command) for kind in kinds}
    for kind in ("empty", "half", "text", "utf-16"):
        assert command == "list" or told.get(kind, "run/run.db").startswith("run/run.db"), told
    if command == "status":  # `--check` finds flipped bits that touch a row
        assert any(told[kind] for kind in BITS), told
    if command == "run":  # never anew where a ledger lies
        assert told["empty"]
        assert told["half"]


@pytest.mark.parametrize("name", ["config.yaml", "summary.json", "verdicts.json", "run.log"])
@pytest.mark.parametrize("command", ["verdicts", "export", "report"])
def test_any_other_damaged_file_is_named_or_not_needed(
    home: Path, tmp_path: Path, name: str, command: str
) -> None:
    told = {kind: attempt(home, tmp_path / "f", name, kind, command) for kind in KINDS}
    if name == "config.yaml" and command != "export":
        assert all("config.yaml" in told[kind] for kind in ("empty", "text", "gone")), told
    if name != "config.yaml":  # results are computed from the ledger, not from what was written
        assert not any(told.values()), told
