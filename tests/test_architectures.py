"""Forks equal full re-runs, and leave where these do, on tiny models of many architectures."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bench.architectures import (
    ARCHITECTURES,
    ENGINE,
    FEW_BLOCKS,
    SETTINGS,
    Trial,
    count_preemptions,
    save,
)
from knockout.engines.base import Engine
from knockout.engines.transformers import TransformersEngine
from knockout.method.sampling import Sampling


def tried(engine: Engine, settings: tuple[Sampling, ...]) -> Trial:
    """A trial in which no fork is late, early or unequal to its full re-run."""
    trial = Trial(engine, settings, max_tokens=24)
    trial.run()
    engine.close()
    assert not (trial.late + trial.early + trial.unequal + trial.of_parts)
    assert trial.forks > 5
    assert trial.closed
    return trial


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_forks_equal_full_re_runs(kind: str, tmp_path: Path) -> None:
    """Each with one of the settings in turn; `python -m bench architectures` takes all of them."""
    torch.set_num_threads(1)
    setting = SETTINGS[list(ARCHITECTURES).index(kind) % len(SETTINGS)]
    tried(TransformersEngine(str(save(kind, tmp_path)), device="cpu", **ENGINE), (setting,))


def test_vllm_does_with_a_cache_so_small_that_it_preempts(tmp_path: Path) -> None:
    from knockout.engines.vllm import VllmEngine

    engine = VllmEngine(
        str(save("qwen3", tmp_path)), kv_cache_gib=0.5,
        options={"num_gpu_blocks_override": FEW_BLOCKS}, **ENGINE,
    )  # fmt: skip
    preempted = count_preemptions(engine)
    assert tried(engine, SETTINGS[:2]).of_forks
    assert len(preempted) > 20
