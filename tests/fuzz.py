"""Throws damaged and made-up input at every reader: `python -m tests.fuzz [TARGET]... [--n N]`.

A reader may refuse (UsageError, KnockoutError) or accept; any other exception is a fault, and so is
an answer that takes longer than five seconds. The input that made it is kept and named.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

from knockout.errors import KnockoutError

SWEEP = """\
model: smollm2-135m
engine: {kind: vllm, dtype: float32, max_model_len: 2048, max_num_seqs: 64}
benchmarks: [knockout_math500, {name: knockout_ifeval, seeds: 5, sampling: {max_tokens: 2048}}]
seeds: 3
sampling: {temperature: 0.6, top_p: 0.95, top_k: 20, min_p: 0.0, max_tokens: 1024}
chat: {args: {enable_thinking: false}, think_end: "</think>"}
candidates: {ids: [5, 6], strings: [" the"], sets: {a: [1, " is"]}, family: true}
verdict: {rule: fdr, alpha: 0.05, margin: 0.02}
"""
LISTS = {
    ".json": '[{"candidate": "a", "token_ids": [5, 6]}, {"candidate": "b", "token_ids": [7]}]',
    ".jsonl": '{"token_id": 5}\n{"token_id": 6}\n',
    ".yaml": "freeze_list:\n  - 5  # a\n  - 6  # b\n",
    ".csv": 'token_id,token\n5,"a, b"\n6,"""c"""\n',
    ".tsv": "token_id\ttoken\n5\ta\n6\tb\n",
    ".txt": '5\n" the"\n[6]\n',
}
RECORDS = (
    '{"doc": {"answer": "12", "problem": "x"}, "response": "\\\\boxed{12}"}\n'
    '{"answer": "\\\\frac12", "response": "so 1/2"}\n{"answer": "3", "response": null}\n'
)
PIECES = [
    "&a", "*a", "!!int ", "!!binary ", "2024-99-99", "9" * 5000, "[" * 1500, "{", "}", "]", ": ",
    "- ", "? ", "<<: ", "\x00", "\ud800", "\u2028", "\ufeff", "\r", "\t", '"', "'", ".inf", ".nan",
    "0x" + "f" * 5000, "~nosuchuser/x", "-1", "1e400", "null", "true", "\\u0000", "x" * 100_000,
    "%", "#", "|", ">", "@", "`", "\\ud800", ",,", ";", "NaN", "Infinity", "{}", "[]", '""',
]  # fmt: skip


def mutated(text: str, dice: random.Random) -> bytes:
    """A text with a few changes, as bytes that need not be UTF-8."""
    for _ in range(dice.randint(1, 4)):
        at, end = sorted(dice.randint(0, len(text)) for _ in range(2))
        end = min(end, at + dice.choice((0, 0, 1, 5, 40)))
        text = text[:at] + dice.choice([*PIECES, text[at:end] * 2, ""]) + text[end:]
    raw = text.encode("utf-8", "surrogatepass")
    if dice.random() < 0.1 and raw:
        at = dice.randrange(len(raw))
        raw = raw[:at] + bytes([dice.randrange(256)]) + raw[at + 1 :]
    return raw.decode("utf-8", "replace").encode("utf-16") if dice.random() < 0.02 else raw


def sweeps(folder: Path, dice: random.Random) -> Callable[[], object]:
    from knockout.config.file import load_sweep

    path = folder / "s.yaml"
    path.write_bytes(mutated(SWEEP, dice))
    return lambda: load_sweep(path)


def candidates(folder: Path, dice: random.Random) -> Callable[[], object]:
    from knockout.tokens.lists import open_list

    suffix = dice.choice([*LISTS, ".parquet"])
    path = folder / f"list{suffix}"
    raw = mutated(LISTS.get(suffix, LISTS[".json"]), dice)
    path.write_bytes(raw if suffix != ".parquet" else damaged_parquet(dice))
    column = dice.choice([None, None, "token_id", "token", "x"])
    return lambda: open_list(path, column)


def grades(folder: Path, dice: random.Random) -> Callable[[], object]:
    from knockout.benchmarks import saved

    path = folder / "r.jsonl"
    path.write_bytes(mutated(RECORDS, dice))
    return lambda: saved._read(path)


def data(folder: Path, dice: random.Random) -> Callable[[], object]:
    from knockout.benchmarks import data as reader

    path = folder / "math500.jsonl"
    path.write_bytes(mutated('{"problem": "x", "answer": "12"}\n' * 2, dice))
    return lambda: reader._check_records(path, {"problem": str, "answer": str})


_PARQUET: list[bytes] = []


def damaged_parquet(dice: random.Random) -> bytes:
    """A small Parquet file with some flipped bytes."""
    if not _PARQUET:
        import io

        import pandas as pd

        target = io.BytesIO()
        pd.DataFrame({"token_id": [5, 6], "token": ["a", None]}).to_parquet(target)
        _PARQUET.append(target.getvalue())
    raw = bytearray(_PARQUET[0])
    for _ in range(dice.randint(0, 4)):
        raw[dice.randrange(len(raw))] = dice.randrange(256)
    return bytes(raw[: dice.choice((len(raw), len(raw), dice.randrange(len(raw))))])


TARGETS = {"sweeps": sweeps, "candidates": candidates, "grades": grades, "data": data}


def faults(target: str, n: int, seed: int = 0) -> Iterator[tuple[int, str, bytes]]:
    """Number, exception and input of each fault of a target."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for number in range(n):
            dice = random.Random(f"{seed} {target} {number}")
            call = TARGETS[target](folder, dice)
            started, problem = time.perf_counter(), ""
            try:
                call()
            except KnockoutError as error:
                if len(str(error)) > 4000:
                    problem = f"a message of {len(str(error))} characters"
            except Exception as error:
                problem = f"{type(error).__name__}: {str(error)[:200]}"
            if not problem and time.perf_counter() - started > 5:
                problem = f"took {time.perf_counter() - started:.1f} s"
            if problem:
                yield (
                    number,
                    problem,
                    max(folder.iterdir(), key=lambda p: p.stat().st_mtime_ns).read_bytes(),
                )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("targets", nargs="*", choices=[*TARGETS, []], default=[])
    parser.add_argument("--n", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    total = 0
    for target in given.targets or TARGETS:
        found = list(faults(target, given.n, given.seed))
        total += len(found)
        print(f"{target}: {given.n} inputs, {len(found)} faults")
        for number, problem, raw in found[:20]:
            print(f"  {number}: {problem}: {raw[:120]!r}")
    return bool(total)


if __name__ == "__main__":
    sys.exit(main())
