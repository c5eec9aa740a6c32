"""Our adapter and engine against the interface of every vLLM that pyproject.toml allows.

The descriptions in data/vllm are read from the released packages by `python -m bench interfaces`.
KNOCKOUT_VLLM_WHEELS=FOLDER also runs the processor's tests on the Python of the wheels there.
"""

from __future__ import annotations

import ast
import inspect
import json
import os
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from knockout.doctor import VLLM

ROOT = Path(__file__).parents[1]
DESCRIBED = sorted((ROOT / "tests" / "data" / "vllm").glob("*.json"))
V1 = "vllm/v1/sample/logits_processor/"
V2 = "vllm/v1/worker/gpu/sample/logits_processor/"
# Fields of SamplingParams that leave the logits and the pick alone, or that we send ourselves.
HARMLESS = {
    "seed", "stop", "stop_token_ids", "ignore_eos", "max_tokens", "logprobs", "prompt_logprobs",
    "prompt_logprob_token_ids", "prompt_logprob_start", "logprob_token_ids", "flat_logprobs",
    "detokenize", "skip_special_tokens", "spaces_between_special_tokens",
    "include_stop_str_in_output", "output_kind", "stream_interval", "skip_clone",
    "output_text_buffer_length", "extra_args", "skip_reading_prefix_cache",
    "repetition_detection", "routed_experts_prompt_start",
    "watermarking",  # leaves greedy requests alone, and a ban is −∞ in what it draws from
}  # fmt: skip


@pytest.fixture(scope="module", params=DESCRIBED, ids=lambda path: path.stem)
def release(request: pytest.FixtureRequest) -> dict[str, Any]:
    return json.loads(request.param.read_text())["files"]


@pytest.fixture(scope="module")
def ours() -> Any:
    pytest.importorskip("vllm")
    import knockout.processors.vllm

    return knockout.processors.vllm


def tree_of(file: str) -> ast.Module:
    return ast.parse((ROOT / file).read_text())


def read_from(tree: ast.AST, *owners: str) -> Iterator[tuple[str, str]]:
    """Which attributes of objects with these names are read."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in owners:
            yield ast.unparse(node.value), node.attr


def keywords_to(tree: ast.AST, name: str) -> set[str]:
    """The keyword arguments of all calls of `name`."""
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and ast.unparse(n.func) == name]
    assert calls
    return {word.arg for call in calls for word in call.keywords if word.arg}


def keys_of(tree: ast.AST, name: str) -> set[str]:
    """The keys of the dictionary that is assigned to `name`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == name:
            assert isinstance(node.value, ast.Dict)
            return {ast.literal_eval(key) for key in node.value.keys if key is not None}
    raise AssertionError(name)


def test_the_range_and_the_descriptions_agree() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    allowed = Requirement(project["optional-dependencies"]["gpu"][0]).specifier
    assert str(allowed) == str(SpecifierSet(VLLM))
    minors = {tuple(map(int, path.stem.split(".")[:2])) for path in DESCRIBED}
    assert all(allowed.contains(f"{a}.{b}.0") for a, b in minors)
    last, first = max(minors), min(minors)
    assert not allowed.contains(f"{last[0]}.{last[1] + 1}.0")
    assert not allowed.contains(f"{first[0]}.{first[1] - 1}.9")
    assert minors == {(first[0], n) for n in range(first[1], last[1] + 1)}


def test_the_installed_one_is_as_described() -> None:
    pytest.importorskip("vllm")
    from bench.interfaces import describe

    found = describe(None)
    wanted = ROOT / "tests" / "data" / "vllm" / f"{found['version']}.json"
    assert found == json.loads(wanted.read_text())


def test_our_methods_take_what_a_runner_gives(release: dict[str, Any], ours: Any) -> None:
    for file in (V1 + "interface.py", V2 + "interface.py"):
        if release[file] is None:  # V1 from 0.34 on
            assert file.startswith(V1)
            continue
        interface = release[file]["LogitsProcessor"]["methods"]
        assert interface["apply"]["abstract"]
        for name, theirs in interface.items():
            given = theirs["parameters"][1:]
            assert not theirs["keywords"], name
            if name == "apply_staged_writes" and not hasattr(ours.KnockoutProcessor, name):
                continue  # V2's own does nothing, and we stage nothing
            method = getattr(ours.KnockoutProcessor, name)
            bound = given if inspect.ismethod(method) else ["self", *given]
            inspect.signature(method).bind(*bound)
    from_v1 = release[V1 + "builtin.py"]
    if from_v1 is not None:
        given = keys = from_v1["process_dict_updates"]["parameters"]
        assert len(given) == 3, keys
        assert release[V1 + "interface.py"]["BatchUpdate"]["fields"] == [
            "batch_size", "removed", "added", "moved",
        ]  # fmt: skip
        assert release[V1 + "interface.py"]["MoveDirectionality"]["fields"] == [
            "UNIDIRECTIONAL", "SWAP",
        ]  # fmt: skip


def test_what_we_read_of_a_step_is_there(release: dict[str, Any]) -> None:
    interface = release[V2 + "interface.py"]
    tree = tree_of("knockout/processors/vllm.py")
    read = {name for _, name in read_from(tree, "ctx")}
    assert {"pos", "idx_mapping_np"} <= read <= set(interface["LogitsContext"]["fields"])
    states = {name for _, name in read_from(tree, "self._runner[1]")}
    assert states == {"all_token_ids"} <= set(interface["LogitsProcRequestState"]["fields"])
    tensor = release["vllm/v1/worker/gpu/buffer_utils.py"]["StagedWriteTensor"]
    assert "gpu" in tensor["attributes"]
    assert release[V2 + "loader.py"]["LOGITSPROCS_GROUP"] == "vllm.logits_processors"


def test_every_setting_of_a_request_is_classed(release: dict[str, Any], ours: Any) -> None:
    """A new one may change the logits: refuse it, or add it to those that are harmless."""
    fields = set(release["vllm/sampling_params.py"]["SamplingParams"]["fields"])
    refused = {name for name, _ in (*ours._OFF, *ours._FORCING)}
    assert refused <= fields
    assert not refused & HARMLESS
    assert {name for name in fields if not name.startswith("_")} == refused | HARMLESS
    for file in ("knockout/engines/vllm.py", "knockout/engines/scoring.py"):
        assert keywords_to(tree_of(file), "SamplingParams") <= fields


def test_what_our_engine_asks_for_is_there(release: dict[str, Any]) -> None:
    tree = tree_of("knockout/engines/vllm.py")
    arguments = set(release["vllm/engine/arg_utils.py"]["EngineArgs"]["fields"])
    assert keys_of(tree, "arguments") <= arguments
    assert {"gpu_memory_utilization", "kv_cache_memory_bytes"} <= arguments
    engine = release["vllm/v1/engine/llm_engine.py"]["LLMEngine"]["methods"]
    assert engine["add_request"]["parameters"][1:4] == ["request_id", "prompt", "params"]
    assert engine["abort_request"]["parameters"][1] == "request_ids"
    assert engine["step"]["parameters"] == ["self"]
    asked = {name for _, name in read_from(tree, "flat")}
    assert {"token_ids", "logprobs"} == asked
    assert asked <= set(release["vllm/logprobs.py"]["FlatLogprobs"]["fields"])
    of_output = release["vllm/outputs.py"]["RequestOutput"]["methods"]["__init__"]["parameters"]
    assert {name for _, name in read_from(tree, "output")} <= set(of_output)
    of_piece = release["vllm/outputs.py"]["CompletionOutput"]["fields"]
    assert {name for _, name in read_from(tree, "piece")} <= set(of_piece)


def test_what_we_send_to_a_server_is_known_there(release: dict[str, Any]) -> None:
    body = keys_of(tree_of("knockout/engines/server.py"), "body")
    file = "vllm/entrypoints/openai/completion/protocol.py"
    assert "vllm_xargs" in body
    assert body <= set(release[file]["CompletionRequest"]["fields"])


@pytest.mark.engine
@pytest.mark.timeout(900)
def test_the_processor_runs_on_the_python_of_each_wheel(tmp_path: Path) -> None:
    """Of a release the interfaces, the request settings and the loaders; it needs no kernel."""
    folder = os.environ.get("KNOCKOUT_VLLM_WHEELS")
    wheels = sorted(Path(folder).rglob("vllm-*.whl")) if folder else []
    if not wheels:
        pytest.skip("KNOCKOUT_VLLM_WHEELS names no folder with vLLM's wheels")
    for wheel in wheels:
        place = tmp_path / wheel.name.split("-")[1]
        with zipfile.ZipFile(wheel) as archive:
            names = [n for n in archive.namelist() if n.endswith(".py") or ".dist-info/" in n]
            archive.extractall(place, names)
        files = [f"tests/test_{name}.py" for name in ("processors", "batches", "where")]
        path = os.pathsep.join([str(place), str(ROOT), os.environ.get("PYTHONPATH", "")])
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files],
            cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, (wheel.name, done.stdout[-3000:])
        print(wheel.name, done.stdout.strip().splitlines()[-1])
