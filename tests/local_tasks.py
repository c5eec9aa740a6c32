"""Small lm-eval tasks with their own records, written into a folder for `--include_path`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

import knockout

IFEVAL = Path(__file__).parents[1].parent / "shared" / "data" / "ifeval.jsonl"
SUMS = [(3, 4), (10, 5), (7, 8), (2, 9), (6, 6)]


def _write(folder: Path, task: dict[str, Any]) -> None:
    (folder / f"{task['task']}.yaml").write_text(yaml.safe_dump(task, sort_keys=False))


def _records(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def write_tasks(folder: Path) -> Path:
    """local_sums (few-shot, filter, 24 tokens), local_repeats (4 repeats), local_choice, local_ifeval.

    The last one only where the real IFEval records are.
    """
    rows = [
        {
            "question": f"Tom has {a} apples and buys {b}. How many has he?",
            "answer": f"#### {a + b}",
        }
        for a, b in SUMS
    ]
    sums = {
        "task": "local_sums",
        "dataset_path": "json",
        "dataset_kwargs": {
            "data_files": {
                "train": _records(folder / "train.jsonl", rows[3:]),
                "test": _records(folder / "test.jsonl", rows[:3]),
            }
        },
        "output_type": "generate_until",
        "training_split": "train",
        "fewshot_split": "train",
        "test_split": "test",
        "num_fewshot": 2,
        "fewshot_config": {"sampler": "first_n"},
        "doc_to_text": "Question: {{question}}\nAnswer:",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {
            "until": ["Question:", "\n\n"],
            "do_sample": False,
            "max_gen_toks": 16,
        },
        "filter_list": [
            {
                "name": "last-number",
                "filter": [
                    {"function": "regex", "regex_pattern": "(-?[0-9]+)", "group_select": -1},
                    {"function": "take_first"},
                ],
            }
        ],
        "metric_list": [
            {
                "metric": "exact_match",
                "aggregation": "mean",
                "higher_is_better": True,
                "regexes_to_ignore": ["#### "],
            }
        ],
    }
    _write(folder, sums)
    repeats = {**sums, "task": "local_repeats", "num_fewshot": 0, "repeats": 4}
    repeats["generation_kwargs"] = {"until": ["Question:", "\n\n"], "max_gen_toks": 16}
    repeats["filter_list"] = [
        {
            "name": "all",
            "filter": [{"function": "take_first_k", "k": 1}, {"function": "take_first"}],
        }
    ]
    _write(folder, repeats)
    _write(
        folder,
        {
            "task": "local_choice",
            "dataset_path": "json",
            "dataset_kwargs": {
                "data_files": {
                    "test": _records(
                        folder / "choice.jsonl",
                        [{"q": "The sky is", "c": ["blue", "green", "loud"], "gold": 0}],
                    )
                }
            },
            "output_type": "multiple_choice",
            "test_split": "test",
            "num_fewshot": 0,
            "doc_to_text": "{{q}}",
            "doc_to_choice": "{{c}}",
            "doc_to_target": "gold",
            "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
        },
    )
    if IFEVAL.is_file():
        lines = IFEVAL.read_text().splitlines()
        short = sorted(range(len(lines)), key=lambda i: len(json.loads(lines[i])["prompt"]))[:3]
        path = folder / "ifeval.jsonl"
        path.write_text("".join(lines[i] + "\n" for i in sorted(short)))
        _write(
            folder,
            {
                "include": str(Path(knockout.__file__).parent / "tasks" / "knockout_ifeval.yaml"),
                "task": "local_ifeval",
                "dataset_path": "json",
                "dataset_name": None,
                "dataset_kwargs": {"data_files": {"train": str(path)}},
                "generation_kwargs": {"until": [], "do_sample": False, "max_gen_toks": 24},
            },
        )
    return folder
