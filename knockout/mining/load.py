"""Loading a checkpoint for scoring; `knockout mine` and `knockout geometry` share it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from knockout.errors import KnockoutError, UsageError

if TYPE_CHECKING:
    from knockout.mining.forward import ScoringModel

__all__ = ["check_device", "load_scoring_model"]

DTYPES = ("auto", "float32", "bfloat16", "float16")


def check_device(device: str | None) -> str:
    """The device to score on, refused at once if it is not here.

    Args:
        device: A device of PyTorch's, "auto" (spread over all GPUs), or None for a GPU if there
            is one, else the CPU.

    Raises:
        UsageError: There is no such device.
    """
    import torch

    if device is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device == "auto":
        return device
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise UsageError(
            f"device is {device!r}, which this machine or PyTorch lacks ({reason}); expected cpu, "
            "cuda, cuda:N or auto"
        ) from None
    return device


def load_scoring_model(
    folder: Path, name: str, dtype: str, device: str | None, check_ids: Sequence[int]
) -> ScoringModel:
    """Loads a checkpoint.

    Args:
        folder: The checkpoint.
        name: For messages.
        dtype: One of `DTYPES`; "auto" is float32 on a CPU, else bfloat16.
        device: As in `check_device`.
        check_ids: Token ids of a short text, to compare logits on.

    Raises:
        UsageError: There is no such device or dtype.
        KnockoutError: It cannot be loaded.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from knockout.mining.forward import ScoringModel
    from knockout.tokens.checkpoint import quiet_transformers

    if dtype not in DTYPES:
        raise UsageError(f"dtype is {dtype!r}; expected {', '.join(DTYPES)}")
    device = check_device(device)
    if dtype == "auto":
        alone = device == "cpu" or (device == "auto" and not torch.cuda.is_available())
        dtype = "float32" if alone else "bfloat16"
    try:
        with quiet_transformers():
            model = AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=getattr(torch, dtype),
                **({"device_map": "auto"} if device == "auto" else {}),
            )
        if device != "auto":
            model.to(device)  # type: ignore[arg-type]
    except (OSError, ValueError, RuntimeError) as error:
        raise KnockoutError(f"{name}: cannot be loaded: {error}") from error
    return ScoringModel(model, name, check_ids)
