"""Engines: one protocol, `generate(engine, requests)`, over vLLM and transformers.

Importing this package imports neither: `open_engine` starts the one that is asked for.
"""

from __future__ import annotations
