"""The figures of mining: what Vega-Lite makes of their specifications."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from knockout.figures.write import write_figure
from knockout.geometry.groups import GROUPS
from knockout.mining.plots import (
    cutoff_figure,
    geometry_figure,
    orthogonality_figure,
    rows_of,
)

pytest.importorskip("vl_convert", reason="needs the extra `figures`")


def drawn(spec: dict[str, Any], table: pd.DataFrame, path: Path) -> str:
    write_figure(spec, rows_of(table), path)
    read = pd.read_csv(path.with_suffix(".csv"))
    pd.testing.assert_frame_equal(read, table, check_dtype=False)
    return path.read_text(encoding="utf-8")


def test_the_cutoff_curve_has_its_lines_marks_and_numbers(tmp_path: Path) -> None:
    k = np.arange(1, 31)
    share = np.sqrt(k / 40)
    curve = pd.DataFrame(
        {
            "k": k,
            "kl_share": share,
            "output_share": share / 2,
            "grad_share": share / 3,
            "stability": np.where(k > 2, 0.8, np.nan),
            "stability_low": np.where(k > 2, 0.7, np.nan),
            "stability_high": np.where(k > 2, 0.9, np.nan),
        }
    )
    svg = drawn(cutoff_figure(20, 7), curve, tmp_path / "cutoff.svg")
    for text in ("K = 20", "knee 7", "of the total KL", "of an output", "stability (Jaccard)"):
        assert text in svg
    assert "knee" not in drawn(cutoff_figure(20, None), curve, tmp_path / "c.svg")


def test_a_panel_for_each_benchmark_and_measure(tmp_path: Path) -> None:
    rows = [
        {"benchmark": b, "score": s, "spearman": 0.1, "spearman_low": -0.1, "spearman_high": 0.3}
        | {"auc": None if b == "b" else 0.6, "auc_low": 0.4, "auc_high": 0.8}
        | {"spearman_p_adjusted": 0.2, "auc_p_adjusted": 0.3}
        for b in ("a", "b")
        for s in ("frequency", "entropy")
    ]
    table = pd.DataFrame(rows)
    svg = drawn(orthogonality_figure(["a", "b"]), table, tmp_path / "o.svg")
    assert svg.count("Spearman ρ with harm") >= 2
    assert "frequency" in svg


@pytest.mark.parametrize("stagnation", [True, False])
def test_geometry_has_four_panels(tmp_path: Path, stagnation: bool) -> None:
    rng = np.random.default_rng(0)
    names = ["count", "mean_kl", "mean_norm", "norm", "coherence", "cos_global_rest"]
    names += ["cos_balanced_rest", "mean_kl_before", "remaining_kl"]
    table = pd.DataFrame({"group": list(GROUPS) * 4, "token": [f"t{i}" for i in range(12)]})
    for name in names:
        table[name] = rng.random(12) + 0.1
    svg = drawn(geometry_figure(GROUPS, stagnation), table, tmp_path / "g.svg")
    assert ("KL left, share" in svg) == stagnation
    assert ("coherence" in svg) != stagnation
    for group in GROUPS:
        assert group in svg
