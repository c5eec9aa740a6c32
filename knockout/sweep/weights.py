"""A run keeps the weights that it began with, whatever their name or folder says."""

from __future__ import annotations

import json
import logging

from knockout.engines.base import Engine
from knockout.engines.fingerprint import Fingerprint, fingerprints
from knockout.errors import UsageError
from knockout.ledger import Ledger
from knockout.ledger.connection import damaged

__all__ = ["check_weights", "stored_fingerprint"]

log = logging.getLogger("knockout")


def stored_fingerprint(ledger: Ledger) -> Fingerprint | None:
    """The fingerprint of the weights that a run began with; None for runs of early versions."""
    record = ledger.meta_json("weights")
    with damaged(ledger.path):
        return None if record is None else Fingerprint.from_record(record)


def check_weights(engine: Engine, ledger: Ledger) -> None:
    """Compares an engine's weights with the run's, which the first start records.

    Raises:
        UsageError: They differ.
    """
    there = stored_fingerprint(ledger)
    for place, found in fingerprints(engine).items():
        if there is None:
            there = found
            if ledger.n_cells():
                log.warning(
                    "this run has no fingerprint of its weights (an early version began it); "
                    "those of %s are recorded now", place
                )  # fmt: skip
            ledger.note("weights", json.dumps(found.to_record()))
        elif not found.agrees(there):
            raise UsageError(
                f"{ledger.path.parent}: this run was made with other weights than {place} has "
                f"now: log-probabilities of the same prompt differ by {found.difference(there):.2g} in "
                "the median, far more than rounding explains. Bring back the checkpoint that it "
                "began with, or give another --out"
            )
