"""The run's ledger: one SQLite file with every generation and every grade."""

from knockout.ledger.codec import pack_ids, unpack_ids
from knockout.ledger.ledger import Ledger
from knockout.ledger.lock import RunLock
from knockout.ledger.queries import CellOutcome, ForkOutcome, Outcome, Session, StoredProblem
from knockout.ledger.reading import Totals, grade_cubes, totals
from knockout.ledger.rows import (
    INHERITED,
    NO_ROOM,
    NOT_ASKED,
    Asked,
    AuditRow,
    BenchmarkRow,
    CellKey,
    CellRow,
    ExtendedCell,
    ForkRow,
    ForkTotal,
    ProblemRow,
)

__all__ = [
    "INHERITED",
    "NOT_ASKED",
    "NO_ROOM",
    "Asked",
    "AuditRow",
    "BenchmarkRow",
    "CellKey",
    "CellOutcome",
    "CellRow",
    "ExtendedCell",
    "ForkOutcome",
    "ForkRow",
    "ForkTotal",
    "Ledger",
    "Outcome",
    "ProblemRow",
    "RunLock",
    "Session",
    "StoredProblem",
    "Totals",
    "grade_cubes",
    "pack_ids",
    "totals",
    "unpack_ids",
]
