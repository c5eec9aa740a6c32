"""The commands around a first sweep, and how commands end."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import typer
import yaml
from conftest import Command

from knockout.cli import _COMMANDS, app
from knockout.config.file import load_sweep
from knockout.config.page import SCHEMA_FILE, sweep_schema
from knockout.files import write_text
from knockout.ledger import Ledger, totals
from knockout.ledger.check import faults

ROOT = Path(__file__).parents[1]


def test_init_writes_a_sweep_file_that_loads(tmp_path: Path, knockout: Command) -> None:
    path = tmp_path / "s.yaml"
    code, _, told = knockout("init", path, "--limit", "4", "--token", " the", "--seeds", "2")
    assert code == 0, told
    sweep = load_sweep(path, ["seeds=5"])
    assert (sweep.limit, sweep.seeds, sweep.candidates.strings) == (4, 5, (" the",))
    jsonschema.validate(yaml.safe_load(path.read_text()), sweep_schema())
    code, _, told = knockout("init", path)
    assert code == 2
    assert "is there already" in told


def test_what_init_wrote_can_be_moved_to_another_machine(tmp_path: Path, knockout: Command) -> None:
    home = tmp_path / "here"
    home.mkdir()
    (home / "rocks.json").write_text("[5, 6]")
    path = home / "s.yaml"
    code, _, told = knockout("init", path, "--candidates", home / "rocks.json")
    assert code == 0, told
    text = path.read_text()
    assert not any(part in text for part in (str(tmp_path), str(SCHEMA_FILE.parent)))
    moved = home.rename(tmp_path / "there") / "s.yaml"
    file = load_sweep(moved).candidates.file
    assert file is not None
    assert Path(file).resolve() == moved.resolve().with_name("rocks.json")
    # What its head says gives an editor the schema.
    said = "\n".join(line.removeprefix("# ") for line in text.splitlines() if line[:1] == "#")
    assert "knockout schema > sweep.schema.json" in said
    assert "# yaml-language-server: $schema=sweep.schema.json" in said
    schema = json.loads(knockout("schema")[1])
    jsonschema.validate(yaml.safe_load(moved.read_text()), schema)


def test_the_schema_is_shipped_current_and_knows_our_own_files() -> None:
    schema = json.loads(SCHEMA_FILE.read_text(encoding="utf-8"))
    assert schema == sweep_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    for path in [*(ROOT / "examples").glob("*.yaml"), ROOT / "knockout" / "demo.yaml"]:
        jsonschema.validate(yaml.safe_load(path.read_text(encoding="utf-8")), schema)
    for path in (ROOT / "examples").glob("*.yaml"):
        reference = re.search(r"\$schema=(\S+)", path.read_text(encoding="utf-8"))
        assert reference is not None
        assert (path.parent / reference[1]).resolve() == SCHEMA_FILE.resolve()
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"model": "m", "benchmarks": ["b"], "candidate": {}}, schema)


@pytest.mark.parametrize(("name", "example"), [(name, text) for name, _, text in _COMMANDS])
def test_every_command_has_an_example_that_parses(name: str, example: str) -> None:
    program, command, *arguments = shlex.split(example.partition(" > ")[0])
    assert (program, command) == ("knockout", name)
    group: Any = typer.main.get_command(app)
    found = group.commands[name]
    assert example in (found.epilog or "")
    context = found.make_context(name, arguments, resilient_parsing=False)
    assert set(found.context_settings["help_option_names"]) == {"-h", "--help"}
    assert context.info_name == name


def test_tasks_and_list_show_what_is_there(tmp_path: Path, knockout: Command) -> None:
    rows = json.loads(knockout("tasks", "starter_arith", "--json")[1])
    assert [row["task"] for row in rows] == ["knockout_starter_arithmetic"]
    assert rows[0]["problems"] == "80"
    assert "no task has" in knockout("tasks", "nothing-such")[2]
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "run.db").write_text("no ledger")
    found = json.loads(knockout("list", tmp_path, "--json")[1])
    assert [row["state"] for row in found] == ["unreadable"]
    assert "no such folder" in knockout("list", tmp_path / "none")[2]


def test_overrides_stand_bare_or_behind_set(tmp_path: Path, knockout: Command) -> None:
    path = tmp_path / "s.yaml"
    assert knockout("init", path)[0] == 0
    code, _, told = knockout("plan", path, "seeds")
    assert code == 2
    assert "expected key.path=value" in told
    assert "did you mean `seeds`?" in knockout("plan", path, "sedes=3")[2]


def test_a_terminal_that_is_not_utf8_gets_escapes(tmp_path: Path) -> None:
    code = "import sys; sys.argv[1:] = ['tasks', 'Δ']; from knockout.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": "cp1252"},
    )
    assert done.returncode == 2
    assert rb"\u0394" in done.stderr
    assert b"internal error" not in done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_signals_end_a_command_as_ctrl_c_does(number: signal.Signals) -> None:
    code = (
        "import time, knockout.cli as c\n"
        "def wait():\n    print('ready', flush=True)\n    time.sleep(60)\n"
        "c.app.command('wait')(wait)\n"
        "import sys; sys.argv[1:] = ['wait']; c.main()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    _, told = process.communicate(timeout=30)
    assert process.returncode == 130
    assert told.startswith("knockout: stopped")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_before_the_engine_is_up_ends_a_run_resumably(
    tmp_path: Path, number: signal.Signals
) -> None:
    """As the engine starts, which is before a run listens to signals itself."""
    out = tmp_path / "run"
    code = (
        "import os, sys, knockout.cli, knockout.sweep.run as r\n"
        "start = r.start_engine\n"
        "def signalled(sweep):\n"
        f"    os.kill(os.getpid(), {number.value})\n"
        "    return start(sweep)\n"
        "r.start_engine = signalled\n"
        "knockout.cli.main()"
    )
    planted = str(ROOT / "examples" / "planted.yaml")
    command = ["run", planted, "limit=4", "engine.kind=transformers", "--out", str(out)]
    done = subprocess.run(
        [sys.executable, "-c", code, *command], capture_output=True, text=True, timeout=120
    )
    # Python notes an interrupt inside a text that it executes (`-c`), and may end by SIGINT after
    # it was handled: a shell says 130 to both.
    assert done.returncode in (130, -signal.SIGINT), done.stderr
    assert "starting the engine" in done.stderr
    assert "knockout: stopped; what a run had finished is in its ledger" in done.stderr
    assert "Traceback" not in done.stderr
    with Ledger.open(out / "run.db") as ledger:
        state = totals(ledger)
        assert next(faults(ledger), None) is None
    assert (state.planned_cells, state.owed_cells, state.complete) == (4, 4, False)


@pytest.mark.parametrize(
    "shell",
    [
        "{} 2>&1 | head -n 1 > /dev/null; exit ${{PIPESTATUS[0]}}",  # the reader goes away
        "{} >&- <&-",
    ],
)
def test_a_run_that_nobody_reads_comes_to_its_end(tmp_path: Path, shell: str) -> None:
    out, planted = tmp_path / "run", str(ROOT / "examples" / "planted.yaml")
    command = shlex.join(
        [sys.executable, "-m", "knockout", "run", planted, "limit=4", "--out", str(out)]
    )
    done = subprocess.run(
        ["bash", "-c", shell.format(command)],
        stderr=subprocess.PIPE,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
    summary = json.loads((out / "summary.json").read_text())
    assert summary["complete"] is True
    assert summary["cells_done"] == 4
    assert len(json.loads((out / "verdicts.json").read_text())) == 5


def test_left_over_temporary_files_go_with_the_next_write(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    code = (
        "import os, sys, signal; from pathlib import Path; from knockout.files import atomic_path\n"
        "with atomic_path(Path(sys.argv[1])): os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", code, str(path)], check=False)
    assert len(list(tmp_path.glob(".summary.json.*"))) == 1
    foreign = tmp_path / ".summary.json.abcdefgh.json"  # of a version that named no process
    foreign.write_text("")
    other = tmp_path / ".summary.json.txt"
    other.write_text("the user's own")
    write_text(path, "{}")
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(
        [path.name, foreign.name, other.name]
    )
    os.utime(foreign, (time.time() - 2 * 86400,) * 2)
    write_text(path, "{}")
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([path.name, other.name])
