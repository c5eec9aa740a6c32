"""On-policy distillation of one arm, through the TRL trainer."""

from __future__ import annotations

import argparse
import json
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Arm:
    """An arm of the comparison: its name and the keyword arguments of its `Selection`."""

    name: str
    selection: dict[str, Any] = field(default_factory=dict)


def distil(
    args: argparse.Namespace,
    start: Path,
    teacher: str,
    prompts: list[str],
    out: Path,
    arm: Arm,
    *,
    seed: int,
    checkpoints: bool = False,
) -> None:
    """Trains from `start` and writes `out/after`, with checkpoints also `out/before`.

    Does nothing if `out/training.json` exists.
    """
    if (out / "training.json").exists():
        return
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM
    from trl import DistillationConfig

    from knockout.tokens.checkpoint import load_tokenizer, quiet_transformers, resolve_model
    from knockout.tokens.eos import stop_ids
    from knockout.training.selection import Selection
    from knockout.training.trl import SelectiveDistillationTrainer

    warnings.filterwarnings("ignore", message="TRL currently supports vLLM")
    folder = resolve_model(teacher)
    tokenizer: Any = load_tokenizer(folder)
    tokenizer.padding_side = "left"
    half = max(1, args.steps // 2)
    config = DistillationConfig(
        str(out),
        max_completion_length=args.max_tokens,
        per_device_train_batch_size=args.batch,
        max_steps=args.steps,
        learning_rate=args.learning_rate,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        logging_steps=1,
        report_to=[],
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=not torch.cuda.is_available(),
        save_strategy="steps" if checkpoints else "no",
        save_steps=half,
        save_only_model=True,
        disable_tqdm=True,
        seed=seed,
    )
    ends = stop_ids(tokenizer, folder)
    trainer = SelectiveDistillationTrainer(
        model=AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32),
        teacher_model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        args=config,
        train_dataset=Dataset.from_dict(
            {"prompt": [[{"role": "user", "content": p}] for p in prompts]}
        ),
        processing_class=tokenizer,
        selection=Selection(**arm.selection, merge=(ends,), seed=seed),
    )
    began = time.monotonic()
    with quiet_transformers():
        trainer.train()
    seconds = time.monotonic() - began
    if checkpoints:
        (out / f"checkpoint-{half}").rename(out / "before")
    trainer.model.save_pretrained(out / "after")
    for name in ("before", "after") if checkpoints else ("after",):
        tokenizer.save_pretrained(out / name)
    steps = [row for row in trainer.state.log_history if "loss" in row]
    names = ("frozen_share", "skipped_share", "kl_trained", "kl_frozen", "grad_norm")
    history = {name: [row.get(name) for row in steps] for name in names}
    text = json.dumps({"train_s": round(seconds, 1), "history": history}, indent=1)
    (out / "training.json").write_text(text + "\n", encoding="utf-8")
