"""Throws damaged and made-up input at every reader: `python -m tests.fuzz [TARGET]... [--n N]`.

A reader may refuse (UsageError, KnockoutError) or accept; any other exception is a fault, and so is
an answer that takes longer than five seconds. The input that made it is kept and named.
"""

from __future__ import annotations

import argparse
import contextlib
import os
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
    return flipped(_PARQUET[0], dice)


def flipped(whole: bytes, dice: random.Random) -> bytes:
    """Bytes of which some are changed, or the end is missing."""
    raw = bytearray(whole)
    for _ in range(dice.randint(0, 4)):
        raw[dice.randrange(len(raw))] = dice.randrange(256)
    return bytes(raw[: dice.choice((len(raw), len(raw), dice.randrange(len(raw))))])


_ARCHIVE: dict[str, bytes] = {}


def archives(folder: Path, dice: random.Random) -> Callable[[], object]:
    """An exported run of which one file is damaged, lost, another's, or a value of it changed."""
    import shutil

    from knockout.ledger import Ledger, check, totals
    from knockout.ledger.archive import import_run

    if not _ARCHIVE:
        _ARCHIVE.update(an_archive(folder / "whole"))
        shutil.rmtree(folder / "whole")
    source, back = folder / "archive", folder / "back"
    for old in (source, back):
        shutil.rmtree(old, ignore_errors=True)
    source.mkdir()
    files = dict(_ARCHIVE)
    name = dice.choice(sorted(files))
    how = dice.choice(("bytes", "bytes", "value", "value", "value", "lost", "swapped", "text"))
    if how == "lost":
        del files[name]
    elif how == "swapped":
        files[name] = files[dice.choice(sorted(files))]
    elif how == "text" or not name.endswith(".parquet"):
        files[name] = mutated(files[name].decode("utf-8", "replace")[:2000], dice)
    elif how == "bytes":
        files[name] = flipped(files[name], dice)
    else:
        files[name] = with_another_value(files[name], dice)
    for each, raw in files.items():
        (source / each).write_bytes(raw)
    target = source / name if name in files else source / min(files)
    os.utime(target, (2e9, 2e9))  # the newest is the one that is kept

    def call() -> None:
        try:
            import_run(source, back)
        except KnockoutError:
            assert not back.exists(), "a refused archive leaves a folder behind"
            raise
        with Ledger.open(back / "run.db") as ledger:  # whatever was taken can be looked at
            totals(ledger)
            list(check.faults(ledger))

    return call


def an_archive(folder: Path) -> dict[str, bytes]:
    """The files of a small exported run, by name."""
    from test_store import small_run

    from knockout.ledger.archive import export_run

    export_run(small_run(folder), folder / "out")
    return {path.name: path.read_bytes() for path in (folder / "out").iterdir()}


def with_another_value(raw: bytes, dice: random.Random) -> bytes:
    """A Parquet file with one entry, type, row or column of its table changed."""
    import io

    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pq.read_table(io.BytesIO(raw))
    if not table.num_columns or not table.num_rows:
        return flipped(raw, dice)
    n = dice.randrange(table.num_columns)
    column = table.column(n)
    values = column.to_pylist()
    field, meta = table.schema.field(n), table.schema.metadata
    how = dice.choice(("entry", "entry", "entry", "type", "drop", "twice", "name"))
    with contextlib.suppress(pa.ArrowException, OverflowError, TypeError, ValueError):
        if how == "entry":
            values[dice.randrange(len(values))] = dice.choice(
                [None, -1, 0, 10**9, 2**62, "", "x", "\x00", "{", "[1", b"\xff", [], [-1], [2**31 - 1],
                 float("nan"), True, "9" * 5000]
            )  # fmt: skip
            table = table.set_column(n, field, pa.array(values, type=field.type))
        elif how == "type":
            other = dice.choice([pa.string(), pa.int64(), pa.float64(), pa.binary(), pa.null()])
            table = table.set_column(n, field.name, column.cast(other))
        elif how == "drop":
            table = table.drop_columns([field.name])
        elif how == "twice":
            table = pa.concat_tables([table, table.slice(0, 1)])
        else:
            table = table.rename_columns(
                ["x" if i == n else name for i, name in enumerate(table.column_names)]
            )
    target = io.BytesIO()
    pq.write_table(table.replace_schema_metadata(meta), target)
    return target.getvalue()


TARGETS = {
    "sweeps": sweeps,
    "candidates": candidates,
    "grades": grades,
    "data": data,
    "archives": archives,
}


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
                files = [path for path in folder.rglob("*") if path.is_file()]
                newest = max(files, key=lambda path: path.stat().st_mtime_ns)
                yield number, problem, newest.read_bytes()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("targets", nargs="*", choices=[*TARGETS, []], default=[])
    parser.add_argument("--n", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parent))
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
