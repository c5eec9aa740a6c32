"""The run's ledger: one SQLite file with every generation and every grade."""

from knockout.ledger.codec import pack_ids, unpack_ids
from knockout.ledger.ledger import Ledger
from knockout.ledger.lock import RunLock
from knockout.ledger.reading import Totals, grade_cubes, totals
from knockout.ledger.rows import (
    INHERITED,
    NOT_ASKED,
    AuditRow,
    BenchmarkRow,
    CellKey,
    CellRow,
    ForkRow,
    ForkTotal,
    ProblemRow,
)

__all__ = [
    "INHERITED",
    "NOT_ASKED",
    "AuditRow",
    "BenchmarkRow",
    "CellKey",
    "CellRow",
    "ForkRow",
    "ForkTotal",
    "Ledger",
    "ProblemRow",
    "RunLock",
    "Totals",
    "grade_cubes",
    "pack_ids",
    "totals",
    "unpack_ids",
]
