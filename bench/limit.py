"""How close forks come to the limit: tokens after the fork over tokens after the true divergence.

    python -m bench limit [FOLDER]

A baseline watches some 210 bans: 200 of the commonest tokens, and some 23 that are measured, sets
of up to 1,000 among them. Each of these is also run from scratch, which says where it truly
diverges, and forked where the baseline told, which says what a fork costs. FOLDER (runs/limit by default) keeps what is done, so that the
same command goes on after an interruption.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from bench.machine import write
from knockout.engines.base import Completion, Engine, Request, generate
from knockout.engines.open import open_engine
from knockout.method.interventions import Intervention, ban
from knockout.method.sampling import Sampling

SETTINGS = {
    "T 0.6, top_p 0.95": Sampling(0.6, top_p=0.95),
    "T 1, top_p 0.95": Sampling(1.0, top_p=0.95),
    "T 1, top_p 0.9": Sampling(1.0, top_p=0.9),
    "T 1.5, min_p 0.05": Sampling(1.5, min_p=0.05),
    "T 2, top_p 0.99": Sampling(2.0, top_p=0.99),
    "greedy": Sampling(0),
    "T 1": Sampling(1.0),
    "T 1, top_k 20": Sampling(1.0, top_k=20),
    "T 0.8, top_p 0.95, top_k 20": Sampling(0.8, top_p=0.95, top_k=20),
    "T 0.6, top_p 0.95, top_k 20": Sampling(0.6, top_p=0.95, top_k=20),
}
ENGINES = ("vllm", "transformers")
QUESTIONS = (
    "Explain in a short paragraph why the sky is blue.",
    "Tom has 17 marbles and buys 25 more. He gives 8 away. How many are left?",
)
TOKENS = 64
COMMON = range(250, 450)
"""Of SmolLM2's vocabulary the first merges, its commonest tokens."""
# , . new line " the" " in" " of" " and" " to" " is" " for"
FREQUENT = (28, 30, 198, 260, 281, 282, 284, 288, 314, 327)


def main(folder: str = "runs/limit") -> None:
    """Runs what is missing and writes bench/results/limit.json after each engine."""
    place = Path(folder) / "units.jsonl"
    place.parent.mkdir(parents=True, exist_ok=True)
    units = [json.loads(line) for line in place.read_text().splitlines()] if place.exists() else []
    there = {(u["engine"], u["setting"], u["prompt"]) for u in units}
    for kind in ENGINES:
        todo = [
            (number, name)
            for number in range(len(QUESTIONS))
            for name in SETTINGS
            if (kind, name, number) not in there
        ]
        if not todo:
            continue
        engine = open_engine("smollm2-135m", kind=kind, dtype="float32", max_model_len=512)
        for number, name in todo:
            found = unit(engine, number, SETTINGS[name])
            units.append({"engine": kind, "setting": name, "prompt": number, **found})
            with place.open("a") as file:
                file.write(json.dumps(units[-1]) + "\n")
            print(kind, name, number, flush=True)
        engine.close()
        report(units)
    report(units)


def candidates(tokens: list[int]) -> list[Intervention]:
    """The measured bans of one baseline.

    Ten frequent tokens and two others, four that it emits, and sets of 5, 50 and 1,000: one that it
    emits among others at random, and 1,000 at random.
    """
    rng = np.random.default_rng(20)

    def emitted(step: int) -> int:
        return tokens[min(step, len(tokens) - 1)]

    def with_others(size: int, last: int, *own: int) -> list[int]:
        others = rng.choice(np.arange(250, last), size, replace=False).tolist()
        return [*own, *(t for t in others if t not in own)][:size]

    sets = [[token] for token in (*FREQUENT, 5847, 12004)]
    sets += [[emitted(step)] for step in (8, 25, 40, 55)]
    sets += [with_others(5, 2000, emitted(step)) for step in (15, 30, 45)]
    sets += [with_others(50, 10000, emitted(step)) for step in (20, 50)]
    sets += [with_others(1000, 49000, emitted(35)), with_others(1000, 49000)]
    return list(dict.fromkeys(ban(tuple(sorted(set(ids)))) for ids in sets))


def unit(engine: Engine, number: int, sampling: Sampling) -> dict[str, Any]:
    """One prompt under one setting: a row for each measured ban."""
    prompt = engine.tokenizer.apply_chat_template(  # type: ignore[attr-defined]
        [{"role": "user", "content": QUESTIONS[number]}],
        add_generation_prompt=True, return_dict=False,
    )  # fmt: skip
    bare = Request(
        key="baseline", prompt=tuple(prompt), seed=7000 + number, sampling=sampling,
        max_tokens=TOKENS,
    )  # fmt: skip
    plain = run(engine, [bare])["baseline"].tokens
    measured = candidates(plain.tolist())
    watch = tuple(dict.fromkeys([*measured, *(ban((t,)) for t in COMMON)]))
    told = run(engine, [replace(bare, watch=watch)])["baseline"]
    if not np.array_equal(told.tokens, plain):
        raise SystemExit("the baseline is another when it watches")
    assert told.changes is not None
    assert told.early is not None
    fulls = run(
        engine,
        [replace(bare, key=str(n), intervention=one) for n, one in enumerate(measured)],
    )
    steps = told.changes.tolist()
    forks = run(
        engine,
        [
            replace(
                bare, key=str(n), intervention=one, prefix=tuple(told.tokens[: steps[n]].tolist())
            )
            for n, one in enumerate(measured)
            if steps[n] >= 0
        ],
    )
    rows = []
    for n, one in enumerate(measured):
        full, fork = fulls[str(n)].tokens, forks.get(str(n))
        truth = first_difference(told.tokens, full)
        answer = told.tokens if fork is None else fork.tokens
        rows.append(
            {
                "ids": len(one.token_ids),
                "told": steps[n],
                "truth": truth,
                "overflow": bool(told.early[n]),
                "after_fork": 0 if fork is None else fork.n_generated,
                "after_divergence": len(full) - truth if truth >= 0 else 0,
                "equal": np.array_equal(answer, full),
            }
        )
    others = told.changes[len(measured) :] >= 0
    return {
        "tokens": len(told.tokens),
        "watched": len(watch),
        "others_forked": int(others.sum()),
        "others_overflow": int((others & told.early[len(measured) :]).sum()),
        "rows": rows,
    }


def run(engine: Engine, requests: list[Request]) -> dict[str, Completion]:
    """The completions by key; a failed one ends the measurement."""
    found = {done.key: done for done in generate(engine, requests)}
    if errors := [done.error for done in found.values() if done.finish == "error"]:
        raise SystemExit(f"a request failed: {errors[0]}")
    return found


def first_difference(one: np.ndarray, other: np.ndarray) -> int:
    """The first place at which two trajectories differ, −1 where they are equal."""
    n = min(len(one), len(other))
    places = np.flatnonzero(one[:n] != other[:n])
    if len(places):
        return int(places[0])
    return -1 if len(one) == len(other) else n


def report(units: list[dict[str, Any]]) -> None:
    """Adds up and writes bench/results/limit.json."""
    table: dict[str, dict[str, Any]] = {}
    for kind in ENGINES:
        for name in SETTINGS:
            some = [u for u in units if (u["engine"], u["setting"]) == (kind, name)]
            if some:
                table.setdefault(kind, {})[name] = counts(some)
    write(
        "limit",
        {
            "command": "python -m bench limit",
            "model": "smollm2-135m, float32",
            "prompts": len(QUESTIONS),
            "max_tokens": TOKENS,
            "settings": {name: asdict(s) for name, s in SETTINGS.items()},
            "done": f"{len(units)} of {len(ENGINES) * len(SETTINGS) * len(QUESTIONS)}",
            "engines": table,
        },
    )


def counts(units: list[dict[str, Any]]) -> dict[str, Any]:
    """Ratios by size of the set, and how many forks were late or early."""
    rows = [row for u in units for row in u["rows"]]
    by_size = {}
    for size in sorted({row["ids"] for row in rows}):
        by_size[str(size)] = ratio(row for row in rows if row["ids"] == size)
    early = [
        row for row in rows if 0 <= row["told"] < (row["truth"] if row["truth"] >= 0 else TOKENS)
    ]
    return {
        "ratio": ratio(rows),
        "ratio_by_ids": by_size,
        "knockouts": len(rows),
        "forks": sum(row["told"] >= 0 for row in rows),
        "late": sum(row["truth"] >= 0 and not 0 <= row["told"] <= row["truth"] for row in rows),
        "early_more_than_fit": sum(row["overflow"] for row in early),
        "early_otherwise": sum(not row["overflow"] for row in early),
        "unequal_to_full_runs": sum(not row["equal"] for row in rows),
        "other_forks": sum(u["others_forked"] for u in units),
        "other_forks_more_than_fit": sum(u["others_overflow"] for u in units),
        "tokens_after_fork": sum(row["after_fork"] for row in rows),
        "tokens_after_divergence": sum(row["after_divergence"] for row in rows),
    }


def ratio(rows: Iterator[dict[str, Any]] | list[dict[str, Any]]) -> float | None:
    """Tokens after forks over tokens after true divergences; None where nothing diverges."""
    some = list(rows)
    limit = sum(row["after_divergence"] for row in some)
    return round(sum(row["after_fork"] for row in some) / limit, 4) if limit else None
