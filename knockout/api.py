"""For notebooks and scripts: sweeps that run, and runs as pandas frames.

from knockout import Sweep, load_run

run = Sweep.load("sweep.yaml").run("runs/first")
run.verdicts()
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from knockout.config.sweep import Sweep as _Sweep
from knockout.errors import UsageError, shortened
from knockout.ledger import INHERITED, NOT_ASKED, CellKey, Ledger

if TYPE_CHECKING:
    import pandas as pd

    from knockout.report.plots import Plots

__all__ = ["Run", "Sweep", "load_run"]

BASELINE = "baseline"


class Sweep(_Sweep):
    """A sweep, with the keys of a sweep file as arguments (see docs/sweep-file.md).

    Relative paths given here are relative to the working directory.

    Example:
        >>> sweep = Sweep(
        ...     model="smollm2-135m",
        ...     benchmarks=["knockout_starter_arithmetic"],
        ...     candidates={"strings": [" the"]},
        ...     seeds=2,
        ... )
        >>> sweep.sampling.temperature
        0.6
    """

    def __init__(self, **values: Any) -> None:
        """Takes the keys of a sweep file, and what a notebook has at hand.

        Args:
            **values: As in a sweep file. `candidates` may also be a path, a list or array of token
                ids or texts, or a table with a column of ids; `benchmarks` one name. Numbers and
                arrays may be NumPy's.

        Raises:
            UsageError: A key is unknown, or a value is wrong.
        """
        from pydantic import ValidationError

        from knockout.config.file import complaints
        from knockout.config.python import plain_values

        try:
            super().__init__(**plain_values(values))
        except ValidationError as error:
            raise UsageError(complaints(error, "Sweep(...)")) from None

    @classmethod
    def load(cls, path: str | Path, *sets: str) -> Self:
        """Reads a sweep file.

        Args:
            path: The YAML file; relative paths in it are relative to its folder.
            *sets: Values put over the file's, such as "seeds=1" or "sampling.temperature=1.0".

        Raises:
            UsageError: The file is missing or wrong; the message names file, line and key.
        """
        from knockout.config.file import load_sweep

        loaded = load_sweep(Path(path), sets)
        return cls.model_validate(loaded.model_dump(exclude_unset=True))

    def _repr_html_(self) -> str:
        """What a notebook shows: the settings that differ from their defaults."""
        from html import escape

        given = self.model_dump(mode="json", exclude_defaults=True)
        rows = "".join(
            f"<tr><th style='text-align:left'>{escape(key)}</th>"
            f"<td style='text-align:left'>{escape(shortened(str(value)))}</td></tr>"
            for key, value in given.items()
        )
        return f"<p><strong>Sweep</strong></p><table>{rows}</table>"

    def run(self, out: str | Path, *, retry_failed: bool = True) -> Run:
        """Runs the sweep, or goes on with it; shows how far it is, in notebooks too.

        Args:
            out: The run directory. The same sweep and directory resume; another sweep is refused.
            retry_failed: Whether what the engine failed on is tried again.

        Returns:
            The finished run.

        Raises:
            UsageError: Something the sweep names is missing, or the directory is another sweep's.
            KnockoutError: The engine failed; what had finished is kept.
            Interrupted: It was stopped; what had finished is kept.
        """
        from knockout.config.libraries import quiet_libraries

        quiet_libraries()
        from knockout.sweep.run import run_sweep

        run_sweep(self, Path(out), retry_failed=retry_failed)
        return load_run(out)


def load_run(folder: str | Path) -> Run:
    """Opens a run directory, finished or still at work.

    Raises:
        UsageError: There is no run.
    """
    return Run(Path(folder))


class Run:
    """A run directory. Reads the ledger again at every call.

    Attributes:
        folder: The run directory.
        sweep: What it ran with.
    """

    def __init__(self, folder: Path) -> None:
        with Ledger.open(folder / "run.db"):
            self.folder = folder
            self.sweep = Sweep.load(folder / "config.yaml")

    def __repr__(self) -> str:
        return f"<Run {self.folder}: {self.sweep.model}>"

    @property
    def plot(self) -> Plots:
        """The run's figures: `run.plot.forest()`, `.volcano()`, `.frequency()` and others.

        Each returns an Altair chart, which a notebook shows.
        """
        from knockout.report.plots import Plots

        return Plots(self.folder)

    def report(
        self,
        out: str | Path | None = None,
        *,
        compare: Run | str | Path | None = None,
        picks: bool = False,
    ) -> Path:
        """Writes the HTML report.

        Args:
            out: The file; `report.html` in the run directory if not given.
            compare: Another run, or its directory, to be compared with this one on a page of its own.
            picks: Whether the probabilities at the forks are measured first, with the run's model.

        Returns:
            The file's path.

        Raises:
            UsageError: The runs have no benchmark or no candidate in common.
        """
        from knockout.report.build import build_report

        other = compare.folder if isinstance(compare, Run) else compare
        made = build_report(
            self.folder,
            None if out is None else Path(out),
            compare=None if other is None else Path(other),
            picks=picks,
        )
        return Path(made["path"])

    def _repr_html_(self) -> str:
        """What a notebook shows: the findings, and how many rows have which verdict."""
        from html import escape

        data = self.plot.data if self.summary()["cells_done"] else None
        if data is None:
            return f"<p>{escape(repr(self))}: nothing has finished yet</p>"
        said = data["findings"]
        lines = "".join(f"<li>{escape(text)}</li>" for text in (*said["context"], said["cost"]))
        return f"<p><strong>{escape(said['headline'])}</strong></p><ul>{lines}</ul>"

    def export(
        self,
        out: str | Path | None = None,
        *,
        format: Literal["ids", "json", "yaml", "csv", "parquet"] = "ids",
        verdicts: Collection[str] = (),
        evidence: Collection[str] = (),
        rule: str | None = None,
        benchmark: str | None = None,
        across: Literal["overall", "any", "all"] = "overall",
        group: Literal["candidate", "control"] = "candidate",
        freeze_list: str | Path | None = None,
        top: int | None = None,
        by: str = "delta",
        scores: str | Path | None = None,
        special: bool = False,
    ) -> list[int]:
        """Chooses token ids for training, as `knockout export` does; warns where some are undetermined.

        Args:
            out: A file to write as well.
            format: Of that file.
            verdicts: "strong_pillar", "strong_stumbling_block", "neutral"; all if empty.
            evidence: "effect", "equivalent", "undetermined"; all if empty.
            rule: Instead of the run's own.
            benchmark: Judges by this one alone.
            across: "overall", or the wanted verdict on "any" or "all" benchmarks.
            group: Candidates or controls.
            freeze_list: A file of mined tokens: those of them that are neither pillars nor
                undetermined.
            top: The first N only.
            by: What `top` ranks by: "delta", "p_value", "p_adjusted", or a column of `scores`.
            scores: Token scores of `mine`.
            special: Whether candidates that contain special tokens are kept.

        Returns:
            The token ids, rising, without repeats.

        Raises:
            UsageError: A value is unknown or does not go with another.
        """
        import warnings

        from knockout.sweep.lists import choose, write_list

        known = ("ids", "json", "yaml", "csv", "parquet")
        if format not in known:
            raise UsageError(f"format: found {format!r}; expected one of {', '.join(known)}")
        chosen = choose(
            self.folder,
            verdicts=[verdicts] if isinstance(verdicts, str) else verdicts,
            evidence=[evidence] if isinstance(evidence, str) else evidence,
            rule=rule,
            benchmark=benchmark,
            across=across,
            group=group,
            special=special,
            rocks=None if freeze_list is None else Path(freeze_list),
            top=top,
            by=by,
            scores=None if scores is None else Path(scores),
        )
        for note in chosen.notes:
            if note.startswith("warning: "):
                warnings.warn(note.removeprefix("warning: "), UserWarning, stacklevel=2)
        if out is not None:
            write_list(chosen, format, Path(out))
        return chosen.token_ids

    def confirm(
        self,
        out: str | Path | None = None,
        *,
        candidates: Collection[str] = (),
        verdicts: Collection[str] = (),
        joint: Sequence[str] | None = None,
        seeds: int | None = None,
        split: bool = False,
    ) -> pd.DataFrame:
        """Tests the run's choice again, as `knockout confirm` does; generates unless `split`.

        Args:
            out: The new run's directory; `confirm` (or `split`) in the run directory if not given.
            candidates: Names to test; with `verdicts` both count. Without either: pillars and
                stumbling blocks.
            verdicts: Candidates called so by either rule.
            joint: Lists that are banned at once, "NAME=all", "NAME=verdict:V", "NAME=evidence:E" or
                "NAME=FILE" each; () for none, None for all neutrals and all candidates.
            seeds: Repeats; as many as the run had if not given.
            split: Generates nothing: chooses on one half of the problems, estimates on the other.

        Returns:
            A row for each benchmark and candidate, with the columns of `confirm.csv`: the first
            estimate, the fresh one, and whether it was confirmed. `attrs` has the counts and notes
            of `confirm.json`.

        Raises:
            UsageError: The run is unfinished, a name is missing, or nothing is chosen.
            KnockoutError: The engine failed; what had finished is kept.
        """
        import pandas as pd

        from knockout.sweep.confirm import COMPARED
        from knockout.sweep.confirmed import confirm_on_fresh_seeds, confirm_on_other_half

        if split:
            if joint or seeds is not None:
                raise UsageError("confirm: split generates nothing; leave joint and seeds")
            folder = self.folder / "split" if out is None else Path(out)
            found = confirm_on_other_half(
                self.folder, folder, candidates=candidates, verdicts=verdicts
            )
        else:
            folder = self.folder / "confirm" if out is None else Path(out)
            found = confirm_on_fresh_seeds(
                self.folder,
                folder,
                candidates=candidates,
                verdicts=verdicts,
                joint=joint,
                seeds=seeds,
            )
        frame = pd.DataFrame(found.pop("rows"), columns=list(COMPARED))
        frame.attrs |= found
        return frame

    def verdicts(
        self,
        *,
        rule: Literal["nominal", "fdr"] | None = None,
        alpha: float | None = None,
        margin: float | None = None,
    ) -> pd.DataFrame:
        """The verdict table: one row for each benchmark and candidate.

        Args:
            rule: Instead of the run's own; nothing is generated again.
            alpha: Error level, between 0 and 1, instead of the run's own.
            margin: Half-width of the range that counts as no effect, in Pass@1, likewise.

        Returns:
            The columns of `verdicts.json` (docs/outputs.md); proportions are in [0, 1].

        Raises:
            UsageError: A value is out of range.
        """
        from pydantic import ValidationError

        from knockout.config.sweep import VerdictRule
        from knockout.sweep.results import verdict_table

        given = {"rule": rule, "alpha": alpha, "margin": margin}
        values = self.sweep.verdict.model_dump() | {k: v for k, v in given.items() if v is not None}
        try:
            chosen = VerdictRule.model_validate(values)
        except ValidationError as error:
            first = error.errors()[0]
            raise UsageError(
                f"verdicts: {first['loc'][0]} is {first['input']!r}; {first['msg']}"
            ) from None
        with self._ledger() as ledger:
            return verdict_table(ledger, chosen)

    def interactions(self, *, alpha: float | None = None) -> pd.DataFrame:
        """What each pair of `candidates.pairs` does beyond what its members do alone.

        Args:
            alpha: Error level of the intervals, instead of the run's own.

        Returns:
            A row for each benchmark and pair: benchmark, pair, first, second, n_problems,
            delta_first, delta_second, delta_pair, interaction (Δ_AB − Δ_A − Δ_B, on cells with all
            four grades), ci_low, ci_high, p_value, p_adjusted (Benjamini-Hochberg over the pairs of
            the benchmark). No rows without pairs.
        """
        from knockout.ledger import grade_cubes
        from knockout.verdicts.interactions import build_interactions

        level = self.sweep.verdict.alpha if alpha is None else alpha
        if not 0 < level < 1:
            raise UsageError(f"interactions: alpha is {alpha!r}; expected between 0 and 1")
        with self._ledger() as ledger:
            return build_interactions(grade_cubes(ledger), level)

    def summary(self) -> pd.Series:
        """Counts of the run as they are now: the content of `summary.json`, by name."""
        import pandas as pd

        from knockout.sweep.summary import summarise

        with self._ledger() as ledger:
            return pd.Series(summarise(ledger, self.sweep), name=str(self.folder), dtype=object)

    def compare(self, other: Run, *, alpha: float = 0.05, **benchmarks: str) -> pd.DataFrame:
        """Compares this run with another, candidate by candidate; see `knockout compare`.

        Args:
            other: The other run; differences are its Δ less this one's.
            alpha: Level of intervals and of `supported`.
            **benchmarks: Which of its benchmarks each of these is compared with; by default those
                of the same name.

        Returns:
            A row for each benchmark and candidate; the columns are those of
            `knockout.sweep.compare.COMPARISON`.
        """
        from knockout.sweep.compare import compare_runs

        return compare_runs(self.folder, other.folder, benchmarks=benchmarks or None, alpha=alpha)

    def trajectories(
        self,
        *,
        benchmark: str | None = None,
        candidate: str | Collection[str] | None = None,
        inherited: bool = False,
        text: bool = True,
    ) -> pd.DataFrame:
        """Generated texts with their grades: one row for each trajectory.

        Args:
            benchmark: Of this one only.
            candidate: Baselines and the knockouts of these candidates; None for all candidates,
                () or "baseline" for the baselines alone.
            inherited: Whether knockouts that are their baseline get rows of their own.
            text: Whether to decode the tokens (loads the tokenizer).

        Returns:
            Columns: benchmark, doc_id, problem (row of the benchmark), seed, candidate ("baseline"
            for the untouched policy), kind ("baseline", "forked" or "inherited"), step (tokens
            shared with the baseline; missing for baselines and inherited), n_tokens (whole
            trajectory), finish ("stop" or "length"), correct (1, 0, or missing if it could not
            be graded), grade (the grader's status), tokens ((n_tokens,) int32), and text (without
            special tokens, not cut at stop strings).

        Raises:
            UsageError: No such benchmark or candidate.
        """
        import pandas as pd

        with self._ledger() as ledger:
            wanted = _indices(
                "benchmark",
                [b.name for b in ledger.benchmarks],
                None if benchmark is None else [benchmark],
            )
            names = [c.name for c in ledger.candidates]
            asked = [candidate] if isinstance(candidate, str) else candidate
            if asked is not None:  # baselines are there anyway
                asked = [name for name in asked if name != BASELINE]
            chosen = _indices("candidate", names, asked)
            rows = [row for b in wanted for row in _rows(ledger, b, chosen, inherited)]
        columns = [
            "benchmark", "doc_id", "problem", "seed", "candidate", "kind", "step", "n_tokens",
            "finish", "correct", "grade", "tokens",
        ]  # fmt: skip
        frame = pd.DataFrame(rows, columns=columns)
        frame = frame.astype({"step": "Int64", "correct": "Int64"})
        if text:
            decode = self._tokenizer.decode
            frame["text"] = [decode(ids, skip_special_tokens=True) for ids in frame["tokens"]]
        return frame

    @cached_property
    def _tokenizer(self) -> Any:
        from knockout.tokens.vocabulary import open_vocabulary

        return open_vocabulary(
            self.sweep.model,
            revision=self.sweep.revision,
            trust_remote_code=self.sweep.trust_remote_code,
        )[1]

    def _ledger(self) -> Ledger:
        return Ledger.open(self.folder / "run.db")


def _indices(what: str, names: list[str], wanted: Collection[str] | None) -> list[int]:
    if wanted is None:
        return list(range(len(names)))
    for name in wanted:
        if name not in names:
            raise UsageError(f"no {what} {name!r} in this run; it has {', '.join(names[:20])}")
    return [names.index(name) for name in wanted]


def _rows(ledger: Ledger, b: int, chosen: list[int], inherited: bool) -> list[tuple[Any, ...]]:
    """Rows of one benchmark, baselines before their knockouts."""
    benchmark = ledger.benchmarks[b].name
    forks = {(f.problem, f.seed, f.candidate): f[3:] for f in ledger.forks(b)}
    doc_ids = ledger.doc_ids(b)
    rows: list[tuple[Any, ...]] = []
    for p, s, finish, correct, grade, n, steps in ledger.cells(b, failed=False):
        place = (benchmark, doc_ids[p], p, s)
        key = CellKey(b, p, s)
        tokens = ledger.trajectory(key)
        own = (n, finish, correct, grade)
        rows.append((*place, BASELINE, "baseline", None, *own, tokens))
        for c in chosen:
            name = ledger.candidates[c].name
            if steps[c] == INHERITED and inherited:
                rows.append((*place, name, "inherited", None, *own, tokens))
            elif steps[c] not in (INHERITED, NOT_ASKED) and (p, s, c) in forks:
                step, *rest = forks[p, s, c]
                if rest[1] != "error":
                    rows.append((*place, name, "forked", step, *rest, ledger.trajectory(key, c)))
    return rows
