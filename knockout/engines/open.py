"""Choosing and starting an engine."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from knockout.engines.registry import engine_kind, engine_kinds, find_engine
from knockout.errors import UsageError

if TYPE_CHECKING:
    from knockout.engines.base import Engine

__all__ = ["choose_kind", "open_engine"]

# Setting names, and the value that leaves each at the engine's own default.
_DEFAULTS: dict[str, Any] = {
    "kind": "auto",
    "dtype": "auto",
    "device": None,
    "max_model_len": None,
    "max_num_seqs": None,
    "gpu_memory_utilization": None,
    "tensor_parallel_size": None,
    "block_size": None,
    "kv_cache_gib": None,
    "enforce_eager": None,
    "urls": None,
    "data_parallel": None,
    "ray": None,
    "hang_limit_s": None,
    "outage_limit_s": None,
    "options": {},
}
_VLLM_ONLY = (
    "gpu_memory_utilization",
    "tensor_parallel_size",
    "block_size",
    "kv_cache_gib",
    "enforce_eager",
)


def choose_kind(kind: str = "auto") -> str:
    """The engine that runs: "auto" takes vLLM if it is installed, else transformers.

    "ray" is the same in Ray's actors; results do not depend on where they were made.

    Raises:
        UsageError: No such kind.
    """
    if kind in ("auto", "ray"):
        return "vllm" if importlib.util.find_spec("vllm") is not None else "transformers"
    if kind not in engine_kinds():
        known = ", ".join(("auto", "ray", *engine_kinds()))
        raise UsageError(f"engine.kind: found {kind!r}; expected one of {known}")
    return kind


def open_engine(
    model: str,
    settings: Any = None,
    *,
    seed: int = 0,
    trust_remote_code: bool = False,
    cache_dir: Path | None = None,
    **overrides: Any,
) -> Engine:
    """Starts an engine.

    Args:
        model: "smollm2-135m" (embedded), a checkpoint folder or a hub name.
        settings: The `engine` section of a sweep: an object with the attributes `kind`, `dtype`,
            `device`, `max_model_len`, `max_num_seqs`, `gpu_memory_utilization`,
            `tensor_parallel_size`, `block_size`, `kv_cache_gib`, `enforce_eager`, `urls`,
            `data_parallel`, `ray`, `hang_limit_s`, `outage_limit_s` and `options` (see `config.EngineSettings`).
            A missing one keeps the engine's own default.
        seed: The engine's own; the noise of requests comes from their own seeds.
        trust_remote_code: Whether code that comes with the model may run; also an entry of
            `options`.
        cache_dir: Where the embedded model is unpacked; the user's cache by default.
        **overrides: The same settings by name; they win over `settings`.

    Raises:
        UsageError: A setting or the model is wrong.
        KnockoutError: The engine is not installed, or does not start.
    """
    if unknown := sorted(set(overrides) - set(_DEFAULTS)):
        raise UsageError(f"unknown engine setting {', '.join(unknown)}")
    values = {name: getattr(settings, name, default) for name, default in _DEFAULTS.items()}
    values.update(overrides)
    options = dict(values.pop("options") or {})
    trust_remote_code = bool(options.pop("trust_remote_code", trust_remote_code))
    asked = values.pop("kind")
    kind = choose_kind(asked)
    n_engines, address = values.pop("data_parallel"), values.pop("ray")
    given = {name: value for name, value in values.items() if value != _DEFAULTS[name]}
    given.update(trust_remote_code=trust_remote_code, cache_dir=cache_dir, options=options)
    if asked == "ray" or address is not None or (n_engines or 1) > 1:
        given.pop("outage_limit_s", None)
        return _open_ray(model, kind, n_engines, address, seed, given)
    return find_engine(kind)(model, {**given, "seed": seed})


@engine_kind("vllm")
def _open_vllm(model: str, given: dict[str, Any]) -> Engine:
    _refuse(given, ("urls",), "only engine.kind: server has this, and it is vllm")
    if "device" in given:
        raise UsageError(
            f"engine.device is {given['device']!r}, but vLLM takes the devices it sees: set "
            "CUDA_VISIBLE_DEVICES, or use engine.kind: transformers"
        )
    from knockout.engines.vllm import VllmEngine

    return VllmEngine(model, **_without(given, "hang_limit_s", "outage_limit_s"))


@engine_kind("transformers")
def _open_transformers(model: str, given: dict[str, Any]) -> Engine:
    _refuse(given, ("urls",), "only engine.kind: server has this, and it is transformers")
    _refuse(given, _VLLM_ONLY, "only vLLM has this, and the engine is transformers")
    from knockout.engines.transformers import TransformersEngine

    return TransformersEngine(model, **_without(given, "seed", "hang_limit_s", "outage_limit_s"))


@engine_kind("server")
def _open_server(model: str, given: dict[str, Any]) -> Engine:
    """Connects to running servers; settings that belong to their own start are refused here."""
    _refuse(
        given, (*_VLLM_ONLY, "dtype", "device"),
        "give this where the server is started; engine.kind: server takes urls, max_model_len, "
        "max_num_seqs and options",
    )  # fmt: skip
    from knockout.engines.server import ServerEngine

    urls = given.get("urls", ())
    return ServerEngine(model, urls=urls, **_without(given, "seed", "hang_limit_s", "urls"))


def _refuse(given: dict[str, Any], names: Sequence[str], why: str) -> None:
    if stray := [name for name in names if name in given]:
        raise UsageError(f"engine.{', engine.'.join(stray)}: {why}")


def _without(given: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in given.items() if name not in names}


def _open_ray(
    model: str,
    kind: str,
    n_engines: int | None,
    address: str | None,
    seed: int,
    given: dict[str, Any],
) -> Engine:
    """Starts several engines in Ray's actors."""
    if kind == "server":
        raise UsageError(
            "engine.kind: server spreads requests over its own urls; leave engine.ray and "
            "engine.data_parallel out"
        )
    from knockout.engines.ray import RayEngine

    return RayEngine(
        model, open_engine, kind=kind, data_parallel=n_engines, address=address, seed=seed, **given
    )
