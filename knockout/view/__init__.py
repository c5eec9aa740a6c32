"""The report's pages served from the ledger while a run goes on, and the fork explorer."""

from knockout.view.server import serve

__all__ = ["serve"]
