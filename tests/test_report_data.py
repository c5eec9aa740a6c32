"""The report's numbers, against counts made in another way."""

from __future__ import annotations

import base64
import csv
import gzip
import hashlib
import json
from collections import Counter
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from synthetic import write_run

from knockout.errors import UsageError
from knockout.ledger import CellKey
from knockout.report.build import candidate_replacements
from knockout.report.data import details, overview, shown_config, without_folders
from knockout.report.plots import Plots, page_specs, write_figures
from knockout.report.sample import pack, sample_pairs
from knockout.report.source import FastTokenizer, open_ledger, open_texts, read_run
from knockout.report.tokens import TokenTexts
from knockout.report.trajectories import frequencies, outcome_of, pair, some_rows
from knockout.tokens.checkpoint import load_tokenizer, resolve_model


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(resolve_model("smollm2-135m"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
    return write_run(tmp_path_factory.mktemp("run"), tokenizer)


def test_details_equal_counts_over_single_rows(folder: Path) -> None:
    with open_ledger(folder) as ledger:
        run = read_run(folder, ledger)
        for candidate in range(len(ledger.candidates)):
            described = details(run, candidate)
            for b in range(2):
                rows = ledger.query(
                    "SELECT f.problem, f.seed, f.step, f.n_tokens, f.finish, f.correct, c.correct,"
                    " c.n_tokens FROM fork f JOIN cell c USING (benchmark, problem, seed)"
                    " WHERE benchmark = ? AND candidate = ? ORDER BY f.problem, f.seed",
                    (b, candidate),
                )
                own = described[b]
                assert own["n"] == len(rows)
                assert own["lost"] == [list(r[:2]) for r in rows if r[5] < r[6]]
                assert own["won"] == [list(r[:2]) for r in rows if r[5] > r[6]]
                assert own["outcomes"][1] == sum(r[5] == r[6] for r in rows)
                assert own["unfinished"] == [0, sum(r[4] == "length" for r in rows)]
                tenths = Counter(min(10 * r[2] // r[7], 9) for r in rows)
                assert own["where"] == [tenths[i] for i in range(10)]
                if rows:
                    change = sorted(r[3] - r[7] for r in rows)
                    assert own["length"]["change"][1] == pytest.approx(np.median(change), abs=0.06)
                cells = ledger.query("SELECT COUNT(*) FROM cell WHERE benchmark = ?", (b,))[0][0]
                assert own["inherited"] == cells - len(rows)


def test_costs_are_those_of_the_summary_split_by_benchmark(folder: Path) -> None:
    with open_ledger(folder) as ledger:
        run = read_run(folder, ledger)
        data = overview(run, ledger, *frequencies(ledger))
    for key in ("tokens_generated", "tokens_naive", "forks", "inherited"):
        assert sum(b[key] for b in data["benchmarks"]) == run.summary[key] == data["cost"][key]
    lengths = sum(int(c.n_tokens.sum()) for c in run.cells)
    assert data["cost"]["tokens_planned"] == pytest.approx(lengths * 11, rel=1e-6)


def test_every_row_is_counted_once_by_each_rule(folder: Path) -> None:
    with open_ledger(folder) as ledger:
        data = overview(read_run(folder, ledger), ledger, *frequencies(ledger))
    assert {(e["benchmark"], e["group"]): e["n"] for e in data["counts"]} == {
        (b, g): n
        for b in ("maths", "formats", "pooled")
        for g, n in (("candidate", 6), ("control", 3))
    }
    for entry in data["counts"]:
        own = [
            r
            for r in data["rows"]
            if (r["benchmark"], r["group"]) == (entry["benchmark"], entry["group"])
        ]
        for rule in ("nominal", "fdr"):
            assert sum(entry[rule].values()) == entry["n"]
            pillars = sum(r[f"verdict_{rule}"] == "strong_pillar" for r in own)
            assert entry[rule]["strong_pillar"] == pillars
    assert any(e["fdr"]["strong_pillar"] for e in data["counts"])
    json.dumps(data, allow_nan=False)


def test_frequencies_are_counts_in_the_baselines(folder: Path) -> None:
    with open_ledger(folder) as ledger:
        found, total = frequencies(ledger)
        expected = np.zeros_like(found)
        lengths = np.zeros_like(total)
        for b, p, s in ledger.query("SELECT benchmark, problem, seed FROM cell"):
            tokens = ledger.trajectory(CellKey(b, p, s)).tolist()
            lengths[b] += len(tokens)
            for c, candidate in enumerate(ledger.candidates):
                expected[b, c] += sum(token in candidate.token_ids for token in tokens)
    assert total.tolist() == lengths.tolist()
    assert found.tolist() == expected.tolist()


def test_replacements_are_the_tokens_at_the_fork(folder: Path) -> None:
    with open_ledger(folder) as ledger:
        run = read_run(folder, ledger)
        counted = candidate_replacements(run, ledger)
        rows = ledger.query(
            "SELECT problem, seed, step FROM fork WHERE benchmark = 0 AND candidate = 2"
        )
        expected: Counter[tuple[int, int]] = Counter()
        for p, s, step in rows:
            before = ledger.trajectory(CellKey(0, p, s))
            after = ledger.trajectory(CellKey(0, p, s), 2)
            assert before[:step].tolist() == after[:step].tolist()
            expected[int(before[step]), int(after[step])] += 1
    own = counted[0, 2]
    assert own["n"] == len(rows) > 0
    assert {(b, a): n for b, a, n, *_ in own["top"]}.items() <= expected.items()
    assert all(n == sum(outcomes) for _, _, n, *outcomes in own["top"])


def test_a_pair_is_the_two_trajectories(folder: Path) -> None:
    with open_ledger(folder) as ledger:
        p, s, c = ledger.query("SELECT problem, seed, candidate FROM fork WHERE benchmark = 1")[0]
        found = pair(ledger, (1, p, s, c))
        assert found is not None
        base, knockout = found["baseline"], found["knockout"]
        whole = base["ids"][: knockout["step"]] + knockout["ids"]
        assert whole == ledger.trajectory(CellKey(1, p, s), c).tolist()
        assert pair(ledger, (1, p, s, -1))["knockout"] is None  # type: ignore[index]
        assert pair(ledger, (1, 999, 0, 0)) is None


@pytest.mark.parametrize(
    ("baseline", "knockout", "expected"),
    [(1, 0, "lost"), (0, 1, "won"), (1, 1, "same"), (0, 0, "same"), (None, 1, "ungraded")],
)
def test_outcomes(baseline: int | None, knockout: int | None, expected: str) -> None:
    assert outcome_of(baseline, knockout) == expected


def test_a_sample_keeps_to_its_budget_and_takes_changes_first(folder: Path) -> None:
    with open_ledger(folder) as ledger:
        run = read_run(folder, ledger)
        everything = sample_pairs(run, ledger, 10**9)
        small = sample_pairs(run, ledger, 20_000)
        none = sample_pairs(run, ledger, 0)
    outcomes = [p["outcome"] for pairs in everything.knockouts.values() for p in pairs]
    changed = int((run.forks.outcome != 0).sum())
    assert sum(outcome != "same" for outcome in outcomes) == changed
    assert 0 < small.n_pairs < everything.n_pairs
    assert small.size < 20_000 + 5_000
    assert none.n_pairs == 0


def test_some_rows_are_spread_and_distinct() -> None:
    assert some_rows(slice(5, 9), 10).tolist() == [5, 6, 7, 8]
    assert some_rows(slice(0, 100), 4).tolist() == [0, 25, 50, 75]
    assert some_rows(slice(3, 3), 4).tolist() == []


def test_packed_data_hold_nothing_that_ends_a_script() -> None:
    value = {"a": "</script><!-- \u2028 \ud800"}
    packed = pack(value)
    assert set(packed) <= set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/=")
    assert pack(value) == packed
    text = gzip.decompress(base64.b64decode(packed)).decode("utf-8")
    assert json.loads(text)["a"] == "</script><!-- \u2028 \ud800"


def test_the_light_tokenizer_gives_the_same_texts(tokenizer: Any) -> None:
    light = TokenTexts(
        FastTokenizer(Path(resolve_model("smollm2-135m"))), tokenizer.all_special_ids
    )
    whole = TokenTexts(tokenizer, tokenizer.all_special_ids)
    ids = [*range(400), *range(400, len(tokenizer) + 3, 37)]
    assert light.vocab(ids) == whole.vocab(ids)
    assert light.encode(" the answer\n") == whole.encode(" the answer\n")


def test_token_kinds(tokenizer: Any, folder: Path) -> None:
    texts = TokenTexts(tokenizer, tokenizer.all_special_ids)
    (the,) = tokenizer.encode(" the", add_special_tokens=False)
    assert texts.entry(the) == [" the", 0]
    assert texts.entry(tokenizer.eos_token_id)[1] == 1
    part = tokenizer.encode("🦜", add_special_tokens=False)[0]
    assert texts.entry(part)[1] == 2
    assert texts.entry(len(tokenizer) + 1) == [f"padding {len(tokenizer) + 1}", 1]
    assert TokenTexts(None, (), {7: '"x"'}).entry(7) == ['"x"', 2]
    assert TokenTexts(None).entry(8) == ["#8", 2]


def test_a_model_that_is_gone_leaves_ids(folder: Path) -> None:
    with open_ledger(folder) as ledger:
        run = read_run(folder, ledger)
        gone = run.sweep.model_copy(update={"model": "nobody/nothing"})
        texts = open_texts(gone, ledger)
        first = ledger.candidates[0]
    assert not texts.has_tokenizer
    assert texts.entry(first.token_ids[0]) == [first.tokens[0], 2]


def test_the_plotting_library_is_the_one_that_is_named() -> None:
    vendor = files("knockout.figures") / "vendor"
    named = json.loads((vendor / "VENDORED.json").read_text(encoding="utf-8"))
    assert {f"{name}.js" for name in ("vega.min", "vega-lite.min", "vega-interpreter")} == set(
        named
    )
    for name, about in named.items():
        assert hashlib.sha256((vendor / name).read_bytes()).hexdigest() == about["sha256"]
    assert "Redistribution and use" in (vendor / "LICENSE.txt").read_text(encoding="utf-8")


def test_folders_of_the_machine_stay_out_of_the_report() -> None:
    given = "model: /home/me/models/qwen\ndata_dir: null\nbenchmarks:\n- name: x\n  data_dir: C:\\data\\y\n"
    shown = shown_config(given)
    assert "home" not in shown
    assert "C:" not in shown
    assert "…/qwen" in shown
    assert without_folders({"a": ["org/name", 3, "not /a path"]}) == {
        "a": ["org/name", 3, "not /a path"]
    }


def test_figures_are_written_twice_alike(folder: Path, tmp_path: Path) -> None:
    one, other = (write_figures(folder, tmp_path / name) for name in ("one", "other"))
    kinds = ("forest", "volcano", "frequency", "p_values")
    names = {f"{kind}-{b}" for kind in kinds for b in ("maths", "formats", "pooled")}
    assert {p.stem for p in one} == names
    begins = {".pdf": b"%PDF", ".svg": b"<svg", ".csv": None}
    for a, b in zip(one, other, strict=True):
        begin = begins[a.suffix]
        if begin is not None:
            assert a.read_bytes().startswith(begin)
        if a.suffix != ".pdf":  # a PDF holds the time at which it was made
            assert a.read_bytes() == b.read_bytes()


def test_a_figures_csv_holds_what_is_drawn(folder: Path, tmp_path: Path) -> None:
    write_figures(folder, tmp_path, kinds=["svg"])
    with open_ledger(folder) as ledger:
        rows = {
            r["candidate"]: r for r in read_run(folder, ledger).rows if r["benchmark"] == "maths"
        }
    with (tmp_path / "forest-maths.csv").open(encoding="utf-8", newline="") as file:
        table = list(csv.DictReader(file))
    assert {row["candidate"] for row in table} == set(rows)
    for row in table:
        assert float(row["delta"]) == pytest.approx(rows[row["candidate"]]["delta"])
    drawn = (tmp_path / "forest-maths.svg").read_text(encoding="utf-8")
    strongest = min(rows.values(), key=lambda row: row["delta"])
    assert f"{strongest['delta']:+.3f}".replace("-", "\u2212") in drawn


def test_every_specification_compiles(folder: Path) -> None:
    """Vega-Lite's own compiler is the judge; it refuses what it does not know."""
    import vl_convert

    from knockout.figures.write import complete

    with open_ledger(folder) as ledger:
        data = overview(read_run(folder, ledger), ledger, *frequencies(ledger))
    specs = page_specs(data)
    assert len(specs) > 10
    for name, spec in specs.items():
        compiled = vl_convert.vegalite_to_vega(complete(spec, []), vl_version="6.4")
        assert compiled["marks"], name


def test_a_notebook_gets_charts(folder: Path) -> None:
    plots = Plots(folder)
    chart = plots.forest("maths", rule="nominal").to_dict()
    assert len(chart["datasets"]["rows"]) == 10
    assert plots.agreement("maths", "formats").to_dict()["datasets"]["rows"][0].keys() >= {"other"}
    with pytest.raises(UsageError, match="found 'nothing'"):
        plots.volcano("nothing")


@pytest.mark.parametrize("rule", ["nominal", "fdr"])
def test_intervals_and_verdicts_of_a_rule_agree(folder: Path, rule: str) -> None:
    with open_ledger(folder) as ledger:
        data = overview(read_run(folder, ledger), ledger, *frequencies(ledger))
    called = 0
    for row in data["rows"]:
        if row[f"low_{rule}"] is None:
            continue
        strong = row[f"key_{rule}"].startswith("strong")
        called += strong
        assert strong == (row[f"low_{rule}"] > 0 or row[f"high_{rule}"] < 0)
        if row["group"] != "canary":
            assert strong == (row["p_value"] <= row[f"level_{rule}"])
    assert called
