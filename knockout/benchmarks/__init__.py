"""lm-eval tasks as problems to generate for, each with what grades it."""

from knockout.benchmarks.load import load_benchmark
from knockout.benchmarks.prompts import chat_for, chat_renderer, encode_prompt
from knockout.benchmarks.types import Benchmark, Chat, Problem

__all__ = [
    "Benchmark",
    "Chat",
    "Problem",
    "chat_for",
    "chat_renderer",
    "encode_prompt",
    "load_benchmark",
]
