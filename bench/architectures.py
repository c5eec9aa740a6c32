"""Forks against full re-runs on tiny random models of many architectures, in both engines.

    python -m bench architectures [NAME,NAME...]

Each model answers two prompts under six sampling settings. Every baseline watches some 40
interventions: bans of one token and of sets of up to 1,000, penalties and boosts, replacements,
ranges of steps, some in the thinking or the answer alone, and pairs. Each is also run from scratch,
which says where it truly leaves, and forked from where the baseline said; pairs leave the fork of a
member. What acts in a part of the text is compared with runs that are cut where the thinking closes.
vLLM then does all of it again with a cache so small that it preempts.
"""

from __future__ import annotations

import gc
import json
import shutil
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.limit import first_difference
from bench.machine import RESULTS, write
from knockout.engines.base import Completion, Engine, Request, generate
from knockout.method.interventions import Intervention, ban
from knockout.method.sampling import Sampling
from knockout.tokens.checkpoint import EMBEDDED, quiet_transformers, resolve_model

EOS, VOCABULARY, TOKENS = 2, 2048, 48
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": EOS, "pad_token_id": EOS,
    "initializer_range": 0.1, "hidden_size": 128, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 128,
}  # fmt: skip
GROUPED: dict[str, Any] = {"num_key_value_heads": 2, "head_dim": 32}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": GROUPED,
    "qwen2": {"num_key_value_heads": 2},
    "qwen3": GROUPED,
    "qwen3_moe": GROUPED
    | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "mistral": GROUPED | {"sliding_window": 20},
    "mixtral": GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gemma2": GROUPED | {"sliding_window": 20, "query_pre_attn_scalar": 32},
    "gemma3_text": GROUPED | {"sliding_window": 20, "query_pre_attn_scalar": 32},
    "phi": {"num_key_value_heads": 4},
    "phi3": {"num_key_value_heads": 2, "original_max_position_embeddings": 128},
    "olmo2": {"num_key_value_heads": 2},
    "granite": {"num_key_value_heads": 2},
    "smollm3": {"num_key_value_heads": 2},
    "stablelm": {"num_key_value_heads": 4},
    "gpt_neox": {},
    "gpt2": {"n_positions": 128},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 128},
    "bloom": {},
    "falcon": {},
}
"""By transformers' name of the type, what differs from `SIZES`."""
SETTINGS = (
    Sampling(0.6, top_p=0.95, top_k=20),
    Sampling(1.0, top_p=0.9),
    Sampling(1.5, min_p=0.05),
    Sampling(0.85, top_p=0.8, top_k=37, min_p=0.01),
    Sampling(1.3),
    Sampling(0),
)
ENGINE: dict[str, Any] = {"dtype": "float32", "max_model_len": 128, "max_num_seqs": 48}
FEW_BLOCKS = 24
"""Of 32 tokens, in the small cache: half of what 48 requests need."""


def main(names: str = "") -> None:
    """Runs each architecture and writes bench/results/architectures.json after each."""
    path = RESULTS / "architectures.json"
    rows: dict[str, Any] = {}
    if names and path.exists():  # the named ones again
        rows = json.loads(path.read_text())["architectures"]
    for kind in names.split(",") if names else ARCHITECTURES:
        with tempfile.TemporaryDirectory() as folder:
            rows[kind] = architecture(save(kind, Path(folder)))
        print(kind, rows[kind], flush=True)
        write(
            "architectures",
            {"command": "python -m bench architectures", "max_tokens": TOKENS,
             "vocabulary": VOCABULARY, "architectures": {k: rows[k] for k in ARCHITECTURES if k in rows}},
        )  # fmt: skip
    if any(wrong(row) for row in rows.values()):
        sys.exit("not all is as it should be")


def interventions(tokens: list[int], rng: np.random.Generator) -> tuple[Intervention, ...]:
    """What is watched: three bans of one token come first, two pairs of these last."""
    others = [int(t) for t in rng.permutation(np.arange(100, VOCABULARY)) if t not in tokens]
    kinds = [t for t in dict.fromkeys(tokens) if t != EOS]
    own = [*kinds[1::3], *kinds[::3], *kinds[2::3], *others[:6]][:6]

    def with_others(size: int, *ids: int) -> tuple[int, ...]:
        return tuple(sorted({*ids, *others[: size - len(ids)]}))

    sets = (with_others(5, own[3]), with_others(50, own[1], own[4]), with_others(1000, own[2]))
    found = [ban((t,)) for t in (*own, *others[:4])]
    found += [ban(ids) for ids in (*sets, with_others(1000))]
    for ids in ((own[0],), sets[0], sets[2]):
        found += [Intervention("penalty", ids, strength=λ) for λ in (0.5, 2.0, -1.0)]
    found += [Intervention("penalty", (t,), strength=-4.0, first_step=5) for t in others[:3]]
    found += [Intervention("replace", ids, replacement=others[-1]) for ids in (sets[0], sets[2])]
    found += [
        replace(change, where=where)
        for where in ("thinking", "answer")
        for change in (
            ban((own[0],)), ban(sets[2]), Intervention("penalty", sets[1], strength=1.5),
            Intervention("penalty", sets[0], strength=-2.0, first_step=3, end_step=50),
            Intervention("replace", sets[1], replacement=others[-2]),
        )
    ]  # fmt: skip
    found += [ban(sets[1]), replace(ban(sets[1]), first_step=7, end_step=30)]
    found += [ban(tuple(sorted(own[:2]))), ban(tuple(sorted((own[0], own[2]))))]
    return tuple(dict.fromkeys(found))


def wrong(row: dict[str, Any]) -> bool:
    """Whether a fork is late, or differs from its full re-run."""
    return any(
        "error" in one or one["late"] or one["unequal"] or one["unequal_to_the_cut"]
        for one in row.values()
    )


def save(kind: str, folder: Path) -> Path:
    """A random model of one architecture with a real tokenizer."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(1)
    config = AutoConfig.for_model(kind, **SIZES | ARCHITECTURES[kind])
    with quiet_transformers():
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(Path(resolve_model(EMBEDDED)) / name, folder / name)
    return folder


def architecture(folder: Path) -> dict[str, Any]:
    """What both engines do, and vLLM with a small cache."""
    from knockout.engines.transformers import TransformersEngine
    from knockout.engines.vllm import VllmEngine

    found: dict[str, Any] = {}
    seen: dict[str, dict[str, list[int]]] = {}
    for name in ("transformers", "vllm", "vllm, small cache"):
        few = {"num_gpu_blocks_override": FEW_BLOCKS} if "small" in name else None
        try:
            engine: Engine = (
                TransformersEngine(str(folder), device="cpu", **ENGINE)
                if name == "transformers"
                else VllmEngine(str(folder), kv_cache_gib=0.5, options=few, **ENGINE)
            )
        except Exception as error:
            found[name] = {"error": str(error)[:300]}
            continue
        count = count_preemptions(engine) if few else None
        trial = Trial(engine)
        trial.run()
        engine.close()
        gc.collect()
        found[name] = trial.counts()
        if count is not None:
            found[name]["preemptions"] = len(count)
        if seen:
            found[name] |= same(next(iter(seen.values())), trial.full)
        seen[name] = trial.full
    return found


def count_preemptions(engine: Any) -> list[str]:
    """A list that grows by a request's name whenever vLLM preempts it."""
    scheduler = engine._engine.engine_core.engine_core.scheduler
    preempt, names = scheduler._preempt_request, list[str]()

    def counted(request: Any, *more: Any, **named: Any) -> Any:
        names.append(request.request_id)
        return preempt(request, *more, **named)

    scheduler._preempt_request = counted
    return names


def same(reference: dict[str, list[int]], own: dict[str, list[int]]) -> dict[str, int]:
    """How many trajectories equal those of transformers, of those with the same name."""
    both = reference.keys() & own.keys()
    return {
        "equal_to_transformers": sum(reference[key] == own[key] for key in both),
        "compared_with_transformers": len(both),
    }


def _closed(prompt: tuple[int, ...], tokens: list[int], tag: tuple[int, ...]) -> int | None:
    """The step before which the thinking is closed: in the trajectory, or just before it."""
    tail = prompt[-len(tag) - 3 :]
    text = (*tail, *tokens)
    ends = (n for n in range(len(tag), len(text)) if text[n - len(tag) : n] == tag)
    first = next(ends, None)
    return None if first is None else max(0, first - len(tail))


@dataclass
class Trial:
    """All knockouts of some baselines, as forks and from scratch.

    Attributes:
        engine: What runs them.
        settings: Of the baselines; two prompts each.
        max_tokens: Of each trajectory.
        full: Tokens of each run from scratch.
        late: Names of knockouts that left before the baseline said so.
        early: Those that left later than it said.
        unequal: Those whose fork differs from the run from scratch.
        of_parts: Those in a part of the text that differ from the runs that were cut.
    """

    engine: Engine
    settings: tuple[Sampling, ...] = SETTINGS
    max_tokens: int = TOKENS
    full: dict[str, list[int]] = field(default_factory=dict)
    forks: int = 0
    inherited: int = 0
    of_forks: int = 0
    forks_to_the_end: int = 0
    closed: int = 0
    late: list[str] = field(default_factory=list)
    early: list[str] = field(default_factory=list)
    early_by_room: int = 0
    unequal: list[str] = field(default_factory=list)
    of_parts: list[str] = field(default_factory=list)

    def run(self) -> None:
        """Runs everything; a failed request ends it."""
        rng = np.random.default_rng(5)
        bases = [
            Request(f"{n}{p}", prompt, 90 + n, sampling, self.max_tokens)
            for n, sampling in enumerate(self.settings)
            for p, prompt in (("a", tuple(range(5 + n, 17 + 2 * n))), ("b", (*range(40, 70), 9)))
        ]
        plain = self._generate(bases)
        asked, knockouts = [], []
        pairs: dict[str, tuple[str, str]] = {}
        for base in bases:
            tokens = plain[base.key].tokens.tolist()
            watch = interventions(tokens, rng)
            one = replace(base, watch=watch, think_end=tuple(tokens[10:12]) or (3, 4))
            asked.append(one)
            names = [f"{base.key}/{n}" for n in range(len(watch))]
            knockouts += [
                replace(one, key=name, intervention=change, watch=())
                for name, change in zip(names, watch, strict=True)
            ]
            pairs |= {names[-2]: (names[0], names[1]), names[-1]: (names[0], names[2])}
        told = self._generate(asked)
        for key, done in told.items():
            if done.tokens.tolist() != plain[key].tokens.tolist():
                self.unequal.append(key)
        self.full = {k: c.tokens.tolist() for k, c in self._generate(knockouts).items()}
        self._parts(knockouts)
        self._forks(told, {one.key: one for one in knockouts}, pairs)

    def _generate(self, requests: Iterable[Request]) -> dict[str, Completion]:
        found = {done.key: done for done in generate(self.engine, requests)}
        for done in found.values():
            if done.error is not None:
                raise RuntimeError(f"{done.key}: {done.error}")
        return found

    def _forks(
        self,
        told: dict[str, Completion],
        knockouts: dict[str, Request],
        pairs: dict[str, tuple[str, str]],
    ) -> None:
        """Forks what the baselines said leaves them; pairs from the fork of a member."""
        forks: dict[str, Request] = {}
        for key, one in knockouts.items():
            base, _, n = key.partition("/")
            step = self._told(key, told[base], int(n))
            if step >= 0:
                forks[key] = replace(one, prefix=tuple(told[base].tokens[:step].tolist()))
        self.inherited = len(knockouts) - len(forks)
        waiting: list[tuple[str, str, int]] = []
        for key in forks.keys() & pairs.keys():
            at = len(forks[key].prefix)
            member = next((m for m in pairs[key] if m in forks and len(forks[m].prefix) == at), "")
            if member:
                waiting.append((key, member, len(forks[member].watch)))
                watch = (*forks[member].watch, knockouts[key].intervention)
                forks[member] = replace(forks[member], watch=watch)  # type: ignore[arg-type]
        for key, *_ in waiting:
            del forks[key]
        self.forks = len(forks)
        found = self._check(forks.values())
        again = []
        for key, member, place in waiting:
            step = self._told(key, found[member], place)
            if step >= 0:
                prefix = tuple(found[member].tokens[:step].tolist())
                again.append(replace(knockouts[key], prefix=prefix))
        self.of_forks, self.forks_to_the_end = len(again), len(waiting) - len(again)
        self._check(again)

    def _check(self, requests: Iterable[Request]) -> dict[str, Completion]:
        """Runs forks and notes those that differ from the run from scratch."""
        found = self._generate(requests)
        self.unequal += [k for k, done in found.items() if done.tokens.tolist() != self.full[k]]
        return found

    def _told(self, key: str, before: Completion, place: int) -> int:
        """The step at which a knockout leaves another trajectory; notes if that is wrong."""
        assert before.changes is not None
        assert before.early is not None
        step = int(before.changes[place])
        truth = first_difference(before.tokens, np.asarray(self.full[key]))
        if truth >= 0 and not 0 <= step <= truth:
            self.late.append(key)
        elif step >= 0 and (step < truth or truth < 0):
            if before.early[place]:
                self.early_by_room += 1
            else:
                self.early.append(key)
        return step

    def _parts(self, knockouts: list[Request]) -> None:
        """What acts in a part must be what runs give that are cut where the thinking closes."""
        before, after = {}, {}
        for one in knockouts:
            own = one.intervention
            if own is None or own.where == "everywhere":
                continue
            bare = replace(one, intervention=None, think_end=())
            acting = replace(bare, intervention=replace(own, where="everywhere"))
            thinking = own.where == "thinking"
            before[one.key], after[one.key] = (acting, bare) if thinking else (bare, acting)
        asked = {one.key: one for one in knockouts}
        want = {k: done.tokens.tolist() for k, done in self._generate(before.values()).items()}
        second = []
        for key, tokens in want.items():
            at = _closed(asked[key].prompt, tokens, asked[key].think_end)
            if at is not None:
                second.append(replace(after[key], prefix=tuple(tokens[:at])))
        self.closed = len(second)
        want |= {k: done.tokens.tolist() for k, done in self._generate(second).items()}
        self.of_parts = [key for key, tokens in want.items() if tokens != self.full[key]]

    def counts(self) -> dict[str, Any]:
        """For the result."""
        return {
            "knockouts": len(self.full),
            "inherited": self.inherited,
            "forks": self.forks,
            "pairs_from_forks": self.of_forks,
            "pairs_that_are_forks": self.forks_to_the_end,
            "late": len(self.late),
            "early_more_than_fit": self.early_by_room,
            "early_otherwise": len(self.early),
            "unequal": len(self.unequal),
            "cut_where_the_thinking_closes": self.closed,
            "unequal_to_the_cut": len(self.of_parts),
        }
