"""What freezing saves in a training step: time and memory at several frozen shares.

    python bench/freezing.py --frozen 0 0.2 0.4 0.6

A step is the student's and the teacher's forward pass over given rollouts, the loss, backward and
AdamW; generation is left out, freezing does not touch it. The arms:

* `whole`: both models' whole logits, KL of every position, weights multiplied in afterwards: what
  a trainer does that only counts frozen positions less;
* `trl`: the chunked loss of TRL's DistillationTrainer, which knows no weights;
* `skip`: this project's loss at each frozen share;
* `budget`: 1 % of the positions, picked by KL; `tail`: the first half of each response.

Each arm runs in a process of its own, for its peak memory. On a CPU the time is the process's CPU
time on one thread, which other processes on the machine disturb less than wall time.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

TYPES = 1000  # Labels are drawn from so many types; the first ones are frozen.


def step_parts(args: argparse.Namespace) -> dict[str, Any]:
    """Models, optimiser and a batch of rollouts of random tokens."""
    from transformers import AutoModelForCausalLM

    from knockout.tokens.checkpoint import resolve_model

    sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
    from make_small_student import kept_layers

    folder = resolve_model(args.model)
    dtype = getattr(torch, args.dtype)
    teacher = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(args.device).eval()
    student: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    kept = kept_layers(len(student.model.layers))
    student.model.layers = torch.nn.ModuleList(student.model.layers[i] for i in kept)
    student.to(args.device).train()
    make = torch.Generator().manual_seed(0)
    ids = torch.randint(
        1000, 1000 + TYPES, (args.rows, args.prompt + args.response), generator=make
    )
    labels = ids.clone()
    labels[:, : args.prompt] = -100
    return {
        "student": student,
        "teacher": teacher,
        "optimizer": torch.optim.AdamW(student.parameters(), lr=1e-5),
        "ids": ids.to(args.device),
        "labels": torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100).to(args.device),
    }


def loss_of(args: argparse.Namespace, parts: dict[str, Any]) -> Any:
    """The arm's loss as a function without arguments."""
    from knockout.training import freeze_weights, head_of, reverse_kl
    from knockout.training.selection import Selection
    from knockout.training.selector import Selector

    student, teacher, labels = parts["student"], parts["teacher"], parts["labels"]
    frozen = tuple(range(1000, 1000 + round(args.share * TYPES)))

    def hidden(model: Any, ids: torch.Tensor) -> torch.Tensor:
        return model.model(input_ids=ids, use_cache=False).last_hidden_state

    def whole() -> torch.Tensor:
        ids = parts["ids"]
        with torch.no_grad():
            target = teacher(input_ids=ids, use_cache=False).logits
        kl = reverse_kl(student(input_ids=ids, use_cache=False).logits, target)
        weights = freeze_weights(labels, kl, frozen)
        return (weights * kl).sum() / (labels != -100).sum()

    def trl() -> torch.Tensor:
        from trl.trainer.distillation_trainer import _chunked_divergence_loss

        keep = slice(args.prompt - 1, -1)
        with torch.no_grad():
            target = hidden(teacher, parts["ids"])[:, keep]
        states = hidden(student, parts["ids"])[:, keep]
        mask = torch.ones(states.shape[:2], dtype=torch.int64, device=states.device)
        heads = student.lm_head.weight, teacher.lm_head.weight
        return _chunked_divergence_loss(states, target, *heads, mask, 1.0)[0]

    chosen = {
        "skip": Selection(frozen, watch_every=0),
        "budget": Selection(budget=0.01, score="kl", watch_every=0),
        "tail": Selection(max_tokens=args.response // 2, watch_every=0),
    }
    selector = Selector(chosen.get(args.arm, Selection()))

    def skip() -> torch.Tensor:
        rows, columns = selector.reach(labels, 1)
        ids, own = parts["ids"][rows, :columns], labels[rows, :columns]
        with torch.no_grad():
            target = hidden(teacher, ids)
        states = hidden(student, ids)
        return selector.loss(own, states, head_of(student), target, head_of(teacher), step=1).loss

    return {"whole": whole, "trl": trl}.get(args.arm, skip)


def run_arm(args: argparse.Namespace) -> None:
    """Times one arm and prints a JSON line."""
    import resource

    torch.set_num_threads(args.threads)
    cuda = torch.device(args.device).type == "cuda"
    parts = step_parts(args)
    loss = loss_of(args, parts)

    def step() -> None:
        parts["optimizer"].zero_grad(set_to_none=True)
        loss().backward()
        parts["optimizer"].step()
        if cuda:
            torch.cuda.synchronize()

    clock = time.perf_counter if cuda else time.process_time
    step()  # makes the optimiser's state, warms caches
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(args.repeats):
        start = clock()
        step()
        seconds.append(clock() - start)
    unit = 1 if sys.platform == "darwin" else 1024
    peak = (
        torch.cuda.max_memory_allocated()
        if cuda
        else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    )
    print(json.dumps({"seconds": seconds, "peak_bytes": peak}))


def weigh_seconds(device: str) -> float:
    """Time of one `freeze_weights` with a list of 100 and a window of 4, on 8 × 4096 positions."""
    from knockout.training import freeze_weights, token_table

    make = torch.Generator().manual_seed(0)
    labels = torch.randint(151_936, (8, 4096), generator=make).to(device)
    loss = torch.rand(8, 4096, generator=make).to(device)
    frozen = token_table(range(0, 10_000, 100), device)
    torch.set_num_threads(1)
    seconds = []
    for _ in range(30):
        start = time.perf_counter()
        freeze_weights(labels, loss, frozen, 4, 0.5)
        if torch.device(device).type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return sorted(seconds)[len(seconds) // 2]


def main() -> None:
    """Runs all arms and writes bench/results/freezing/<device>.json."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--model", default="smollm2-135m", help="teacher; student: two thirds of it"
    )
    parser.add_argument("--frozen", type=float, nargs="+", default=[0.0, 0.2, 0.4, 0.6])
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--response", type=int, default=160)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--arms", nargs="+", default=["whole", "trl", "skip", "budget", "tail"])
    parser.add_argument("--name", help="of the result file; default: the device")
    parser.add_argument("--arm", help=argparse.SUPPRESS)
    parser.add_argument("--share", type=float, default=0.0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.arm:
        run_arm(args)
        return
    from machine import write

    arms = [("whole", 0.0), ("whole", max(args.frozen)), ("trl", 0.0)]
    arms += [("skip", share) for share in args.frozen] + [("budget", 0.0), ("tail", 0.0)]
    rows = []
    for arm, share in [pair for pair in arms if pair[0] in args.arms]:
        command = [sys.executable, __file__, *sys.argv[1:], "--arm", arm, "--share", str(share)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"arm {arm} failed:\n{done.stderr[-2000:]}")
        found = json.loads(done.stdout.splitlines()[-1])
        rows.append(
            {
                "arm": arm,
                "frozen": share,
                "median_s": sorted(found["seconds"])[args.repeats // 2],
                **found,
            }
        )
        print(
            f"{arm:7} {share:4.0%}  {rows[-1]['median_s']:.2f} s  {found['peak_bytes'] / 2**20:.0f} MiB",
            flush=True,
        )
    hidden = ("arm", "share", "arms", "name")
    settings = {k: v for k, v in vars(args).items() if k not in hidden}
    name = args.name or torch.device(args.device).type
    call = weigh_seconds(args.device)
    print(f"freeze_weights on 8 x 4096 positions: {call * 1e3:.2f} ms")
    write(f"freezing/{name}", {"settings": settings, "arms": rows, "freeze_weights_8x4096_s": call})


if __name__ == "__main__":
    main()
