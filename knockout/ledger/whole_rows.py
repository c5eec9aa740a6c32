"""Rows read back as they were written, to copy them into another ledger."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from knockout.errors import KnockoutError
from knockout.ledger.codec import unpack_ids, unpack_steps, unpack_watched
from knockout.ledger.connection import damaged
from knockout.ledger.queries import Queries
from knockout.ledger.rows import AuditRow, CellKey, CellRow, ForkRow

__all__ = ["WholeRows"]

_OF_CELL = "benchmark = ? AND problem = ? AND seed = ?"


class WholeRows(Queries):
    """The inverse of `Ledger.commit`."""

    def cell_row(self, key: CellKey) -> CellRow:
        """A stored cell, with its baseline's tokens."""
        rows = self.query(
            "SELECT cell_seed, ids, finish, correct, grade, extracted, error, steps, n_early,"
            " n_checked, n_coupling_errors FROM cell JOIN generation"
            f" USING (benchmark, problem, seed) WHERE {_OF_CELL} AND candidate = -1",
            key,
        )
        if not rows:
            raise KnockoutError(f"{self.path}: no trajectory for {key}")
        cell_seed, ids, *middle, steps, early, checked, errors = rows[0]
        with damaged(self.path):
            (unpacked,) = unpack_steps([steps], len(self.candidates))
            values: tuple[Any, ...] = (
                key, cell_seed, unpack_ids(ids), *middle, unpacked, early, checked, errors,
            )  # fmt: skip
            return CellRow(*values)

    def fork_rows(self, key: CellKey) -> Iterator[ForkRow]:
        """The forks of a cell, with their own tokens."""
        rows = self.query(
            "SELECT candidate, step, ids, finish, correct, grade, extracted, error, respelled,"
            " parent, shared, watched FROM fork JOIN generation"
            f" USING (benchmark, problem, seed, candidate) WHERE {_OF_CELL} ORDER BY candidate",
            key,
        )
        for candidate, step, ids, *middle, respelled, parent, shared, watched in rows:
            with damaged(self.path):
                tokens, pairs = unpack_ids(ids), unpack_watched(watched)
            values: tuple[Any, ...] = (
                key, candidate, step, tokens, *middle, bool(respelled), parent, shared, pairs,
            )  # fmt: skip
            yield ForkRow(*values)

    def audit_rows(self, key: CellKey) -> Iterator[AuditRow]:
        """The audits of a cell. If one is equal, only the length of its tokens counts."""
        rows: list[Any] = self.query(
            "SELECT candidate, differs_at, n_tokens, ids, finish, error FROM audit"
            f" WHERE {_OF_CELL} ORDER BY candidate",
            key,
        )
        for candidate, differs_at, n_tokens, ids, finish, error in rows:
            with damaged(self.path):
                tokens = np.zeros(n_tokens, dtype=np.int32) if ids is None else unpack_ids(ids)
            yield AuditRow(key, candidate, differs_at, tokens, finish, error)
