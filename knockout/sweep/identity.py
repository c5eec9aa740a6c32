"""What a run is: a versioned record of everything that changes its outputs, and its hash."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from knockout.config.sweep import Sweep, identity_fields
from knockout.tokens.candidates import Candidate

__all__ = [
    "IDENTITY_VERSION",
    "differences",
    "identity",
    "model_fingerprint",
    "record_differences",
    "tokenizer_fingerprint",
]

IDENTITY_VERSION = 1

_SAMPLES = 64
_SAMPLE_BYTES = 4096


def identity(
    sweep: Sweep,
    *,
    model: str,
    tokenizer: str,
    benchmarks: Sequence[tuple[str, str]],
    candidates: Sequence[Candidate],
) -> dict[str, Any]:
    """Returns the record that two processes must share to work on one run.

    Args:
        sweep: The sweep; of it only the fields that change outputs.
        model, tokenizer: Fingerprints.
        benchmarks: (name, fingerprint) of each, in order.
        candidates: In order; their ids count, not how they were given.
    """
    # The rule decides after each round of a race what the next one generates.
    racing = {} if sweep.adaptive is None else {"racing": sweep.verdict.model_dump(mode="json")}
    return {
        "version": IDENTITY_VERSION,
        **identity_fields(sweep),
        **racing,
        "model_fingerprint": model,
        "tokenizer_fingerprint": tokenizer,
        "benchmark_fingerprints": dict(benchmarks),
        "candidates": [_candidate(c) for c in candidates],
    }


def _candidate(candidate: Candidate) -> list[Any]:
    """A plain ban as the first version wrote it, any other intervention by its record."""
    if candidate.intervention.is_plain_ban:
        return [candidate.name, candidate.group, *candidate.token_ids]
    return [candidate.name, candidate.group, candidate.intervention.to_record()]


def digest(record: dict[str, Any]) -> str:
    """The hash of an identity, in hex."""
    text = json.dumps(record, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode("utf-8", "backslashreplace"), digest_size=16).hexdigest()


def record_differences(
    there: dict[str, Any], here: dict[str, Any], words: tuple[str, str] = ("there", "here")
) -> list[str]:
    """Returns a line for each value that differs, by its path."""
    one, other = (
        dict(_flat(json.loads(json.dumps(record, default=str)))) for record in (there, here)
    )
    lines = []
    for key in sorted(one.keys() | other.keys()):
        if one.get(key) != other.get(key):
            was, now = (json.dumps(d[key]) if key in d else "nothing" for d in (one, other))
            lines.append(f"{_WORDS.get(key, key)}: {_both(was, now, words)}")
    return lines


def differences(
    there: dict[str, Any], here: dict[str, Any], words: tuple[str, str] = ("there", "here")
) -> list[str]:
    """Returns what makes the cells of two sweeps differ, by name.

    What is only asked for (seeds, limit, candidates, benchmarks) is left out; of benchmarks that
    both have the sampling and the number of worked examples count.

    Args:
        there, here: Identities.
        words: What the two are called.
    """
    here = json.loads(json.dumps(here, default=str))
    lines = record_differences(_without_asked(there), _without_asked(here), words)
    mine, theirs = _per_benchmark(here), _per_benchmark(there)
    shared = [name for name in mine if name in theirs]
    found: dict[str, list[str]] = {}
    for name in shared:
        for key in mine[name]:
            if (before := theirs[name].get(key)) != mine[name][key]:
                line = _both(json.dumps(before), json.dumps(mine[name][key]), words)
                found.setdefault(f"{key}\x00{line}", []).append(name)
    for text, names in sorted(found.items()):
        key, line = text.split("\x00")
        lines.append(
            f"{key}: {line}" if names == shared else f"{key} of {', '.join(names)}: {line}"
        )
    return lines


_ASKED = {
    "adaptive", "benchmark_fingerprints", "benchmarks", "candidates", "limit", "sampling", "seeds",
}  # fmt: skip
_WORDS = {
    "model_fingerprint": "the model's weights or configuration (fingerprint)",
    "tokenizer_fingerprint": "the tokenizer or its chat template (fingerprint)",
}


def _without_asked(record: dict[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in record.items() if key not in _ASKED}
    return kept | {"adaptive": record.get("adaptive")}


def _per_benchmark(record: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The settings of each entry of `benchmarks`, with the sweep's sampling as their default."""
    found = {}
    for entry in record.get("benchmarks", ()):
        own = {k: v for k, v in (entry.get("sampling") or {}).items() if v is not None}
        merged = {**record.get("sampling", {}), **own}
        found[entry["name"]] = {
            **{f"sampling.{key}": value for key, value in merged.items()},
            "num_fewshot": entry.get("num_fewshot"),
        }
    return found


def _flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _flat(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list) and any(isinstance(inner, list | dict) for inner in value):
        for index, inner in enumerate(value):
            yield from _flat(inner, f"{path}[{index}]")
    else:
        yield path, value


def _both(was: str, now: str, words: tuple[str, str]) -> str:
    return f"{_short(was)} {words[0]}, {_short(now)} {words[1]}"


def _short(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."


def model_fingerprint(folder: Path) -> str:
    """Hash of a checkpoint: its whole configuration, its weights by size and samples.

    Reading 64 blocks of each weight file tells checkpoints of one training apart without reading
    tens of gigabytes at every start.
    """
    state = hashlib.blake2b(digest_size=16)
    for path in sorted(folder.glob("*.json")):
        if path.name in {"config.json", "generation_config.json"}:
            state.update(path.name.encode() + path.read_bytes())
    weights = [p for kind in ("*.safetensors", "*.bin", "*.gguf") for p in folder.glob(kind)]
    for path in sorted(weights):
        size = path.stat().st_size
        state.update(f"{path.name}:{size}".encode())
        with path.open("rb") as file:
            for n in range(_SAMPLES):
                file.seek(size * n // _SAMPLES)
                state.update(file.read(_SAMPLE_BYTES))
    return state.hexdigest()


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """Hash of a tokenizer: its vocabulary, its rules if it shows them, its chat template."""
    core = getattr(tokenizer, "backend_tokenizer", None)
    rules = core.to_str() if core is not None else json.dumps(sorted(tokenizer.get_vocab().items()))
    template = json.dumps(getattr(tokenizer, "chat_template", None), sort_keys=True)
    return hashlib.blake2b(f"{rules}\x1f{template}".encode(), digest_size=16).hexdigest()
