"""Engines that generate: vLLM, transformers."""
