"""A run as lm-eval's own result files, so that scripts and dashboards for them read knockouts.

One folder for the baseline and one for each candidate, each laid out as an `--output_path` of
lm-eval: `<model>/results_<date>.json` and `<model>/samples_<task>_<date>.jsonl`.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from knockout.benchmarks import Problem
from knockout.config.sweep import Sweep
from knockout.errors import UsageError
from knockout.files import write_text
from knockout.ledger import INHERITED, NOT_ASKED, CellKey, Ledger
from knockout.sweep.prepare import Prepared, prepare
from knockout.tokens.eos import stop_ids
from knockout.tokens.thinking import response_text

__all__ = ["write_lm_eval"]

BASELINE = "baseline"


@dataclass(frozen=True, slots=True)
class _Outcome:
    """One graded trajectory."""

    seed: int
    step: int
    text: str
    finish: str
    correct: int | None
    status: str


def write_lm_eval(run: Path, sweep: Sweep, ledger: Ledger, out: Path) -> int:
    """Writes the files.

    A sample's metric is the mean over its graded seeds, and `resps` contains one response a seed;
    what lm-eval has no place for stands under the key `knockout` of each sample. Trajectories that
    are not there (a candidate that a race had settled, a failed request) are left out, and so are
    documents without any.

    Args:
        run: The run directory, for messages.
        sweep: What it ran with.
        ledger: Its ledger.
        out: The folder; made if need be. Files of an earlier export of the same run are replaced.

    Returns:
        The number of folders written.

    Raises:
        UsageError: The benchmarks' data are not those that the run was made with.
    """
    prepared = prepare(sweep)
    for benchmark, row in zip(prepared.benchmarks, ledger.benchmarks, strict=True):
        if benchmark.fingerprint != row.fingerprint:
            raise UsageError(
                f"{run}: the documents or prompts of {row.name} are not those of the run; "
                "put the data back that it was made with"
            )
    export = _Export(prepared, ledger)
    names: list[tuple[int | None, str]] = [(None, BASELINE)]
    names += [(i, _folder_name(i, c.name)) for i, c in enumerate(ledger.candidates)]
    for candidate, name in names:
        export.write(candidate, out / name)
    return len(names)


def _folder_name(index: int, candidate: str) -> str:
    """Unique, and safe in every file system."""
    shown = re.sub(r"[^A-Za-z0-9._-]+", "_", candidate).strip("._")
    return f"{index:04d}_{shown}"[:80].rstrip("_")


def _file_name(benchmark: str) -> str:
    """A task's name without what would lead out of the folder."""
    return re.sub(r"[/\\\0]+", "__", benchmark)


class _Export:
    """What all folders share."""

    def __init__(self, prepared: Prepared, ledger: Ledger) -> None:
        self.prepared, self.ledger, self.sweep = prepared, ledger, prepared.sweep
        self.eos = stop_ids(prepared.tokenizer, prepared.folder)
        self.model = re.sub(r"[\"<>:/|\\?*\[\]]+", "__", self.sweep.model)
        sessions = ledger.sessions()
        when = datetime.fromisoformat(sessions[0].started) if sessions else datetime.now(UTC)
        self.date = when.timestamp()
        # lm-eval's own form, so that scripts that read the date from the name find it.
        self.stamp = when.strftime("%Y-%m-%dT%H-%M-%S.%f")
        self.wall_s = ledger.wall_s()
        self.n = len(ledger.candidates)

    def write(self, candidate: int | None, folder: Path) -> None:
        results: dict[str, Any] = {
            "results": {}, "group_subtasks": {}, "configs": {}, "versions": {}, "n-shot": {},
            "higher_is_better": {}, "n-samples": {},
        }  # fmt: skip
        hashes = {}
        for b, benchmark in enumerate(self.prepared.benchmarks):
            samples = list(self._samples(b, candidate))
            lines = (
                json.dumps(s, ensure_ascii=False, default=str, allow_nan=False) for s in samples
            )
            path = folder / self.model / f"samples_{_file_name(benchmark.name)}_{self.stamp}.jsonl"
            write_text(path, "".join(f"{line}\n" for line in lines))
            hashes[benchmark.name] = _hash(
                "".join(s["doc_hash"] + s["prompt_hash"] + s["target_hash"] for s in samples)
            )
            self._aggregate(results, b, samples)
        results |= self._about(candidate)
        results["task_hashes"] = hashes
        text = json.dumps(results, indent=2, ensure_ascii=False, default=str, allow_nan=False)
        write_text(folder / self.model / f"results_{self.stamp}.json", text)

    def _samples(self, b: int, candidate: int | None) -> Iterator[dict[str, Any]]:
        benchmark = self.prepared.benchmarks[b]
        metric, _, filter_name = benchmark.metric.partition(",")
        found: dict[int, list[_Outcome]] = {}
        for index, outcome in self._outcomes(b, candidate):
            found.setdefault(index, []).append(outcome)
        for problem in benchmark.problems:
            outcomes = found.get(problem.index)
            if not outcomes:
                continue
            grades = [o.correct for o in outcomes if o.correct is not None]
            texts = [o.text for o in outcomes]
            target = str(next((problem.doc[k] for k in _TARGETS if k in problem.doc), ""))
            yield {
                "doc_id": problem.index,
                "doc": problem.doc,
                "target": target,
                "arguments": {
                    "gen_args_0": {
                        "arg_0": problem.prompt,
                        "arg_1": self._settings(b, problem, candidate),
                    }
                },
                "resps": [texts],
                "filtered_resps": texts if len(texts) == 1 else [texts],
                "filter": filter_name or "none",
                "metrics": [metric],
                "doc_hash": _hash(
                    json.dumps(problem.doc, indent=2, default=str, ensure_ascii=False)
                ),
                "prompt_hash": _hash(problem.prompt),
                "target_hash": _hash(target),
                metric: sum(grades) / len(grades) if grades else None,
                "knockout": {
                    "doc_id": problem.doc_id,
                    "seeds": [o.seed for o in outcomes],
                    "grades": [o.correct for o in outcomes],
                    "status": [o.status for o in outcomes],
                    "finish": [o.finish for o in outcomes],
                    "divergence_step": [None if o.step < 0 else o.step for o in outcomes],
                },
            }

    def _outcomes(self, b: int, candidate: int | None) -> Iterator[tuple[int, _Outcome]]:
        """Trajectories of one condition, by problem and seed."""
        forks: dict[tuple[int, int], tuple[str, int | None, str]] = {}
        if candidate is not None:
            rows = self.ledger.forks(b, candidate)
            forks = {(f.problem, f.seed): (f.finish, f.correct, f.grade) for f in rows}
        for problem, seed, finish, correct, grade, _, steps in self.ledger.cells(b):
            step = INHERITED
            if candidate is not None:
                step = int(steps[candidate])
                if step == NOT_ASKED or (step >= 0 and (problem, seed) not in forks):
                    continue
                if step >= 0:
                    finish, correct, grade = forks[problem, seed]
            if finish == "error":
                continue
            tokens = self.ledger.trajectory(CellKey(b, problem, seed), candidate)
            planned = self.prepared.plan.benchmarks[b].problems[problem]
            text = response_text(
                self.prepared.tokenizer, tokens, stop=planned.stop, eos_ids=self.eos,
                think_end=planned.think_end, opened=planned.think_open,
            )  # fmt: skip
            yield problem, _Outcome(seed, step, text, finish, correct, grade)

    def _settings(self, b: int, problem: Problem, candidate: int | None) -> dict[str, Any]:
        """The generation settings as `lm_eval --model vllm --gen_kwargs` takes them."""
        planned = self.prepared.plan.benchmarks[b]
        s = planned.sampling
        settings: dict[str, Any] = {
            "until": list(problem.stop),
            "do_sample": not s.greedy,
            "temperature": s.temperature,
            "top_p": s.top_p,
            "top_k": s.top_k,
            "min_p": s.min_p,
            "max_gen_toks": planned.problems[problem.index].max_tokens,
        }
        if candidate is not None:
            ids = list(self.ledger.candidates[candidate].token_ids)
            settings["extra_args"] = {"knockout_ids": ids}
        return settings

    def _aggregate(self, results: dict[str, Any], b: int, samples: list[dict[str, Any]]) -> None:
        """Adds a task's numbers: its standard error takes documents as the sampling unit."""
        benchmark = self.prepared.benchmarks[b]
        metric, _, filter_name = benchmark.metric.partition(",")
        values = np.array([s[metric] for s in samples if s[metric] is not None], dtype=float)
        n = len(values)
        key = filter_name or "none"
        results["results"][benchmark.name] = {
            "name": benchmark.name,
            "alias": benchmark.name,
            "sample_len": len(samples),
            f"{metric},{key}": float(values.mean()) if n else None,
            f"{metric}_stderr,{key}": (
                float(values.std(ddof=1) / math.sqrt(n)) if n > 1 else "N/A"
            ),
        }
        planned = self.prepared.plan.benchmarks[b]
        results["group_subtasks"][benchmark.name] = []
        results["configs"][benchmark.name] = {
            "task": benchmark.name,
            "output_type": "generate_until",
            "repeats": planned.n_seeds,
            "metric_list": [{"metric": metric, "higher_is_better": True}],
            "metadata": {"fingerprint": benchmark.fingerprint},
        }
        results["versions"][benchmark.name] = "N/A"
        entries = {entry.name: entry.num_fewshot for entry in self.sweep.benchmarks}
        results["n-shot"][benchmark.name] = entries.get(benchmark.name)
        results["higher_is_better"][benchmark.name] = {metric: True}
        total = len(benchmark.problems)
        results["n-samples"][benchmark.name] = {"original": total, "effective": len(samples)}

    def _about(self, candidate: int | None) -> dict[str, Any]:
        tokenizer, sweep = self.prepared.tokenizer, self.sweep
        banned = None if candidate is None else self.ledger.candidates[candidate]
        return {
            "config": {
                "model": "knockout",
                "model_args": {
                    "pretrained": sweep.model,
                    "knockout_ids": list(banned.token_ids) if banned else [],
                },
                "limit": sweep.limit,
                "gen_kwargs": sweep.sampling.model_dump(mode="json"),
                "random_seed": sweep.run_seed,
                "batch_sizes": [],
            },
            "knockout": {
                "candidate": banned.name if banned else None,
                "token_ids": list(banned.token_ids) if banned else [],
                "tokens": list(banned.tokens) if banned else [],
                "identity_hash": self.ledger.meta().get("identity_hash", ""),
            },
            "date": self.date,
            "model_source": "knockout",
            "model_name": sweep.model,
            "model_name_sanitized": self.model,
            "system_instruction": sweep.chat.system,
            "system_instruction_sha": _hash(sweep.chat.system) if sweep.chat.system else None,
            "fewshot_as_multiturn": self.prepared.chat.template,
            "chat_template": tokenizer.chat_template if self.prepared.chat.template else None,
            "total_evaluation_time_seconds": str(self.wall_s),
        }


_TARGETS = ("answer", "target", "solution")


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()
