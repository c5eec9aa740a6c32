"""The whole loop on one machine: distil, mine, knock out, export, and distil again without rocks.

    python examples/distill_smollm2/loop.py --out runs/distill_smollm2

Teacher: SmolLM2-135M-Instruct. Student: the same without a third of its layers, first trained on
the teacher's answers for a few steps so that it writes words at all. Then:

1. on-policy distillation to two checkpoints, `opd/before` and `opd/after`;
2. `knockout mine` with both;
3. `knockout run` over the mined rocks and their controls on the starter tasks;
4. `knockout export --freeze-list`;
5. on-policy distillation again from the same start, four arms with the same seeds: `all` (no
   freezing), `freeze`, `random` (as many windows elsewhere), `budget` (the best 1 %);
6. evaluation of all arms: KL to the teacher on their own rollouts of held-out prompts, and Pass@1
   of the starter tasks, with several seeds.

Each stage is skipped where its result is there already, so a killed run goes on with the same
command. `report.json` and `report.md` in --out say what came out.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from evaluate import held_out_kl, pass_at_1, report
from train import Arm, distil

HERE = Path(__file__).parent
TEACHER = "smollm2-135m"


def parse() -> argparse.Namespace:
    """The command line; the defaults take about an hour on two cores."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, default=HERE.parent / "mining_prompts.jsonl")
    parser.add_argument("--held-out", type=int, default=12, help="last prompts, never trained on")
    parser.add_argument("--warm-steps", type=int, default=60, help="steps on the teacher's answers")
    parser.add_argument("--steps", type=int, default=40, help="on-policy steps of each arm")
    parser.add_argument("--batch", type=int, default=4, help="rollouts a step")
    parser.add_argument("--max-tokens", type=int, default=64, help="longest rollout")
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--window", type=int, default=2)
    parser.add_argument("--threshold", type=float, default=1.0, help="nats")
    parser.add_argument("--rocks", type=int, default=12, help="length of the mined list")
    parser.add_argument("--problems", type=int, default=40, help="of each starter task")
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


def main() -> None:
    """Runs what is missing, and reports."""
    args = parse()
    out: Path = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    lines = [line for line in args.prompts.read_text(encoding="utf-8").splitlines() if line.strip()]
    texts = [json.loads(line)["prompt"] for line in lines]
    train, held_out = texts[: -args.held_out], texts[-args.held_out :]
    (out / "train.jsonl").write_text("\n".join(lines[: -args.held_out]) + "\n", encoding="utf-8")

    warm = out / "warm"
    if not (warm / "training.json").exists():
        command(
            sys.executable,
            HERE.parent / "make_small_student.py",
            *("--out", warm, "--prompts", out / "train.jsonl"),
            *("--steps", str(args.warm_steps), "--before-at", str(max(1, args.warm_steps // 2))),
        )
    start = warm / "after"
    distil(args, start, TEACHER, train, out / "opd", Arm("all"), seed=0, checkpoints=True)

    mined = out / "mined"
    knockout(
        *("mine", "--teacher", TEACHER, "--student", out / "opd" / "after"),
        *("--student-before", out / "opd" / "before", "--prompts", out / "train.jsonl"),
        *("--engine", args.engine, "--max-tokens", str(args.max_tokens), "--rollouts", "2"),
        *("--top", str(args.rocks), "--min-count", "3", "--out", mined),
    )
    sweep = out / "sweep.yaml"
    sweep.write_text(
        json.dumps(
            {
                "model": str(out / "opd" / "after"),
                "engine": {"kind": args.engine, "dtype": "float32", "max_num_seqs": 32},
                "benchmarks": ["knockout_starter_arithmetic", "knockout_starter_instructions"],
                "limit": args.problems,
                "seeds": args.seeds,
                "sampling": {"temperature": 0.6, "max_tokens": args.max_tokens},
                "candidates": {
                    "file": str(mined / "rocks.csv"),
                    "column": "rock_id",
                    "controls": {"file": str(mined / "rocks.csv"), "column": "ctrl_id"},
                },
                "verdict": {"rule": "nominal", "alpha": 0.05, "margin": 0.05},
            },
            indent=2,
        ),
        encoding="utf-8",
    )
    knockout("run", sweep, "--out", out / "sweep")
    exported = ("export", out / "sweep", "--freeze-list", mined / "rocks.csv", "--format", "ids")
    strict = json.loads(knockout(*exported))
    # With so few problems most rocks are undetermined; freezing those too is what the arm tests.
    knockout(*exported, "--keep-undetermined", "--out", out / "freeze.json")
    frozen = tuple(json.loads((out / "freeze.json").read_text()))
    pillars = tuple(json.loads(knockout("export", out / "sweep", "--verdict", "strong_pillar")))

    freeze = {"freeze_list": frozen, "pillars": pillars}
    freeze |= {"window": args.window, "threshold": args.threshold}
    arms = [Arm("all"), Arm("budget", {"budget": 0.01, "score": "kl", "normalise": "trained"})]
    if frozen:
        arms += [Arm("freeze", freeze), Arm("random", freeze | {"control": True})]
    results: dict[str, Any] = {}
    for arm in [Arm("start"), *arms]:
        for seed in range(1 if arm.name == "start" else args.train_seeds):
            folder = out / "arms" / f"{arm.name}-{seed}"
            if arm.name != "start":
                distil(args, start, TEACHER, train, folder, arm, seed=seed + 1)
            student = start if arm.name == "start" else folder / "after"
            done = folder / "evaluation.json"
            if not done.exists():
                say(f"evaluating {arm.name}, seed {seed}")
                found = held_out_kl(args, student, TEACHER, held_out)
                found |= pass_at_1(args, student, folder / "pass1", knockout)
                folder.mkdir(parents=True, exist_ok=True)
                done.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
            results.setdefault(arm.name, []).append(
                json.loads(done.read_text())
                | (
                    json.loads((folder / "training.json").read_text())
                    if arm.name != "start"
                    else {}
                )
            )
    report(args, out, results, frozen=frozen, strict=strict, pillars=pillars)
    say(f"done: {out / 'report.md'}")


if __name__ == "__main__":
    main()
