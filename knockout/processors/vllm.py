"""The logits processor for vLLM: one class for its model runners and all supported versions.

V1, which vLLM has up to 0.33, hands over batch changes and then the logits, row i for request i.
Model Runner V2 fills slots and says at every step which slot each row belongs to. The class is
registered in the entry-point group `vllm.logits_processors`, so that every vLLM of the environment
loads it; requests without our keys pass through bit for bit.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsProcessor as V2Interface

from knockout.errors import KnockoutError
from knockout.processors.batch import Batch
from knockout.processors.rules import Rule, rule_from_extra_args
from knockout.processors.thinking import Thought, closed_before

try:
    from vllm.v1.sample.logits_processor.builtin import process_dict_updates
    from vllm.v1.sample.logits_processor.interface import LogitsProcessor as V1Interface
except ModuleNotFoundError as error:  # from 0.34 on there is Model Runner V2 alone
    if error.name != "vllm.v1.sample.logits_processor":
        raise

    class V1Interface:  # type: ignore[no-redef]
        """Stands in for the interface that this vLLM no longer has."""


if TYPE_CHECKING:
    from types import FrameType

    from vllm import SamplingParams
    from vllm.config import VllmConfig
    from vllm.v1.sample.logits_processor.interface import BatchUpdate
    from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsContext

__all__ = ["KnockoutProcessor", "check_params", "collect_failures"]

# What a coupled request may not ask of the engine, as it would change the logits before our pick
# (or the pick after it): attribute, the value that leaves it off.
_OFF: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("n", (1,)),
    ("temperature", (0, 0.0)),
    ("top_p", (1, 1.0)),
    ("top_k", (0, -1)),
    ("min_p", (0, 0.0)),
    ("presence_penalty", (0, 0.0)),
    ("frequency_penalty", (0, 0.0)),
    ("repetition_penalty", (1, 1.0)),
    ("min_tokens", (0,)),
    ("logit_bias", (None, {})),
    ("allowed_token_ids", (None, [])),
    ("bad_words", (None, [])),
    ("structured_outputs", (None,)),
)
# These force a token after all processors, so that even a plain ban would fail.
_FORCING: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("thinking_token_budget", (None,)),
    ("trace_decode_token_ids", (None, [])),
)

# The instance of each model runner that acts. vLLM makes one for the installed entry point and
# another for the name in `logits_processors`; a second pick from a row that has been decided would
# choose between the token and what the row says of watched interventions.
_acting: WeakValueDictionary[tuple[int, int], KnockoutProcessor] = WeakValueDictionary()

# Requests on V1 whose own picks are remembered.
_MOST_PICKED = 4096

# Request name to reason, if an engine in this process asked for it.
_failures: dict[str, str] | None = None


def collect_failures(into: dict[str, str] | None) -> None:
    """Makes processors of this process note wrong requests in `into` instead of raising (None).

    An exception in a model runner ends its engine with all requests; an engine that runs in this
    process can instead end the one request that the note names. Rows that cannot be sampled from
    need none of it: they say so themselves, in any process (see `mark_failure_`).
    """
    global _failures
    _failures = into


def check_params(params: SamplingParams, width: int | None = None) -> Rule | None:
    """Reads the rule of a request and refuses what does not go with it.

    Args:
        params: The request's settings.
        width: Width of the logits, where known.

    Raises:
        ValueError: A key is wrong, an id is outside the logits, or a setting would be applied
            beside our own pick.
    """
    rule = rule_from_extra_args(params.extra_args)
    if rule is None:
        return None
    if width is not None:
        rule.check_width(width)
    refused = _FORCING + (_OFF if rule.coupled else ())
    for name, off in refused:
        value = getattr(params, name, off[0])
        if value not in off:
            if name in ("temperature", "top_p", "top_k", "min_p"):
                advice = f"send temperature=0 to the engine and knockout_{name} in extra_args"
            else:
                advice = "leave it out" + (
                    ", or send knockout_ids alone (a plain ban)"
                    if name not in dict(_FORCING)
                    else ""
                )
            kind = "a coupled request" if rule.coupled else "a request with a ban"
            raise ValueError(f"{name} is {value!r}, which does not go with {kind}: {advice}")
    allowed = params.allowed_token_ids
    if allowed and not set(allowed) - set(rule.banned):
        raise ValueError("every token of allowed_token_ids is banned by knockout_ids")
    return rule


def _width_at_arrival() -> int | None:
    """Width of the logits as vLLM's front end knows it; None if nothing is found.

    The front end may be another process than the engine's, and it hands over the parameters
    alone. So the model's configuration is read from the object that asks.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        config = getattr(frame.f_locals.get("self"), "model_config", None)
        if config is not None:
            return int(config.get_vocab_size())
        frame = frame.f_back
    return None


@dataclass(slots=True)
class _Row:
    """A request in a row of V1.

    Attributes:
        rule: What it asks.
        n_prompt: Tokens of its prompt.
        outputs: V1's own list of its tokens, which grows.
        thought: Whether its thinking has ended, if that matters.
        picked: Our picks by their place in the outputs, for those that have not arrived yet.
    """

    rule: Rule
    n_prompt: int
    outputs: list[int]
    thought: Thought | None
    picked: dict[int, int]

    def closed(self) -> bool:
        """Whether the thinking has ended before the token that comes now."""
        if self.thought is None:
            return False
        for n in range(self.thought.seen, len(self.outputs)):
            token = self.outputs[n] if self.outputs[n] >= 0 else self.picked.get(n)
            if token is None:
                raise KnockoutError(
                    f"{self.rule}: whether its thinking has ended is not known, as a token of it "
                    "is still on the device: start vLLM with async_scheduling false"
                )
            self.thought.take(token)
        return self.thought.closed


class KnockoutProcessor(V1Interface, V2Interface):
    """Bans tokens and makes coupled picks inside vLLM (both model runners).

    If a model runner gets several of them, the first acts and the others do nothing.
    """

    def __init__(self, vllm_config: VllmConfig, *rest: Any) -> None:
        """Is called by vLLM.

        Args:
            vllm_config: The engine's configuration.
            *rest: `(device, is_pin_memory)` from V1, `(req_states,)` from V2.

        Raises:
            ValueError: V1 with speculative decoding, which skips custom processors.
        """
        self._v2 = len(rest) == 1
        self._width = int(vllm_config.model_config.get_vocab_size())
        if not self._v2 and getattr(vllm_config, "speculative_config", None):
            raise ValueError(
                "speculative decoding on vLLM's V1 model runner skips custom logits processors, "
                "so bans would not hold: switch it off"
            )
        # What is one object for all processors of a runner and lives as long as they do, so that
        # its id is no other's: V1's device, V2's request states.
        self._runner = (vllm_config, rest[0])
        self.acts = _acting.setdefault((id(vllm_config), id(rest[0])), self) is self
        self._speculates = bool(getattr(vllm_config, "speculative_config", None))
        # Keyed by row on V1, by slot on V2.
        self._by_row: dict[int, _Row] = {}
        self._by_slot: dict[int, Rule] = {}
        # By the id of V1's list of outputs, which each entry keeps alive.
        self._picked: dict[int, tuple[list[int], dict[int, int]]] = {}
        self._batch: Batch | None = None
        self._stale = False  # whether the batch's rows have changed since
        self._batch_key: tuple[int, bytes] | None = None

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Refuses wrong keys and settings when a request arrives (ValueError)."""
        if sampling_params.extra_args:
            check_params(sampling_params, _width_at_arrival())

    def is_argmax_invariant(self) -> bool:
        """No: a ban changes what greedy decoding takes."""
        return False

    def _rule(self, params: SamplingParams) -> Rule | None:
        """A row's rule; where failures are collected, a wrong one ends its own request alone."""
        try:
            rule = check_params(params, self._width)
            if rule is not None and rule.by_part and self._speculates:
                raise ValueError(
                    f"{rule}: an intervention in the thinking or the answer alone does not go with "
                    "speculative decoding, whose drafts may end the thinking"
                )
            return rule
        except ValueError as error:
            if _failures is None:
                raise
            _failures[str((params.extra_args or {}).get("knockout_name", ""))] = str(error)
            return None

    # V1 ----------------------------------------------------------------------------------------

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follows V1's batch changes."""
        if not self.acts:
            return
        if process_dict_updates(self._by_row, batch_update, self._new_row):
            self._stale = True

    def _new_row(
        self, params: SamplingParams, prompt: list[int] | None, outputs: list[int]
    ) -> _Row | None:
        rule = self._rule(params)
        if rule is None:
            return None
        if prompt is None and rule.coupled:
            raise ValueError(f"{rule}: a coupled request needs its prompt as token ids")
        thought = None
        if rule.by_part:
            thought = Thought(rule.think_end, prompt or (), rule.start or 0)
        return _Row(rule, len(prompt or ()), outputs, thought, self._picked_of(rule, outputs))

    def _picked_of(self, rule: Rule, outputs: list[int]) -> dict[int, int]:
        """What we picked for a request so far, also if it left the batch for a while."""
        if not rule.by_part:
            return {}
        known = self._picked.get(id(outputs))
        if known is None or known[0] is not outputs:
            if len(self._picked) >= _MOST_PICKED:
                del self._picked[next(iter(self._picked))]
            known = self._picked[id(outputs)] = (outputs, {})
        return known[1]

    # V2 ----------------------------------------------------------------------------------------

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        """Sets V2's slot anew; returns whether its rows are changed."""
        if not self.acts:
            return False
        before = self._by_slot.pop(req_idx, None)
        rule = self._rule(sampling_params)
        if rule is not None:
            self._by_slot[req_idx] = rule
        if rule is not None or before is not None:
            self._stale = True
        return rule is not None

    # Both --------------------------------------------------------------------------------------

    def apply(self, logits: torch.Tensor, ctx: LogitsContext | None = None) -> torch.Tensor:
        """Bans and picks, in place.

        Args:
            logits: (rows, V) float32.
            ctx: V2's layout of the rows; None on V1.

        Returns:
            The same tensor.

        Raises:
            KnockoutError: A coupled row is NaN or wholly banned; names the request.
        """
        if ctx is None:
            if self._by_row:
                self._apply_v1(logits)
        elif self._by_slot:
            self._apply_v2(logits, ctx)
        return logits

    def _renewed(self, rules: list[Rule | None], logits: torch.Tensor) -> Batch:
        """The batch of these rows; only re-indexed if the same requests are in another order."""
        self._stale = False
        where = (rules, logits.shape[1], logits.device)
        return Batch(*where) if self._batch is None else self._batch.rearranged(*where)

    def _apply_v1(self, logits: torch.Tensor) -> None:
        if self._batch is None or self._stale:
            rules: list[Rule | None] = [None] * logits.shape[0]
            for row, one in self._by_row.items():
                rules[row] = one.rule
            self._batch = self._renewed(rules, logits)
        rows = [self._by_row[row] for row in self._batch.coupled]
        # Under asynchronous scheduling the lists contain −1 for tokens still on the device.
        lengths = [one.n_prompt + len(one.outputs) for one in rows]
        positions = torch.tensor(lengths, dtype=torch.int64)
        if logits.device.type != "cpu":
            positions = positions.to(logits.device, non_blocking=True)
        closed = None
        if self._batch.by_part:
            closed = torch.tensor([one.closed() for one in rows], device=logits.device)
        tokens = self._batch.apply_(logits, positions, closed)
        if self._batch.by_part:
            for one, token in zip(rows, tokens.tolist(), strict=True):
                if one.thought is not None:
                    one.picked[len(one.outputs)] = token

    def _apply_v2(self, logits: torch.Tensor, ctx: LogitsContext) -> None:
        slots = ctx.idx_mapping_np
        if logits.shape[0] != slots.shape[0]:
            # Several rows per request (speculative decoding): only the device knows which.
            slots = ctx.expanded_idx_mapping.cpu().numpy()
        key = (logits.shape[1], slots.tobytes())
        if self._batch is None or self._stale or self._batch_key != key:
            rules = [self._by_slot.get(slot) for slot in slots.tolist()]
            self._batch = self._renewed(rules, logits)
            self._batch_key = key
        positions = ctx.pos[self._batch.coupled_rows].to(torch.int64) + 1
        closed = self._closed_v2(self._batch, ctx, positions) if self._batch.by_part else None
        self._batch.apply_(logits, positions, closed)

    def _closed_v2(self, batch: Batch, ctx: LogitsContext, positions: torch.Tensor) -> torch.Tensor:
        """Whether each coupled row's thinking has ended, from the tokens that V2 keeps."""
        tokens = self._runner[1].all_token_ids.gpu
        slots = ctx.expanded_idx_mapping[batch.coupled_rows].to(torch.int64)
        start = torch.tensor([rule.start or 0 for rule in batch.rules], device=positions.device)
        longest = int(ctx.seq_lens_upper_bound_np.max())
        return closed_before(
            tokens[:, :longest][slots], start, positions, [rule.think_end for rule in batch.rules]
        )
