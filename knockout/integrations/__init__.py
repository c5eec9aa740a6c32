"""Knockouts inside other people's programs: lm-eval's command line, and its result files.

Importing this package imports none of them.
"""

from __future__ import annotations
