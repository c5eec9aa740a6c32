"""The TRL trainer: real training of tiny models, with the weights seen in what is learned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import tiny_model

from knockout.errors import KnockoutError, UsageError
from knockout.training import FollowKL, freeze_weights, reverse_kl
from knockout.training.selection import Selection

pytest.importorskip("trl", reason="needs the extra `train`")

# TRL's own word on the installed vLLM, which these runs do not use.
pytestmark = pytest.mark.filterwarnings("ignore:TRL currently supports vLLM")

VOCAB = 300
PROMPTS = [[5, 9, 44], [7, 8], [12, 60, 61, 62, 90], [30], [33, 34], [99, 98]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    base = tmp_path_factory.mktemp("models")
    return tiny_model(base / "student", VOCAB, seed=0), tiny_model(base / "teacher", VOCAB, seed=1)


def make(folders: tuple[Path, Path], out: Path, selection: Selection | None, **kwargs: Any) -> Any:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DistillationConfig

    from knockout.training.trl import SelectiveDistillationTrainer

    class TokenPrompts(SelectiveDistillationTrainer):
        """Prompts of ids that the tiny vocabulary has; the rest of the way is the trainer's own."""

        def _tokenize_prompts(self, prompts: list[str]) -> Any:
            return [[int(i) for i in text.split()] for text in prompts], None, {}

    torch.manual_seed(0)
    options: dict[str, Any] = {
        "beta": 1.0,
        "max_steps": 3,
        "gradient_accumulation_steps": 1,
        "save_strategy": "no",
        **kwargs,
    }
    special = options.pop("allow_special", True)  # the small ids of this tokenizer are special
    prompts = options.pop("prompts", PROMPTS)
    evaluation = options.pop("eval_prompts", None)
    options.setdefault("per_device_train_batch_size", 3)
    config = DistillationConfig(
        str(out),
        max_completion_length=10,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        logging_steps=1,
        report_to=[],
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=True,
        disable_tqdm=True,
        seed=3,
        **options,
    )
    return TokenPrompts(
        model=AutoModelForCausalLM.from_pretrained(folders[0], dtype=torch.float32),
        teacher_model=AutoModelForCausalLM.from_pretrained(folders[1], dtype=torch.float32),
        args=config,
        train_dataset=Dataset.from_dict({"prompt": [" ".join(map(str, p)) for p in prompts]}),
        eval_dataset=evaluation
        and Dataset.from_dict({"prompt": [" ".join(map(str, p)) for p in evaluation]}),
        processing_class=AutoTokenizer.from_pretrained(folders[0], padding_side="left"),
        selection=selection,
        allow_special=special,
    )


def logs(trainer: Any) -> list[dict[str, float]]:
    return [row for row in trainer.state.log_history if "loss" in row]


def weights_of(trainer: Any) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])


def loss_of_trl(trainer: Any, inputs: dict[str, Any], labels: torch.Tensor, weights: Any) -> Any:
    """The weighted loss from the models' own whole logits."""
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    start = inputs["prompt_ids"].shape[1] - 1
    student, teacher = (
        m(input_ids=ids, attention_mask=mask).logits[:, start:-1]
        for m in (trainer.model, trainer.teacher_model)
    )
    kl = reverse_kl(student, teacher)
    return (weights(labels, kl) * kl).sum() / (labels != -100).sum(), kl


def test_without_a_selection_it_is_trls_own_trainer(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    from trl import DistillationTrainer

    ours = make(folders, tmp_path / "ours", None)
    theirs = make(folders, tmp_path / "theirs", None)
    theirs._compute_loss = DistillationTrainer._compute_loss.__get__(theirs)
    before = weights_of(ours)
    for trainer in (ours, theirs):
        torch.manual_seed(0)  # of the rollouts
        trainer.train()
    for a, b in zip(logs(ours), logs(theirs), strict=True):
        for name in ("loss", "entropy", "grad_norm"):
            assert a[name] == pytest.approx(b[name], rel=1e-3), name
    assert not torch.equal(before, weights_of(ours))
    torch.testing.assert_close(weights_of(ours), weights_of(theirs), rtol=1e-2, atol=1e-3)


def test_frozen_tokens_alone_move_nothing(folders: tuple[Path, Path], tmp_path: Path) -> None:
    everything = Selection(tuple(range(VOCAB)))
    trainer = make(folders, tmp_path, everything, allow_special=True, weight_decay=0.0)
    before = weights_of(trainer)
    trainer.train()
    assert torch.equal(before, weights_of(trainer))
    for row in logs(trainer):
        assert row["loss"] == row["grad_norm"] == 0
        assert row["frozen_share"] == row["skipped_share"] == 1
    assert logs(trainer)[0]["kl_frozen"] > 0  # measured at step 0


@pytest.mark.parametrize("accumulate", [1, 2])
def test_losses_and_gradients_are_those_of_the_weights(
    folders: tuple[Path, Path], tmp_path: Path, accumulate: int
) -> None:
    freeze, pillars, threshold = tuple(range(3, VOCAB, 2)), (5, 7, 9, 11, 13), 0.2
    chosen = Selection(freeze, pillars, 1, threshold, watch_every=2)
    trainer = make(folders, tmp_path, chosen, gradient_accumulation_steps=accumulate)
    seen = []
    plain = trainer._compute_loss

    def spy(student: Any, inputs: dict[str, Any], number: Any) -> Any:
        labels = torch.where(inputs["completion_mask"].bool(), inputs["completion_ids"], -100)
        weights = lambda ids, kl: freeze_weights(ids, kl, freeze, 1, threshold, 0.0, pillars)  # noqa: E731
        wanted, kl = loss_of_trl(trainer, inputs, labels, weights)
        wanted = wanted * (labels != -100).sum() / number
        parameters = list(trainer.model.parameters())
        grads = torch.autograd.grad(wanted, parameters)
        found = plain(student, inputs, number)
        ours = torch.autograd.grad(found[0], parameters, retain_graph=True)
        torch.testing.assert_close(found[0], wanted)
        for a, b in zip(ours, grads, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)
        share = weights(labels, kl)[labels != -100] == 0
        seen.append(
            (float(share.float().mean()), float(kl[labels != -100][~share].detach().mean()))
        )
        return found

    trainer._compute_loss = spy
    trainer.train()
    assert len(seen) == 3 * accumulate
    for row, parts in zip(logs(trainer), zip(*[iter(seen)] * accumulate, strict=True), strict=True):
        assert row["frozen_share"] == pytest.approx(sum(p[0] for p in parts) / accumulate, abs=1e-6)
        assert row["kl_trained"] == pytest.approx(sum(p[1] for p in parts) / accumulate, rel=1e-3)
        assert 0 < row["frozen_share"] < 1
        assert row["logit_grad_norm_trained"] > 0
        assert row["grad_norm"] > 0
    assert "kl_frozen" in logs(trainer)[0]


class Watched:
    """Keeps the weights of every batch that a trainer's selector sees."""

    def __init__(self, trainer: Any) -> None:
        self.weights: list[torch.Tensor] = []
        plain = trainer.selector.loss

        def loss(*args: Any, **kwargs: Any) -> Any:
            result = plain(*args, **kwargs)
            self.weights.append(result.weights)
            return result

        trainer.selector.loss = loss


def test_a_resumed_run_trains_on_the_same_tokens(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    chosen = Selection(tuple(range(3, VOCAB, 2)), control=True, schedule=FollowKL(20.0, 0.001))
    # Prompts for one epoch: TRL's sampler resumes a later one with the first one's order.
    prompts = [[5 + i, 2 * i + 9, 44][: 1 + i % 3] for i in range(12)]
    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "prompts": prompts}
    straight = make(folders, tmp_path / "straight", chosen, **options)
    seen = Watched(straight)
    torch.manual_seed(0)  # of the rollouts
    straight.train()

    resumed = make(folders, tmp_path / "resumed", chosen, **options)
    again = Watched(resumed)
    torch.manual_seed(1)
    checkpoint = tmp_path / "straight" / "checkpoint-2"
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert len(seen.weights) == 4
    assert len(again.weights) == 2
    for one, other in zip(seen.weights[2:], again.weights, strict=True):
        assert torch.equal(one, other)
    for one, other in zip(logs(straight)[2:], logs(resumed)[2:], strict=True):
        for name in ("loss", "grad_norm", "frozen_share", "frozen_weight", "kl_trained"):
            assert one[name] == pytest.approx(other[name], rel=1e-4), name
    assert 0 < logs(straight)[3]["frozen_weight"] < 1  # the schedule has seen a KL
    torch.testing.assert_close(weights_of(straight), weights_of(resumed))

    (checkpoint / "selector.pt").write_bytes(b"torn")
    with pytest.raises(KnockoutError, match=r"selector\.pt"):
        resumed.train(resume_from_checkpoint=str(checkpoint))


def test_a_checkpoint_without_a_selector_says_so(
    folders: tuple[Path, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    make(folders, tmp_path, Selection((5,)), **options).train()
    (tmp_path / "checkpoint-1" / "selector.pt").unlink()
    (tmp_path / "checkpoint-2").rename(tmp_path / "elsewhere")
    make(folders, tmp_path, Selection((5,)), **options).train(resume_from_checkpoint=True)
    assert "selector.pt is not there" in caplog.text


def test_what_it_cannot_do_is_refused(folders: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"beta is 0\.5"):
        make(folders, tmp_path, None, beta=0.5)
    with pytest.raises(UsageError, match=r"special token ids \[2\]"):
        make(folders, tmp_path, Selection((2, 50)), allow_special=False)


def test_arms_are_evaluated_alike(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """The same model under three selections has one eval_loss, and its dice and KL stay."""
    odd = tuple(range(3, VOCAB, 2))
    arms = [
        Selection(odd),
        Selection(odd, control=True, schedule=FollowKL(20.0, 0.001)),
        Selection(budget=0.1, score="soft_or"),
    ]
    losses = []
    for place, arm in enumerate(arms):
        trainer = make(folders, tmp_path / str(place), arm, eval_prompts=PROMPTS[:3])
        before = str(trainer.selector.state_dict())
        torch.manual_seed(0)  # of the rollouts
        found = trainer.evaluate()
        assert str(trainer.selector.state_dict()) == before
        losses.append(found["eval_loss"])
        if arm.freeze_list:
            assert found["eval_kl_frozen"] > 0
            assert found["eval_kl_unfrozen"] > 0
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-6)


@pytest.mark.parametrize(
    "arm",
    [
        {"freeze_list": tuple(range(3, VOCAB, 2)), "normalise": "trained"},
        {"freeze_list": tuple(range(3, VOCAB, 2)), "normalise": "trained", "window": 1,
         "threshold": 0.2},
        {"max_tokens": 4},
        {"budget": 0.2, "score": "kl", "normalise": "trained"},
    ],
)  # fmt: skip
def test_an_update_does_not_depend_on_accumulation(
    folders: tuple[Path, Path], tmp_path: Path, arm: dict[str, Any]
) -> None:
    moved = []
    for size, accumulate in ((6, 1), (3, 2)):
        trainer = make(
            folders,
            tmp_path / str(size),
            Selection(**arm),
            per_device_train_batch_size=size,
            gradient_accumulation_steps=accumulate,
            max_steps=1,
            optim="sgd",
            max_grad_norm=0.0,
        )
        before = weights_of(trainer)
        torch.manual_seed(0)  # of the rollouts
        trainer.train()
        moved.append(weights_of(trainer) - before)
    assert moved[0].norm() > 0
    assert (moved[0] - moved[1]).norm() / moved[0].norm() < 2e-3


def test_a_model_whose_head_is_not_known_is_refused(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import LlamaForCausalLM

    plain = LlamaForCausalLM.forward

    def doubled(self: Any, *args: Any, **kwargs: Any) -> Any:
        out = plain(self, *args, **kwargs)
        out.logits = 2 * out.logits
        return out

    monkeypatch.setattr(LlamaForCausalLM, "forward", doubled)
    with pytest.raises(UsageError, match=r"the student .* its logits are not those"):
        make(folders, tmp_path, None)


@pytest.mark.filterwarnings("ignore")  # of transformers' slow paths
def test_falcon_h1_is_trained_with_trls_own_loss(tmp_path: Path) -> None:
    """Its head multiplies the logits under a name of its own."""
    from test_training_heads import tiny
    from tiny import tiny_model
    from trl import DistillationTrainer

    for place, seed in (("student", 0), ("teacher", 1)):
        tiny_model(tmp_path / place, 61, seed=seed)  # for the tokenizer
        model = tiny("Falcon-H1")
        with torch.no_grad():
            model.lm_head.weight.add_(0.5 * seed * torch.randn_like(model.lm_head.weight))
        model.save_pretrained(tmp_path / place)
    trainer = make((tmp_path / "student", tmp_path / "teacher"), tmp_path / "out", None,
                   prompts=[[5, 9, 44], [7, 8], [12, 60, 3]], max_steps=1)  # fmt: skip
    seen = []
    plain = trainer._compute_loss

    def spy(student: Any, inputs: dict[str, Any], number: Any) -> Any:
        found = plain(student, inputs, number)
        theirs = DistillationTrainer._compute_loss(trainer, student, inputs, number)
        seen.append((float(found[0]), float(theirs[0])))
        return found

    trainer._compute_loss = spy
    trainer.train()
    ((ours, theirs),) = seen
    assert ours == pytest.approx(theirs, rel=1e-4)
    assert theirs > 0
