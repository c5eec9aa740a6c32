"""Pages of the documentation that are made from the code, so that they cannot fall behind it.

`python -m knockout.config.page docs` writes them into the folder `docs`.
"""

from __future__ import annotations

import json
import sys
import typing
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from knockout.config.mine import Mine
from knockout.config.sweep import Sweep
from knockout.files import write_text

__all__ = ["SCHEMA_FILE", "mine_file_page", "sweep_file_page", "sweep_schema", "write_pages"]

SCHEMA_FILE = Path(__file__).with_name("sweep.schema.json")
"""The JSON schema of the sweep file, for editors."""

_HEAD = """\
# The sweep file

Made from the docstrings of `knockout/config/sweep.py` by `python -m knockout.config.page docs`; do not edit.

A sweep file is YAML. An unknown key is an error that names the closest known one; so is a key given
twice, a bool in place of a number, NaN or infinity. Relative paths are relative to the file's
folder. `--set key.path=value` on the command line goes over the file; an item of a list is named by
its place, as in `--set benchmarks.0.limit=10`.

**Outputs**: keys that change what is generated are part of what a run *is*. A run directory made
with another value is refused, naming the keys, except for what is only asked (`seeds`, `limit`,
`benchmarks` and `candidates`): there the run goes on with what it has ([Growing a run](how-to/grow.md)).
The others may change between two sessions of one run: they say how it is carried out, or what is
computed from its ledger. Candidates count as the
token ids that they resolve to, benchmarks as their documents and prompts, so it does not matter
from which file they came. In a race (`adaptive`) all of `verdict` counts as outputs too, since it
decides what the next round generates.

```yaml
model: smollm2-135m
engine: {kind: vllm, dtype: float32, max_model_len: 2048, max_num_seqs: 64}
benchmarks:
  - knockout_math500
  - {name: knockout_ifeval, seeds: 5, sampling: {max_tokens: 2048}}
seeds: 3
sampling: {temperature: 0.6, top_p: 0.95, top_k: 20, max_tokens: 1024}
candidates: {file: rocks.csv, column: rock_id}
audit: 0.02
verdict: {rule: fdr, alpha: 0.05, margin: 0.02}
adaptive: {max_seeds: 16, max_hours: 24}
```
"""

_MINE_HEAD = """\
# The file of `knockout mine`

Made from the docstrings of `knockout/config/mine.py` by `python -m knockout.config.page docs`; do not edit.

`knockout mine MINE.yaml [key=value]...` reads YAML as a sweep file is read: an unknown key is an error that
names the closest known one, relative paths are relative to the file's folder, and `key=value` goes over the
file. Without a file, the values say everything. `engine` and `chat` are those of
[the sweep file](sweep-file.md).

**Outputs**: keys that change the rollouts or their scores; with another value it is another run and needs
another `out`. The rest may change between two calls: nothing is then generated or scored anew. Prompts count
as their token ids, models as their weights. Of `scoring`, quantile, window and scores only concern the list.

```yaml
teacher: Qwen/Qwen3-30B-A3B
student: runs/opd/final
student_before: runs/opd/start
out: runs/rocks
prompts: {benchmarks: [knockout_math500]}
rollouts: {max_tokens: 16384}
scoring: {dtype: bfloat16, scores: [soft_or]}
list: {top: 100, by: rock_score_ctx}
```

`knockout mine MINE.yaml --from RUN` scores the baselines of a run of the student and generates nothing.

"""

_MINE_SECTIONS = (
    ("", "The file", "Mine"),
    ("prompts", "`prompts`", "PromptSource"),
    ("rollouts", "`rollouts`", "RolloutSettings"),
    ("rollouts.sampling", "`rollouts.sampling`", "SamplingSettings"),
    ("scoring", "`scoring`", "ScoringSettings"),
    ("list", "`list`", "ListKeys"),
)

_SECTIONS = (
    ("", "The sweep", "Sweep"),
    ("engine", "`engine`", "EngineSettings"),
    ("benchmarks", "An entry of `benchmarks`", "BenchmarkEntry"),
    ("benchmarks.sampling", "`sampling` of such an entry", "SamplingOverride"),
    ("sampling", "`sampling`", "SamplingSettings"),
    ("chat", "`chat`", "ChatSettings"),
    ("candidates", "`candidates`", "CandidateSource"),
    ("candidates.controls", "`candidates.controls`", "FileColumn"),
    ("verdict", "`verdict`", "VerdictRule"),
    ("adaptive", "`adaptive`", "Adaptive"),
    ("grading", "`grading`", "Grading"),
)


def sweep_file_page() -> str:
    """The text of `docs/sweep-file.md`."""
    return _page(_HEAD, Sweep, _SECTIONS)


def mine_file_page() -> str:
    """The text of `docs/mine-file.md`."""
    return _page(_MINE_HEAD, Mine, _MINE_SECTIONS, {"EngineSettings", "ChatSettings"})


def _page(
    head: str,
    root: type[BaseModel],
    sections: Sequence[tuple[str, str, str]],
    elsewhere: Collection[str] = (),
) -> str:
    """A page with a table for each model of a file; those `elsewhere` have it on another page."""
    schema = root.model_json_schema(mode="validation")
    models = {root.__name__: schema, **schema["$defs"]}
    missing = set(models) - {name for _, _, name in sections} - set(elsewhere)
    if missing:
        raise ValueError(f"no section for {', '.join(sorted(missing))}")
    module = sys.modules[root.__module__]
    parts = [head]
    for path, title, name in sections:
        model = models[name]
        fields = getattr(module, name).model_fields
        about = " ".join(str(model.get("description", "")).split())
        rows = [
            _row(
                f"{path}.{key}" if path else key,
                field,
                _bounds(fields[key]),
                key in model.get("required", ()),
            )
            for key, field in model["properties"].items()
        ]
        table = ["| key | value | default | outputs | meaning |", "| --- | --- | --- | --- | --- |"]
        parts.append("\n".join([f"## {title}", "", about, "", *table, *rows, ""]))
    return "\n".join(parts)


def sweep_schema() -> dict[str, Any]:
    """The JSON schema of the sweep file."""
    schema = Sweep.model_json_schema(mode="validation")
    # A validator takes a bare name for an entry, which pydantic cannot see.
    entries = schema["properties"]["benchmarks"]
    entries["items"] = {"anyOf": [{"type": "string", "minLength": 1}, entries["items"]]}
    title = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "knockout sweep"}
    return title | {key: value for key, value in _without_marks(schema).items() if key != "title"}


def _without_marks(schema: Any) -> Any:
    """Leaves out our own marks."""
    if isinstance(schema, dict):
        return {k: _without_marks(v) for k, v in schema.items() if not _is_mark(k, v)}
    return [_without_marks(v) for v in schema] if isinstance(schema, list) else schema


def _is_mark(key: str, value: Any) -> bool:
    return key == "identity" and isinstance(value, bool)


def write_pages(folder: Path) -> None:
    """Writes all made pages into a folder, and the schema beside this module."""
    write_text(folder / "sweep-file.md", sweep_file_page())
    write_text(SCHEMA_FILE, json.dumps(sweep_schema(), indent=1, ensure_ascii=False) + "\n")
    write_text(folder / "mine-file.md", mine_file_page())


def _row(path: str, field: dict[str, Any], bounds: str, required: bool) -> str:
    if required:
        default = "required"
    elif "default" in field and not isinstance(field["default"], dict):
        default = f"`{json.dumps(field['default'])}`"
    else:
        default = "see there" if "$ref" in json.dumps(field) else "`{}`"
    meaning = " ".join(str(field["description"]).split()).replace("|", "\\|")
    outputs = "yes" if field["identity"] else ""
    return f"| `{path}` | {_kind(field, bounds)} | {default} | {outputs} | {meaning} |"


def _kind(field: dict[str, Any], bounds: str = "") -> str:
    """A JSON schema in words."""
    if "anyOf" in field:
        return ", or ".join(dict.fromkeys(_kind(option, bounds) for option in field["anyOf"]))
    if "$ref" in field:
        return "mapping"
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"])
    kind = field.get("type")
    if kind == "array":
        return f"list ({_kind(field['items'])})" if "items" in field else "list"
    if kind == "object":
        inner = field.get("additionalProperties")
        return f"mapping (name to {_kind(inner)})" if isinstance(inner, dict) else "mapping"
    if field.get("format") == "path":
        return "path"
    if kind in ("integer", "number"):
        return f"{'whole number' if kind == 'integer' else 'number'} {bounds}".strip()
    return {"string": "text", "null": "null"}.get(str(kind), "true or false")


def _bounds(field: FieldInfo) -> str:
    """Limits of a number; the JSON schema loses those of values that are checked beforehand."""
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    found = [
        f"{sign} {limit:g}"
        for constraint in _constraints(field.metadata, field.annotation)
        for name, sign in signs.items()
        if (limit := getattr(constraint, name, None)) is not None and limit < 2**31 - 1
    ]
    return ", ".join(dict.fromkeys(found))


def _constraints(metadata: Sequence[Any], annotation: Any) -> Iterator[Any]:
    """The constraints of a field, those of a part of its union included."""
    for part in (annotation, *typing.get_args(annotation)):
        metadata = [*metadata, *getattr(part, "__metadata__", ())]
    for item in metadata:
        yield from item.metadata if isinstance(item, FieldInfo) else (item,)


if __name__ == "__main__":
    write_pages(Path(sys.argv[1] if len(sys.argv) > 1 else "docs"))
