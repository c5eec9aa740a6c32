"""Choosing and starting an engine."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

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


def choose_kind(kind: str = "auto") -> Literal["vllm", "transformers", "server"]:
    """The engine that runs: "auto" takes vLLM where it is installed, else transformers.

    "ray" is the same in Ray's actors; results do not depend on where they were made.

    Raises:
        UsageError: No such kind.
    """
    unnamed = kind in ("auto", "ray")
    if kind == "vllm" or (unnamed and importlib.util.find_spec("vllm") is not None):
        return "vllm"
    if unnamed or kind == "transformers":
        return "transformers"
    if kind == "server":
        return "server"
    raise UsageError(f"engine.kind is {kind!r}; expected auto, vllm, transformers, server or ray")


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
    given.pop("hang_limit_s", None)
    if kind == "server":
        return _open_server(model, given)
    given.pop("outage_limit_s", None)
    if "urls" in given:
        raise UsageError(f"engine.urls: only engine.kind: server has this, and it is {kind}")
    if kind == "vllm":
        if "device" in given:
            raise UsageError(
                f"engine.device is {given['device']!r}, but vLLM takes the devices it sees: set "
                "CUDA_VISIBLE_DEVICES, or use engine.kind: transformers"
            )
        from knockout.engines.vllm import VllmEngine

        return VllmEngine(model, seed=seed, **given)
    if stray := [name for name in _VLLM_ONLY if name in given]:
        raise UsageError(
            f"engine.{', engine.'.join(stray)}: only vLLM has this, and the engine is transformers"
        )
    from knockout.engines.transformers import TransformersEngine

    return TransformersEngine(model, **given)


def _open_server(model: str, given: dict[str, Any]) -> Engine:
    """Connects to running servers; what was decided where they were started is refused here."""
    if stray := [name for name in (*_VLLM_ONLY, "dtype", "device") if name in given]:
        raise UsageError(
            f"engine.{', engine.'.join(stray)}: give this where the server is started; "
            "engine.kind: server takes urls, max_model_len, max_num_seqs and options"
        )
    from knockout.engines.server import ServerEngine

    return ServerEngine(model, urls=given.pop("urls", ()), **given)


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
