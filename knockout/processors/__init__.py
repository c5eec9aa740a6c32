"""The coupled pick and the ban inside vLLM's and transformers' logits processor interfaces."""

from __future__ import annotations

from knockout.processors.rules import Rule, rule_from_extra_args

__all__ = ["Rule", "rule_from_extra_args"]
