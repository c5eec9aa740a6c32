"""The whole of `knockout mine` on small models: files, resuming, refusals."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import typer
import yaml
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner

import knockout
from knockout.cli.mine import mine as mine_command
from knockout.cli.mine import orthogonality
from knockout.engines.open import open_engine
from knockout.errors import KnockoutError, UsageError
from knockout.method.sampling import Sampling
from knockout.mining.identity import require_same_tokenizer
from knockout.mining.mine import MineSettings, mine, open_models
from knockout.mining.rollouts import Prompt, missing, read_prompts
from knockout.mining.shards import read_shard
from knockout.tokens.lists import read_list
from knockout.training import reverse_kl

VOCAB = 60
SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"  # a name, never loaded
PROMPTS = [Prompt("test", f"p{i}", (3 + i, 4, 5)) for i in range(8)]


def tokenizer(words: list[str] | None = None) -> PreTrainedTokenizerFast:
    words = words or ["<unk>", "<end>", "<pad>", *(f"w{i}" for i in range(3, VOCAB))]
    core = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, unk_token="<unk>", eos_token="<end>", pad_token="<pad>"
    )


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A teacher and two students that are the teacher with more and less noise."""
    base = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=128,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=2,
        initializer_range=0.3,
    )
    teacher = LlamaForCausalLM(config)
    state = {k: v.clone() for k, v in teacher.state_dict().items()}
    found = {}
    for name, noise in (("teacher", 0.0), ("student", 0.1), ("before", 0.2)):
        torch.manual_seed(1)
        teacher.load_state_dict(
            {k: v + noise * v.std() * torch.randn_like(v) for k, v in state.items()}
        )
        found[name] = base / name
        teacher.save_pretrained(found[name])
        tokenizer().save_pretrained(found[name])
    return found


def settings(**changes: Any) -> MineSettings:
    return MineSettings(**{"rollouts": 3, "max_tokens": 40, "sampling": Sampling(1.0), **changes})


def start(folder: Path) -> Any:
    return open_engine(str(folder), kind="transformers", max_num_seqs=8)


def folders(checkpoints: dict[str, Path]) -> tuple[str, str, str]:
    return str(checkpoints["teacher"]), str(checkpoints["student"]), str(checkpoints["before"])


def test_a_killed_run_goes_on_and_ends_the_same(
    checkpoints: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = open_models(*folders(checkpoints))
    whole = list(mine(tmp_path / "whole", models, PROMPTS, settings(), start)())

    class Killed(Exception):
        """Stands for the end of the process."""

    class Dying:
        """A real engine that takes only so many steps."""

        def __init__(self, folder: Path) -> None:
            self.engine = start(folder)
            self.steps = 0

        def __getattr__(self, name: str) -> Any:
            return getattr(self.engine, name)

        def step(self) -> Any:
            self.steps += 1
            if self.steps > 60:
                raise Killed
            return self.engine.step()

    out = tmp_path / "parts"
    with pytest.raises(Killed):
        mine(out, models, PROMPTS, settings(), Dying)
    left = missing(out / "rollouts", len(PROMPTS))
    assert 0 < len(left) < len(PROMPTS)
    kept = {p.name: p.stat().st_mtime_ns for p in (out / "rollouts").glob("*.npz")}

    monkeypatch.setattr("knockout.mining.mine._WINDOW", 2)
    monkeypatch.setattr("knockout.mining.mine.write_shard", _dies_after(3))
    with pytest.raises(RuntimeError, match="killed"):
        mine(out, models, PROMPTS, settings(), start)
    assert len(missing(out / "scores", len(PROMPTS))) == len(PROMPTS) - 3
    assert all((out / "rollouts" / n).stat().st_mtime_ns == t for n, t in kept.items())

    monkeypatch.undo()
    parts = list(mine(out, models, PROMPTS, settings(), start)())
    for a, b in zip(whole, parts, strict=True):
        np.testing.assert_array_equal(a.tokens, b.tokens)
        for name, values in a.scores.items():
            np.testing.assert_allclose(values, b.scores[name], rtol=1e-4, atol=1e-5)
    # Finished is a no-op: no engine is opened.
    again = mine(out, models, PROMPTS, settings(), lambda _: pytest.fail("an engine was opened"))
    assert len(list(again())) == len(PROMPTS)


def _dies_after(n: int) -> Any:
    from knockout.mining.shards import write_shard

    calls = iter(range(n))

    def write(*args: Any) -> None:
        if next(calls, None) is None:
            raise RuntimeError("killed")
        write_shard(*args)

    return write


def test_another_run_in_the_folder_is_refused_with_the_keys(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    models = open_models(*folders(checkpoints)[:2])
    mine(tmp_path, models, PROMPTS[:2], settings(), start)
    with pytest.raises(UsageError, match=r"sampling\.temperature: 1\.0 there, 0\.7 here"):
        mine(tmp_path, models, PROMPTS[:2], settings(sampling=Sampling(0.7)), start)
    with pytest.raises(UsageError, match=r"n_prompts: 2 there, 3 here"):
        mine(tmp_path, models, PROMPTS[:3], settings(), start)
    other = open_models(*folders(checkpoints))
    with pytest.raises(UsageError, match=r"models\.before: nothing there"):
        mine(tmp_path, other, PROMPTS[:2], settings(), start)


def test_scores_hold_the_models_and_the_list_serves_a_sweep(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    app = typer.Typer()
    app.command()(mine_command)
    app.command()(orthogonality)
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"id": f"p{i}", "prompt": f"w{3 + i} w4 w5"} for i in range(8)]
    prompts.write_text("\n".join(json.dumps(r) for r in rows))
    out = tmp_path / "out"
    teacher, student, before = folders(checkpoints)
    file = tmp_path / "mine.yaml"
    file.write_text(
        yaml.safe_dump(
            {
                "teacher": teacher,
                "student": student,
                "student_before": before,
                "out": "out",
                "prompts": {"file": "prompts.jsonl"},
                "engine": {"kind": "transformers"},
                "rollouts": {"per_prompt": 4, "max_tokens": 60, "sampling": {"temperature": 1}},
                "list": {"top": 8, "min_count": 2},
            }
        )
    )
    command = ["mine", str(file)]
    done = CliRunner().invoke(app, command, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    rocks = pd.read_csv(out / "rocks.csv")
    published = "rock_id,rock_token,rock_freq,rock_mean_kl,rock_freq_mean"
    columns = f"{published},{published.replace('rock', 'ctrl')}".split(",")
    assert rocks.columns[:10].tolist() == columns
    assert len(rocks) == 8
    pd.testing.assert_series_equal(
        rocks["rock_freq_mean"], rocks["rock_freq"] * rocks["rock_mean_kl"], check_names=False
    )
    assert rocks["rock_score_ctx"].is_monotonic_decreasing
    assert 1 not in set(rocks["rock_id"])  # the end-of-text token
    for suffix in ("csv", "parquet"):
        listed = [i.value for i in read_list(out / f"rocks.{suffix}", "rock_id")]
        assert listed == rocks["rock_id"].tolist()
        for kind in ("frequency", "position", "rank"):
            drawn = {i.value for i in read_list(out / f"controls.{suffix}", f"{kind}_id")}
            assert drawn
            assert not drawn & set(listed)
    table = pd.read_csv(out / "token_scores.csv").set_index("token_id")
    shards = [read_shard(p) for p in sorted((out / "scores").glob("*.npz"))]
    tokens = np.concatenate([s.tokens for s in shards])
    assert table["frequency"].sum() == len(tokens)
    assert (table["mean_kl_before"] * table["frequency"]).sum() > table["total_kl"].sum()
    curve = pd.read_csv(out / "cutoff.csv")
    assert curve["stability"].between(0, 1).all()
    summary = json.loads((out / "summary.json").read_text())
    assert summary["n_positions"] == len(tokens)
    assert summary["mean_kl"] < summary["mean_kl_before"]
    page = (out / "cutoff.html").read_text()
    assert "K (types, by rank)" in page
    assert "http" not in re.sub(r"<script>.*?</script>", "", page, flags=re.S).replace(SCHEMA, "")

    # Another list from the same scores: nothing is generated or scored.
    stamps = {p: p.stat().st_mtime_ns for p in out.rglob("*.npz")}
    done = CliRunner().invoke(app, [*command, "list.by=entropy", "list.top=3", "--json"])
    assert done.exit_code == 0, done.output
    assert len(json.loads(done.stdout.splitlines()[-1])) == 3
    assert {p: p.stat().st_mtime_ns for p in out.rglob("*.npz")} == stamps
    done = CliRunner().invoke(app, [*command, "list.by=soft_or*entropy", "--json"])
    assert done.exit_code == 0, done.output
    assert "soft_or*entropy" in json.loads(done.stdout.splitlines()[-1])[0]
    bad = CliRunner().invoke(app, [*command, "list.by=token"])
    assert isinstance(bad.exception, UsageError)
    assert "no score 'token' to rank by" in str(bad.exception)

    run = tmp_path / "run"
    run.mkdir()
    verdicts = pd.DataFrame(
        {
            "benchmark": "b",
            "token_ids": [f"[{i}]" for i in rocks["rock_id"]],
            "delta": np.linspace(-0.2, 0.1, 8),
            "verdict": ["strong_pillar"] * 2 + ["neutral"] * 6,
        }
    )
    verdicts.to_csv(run / "verdicts.csv", index=False)
    command = ["orthogonality", str(run), "--scores", str(out / "token_scores.csv")]
    done = CliRunner().invoke(app, [*command, "--json"])
    assert done.exit_code == 0, done.output
    related = pd.DataFrame(json.loads(done.stdout.splitlines()[-1])).set_index("score")
    assert related.loc["frequency", "n_pillars"] == 2
    assert (run / "orthogonality.csv").exists()
    assert "Spearman" in (run / "orthogonality.html").read_text()
    bad = CliRunner().invoke(app, [*command, "--rule", "nominal"])
    assert "no column verdict_nominal" in str(bad.exception)


def mine_app() -> typer.Typer:
    app = typer.Typer()
    app.command()(mine_command)
    return app


def values(checkpoints: dict[str, Path], out: Path, **more: str) -> list[str]:
    """A mining run without a file."""
    given = {
        "teacher": str(checkpoints["teacher"]),
        "student": str(checkpoints["student"]),
        "out": str(out),
        "engine.kind": "transformers",
        **more,
    }
    return [f"{key}={json.dumps(value)}" for key, value in given.items()]


def test_a_benchmark_gives_prompts(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    command = values(checkpoints, tmp_path / "out")
    command += ["prompts.benchmarks=[knockout_starter_arithmetic]", "prompts.limit=3"]
    command += ["list.min_count=1", "list.by=rock_score", "rollouts.max_tokens=20"]
    done = CliRunner().invoke(mine_app(), command, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    shards = [read_shard(p) for p in sorted((tmp_path / "out" / "scores").glob("*.npz"))]
    assert len({s.doc_id for s in shards}) == 3
    assert all(s.doc_id.startswith("knockout_starter_arithmetic/") for s in shards)
    for wrong, message in (
        ("chat.args=[]", "`chat.args`"),
        ("lists.top=3", "unknown key `lists`; did you mean `list`"),
        ("list.tpo=3", "unknown key `list.tpo`; did you mean `top`"),
        ("prompts.benchmarks=[]", "no prompts: give prompts.benchmarks"),
        ("student=null", "no student: give one"),
        ("rollouts.sampling.max_tokens=3", "give rollouts.max_tokens"),
        ("chat.template=true", "the tokenizer of the student has no chat template"),
        ("nonsense", "expected one file, then key=value"),
    ):
        bad = CliRunner().invoke(mine_app(), [*command, wrong])
        assert isinstance(bad.exception, UsageError), wrong
        assert message in str(bad.exception)
    assert "give a file" in str(CliRunner().invoke(mine_app(), []).exception)


def test_the_baselines_of_a_run_are_rollouts_that_cost_nothing(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    knockout.Sweep(
        model=str(checkpoints["student"]),
        engine={"kind": "transformers", "max_num_seqs": 8},
        benchmarks=["knockout_starter_arithmetic"],
        limit=4,
        seeds=3,
        sampling={"temperature": 1.0, "max_tokens": 30},
        candidates={"ids": [5]},
        audit=0.0,
    ).run(run)
    command = [f"teacher={checkpoints['teacher']}", f"out={tmp_path / 'out'}"]
    command += ["list.min_count=1", "list.by=rock_score", "--from", str(run)]
    done = CliRunner().invoke(mine_app(), command, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    found = knockout.load_run(run).trajectories(candidate=(), text=False)
    for path in sorted((tmp_path / "out" / "scores").glob("*.npz")):
        shard = read_shard(path)
        own = found[found["doc_id"] == shard.doc_id.split("/")[1]].sort_values("seed")
        assert len(own) == len(shard.lengths) == 3
        for response, tokens in zip(shard.responses(), own["tokens"], strict=True):
            assert response.tolist() == list(tokens)
    table = pd.read_csv(tmp_path / "out" / "token_scores.csv")
    assert table["frequency"].sum() == found["n_tokens"].sum()
    # Other weights than the run's: its baselines are not this student's.
    bad = CliRunner().invoke(
        mine_app(), [*command, f"out={tmp_path / 'b'}", f"student={checkpoints['before']}"]
    )
    assert isinstance(bad.exception, UsageError)
    assert "its baselines are another model's" in str(bad.exception)
    bad = CliRunner().invoke(mine_app(), [*command[:2], "--from", str(tmp_path)])
    assert "no run.db" in str(bad.exception)


def test_too_few_occurrences_say_what_to_do(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt_ids": [4, 5]}\n')
    more = {"prompts.file": str(prompts)}
    command = [*values(checkpoints, tmp_path / "o", **more), "rollouts.max_tokens=5"]
    bad = CliRunner().invoke(mine_app(), command)
    assert isinstance(bad.exception, KnockoutError)
    assert "no token type has rock_score_ctx and 5 occurrences of high loss" in str(bad.exception)
    assert len(pd.read_csv(tmp_path / "o" / "token_scores.csv"))


def test_models_with_other_tokenizers_are_refused(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(checkpoints["teacher"], other)
    words = ["<unk>", "<end>", "<pad>", *(f"w{i}" for i in reversed(range(3, VOCAB)))]
    tokenizer(words).save_pretrained(other)
    expected = r"student \S+ and teacher \S+ do not share a tokenizer: 56 tokens differ"
    with pytest.raises(UsageError, match=expected):
        open_models(str(other), str(checkpoints["student"]))
    ours, theirs = tokenizer(), tokenizer()
    theirs.bos_token = "w7"
    with pytest.raises(UsageError, match="bos_token_id is None in one and 7 in the other"):
        require_same_tokenizer([("a", ours), ("b", theirs)])


def test_prompt_files_name_the_line_that_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt_ids": [1, 2], "id": "a"}\n\n{"prompt": "x y"}\n')
    found = read_prompts(path, lambda text: [len(text)])
    assert [(p.doc_id, p.tokens) for p in found] == [("a", (1, 2)), ("3", (3,))]
    assert len(read_prompts(path, len, limit=1)) == 1  # type: ignore[arg-type]
    for line, message in (
        ("{", "line 1: not valid JSON"),
        ("[]", "line 1: found none of them; expected one of prompt_ids, messages, prompt"),
        ('{"prompt": "a", "prompt_ids": [1]}', "found prompt_ids, prompt; expected one"),
        ('{"prompt_ids": [1, -1]}', "prompt_ids gives no token ids"),
        ('{"prompt_ids": [true]}', "prompt_ids gives no token ids"),
        ('{"prompt": ""}', "prompt gives no token ids"),
        ("", "found no prompt"),
    ):
        path.write_text(line)
        with pytest.raises(UsageError, match=message):
            read_prompts(path, lambda text: [len(text)])
    with pytest.raises(UsageError, match="cannot be read"):
        read_prompts(tmp_path / "none", lambda text: [1])


def test_a_malformed_prompt_is_set_aside_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lines = ['{"prompt_ids": [1, 2]}', '{"messages": [{"role": "user"}]}', "{", '{"prompt": "x"}']
    path = tmp_path / "p.jsonl"
    path.write_text("\n".join(lines))

    def encode(value: Any) -> list[int]:
        return [len(value)] if isinstance(value, str) else [len(m["content"]) for m in value]

    found = read_prompts(path, encode)
    assert [p.doc_id for p in found] == ["1", "4"]
    assert "line 2: messages cannot be turned into a prompt: KeyError: 'content'" in caplog.text
    assert "line 3: not valid JSON" in caplog.text


def test_an_over_long_prompt_is_set_aside_and_the_rest_is_mined(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    models = open_models(*folders(checkpoints)[:2])
    prompts = [*PROMPTS[:2], Prompt("test", "long", tuple([4] * 500)), *PROMPTS[2:4]]
    shards = list(mine(tmp_path, models, prompts, settings(), start)())
    assert [s.doc_id for s in shards] == ["test/p0", "test/p1", "test/p2", "test/p3"]
    told = json.loads((tmp_path / "set_aside.json").read_text())
    assert list(told) == ["2"]
    assert "test, long" in told["2"]
    # A restart neither fails on it nor opens an engine for it.
    again = mine(tmp_path, models, prompts, settings(), lambda _: pytest.fail("an engine"))
    assert len(list(again())) == 4
    with pytest.raises(KnockoutError, match="every prompt was set aside"):
        mine(tmp_path / "none", models, prompts[2:3], settings(), start)


def test_a_device_that_is_not_here_is_refused_before_any_rollout(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    models = open_models(*folders(checkpoints)[:2])
    for device in ("cuda", "abacus"):
        with pytest.raises(UsageError, match=f"device is '{device}'"):
            mine(
                tmp_path, models, PROMPTS, settings(),
                lambda _: pytest.fail("an engine was opened"), device=device,
            )  # fmt: skip


def test_a_base_student_is_mined_under_a_chat_teacher(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """Their ends of text differ: <end> and w7. Stopping with the other one costs nothing."""
    base = tmp_path / "base"
    shutil.copytree(checkpoints["student"], base)
    other = tokenizer()
    other.eos_token = "w7"
    other.save_pretrained(base)
    models = open_models(str(checkpoints["teacher"]), str(base))
    assert models.merge == ((1, 7),)
    (first, *_) = list(mine(tmp_path / "out", models, PROMPTS[:2], settings(), start)())
    student, teacher = (
        LlamaForCausalLM.from_pretrained(models.folders[r]) for r in ("student", "teacher")
    )
    response = first.responses()[0]
    ids = torch.from_numpy(np.concatenate([first.prompt, response])).long()[None]
    with torch.no_grad():
        z, t = (m(ids).logits[0, len(first.prompt) - 1 : -1] for m in (student, teacher))
    wanted = reverse_kl(z, t, merge=models.merge)
    np.testing.assert_allclose(
        first.scores["reverse_kl"][: len(response)], wanted, rtol=1e-3, atol=1e-4
    )
    assert not np.allclose(wanted, reverse_kl(z, t), rtol=1e-2)


def test_greedy_rollouts_are_the_default_and_one_of_them_is_all() -> None:
    assert MineSettings().sampling.temperature == 0
    with pytest.raises(UsageError, match="greedy rollouts of a prompt are all the same"):
        MineSettings(rollouts=2)
