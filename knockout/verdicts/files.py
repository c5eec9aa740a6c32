"""The verdict table as files; equal tables give equal bytes."""

from __future__ import annotations

import csv
import io
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from knockout.files import write_text

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["verdict_records", "write_verdicts"]


def verdict_records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """The rows as plain values for JSON: ten significant digits, None for what is missing."""
    return [
        {name: _plain(value) for name, value in zip(frame.columns, row, strict=True)}
        for row in frame.itertuples(index=False)
    ]


def write_verdicts(frame: pd.DataFrame, csv_path: Path, json_path: Path) -> None:
    """Writes both files, each whole or not at all.

    Numbers carry ten significant digits; a missing one is empty in CSV and null in JSON.
    """
    records = verdict_records(frame)
    table = io.StringIO()
    rows = csv.writer(table, lineterminator="\n")
    rows.writerow(frame.columns)
    rows.writerows([_cell(value) for value in record.values()] for record in records)
    write_text(csv_path, table.getvalue())
    body = ",\n".join(json.dumps(record, ensure_ascii=False) for record in records)
    write_text(json_path, f"[\n{body}\n]\n" if records else "[]\n")


def _plain(value: Any) -> Any:
    """A value for JSON: ten significant digits, None for NaN."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        return None if math.isnan(value) else float(f"{value:.10g}") + 0.0
    return value


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, list):
        return json.dumps(value, ensure_ascii=False)
    return f"{value:.10g}" if isinstance(value, float) else str(value)
