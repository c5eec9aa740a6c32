"""Tables of the ledger.

Small rows that are counted and read as a whole (`cell`, `fork`) are apart from the large ones
that are read one at a time (`generation`). Triggers keep `fork_total`, so that counting millions of
forks is quick. An inherited knockout has no row: the cell's `steps`
say what became of every candidate. Nothing in these tables depends on time or order except
`session`, so that two runs of one sweep can be compared row for row.

The schema is the list of its versions. A new ledger goes through all of them and an older one
through those that it lacks, so both end up the same. A version that was released never changes.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator

__all__ = ["COMPARED_TABLES", "FORK_TOTALS", "SCHEMA_VERSION", "VERSIONS", "statements", "upgrade"]

COMPARED_TABLES = ("candidate", "benchmark", "problem", "cell", "fork", "generation", "audit")
"""What must be equal in two runs of one sweep."""

FORK_TOTALS = "benchmark, seed, finish, grade, COUNT(*), SUM(n_tokens), SUM(shared), SUM(respelled)"
"""The columns of `fork_total`, as they come from `fork`."""

_FIRST = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE candidate (
  id INTEGER PRIMARY KEY,
  name TEXT NOT NULL UNIQUE,
  token_ids TEXT NOT NULL,             -- JSON list
  tokens TEXT NOT NULL,                -- JSON list of their texts
  "group" TEXT NOT NULL
);
CREATE TABLE benchmark (
  id INTEGER PRIMARY KEY,
  name TEXT NOT NULL UNIQUE,
  metric TEXT NOT NULL,
  n_seeds INTEGER NOT NULL,
  fingerprint TEXT NOT NULL
);
CREATE TABLE problem (
  benchmark INTEGER NOT NULL,
  problem INTEGER NOT NULL,
  doc_id TEXT NOT NULL,
  prompt TEXT NOT NULL,
  prompt_ids BLOB NOT NULL,
  PRIMARY KEY (benchmark, problem)
) WITHOUT ROWID;
CREATE TABLE cell (
  benchmark INTEGER NOT NULL,
  problem INTEGER NOT NULL,
  seed INTEGER NOT NULL,
  cell_seed INTEGER NOT NULL,
  finish TEXT NOT NULL,
  n_tokens INTEGER NOT NULL,
  correct INTEGER,                     -- NULL: not graded
  grade TEXT NOT NULL,
  n_inherited INTEGER NOT NULL,
  n_forks INTEGER NOT NULL,            -- knockouts that diverge; each gets a row in fork
  n_early INTEGER NOT NULL,
  n_checked INTEGER NOT NULL,
  n_coupling_errors INTEGER NOT NULL,
  steps BLOB NOT NULL,                 -- int32 per candidate: step, -1 inherited, -2 not asked
  PRIMARY KEY (benchmark, problem, seed)
) WITHOUT ROWID;
CREATE TABLE fork (
  benchmark INTEGER NOT NULL,
  problem INTEGER NOT NULL,
  seed INTEGER NOT NULL,
  candidate INTEGER NOT NULL,
  step INTEGER NOT NULL,
  finish TEXT NOT NULL,
  n_tokens INTEGER NOT NULL,           -- of the whole trajectory
  correct INTEGER,
  grade TEXT NOT NULL,
  respelled INTEGER NOT NULL,
  PRIMARY KEY (benchmark, problem, seed, candidate)
) WITHOUT ROWID;
CREATE TABLE fork_total (
  benchmark INTEGER NOT NULL,
  seed INTEGER NOT NULL,
  finish TEXT NOT NULL,
  grade TEXT NOT NULL,
  n INTEGER NOT NULL,
  n_tokens INTEGER NOT NULL,           -- of whole trajectories
  n_shared INTEGER NOT NULL,           -- of them, before the fork
  respelled INTEGER NOT NULL,
  PRIMARY KEY (benchmark, seed, finish, grade)
) WITHOUT ROWID;
CREATE TRIGGER fork_added AFTER INSERT ON fork BEGIN
  INSERT INTO fork_total
  VALUES (NEW.benchmark, NEW.seed, NEW.finish, NEW.grade, 1, NEW.n_tokens, NEW.step, NEW.respelled)
  ON CONFLICT DO UPDATE SET n = n + 1, n_tokens = n_tokens + excluded.n_tokens,
    n_shared = n_shared + excluded.n_shared, respelled = respelled + excluded.respelled;
END;
CREATE TRIGGER fork_removed AFTER DELETE ON fork BEGIN
  UPDATE fork_total
  SET n = n - 1, n_tokens = n_tokens - OLD.n_tokens, n_shared = n_shared - OLD.step,
    respelled = respelled - OLD.respelled
  WHERE (benchmark, seed, finish, grade) = (OLD.benchmark, OLD.seed, OLD.finish, OLD.grade);
END;
CREATE TRIGGER fork_regraded AFTER UPDATE OF grade ON fork BEGIN
  UPDATE fork_total
  SET n = n - 1, n_tokens = n_tokens - OLD.n_tokens, n_shared = n_shared - OLD.step,
    respelled = respelled - OLD.respelled
  WHERE (benchmark, seed, finish, grade) = (OLD.benchmark, OLD.seed, OLD.finish, OLD.grade);
  INSERT INTO fork_total
  VALUES (NEW.benchmark, NEW.seed, NEW.finish, NEW.grade, 1, NEW.n_tokens, NEW.step, NEW.respelled)
  ON CONFLICT DO UPDATE SET n = n + 1, n_tokens = n_tokens + excluded.n_tokens,
    n_shared = n_shared + excluded.n_shared, respelled = respelled + excluded.respelled;
END;
CREATE TABLE generation (
  benchmark INTEGER NOT NULL,
  problem INTEGER NOT NULL,
  seed INTEGER NOT NULL,
  candidate INTEGER NOT NULL,          -- -1: the baseline
  ids BLOB NOT NULL,                   -- after the fork
  extracted TEXT,
  error TEXT,
  PRIMARY KEY (benchmark, problem, seed, candidate)
) WITHOUT ROWID;
CREATE TABLE audit (
  benchmark INTEGER NOT NULL,
  problem INTEGER NOT NULL,
  seed INTEGER NOT NULL,
  candidate INTEGER NOT NULL,
  differs_at INTEGER NOT NULL,         -- -1: equal
  n_tokens INTEGER NOT NULL,
  finish TEXT NOT NULL,
  ids BLOB,                            -- where it differs
  error TEXT,
  PRIMARY KEY (benchmark, problem, seed, candidate)
) WITHOUT ROWID;
CREATE TABLE session (
  id INTEGER PRIMARY KEY,
  started TEXT NOT NULL,               -- UTC
  wall_s REAL NOT NULL,
  host TEXT NOT NULL,
  pid INTEGER NOT NULL,
  record TEXT NOT NULL                 -- JSON: versions, engine, settings
);
"""

_TOTALS = (
    _FIRST[_FIRST.index("CREATE TABLE fork_total") : _FIRST.index("CREATE TABLE generation")]
    .replace("NEW.step", "NEW.shared")
    .replace("OLD.step", "OLD.shared")
)

_SECOND = f"""
ALTER TABLE meta ADD COLUMN crc INTEGER NOT NULL DEFAULT 0;
ALTER TABLE candidate ADD COLUMN intervention TEXT NOT NULL DEFAULT '';
ALTER TABLE candidate ADD COLUMN crc INTEGER NOT NULL DEFAULT 0;
ALTER TABLE benchmark ADD COLUMN crc INTEGER NOT NULL DEFAULT 0;
ALTER TABLE problem ADD COLUMN gold TEXT NOT NULL DEFAULT '';  -- what a right answer is
ALTER TABLE problem ADD COLUMN crc INTEGER NOT NULL DEFAULT 0;
ALTER TABLE cell ADD COLUMN crc INTEGER NOT NULL DEFAULT 0;
ALTER TABLE fork ADD COLUMN parent INTEGER NOT NULL DEFAULT -1; -- whose trajectory it left
ALTER TABLE fork ADD COLUMN shared INTEGER NOT NULL DEFAULT 0;   -- tokens it did not generate
ALTER TABLE fork ADD COLUMN watched BLOB NOT NULL DEFAULT x'';   -- int32: pair, where it leaves
UPDATE fork SET shared = step;
ALTER TABLE fork ADD COLUMN crc INTEGER NOT NULL DEFAULT 0;
ALTER TABLE generation ADD COLUMN crc INTEGER NOT NULL DEFAULT 0;
ALTER TABLE audit ADD COLUMN crc INTEGER NOT NULL DEFAULT 0;
ALTER TABLE session ADD COLUMN crc INTEGER NOT NULL DEFAULT 0;
DROP TRIGGER IF EXISTS fork_added;
DROP TRIGGER IF EXISTS fork_removed;
DROP TRIGGER IF EXISTS fork_regraded;
DROP TABLE IF EXISTS fork_total;
{_TOTALS}
INSERT INTO fork_total SELECT {FORK_TOTALS} FROM fork GROUP BY 1, 2, 3, 4;
"""
"""Checksums of rows, interventions, and totals, also for early ledgers without them."""

VERSIONS = (_FIRST, _SECOND)
"""What turns version n into version n + 1; version 0 is an empty file."""

SCHEMA_VERSION = len(VERSIONS)


def upgrade(db: sqlite3.Connection, found: int, wanted: int = SCHEMA_VERSION) -> None:
    """Takes a ledger from one version to another, inside the caller's transaction."""
    from knockout.ledger.checksum import crc_sql, tables

    for script in VERSIONS[found:wanted]:
        for statement in statements(script):
            db.execute(statement)
    if found < 2 <= wanted:
        for table in tables(db):
            db.execute(f"UPDATE {table} SET crc = {crc_sql(db, table)}")
    db.execute(f"PRAGMA user_version = {wanted}")


def statements(script: str) -> Iterator[str]:
    """The statements of a script, one by one, so that they can share a transaction."""
    statement = ""
    for line in script.splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""
