"""`knockout plan` with a tiny real model: its numbers against a run, and hand-made tables."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from words import word_model, word_task

from knockout.ledger import Ledger
from knockout.stats.power import plan_mde

Plan = Callable[..., tuple[int, str, str]]
N_PROBLEMS, SEEDS = 14, 2


@pytest.fixture
def plan(knockout: Plan) -> Plan:
    return functools.partial(knockout, "plan")


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plan")
    word_model(folder / "model")
    word_task(folder, N_PROBLEMS)
    content: dict[str, Any] = {
        "model": "./model",
        "engine": {"kind": "transformers", "dtype": "float32", "max_num_seqs": 16},
        "benchmarks": ["words"],
        "include_path": ".",
        "seeds": SEEDS,
        "sampling": {"temperature": 1.0, "max_tokens": 20},
        "candidates": {"strings": ["w8", "w52", "w55", "w1"]},
        "audit": 0,
    }
    path = folder / "sweep.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def test_a_bound_where_nothing_is_known(sweep: Path, plan: Plan) -> None:
    code, out, errors = plan(
        sweep, "--json", "--tokens-per-s", 50, "--mean-tokens", 16, "--correlation", 0.1
    )
    assert code == 0, errors
    found = json.loads(out)
    (words,) = found["benchmarks"]
    cells = N_PROBLEMS * SEEDS
    assert (found["n_candidates"], words["source"], words["n_cells"]) == (4, "bound", cells)
    assert words["forks"] == cells * 4
    assert words["tokens"] == words["tokens_naive"] == cells * 16 * 5
    assert found["hours"] == pytest.approx(cells * 16 * 5 / 50 / 3600, abs=1e-3)
    assert words["seeds"] == list(range(1, 17))
    effects = [v for v in words["mde_nominal"] if v is not None]
    assert effects == sorted(effects, reverse=True)
    expected = plan_mde(N_PROBLEMS, share=0.5, correlation=0.1)
    shown = [float("nan") if v is None else v for v in words["mde_nominal"]]
    assert shown == pytest.approx(expected, abs=1e-4, nan_ok=True)
    # 14 problems say nothing below .2, even about a token that changes no answer.
    assert 0.15 < words["margin_best"] < words["margin_usual"]
    assert all(
        nominal <= fdr
        for nominal, fdr in zip(words["mde_nominal"], words["mde_fdr"], strict=True)
        if nominal is not None and fdr is not None
    )
    code, out, _ = plan(sweep)
    assert (code, "Cost of 4 candidates" in out, "--frequencies" in out) == (0, True, True)
    assert "cannot be shown within ±0.02, whatever is generated" in " ".join(out.split())
    # The audit is not counted as generating: a sweep never costs more than full re-runs.
    code, out, errors = plan(sweep, "--json", "--set", "audit=0.5")
    found = json.loads(out)
    assert found["tokens"] <= found["tokens_naive"]
    assert found["tokens_audit"] > 0


def test_from_frequencies(sweep: Path, tmp_path: Path, plan: Plan) -> None:
    table = tmp_path / "f.csv"
    table.write_text("rock_id,rock_freq\n8,1000\n52,250\n55,0\n")
    code, out, errors = plan(
        sweep, "--json", "--frequencies", table, "--per", 500, "--mean-tokens", 10
    )
    assert code == 0, errors
    (words,) = json.loads(out)["benchmarks"]
    cells = N_PROBLEMS * SEEDS
    # Rates 2, 0.5, 0 and 0 (not in the table): 1 − e^−λ of the cells fork.
    shares = 0.8646647 + 0.3934693
    assert words["source"] == "frequencies"
    assert words["forks"] == round(cells * shares)
    left = 10 * (1 - 0.8646647 / 2) + 10 * (1 - 0.3934693 / 0.5)
    assert words["tokens"] == pytest.approx(cells * (10 + left), abs=1)
    code, _, errors = plan(sweep, "--frequencies", table, "--ids-column", "token")
    assert (code, "no column 'token'" in errors) == (2, True)
    code, _, errors = plan(sweep, "--frequencies", tmp_path / "none.csv")
    assert (code, "none.csv" in errors) == (2, True)


def test_from_an_earlier_run(sweep: Path, tmp_path: Path, plan: Plan) -> None:
    """Without truncation the forks are decided by the baselines, so the plan must hit them."""
    from knockout.config.file import load_sweep
    from knockout.sweep.run import run_sweep

    run_sweep(load_sweep(sweep), tmp_path / "run")
    code, out, errors = plan(sweep, "--json", "--baseline", tmp_path / "run")
    assert code == 0, errors
    (words,) = json.loads(out)["benchmarks"]
    with Ledger.open(tmp_path / "run" / "run.db") as ledger:
        # The canary is no candidate; this model's logits are wider than its words, so it occurs.
        forks, tokens = ledger.query(
            "SELECT COUNT(*), SUM(n_tokens - step) FROM fork WHERE candidate < 4"
        )[0]
        lengths = ledger.query("SELECT AVG(n_tokens), SUM(n_tokens) FROM cell")[0]
    assert words["source"] == "baseline"
    assert words["forks"] == forks > 0
    assert words["mean_tokens"] == pytest.approx(lengths[0], abs=0.06)
    assert words["tokens_naive"] == lengths[1] * 5
    # A fork is taken to end where its baseline did.
    assert words["tokens"] == pytest.approx(lengths[1] + tokens, rel=0.25)
    code, _, errors = plan(sweep, "--baseline", tmp_path)
    assert (code, "no run here" in errors) == (2, True)


def test_pairs_are_planned_as_forks_of_forks(sweep: Path, tmp_path: Path, plan: Plan) -> None:
    """From a run of the eight alone; then a run with their pairs."""
    from knockout.config.file import load_sweep
    from knockout.sweep.run import run_sweep

    words = ", ".join(f"w{n}" for n in (8, 52, 55, 1, 20, 33, 41, 12))
    common = ["limit=10", "seeds=1", "sampling={temperature: 0.8, top_p: 0.9, max_tokens: 60}"]
    alone = [*common, f"candidates={{strings: [{words}]}}"]
    both = [*common, f"candidates={{strings: [{words}], pairs: all}}"]
    run_sweep(load_sweep(sweep, alone), tmp_path / "run")
    code, out, errors = plan(sweep, *both, "--json", "--baseline", tmp_path / "run")
    assert code == 0, errors
    (planned,) = json.loads(out)["benchmarks"]
    run_sweep(load_sweep(sweep, both), tmp_path / "both")
    with Ledger.open(tmp_path / "both" / "run.db") as ledger:
        names = [c.name for c in ledger.candidates if c.group != "canary"]
        members = [c for c, one in enumerate(ledger.candidates) if one.members]
        assert (len(names), len(members)) == (8 + 28, 28)
        (baselines,) = ledger.query("SELECT SUM(n_tokens) FROM cell")[0]
        forks = ledger.query("SELECT candidate, n_tokens, step, shared FROM fork")
    canary = {n for n, c in enumerate(ledger.candidates) if c.group == "canary"}
    asked = [row for row in forks if row[0] not in canary]
    pairs = [row for row in asked if row[0] in members]
    generated = sum(n - shared for _, n, _, shared in pairs)
    alone_tokens = sum(n - shared for c, n, _, shared in asked if c not in members)
    assert generated > alone_tokens
    assert sum(n - step for _, n, step, _ in pairs) > 2 * generated
    assert planned["tokens"] - baselines - alone_tokens == pytest.approx(generated, rel=0.15)
    assert planned["forks"] == pytest.approx(len(asked), rel=0.05)


@pytest.mark.parametrize("option", ["--tokens-per-s", "--per", "--mean-tokens"])
def test_nonsense_is_refused(sweep: Path, plan: Plan, option: str) -> None:
    code, _, errors = plan(sweep, option, 0)
    assert (code, "above 0" in errors) == (2, True)


@pytest.mark.parametrize(
    "arguments",
    [
        ("limit=1", "seeds=1"),
        ("limit=1", "seeds=16"),
        ("--pass1", 0),
        ("--pass1", 1),
        ("candidates={strings: [w8]}",),
        ("candidates={strings: [w8]}", "limit=1", "seeds=1", "--pass1", 1),
        ("--correlation", 0),
        ("--correlation", 1),
        ("verdict.target=benchmark", "limit=1"),
        ("strategy=naive", "audit=0"),
        ("adaptive={max_seeds: 2}", "limit=1"),
        ("verdict.alpha=0.000001",),
    ],
)  # fmt: skip
def test_at_the_edges_nothing_impossible_is_promised(
    sweep: Path, plan: Plan, arguments: tuple[Any, ...]
) -> None:
    code, out, errors = plan(sweep, "--json", *arguments)
    assert code == 0, errors
    found = json.loads(out, parse_constant=lambda text: pytest.fail(f"found {text}"))
    (words,) = found["benchmarks"]
    pass1 = arguments[arguments.index("--pass1") + 1] if "--pass1" in arguments else 0.5
    for name in ("mde_nominal", "mde_fdr"):
        assert len(words[name]) == 16
        # Nobody loses more than there is; and one problem shows nothing about others.
        assert all(v is None or 0 < v <= pass1 for v in words[name]), words[name]
        if words["n_problems"] == 1 and "verdict.target=benchmark" not in arguments:
            assert words[name] == [None] * 16
    assert 0 < words["tokens"] <= words["tokens_naive"]
    assert 0 < words["margin_best"] <= words["margin_usual"] <= 1
    code, out, errors = plan(sweep, *arguments)
    assert code == 0, errors
    assert "nan" not in out.lower()
    if words["mde_nominal"] == [None] * 16:
        assert "none" in out


@pytest.mark.parametrize(
    "table", ["rock_id,rock_freq\n8,1\n,2\n", "rock_id,rock_freq\nw8,1\n", "rock_id,rock_freq\n8,x\n",
              "rock_id,rock_freq\n8,-1\n", "rock_id,rock_freq\n8,inf\n", "", "\n"],
)  # fmt: skip
def test_frequencies_that_are_none(sweep: Path, tmp_path: Path, plan: Plan, table: str) -> None:
    path = tmp_path / "f.csv"
    path.write_text(table)
    code, _, errors = plan(sweep, "--frequencies", path)
    assert code == 2, errors
    assert "f.csv" in errors
    assert "internal" not in errors
