"""Logit gradients of token types against autograd and plain sums."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import typer
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import tiny_model
from typer.testing import CliRunner

from knockout.cli.training import geometry as command
from knockout.errors import UsageError
from knockout.geometry import GradientSums, choose_types, kl_gradient
from knockout.geometry.halves import type_means
from knockout.geometry.run import MiningRun, groups_of
from knockout.mining.kl import PositionScores
from knockout.mining.shards import Shard, write_shard

V = 31


@pytest.mark.parametrize("scale", [0.1, 1.0, 12.0])
def test_the_gradient_is_autograds(scale: float) -> None:
    make = torch.Generator().manual_seed(0)
    z = (torch.randn(9, V, generator=make, dtype=torch.float64) * scale).requires_grad_()
    teacher = torch.randn(9, V + 2, generator=make, dtype=torch.float64) * scale
    logp, logq = z.log_softmax(1), teacher[:, :V].log_softmax(1)
    value = torch.nn.functional.kl_div(logq, logp, reduction="none", log_target=True).sum(1)
    (wanted,) = torch.autograd.grad(value.sum(), z)
    kl, gradient = kl_gradient(z.detach(), teacher)
    torch.testing.assert_close(gradient, wanted)
    torch.testing.assert_close(kl, value.detach())
    single, low = kl_gradient(z.detach().float(), teacher.float())
    torch.testing.assert_close(low.double(), wanted, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(single.double(), value.detach(), rtol=1e-4, atol=1e-5)


def plain(emitted: np.ndarray, g: np.ndarray, v: int) -> dict[str, float]:
    """The geometry of one type, from all gradients at once."""
    cos = lambda a, b: float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))  # noqa: E731
    types = np.unique(emitted)
    mean = {int(t): g[emitted == t].mean(axis=0) for t in types}
    whole, balanced = g.mean(axis=0), np.mean([mean[int(t)] for t in types], axis=0)
    own = emitted == v
    lengths = np.linalg.norm(g[own], axis=1)
    return {
        "mean_norm": lengths.mean(),
        "norm": np.linalg.norm(mean[v]),
        "coherence": np.linalg.norm(mean[v]) / lengths.mean(),
        "cos_global": cos(mean[v], whole),
        "cos_global_rest": cos(mean[v], g[~own].mean(axis=0)),
        "cos_balanced": cos(mean[v], balanced),
        "cos_balanced_rest": cos(mean[v], np.mean([mean[t] for t in mean if t != v], axis=0)),
        "share_global": own.mean() * mean[v] @ whole / (whole @ whole),
        "count": own.sum(),
    }


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 500), chunk=st.integers(1, 80))
def test_streamed_sums_equal_plain_ones(seed: int, chunk: int) -> None:
    make = torch.Generator().manual_seed(seed)
    emitted = torch.randint(8, (60,), generator=make)
    kl, g = kl_gradient(torch.randn(60, V, generator=make), torch.randn(60, V, generator=make))
    chosen = torch.unique(emitted)[:3].tolist()
    sums = GradientSums(emitted.bincount(minlength=V), chosen)
    for start in range(0, 60, chunk):
        part = slice(start, start + chunk)
        sums.add(emitted[part], kl[part], g[part])
    found = sums.finish()
    assert (found.n_positions, found.n_types) == (60, len(torch.unique(emitted)))
    for k, v in enumerate(chosen):
        for name, value in plain(emitted.numpy(), g.double().numpy(), v).items():
            assert float(getattr(found, name)[k]) == pytest.approx(value, rel=1e-4, abs=1e-5), name
        assert float(found.mean_kl[k]) == pytest.approx(float(kl[emitted == v].mean()), rel=1e-5)


def test_shares_of_all_types_add_up_to_one() -> None:
    make = torch.Generator().manual_seed(1)
    emitted = torch.randint(6, (50,), generator=make)
    kl, g = kl_gradient(torch.randn(50, V, generator=make), torch.randn(50, V, generator=make))
    sums = GradientSums(emitted.bincount(minlength=V), range(6))
    sums.add(emitted, kl, g)
    assert float(sums.finish().share_global.sum()) == pytest.approx(1)


def test_what_was_not_counted_is_found_out() -> None:
    sums = GradientSums(torch.tensor([2, 1, 0]), [0, 2])
    with pytest.raises(ValueError, match="no position"):
        sums.finish()
    sums.add(torch.tensor([0, 1]), torch.ones(2), torch.ones(2, 3))
    with pytest.raises(ValueError, match="2 positions were added, and counts say 3"):
        sums.finish()
    sums.add(torch.tensor([0]), torch.ones(1), torch.ones(1, 3))
    found = sums.finish()
    assert found.norm[1].isnan()  # chosen, and never emitted
    with pytest.raises(ValueError, match="twice"):
        GradientSums(torch.tensor([2, 1, 0]), [1, 1])


def test_groups_share_no_type_and_keep_their_rules() -> None:
    rng = np.random.default_rng(0)
    counts = rng.integers(0, 40, 200)
    mean_kl = rng.random(200)
    rocks = [3, 9, 500, 7, 11, 13]
    groups = choose_types(counts, mean_kl, rocks, 4, 0, min_count=5, excluded=[7, 20])
    everything = [v for ids in groups.values() for v in ids]
    assert len(set(everything)) == len(everything)
    assert not {7, 20} & set(everything)
    assert all(counts[v] >= 5 for v in everything)
    assert groups["rock"] == [v for v in (3, 9, 11, 13) if counts[v] >= 5]
    usable = [v for v in range(200) if counts[v] >= 5 and v not in (3, 9, 7, 11, 13, 20)]
    rare = [v for v in usable if counts[v] <= np.median(counts[usable])]
    assert groups["rare_high_kl"] == sorted(rare, key=lambda v: -mean_kl[v])[:4]
    assert groups == choose_types(counts, mean_kl, rocks, 4, 0, excluded=[7, 20])
    assert (
        groups["random"] != choose_types(counts, mean_kl, rocks, 4, 1, excluded=[7, 20])["random"]
    )
    nothing = choose_types(np.zeros(9, dtype=np.int64), np.zeros(9), [1], 4, 0)
    assert nothing == {"rock": [], "rare_high_kl": [], "random": []}


@pytest.fixture(scope="module")
def mined(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small mining run of random rollouts, and its two models."""
    base = tmp_path_factory.mktemp("mined")
    for role, seed in (("student", 0), ("teacher", 1)):
        tiny_model(base / role, 300, seed=seed)
    rng = np.random.default_rng(0)
    rollouts = []
    for index in range(4):
        lengths = rng.integers(0, 30, 3).astype(np.int32)
        tokens = rng.integers(20, 60, lengths.sum()).astype(np.int32)
        prompt = rng.integers(20, 60, 5).astype(np.int32)
        rollouts.append(tokens)
        names = (*PositionScores._fields, "before_reverse_kl", "before_entropy", "before_agree")
        scores = {name: rng.random(len(tokens)).astype(np.float32) for name in names}
        scores["before_reverse_kl"] = 2 * scores["reverse_kl"]
        path = base / "run" / "scores" / f"{index:06d}.npz"
        write_shard(path, Shard(str(index), prompt, tokens, lengths, scores))
    ids, counts = np.unique(np.concatenate(rollouts), return_counts=True)
    kl = rng.random(len(ids))
    scores = pd.DataFrame(
        {
            "token_id": ids,
            "token": [f"t{i}" for i in ids],
            "frequency": counts,
            "mean_kl": kl,
            "mean_kl_before": kl * 2,
        }
    )
    scores.to_parquet(base / "run" / "token_scores.parquet")
    pd.DataFrame({"rock_id": ids[:4]}).to_csv(base / "run" / "rocks.csv", index=False)
    names = {role: str(base / role) for role in ("student", "teacher")}
    listing = {
        "by": "rock_score",
        "top": 4,
        "drop_most_frequent": 0,
        "min_count": 1,
        "keep_special": False,
    }
    summary = {"models": names, "list": listing, "quantile": 0.8, "window": 8}
    (base / "run" / "summary.json").write_text(json.dumps(summary))
    return base / "run"


def whole_gradients(mined: Path) -> tuple[np.ndarray, np.ndarray]:
    """Emitted tokens and autograd's gradients, sequence by sequence without padding."""
    from transformers import AutoModelForCausalLM

    from knockout.mining.shards import read_shard

    models = [
        AutoModelForCausalLM.from_pretrained(mined.parent / role, dtype=torch.float32)
        for role in ("student", "teacher")
    ]
    emitted, gradients = [], []
    for path in sorted((mined / "scores").glob("*.npz"))[1::2]:  # the rest chooses
        shard = read_shard(path)
        for response in shard.responses():
            if not len(response):
                continue
            ids = torch.from_numpy(np.concatenate([shard.prompt, response])).long()[None]
            with torch.no_grad():
                z, q = (m(ids).logits[0, len(shard.prompt) - 1 : -1].double() for m in models)
            z.requires_grad_()
            logp = z.log_softmax(1)
            value = (logp.exp() * (logp - q.log_softmax(1))).sum()
            gradients.append(torch.autograd.grad(value, z)[0].numpy())
            emitted.append(response)
    return np.concatenate(emitted), np.concatenate(gradients)


def test_the_command_measures_what_autograd_gives(mined: Path, tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(command)
    options = ["--top", "4", "--min-count", "1", "--batch-tokens", "60", "--out", str(tmp_path)]
    result = CliRunner().invoke(app, [str(mined), *options, "--json"])
    assert result.exit_code == 0, result.output
    rows = {row["token_id"]: row for row in json.loads(result.stdout)}
    emitted, gradients = whole_gradients(mined)
    assert len(rows) == 12
    for v, row in rows.items():
        if v not in emitted:
            assert row["norm"] is None
            continue
        for name, value in plain(emitted, gradients, v).items():
            assert row[name] == pytest.approx(float(value), rel=1e-3, abs=1e-4), (v, name)
        assert row["remaining_kl"] == pytest.approx(0.5)
    saved = pd.read_csv(tmp_path / "geometry.csv")
    assert saved["token_id"].tolist() == list(rows)
    told = json.loads((tmp_path / "geometry.json").read_text())
    assert told["n_positions"] == len(emitted)
    assert told["norm_global"] == pytest.approx(np.linalg.norm(gradients.mean(axis=0)), rel=1e-3)
    assert set(told["medians"]) == {"rock", "rare_high_kl", "random"}
    assert "length of G_v" in (tmp_path / "geometry.html").read_text()


def test_what_is_no_mining_run_is_refused(mined: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not a finished run of `knockout mine`"):
        command(tmp_path)
    with pytest.raises(UsageError, match="no rock occurs 999 times"):
        command(
            mined,
            min_count=999,
            top=3,
            seed=0,
            dtype="auto",
            column=None,
            candidates=None,
            teacher=None,
            student=None,
        )
    with pytest.raises(UsageError, match="dtype is 'half'"):
        command(mined, dtype="half")


def test_noise_alone_neither_stagnates_nor_falls(tmp_path: Path) -> None:
    """KL before and after training are noise around one mean for all types; nothing was learned."""
    rng = np.random.default_rng(0)
    shards = []
    for index in range(60):
        tokens = rng.integers(20, 320, 600).astype(np.int32)
        scores = {
            name: rng.gamma(0.1, 10, 600).astype(np.float32)
            for name in ("reverse_kl", "before_reverse_kl")
        }
        shards.append(tmp_path / f"{index:06d}.npz")
        lengths = np.array([600], dtype=np.int32)
        write_shard(shards[-1], Shard(str(index), tokens[:3], tokens, lengths, scores))
    table = pd.DataFrame({"token_id": np.arange(20, 320)})
    run = MiningRun(shards, table, {}, {}, rocks=[])
    hard = groups_of(run, 40, 0, 5, [])["rare_high_kl"]
    elsewhere = type_means(run.measuring, run.width)
    here = type_means(run.choosing, run.width)

    def left(means: Any) -> float:
        return float(means.kl[hard].mean() / means.kl_before[hard].mean())

    assert left(elsewhere) == pytest.approx(1, abs=0.2)
    assert left(here) < 0.8  # where they were chosen, all of them seem to have learned
