"""Finding a model: the embedded one, a local folder, or a name on the hub."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from knockout.errors import KnockoutError, UsageError
from knockout.planted import MODEL_FOLDER, PLANTED
from knockout.tokens import embedded

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = [
    "EMBEDDED",
    "cache_folder",
    "eos_token_ids",
    "load_tokenizer",
    "resolve_model",
    "unpacked_embedded",
]

EMBEDDED = "smollm2-135m"
"""Name of the model that needs no hub (SmolLM2-135M-Instruct)."""

_FORMAT = 1  # Increase it when the content of the embedded checkpoint folder changes.
_HUB_TIMEOUT_S = 10.0


def cache_folder() -> Path:
    """Where checkpoints made from embedded files are kept: `$XDG_CACHE_HOME/knockout`."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "knockout"


def resolve_model(name: str, cache_dir: Path | None = None, *, revision: str | None = None) -> str:
    """Turns a model's name into what engines load.

    Args:
        name: "smollm2-135m" or "planted" (embedded), a checkpoint folder, or a hub name such as
            "Qwen/Qwen3-4B".
        cache_dir: Where to keep the embedded model's checkpoint; the user's cache by default.
        revision: Of a hub name.

    Returns:
        A folder's path.

    Raises:
        UsageError: There is no such model; the message says what was looked for.
        KnockoutError: The hub cannot be reached, or the model cannot be unpacked.
    """
    if name.lower() == EMBEDDED:
        return str(_embedded(cache_dir or cache_folder()))
    if name.lower() == PLANTED:
        return str(MODEL_FOLDER)
    folder = Path(name).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise UsageError(
                f"model {name!r} is a folder without a config.json; "
                "expected a checkpoint as transformers saves it"
            )
        return str(folder)
    looks_like_path = name.startswith((".", "/", "~", "\\")) or name.count("/") != 1
    if folder.exists() or looks_like_path:
        found = "a file" if folder.exists() else "no such folder"
        raise UsageError(
            f"model {name!r}: {found}; expected {EMBEDDED!r} or {PLANTED!r} (embedded), a checkpoint folder, "
            "or a hub name such as 'Qwen/Qwen3-4B'"
        )
    return _from_hub(name, revision)


def _embedded(cache: Path) -> Path:
    """The embedded model as a checkpoint folder, fetched and unpacked on first use.

    Two processes may unpack at once: each works in a folder of its own, and the first to rename
    it into place wins.
    """
    target = unpacked_embedded(cache)
    if (target / "config.json").is_file():
        return target
    try:
        cache.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{EMBEDDED}-", dir=cache))
    except OSError as error:
        raise KnockoutError(
            f"cannot write the embedded model's checkpoint (270 MB) to {cache}: {error}; "
            "set XDG_CACHE_HOME to a folder that can be written"
        ) from error
    try:
        with tempfile.TemporaryDirectory(prefix=f".{EMBEDDED}-", dir=cache) as fetched:
            _unpack(embedded.installed() or embedded.fetch(Path(fetched)), work)
        work.chmod(0o755)
        try:
            work.rename(target)
        except OSError:
            if not (target / "config.json").is_file():
                raise
    except OSError as error:
        raise KnockoutError(
            f"cannot write the embedded model's checkpoint (270 MB) to {cache}: {error}"
        ) from error
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


def unpacked_embedded(cache: Path) -> Path:
    """Where the embedded model's checkpoint is, or will be."""
    return cache / f"{EMBEDDED}-{embedded.version()}-v{_FORMAT}"


def _unpack(source: Path, target: Path) -> None:
    """Dequantises the GGUF file into a bfloat16 checkpoint with its tokenizer.

    bfloat16 halves the folder; its rounding is far finer than the file's own four bits.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    # No setting of transformers turns off the GGUF reader's progress bar.
    with quiet_transformers(), contextlib.redirect_stderr(io.StringIO()):
        model = AutoModelForCausalLM.from_pretrained(
            source,
            gguf_file=embedded.GGUF,
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.float32,
        )
        torch.nn.Module.to(model, torch.bfloat16)
        model.save_pretrained(target)
        AutoTokenizer.from_pretrained(source, gguf_file=embedded.GGUF).save_pretrained(target)


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Suppresses transformers' progress bars and warnings inside a `with` block."""
    from transformers.utils import logging

    bars: Any = logging  # its functions carry no types
    shown, level = bars.is_progress_bar_enabled(), bars.get_verbosity()
    bars.disable_progress_bar()
    bars.set_verbosity_error()
    try:
        yield
    finally:
        bars.set_verbosity(level)
        if shown:
            bars.enable_progress_bar()


def _from_hub(name: str, revision: str | None) -> str:
    """A hub model's snapshot folder: from the cache, else downloaded.

    First asks the hub once with a short time limit, so that without a network the error comes
    within seconds.
    """
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    patterns = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model", "*.py"]
    try:
        # Without a complete snapshot of this revision transformers would not start either.
        folder = snapshot_download(
            name, revision=revision, local_files_only=True, allow_patterns=patterns
        )
        if any(Path(folder).glob("*.safetensors")):
            return str(folder)
    except (LocalEntryNotFoundError, HFValidationError):
        pass
    advice = f"give a local checkpoint folder, or the embedded {EMBEDDED!r}"
    try:
        HfApi().model_info(name, revision=revision, timeout=_HUB_TIMEOUT_S)
        return str(snapshot_download(name, revision=revision, allow_patterns=patterns))
    except GatedRepoError as error:
        raise KnockoutError(
            f"model {name!r} is gated on the hub: accept its terms there and log in "
            f"(`hf auth login`), or {advice}"
        ) from error
    except (RepositoryNotFoundError, RevisionNotFoundError, HFValidationError) as error:
        at = f" at revision {revision!r}" if revision else ""
        raise UsageError(
            f"model {name!r}{at} is neither a folder here nor a model on the hub (a private one "
            f"needs `hf auth login`): {advice}"
        ) from error
    except OfflineModeIsEnabled as error:
        raise KnockoutError(
            f"model {name!r} is not in the local hub cache, and HF_HUB_OFFLINE is set: unset it, or "
            f"{advice}"
        ) from error
    except Exception as error:  # the hub's HTTP library has its own exceptions
        raise KnockoutError(
            f"model {name!r} is not a folder here, and the hub did not give it "
            f"({type(error).__name__}: {error}): check the network, or {advice}"
        ) from error


def load_tokenizer(path: str | Path, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Loads a checkpoint folder's tokenizer.

    Args:
        path: What `resolve_model` returned.
        trust_remote_code: Whether code inside the folder may run.

    Raises:
        KnockoutError: The folder has no tokenizer that can be loaded.
    """
    from transformers import AutoTokenizer

    try:
        with quiet_transformers():
            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
                path, trust_remote_code=trust_remote_code
            )
    except (OSError, ValueError, KeyError) as error:
        raise KnockoutError(f"no tokenizer can be loaded from {path}: {error}") from error
    return tokenizer


def eos_token_ids(path: str | Path, tokenizer: Any) -> tuple[int, ...]:
    """The ids that a checkpoint declares as ending a text.

    These are the tokenizer's and those of the generation config (of the config, if there is no
    generation config). `knockout.tokens.eos.stop_ids` adds the chat template's.

    Args:
        path: Checkpoint folder.
        tokenizer: Its tokenizer, or None.

    Returns:
        Ascending ids; empty if the model has none.
    """
    declared: Any = None
    for name in ("generation_config.json", "config.json"):
        file = Path(path) / name
        if declared is None and file.is_file():
            content = json.loads(file.read_text(encoding="utf-8"))
            declared = content.get("eos_token_id")
            if declared is None and isinstance(content.get("text_config"), dict):
                declared = content["text_config"].get("eos_token_id")
    found = {declared} if isinstance(declared, int) else set(declared or ())
    own = getattr(tokenizer, "eos_token_id", None)
    if own is not None:
        found.add(int(own))
    return tuple(sorted(found))
