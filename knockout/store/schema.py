"""Tables of the ledger.

Small rows that are counted and read as a whole (`cell`, `fork`) are apart from the large ones
that are read one at a time (`generation`). An inherited knockout has no row: the cell's `steps`
say what became of every candidate. Nothing in these tables depends on time or order except
`session`, so that two runs of one sweep can be compared row for row.
"""

from __future__ import annotations

__all__ = ["COMPARED_TABLES", "SCHEMA", "SCHEMA_VERSION"]

SCHEMA_VERSION = 1

COMPARED_TABLES = ("candidate", "benchmark", "problem", "cell", "fork", "generation", "audit")
"""What must be equal in two runs of one sweep."""

SCHEMA = """
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
