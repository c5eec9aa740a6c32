"""Records and grading of the local test tasks."""

from __future__ import annotations

from typing import Any

import datasets


def sums(**_: Any) -> dict[str, datasets.Dataset]:
    def rows(*pairs: tuple[int, int]) -> datasets.Dataset:
        return datasets.Dataset.from_list(
            [{"question": f"{a} + {b}?", "answer": f"Add them. #### {a + b}"} for a, b in pairs]
        )

    return {"train": rows((1, 1), (2, 2), (3, 3)), "test": rows((10, 20), (700, 800), (5, 4))}


def shares(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    target = doc["answer"].rpartition(" ")[2]
    hits = sum(c in results[0] for c in target)
    return {
        "share": hits / len(target),
        "first": float(results[0][:1] == target[0]),
        "acc": float(target in results[0]),
    }
