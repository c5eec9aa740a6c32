"""The model `knockout` of lm-eval: our engines, with tokens banned and noise that is ours.

Importing this module registers it; `knockout lm-eval` does that and hands over to lm-eval's own
command line, which finds no external models by itself.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lm_eval.models  # noqa: F401  # fills its registry first
from lm_eval.api.instance import Instance
from lm_eval.api.model import CacheHook, TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import (
    has_bos_prefix,
    maybe_truncate,
    normalize_gen_kwargs,
)
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from knockout.engines.base import Completion, Request, Scores, generate
from knockout.engines.open import open_engine
from knockout.engines.scoring import Pair
from knockout.errors import KnockoutError, UsageError
from knockout.integrations.lm_eval_settings import check_settings, claim_cache, parse_ids
from knockout.method.interventions import ban
from knockout.method.sampling import Sampling, cell_seed
from knockout.processors.rules import check_ids
from knockout.sweep.identity import model_fingerprint
from knockout.tokens.checkpoint import resolve_model
from knockout.tokens.thinking import after_thinking, opened_by, response_text

__all__ = ["KnockoutLM"]

log = logging.getLogger("knockout")


@register_model("knockout")
class KnockoutLM(TemplateLM):  # type: ignore[misc]
    """One of our engines as an lm-eval model.

    Attributes:
        tokenizer: The model's.
        banned: Token ids that are never emitted.
    """

    tokenizer: Any

    def __init__(
        self,
        pretrained: str,
        *,
        knockout_ids: Any = (),
        engine: str = "auto",
        revision: str | None = None,
        dtype: str = "auto",
        max_model_len: int | None = None,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        seed: int = 0,
        allow_eos: bool = False,
        think_end_token: str | None = None,
        enable_thinking: bool | None = None,
        chat_template_args: dict[str, Any] | None = None,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
        truncation_side: str = "left",
        trust_remote_code: bool = False,
        batch_size: int | str = "auto",
        max_batch_size: int | None = None,
        max_num_seqs: int | None = None,
        device: str | None = None,
        **options: Any,
    ) -> None:
        """Starts the engine.

        Args:
            pretrained: The embedded model's name, a checkpoint folder, or a hub name.
            knockout_ids: Ids to ban; see `parse_ids`. None bans nothing: a baseline.
            engine: "auto", "vllm", "transformers" or "server" (then `urls` too, with "+" between
                several).
            revision: Of a hub model.
            dtype: As in a sweep file.
            max_model_len: Longest prompt plus response, in tokens.
            max_length: lm-eval's other name for it.
            max_gen_toks: Longest response if the task names no limit.
            seed: Of generation. With the task's name, the document and the repeat it makes each
                request's own seed, so that repeats differ and another run gives the same.
            allow_eos: Whether ids that end a text may be banned.
            think_end_token: What ends the thinking part, which is cut from responses.
            enable_thinking: Handed to the chat template.
            chat_template_args: Further arguments of the chat template.
            add_bos_token: Whether plain prompts begin with the tokenizer's beginning-of-text token;
                None leaves it to the tokenizer.
            prefix_token_id: Context of log-likelihoods without one.
            truncation_side: Where prompts that are too long are cut: "left", "right", "middle".
            trust_remote_code: Whether code that comes with the model may run.
            batch_size: Requests at once; "auto" and lm-eval's default 1 leave it to the engine,
                which batches continuously.
            max_batch_size: Requests at once, if batch_size is auto.
            max_num_seqs: The same, in our words; it wins.
            device: For transformers; vLLM takes what it sees.
            **options: Further engine settings of a sweep file (tensor_parallel_size, ...).

        Raises:
            UsageError: An argument is wrong.
            KnockoutError: The engine does not start.
        """
        super().__init__()
        self._folder = resolve_model(pretrained, revision=revision)
        self.banned = parse_ids(knockout_ids)
        at_once = max_num_seqs or max_batch_size
        if not at_once and str(batch_size).isdecimal() and int(batch_size) > 1:
            at_once = int(batch_size)
        settings: dict[str, Any] = {
            "kind": engine,
            "dtype": dtype,
            "max_model_len": max_model_len or max_length,
            "max_num_seqs": at_once,
            **options,
        }
        if isinstance(settings.get("urls"), str):
            settings["urls"] = tuple(settings["urls"].split("+"))
        # "cuda" is lm-eval's default, given or not; our engine takes a GPU if there is one.
        if engine == "transformers" and device and not device.startswith("cuda"):
            settings["device"] = device
        self.engine = open_engine(self._folder, trust_remote_code=trust_remote_code, **settings)
        info = self.engine.info
        try:
            check_ids(list(self.banned), width=info.vocab_size)
        except ValueError as error:
            raise UsageError(str(error)) from None
        if not allow_eos and (ends := sorted(set(self.banned) & set(info.eos_ids))):
            raise UsageError(
                f"knockout_ids contains {ends[0]}, which ends a text; give allow_eos=true to ban it"
            )
        self.tokenizer = self.engine.tokenizer
        self.seed = int(seed)
        self.think_end_token = think_end_token
        self._max_gen_toks = int(max_gen_toks)
        self._template_args = {
            "enable_thinking": enable_thinking,
            **(chat_template_args or {}),
        }
        self._add_bos = add_bos_token
        self._prefix_token = prefix_token_id
        self._truncation_side = truncation_side
        self._caching = False

    # What lm-eval asks of a model ----------------------------------------------------------------

    @property
    def eot_token_id(self) -> int:
        """The tokenizer's end-of-text token."""
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """Context of a log-likelihood that has none."""
        if self._prefix_token is not None:
            return int(self._prefix_token)
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else int(bos)

    @property
    def max_length(self) -> int:
        """Longest prompt plus response, in tokens."""
        return self.engine.info.max_model_len

    @property
    def max_gen_toks(self) -> int:
        """Longest response if the task names no limit."""
        return self._max_gen_toks

    @property
    def tokenizer_name(self) -> str:
        """For lm-eval's cache of built requests."""
        return str(self._folder).replace("/", "__")

    def get_model_info(self) -> dict[str, Any]:
        """What lm-eval's result files say about the model."""
        info = self.engine.info
        return {
            "knockout_ids": list(self.banned),
            "knockout_tokens": [self.tokenizer.decode([token]) for token in self.banned],
            "knockout_engine": info.kind,
            "knockout_seed": self.seed,
            "model_dtype": info.dtype,
            "knockout_versions": info.versions,
        }

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """Token ids of a text, with at most one beginning-of-text token."""
        if not string:
            return []
        special = self._add_bos if add_special_tokens is None else add_special_tokens
        if has_bos_prefix(string, self.tokenizer.decode([self.prefix_token_id])):
            special = False
        more = {} if special is None else {"add_special_tokens": special}
        return [
            int(i) for i in self.tokenizer(string, return_attention_mask=False, **more)["input_ids"]
        ]

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """A conversation as a prompt; without its system message where the template has no place."""
        from knockout.benchmarks import Chat, chat_renderer

        render = chat_renderer(self.tokenizer, Chat(args=self._template_args))
        return render(chat_history, add_generation_prompt)

    # The cache -----------------------------------------------------------------------------------

    def set_cache_hook(self, cache_hook: CacheHook) -> None:
        """Called by `--use_cache`: a cache belongs to one ban.

        lm-eval's key is the request alone, so that runs with different bans would read each other's
        responses. The file therefore keeps what made them, and another model or ban is refused.

        Raises:
            UsageError: The cache belongs to another model or ban, or to a program that is not ours.
        """
        super().set_cache_hook(cache_hook)
        cache = cache_hook.dbdict
        if cache is None:
            return
        self._caching = True
        mine = {
            "knockout_ids": list(self.banned),
            "model": model_fingerprint(Path(self._folder)),
            "engine": self.engine.info.kind,
            "dtype": self.engine.info.dtype,
            "seed": self.seed,
            "max_length": self.max_length,
            "think_end_token": self.think_end_token,
            "truncation_side": self._truncation_side,
            "add_bos_token": self._add_bos,
        }
        claim_cache(cache, mine)

    # Generation ----------------------------------------------------------------------------------

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Responses to lm-eval's requests.

        Raises:
            UsageError: A generation setting that we would have to ignore.
            KnockoutError: The engine failed on a request.
        """
        from tqdm.auto import tqdm

        repeats: Counter[tuple[Any, ...]] = Counter()
        ours: list[Request] = []
        stops: list[list[str]] = []
        for n, instance in enumerate(requests):
            place = (instance.task_name, instance.doc_id, instance.idx)
            request, until = self._request(n, instance, repeats[place])
            repeats[place] += 1
            ours.append(request)
            stops.append(until)
        texts = [""] * len(ours)
        with tqdm(total=len(ours), disable=disable_tqdm, desc="knockout generates") as bar:
            for completion in generate(self.engine, ours):
                n = int(completion.key)
                texts[n] = self._text(completion, requests[n], stops[n])
                context, settings = requests[n].args
                self.cache_hook.add_partial("generate_until", (context, settings), texts[n])
                bar.update(1)
        return texts

    def _request(self, n: int, instance: Instance, repeat: int) -> tuple[Request, list[str]]:
        """An engine's request, and the strings at which the response is cut."""
        context, raw = instance.args
        settings: dict[str, Any] = dict(normalize_gen_kwargs(raw, self._max_gen_toks))
        check_settings(settings)
        sampling = Sampling(
            temperature=float(settings.get("temperature") or 0.0),
            top_p=float(settings.get("top_p") or 1.0),
            top_k=max(int(settings.get("top_k") or 0), 0),
            min_p=float(settings.get("min_p") or 0.0),
        )
        if self._caching and not sampling.greedy and not raw.get("do_sample"):
            raise UsageError(
                f"{instance.task_name}: temperature {sampling.temperature} without do_sample=True; "
                "with --use_cache lm-eval would give every repeat the same response. Say "
                "do_sample=True in --gen_kwargs, or leave --use_cache"
            )
        until = [stop for stop in settings["until"] if stop]
        prompt, room = maybe_truncate(
            self.tok_encode(context),
            max_gen_toks=settings["max_gen_toks"],
            max_model_len=self.max_length,
            side=self._truncation_side,
        )
        problem = f"{instance.doc_id}" + (f".{instance.idx}" if instance.idx else "")
        request = Request(
            key=str(n),
            prompt=tuple(prompt),
            seed=cell_seed(self.seed, str(instance.task_name), problem, repeat),
            sampling=sampling,
            max_tokens=room,
            intervention=ban(self.banned) if self.banned else None,
            # What stops a response may well stand in its thinking part, so it is looked for later.
            stop=() if self.think_end_token else tuple(until),
        )
        return request, until

    def _text(self, completion: Completion, instance: Instance, until: list[str]) -> str:
        """The response, without thinking; "" if the thinking was never closed, as in a sweep."""
        if completion.finish == "error":
            raise KnockoutError(
                f"{instance.task_name}, document {instance.doc_id}: the engine failed: "
                f"{completion.error}"
            )
        think_end = self.think_end_token
        opened = bool(think_end) and opened_by(str(instance.args[0]), str(think_end))
        text = response_text(
            self.tokenizer, completion.tokens.tolist(), stop=until, think_end=think_end,
            eos_ids=self.engine.info.eos_ids, opened=opened,
        )  # fmt: skip
        return after_thinking(text, think_end, opened=opened) or ""

    # Log-likelihoods -----------------------------------------------------------------------------

    def _loglikelihood_tokens(
        self,
        requests: list[tuple[tuple[str, str] | None, list[int], list[int]]],
        disable_tqdm: bool = False,
        **ignored: Any,
    ) -> list[tuple[float, bool]]:
        scored = self._score([(context, answer) for _, context, answer in requests])
        hit = sum(math.isinf(value) for value, _ in scored)
        if hit:
            log.warning(
                "%d of %d continuations contain a banned token: their log-likelihood is -inf, so a "
                "multiple-choice task can never choose them",
                hit,
                len(scored),
            )
        for (texts, _, _), result in zip(requests, scored, strict=True):
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, result)
        return scored

    def _score(self, pairs: Sequence[Pair]) -> list[tuple[float, bool]]:
        engine = self.engine
        if not isinstance(engine, Scores):
            raise UsageError(
                f"the engine {self.engine.info.kind} gives no log-likelihoods; use engine=vllm or "
                "engine=transformers, or tasks that generate"
            )
        # One place is left for the token that vLLM always generates.
        longest = self.max_length - 1
        cut: list[Pair] = []
        for context, answer in pairs:
            if len(answer) >= longest:
                raise UsageError(
                    f"a continuation of {len(answer)} tokens leaves no room for a context in "
                    f"max_length {self.max_length}"
                )
            cut.append((list(context)[-(longest - len(answer)) :], answer))
        return [(logprob, greedy) for logprob, greedy in engine.score(cut, self.banned)]

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Log-likelihoods of whole texts; −∞ if one contains a banned token."""
        windows: list[Pair] = []
        owner: list[int] = []
        for n, request in enumerate(requests):
            (text,) = request.args
            for window in get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length - 2,
                context_len=1,
            ):
                windows.append(make_disjoint_window(window))
                owner.append(n)
        totals = [0.0] * len(requests)
        for owner_of, (value, _) in zip(owner, self._score(windows), strict=True):
            totals[owner_of] += value
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals
