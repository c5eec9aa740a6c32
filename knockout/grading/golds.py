"""Gold answers, read once before anything is graded: in a process that a hostile one can only end."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass

from knockout.grading.grade import Grade
from knockout.grading.pool import GraderPool

__all__ = ["unreadable_golds"]

# Numbers and words that need no computing, and so no process.
_PLAIN = re.compile(
    r"[-+]?\d{1,15}(?:\.\d{1,15})?|-?\\d?frac\{\d{1,9}\}\{[1-9]\d{0,8}\}|(?:\\text\{)?[A-Za-z]{3,30}\}?"
)
_POLL_S = 0.01


@dataclass(frozen=True)
class _Check:
    """A grader whose grade says whether a gold answer can be graded against."""

    golds: tuple[str, ...]
    integer: bool

    def warm_up(self) -> None:
        from knockout.grading.maths import same_answer

        same_answer(gold="x+1", answer=r"\frac{2x+2}{2}")

    def grade(self, index: int, response: str | None, *, finished: bool) -> Grade:
        from knockout.grading.maths import check_gold

        why = check_gold(self.golds[index], integer=self.integer)
        return Grade(0, "error", why) if why else Grade(1, "ok")


@dataclass(frozen=True)
class _Named:
    name: str
    grader: _Check


def unreadable_golds(
    golds: Sequence[str],
    *,
    integer: bool = False,
    timeout_s: float = 5.0,
    memory_mb: int = 1024,
) -> dict[int, str]:
    """Returns index and reason of each gold answer that can be compared as text only.

    Args:
        golds: The gold answers.
        integer: Whether answers are whole numbers.
        timeout_s: Wall time for one of them.
        memory_mb: What reading them may take on top of imports, in MiB.
    """
    asked = sorted({g for g in golds if integer or not _PLAIN.fullmatch(g)})
    reasons: dict[str, str] = {}
    if integer:  # these are read, never computed
        check = _Check(tuple(asked), True)
        found = {str(i): check.grade(i, None, finished=True) for i in range(len(asked))}
    else:
        found = _in_a_process(asked, timeout_s, memory_mb)
    for key, grade in found.items():
        if not grade.correct:
            why = "reading it takes too long" if grade.status == "timeout" else grade.extracted
            reasons[asked[int(key)]] = why or "it cannot be read"
    return {i: reasons[gold] for i, gold in enumerate(golds) if gold in reasons}


def _in_a_process(golds: list[str], timeout_s: float, memory_mb: int) -> dict[str, Grade]:
    if not golds:
        return {}
    check = _Named("golds", _Check(tuple(golds), False))
    found: dict[str, Grade] = {}
    with GraderPool([check], workers=1, timeout_s=timeout_s, memory_mb=memory_mb) as pool:
        for i in range(len(golds)):
            pool.submit(str(i), "golds", i, "", True)
        while pool.n_open:
            found.update(pool.poll())
            time.sleep(_POLL_S)
    return found
