"""V1's batch updates, for tests; a vLLM without V1 skips the tests that make one."""

from __future__ import annotations

from typing import Any

import pytest

try:
    from vllm.v1.sample.logits_processor.interface import BatchUpdate, MoveDirectionality
except ModuleNotFoundError:  # no vLLM, or one from 0.34 on
    MoveDirectionality = None

    def BatchUpdate(*given: Any, **more: Any) -> Any:
        pytest.skip("this vLLM has Model Runner V2 alone")


__all__ = ["BatchUpdate", "MoveDirectionality"]
