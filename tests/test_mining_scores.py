"""Type scores, context consistency, ranks and controls against direct loops."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from knockout.errors import KnockoutError
from knockout.mining.context import ContextSums, surprisal
from knockout.mining.controls import KINDS, draw_controls, match
from knockout.mining.ranking import cutoff_curve, knee, overlap_of_ranks, rank_types
from knockout.mining.scores import ScoreSettings, TypeScores, score_types
from knockout.mining.shards import Shard, read_shard, write_shard

VOCAB = 40


def shards(n: int = 12, seed: int = 0, before: bool = True) -> list[Shard]:
    rng = np.random.default_rng(seed)
    found = []
    for i in range(n):
        lengths = rng.integers(5, 30, size=3).astype(np.int32)
        size = int(lengths.sum())
        tokens = (rng.zipf(1.4, size=size) % VOCAB).astype(np.int32)
        scores = {
            "reverse_kl": rng.gamma(0.5, 1 + (tokens % 5)).astype(np.float32),
            "entropy": rng.random(size, dtype=np.float32),
            "agree": (rng.random(size) < 0.7).astype(np.float32),
            "grad_norm": rng.random(size).astype(np.float32),
            "teacher_gap": rng.random(size, dtype=np.float32),
            "signal": rng.random(size, dtype=np.float32),
            "noise": rng.random(size, dtype=np.float32),
        }
        if before:
            scores |= {
                "before_reverse_kl": (scores["reverse_kl"] + rng.random(size)).astype(np.float32),
                "before_entropy": rng.random(size, dtype=np.float32),
                "before_agree": (rng.random(size) < 0.5).astype(np.float32),
            }
        prompt = np.array([1, 2], dtype=np.int32)
        found.append(Shard(f"p{i}", prompt, tokens, lengths, scores))
    return found


def scored(**kw: object) -> TypeScores:
    data = shards(**kw)  # type: ignore[arg-type]
    return score_types(lambda: data, VOCAB, lambda i: f"t{i}", ScoreSettings(0.6, 3))


def test_type_scores_equal_a_plain_loop() -> None:
    data = shards()
    scores = scored()
    kl = np.concatenate([s.scores["reverse_kl"] for s in data])
    before = np.concatenate([s.scores["before_reverse_kl"] for s in data])
    cut, cut_before = np.quantile(kl, 0.6), np.quantile(before, 0.6)
    assert scores.threshold == pytest.approx(cut)
    assert scores.threshold_before == pytest.approx(cut_before)
    table = scores.table.set_index("token_id")
    assert table["share"].sum() == pytest.approx(1)
    for token, row in table.iterrows():
        values: dict[str, list[float]] = {}
        places, prompts, high, lasting, lasting_kl = [], set(), 0, 0, 0.0
        for shard in data:
            start = 0
            for length in shard.lengths:
                for t in range(length):
                    i = start + t
                    if shard.tokens[i] != token:
                        continue
                    for name, column in shard.scores.items():
                        values.setdefault(name, []).append(float(column[i]))
                    places.append(t / length)
                    prompts.add(shard.doc_id)
                    is_high = shard.scores["reverse_kl"][i] > cut
                    high += is_high
                    if is_high and shard.scores["before_reverse_kl"][i] > cut_before:
                        lasting += 1
                        lasting_kl += float(shard.scores["reverse_kl"][i])
                start += length
        assert row["frequency"] == len(places)
        assert row["n_prompts"] == len(prompts)
        assert row["mean_position"] == pytest.approx(np.mean(places))
        assert row["mean_kl"] == pytest.approx(np.mean(values["reverse_kl"]))
        assert row["rock_score"] == pytest.approx(row["mean_kl"] * row["frequency"])
        assert row["total_kl"] == pytest.approx(np.sum(values["reverse_kl"]))
        assert row["agreement"] == pytest.approx(np.mean(values["agree"]))
        assert row["delta_kl"] == pytest.approx(
            np.mean(values["reverse_kl"]) - np.mean(values["before_reverse_kl"])
        )
        assert row["efficiency_ratio"] == pytest.approx(
            np.sum(values["signal"]) / np.sum(values["noise"])
        )
        assert (row["n_high"], row["n_persistent"]) == (high, lasting)
        assert row["persistent_kl"] == pytest.approx(lasting_kl)


def test_without_a_student_before_training_high_is_persistent() -> None:
    scores = scored(before=False)
    assert scores.threshold_before is None
    assert (scores.table["n_high"] == scores.table["n_persistent"]).all()
    assert "delta_kl" not in scores.table


def test_no_position_is_an_error() -> None:
    with pytest.raises(ValueError, match="no scored position"):
        score_types(list, VOCAB, str)


def test_consistency_equals_the_mean_cosine_of_pairs_from_different_prompts() -> None:
    rng = np.random.default_rng(3)
    data = [(rng.integers(0, 12, 60).astype(np.int32), np.repeat([0, 1, 2], 20)) for _ in range(3)]
    chosen = [rng.random(60) < 0.5 for _ in data]
    weights = surprisal(np.bincount(np.concatenate([t for t, _ in data]), minlength=15))
    sums = ContextSums(weights, window=2)
    bags: dict[int, list[tuple[int, np.ndarray]]] = {}
    for prompt, ((tokens, rollout), selected) in enumerate(zip(data, chosen, strict=True)):
        sums.add(tokens, rollout.astype(np.int32), selected)
        for i in np.flatnonzero(selected):
            bag = np.zeros(15)
            for j in range(max(i - 2, 0), min(i + 3, 60)):
                if j != i and rollout[j] == rollout[i]:
                    bag[tokens[j]] += weights[tokens[j]]
            bags.setdefault(int(tokens[i]), []).append((prompt, bag / np.linalg.norm(bag)))
    found = sums.consistency()
    for token in range(15):
        mine = bags.get(token, [])
        cosines = [a @ b for (p, a) in mine for (q, b) in mine if p != q]
        if cosines:
            assert found[token] == pytest.approx(np.mean(cosines))
        else:
            assert np.isnan(found[token])


def test_consistency_is_one_for_equal_and_zero_for_disjoint_contexts() -> None:
    sums = ContextSums(np.ones(10), window=1)
    for words in ([1, 9, 2, 3, 8, 4], [1, 9, 2, 5, 8, 6]):
        tokens = np.array(words, dtype=np.int32)
        sums.add(tokens, np.repeat(np.arange(2, dtype=np.int32), 3), np.isin(tokens, [8, 9]))
    found = sums.consistency()
    assert found[9] == pytest.approx(1)
    assert found[8] == 0
    assert np.isnan(found[1])


def test_a_loop_within_one_prompt_is_no_consistency() -> None:
    sums = ContextSums(np.ones(10), window=1)
    loop = np.array([1, 9, 2] * 30, dtype=np.int32)
    sums.add(loop, np.zeros(90, dtype=np.int32), loop == 9)
    assert np.isnan(sums.consistency()[9])
    other = np.array([3, 9, 4], dtype=np.int32)
    sums.add(other, np.zeros(3, dtype=np.int32), other == 9)
    assert sums.consistency()[9] == 0


def test_ranks_filter_and_break_ties_by_id() -> None:
    table = pd.DataFrame(
        {
            "token_id": [5, 3, 8, 9],
            "frequency": [10, 10, 50, 7],
            "n_persistent": [6, 6, 6, 2],
            "rock_score_ctx": [1.0, 1.0, 9.0, 7.0],
        }
    )
    assert rank_types(table)["token_id"].tolist() == [8, 3, 5]
    assert rank_types(table, drop_most_frequent=1)["token_id"].tolist() == [3, 5]
    assert rank_types(table, exclude=[3], min_count=1)["token_id"].tolist() == [8, 9, 5]
    assert rank_types(table)["rank"].tolist() == [1, 2, 3]
    with pytest.raises(ValueError, match="no score 'magic' to rank by; there are: token_id"):
        rank_types(table, by="magic")


def test_overlap_equals_the_jaccard_index_of_the_sets() -> None:
    rng = np.random.default_rng(0)
    other = rng.permutation(20) + 1
    found = overlap_of_ranks(np.arange(1, 21), other, 20)
    for k in range(1, 21):
        a, b = set(range(k)), set(np.flatnonzero(other <= k))
        assert found[k - 1] == pytest.approx(len(a & b) / len(a | b))
    assert found[-1] == 1


def test_cutoff_curve_grows_and_equals_direct_resampling() -> None:
    scores = scored()
    ranked = rank_types(scores.table, min_count=2)
    curve = cutoff_curve(scores, ranked, np.random.default_rng(1), k_max=8, repeats=20, min_count=2)
    assert curve["k"].tolist() == list(range(1, 9))
    assert (curve["kl_share"].diff().dropna() > 0).all()
    assert curve["kl_share"].iloc[-1] == pytest.approx(
        ranked["total_kl"].head(8).sum() / scores.table["total_kl"].sum()
    )
    # The same draws, one resample and one list at a time.
    rng, n = np.random.default_rng(1), 12
    weights = np.concatenate([rng.multinomial(n, np.full(n, 1 / n), size=size) for size in (16, 4)])
    ids = ranked["token_id"].to_numpy()
    kl, count = scores.prompt_kl.toarray()[:, ids], scores.prompt_count.toarray()[:, ids]
    overlaps = []
    for w in weights:
        score = (w @ kl) * np.nan_to_num(ranked["consistency"].to_numpy())
        score[w @ count < 2] = -1
        best = sorted(range(len(ids)), key=lambda i: (-score[i], ids[i]))
        overlaps.append(
            [len({*best[:k]} & {*range(k)}) / len({*best[:k], *range(k)}) for k in range(1, 9)]
        )
    np.testing.assert_allclose(curve["stability"], np.mean(overlaps, axis=0))


def test_one_prompt_has_no_stability_and_no_context_score() -> None:
    scores = scored(n=1)
    assert rank_types(scores.table, min_count=1).empty
    ranked = rank_types(scores.table, by="rock_score", min_count=1)
    curve = cutoff_curve(scores, ranked, np.random.default_rng(0), by="rock_score", min_count=1)
    assert len(curve)
    assert curve["stability"].isna().all()


def test_matches_are_near_and_unique() -> None:
    rng = np.random.default_rng(0)
    pool = rng.normal(size=400)
    wanted = rng.normal(size=50)
    chosen = match(wanted, pool, rng)
    assert len(set(chosen)) == 50
    assert np.abs(pool[chosen] - wanted).mean() < 0.1
    assert sorted(match(np.zeros(3), np.zeros(2), rng)) == [-1, 0, 1]


def test_partners_are_the_best_assignment_there_is() -> None:
    rng = np.random.default_rng(3)
    for _ in range(20):
        wanted, pool = rng.normal(size=4), rng.normal(size=6)
        chosen = match(wanted, pool, rng)
        best = min(
            sum(abs(w - pool[j]) for w, j in zip(wanted, order, strict=True))
            for order in itertools.permutations(range(6), 4)
        )
        assert np.abs(wanted - pool[chosen]).sum() == pytest.approx(best)


def test_a_score_that_is_not_about_persistence_is_not_filtered_by_it() -> None:
    scores = scored(n=30)
    table = scores.table.copy()
    table.loc[:4, "n_persistent"] = 0
    assert set(table["token_id"][:5]) <= set(rank_types(table, by="entropy")["token_id"])
    assert not set(table["token_id"][:5]) & set(rank_types(table, by="persistent_kl")["token_id"])
    few = rank_types(table, by="entropy", min_count=int(table["frequency"].median()))
    assert (few["frequency"] >= table["frequency"].median()).all()


def test_shares_of_outputs_and_of_the_gradient() -> None:
    scores = scored()
    data = shards()
    outputs = [r for shard in data for r in shard.responses() if len(r)]
    norm = np.concatenate([s.scores["grad_norm"] for s in data])
    tokens = np.concatenate([s.tokens for s in data])
    for row in scores.table.itertuples():
        own = [float((r == row.token_id).mean()) for r in outputs]
        assert row.output_share == pytest.approx(np.mean(own))
        assert row.grad_share == pytest.approx(norm[tokens == row.token_id].sum() / norm.sum())
    assert scores.table["output_share"].sum() == pytest.approx(1)
    assert scores.table["grad_share"].sum() == pytest.approx(1)


def test_the_knee_is_where_the_curve_bends() -> None:
    share = np.concatenate([np.linspace(0.05, 0.5, 10), np.linspace(0.505, 0.6, 20)])
    curve = pd.DataFrame({"k": np.arange(1, 31), "kl_share": share})
    assert knee(curve) == 10
    assert knee(curve.head(2)) is None
    assert knee(curve.assign(kl_share=np.arange(1, 31) ** 2 / 900)) is None


def test_a_registered_score_gets_a_column() -> None:
    data = shards()
    found = score_types(lambda: iter(data), VOCAB, str, ScoreSettings(extra=("soft_or", "kl*kl")))
    tokens = np.concatenate([s.tokens for s in data])
    kl = np.concatenate([s.scores["reverse_kl"] for s in data]).astype(float)
    per_prompt = []
    for s in data:
        h, d = s.scores["entropy"], s.scores["reverse_kl"]
        h, d = ((x - x.min()) / (x.max() - x.min()) for x in (h, d))
        per_prompt.append(1 - (1 - h) * (1 - d))
    soft = np.concatenate(per_prompt)
    for row in found.table.to_dict("records"):
        here = tokens == row["token_id"]
        assert row["soft_or"] == pytest.approx(soft[here].mean(), rel=1e-4)
        assert row["kl*kl"] == pytest.approx((kl[here] ** 2).mean(), rel=1e-4)
    assert rank_types(found.table, by="soft_or")["soft_or"].is_monotonic_decreasing


@pytest.mark.parametrize("seed", [0, 1])
def test_controls_never_overlap(seed: int) -> None:
    scores = scored(n=30)
    ranked = rank_types(scores.table, min_count=2)
    drawn = draw_controls(
        scores.table, ranked, 6, np.random.default_rng(seed), exclude=[0], min_count=1
    )
    ids = [int(i) for kind in KINDS for i in drawn[f"{kind}_id"].dropna()]
    rocks = ranked["token_id"].head(6).tolist()
    assert drawn["rock_id"].tolist() == rocks
    assert len(ids) == 18
    assert not {*ids} & {*rocks, 0}
    assert len({*ids}) == len(ids)
    assert drawn["rank_id"].tolist() == ranked["token_id"].iloc[6:12].tolist()
    again = draw_controls(
        scores.table, ranked, 6, np.random.default_rng(seed), exclude=[0], min_count=1
    )
    pd.testing.assert_frame_equal(drawn, again)


def test_controls_of_a_small_pool_are_blank_at_the_end() -> None:
    scores = scored()
    ranked = rank_types(scores.table, min_count=1)
    drawn = draw_controls(scores.table, ranked, len(ranked) - 2, np.random.default_rng(0))
    assert drawn["rank_id"].notna().sum() == 2


def test_a_shard_comes_back_as_written_and_a_torn_one_is_named(tmp_path: Path) -> None:
    path = tmp_path / "scores" / "00001.npz"
    shard = shards(1)[0]
    write_shard(path, shard)
    again = read_shard(path)
    assert again.doc_id == shard.doc_id
    for name, values in shard.scores.items():
        np.testing.assert_array_equal(again.scores[name], values)
    np.testing.assert_array_equal(again.tokens, shard.tokens)
    assert [len(r) for r in again.responses()] == shard.lengths.tolist()
    assert again.step.max() == shard.lengths.max() - 1
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(KnockoutError, match=r"00001\.npz: not a whole shard"):
        read_shard(path)
