"""Reading what lm-eval's command line gives to the model `knockout`, without lm-eval."""

from __future__ import annotations

import json
import re
from typing import Any

from knockout.errors import UsageError
from knockout.processors.rules import check_ids

__all__ = ["check_settings", "claim_cache", "parse_ids"]

_CACHE_KEY = "knockout"
_GEN_KEYS = {"until", "max_gen_toks", "do_sample", "temperature", "top_p", "top_k", "min_p"}
# Settings that lm-eval's tasks carry for other models, with the values that change nothing.
_NEUTRAL = {
    "num_beams": 1,
    "repetition_penalty": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "n": 1,
}


def parse_ids(value: Any) -> tuple[int, ...]:
    """Token ids from a model argument: 11, "11+13", "11;13", "11 13" or a list.

    Commas separate model arguments on lm-eval's command line, so they cannot separate ids there.

    Raises:
        UsageError: It contains something else.
    """
    if isinstance(value, str):
        parts = [part for part in re.split(r"[\s;+:,\[\]]+", value) if part]
        value = [int(part) if part.isdecimal() else part for part in parts]
    elif value is None:
        value = []
    elif type(value) is int:
        value = [value]
    try:
        return tuple(check_ids(value))
    except ValueError as error:
        raise UsageError(f"{error} (write knockout_ids=11+13, or a list in JSON)") from None


def check_settings(settings: dict[str, Any]) -> None:
    """Refuses generation settings that we would have to ignore (UsageError)."""
    for key, value in settings.items():
        if key in _GEN_KEYS or value is None or (key in _NEUTRAL and value == _NEUTRAL[key]):
            continue
        if key == "extra_args":
            raise UsageError(
                "extra_args in --gen_kwargs is for `--model vllm`; here give the ban as "
                "--model_args knockout_ids=..."
            )
        raise UsageError(
            f"the generation setting {key}={value!r} is not supported by --model knockout; "
            f"it takes {', '.join(sorted(_GEN_KEYS))}"
        )


def claim_cache(cache: Any, mine: dict[str, Any]) -> None:
    """Ties a cache of `--use_cache` to what makes its responses.

    Args:
        cache: lm-eval's `SqliteDict`.
        mine: What makes them, as JSON values.

    Raises:
        UsageError: The cache was made with something else, or without a record of it.
    """
    theirs = json.loads(cache[_CACHE_KEY]) if _CACHE_KEY in cache else None
    if theirs is None and not len(cache):
        cache[_CACHE_KEY] = json.dumps(mine)
        cache.commit()
    elif theirs is None:
        raise UsageError(
            f"--use_cache {cache.filename}: the cache holds responses that were made without a "
            "record of what was banned; name another file"
        )
    elif theirs != mine:
        key = next(k for k in {**theirs, **mine} if theirs.get(k) != mine.get(k))
        raise UsageError(
            f"--use_cache {cache.filename}: the cache was made with {key} = {theirs.get(key)}, "
            f"this run has {mine.get(key)}; name one file for each"
        )
