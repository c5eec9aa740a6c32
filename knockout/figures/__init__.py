"""Figures, defined once: Vega-Lite specifications as plain mappings.

The report draws them in the browser, notebooks through Altair, and `write_figure` writes them as SVG, PDF,
PNG or a page of their own. A specification names its data; rows are put in by whoever draws it.
"""

from __future__ import annotations

__all__: list[str] = []
