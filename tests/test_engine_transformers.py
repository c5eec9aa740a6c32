"""The transformers engine on tiny models, against plain full forwards without a cache."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from oracles import pick_plain
from tiny import EOS, banned_by, banning, tiny_model

from knockout.engines.base import Completion, Engine, Request, generate
from knockout.engines.open import open_engine
from knockout.engines.transformers import TransformersEngine
from knockout.errors import KnockoutError, UsageError
from knockout.method.interventions import Intervention, ban
from knockout.method.sampling import Sampling
from knockout.tokens.checkpoint import load_tokenizer

GREEDY = Sampling(temperature=0)
OPEN = Sampling(temperature=1.0)
NARROW = Sampling(temperature=0.8, top_p=0.9, top_k=12)
KINDS = ("llama", "qwen3", "sliding", "gpt2")


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Models this small lose time by sharing their work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def folder(kind: str) -> Path:
        if kind not in made:
            made[kind] = tiny_model(tmp_path_factory.mktemp(kind), kind=kind)  # type: ignore[arg-type]
        return made[kind]

    return folder


@pytest.fixture(scope="module")
def engines(folders: Callable[[str], Path]) -> Callable[[str], TransformersEngine]:
    made: dict[str, TransformersEngine] = {}

    def engine(kind: str) -> TransformersEngine:
        if kind not in made:
            made[kind] = TransformersEngine(str(folders(kind)), max_num_seqs=5, device="cpu")
        return made[kind]

    return engine


@pytest.fixture
def engine(engines: Callable[[str], TransformersEngine]) -> TransformersEngine:
    return engines("llama")


def request(key: str, prompt: tuple[int, ...], **changes: object) -> Request:
    plain = Request(key=key, prompt=prompt, seed=11, sampling=NARROW, max_tokens=16)
    return replace(plain, **changes)  # type: ignore[arg-type]


def run(engine: Engine, *requests: Request) -> dict[str, Completion]:
    found = {completion.key: completion for completion in generate(engine, requests)}
    assert set(found) == {r.key for r in requests}
    assert engine.n_open == 0
    return found


@functools.cache
def plain_model(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def by_hand(folder: Path, r: Request, eos: tuple[int, ...] = (EOS,)) -> list[int]:
    """The trajectory by full forwards without a cache, alone, and the plain pick."""
    model = plain_model(folder)
    tokens = list(r.prefix)
    while len(tokens) < r.max_tokens:
        ids = torch.tensor([[*r.prompt, *tokens]])
        with torch.no_grad():
            logits = model(ids, use_cache=False).logits[0, -1]
        logits[list(banned_by(r))] = -torch.inf
        tokens.append(pick_plain(logits.tolist(), r.sampling, r.seed, ids.shape[1]))
        if tokens[-1] in eos:
            break
    return tokens


def varied() -> list[Request]:
    """Requests of many lengths, settings and bans: more than there are slots."""
    out = []
    for i in range(11):
        prompt = tuple(3 + (7 * i + j * j) % 290 for j in range(2 + (5 * i) % 9))
        out.append(
            request(
                f"r{i}",
                prompt,
                seed=100 + i,
                sampling=(GREEDY, OPEN, NARROW)[i % 3],
                intervention=banning(tuple(range(i, i + 40 * (i % 3)))),
                max_tokens=6 + i,
            )
        )
    return out


@pytest.mark.parametrize("kind", KINDS)
def test_a_mixed_batch_equals_full_forwards(
    kind: str, folders: Callable[[str], Path], engines: Callable[[str], TransformersEngine]
) -> None:
    requests = varied()
    found = run(engines(kind), *requests)
    for r in requests:
        tokens = found[r.key].tokens.tolist()
        assert tokens == by_hand(folders(kind), r), r.key
        assert not set(tokens) & set(banned_by(r))
        assert found[r.key].n_generated == len(tokens)


@pytest.mark.parametrize("kind", KINDS)
def test_forks_equal_full_re_runs(kind: str, engines: Callable[[str], TransformersEngine]) -> None:
    engine = engines(kind)
    base = request("base", (5, 80, 200, 33), max_tokens=20, sampling=NARROW)
    baseline = run(engine, base)["base"].tokens.tolist()
    assert len(baseline) > 6
    forks, fulls = [], []
    for step in range(len(baseline)):
        banned = (baseline[step],)
        if banned[0] in baseline[:step]:
            continue
        forks.append(
            replace(
                base, key=f"f{step}", prefix=tuple(baseline[:step]), intervention=banning(banned)
            )
        )
        fulls.append(replace(base, key=f"n{step}", intervention=banning(banned)))
    found = run(engine, *forks, *fulls)
    compared = 0
    for fork, full in zip(forks, fulls, strict=True):
        a, b = found[fork.key], found[full.key]
        # A ban can change top-k or top-p before the token is picked: then no fork at this step.
        if b.tokens[: len(fork.prefix)].tolist() == list(fork.prefix):
            assert a.tokens.tolist() == b.tokens.tolist()
            assert a.finish == b.finish
            assert a.n_generated == len(a.tokens) - len(fork.prefix)
            compared += 1
    assert compared > 3


def test_requests_may_join_while_others_run(
    engine: TransformersEngine, folders: Callable[[str], Path]
) -> None:
    requests = varied()
    found: dict[str, Completion] = {}
    for r in requests:
        engine.add(r)
        for completion in engine.step():
            found[completion.key] = completion
    while engine.n_open:
        for completion in engine.step():
            found[completion.key] = completion
    for r in requests:
        assert found[r.key].tokens.tolist() == by_hand(folders("llama"), r), r.key


def test_it_says_where_watched_interventions_leave(engine: TransformersEngine) -> None:
    """Against full runs under each of them, from the untouched policy and from a fork."""
    watch = tuple(
        [ban((t,)) for t in range(3, 60)]
        + [ban(tuple(range(s, 300, 7))) for s in range(3)]
        + [Intervention("penalty", (t, t + 1), strength=1.5) for t in range(60, 90)]
        + [Intervention("penalty", (t,), strength=-4.0, first_step=2) for t in range(90, 100)]
        + [Intervention("replace", tuple(range(100, 200)), replacement=7, end_step=4)]
    )
    for n, (sampling, own) in enumerate(
        [(OPEN, None), (NARROW, None), (GREEDY, None), (Sampling(1.2, top_p=0.9), ban((5, 9)))]
    ):
        base = request("w", (9, 8, 7), seed=40 + n, sampling=sampling, intervention=own)
        (told,) = run(engine, replace(base, watch=watch)).values()
        runs = [replace(base, key=str(w), intervention=one) for w, one in enumerate(watch)]
        found = run(engine, base, *runs)
        plain = found["w"].tokens.tolist()
        assert told.tokens.tolist() == plain
        assert told.early is not None
        assert told.changes is not None
        assert not told.early.any()
        for w in range(len(watch)):
            other = found[str(w)].tokens.tolist()
            truth = next(
                (t for t, (a, b) in enumerate(zip(plain, other, strict=False)) if a != b), -1
            )
            assert told.changes[w] == truth, (sampling, watch[w])
        assert (told.changes >= 0).sum() > 5


def test_an_end_of_text_token_is_the_last_and_can_be_banned(engine: TransformersEngine) -> None:
    everything_else = tuple(t for t in range(300) if t not in (EOS, 7))
    ends = run(
        engine,
        *[
            request(f"s{s}", (5, 6), seed=s, intervention=banning(everything_else))
            for s in range(8)
        ],
    )
    stopped = [c for c in ends.values() if c.finish == "stop"]
    assert stopped
    for completion in stopped:
        assert completion.tokens.tolist().index(EOS) == len(completion.tokens) - 1
    only_seven = tuple(t for t in range(300) if t != 7)
    (never,) = run(engine, request("never", (5, 6), intervention=banning(only_seven))).values()
    assert never.tokens.tolist() == [7] * 16
    assert never.finish == "length"


def test_stop_strings_end_baseline_and_fork_alike(
    engine: TransformersEngine, folders: Callable[[str], Path]
) -> None:
    tokenizer = load_tokenizer(folders("llama"))
    base = request("base", (5, 80, 200, 33), max_tokens=24, sampling=OPEN)
    tokens = run(engine, base)["base"].tokens.tolist()
    text = tokenizer.decode(tokens)
    # A string over two tokens, cut where its first half is a fork's prefix.
    cut = 6
    stop = tokenizer.decode(tokens[cut - 2 : cut + 2])[1:-1]
    assert stop in text
    assert stop not in tokenizer.decode(tokens[:cut])
    whole = run(engine, replace(base, stop=(stop, "never seen")))["base"]
    assert whole.finish == "stop"
    assert whole.tokens.tolist() == tokens[: len(whole.tokens)]
    assert stop in tokenizer.decode(whole.tokens)
    assert stop not in tokenizer.decode(whole.tokens[:-1])
    for step in range(len(whole.tokens)):
        fork = replace(base, key="f", prefix=tuple(tokens[:step]), stop=(stop,))
        completion = run(engine, fork)["f"]
        assert completion.tokens.tolist() == whole.tokens.tolist()
        assert completion.finish == "stop"


def test_what_is_at_its_end_already_comes_back_at_once(engine: TransformersEngine) -> None:
    prefix = (8, 9, 10)
    found = run(
        engine,
        request("at max_tokens", (5, 6), prefix=prefix, max_tokens=3),
        request("model is full", (5,) * 253, prefix=prefix, max_tokens=99),
        request("prompt too long", (5,) * 400),
        request("ended", (5, 6), prefix=(*prefix, EOS)),
    )
    for key, finish in [
        ("at max_tokens", "length"),
        ("model is full", "length"),
        ("prompt too long", "length"),
        ("ended", "stop"),
    ]:
        assert (found[key].finish, found[key].n_generated) == (finish, 0), key
    assert found["at max_tokens"].tokens.tolist() == list(prefix)


def test_the_models_context_limits_the_trajectory(engine: TransformersEngine) -> None:
    (completion,) = run(
        engine, request("a", (5,) * 250, intervention=banning((EOS,)), max_tokens=99)
    ).values()
    assert (completion.finish, len(completion.tokens)) == ("length", 6)


def test_a_bad_request_ends_alone(tmp_path: Path, folders: Callable[[str], Path]) -> None:
    folder = tiny_model(tmp_path, nan_token=123)
    engine = TransformersEngine(str(folder), device="cpu")
    good = request("good", (5, 6, 7), intervention=banning((123,)))
    found = run(
        engine,
        request("nan", (5, 123, 7)),
        good,
        request("all", (5, 6), intervention=banning(tuple(range(300)))),
    )
    assert (found["nan"].finish, found["nan"].n_generated) == ("error", 0)
    assert found["nan"].error == "its highest logit is NaN or infinite"
    assert found["all"].error == "every token is banned"
    assert found["good"].error is None
    assert found["good"].tokens.tolist() == by_hand(folder, good)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"intervention": ban((300,))},
            "the ban holds 300; this model's token ids are from 0 to 299",
        ),
        ({"prompt": (5, 999)}, "the prompt holds 999"),
        ({"prompt": ()}, "empty prompt"),
        ({"prefix": (300,)}, "the prefix holds 300"),
        ({"seed": -1}, "seed -1"),
        ({"stop": ("a", "")}, "empty stop string"),
    ],
)
def test_impossible_requests_are_refused(
    engine: TransformersEngine, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(UsageError, match=f"request 'a'.*{message}"):
        engine.add(replace(request("a", (5, 6)), **changes))  # type: ignore[arg-type]
    assert engine.n_open == 0


def test_a_model_that_would_be_decoded_without_its_context_is_refused(tmp_path: Path) -> None:
    """Mamba-2 takes its state under another name, and ignores the one that all others take."""
    folder = tiny_model(tmp_path, kind="mamba2")
    with pytest.raises(KnockoutError, match="decodes this model without its context"):
        TransformersEngine(str(folder), device="cpu")


def test_keys_are_unique_in_flight(engine: TransformersEngine) -> None:
    engine.add(request("twice", (5, 6)))
    with pytest.raises(UsageError, match="'twice' is in flight"):
        engine.add(request("twice", (5, 6)))
    assert len(list(generate(engine, []))) == 1
    run(engine, request("twice", (5, 6)))


def test_generate_with_our_processor_equals_the_engine(
    engine: TransformersEngine, folders: Callable[[str], Path]
) -> None:
    """A user's own `generate` call, left-padded, with the processor for transformers."""
    from knockout.engines.base import to_extra_args
    from knockout.processors import rule_from_extra_args
    from knockout.processors.transformers import KnockoutLogitsProcessor

    requests = [
        request("a", (5, 6, 7, 8), intervention=banning((EOS, 9))),
        request("b", (5, 6), intervention=banning((EOS,))),
    ]
    ids = torch.tensor([[5, 6, 7, 8], [EOS, EOS, 5, 6]])
    mask = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]])
    rules = [rule_from_extra_args(to_extra_args(r)) for r in requests]
    model = plain_model(folders("llama"))
    out = model.generate(
        ids,
        attention_mask=mask,
        do_sample=False,
        max_new_tokens=16,
        logits_processor=[KnockoutLogitsProcessor(rules, mask)],
    )
    found = run(engine, *requests)
    assert out[:, 4:].tolist() == [found["a"].tokens.tolist(), found["b"].tokens.tolist()]


def test_an_engine_is_chosen_by_name(folders: Callable[[str], Path]) -> None:
    folder = str(folders("llama"))
    engine = open_engine(folder, kind="transformers", device="cpu", max_num_seqs=3)
    assert engine.info.kind == "transformers"
    assert engine.info.vocab_size == 300
    assert engine.info.eos_ids == (EOS,)
    assert engine.info.max_model_len == 256
    engine.close()
    engine.close()
    with pytest.raises(UsageError, match=r"engine\.kind: found 'sglang'"):
        open_engine(folder, kind="sglang")
    with pytest.raises(UsageError, match="tensor_parallel_size: only vLLM"):
        open_engine(folder, kind="transformers", tensor_parallel_size=2)
    with pytest.raises(UsageError, match="unknown engine setting dtyp"):
        open_engine(folder, dtyp="float32")
    with pytest.raises(KnockoutError, match="more than the 256"):
        open_engine(folder, kind="transformers", max_model_len=1000, device="cpu")
