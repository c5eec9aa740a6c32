"""What our vLLM adapter and engine depend on, read from a release without importing it.

    python -m bench interfaces vllm-0.34.0-cp38-abi3-manylinux_2_28_x86_64.whl [MORE.whl...]
    python -m bench interfaces                              # of the vLLM that is installed

Writes tests/data/vllm/VERSION.json for each: the fields and the signatures of `WATCHED`.
tests/test_vllm_versions.py holds our code against them.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

PLACE = Path(__file__).parents[1] / "tests" / "data" / "vllm"
_V1 = "vllm/v1/sample/logits_processor/"
_V2 = "vllm/v1/worker/gpu/sample/logits_processor/"
WATCHED: dict[str, tuple[str, ...]] = {
    _V1 + "interface.py": ("LogitsProcessor", "BatchUpdate", "MoveDirectionality"),
    _V1 + "builtin.py": ("process_dict_updates",),
    _V2 + "interface.py": ("LogitsProcessor", "LogitsContext", "LogitsProcRequestState"),
    _V2 + "loader.py": ("LOGITSPROCS_GROUP", "build_custom_logits_processors"),
    "vllm/v1/worker/gpu/buffer_utils.py": ("StagedWriteTensor",),
    "vllm/sampling_params.py": ("SamplingParams",),
    "vllm/engine/arg_utils.py": ("EngineArgs",),
    "vllm/logprobs.py": ("FlatLogprobs",),
    "vllm/v1/engine/llm_engine.py": ("LLMEngine",),
    "vllm/outputs.py": ("RequestOutput", "CompletionOutput"),
    "vllm/entrypoints/openai/completion/protocol.py": ("CompletionRequest",),
}
# Of these classes only the methods that we call.
_CALLED = {
    "LLMEngine": ("from_engine_args", "add_request", "step", "abort_request",
                  "has_unfinished_requests"),
    "SamplingParams": (), "EngineArgs": (), "FlatLogprobs": (), "RequestOutput": ("__init__",),
    "CompletionOutput": (), "CompletionRequest": (), "StagedWriteTensor": (),
}  # fmt: skip


def main(*wheels: str) -> None:
    """Describes the given wheels, or the installed vLLM."""
    for wheel in wheels or (None,):
        found = describe(Path(wheel) if wheel else None)
        PLACE.mkdir(parents=True, exist_ok=True)
        path = PLACE / f"{found['version']}.json"
        path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        print(f"wrote {path.relative_to(PLACE.parents[2])}")


def describe(wheel: Path | None) -> dict[str, Any]:
    """The version and, by file and name, what a release has; None where it has not."""
    read, version = _wheel(wheel) if wheel else _installed()
    files: dict[str, dict[str, Any] | None] = {}
    for file, names in WATCHED.items():
        text = read(file)
        files[file] = None if text is None else {n: _of(ast.parse(text), n) for n in names}
    return {"version": version, "files": files}


def _wheel(path: Path) -> tuple[Callable[[str], str | None], str]:
    archive = zipfile.ZipFile(path)
    names = set(archive.namelist())

    def read(file: str) -> str | None:
        return archive.read(file).decode() if file in names else None

    return read, path.name.split("-")[1]


def _installed() -> tuple[Callable[[str], str | None], str]:
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        raise SystemExit("vLLM is not installed: name a wheel")
    folder = Path(spec.origin).parents[1]
    version = (folder / "vllm" / "_version.py").read_text(encoding="utf-8")
    found = re.search(r"version = '([^'+]+)", version)

    def read(file: str) -> str | None:
        return (folder / file).read_text(encoding="utf-8") if (folder / file).exists() else None

    return read, found[1] if found else "unknown"


def _of(tree: ast.Module, name: str) -> Any:
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return _class(node)
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return _signature(node)
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return ast.literal_eval(node.value)
    return None


def _class(node: ast.ClassDef) -> dict[str, Any]:
    fields, methods, attributes = [], {}, set()
    wanted = _CALLED.get(node.name)
    for part in node.body:
        if isinstance(part, ast.AnnAssign):
            fields.append(ast.unparse(part.target))
        elif isinstance(part, ast.Assign):
            fields += [ast.unparse(target) for target in part.targets]
        elif isinstance(part, ast.FunctionDef):
            if wanted is None or part.name in wanted:
                methods[part.name] = _signature(part)
            if part.name == "__init__":
                attributes = {
                    child.attr
                    for child in ast.walk(part)
                    if isinstance(child, ast.Attribute) and isinstance(child.ctx, ast.Store)
                }
    out: dict[str, Any] = {"fields": fields, "methods": methods}
    if attributes and not fields:
        out["attributes"] = sorted(attributes)
    return out


def _signature(node: ast.FunctionDef) -> dict[str, Any]:
    marks = [ast.unparse(mark) for mark in node.decorator_list]
    given = node.args
    return {
        "parameters": [one.arg for one in (*given.posonlyargs, *given.args)],
        "keywords": [one.arg for one in given.kwonlyargs],
        "optional": len(given.defaults),
        **({"abstract": True} if "abstractmethod" in marks else {}),
    }


if __name__ == "__main__":
    main()
