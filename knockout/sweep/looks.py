"""How often a run was looked at: each time it ends with other data than before is another look."""

from __future__ import annotations

import json

from knockout.ledger import Ledger

__all__ = ["looks", "note_look"]


def note_look(ledger: Ledger) -> None:
    """Notes that the verdicts of a finished run are read, once for each thing that was asked."""
    seen: list[str] = ledger.meta_json("looks", [])
    now = ledger.meta().get("identity_hash", "")
    if not seen or seen[-1] != now:
        ledger.note("looks", json.dumps([*seen, now]))


def looks(ledger: Ledger) -> int:
    """Looks at the run's verdicts, the present one included: at least 1."""
    seen: list[str] = ledger.meta_json("looks", [])
    now = ledger.meta().get("identity_hash", "")
    return len(seen) + (not seen or seen[-1] != now)
