"""`python -m bench loop`: the whole loop where the truth is known, with intervals over training seeds.

The planted model is the teacher. A smaller student, first trained on the language
itself, is

1. distilled on-policy until its loss no longer falls (`opd/`),
2. mined for rock tokens with `knockout mine` (`mined/`),
3. swept with `knockout run` over the rocks and every word that has a role (`sweep/`),
4. distilled again from the same start in six arms and several training seeds (`arms/`): all tokens;
   the rocks frozen; the pillars; the stumbling blocks; as many types as rocks of like frequency;
   as many random positions as the rocks have,
5. evaluated on its own rollouts of fresh problems.

A stage whose result is there is skipped, so a stopped run goes on with the same command. `--out`
gets `report.md`, `loop.json`, `types.csv` and `arms.csv`.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd

from bench.planted.claims import write_claims
from bench.planted.distil import Distil, distil, evaluate
from knockout.errors import KnockoutError
from knockout.planted import MODEL_FOLDER
from knockout.planted.language import Language, problems
from knockout.planted.train import Training, train
from knockout.training.selection import Selection

__all__ = ["ARMS", "main"]

ARMS = ("all", "rocks", "pillars", "stumbling", "matched", "random")

_SKILL = 0.3  # Pass@1 from which pillars can show


def main(*arguments: str) -> None:
    """Runs what is missing, and reports."""
    import torch

    given = _parser().parse_args(arguments)
    torch.set_num_threads(1)  # small matrices; another process gains more
    given.work.mkdir(parents=True, exist_ok=True)
    settings = Distil(given.steps, given.rows, kept_at=(given.steps // 10, given.steps // 2))
    work: Path = given.work
    language = Language()
    start, opd, mined, sweep = (work / name for name in ("start", "opd", "mined", "sweep"))
    small = Training(
        seed=1,
        hidden=given.hidden,
        layers=given.layers,
        steps=given.start_steps,
        settling=given.start_steps // 5,
    )
    _stage(work, "start", start / "language.json", lambda: train(language, start, small))
    teacher = MODEL_FOLDER
    _stage(
        work, "distil", opd / "history.json",
        lambda: distil(language, start, teacher, opd, settings, Selection(), seed=0),
    )  # fmt: skip
    _stage(work, "mine", mined / "summary.json", lambda: _mine(given, language, opd, mined))
    _stage(
        work, "sweep", sweep / "verdicts.json", lambda: _sweep(given, language, opd, mined, sweep)
    )
    _require_skill(sweep)
    lists = _lists(mined, sweep)
    (work / "lists.json").write_text(json.dumps(lists, indent=1) + "\n", "utf-8")
    owed = [
        (given, settings, lists, arm, seed)
        for seed in range(1, given.seeds + 1)
        for arm in ARMS
        if arm in ("all", "random") or lists[arm]  # without a list an arm is that of all tokens
        if not (work / "arms" / f"{arm}-{seed}" / "evaluation.json").is_file()
    ]
    context = multiprocessing.get_context("spawn")
    began = time.monotonic()
    with context.Pool(given.processes) as pool:
        for done, name in enumerate(pool.imap(_arm, owed), start=1):
            spent = time.monotonic() - began
            print(f"{name}: {done} of {len(owed)}, {spent:.0f} s", flush=True)
    if owed:
        _note(work, "arms", time.monotonic() - began)
    for name, student in (("start", start), ("teacher", teacher)):
        found = work / "arms" / f"{name}-0" / "evaluation.json"
        _stage(
            work, f"evaluate {name}", found,
            lambda student=student, found=found: _evaluate(given, student, lists, found),
        )  # fmt: skip
    report(given)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench loop", description=__doc__)
    parser.add_argument("--work", type=Path, default=Path("runs/loop"))
    parser.add_argument("--out", type=Path, default=Path("results/loop"))
    parser.add_argument("--hidden", type=int, default=96, help="width of the student")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--start-steps", type=int, default=1400, help="on the language itself")
    parser.add_argument("--steps", type=int, default=200, help="on-policy steps of each run")
    parser.add_argument("--rows", type=int, default=24, help="rollouts a step")
    parser.add_argument("--seeds", type=int, default=5, help="training seeds of each arm")
    parser.add_argument("--rocks", type=int, default=12, help="length of the mined list")
    parser.add_argument("--mine-problems", type=int, default=400)
    parser.add_argument("--problems", type=int, default=500, help="of the sweep, one seed each")
    parser.add_argument("--held-out", type=int, default=2000, help="problems of an evaluation")
    parser.add_argument("--engine", default="transformers")
    parser.add_argument("--processes", type=int, default=2)
    return parser


def _stage(work: Path, name: str, result: Path, do: Callable[[], Any]) -> None:
    if result.exists():
        return
    print(f"[{time.strftime('%H:%M:%S')}] {name}", flush=True)
    began = time.monotonic()
    do()
    _note(work, name, time.monotonic() - began)


def _note(work: Path, name: str, seconds: float) -> None:
    """Adds a stage's wall time to `stages.json`."""
    notes = work / "stages.json"
    known = json.loads(notes.read_text("utf-8")) if notes.exists() else {}
    known[name] = round(known.get(name, 0) + seconds, 1)
    notes.write_text(json.dumps(known, indent=1) + "\n", "utf-8")


def _knockout(*arguments: str | Path) -> None:
    command = [sys.executable, "-m", "knockout", *map(str, arguments)]
    if code := subprocess.run(command, check=False).returncode:
        sys.exit(f"failed with {code}: {' '.join(command)}")


def _mine(given: argparse.Namespace, language: Language, opd: Path, mined: Path) -> None:
    prompts = given.work / "mine.jsonl"
    records = problems(language, 31, given.mine_problems)
    lines = [json.dumps({"id": r["id"], "prompt": r["question"]}) for r in records]
    prompts.write_text("\n".join(lines) + "\n", "utf-8")
    before = opd / f"step-{given.steps // 10}"
    _knockout(
        "mine", "teacher=planted", f"student={opd.resolve() / 'after'}",
        f"student_before={before.resolve()}", f"out={mined.resolve()}",
        f"prompts.file={prompts.resolve()}", f"engine.kind={given.engine}",
        "rollouts.max_tokens=64", "rollouts.per_prompt=2", "rollouts.sampling.temperature=1.0",
        f"list.top={given.rocks}",
    )  # fmt: skip


def _sweep(
    given: argparse.Namespace, language: Language, opd: Path, mined: Path, sweep: Path
) -> None:
    rocks = pd.read_csv(mined / "rocks.csv")
    ids = dict(zip(language_ids(opd / "after").values(), language_ids(opd / "after"), strict=True))
    words = [word for role in language.roles().values() for word in role]
    words += [ids[rock] for rock in rocks["rock_id"] if ids[rock] not in words]
    settings = {
        "model": str(opd.resolve() / "after"),
        "engine": {"kind": given.engine, "dtype": "float32", "max_num_seqs": 128},
        "benchmarks": ["knockout_planted"],
        "limit": given.problems,
        "seeds": 1,
        "sampling": {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_tokens": 64},
        "candidates": {"strings": words},
    }
    file = given.work / "sweep.yaml"
    file.write_text(json.dumps(settings, indent=1) + "\n", "utf-8")  # YAML reads JSON
    _knockout("run", file, "--out", sweep)


def language_ids(folder: Path) -> dict[str, int]:
    """Word to id of a planted checkpoint."""
    text = (folder / "tokenizer.json").read_text("utf-8")
    found: dict[str, int] = json.loads(text)["model"]["vocab"]
    return found


def _require_skill(sweep: Path) -> None:
    """Refuses a student that guesses: where nothing is right, no ban can hurt."""
    rows = json.loads((sweep / "verdicts.json").read_text("utf-8"))
    pass1 = float(rows[0]["pass1_baseline"])
    if pass1 < _SKILL:
        raise KnockoutError(
            f"{sweep}: the distilled student's Pass@1 is {pass1:.2f}, and guessing a digit gives "
            f"0.10; expected {_SKILL} or more. Raise --start-steps, --hidden or --steps, and name "
            "a new --work"
        )


def _lists(mined: Path, sweep: Path) -> dict[str, list[int]]:
    """Arm to the token ids that it freezes."""
    rows = json.loads((sweep / "verdicts.json").read_text("utf-8"))
    called: dict[str, list[int]] = {"strong_pillar": [], "strong_stumbling_block": []}
    for row in rows:
        if row["verdict"] in called:
            called[row["verdict"]] += row["token_ids"]
    rocks = pd.read_csv(mined / "rocks.csv")["rock_id"].tolist()
    matched = pd.read_csv(mined / "controls.csv")["frequency_id"].dropna().astype(int)
    return {
        "rocks": rocks,
        "pillars": sorted(set(called["strong_pillar"])),
        "stumbling": sorted(set(called["strong_stumbling_block"])),
        "matched": sorted(set(matched.tolist())),
    }


def _arm(
    task: tuple[argparse.Namespace, Distil, dict[str, list[int]], str, int],
) -> str:
    """Trains and evaluates one arm with one seed; returns its name."""
    import torch

    given, settings, lists, arm, seed = task
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    folder = given.work / "arms" / f"{arm}-{seed}"
    frozen = tuple(lists["rocks"] if arm == "random" else lists.get(arm, ()))
    selection = Selection(freeze_list=frozen, control=arm == "random", seed=seed)
    if not (folder / "history.json").is_file():
        plain = Distil(settings.steps, settings.rows, settings.rate)
        distil(Language(), given.work / "start", MODEL_FOLDER, folder, plain, selection, seed)
    _evaluate(given, folder / "after", lists, folder / "evaluation.json")
    return folder.name


def _evaluate(
    given: argparse.Namespace, student: Path, lists: dict[str, list[int]], file: Path
) -> None:
    language = Language()
    fresh = list(problems(language, 41, given.held_out))
    ever = sorted({token for own in lists.values() for token in own})
    found = evaluate(language, student, MODEL_FOLDER, fresh, {**lists, "ever_frozen": ever})
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(found, indent=1) + "\n", "utf-8")


def report(given: argparse.Namespace) -> None:
    """Writes tables and claims from what is there."""
    given.out.mkdir(parents=True, exist_ok=True)
    rows = []
    for file in sorted((given.work / "arms").glob("*/evaluation.json")):
        arm, _, seed = file.parent.name.rpartition("-")
        rows.append({"arm": arm, "seed": int(seed), **json.loads(file.read_text("utf-8"))})
    settings = {k: v for k, v in vars(given).items() if k not in {"work", "out"}}
    write_claims(given.work, given.out, pd.DataFrame(rows), settings)
