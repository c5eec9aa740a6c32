"""Where each token type pulls the student's logits during reverse-KL distillation."""

from __future__ import annotations

from knockout.geometry.geometry import Geometry, GradientSums, kl_gradient
from knockout.geometry.groups import choose_types

__all__ = ["Geometry", "GradientSums", "choose_types", "kl_gradient"]
