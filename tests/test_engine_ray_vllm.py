"""vLLM in a Ray actor on a cluster of its own: the ledger of a vLLM in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_scheduler import a_ledger, a_plan, dump, work
from transformers import AutoConfig, LlamaForCausalLM
from words import word_model

from knockout.engines.open import open_engine
from knockout.ledger import totals

pytest.importorskip("ray")
pytest.importorskip("vllm")
pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 64,
    "max_num_seqs": 8,
    "kv_cache_gib": 0.1,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The word model, with the smallest heads that vLLM's attention takes on a CPU."""
    folder = word_model(tmp_path_factory.mktemp("model"))
    torch.manual_seed(7)
    LlamaForCausalLM(AutoConfig.from_pretrained(folder, head_dim=32)).save_pretrained(folder)
    return str(folder)


def test_vllm_in_an_actor_makes_the_ledger_of_one_in_this_process(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    plan, rows, infos = a_plan(), [], []
    for place in ({"kind": "vllm"}, {"kind": "ray", "data_parallel": 1}):
        engine: Any = open_engine(model, **place, **SETTINGS)
        try:
            with a_ledger(plan, tmp_path / place["kind"]) as ledger:
                work(plan, ledger, engine, engine.tokenizer)
                rows.append(dump(ledger))
                found = totals(ledger)
        finally:
            engine.close()
        infos.append(engine.info)
        assert found.complete
        assert found.forks > 10
        assert (found.fork_errors, found.coupling_errors, found.failed_cells) == (0, 0, 0)
    assert rows[0] == rows[1]
    alone, actor = infos
    assert (alone.kind, actor.kind) == ("vllm", "vllm")
    assert actor.settings == {**alone.settings, "data_parallel": 1}
    assert actor.versions == {**alone.versions, "ray": actor.versions["ray"]}
