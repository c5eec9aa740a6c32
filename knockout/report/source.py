"""Opening a run directory for its report."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from knockout.config.file import load_sweep
from knockout.config.sweep import Sweep
from knockout.errors import KnockoutError
from knockout.ledger import Ledger, Session
from knockout.report.tables import CellTable, ForkTable, cell_tables, fork_table
from knockout.report.tokens import TokenTexts
from knockout.sweep.summary import summarise

__all__ = ["FastTokenizer", "RunView", "open_texts", "read_run"]


@dataclass(frozen=True, slots=True)
class RunView:
    """A run's state at one moment, without tokens.

    Attributes:
        folder: The run directory.
        sweep: What it ran with.
        rows: The verdict table, one mapping a row.
        summary: The content of `summary.json`, counted now.
        cells: Baselines of each benchmark.
        forks: All forks.
        sessions: Of each session its start (UTC), duration in seconds and record.
        identity_hash: What the run is.
    """

    folder: Path
    sweep: Sweep
    rows: list[dict[str, Any]]
    summary: dict[str, Any]
    cells: list[CellTable]
    forks: ForkTable
    sessions: list[Session]
    identity_hash: str


def open_ledger(folder: Path) -> Ledger:
    """Opens a run's ledger for reading.

    Raises:
        UsageError: There is no run.
    """
    return Ledger.open(folder / "run.db")


def read_run(folder: Path, ledger: Ledger) -> RunView:
    """Reads what the report shows of a run, finished or not.

    Raises:
        UsageError: There is no run, or its `config.yaml` is missing or damaged.
    """
    from knockout.sweep.results import verdict_table

    sweep = load_sweep(folder / "config.yaml")
    cells = cell_tables(ledger)
    rows: list[dict[str, Any]] = []
    if any(cell.there.any() for cell in cells):
        frame = verdict_table(ledger, sweep.verdict)
        rows = [{str(k): v for k, v in row.items()} for row in frame.to_dict("records")]
    return RunView(
        folder=folder,
        sweep=sweep,
        rows=rows,
        summary=summarise(ledger, sweep),
        cells=cells,
        forks=fork_table(ledger, cells),
        sessions=ledger.sessions(),
        identity_hash=ledger.meta().get("identity_hash", ""),
    )


def open_texts(sweep: Sweep, ledger: Ledger) -> TokenTexts:
    """The run's token texts: by its tokenizer, or if that is gone by the texts in the ledger.

    Reads local files only: a report must not download a model.
    """
    special = ledger.meta_json("special_ids", [])
    known = {
        token: text
        for candidate in ledger.candidates
        for token, text in zip(candidate.token_ids, candidate.tokens, strict=True)
    }
    try:
        tokenizer = _local_tokenizer(sweep)
    except (KnockoutError, OSError, ValueError):
        tokenizer = None
    return TokenTexts(tokenizer, special, known)


def _local_tokenizer(sweep: Sweep) -> Any:
    from knockout.tokens.checkpoint import EMBEDDED, load_tokenizer, resolve_model

    if sweep.model.lower() == EMBEDDED or Path(sweep.model).is_dir():
        folder = resolve_model(sweep.model)
    else:
        from huggingface_hub import snapshot_download

        patterns = ["*.json", "*.jinja", "*.txt", "*.model", "*.py"]
        folder = str(
            snapshot_download(
                sweep.model,
                revision=sweep.revision,
                local_files_only=True,
                allow_patterns=patterns,
            )
        )
    if (Path(folder) / "tokenizer.json").is_file():
        return FastTokenizer(Path(folder))
    return load_tokenizer(folder, trust_remote_code=sweep.trust_remote_code)


class FastTokenizer:
    """The methods of a tokenizer that a report needs, without importing transformers (seconds).

    Args:
        folder: A checkpoint folder with a `tokenizer.json`.
    """

    def __init__(self, folder: Path) -> None:
        from tokenizers import Tokenizer

        self._core = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._core.no_truncation()
        self._core.no_padding()

    def __len__(self) -> int:
        return int(self._core.get_vocab_size(with_added_tokens=True))

    def convert_ids_to_tokens(self, token: int) -> str | None:
        """The vocabulary's own piece."""
        piece: str | None = self._core.id_to_token(token)
        return piece

    def decode(self, ids: list[int], skip_special_tokens: bool = False, **_: Any) -> str:
        """The text of ids."""
        return str(self._core.decode(ids, skip_special_tokens=skip_special_tokens))

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """The ids of a text."""
        return list(self._core.encode(text, add_special_tokens=add_special_tokens).ids)
