"""The run's ledger: one SQLite file with every generation and every grade."""

from knockout.store.codec import pack_ids, unpack_ids
from knockout.store.ledger import Ledger
from knockout.store.lock import RunLock
from knockout.store.reading import Totals, grade_cubes, totals
from knockout.store.rows import (
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
