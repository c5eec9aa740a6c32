from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from oracles import pick_plain
from tiny import banning

from knockout.engines.base import EngineInfo, Request, to_extra_args
from knockout.engines.canary import check_bans_hold
from knockout.engines.trajectory import Beginnings
from knockout.errors import KnockoutError
from knockout.method.interventions import ban
from knockout.method.sampling import Sampling
from knockout.processors import Rule, rule_from_extra_args
from knockout.processors.batch import Batch
from knockout.processors.names import names_of, told, told_by_own
from knockout.processors.rules import check_ids, watch_of
from knockout.processors.transformers import KnockoutLogitsProcessor

V = 40
SAMPLED = Sampling(temperature=0.7, top_p=0.9, top_k=6)


@pytest.fixture(autouse=True)
def _fixed_logits() -> None:
    torch.manual_seed(0)


def coupled(
    banned: tuple[int, ...] = (), seed: int = 5, sampling: Sampling = SAMPLED, name: str = "r"
) -> Rule:
    return Rule(intervention=banning(banned), sampling=sampling, seed=seed, name=name)


def expected_row(raw: torch.Tensor, rule: Rule | None, position: int) -> torch.Tensor:
    """What a row must become, by the plain implementation."""
    row = raw.clone()
    if rule is None:
        return row
    row[list(rule.banned)] = -math.inf
    if rule.sampling is None:
        return row
    token = pick_plain(row.tolist(), rule.sampling, rule.seed, position)
    row = torch.full_like(row, -math.inf)
    row[token] = 0.0
    return row


# Rules -------------------------------------------------------------------------------------------


def test_a_request_comes_back_from_its_extra_args() -> None:
    request = Request(
        key="bench/3/0",
        prompt=(1, 2),
        seed=2**62 + 1,
        sampling=Sampling(temperature=0.6, top_p=0.95, top_k=20, min_p=0.01),
        max_tokens=5,
        intervention=banning((9, 4)),
    )
    args = to_extra_args(request)
    assert all(not isinstance(v, dict) for v in args.values())
    rule = rule_from_extra_args({**args, "somebody_elses": 1})
    assert rule == Rule(banning((4, 9)), request.sampling, request.seed, "bench/3/0", start=2)


def test_requests_without_our_keys_have_no_rule() -> None:
    assert rule_from_extra_args(None) is None
    assert rule_from_extra_args({"kv_transfer_params": {"a": 1}}) is None


def test_a_plain_ban_needs_ids_only() -> None:
    rule = rule_from_extra_args({"knockout_ids": [3, 1, 3]})
    assert rule == Rule(banning((1, 3)), None, 0, "")
    assert rule is not None
    assert not rule.coupled


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"knockout_ids": []}, "empty"),
        ({"knockout_ids": [-1]}, "holds -1"),
        ({"knockout_ids": [1.0]}, r"holds 1\.0 \(float\)"),
        ({"knockout_ids": [True]}, r"holds True \(bool\)"),
        ({"knockout_ids": ["12"]}, r"holds '12' \(str\)"),
        ({"knockout_ids": "12"}, "expected a list"),
        ({"knockout_id": [1]}, "unknown key knockout_id;"),
        ({"knockout_ids": [1], "knockout_seed": 1}, "without knockout_temperature"),
        ({"knockout_ids": [1], "knockout_top_k": 5}, "without knockout_temperature"),
        ({"knockout_temperature": 0.6}, "without knockout_seed"),
        ({"knockout_temperature": "hot", "knockout_seed": 1}, "knockout_temperature is 'hot'"),
        ({"knockout_temperature": True, "knockout_seed": 1}, "knockout_temperature is True"),
        ({"knockout_temperature": -1.0, "knockout_seed": 1}, "knockout_temperature is -1"),
        ({"knockout_temperature": 1, "knockout_seed": -1}, "knockout_seed is -1"),
        ({"knockout_temperature": 1, "knockout_seed": 2**63}, "knockout_seed"),
        ({"knockout_temperature": 1, "knockout_seed": 1.0}, "knockout_seed"),
        ({"knockout_temperature": 1, "knockout_seed": 1, "knockout_top_k": 5.0}, "knockout_top_k"),
        ({"knockout_temperature": 1, "knockout_seed": 1, "knockout_top_p": 0}, "knockout_top_p"),
    ],
)
def test_wrong_rules_are_refused(args: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rule_from_extra_args(args)


def test_greedy_needs_no_seed() -> None:
    rule = rule_from_extra_args({"knockout_temperature": 0})
    assert rule == Rule(banning(()), Sampling(temperature=0), 0, "")


def test_ids_are_checked_against_the_width_of_the_logits() -> None:
    assert check_ids([63, 0, 63], width=64) == [0, 63]
    with pytest.raises(ValueError, match="holds 64; this model's token ids are from 0 to 63"):
        check_ids([64], width=64)


# The batch ---------------------------------------------------------------------------------------


def test_rows_get_their_own_bans_and_the_rest_is_untouched() -> None:
    rules = [
        None,
        coupled((1, 2)),
        Rule(banning((0, 39)), None, 0, "plain"),
        coupled((), seed=9),
        None,
    ]
    raw = torch.randn(5, V)
    logits = raw.clone()
    Batch(rules, V).apply_(logits, torch.tensor([17, 4]))
    for row, (rule, position) in enumerate(zip(rules, [0, 17, 0, 4, 0], strict=True)):
        assert torch.equal(logits[row], expected_row(raw[row], rule, position)), row


def test_a_batch_without_rules_is_bit_for_bit_untouched() -> None:
    raw = torch.randn(3, V)
    raw[1, 3], raw[2, 4] = math.nan, math.inf
    logits = raw.clone()
    Batch([None] * 3, V).apply_(logits, torch.empty(0, dtype=torch.int64))
    assert torch.equal(logits.view(torch.int32), raw.view(torch.int32))


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda row: row.fill_(math.nan), "its highest logit is NaN or infinite"),
        (lambda row: row.fill_(-math.inf), "every token is banned"),
    ],
)
def test_a_bad_row_is_told_by_its_requests_name(spoil: Any, reason: str) -> None:
    rules = [None, coupled(name="good"), coupled((3,), name="cell 7/12")]
    raw = torch.randn(3, V)
    spoil(raw[2])
    with pytest.raises(KnockoutError, match=rf"cell 7/12 \(banned: 3\): .*{reason}"):
        Batch(rules, V).apply_(raw.clone(), torch.tensor([1, 1]))

    failed: dict[int, str] = {}
    Batch(rules, V).decide_(raw.clone(), torch.tensor([1, 1]), failed)
    assert failed == {1: reason}


@pytest.mark.parametrize("watch", [(), tuple(banning((token,)) for token in range(30))])
@pytest.mark.parametrize("fail_token", [0, 7, V - 1])
@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda row: row.fill_(math.nan), "its highest logit is NaN or infinite"),
        (lambda row: row[4:6].fill_(math.inf), "its highest logit is NaN or infinite"),
        (lambda row: row.fill_(-math.inf), "every token is banned"),
    ],
)
def test_a_bad_row_says_so_in_its_log_probabilities(
    spoil: Any, reason: str, fail_token: int, watch: tuple[Any, ...]
) -> None:
    watching = watch_of(watch) if watch else None
    rules = [
        replace(coupled((3,), name=name), watch=watching, report=len(watch), fail_token=fail_token)
        for name in ("good", "bad", "worse")
    ]
    raw = torch.randn(3, V)
    spoil(raw[1])
    raw[2] = math.nan
    logits = raw.clone()
    tokens = Batch(rules, V).apply_(logits, torch.tensor([1, 1, 1]))
    assert tokens[1:].tolist() == logits[1:].argmax(1).tolist() == [fail_token] * 2
    assert torch.equal(logits[0].argmax(), expected_row(raw[0], rules[0], 1).argmax())
    highest = logits.log_softmax(1).topk(len(watch) + 2 if watch else 1)
    for row, why in enumerate([None, reason, "its highest logit is NaN or infinite"]):
        ids, values = highest.indices[row, None].numpy(), highest.values[row, None].numpy()
        said = (
            told([int(tokens[row])], ids, values, V) if watch else told_by_own(values[0].tolist())
        )
        assert (said.good, said.failed) == (int(why is None), why)
        assert len(said.differing) == (said.good if watch else 0)


# transformers' interface -------------------------------------------------------------------------


def test_transformers_processor_counts_positions_without_padding() -> None:
    rules = [coupled((2,)), None, coupled((5,), seed=1)]
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1], [0, 1, 1, 1]])
    raw = torch.randn(3, V)
    processor = KnockoutLogitsProcessor(rules, mask)
    for more in range(3):
        ids = torch.zeros(3, 4 + more, dtype=torch.int64)
        out = processor(ids, raw)
        for row, padding in enumerate([2, 0, 1]):
            want = expected_row(raw[row], rules[row], 4 + more - padding)
            assert torch.equal(out[row], want)


def test_transformers_processor_refuses_other_shapes_and_ids() -> None:
    with pytest.raises(ValueError, match="1 rules for 2 rows"):
        KnockoutLogitsProcessor([None])(torch.zeros(2, 1), torch.zeros(2, V))
    with pytest.raises(ValueError, match="holds 40"):
        KnockoutLogitsProcessor([coupled((V,))])(torch.zeros(1, 1), torch.zeros(1, V))
    plain = Rule(banning((1, V)), None, 0, "plain")
    with pytest.raises(ValueError, match=r"request plain .* holds 40"):
        KnockoutLogitsProcessor([None, plain])(torch.zeros(2, 1), torch.zeros(2, V))


# vLLM's interfaces -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def vllm() -> Any:
    pytest.importorskip("vllm")
    from vllm import SamplingParams
    from vllm_v1 import BatchUpdate, MoveDirectionality

    from knockout.processors.vllm import KnockoutProcessor, collect_failures

    return SimpleNamespace(
        params=SamplingParams,
        update=BatchUpdate,
        move=MoveDirectionality,
        processor=KnockoutProcessor,
        collect=collect_failures,
    )


MODEL_CONFIG = SimpleNamespace(get_vocab_size=lambda: V)
CONFIG = SimpleNamespace(speculative_config=None, model_config=MODEL_CONFIG)


def args_of(rule: Rule) -> dict[str, Any]:
    args: dict[str, Any] = {"knockout_name": rule.name}
    if rule.banned:
        args["knockout_ids"] = list(rule.banned)
    if rule.sampling is not None:
        args |= {
            "knockout_seed": rule.seed,
            "knockout_temperature": rule.sampling.temperature,
            "knockout_top_p": rule.sampling.top_p,
            "knockout_top_k": rule.sampling.top_k,
            "knockout_min_p": rule.sampling.min_p,
        }
    return args


def params_for(vllm: Any, rule: Rule | None) -> Any:
    if rule is None:
        return vllm.params(temperature=0.8, top_p=0.9)
    return vllm.params(temperature=0, extra_args=args_of(rule))


class V1:
    """A V1 processor and a plain record of which request is in which row."""

    def __init__(self, vllm: Any) -> None:
        if vllm.move is None:
            pytest.skip("this vLLM has Model Runner V2 alone")
        self.vllm = vllm
        self.processor = vllm.processor(CONFIG, torch.device("cpu"), False)
        self.rows: dict[int, tuple[Rule | None, int, list[int]]] = {}

    def update(
        self,
        added: dict[int, tuple[Rule | None, int, list[int]]] | None = None,
        removed: tuple[int, ...] = (),
        moved: tuple[tuple[int, int, str], ...] = (),
    ) -> None:
        added = added or {}
        for row in removed:
            self.rows.pop(row, None)
        self.rows.update(added)
        for a, b, kind in moved:
            at_a, at_b = self.rows.pop(a, None), self.rows.pop(b, None)
            if at_a is not None:
                self.rows[b] = at_a
            if at_b is not None and kind == "SWAP":
                self.rows[a] = at_b
        update = self.vllm.update(
            batch_size=len(self.rows),
            removed=sorted(removed, reverse=True),
            added=[
                (row, params_for(self.vllm, rule), [7] * n_prompt, outputs)
                for row, (rule, n_prompt, outputs) in added.items()
            ],
            moved=[(a, b, self.vllm.move[kind]) for a, b, kind in moved],
        )
        self.processor.update_state(update)

    def check(self) -> None:
        raw = torch.randn(max(self.rows) + 1, V)
        logits = self.processor.apply(raw.clone())
        for row in range(raw.shape[0]):
            rule, n_prompt, outputs = self.rows.get(row, (None, 0, []))
            want = expected_row(raw[row], rule, n_prompt + len(outputs))
            assert torch.equal(logits[row], want), row


def test_v1_follows_its_batch(vllm: Any) -> None:
    v1 = V1(vllm)
    v1.processor.update_state(None)
    outputs: list[int] = []
    v1.update({0: (coupled((1,)), 3, outputs), 1: (None, 5, []), 2: (coupled((2, 3)), 4, [8])})
    v1.check()
    outputs += [4, 9]  # V1 hands over the list itself, which grows without an update
    v1.processor.update_state(None)
    v1.check()
    v1.update(moved=((0, 1, "SWAP"),))
    v1.check()
    v1.update(removed=(0,), moved=((2, 0, "UNIDIRECTIONAL"),))
    v1.check()
    v1.update({1: (Rule(banning((5,)), None, 0, "plain"), 2, []), 2: (None, 2, [])})
    v1.check()
    v1.update({0: (None, 2, [])})  # replaces a coupled request
    v1.check()


def test_v1_lets_rows_of_others_join_and_leave(vllm: Any) -> None:
    # vLLM does not say that anything has changed if no row of ours does.
    v1 = V1(vllm)
    v1.update({0: (coupled((1,)), 3, []), 1: (coupled((2,)), 3, [])})
    v1.check()
    v1.update({2: (None, 2, [])})
    v1.check()
    v1.update({3: (None, 5, [])})
    v1.check()
    v1.update(removed=(2, 3))
    v1.check()


def test_v1_placeholders_of_asynchronous_scheduling_count_as_tokens(vllm: Any) -> None:
    raw = torch.randn(1, V)
    rows = []
    for outputs in ([5, 6], [-1, -1]):
        v1 = V1(vllm)
        v1.update({0: (coupled((1,)), 3, outputs)})
        rows.append(v1.processor.apply(raw.clone()))
    assert torch.equal(rows[0], rows[1])
    assert torch.equal(rows[0][0], expected_row(raw[0], coupled((1,)), 5))


def test_v1_leaves_other_requests_bit_for_bit(vllm: Any) -> None:
    v1 = V1(vllm)
    v1.update({0: (None, 3, []), 1: (None, 3, [])})
    raw = torch.randn(2, V)
    raw[0, 0] = math.nan
    assert torch.equal(v1.processor.apply(raw.clone()).view(torch.int32), raw.view(torch.int32))


def test_v1_is_never_skipped_for_greedy_requests(vllm: Any) -> None:
    assert V1(vllm).processor.is_argmax_invariant() is False


def test_v1_refuses_speculative_decoding(vllm: Any) -> None:
    ngram = SimpleNamespace(method="ngram")
    config = SimpleNamespace(speculative_config=ngram, model_config=MODEL_CONFIG)
    with pytest.raises(ValueError, match="speculative decoding"):
        vllm.processor(config, torch.device("cpu"), False)
    vllm.processor(config, SimpleNamespace())  # V2 verifies drafts with our rows


def test_v1_needs_the_prompt_as_ids(vllm: Any) -> None:
    processor = vllm.processor(CONFIG, torch.device("cpu"), False)
    update = vllm.update(
        batch_size=1, removed=[], added=[(0, params_for(vllm, coupled()), None, [])], moved=[]
    )
    with pytest.raises(ValueError, match="prompt as token ids"):
        processor.update_state(update)


class V2:
    """A V2 processor; requests are placed in slots, rows are made up at each step."""

    def __init__(self, vllm: Any) -> None:
        if vllm.move is None:
            pytest.skip("this vLLM has Model Runner V2 alone")
        self.vllm = vllm
        self.processor = vllm.processor(CONFIG, SimpleNamespace(max_num_reqs=8))
        self.slots: dict[int, Rule | None] = {}

    def add(self, slot: int, rule: Rule | None) -> bool:
        self.slots[slot] = rule
        answer = self.processor.add_request(slot, params_for(self.vllm, rule))
        self.processor.apply_staged_writes()
        assert isinstance(answer, bool)
        return answer

    def check(self, requests: list[int], pos: list[int], repeats: list[int] | None = None) -> None:
        """requests: slots in batch order; repeats: rows of each; pos: (rows,) input positions."""
        repeats = repeats or [1] * len(requests)
        rows = np.repeat(requests, repeats)
        context = SimpleNamespace(
            idx_mapping=torch.tensor(requests, dtype=torch.int32),
            idx_mapping_np=np.array(requests, dtype=np.int32),
            expanded_idx_mapping=torch.from_numpy(rows.astype(np.int32)),
            expanded_local_pos=torch.tensor([i for n in repeats for i in range(n)]),
            pos=torch.tensor(pos, dtype=torch.int64),
        )
        raw = torch.randn(len(rows), V)
        logits = self.processor.apply(raw.clone(), context)
        for row, slot in enumerate(rows.tolist()):
            # The token picked stands after the row's input token.
            want = expected_row(raw[row], self.slots[slot], pos[row] + 1)
            assert torch.equal(logits[row], want), row


def test_v2_maps_rows_to_slots(vllm: Any) -> None:
    v2 = V2(vllm)
    assert v2.add(3, coupled((1,)))
    assert not v2.add(0, None)
    assert v2.add(5, Rule(banning((7, 8)), None, 0, "plain"))
    assert v2.add(1, coupled((), seed=77, sampling=Sampling(temperature=1)))
    v2.check([3, 0, 5, 1], [10, 2, 4, 30])
    v2.check([3, 0, 5, 1], [11, 3, 5, 31])
    v2.check([1, 5, 3, 0], [32, 6, 12, 4])  # reordered
    v2.check([0], [9])
    v2.check([3], [13])


def test_v2_recycles_slots(vllm: Any) -> None:
    v2 = V2(vllm)
    v2.add(2, coupled((1, 2)))
    v2.check([2], [5])
    assert not v2.add(2, None)
    v2.check([2], [5])
    v2.add(2, coupled((9,), seed=8, sampling=Sampling(temperature=0)))
    v2.check([2], [5])


def test_v2_takes_several_rows_of_a_request(vllm: Any) -> None:
    v2 = V2(vllm)
    v2.add(4, coupled((1,)))
    v2.add(6, None)
    v2.add(0, coupled((2,), seed=3))
    v2.check([4, 6, 0], [5, 6, 7, 3, 9, 10], repeats=[3, 1, 2])
    v2.check([0, 4, 6], [11, 12, 13, 8, 4, 5], repeats=[3, 1, 2])


@pytest.mark.parametrize(
    ("setting", "name"),
    [
        ({"n": 2, "temperature": 1}, "n"),
        ({"temperature": 0.6}, "temperature"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"min_tokens": 2}, "min_tokens"),
        ({"logit_bias": {3: 1.0}}, "logit_bias"),
        ({"allowed_token_ids": [3, 4]}, "allowed_token_ids"),
        ({"bad_words": ["x"]}, "bad_words"),
        ({"structured_outputs": "regex"}, "structured_outputs"),
        ({"thinking_token_budget": 5}, "thinking_token_budget"),
    ],
)
def test_settings_beside_our_pick_are_refused(
    vllm: Any, setting: dict[str, Any], name: str
) -> None:
    if "structured_outputs" in setting:
        from vllm.sampling_params import StructuredOutputsParams

        setting = {"structured_outputs": StructuredOutputsParams(regex="a+")}
    ours = args_of(coupled((1,)))
    params = vllm.params(**{"temperature": 0, **setting}, extra_args=ours)
    with pytest.raises(ValueError, match=f"^{name} is .* does not go with a coupled request"):
        vllm.processor.validate_params(params)
    plain = vllm.params(**{"temperature": 1, **setting}, extra_args={"knockout_ids": [1]})
    if name == "thinking_token_budget":  # forces tokens after every processor
        with pytest.raises(ValueError, match="a request with a ban"):
            vllm.processor.validate_params(plain)
    else:
        vllm.processor.validate_params(plain)
    vllm.processor.validate_params(vllm.params(**{"temperature": 1, **setting}))


def test_a_ban_of_all_allowed_tokens_is_refused(vllm: Any) -> None:
    params = vllm.params(allowed_token_ids=[3, 4], extra_args={"knockout_ids": [3, 4, 5]})
    with pytest.raises(ValueError, match="every token of allowed_token_ids is banned"):
        vllm.processor.validate_params(params)


def test_wrong_keys_are_refused_on_arrival(vllm: Any) -> None:
    with pytest.raises(ValueError, match="unknown key knockout_tokens"):
        vllm.processor.validate_params(vllm.params(extra_args={"knockout_tokens": [1]}))


def outside(plain: bool) -> dict[str, Any]:
    """A request with an id that logits of width V do not have."""
    ids = {"knockout_ids": [3, V], "knockout_name": "cell 7"}
    return ids if plain else {**ids, "knockout_temperature": 1, "knockout_seed": 3}


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("runner", [V1, V2])
def test_ids_outside_the_logits_fail_their_own_request(
    vllm: Any, runner: type[V1] | type[V2], plain: bool
) -> None:
    one = runner(vllm)
    params = vllm.params(temperature=0, extra_args=outside(plain))

    def take() -> None:
        if isinstance(one, V2):
            assert not one.processor.add_request(3, params)
        else:
            update = vllm.update(batch_size=1, removed=[], added=[(3, params, [7], [])], moved=[])
            one.processor.update_state(update)

    message = rf"cell 7 \(banned: 3, {V}\): knockout_ids holds {V}; .* are from 0 to {V - 1}"
    with pytest.raises(ValueError, match=message):
        take()
    failures: dict[str, str] = {}
    vllm.collect(failures)
    try:
        take()
    finally:
        vllm.collect(None)
    assert list(failures) == ["cell 7"]
    # The others go on.
    if isinstance(one, V2):
        one.slots[3] = None
        one.add(0, coupled((1,)))
        one.check([0, 3], [10, 2])
    else:
        one.update({0: (coupled((1,)), 3, []), 3: (None, 1, [])})
        one.check()


@pytest.mark.parametrize(
    "args",
    [
        {"knockout_intervention": '{"kind": "penalty", "token_ids": [40], "strength": 2.0}'},
        {"knockout_intervention": '{"kind": "replace", "token_ids": [1], "replacement": 40}'},
        {"knockout_watch": '[{"kind": "ban", "token_ids": [1]}, {"kind": "ban", "token_ids": [40]}]'},
        {"knockout_watch": '[{"kind": "replace", "token_ids": [1], "replacement": 40}]'},
    ],
)  # fmt: skip
def test_a_batch_takes_no_id_outside_its_logits(args: dict[str, Any]) -> None:
    rule = rule_from_extra_args({"knockout_temperature": 0, "knockout_start": 2, **args})
    key = next(iter(args))
    with pytest.raises(ValueError, match=rf"{key} holds {V}; this model's token ids are from 0"):
        Batch([None, rule], V)
    Batch([None, rule], V + 1)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("vllm.v1.sample.logits_processor", "_load_custom_logitsprocs"),
        ("vllm.v1.worker.gpu.sample.logits_processor.loader", "_load_v2_logitsprocs"),
    ],
)
def test_a_loader_takes_the_class(vllm: Any, module: str, name: str) -> None:
    load = getattr(pytest.importorskip(module), name)
    assert set(load(["knockout.processors.vllm:KnockoutProcessor"])) == {vllm.processor}


# A runner with two of them: by the installed entry point and by name --------------------------------


def watching(tokens: list[int]) -> dict[str, Any]:
    request = Request(
        "r", (7,) * 3, 5, Sampling(temperature=1), 9, watch=tuple(ban((t,)) for t in tokens)
    )
    return to_extra_args(request)


def test_v1_picks_once_with_two_processors(vllm: Any) -> None:
    device = torch.device("cpu")
    first, second = (vllm.processor(CONFIG, device, False) for _ in range(2))
    assert (first.acts, second.acts) == (True, False)
    raw = torch.randn(1, V)
    token = pick_plain(raw[0].tolist(), Sampling(temperature=1), 5, 3)
    others = [t for t in range(5) if t != token]
    params = vllm.params(temperature=0, extra_args=watching([token, *others]))
    update = vllm.update(batch_size=1, removed=[], added=[(0, params, [7] * 3, [])], moved=[])
    logits = raw.clone()
    for processor in (first, second):
        processor.update_state(update)
        logits = processor.apply(logits)
    assert logits[0].argmax() == token
    (marks,) = (logits[0] == -1).nonzero(as_tuple=True)
    assert len(marks) == 1


def test_v2_picks_once_with_two_processors(vllm: Any) -> None:
    states = SimpleNamespace(max_num_reqs=8)
    first, second = (vllm.processor(CONFIG, states) for _ in range(2))
    params = vllm.params(temperature=0, extra_args=watching([1, 2]))
    assert first.add_request(0, params)
    assert not second.add_request(0, params)


def test_each_runner_has_one_that_acts(vllm: Any) -> None:
    one, two = (vllm.processor(CONFIG, torch.device("cpu"), False) for _ in range(2))
    three = vllm.processor(CONFIG, SimpleNamespace(max_num_reqs=8))
    assert [one.acts, two.acts, three.acts] == [True] * 3


# The start-up check -----------------------------------------------------------------------------


class Passes:
    """An engine whose logits follow from the tokens so far, and that picks `times` times."""

    def __init__(self, times: int) -> None:
        self.info = EngineInfo(
            kind="test", model="test", device="cpu", dtype="float32", runner="test",
            vocab_size=200, eos_ids=(), max_model_len=100, versions={}, settings={},
        )  # fmt: skip
        self.times, self.done = times, []
        self.begin = Beginnings(self.info, None).begin

    @property
    def n_open(self) -> int:
        return len(self.done)

    def add(self, request: Request) -> None:
        path = self.begin(request, [])
        rule = rule_from_extra_args(to_extra_args(request))
        finish = path.finish
        while finish is None:
            so_far = [*request.prompt, *path.tokens]
            torch.manual_seed(hash(tuple(so_far)))
            logits = torch.randn(1, 200)
            for _ in range(self.times):
                Batch([rule], 200).apply_(logits, torch.tensor([len(so_far)]))
            token = int(logits.argmax())
            highest = logits[0].topk(min(len(request.watch) + 2, 200))
            named = [names_of(token, highest.indices.numpy(), highest.values.numpy(), 200)]
            finish = path.extend([token], named if request.watch else [])
        self.done.append(path.completion(finish))

    def step(self) -> list[Any]:
        done, self.done = self.done, []
        return done


def test_the_start_up_check_sees_a_second_pick() -> None:
    check_bans_hold(Passes(1))
    with pytest.raises(KnockoutError, match="canary-swap"):
        check_bans_hold(Passes(2))
