"""What other people's libraries may print."""

from __future__ import annotations

import os
import warnings

__all__ = ["quiet_libraries"]


def quiet_libraries() -> None:
    """Keeps other people's chatter off the terminal, unless the user asked for it."""
    for name, value in {
        "TRANSFORMERS_VERBOSITY": "error",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }.items():
        os.environ.setdefault(name, value)
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"vllm\.|torch\.")
