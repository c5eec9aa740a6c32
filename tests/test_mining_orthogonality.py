"""Rank correlations and AUC: against direct counts, and their intervals against simulation."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy.stats import norm

from bench.orthogonality import frequencies, null_run, rows_of
from knockout.errors import UsageError
from knockout.mining.orthogonality import (
    SCORES,
    auc,
    harm,
    join_scores,
    kendall,
    orthogonality,
    read_verdicts,
    spearman,
)
from knockout.mining.shared_noise import noise_factors
from knockout.tokens.token_list import read_score_table

DATA = Path(
    os.environ.get("KNOCKOUT_TEST_DATA", Path(__file__).parents[1].parent / "shared" / "data")
)


def test_auc_is_the_share_of_ordered_pairs() -> None:
    rng = np.random.default_rng(0)
    score = rng.integers(0, 6, 40).astype(float)
    positive = rng.random(40) < 0.3
    pairs = [(a > b) + 0.5 * (a == b) for a in score[positive] for b in score[~positive]]
    found = auc(score, positive)
    assert found.value == pytest.approx(np.mean(pairs))
    assert 0 <= found.low < found.value < found.high <= 1


@pytest.mark.parametrize(("flip", "value"), [(1, 1.0), (-1, 0.0)])
def test_perfect_separation_has_an_interval_with_a_width(flip: int, value: float) -> None:
    found = auc(flip * np.arange(20.0), np.arange(20) >= 17)
    assert found.value == value
    assert 0.1 < found.high - found.low < 0.9
    assert (found.high if value else found.low) == value


def test_auc_interval_solves_hanley_and_mcneils_equation() -> None:
    score = np.array([1, 2, 3, 4, 5, 6, 7, 8, 9, 10.0])
    positive = np.array([0, 0, 1, 0, 0, 1, 0, 1, 1, 1], dtype=bool)  # 5 of each
    found = auc(score, positive)
    for theta in (found.low, found.high):
        q1, q2 = theta / (2 - theta), 2 * theta**2 / (1 + theta)
        variance = (theta * (1 - theta) + 4 * (q1 - theta**2) + 4 * (q2 - theta**2)) / 25
        assert abs(found.value - theta) == pytest.approx(1.959964 * variance**0.5, rel=1e-4)


def test_intervals_cover_the_truth() -> None:
    rng = np.random.default_rng(7)
    hits = np.zeros(3)
    rho = 0.5
    true_s, true_k = 6 / np.pi * np.arcsin(rho / 2), 2 / np.pi * np.arcsin(rho)
    for _ in range(400):
        x = rng.normal(size=60)
        y = rho * x + np.sqrt(1 - rho**2) * rng.normal(size=60)
        found = spearman(x, y)
        hits[0] += found.low <= true_s <= found.high
        found = kendall(x, y)
        hits[1] += found.low <= true_k <= found.high
        # Positives one standard deviation higher: AUC = Φ(1 / √2) = 0.7602.
        found = auc(np.concatenate([rng.normal(1, 1, 8), rng.normal(size=60)]), np.arange(68) < 8)
        hits[2] += found.low <= 0.7602 <= found.high
    assert (hits / 400 > 0.92).all()
    assert (hits / 400 < 0.99).all()


def test_a_verdict_that_the_ledger_does_not_have_is_named() -> None:
    joined = pd.DataFrame(
        {
            "benchmark": "b",
            "candidate": ['" so"', '" thus"', '" hence"'],
            "delta": [-0.1, 0.0, 0.1],
            "verdict": "undetermined",
            "frequency": [0.1, 0.2, 0.3],
        }
    )
    moves = {"b": {'" so"': np.zeros(5), '" thus"': np.zeros(5)}}
    with pytest.raises(UsageError, match=r'the verdicts name " hence" on b'):
        orthogonality(joined, ["frequency"], moves=moves)


def test_too_little_data_is_nan_and_not_zero() -> None:
    few, flat = np.arange(3.0), np.ones(10)
    assert np.isnan(spearman(few, few)).all()
    assert np.isnan(kendall(np.arange(10.0), flat)).all()
    assert np.isnan(auc(np.arange(10.0), np.zeros(10, dtype=bool))).all()
    assert spearman(np.array([1, 2, 3, 4, np.nan]), np.array([1, 2, 3, 4, 0.0])).value == 1


def verdicts(n: int = 60) -> pd.DataFrame:
    rng = np.random.default_rng(2)
    delta = -np.arange(n) / 1000
    return pd.DataFrame(
        {
            "benchmark": "b",
            "candidate": [f"c{i}" for i in range(n)],
            "token_ids": [[i] for i in range(n)],
            "delta": delta,
            "verdict": np.where(np.arange(n) >= n - 4, "strong_pillar", "neutral"),
            "group": np.where(rng.random(n) < 0.2, "control", "candidate"),
        }
    )


def test_a_score_that_predicts_is_told_from_one_that_does_not(tmp_path: Path) -> None:
    scores = pd.DataFrame(
        {"token_id": range(60), "frequency": np.arange(60) + 5, "entropy": np.arange(60) * 17 % 60}
    )
    scores.to_csv(tmp_path / "scores.csv", index=False)
    rows = verdicts()
    joined = join_scores(rows, read_score_table(tmp_path / "scores.csv"), ["frequency", "entropy"])
    table = orthogonality(joined, ["frequency", "entropy"]).set_index("score")
    assert table.loc["frequency", "n"] == (rows["group"] == "candidate").sum()
    assert table.loc["frequency", "spearman"] == pytest.approx(1)
    assert table.loc["frequency", "auc"] == 1
    assert table.loc["frequency", "auc_p_adjusted"] < 0.05
    assert table.loc["entropy", "spearman_low"] < 0 < table.loc["entropy", "spearman_high"]
    assert table.loc["entropy", "auc_p_adjusted"] > 0.05


@pytest.mark.skipif(not DATA.is_dir(), reason="published lists are not here")
@pytest.mark.parametrize("measure", ["spearman", "kendall"])
def test_on_noise_alone_no_score_predicts(measure: str) -> None:
    """Published frequencies, 500 problems × 3 seeds, bans that do nothing but redraw grades."""
    published = pd.read_csv(DATA / "rock_vs_control_qwen3_4b.csv")
    frequency = np.r_[published["rock_freq"], published["ctrl_freq"]].astype(float)
    chance = 1 - np.exp(-frequency / 500)  # of a fork, for a token that often in 500 outputs
    rng = np.random.default_rng(0)
    test = {"spearman": spearman, "kendall": kendall}[measure]
    wrong, by_size, repeats = 0, 0, 500
    for _ in range(repeats):
        changed = (rng.random((len(chance), 500, 3)) < chance[:, None, None] * 0.15).astype(float)
        d = (changed * rng.choice([-1, 1], size=changed.shape)).sum(axis=2)
        spread = np.sqrt((d**2).sum(axis=1))
        z = np.divide(d.sum(axis=1), spread, out=np.zeros(len(d)), where=spread > 0)
        rows = pd.DataFrame({"delta": d.mean(axis=1) / 3, "p_value": 2 * norm.sf(np.abs(z))})
        wrong += test(frequency, harm(rows)).p_value < 0.05
        by_size += test(frequency, rows["delta"].abs().to_numpy()).p_value < 0.05
    assert abs(wrong / repeats - 0.05) < 0.02
    assert by_size / repeats > 0.8  # what ranking |Δ| would have "found"


@pytest.mark.skipif(not DATA.is_dir(), reason="published lists are not here")
@pytest.mark.parametrize("listed", ["rocks", "both"])
def test_a_shared_baseline_makes_no_score_predict(listed: str) -> None:
    """As above, but all candidates leave the same baseline: without the factor, a third and more."""
    frequency = frequencies(listed)
    rng = np.random.default_rng(3)
    wrong, naive, repeats = 0, 0, 200
    for _ in range(repeats):
        moves = null_run(rng, frequency)
        hurt = harm(rows_of(moves))
        factor, _ = noise_factors(frequency, list(moves), draws=300)
        wrong += spearman(frequency, hurt, factor=factor).p_value < 0.05
        naive += spearman(frequency, hurt).p_value < 0.05
    assert 0.01 <= wrong / repeats <= 0.09  # 0.05 ± 2.6 standard errors of 200 draws
    assert naive / repeats > 0.25


def test_noise_that_is_shared_widens_and_noise_of_ones_own_does_not() -> None:
    rng = np.random.default_rng(0)
    score = np.arange(40.0)
    own = list(rng.choice([-1.0, 0, 1], (40, 300)))
    assert noise_factors(score, own, 5) == pytest.approx((1, 1), abs=0.1)
    common = rng.choice([-1.0, 0, 1], 300)
    shared = own[:20] + [common] * 20  # the higher half of the scores moves as one
    rank, area = noise_factors(score, shared, 5)
    assert rank > 3
    assert area > 1.2
    # Against sign flips one by one.
    rows, found = np.array(shared), []
    for _ in range(400):
        flipped = rows @ rng.choice([-1.0, 1], 300)
        found.append(spearman(score, np.round(flipped / np.sqrt((rows**2).sum(1)), 9)).value)
    assert rank == pytest.approx(np.sqrt(np.mean(np.square(found)) * 39), rel=0.1)
    assert noise_factors(score, [np.zeros(300)] * 40, 5) == (1, 1)


def test_harm_is_signed_and_in_units_of_noise() -> None:
    rows = pd.DataFrame({"delta": [-0.1, 0.1, 0.0, -0.001], "p_value": [0.05, 0.05, 1.0, np.nan]})
    assert harm(rows)[:3] == pytest.approx([1.95996, -1.95996, 0], abs=1e-4)
    assert np.isnan(harm(rows)[3])


def test_a_set_sums_frequencies_and_averages_the_rest() -> None:
    scores = pd.DataFrame(
        {"token_id": [1, 2, 3], "frequency": [10, 30, 5], "entropy": [1.0, 3.0, 9.0]}
    )
    rows = pd.DataFrame({"token_ids": [[1, 2], [3], [4]]})
    joined = join_scores(rows, scores, ["frequency", "entropy"])
    assert joined["frequency"].tolist()[:2] == [40, 5]
    assert joined["entropy"].tolist()[:2] == [2.5, 9]
    assert joined.iloc[2][["frequency", "entropy"]].isna().all()


def test_verdicts_are_read_from_json_or_csv(tmp_path: Path) -> None:
    rows = verdicts(8)
    rows.to_csv(tmp_path / "verdicts.csv", index=False)
    from_csv = read_verdicts(tmp_path)
    (tmp_path / "verdicts.json").write_text(json.dumps(rows.to_dict("records")))
    pd.testing.assert_frame_equal(from_csv, read_verdicts(tmp_path), check_dtype=False)
    assert from_csv["token_ids"].tolist() == [[i] for i in range(8)]
    with pytest.raises(UsageError, match="expected the directory of a run"):
        read_verdicts(tmp_path / "nowhere")
    (tmp_path / "verdicts.json").write_text("[]")
    with pytest.raises(UsageError, match="found no benchmark, delta, token_ids, verdict"):
        read_verdicts(tmp_path)


def test_what_is_no_table_of_scores_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(UsageError, match="no column token_id or rock_id; it has a, b"):
        read_score_table(path)
    path.write_text("token_id\n4\n4\n")
    with pytest.raises(UsageError, match="token id 4 has two rows"):
        read_score_table(path)
    with pytest.raises(UsageError, match="cannot be read as a table"):
        read_score_table(tmp_path / "none.csv")


@pytest.mark.skipif(not DATA.is_dir(), reason="published lists are not here")
def test_the_published_csv_serves_as_scores() -> None:
    scores = read_score_table(DATA / "rock_vs_control_qwen3_4b.csv")
    names = [n for n in SCORES if n in scores]
    assert names == ["frequency", "mean_kl", "rock_score"]
    assert scores["rock_score"].to_numpy() == pytest.approx(
        (scores["frequency"] * scores["mean_kl"]).to_numpy()
    )
    rows = pd.DataFrame(
        {
            "benchmark": "b",
            "token_ids": [[int(i)] for i in scores["token_id"]],
            "delta": -scores["frequency"] / 1e6,
            "verdict": "neutral",
        }
    )
    table = orthogonality(join_scores(rows, scores, names), names)
    assert table["spearman"].iloc[0] == pytest.approx(1)
    assert table["auc"].isna().all()


@pytest.mark.skipif(not DATA.is_dir(), reason="published lists are not here")
def test_the_published_lists_are_read_as_candidates() -> None:
    from knockout.tokens.lists import read_list

    rocks = [item.value for item in read_list(DATA / "rock_qwen3_4b.json")]
    controls = [item.value for item in read_list(DATA / "random_qwen3_4b.json")]
    table = DATA / "rock_vs_control_qwen3_4b.csv"
    assert len(rocks) == len(controls) == 100
    assert [item.value for item in read_list(table, "rock_id")] == rocks
    assert [item.value for item in read_list(table, "ctrl_id")] == controls
