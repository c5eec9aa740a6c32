"""A run directory made through the ledger's own writing, with texts that are hard to show."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from knockout.config.file import dump_sweep
from knockout.config.sweep import Sweep
from knockout.ledger import INHERITED, BenchmarkRow, CellKey, CellRow, ForkRow, Ledger, ProblemRow
from knockout.method.interventions import ban
from knockout.tokens.candidates import Candidate, display

NASTY = (
    "<script>alert(1)</script>",
    "</script><img src=x onerror=alert(2)>",
    "שלום עולם مرحبا",
    "\u202egnp.exe \u200b zero width",
    "{{7*7}} ${1} %{x} &lt;b&gt;",
    "line\none\ttab\r\n",
    "🦜 \u2028 separator",
)


def write_run(
    folder: Path,
    tokenizer: Any,
    *,
    benchmarks: Sequence[tuple[str, int]] = (("maths", 12), ("formats", 8)),
    n_seeds: int = 2,
    n_candidates: int = 6,
    n_controls: int = 3,
    length: tuple[int, int] = (20, 60),
    share: float = 0.4,
    longest: int = 0,
    complete: bool = True,
    pairs: int = 0,
    seed: int = 0,
) -> Path:
    """Writes `config.yaml` and `run.db`.

    Args:
        folder: Made where it is missing.
        tokenizer: Of the embedded model.
        benchmarks: Names and numbers of problems.
        n_seeds: Repeats.
        n_candidates: Rocks; the first is a strong pillar everywhere.
        n_controls: Controls.
        length: Shortest and longest trajectory, in tokens.
        share: Of knockouts that fork.
        longest: Length of one trajectory of the first benchmark; 0 for none.
        complete: Whether all cells are there.
        pairs: Pairs of the first candidates, banned together.
        seed: Of the random tokens and grades.
    """
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    candidates = list(_candidates(tokenizer, n_candidates, n_controls))
    for one, other in list(combinations(candidates[:n_candidates], 2))[:pairs]:
        ids = tuple(sorted((*one.token_ids, *other.token_ids)))
        name = f"{one.name} + {other.name}"
        both = (one.name, other.name)
        candidates.insert(-1, Candidate(name, ban(ids), both, "candidate", members=both))
    rows = [BenchmarkRow(name, "exact_match", n_seeds, f"f{name}") for name, _ in benchmarks]
    problems = [
        ProblemRow(
            b,
            p,
            f"{name}/{p}",
            prompt := f"Problem {p}: {NASTY[p % len(NASTY)]}",
            _ids(tokenizer, prompt),
        )
        for b, (name, n) in enumerate(benchmarks)
        for p in range(n)
    ]
    sweep = Sweep.model_validate(
        {
            "model": "smollm2-135m",
            "engine": {"kind": "transformers", "dtype": "float32"},
            "benchmarks": [name for name, _ in benchmarks],
            "seeds": n_seeds,
            "candidates": {"ids": sorted({t for c in candidates for t in c.token_ids})},
        }
    )
    (folder / "config.yaml").write_text(dump_sweep(sweep), encoding="utf-8")
    special = sorted(tokenizer.all_special_ids)
    meta = {"identity": "{}", "identity_hash": "0123abcd", "special_ids": str(special)}
    with Ledger.create(folder / "run.db", meta, candidates, rows, problems) as ledger:
        session = ledger.add_session("2026-01-01T00:00:00+00:00", "somewhere", 1)
        ledger.describe_session(
            session,
            {
                "knockout": "0.1",
                "python": "3.11",
                "engine": {"kind": "transformers", "versions": {"torch": "2.13.0"}},
            },
        )
        ledger.set_wall(session, 12.5)
        texts = [_ids(tokenizer, text) for text in NASTY]
        for b, (_, n) in enumerate(benchmarks):
            for p in range(n if complete else n // 2):
                for s in range(n_seeds):
                    key = CellKey(b, p, s)
                    T = (
                        longest
                        if longest and (b, p, s) == (0, 0, 0)
                        else int(rng.integers(*length))
                    )
                    cell, forks = _cell(rng, key, T, texts, candidates, share)
                    ledger.commit([cell], forks)
    return folder


def _ids(tokenizer: Any, text: str) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.array(tokenizer.encode(text, add_special_tokens=False), dtype=np.int32)


def _candidates(tokenizer: Any, n: int, n_controls: int) -> Iterator[Candidate]:
    seen = set()
    width, token = len(tokenizer), 40
    while len(seen) < n + n_controls:
        token = token * 7 % width + 1
        text = tokenizer.decode([token])
        if "\ufffd" in text or not text or (name := display(text)) in seen:
            continue
        group = "candidate" if len(seen) < n else "control"
        seen.add(name)
        yield Candidate(name, ban((token,)), (name,), group)  # type: ignore[arg-type]
    yield Candidate("A/A", ban((width - 1,)), (display("last"),), "canary")


def _cell(
    rng: np.random.Generator,
    key: CellKey,
    T: int,
    texts: list[Any],
    candidates: list[Candidate],
    share: float,
) -> tuple[CellRow, list[ForkRow]]:
    tokens = rng.integers(300, 20_000, T).astype(np.int32)
    own = texts[(key.problem + key.seed) % len(texts)]
    at = int(rng.integers(0, max(T - len(own), 1)))
    tokens[at : at + len(own)] = own[: T - at]
    right = int(rng.random() < 0.6)
    steps = np.where(
        rng.random(len(candidates)) < share, rng.integers(0, T, len(candidates)), INHERITED
    )
    steps[-1] = INHERITED
    forks = []
    for c in np.flatnonzero(steps >= 0).tolist():
        step = int(steps[c])
        rest = rng.integers(300, 20_000, max(T - step + int(rng.integers(-5, 9)), 1))
        rest[: len(own)] = own[: len(rest)]
        keeps = rng.random() < (0.25 if c == 0 else 0.9)
        correct = right if keeps else (0 if c == 0 else 1 - right)
        forks.append(
            ForkRow(
                key, c, step, rest.astype(np.int32), "length" if rng.random() < 0.1 else "stop",
                correct, "ok", NASTY[c % len(NASTY)], None,
            )
        )  # fmt: skip
    cell = CellRow(
        key, int(rng.integers(2**62)), tokens, "stop", right, "ok",
        "lone surrogate \ud800", None, steps.astype(np.int32), n_checked=T, n_coupling_errors=0,
    )  # fmt: skip
    return cell, forks
