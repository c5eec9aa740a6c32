"""A causal language model's head: what turns its last hidden states into logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["Head", "head_of", "project", "reproduces"]

_HAS_OUT_DTYPE = tuple(int(x) for x in torch.__version__.split(".")[:2]) >= (2, 8)

CHECK_TOKENS = 16
"""Tokens of the short text on which a head is compared with its model's own logits."""


@dataclass(frozen=True, slots=True, eq=False)
class Head:
    """A language model's last layer: logits = cap(scale · (hidden · weightᵀ + bias)).

    Attributes:
        weight: (V, H).
        bias: (V,) or None.
        scale: Factor on the logits.
        soft_cap: c of the cap c · tanh(· / c); None for no cap.
    """

    weight: Tensor
    bias: Tensor | None = None
    scale: float = 1.0
    soft_cap: float | None = None


def head_of(model: Any) -> Head:
    """The head of a causal language model of transformers.

    Scale and soft cap are read from its configuration, under every name that TRL 1.16 and
    transformers 5 know: `logit_scale` (Cohere), `output_multiplier` (Muse), `lm_head_multiplier`
    (Falcon-H1) and, with `hyperclovax`, `logits_scaling` are factors; else `logits_scaling`
    (Granite, MiniCPM3) is a divisor; `final_logit_softcapping` (Gemma) and `logits_soft_cap`
    (RecurrentGemma) are caps, after the factor. A model that does anything else to its logits is
    not described by a `Head`: `reproduces` tells.
    """
    config = model.config.get_text_config()
    layer = model.get_output_embeddings()
    scale = 1.0
    for name in ("logit_scale", "output_multiplier", "lm_head_multiplier"):
        if (factor := getattr(config, name, None)) is not None:
            scale = float(factor)
            break
    else:
        if (factor := getattr(config, "logits_scaling", None)) is not None:
            multiplies = str(config.model_type).startswith("hyperclovax")
            scale = float(factor) if multiplies else 1.0 / float(factor)
    caps = [getattr(config, n, None) for n in ("final_logit_softcapping", "logits_soft_cap")]
    soft_cap = next((float(cap) for cap in caps if cap), None)
    bias: Tensor | None = getattr(layer, "bias", None)
    return Head(_whole(layer.weight), _whole(bias), scale, soft_cap)


def _whole(weight: Any) -> Any:
    """A sharded parameter as one tensor, gathered once for all chunks."""
    return weight.full_tensor() if hasattr(weight, "full_tensor") else weight


@torch.no_grad()
def reproduces(model: Any, states: Tensor, own: Tensor) -> bool:
    """Whether `head_of(model)` on a model's hidden states gives the model's own logits.

    Args:
        model: A causal language model of transformers.
        states: (1, L', H) its last hidden states at the L' ≤ L leading positions of a text.
        own: (1, L, V) its own logits there.
    """
    layer = model.get_output_embeddings()
    if layer is None or getattr(layer, "weight", None) is None:
        return False
    try:
        logits = project(states[0], head_of(model))
    except (AttributeError, RuntimeError, TypeError):
        return False
    own = own[0, : logits.shape[0]].to(logits.device)
    if logits.shape != own.shape:
        return False
    # A few steps of the dtype: the two paths may differ in where they round, no more.
    room = 8 * torch.finfo(own.dtype).eps * float(own.abs().max())
    return bool((logits - own.float()).abs().max() <= max(room, 1e-5))


def project(states: Tensor, head: Head) -> Tensor:
    """Logits (n, V) float32 of states (n, H), without gradient."""
    states = states.detach().to(head.weight.device, matmul_dtype(states))
    with torch.autocast(states.device.type, enabled=False):
        return logits_of(states, head, head.weight.shape[0], 1.0)[0]


def matmul_dtype(states: Tensor) -> torch.dtype:
    """What a projection multiplies in: autocast's dtype inside autocast, else the states' own."""
    kind = states.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else states.dtype


def logits_of(
    states: Tensor, head: Head, width: int, temperature: float
) -> tuple[Tensor, Tensor | None]:
    """Logits (n, width) float32 at a temperature, and the cap's slope (n, width) or None."""
    weight = head.weight[:width].detach().to(states.dtype)
    # Logits of 16 bits would round the KL away where student and teacher are close.
    if _HAS_OUT_DTYPE and states.is_cuda and states.dtype in (torch.float16, torch.bfloat16):
        z = torch.mm(states, weight.T, out_dtype=torch.float32)
    else:
        z = states.float() @ weight.float().T
    if head.bias is not None:
        z.add_(head.bias[:width].detach().float())
    if head.scale != 1.0:
        z.mul_(head.scale)
    slope: Tensor | None = None
    if head.soft_cap is not None:
        z.div_(head.soft_cap).tanh_()
        slope = 1 - z.square()
        z.mul_(head.soft_cap)
    if temperature != 1.0:
        z.div_(temperature)
    return z, slope
