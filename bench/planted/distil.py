"""On-policy distillation of a small student of the planted model, with the product's `Selector`."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.planted.decode import LONGEST, Planted
from knockout.files import write_text
from knockout.planted.language import Language
from knockout.training.heads import head_of
from knockout.training.selection import Selection
from knockout.training.selector import Selector

__all__ = ["Distil", "distil", "evaluate", "load", "roll_out"]

_IGNORED = -100


@dataclass(frozen=True, slots=True)
class Distil:
    """How a student is distilled.

    Attributes:
        steps: Updates.
        rows: Rollouts an update, all of problems of the same length.
        rate: Learning rate of AdamW; it rises for a tenth of the steps, and falls to a tenth as a
            cosine.
        kept_at: Steps after which a checkpoint is kept beside the last one.
    """

    steps: int = 160
    rows: int = 24
    rate: float = 5e-4
    kept_at: tuple[int, ...] = ()


def load(folder: Path) -> Any:
    """A checkpoint as a transformers model."""
    import transformers

    library: Any = transformers  # its classes carry no types
    return library.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)


@torch.no_grad()
def roll_out(
    student: Planted, prompts: Sequence[str], generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Samples a response to each prompt at temperature 1.

    Args:
        student: Tensors of the student.
        prompts: B problems of the same length.
        generator: Draws the tokens.

    Returns:
        Ids (B, T) of prompts and responses, padded with the end of text, and labels (B, T - 1):
        the token after each position, −100 on prompts and after the end.
    """
    ids = torch.tensor([[student.ids[word] for word in prompt.split()] for prompt in prompts])
    rows, start = ids.shape
    cache = torch.zeros(student.layers, 2, rows, student.heads, start + LONGEST, student.size)
    over = torch.zeros(rows, dtype=torch.bool)
    logits = student.forward(ids, cache, 0)
    columns, labels = [ids], [torch.full((rows, start - 1), _IGNORED)]
    for step in range(LONGEST):
        drawn = torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]
        drawn = torch.where(over, student.eos, drawn)
        columns.append(drawn[:, None])
        labels.append(torch.where(over, _IGNORED, drawn)[:, None])
        over = over | (drawn == student.eos)
        if bool(over.all()):
            break
        logits = student.forward(drawn[:, None], cache, start + step)
    return torch.cat(columns, 1), torch.cat(labels, 1)


def _prompts(language: Language, rng: random.Random, rows: int) -> list[str]:
    """Problems of one length, itself at random."""
    length = len(language.problem(rng).split())
    found: list[str] = []
    while len(found) < rows:
        problem = language.problem(rng)
        if len(problem.split()) == length:
            found.append(problem)
    return found


def distil(
    language: Language,
    start: Path,
    teacher: Path,
    out: Path,
    settings: Distil,
    selection: Selection,
    seed: int,
) -> None:
    """Trains from `start` on the student's own rollouts; writes checkpoints and `history.json`.

    Args:
        language: Makes the problems.
        start: Checkpoint of the student.
        teacher: Checkpoint of the teacher.
        out: Folder; the last checkpoint goes to `out/after`, others to `out/step-N`.
        settings: Length and size of the training.
        selection: Which tokens the student is trained on.
        seed: Of problems and rollouts.
    """
    model, expert = load(start).train(), load(teacher).eval()
    live = Planted(start)
    live.weights = dict(model.state_dict())  # shares memory with the model that is trained
    selector = Selector(selection)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.rate, weight_decay=0.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: (
            min(1.0, 10 * (step + 1) / settings.steps)
            * (0.55 + 0.45 * math.cos(math.pi * step / settings.steps))
        ),
    )
    rng = random.Random(f"distil {seed}")
    generator = torch.Generator().manual_seed(seed)
    history = []
    for step in range(settings.steps):
        ids, labels = roll_out(live, _prompts(language, rng, settings.rows), generator)
        states, targets = _hidden(model, expert, ids)
        found = selector.loss(labels, states, head_of(model), targets, head_of(expert), step=step)
        optimizer.zero_grad()
        found.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        history.append(round(found.metrics["kl_trained"], 5))
        if step + 1 in settings.kept_at:
            _save(model, start, out / f"step-{step + 1}")
    _save(model, start, out / "after")
    facts = {"settings": asdict(settings), "seed": seed, "kl": history}
    write_text(out / "history.json", json.dumps(facts) + "\n")


def _hidden(model: Any, expert: Any, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Last hidden states of student and teacher at all positions but the last, each (B, T, H)."""
    with torch.no_grad():
        targets = expert.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
    return model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state, targets


def _save(model: Any, start: Path, folder: Path) -> None:
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "language.json"):
        write_text(folder / name, (start / name).read_text("utf-8"))


@torch.no_grad()
def evaluate(
    language: Language,
    student: Path,
    teacher: Path,
    problems: Sequence[Mapping[str, str]],
    lists: Mapping[str, Sequence[int]],
    seed: int = 0,
) -> dict[str, float]:
    """Pass@1 and reverse KL of a student's own rollouts.

    Args:
        language: Of the model.
        student: Checkpoint.
        teacher: Checkpoint.
        problems: With `question` and `answer`.
        lists: Name to token ids whose mean KL is wanted.
        seed: Of the rollouts.

    Returns:
        `pass1`; `kl`, over all tokens, in nats; and per list `kl_NAME`, of its tokens, and
        `kl_not_NAME`, of all others.
    """
    tensors, model, expert = Planted(student), load(student).eval(), load(teacher).eval()
    chosen = {name: torch.tensor(list(own), dtype=torch.long) for name, own in lists.items()}
    right, sums = 0, dict.fromkeys(("", *lists), (0.0, 0))
    for number, batch in enumerate(_batches(problems)):
        # The noise of a batch is the same for every student, so that their Pass@1 differ by less.
        generator = torch.Generator().manual_seed(seed * 1_000_003 + number)
        ids, labels = roll_out(tensors, [p["question"] for p in batch], generator)
        right += _right(tensors, labels, [p["answer"] for p in batch])
        for own, kl in _kl_of_tokens(model, expert, ids, labels):
            for name in sums:
                kept = own != _IGNORED
                if name:
                    kept &= torch.isin(own, chosen[name])
                total, n = sums[name]
                sums[name] = total + float(kl[kept].sum()), n + int(kept.sum())
    total, n_all = sums.pop("")
    found = {"pass1": right / len(problems), "kl": total / n_all, "tokens": n_all / len(problems)}
    for name, (part, n) in sums.items():
        found[f"kl_{name}"] = part / n if n else math.nan
        found[f"kl_not_{name}"] = (total - part) / max(1, n_all - n)
        found[f"share_{name}"] = n / n_all
    return found


def _kl_of_tokens(
    model: Any, expert: Any, ids: Tensor, labels: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """Labels (b, t) and KL(student, teacher) in nats before each, rows of like length together."""
    ends = (labels != _IGNORED).cumsum(1).argmax(1) + 1
    for rows in ends.argsort().split(64):
        end = int(ends[rows].max())
        inputs = ids[rows, :end]
        p, q = (
            m(input_ids=inputs, use_cache=False).logits.log_softmax(-1) for m in (model, expert)
        )
        yield labels[rows, :end], (p.exp() * (p - q)).sum(-1)


def _batches(problems: Sequence[Mapping[str, str]]) -> Iterator[list[Mapping[str, str]]]:
    """Up to 256 problems of the same length."""
    lengths = [len(p["question"].split()) for p in problems]
    for length in sorted(set(lengths)):
        own = [p for p, n in zip(problems, lengths, strict=True) if n == length]
        for first in range(0, len(own), 256):
            yield own[first : first + 256]


def _right(student: Planted, labels: Tensor, answers: Sequence[str]) -> int:
    """How many rows name the answer right after their first `ans`."""
    announced = labels == student.ids["ans"]
    first = announced.int().argmax(dim=1)
    gold = torch.tensor([student.ids[answer] for answer in answers])
    after = (first + 1).clamp(max=labels.shape[1] - 1)
    named = labels[torch.arange(len(labels)), after]
    return int((announced.any(dim=1) & (named == gold)).sum())
