"""transformers as an engine: batched decoding with a KV cache, for machines without vLLM."""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from knockout.engines.base import Completion, EngineInfo, Request, to_extra_args
from knockout.engines.canary import check_bans_hold
from knockout.engines.scoring import Pair, Scored, score_with_model
from knockout.engines.trajectory import Beginnings, Trajectory
from knockout.engines.versions import installed_versions
from knockout.errors import KnockoutError
from knockout.processors.batch import Batch
from knockout.processors.names import Differing
from knockout.processors.rules import check_ids, rule_from_extra_args
from knockout.tokens.checkpoint import load_tokenizer, quiet_transformers, resolve_model
from knockout.tokens.eos import stop_ids

__all__ = ["TransformersEngine"]

# Most tokens (padding included) in one prefill, so that activations stay small.
_PREFILL_TOKENS = 8192


@dataclass(slots=True)
class _Group:
    """Requests that decode together.

    Attributes:
        paths: The trajectories, one a row.
        lengths: (n,) int64, tokens before the next one, prompt included.
        mask: (n, T) int64, 0 at left padding.
        cache: transformers' cache of these rows.
        logits: (n, V) float32 for the next token.
        batch: Rules of the rows; None if the rows have changed.
    """

    paths: list[Trajectory]
    lengths: Tensor
    mask: Tensor
    cache: Any
    logits: Tensor
    batch: Batch | None = None


class TransformersEngine:
    """Runs requests in batches through a transformers model.

    New requests are prefilled together, padded on the left, and join the running batch at once;
    finished rows leave it. A model whose cache is more than plain keys and values (sliding
    windows, recurrent states) runs only sequences of one length together instead, so that it
    never sees padding.

    Attributes:
        info: What runs.
        tokenizer: The model's tokenizer.
    """

    info: EngineInfo

    def __init__(
        self,
        model: str,
        *,
        dtype: str = "auto",
        max_model_len: int | None = None,
        max_num_seqs: int | None = None,
        device: str | None = None,
        options: dict[str, Any] | None = None,
        trust_remote_code: bool = False,
        cache_dir: Path | None = None,
    ) -> None:
        """Loads a model.

        Args:
            model: Name, folder or hub name (see `models.resolve_model`).
            dtype: "auto" is float32 on a CPU, the checkpoint's own elsewhere.
            max_model_len: Longest prompt plus trajectory; the model's own limit by default.
            max_num_seqs: Requests that run at once; 64 by default.
            device: For example "cpu" or "cuda"; a GPU if there is one.
            options: Further arguments of `from_pretrained`, by name.
            trust_remote_code: Whether code that comes with the model may run.
            cache_dir: Where the embedded model is unpacked.

        Raises:
            UsageError: No such model.
            KnockoutError: The model cannot be loaded, or a ban does not hold in it.
        """
        from transformers import AutoModelForCausalLM, cache_utils

        path = resolve_model(model, cache_dir)
        self.tokenizer = load_tokenizer(path, trust_remote_code=trust_remote_code)
        self._device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        if dtype == "auto" and self._device.type == "cpu":
            dtype = "float32"
        try:
            with quiet_transformers():
                self._model: Any = AutoModelForCausalLM.from_pretrained(
                    path, dtype=dtype, trust_remote_code=trust_remote_code, **(options or {})
                )
        except (OSError, ValueError, TypeError, ImportError, RuntimeError) as error:
            raise KnockoutError(f"transformers cannot load model {model!r}: {error}") from error
        torch.nn.Module.to(self._model, self._device)
        torch.nn.Module.eval(self._model)
        text_config = self._model.config.get_text_config(decoder=True)
        longest = getattr(text_config, "max_position_embeddings", None)
        if max_model_len is not None and longest is not None and max_model_len > longest:
            raise KnockoutError(
                f"max_model_len {max_model_len} is more than the {longest} of model {model!r}"
            )
        accepted = inspect.signature(self._model.forward).parameters
        self._takes_positions = "position_ids" in accepted
        self._last_only = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}
        self._caches: Any = cache_utils
        layers = self._new_cache().layers
        self._plain = bool(layers) and all(
            type(layer) is cache_utils.DynamicLayer for layer in layers
        )
        self._max_num_seqs = max_num_seqs or 64
        self._waiting: deque[Trajectory] = deque()
        self._groups: list[_Group] = []
        self._done: list[Completion] = []
        self._keys: set[str] = set()
        self.info = EngineInfo(
            kind="transformers",
            model=model,
            device=self._device.type,
            dtype=str(self._model.dtype).removeprefix("torch."),
            runner="",
            vocab_size=int(text_config.vocab_size),
            eos_ids=stop_ids(self.tokenizer, path),
            max_model_len=int(max_model_len or longest or 2**20),
            versions=installed_versions("torch", "transformers"),
            settings={"max_num_seqs": self._max_num_seqs, **(options or {})},
        )
        self._beginnings = Beginnings(self.info, self.tokenizer)
        check_bans_hold(self)

    @property
    def n_open(self) -> int:
        """See `Engine`."""
        return len(self._keys) + len(self._done)

    def add(self, request: Request) -> None:
        """Queues a request; see `Engine`."""
        path = self._beginnings.begin(request, self._keys)
        if finish := path.finish:
            self._done.append(path.completion(finish))
            return
        self._keys.add(request.key)
        self._waiting.append(path)

    @torch.inference_mode()
    def step(self) -> list[Completion]:
        """Advances all running requests by one token; returns those that finished."""
        done, self._done = self._done, []
        for group in self._groups:
            self._decode(group)
        self._admit()
        for group in self._groups:
            done += self._emit(group)
        self._groups = [group for group in self._groups if group.paths]
        return done

    def score(self, pairs: Sequence[Pair], banned: Sequence[int] = ()) -> list[Scored]:
        """See `Scores`."""
        return score_with_model(
            self._model,
            pairs,
            check_ids(list(banned), width=self.info.vocab_size),
            device=self._device,
            tokens_per_batch=_PREFILL_TOKENS,
            padding=self._plain,
            vocab_size=self.info.vocab_size,
        )

    def close(self) -> None:
        """Frees the model."""
        self._groups.clear()
        self._waiting.clear()
        self._done.clear()
        self._keys.clear()
        self._model = None

    def _new_cache(self) -> Any:
        return self._caches.DynamicCache(config=self._model.config)

    # Prefill -------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Prefills waiting requests into free places."""
        free = self._max_num_seqs - sum(len(group.paths) for group in self._groups)
        while free > 0 and self._waiting:
            taken = self._next_prefill(free)
            free -= len(taken)
            group = self._prefill(taken)
            if self._plain and self._groups:
                self._groups[0] = _merged(self._groups[0], group)
            else:
                self._groups.append(group)

    def _next_prefill(self, most: int) -> list[Trajectory]:
        """Takes waiting requests that go into one prefill."""
        taken = [self._waiting.popleft()]
        longest = _length(taken[0])
        passed: list[Trajectory] = []
        while self._waiting and len(taken) < most:
            path = self._waiting.popleft()
            length = _length(path)
            if max(longest, length) * (len(taken) + 1) > _PREFILL_TOKENS:
                passed.append(path)
                break
            if self._plain or length == longest:
                taken.append(path)
                longest = max(longest, length)
            else:
                passed.append(path)
        self._waiting.extendleft(reversed(passed))
        return taken

    def _prefill(self, paths: list[Trajectory]) -> _Group:
        """Runs prompts and prefixes through the model, padded on the left."""
        rows = [[*path.request.prompt, *path.tokens] for path in paths]
        lengths = torch.tensor([len(row) for row in rows])
        width = int(lengths.max())
        ids = torch.zeros(len(rows), width, dtype=torch.int64)
        mask = (torch.arange(width) >= width - lengths[:, None]).long()
        for i, row in enumerate(rows):
            ids[i, width - len(row) :] = torch.tensor(row)
        positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
        mask = mask.to(self._device)
        cache = self._new_cache()
        logits = self._forward(ids.to(self._device), mask, positions.to(self._device), cache)
        return _Group(paths, lengths.to(self._device), mask, cache, logits)

    def _decode(self, group: _Group) -> None:
        """Runs the last token of each row through the model."""
        last = torch.tensor([[path.tokens[-1]] for path in group.paths], device=self._device)
        positions = group.lengths[:, None]
        group.mask = torch.nn.functional.pad(group.mask, (0, 1), value=1)
        group.logits = self._forward(last, group.mask, positions, group.cache)
        group.lengths = group.lengths + 1

    def _forward(self, ids: Tensor, mask: Tensor, positions: Tensor, cache: Any) -> Tensor:
        """Logits (n, V) float32 after the last of the ids (n, t)."""
        extra: dict[str, Any] = dict(self._last_only)
        if self._takes_positions:
            extra["position_ids"] = positions
        output = self._model(
            input_ids=ids, attention_mask=mask, past_key_values=cache, use_cache=True, **extra
        )
        logits: Tensor = output.logits[:, -1].float()
        return logits

    # Sampling ------------------------------------------------------------------------------------

    def _emit(self, group: _Group) -> list[Completion]:
        """Picks a token for each row; takes out and returns the rows that it ended."""
        logits = group.logits
        if group.batch is None:
            rules = [rule_from_extra_args(to_extra_args(path.request)) for path in group.paths]
            group.batch = Batch(rules, logits.shape[1], self._device)
        failed: dict[int, str] = {}
        closed = None
        if group.batch.by_part:
            closed = torch.tensor([p.thought_closed for p in group.paths], device=self._device)
        picks, differ = group.batch.decide_(logits, group.lengths, failed, closed)
        named = [Differing(())] * len(group.paths) if differ is None else differ.by_row()

        done: list[Completion] = []
        stay: list[int] = []
        for row, (path, token) in enumerate(zip(group.paths, picks.tolist(), strict=True)):
            if row in failed:
                done.append(path.completion("error", failed[row]))
                continue
            finish = path.extend([token], [named[row]])
            if finish is None:
                stay.append(row)
            else:
                done.append(path.completion(finish))
        if done:
            self._keys.difference_update(completion.key for completion in done)
            self._keep(group, stay)
        return done

    def _keep(self, group: _Group, stay: list[int]) -> None:
        """Drops all rows but these, and the padding that none of them needs."""
        group.paths = [group.paths[row] for row in stay]
        group.batch = None
        if not stay:
            return
        index = torch.tensor(stay, device=self._device)
        group.lengths = group.lengths[index]
        group.mask = group.mask[index]
        group.cache.reorder_cache(index)
        if self._plain:
            width = int(group.lengths.max())
            if width < group.mask.shape[1]:
                group.mask = group.mask[:, -width:]
                for layer in group.cache.layers:
                    layer.keys = layer.keys[:, :, -width:].contiguous()
                    layer.values = layer.values[:, :, -width:].contiguous()


def _length(path: Trajectory) -> int:
    return len(path.request.prompt) + len(path.tokens)


def _merged(a: _Group, b: _Group) -> _Group:
    """Two groups with plain caches as one; the shorter is padded on the left."""
    pad = torch.nn.functional.pad
    width = max(a.mask.shape[1], b.mask.shape[1])

    def joined(x: Tensor, y: Tensor) -> Tensor:
        x = pad(x, (0, 0, width - x.shape[2], 0))
        y = pad(y, (0, 0, width - y.shape[2], 0))
        return torch.cat([x, y])

    for mine, other in zip(a.cache.layers, b.cache.layers, strict=True):
        mine.keys = joined(mine.keys, other.keys)
        mine.values = joined(mine.values, other.values)
    return _Group(
        paths=a.paths + b.paths,
        lengths=torch.cat([a.lengths, b.lengths]),
        mask=torch.cat(
            [pad(mask, (width - mask.shape[1], 0)) for mask in (a.mask, b.mask)],
        ),
        cache=a.cache,
        logits=torch.cat([a.logits, b.logits]),
    )
