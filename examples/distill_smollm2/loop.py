"""The whole loop on one machine: distil, mine, knock out, export, and distil again without rocks.

    python examples/distill_smollm2/loop.py --out runs/distill_smollm2

Teacher: SmolLM2-135M-Instruct. Student: the same without a third of its layers, first trained on
the teacher's answers for a while so that it writes words at all. Then:

1. on-policy distillation to two checkpoints, `opd/before` and `opd/after`;
2. `knockout mine` with both, and `knockout geometry` of what it found;
3. `knockout run` over the mined rocks and their controls on the starter tasks;
4. `knockout export --freeze-list`;
5. on-policy distillation again from the same start, four arms with the same seeds: `all` (no
   freezing), `freeze`, `random` (as many windows elsewhere), `budget` (the best 1 %);
6. evaluation of all arms, of their start and of the teacher: KL to the teacher on their own
   rollouts of held-out prompts, and Pass@1 of the starter tasks, with several seeds.

Each stage is skipped where its result is there already, so a killed run goes on with the same
command. `report.json` and `report.md` in --out say what came out.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from evaluate import held_out_kl, pass_at_1
from report import report
from train import Arm, distil

HERE = Path(__file__).parent
TEACHER = "smollm2-135m"
TASKS = ("knockout_starter_arithmetic", "knockout_starter_instructions")


def parse() -> argparse.Namespace:
    """The command line; the defaults took 101 minutes on two cores that others used too."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, default=HERE.parent / "mining_prompts.jsonl")
    parser.add_argument("--held-out", type=int, default=12, help="last prompts, never trained on")
    parser.add_argument(
        "--warm-steps", type=int, default=100, help="steps on the teacher's answers"
    )
    parser.add_argument("--steps", type=int, default=24, help="on-policy steps of each arm")
    parser.add_argument("--batch", type=int, default=4, help="rollouts a step")
    parser.add_argument("--max-tokens", type=int, default=64, help="longest rollout")
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--window", type=int, default=2)
    parser.add_argument("--threshold", type=float, default=1.0, help="nats")
    parser.add_argument("--rocks", type=int, default=12, help="length of the mined list")
    parser.add_argument("--problems", type=int, default=40, help="of each starter task")
    parser.add_argument("--margin", type=float, default=0.1, help="of a neutral rock, in Pass@1")
    parser.add_argument("--seeds", type=int, default=3, help="of sweep and evaluation")
    parser.add_argument("--train-seeds", type=int, default=2, help="runs of each arm")
    parser.add_argument("--engine", default="transformers")
    return parser.parse_args()


def say(text: str) -> None:
    """Prints a line with the time."""
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


def command(*arguments: str | Path) -> str:
    """Runs a command of ours and returns what it printed."""
    shown = [str(a) for a in arguments]
    say("$ " + " ".join(shown))
    done = subprocess.run(shown, check=False, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"failed with {done.returncode}: {' '.join(shown)}")
    return done.stdout


def knockout(*arguments: str | Path) -> str:
    """Runs the `knockout` command of this environment."""
    return command(Path(sys.executable).with_name("knockout"), *arguments)


def stage(out: Path, name: str, result: Path, work: Callable[[], Any]) -> None:
    """Does `work` unless `result` is there, and notes its wall time in `out/stages.json`."""
    if result.exists():
        return
    say(name)
    began = time.monotonic()
    work()
    notes = out / "stages.json"
    seconds = json.loads(notes.read_text()) if notes.exists() else {}
    seconds[name] = round(time.monotonic() - began, 1)
    notes.write_text(json.dumps(seconds, indent=1) + "\n", encoding="utf-8")


def sweep_of(args: argparse.Namespace, student: Path | str, candidates: dict[str, Any]) -> str:
    """A sweep file over the starter tasks (YAML reads JSON)."""
    sweep = {
        "model": str(student),
        "engine": {"kind": args.engine, "dtype": "float32", "max_num_seqs": 32},
        "benchmarks": list(TASKS),
        "limit": args.problems,
        "seeds": args.seeds,
        "sampling": {"temperature": 0.6, "max_tokens": args.max_tokens},
        "candidates": candidates,
        "verdict": {"rule": "nominal", "alpha": 0.05, "margin": args.margin},
    }
    return json.dumps(sweep, indent=2) + "\n"


def main() -> None:
    """Runs what is missing, and reports."""
    args = parse()
    out: Path = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    lines = [line for line in args.prompts.read_text(encoding="utf-8").splitlines() if line.strip()]
    texts = [json.loads(line)["prompt"] for line in lines]
    train, held_out = texts[: -args.held_out], texts[-args.held_out :]
    prompts = out / "train.jsonl"
    prompts.write_text("\n".join(lines[: -args.held_out]) + "\n", encoding="utf-8")

    warm, opd, mined = out / "warm", out / "opd", out / "mined"
    start = warm / "after"
    make = (sys.executable, HERE.parent / "make_small_student.py", "--out", warm)
    make += ("--prompts", prompts, "--steps", str(args.warm_steps))
    make += ("--before-at", str(max(1, args.warm_steps // 2)))
    stage(out, "warm", warm / "training.json", lambda: command(*make))
    stage(
        out, "opd", opd / "training.json",
        lambda: distil(args, start, TEACHER, train, opd, Arm("all"), seed=0, checkpoints=True),
    )  # fmt: skip
    mine = ("mine", f"teacher={TEACHER}", f"student={opd / 'after'}", f"out={mined.resolve()}")
    mine += (f"student_before={opd / 'before'}", f"prompts.file={prompts.resolve()}")
    mine += (f"engine.kind={args.engine}", f"rollouts.max_tokens={args.max_tokens}")
    mine += ("rollouts.per_prompt=2", "rollouts.sampling.temperature=0.6")
    mine += (f"list.top={args.rocks}", "list.min_count=3")
    rocks = mined / "rocks.csv"
    stage(out, "mine", rocks, lambda: knockout(*mine))
    geometry = ("geometry", mined, "--min-count", "3")
    stage(out, "geometry", mined / "geometry.json", lambda: knockout(*geometry))
    sweep = out / "sweep.yaml"
    controls = {"file": str(rocks), "column": "ctrl_id"}
    candidates = {"file": str(rocks), "column": "rock_id", "controls": controls}
    sweep.write_text(sweep_of(args, opd / "after", candidates), encoding="utf-8")
    stage(
        out, "sweep", out / "sweep" / "verdicts.json",
        lambda: knockout("run", sweep, "--out", out / "sweep"),
    )  # fmt: skip

    exported = ("export", out / "sweep", "--freeze-list", rocks, "--format", "ids")
    decided = json.loads(knockout(*exported))
    # With few problems it can be that no rock is decided on; then the arm freezes undetermined ones.
    frozen = decided or json.loads(knockout(*exported, "--keep-undetermined"))
    (out / "freeze.json").write_text(json.dumps(frozen) + "\n", encoding="utf-8")
    pillars = json.loads(knockout("export", out / "sweep", "--verdict", "strong_pillar"))

    freeze = {"freeze_list": tuple(frozen), "pillars": tuple(pillars)}
    freeze |= {"window": args.window, "threshold": args.threshold}
    arms = [Arm("all"), Arm("budget", {"budget": 0.01, "normalise": "trained"})]
    if frozen:
        arms += [Arm("freeze", freeze), Arm("random", freeze | {"control": True})]
    students: dict[str, list[tuple[Path, Path | str]]] = {
        "teacher": [(out / "arms" / "teacher", TEACHER)],
        "start": [(out / "arms" / "start", start)],
    }
    for seed in range(args.train_seeds):
        for arm in arms:
            folder = out / "arms" / f"{arm.name}-{seed}"
            stage(
                out, f"train {folder.name}", folder / "training.json",
                lambda arm=arm, folder=folder, seed=seed: distil(
                    args, start, TEACHER, train, folder, arm, seed=seed + 1
                ),
            )  # fmt: skip
            students.setdefault(arm.name, []).append((folder, folder / "after"))
    results: dict[str, list[dict[str, Any]]] = {}
    for name, runs in students.items():
        for folder, student in runs:
            stage(
                out, f"evaluate {folder.name}", folder / "evaluation.json",
                lambda folder=folder, student=student: evaluate(args, folder, student, held_out),
            )  # fmt: skip
            found = json.loads((folder / "evaluation.json").read_text(encoding="utf-8"))
            training = folder / "training.json"
            if training.exists():
                found |= json.loads(training.read_text(encoding="utf-8"))
            results.setdefault(name, []).append(found)
    report(args, out, results, frozen=frozen, decided=decided, pillars=pillars)
    say(f"done: {out / 'report.md'}")


def evaluate(
    args: argparse.Namespace, folder: Path, student: Path | str, held_out: list[str]
) -> None:
    """Writes `folder/evaluation.json`."""
    folder.mkdir(parents=True, exist_ok=True)
    found = held_out_kl(args, student, TEACHER, held_out)
    sweep = folder / "pass1.yaml"
    sweep.write_text(sweep_of(args, student, {"strings": [" parliament"]}), encoding="utf-8")
    knockout("run", sweep, "--out", folder / "pass1")
    found |= {"pass1": pass_at_1(folder / "pass1")}
    text = json.dumps(found, indent=1) + "\n"
    (folder / "evaluation.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
