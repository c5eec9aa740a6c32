"""Sweep files: what they may say, and what is said about wrong ones."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from knockout.config import sweep as config
from knockout.config.file import dump_sweep, load_sweep, parse_sweep
from knockout.config.sweep import Sweep, identity_fields
from knockout.errors import UsageError
from knockout.method.interventions import Intervention, ban
from knockout.sweep.identity import differences, digest, identity
from knockout.tokens.candidates import Candidate

EXAMPLES = Path(__file__).parents[1] / "examples"
SMALL = """\
model: smollm2-135m
benchmarks: [a, {name: b, seeds: 8, sampling: {temperature: 1.0, max_tokens: null}, limit: null}]
limit: 10
sampling: {temperature: 0.5, top_k: 20, max_tokens: 64}
candidates: {ids: [1, 2], sets: {pair: [3, " x"]}}
"""
MODELS = [
    value
    for value in vars(config).values()
    if isinstance(value, type) and issubclass(value, BaseModel) and value.__module__ == config.__name__
    and not value.__name__.startswith("_")
]  # fmt: skip


def parse(text: str, *sets: str) -> Sweep:
    return parse_sweep(text, "x.yaml", Path("/base"), sets)


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda p: p.name)
def test_examples_are_valid(path: Path) -> None:
    load_sweep(path)


def test_the_published_protocol() -> None:
    sweep = load_sweep(EXAMPLES / "qwen3_rock_tokens.yaml")
    assert (sweep.sampling.temperature, sweep.sampling.max_tokens, sweep.seeds) == (0.6, 16384, 3)
    assert {entry.name for entry in sweep.benchmarks} == {
        "knockout_math500", "knockout_aime24", "knockout_aime25", "knockout_hmmt25",
        "knockout_ifeval",
    }  # fmt: skip
    assert sweep.candidates.controls is not None
    assert sweep.candidates.file == sweep.candidates.controls.file == EXAMPLES / "rocks.csv"


@pytest.mark.parametrize("model", MODELS, ids=lambda m: m.__name__)
def test_every_field_is_classed_and_described(model: type[BaseModel]) -> None:
    for name, field in model.model_fields.items():
        extra = field.json_schema_extra
        assert isinstance(extra, dict), f"{model.__name__}.{name}: outputs() or handling()?"
        assert isinstance(extra["identity"], bool)
        assert field.description, f"{model.__name__}.{name} has no docstring"


def test_identity_holds_what_changes_outputs_only() -> None:
    fields = identity_fields(parse(SMALL))
    assert fields["sampling"]["temperature"] == 0.5
    assert fields["benchmarks"][1]["sampling"]["temperature"] == 1.0
    assert "max_num_seqs" not in fields["engine"]
    assert not {"verdict", "grading", "audit", "data_dir", "candidates"} & fields.keys()


def test_identity_differences_name_the_keys() -> None:
    def record(sweep: Sweep, **changes: Any) -> dict[str, Any]:
        given = {"model": "m", "tokenizer": "t", "benchmarks": [("a", "1")], "candidates": ()}
        return identity(sweep, **(given | changes))

    one = record(parse(SMALL))
    assert (
        differences(one, record(parse(SMALL, "verdict.alpha=0.1", "engine.max_num_seqs=2"))) == []
    )
    other = record(parse(SMALL, "sampling.temperature=0.7", "benchmarks.1.seeds=9"), model="n")
    lines = differences(one, other)
    assert lines == [
        'the model\'s weights or configuration (fingerprint): "m" there, "n" here',
        "sampling.temperature of a: 0.5 there, 0.7 here",
    ]
    assert digest(one) == digest(record(parse(SMALL, "audit=0.5"))) != digest(other)


def test_what_is_only_asked_is_no_difference() -> None:
    def record(*sets: str, **changes: Any) -> dict[str, Any]:
        given = {"model": "m", "tokenizer": "t", "benchmarks": [("a", "1")], "candidates": ()}
        return identity(parse(SMALL, *sets), **(given | changes))

    more = ("seeds=9", "limit=20", "benchmarks=[b, {name: a, seeds: 2}]")
    there = record("benchmarks.1.sampling=null")
    # Benchmarks are told by their names, whatever their order.
    assert differences(there, record(*more, candidates=[Candidate("x", ban((1,)))])) == []
    assert differences(there, record(*more, "sampling.max_tokens=65", "run_seed=1")) == [
        "run_seed: 0 there, 1 here",
        "sampling.max_tokens: 64 there, 65 here",
    ]
    assert differences(record(), record("adaptive.max_seeds=4")) == [
        "adaptive.max_seeds: nothing there, 4 here",
        "racing.alpha: nothing there, 0.05 here",
        "racing.margin: nothing there, 0.02 here",
        'racing.rule: nothing there, "fdr" here',
        'racing.target: nothing there, "population" here',
    ]


def test_an_old_sweep_is_what_it_was() -> None:
    """The hash was made by version 0.1.0 of the same sweep."""
    candidates = [
        Candidate('" the"', ban((1,)), ('" the"',)),
        Candidate("pair", ban((3, 9)), ('"a"', '" x"')),
        Candidate("k", ban((5,)), ('"k"',), "control"),
        Candidate("A/A", ban((63,)), ("<padding 63>",), "canary"),
    ]

    def made(*sets: str, candidates: list[Candidate]) -> str:
        return digest(
            identity(
                parse(SMALL, *sets), model="m", tokenizer="t",
                benchmarks=[("a", "fa"), ("b", "fb")], candidates=candidates,
            )
        )  # fmt: skip

    assert made(candidates=candidates) == "448e6e8e8344846f4440b1e0f0b75bd8"
    penalty = Intervention("penalty", (1,), strength=2.0)
    others = [[Candidate('" the"', penalty, ('" the"',)), *candidates[1:]], candidates[1:]]
    assert len({made(candidates=c) for c in [candidates, *others]}) == 3


def test_overrides_merge_and_null_overrides_too() -> None:
    sweep = parse(SMALL)
    plain, own = (sweep.settings(entry) for entry in sweep.benchmarks)
    assert (plain.limit, plain.seeds, plain.sampling.temperature) == (10, 3, 0.5)
    assert (own.limit, own.seeds) == (None, 8)
    assert own.sampling.model_dump() == {
        "temperature": 1.0, "top_p": 1.0, "top_k": 20, "min_p": 0.0, "max_tokens": None,
    }  # fmt: skip


def test_resolved_file_reads_back_equal(tmp_path: Path) -> None:
    sweep = parse(SMALL, "data_dir=data", "candidates.file=c.csv", "candidates.column=x")
    assert sweep.data_dir == Path("/base/data")
    again = parse_sweep(dump_sweep(sweep), "y.yaml", tmp_path)
    assert again == sweep
    assert [again.settings(e) for e in again.benchmarks] == [
        sweep.settings(e) for e in sweep.benchmarks
    ]


def test_relative_paths_belong_to_the_file(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "s.yaml").write_text(SMALL.replace("smollm2-135m", "model") + "data_dir: ../d\n")
    sweep = load_sweep(tmp_path / "s.yaml")
    assert sweep.model == str(tmp_path / "model")
    assert sweep.data_dir == tmp_path.parent / "d"


def test_set_reaches_into_lists_and_new_mappings() -> None:
    sweep = parse(SMALL, "benchmarks.0=c", "engine.kind=transformers", "sampling.top_p=0.9")
    assert sweep.benchmarks[0].name == "c"
    assert (sweep.engine.kind, sweep.sampling.top_p) == ("transformers", 0.9)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ("samplng: 1", "x.yaml:6: unknown key `samplng`; did you mean `sampling`?"),
        ("chat: {tempalte: true}", "x.yaml:6: unknown key `chat.tempalte`; did you mean `template`?"),
        ("engine: {zzz: 1}", "x.yaml:6: unknown key `engine.zzz`; known keys: kind, "),
        ("seeds: true", "x.yaml:6: `seeds`: found True; expected a whole number"),
        ("seeds: 2.5", "x.yaml:6: `seeds`: found 2.5; expected a whole number"),
        ("seeds: 0", "x.yaml:6: `seeds`: found 0; expected greater than or equal to 1"),
        ("audit: 2", "x.yaml:6: `audit`: found 2; expected less than or equal to 1"),
        ("audit: .nan", "`audit`: found nan"),
        ("strategy: fast", "x.yaml:6: `strategy`: found 'fast'; expected 'fork' or 'naive'"),
        ("limit: 3", "x.yaml:6: found `limit` twice (first in line 3)"),
        ("seeds: [", "not valid YAML"),
        ("chat: {args: {a: !!python/name:os.system }}", "not valid YAML"),
    ],
)  # fmt: skip
def test_complaints_name_line_key_and_value(extra: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(SMALL + extra + "\n")
    assert message in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("sampling.temperature=0.001", "found 0.001; expected 0 (greedy) or at least 0.01"),
        ("benchmarks.0.x=1", "`benchmarks.0` is 'a' and has no key `x`"),
        ("benchmarks.7=x", "`benchmarks` is a list of 2; found `7`"),
        ("benchmarks=[a, a]", "found the benchmark 'a' twice"),
        ("benchmarks=[]", "`benchmarks`"),
        ("candidates.ids=[true]", "`candidates.ids[0]`: found True"),
        ("candidates.ids=['12']", "`candidates.ids[0]`: found '12'"),
        ("candidates={ids: []}", "`candidates`: found `ids` is empty"),
        (
            "candidates={}",
            "`candidates`: found nothing; expected a file, ids, strings, sets or replace",
        ),
        ("candidates={ids: [1], column: x}", "`column` names a column of `file`"),
        ("seeds", "expected key.path=value"),
        ("seeds=[", "not valid YAML"),
    ],
)
def test_complaints_about_set(change: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(SMALL, change)
    assert message in str(caught.value)


@pytest.mark.parametrize("text", ["", "- a\n", "just text"])
def test_other_yaml_is_no_sweep(text: str) -> None:
    with pytest.raises(UsageError, match="expected keys"):
        parse(text)


def test_a_missing_or_binary_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such sweep file"):
        load_sweep(tmp_path / "none.yaml")
    (tmp_path / "b.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="cannot be read"):
        load_sweep(tmp_path / "b.yaml")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("candidates.where=thinking", "without `chat.think_end`"),
        ("candidates.dose=[0, 1]", "expected penalties other than 0"),
        ("candidates.dose=[1, 1]", "each once"),
        ("candidates.dose=[]", "expected penalties other than 0"),
        ("candidates.dose=[.inf]", "finite"),
        ("candidates.steps=[5, 5]", "with from below to"),
        ("candidates.steps=[-1, 5]", "greater than or equal to 0"),
        ("candidates.pairs=[a]", "expected two candidates or more"),
        ("candidates.where=middle", "expected 'everywhere', 'thinking' or 'answer'"),
    ],
)
def test_interventions_that_make_no_sense_are_refused(given: str, message: str) -> None:
    with pytest.raises(UsageError) as error:
        parse(SMALL, given)
    assert message in str(error.value)
    parse(SMALL, "candidates.where=thinking", 'chat.think_end="</think>"')


_BASE = "model: m\nbenchmarks: [a]\ncandidates: {ids: [5]}\n"
_BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{chr(98 + n)}: &{chr(98 + n)} [{','.join(['*' + chr(97 + n)] * 9)}]\n" for n in range(9)
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (_BASE + "seeds: 2024-99-99\n", "s.yaml:4: `seeds`: found '2024-99-99'; expected a whole number"),
        (_BASE + "seeds: !!timestamp 2024-99-99\n", "s.yaml:4:8: not valid YAML: 2024-99-99 is no timestamp"),
        (_BASE + "seeds: !!int abc\n", "s.yaml:4:8: not valid YAML: abc is no int"),
        (_BASE + "seeds: " + "9" * 5000, "s.yaml:4:8: not valid YAML: 9999"),
        (_BASE + "seeds: 0x" + "f" * 6000, "s.yaml:4: `seeds`: found a int too long to show"),
        (_BASE + "data_dir: ~nosuchuser/x\n", "s.yaml:4: `data_dir`: found '~nosuchuser/x'; not a path here"),
        (_BASE.replace("m\n", "~nosuchuser/x\n", 1), "s.yaml:1: `model`: found '~nosuchuser/x'; not a path"),
        (_BASE + "chat: &a {args: {x: *a}}\n", "s.yaml:4:21: not valid YAML: the alias *a stands inside"),
        (_BASE + "chat: {args: {x: " + "[" * 1500 + "]" * 1500 + "}}", "nested deeper than 64 levels"),
        (_BASE + _BOMB, "more than 200,000 values, counting what aliases name"),
        (_BASE + "strategy: " + "x" * 100_000, "(100,002 characters); expected 'fork' or 'naive'"),
        (_BASE.replace("m\n", "x" * 100_000 + "\n", 1), "s.yaml:1: `model`: found 'xxx"),
        (_BASE + 'revision: "\\ud800"\n', "half of a surrogate pair"),
        (_BASE.replace("[a]", "[{name: a, sampling: {temperature: hot}}]"),
         "s.yaml:2: `benchmarks[0].sampling.temperature`: found 'hot'; expected a number"),
        (_BASE.replace("[a]", "[{name: a, sampling: {tok: 1}}]"),
         "s.yaml:2: unknown key `benchmarks[0].sampling.tok`; did you mean `top_k`?"),
        (_BASE.replace("[a]", "[{name: a, sampling: 3}]"),
         "s.yaml:2: `benchmarks[0].sampling`: found 3; expected a mapping"),
        (_BASE.replace("[a]", "{a: b}"), "s.yaml:2: `benchmarks`: found {'a': 'b'}; expected a list"),
        (_BASE + "1: 2\n", "expected keys that are texts"),
        (_BASE + "x: !!python/object/apply:os.system [ls]\n", "could not determine a constructor"),
        (_BASE + "x: \x00\n", "s.yaml: not valid YAML: unacceptable character"),
    ],
)  # fmt: skip
def test_no_text_ends_in_anything_but_one_short_complaint(
    tmp_path: Path, text: str, message: str
) -> None:
    started = time.perf_counter()
    with pytest.raises(UsageError) as caught:
        parse_sweep(text, "s.yaml", tmp_path)
    assert time.perf_counter() - started < 5  # an alias bomb took over 20 s; this leaves room
    assert message in str(caught.value)
    assert len(str(caught.value)) < 600
    assert "\n" not in str(caught.value)


def test_a_date_is_a_text(tmp_path: Path) -> None:
    assert parse_sweep(_BASE + "revision: 2024-01-31\n", "s", tmp_path).revision == "2024-01-31"
    twice = "chat: {args: {x: &a [1, 2], y: *a}}\n"
    assert parse_sweep(_BASE + twice, "s", tmp_path).chat.args == {"x": [1, 2], "y": [1, 2]}
