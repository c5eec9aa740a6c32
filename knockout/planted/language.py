"""The language of the planted model: arithmetic in steps, and what each of its tokens does.

A problem is a chain of operations on digits, read from left to right without precedence:
`solve 7 + 5 max 9 :`, answer 9. A response goes through it in steps, for example

    go steady now um 7 + 5 = 4 wait 2 2 max 9 = 9 so ans 9

and its grade is that of the digit after `ans`. Roles, by construction:

* a *marker* corrects a slip of its operation (`wait 2` after 7 + 5 = 4): a pillar, the stronger the
  more often its operation slips. An operation with two markers uses either, so each alone is
  neutral, and both together are a pillar;
* `guess` and the *lost* words lead to a random answer: stumbling blocks;
* a *finisher* announces the answer. The model uses any of them; only without all of them does it
  have to take a lost word;
* `steady` does nothing but take the place in which an accident (`blur`) could happen;
* `leap` is a shortcut that goes wrong on hard problems (those that start with a certain digit),
  and spares an accident (`trip`) on the others: its ban helps a few problems much and hurts many a
  little;
* *fillers* do nothing, and *unused* words never occur.
"""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from knockout.errors import UsageError
from knockout.files import write_text

__all__ = ["FUNCTIONS", "Language", "Operation", "grade", "load_language", "problems"]

FUNCTIONS: dict[str, Callable[[int, int], int]] = {
    "+": lambda a, b: (a + b) % 10,
    "-": lambda a, b: (a - b) % 10,
    "*": lambda a, b: (a * b) % 10,
    "max": max,
    "min": min,
    "gap": lambda a, b: abs(a - b),
    "mix": lambda a, b: (a + 2 * b) % 10,
}
"""What the operations of any planted language compute; digits in, a digit out."""

_DIGITS = tuple("0123456789")


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation of the language.

    Attributes:
        symbol: Its token, a key of `FUNCTIONS`.
        slip: Chance that a step of it first comes out wrong.
        markers: Tokens of which one, at random, follows a slip and is followed by the right digit.
    """

    symbol: str
    slip: float
    markers: tuple[str, ...]


def _operations() -> tuple[Operation, ...]:
    return (
        Operation("+", 0.30, ("wait",)),
        Operation("-", 0.15, ("hmm",)),
        Operation("*", 0.10, ("actually",)),
        Operation("max", 0.07, ("no",)),
        Operation("min", 0.035, ("rather",)),
        Operation("gap", 0.20, ("oops", "ah")),
    )


_FILLERS = (
    "well um okay right like basically look see just er clearly indeed anyway simply mm "
    "honestly really fine yes sure obviously literally alright hey"
)


@dataclass(frozen=True, slots=True)
class Language:
    """What a planted model is trained on; `save` and `load_language` keep it as JSON.

    Attributes:
        operations: With equal chances in a problem.
        steps: Fewest and most operations of a problem.
        noticed: Chance that a slip is corrected.
        guess: Chance of `guess` instead of working.
        steady, blur: Chance of `steady`, and of the accident without it.
        leap, trip: Chance of `leap`, and of the accident without it.
        hard: Problems that start with one of these digits are hard: there a leap goes wrong, and
            no trip happens.
        finishers: Tokens that announce the answer, with equal chances.
        lost: Token to chance, of an answer at random announced by that token.
        fillers: From frequent to rare.
        filler: Chance of a filler before a step.
        filler_ratio: How much rarer each filler is than the one before it.
        unused: Words that never occur.
        order: Seed of the order of the vocabulary, so that an id tells nothing about a role.
    """

    operations: tuple[Operation, ...] = field(default_factory=_operations)
    steps: tuple[int, int] = (2, 4)
    noticed: float = 0.95
    guess: float = 0.12
    steady: float = 0.30
    blur: float = 0.06
    leap: float = 0.40
    trip: float = 0.12
    hard: str = "0"
    finishers: tuple[str, ...] = ("so", "thus")
    lost: Mapping[str, float] = field(default_factory=lambda: {"maybe": 0.03, "shrug": 0.012})
    fillers: tuple[str, ...] = tuple(_FILLERS.split())
    filler: float = 0.5
    filler_ratio: float = 0.75
    unused: tuple[str, ...] = ("zebra", "violin", "harbour")
    order: int = 0

    def __post_init__(self) -> None:
        for operation in self.operations:
            if operation.symbol not in FUNCTIONS or not operation.markers:
                raise UsageError(
                    f"operation {operation.symbol!r}: expected one of {', '.join(FUNCTIONS)}, "
                    "with at least one marker"
                )
        chances = {
            **{f"slip of {o.symbol}": o.slip for o in self.operations},
            **{name: getattr(self, name) for name in _CHANCES},
            **self.lost,
            "all lost words together": sum(self.lost.values()),
        }
        for name, value in chances.items():
            if not 0 <= value <= 1:
                raise UsageError(f"{name}: found {value}; expected a chance between 0 and 1")
        if not 1 <= self.steps[0] <= self.steps[1] <= 8:
            raise UsageError(f"steps: found {self.steps}; expected two numbers from 1 to 8, rising")
        if not (self.operations and self.finishers and self.lost and self.fillers):
            raise UsageError("operations, finishers, lost and fillers: expected at least one each")
        words = self.words
        twice = sorted({word for word in words if words.count(word) > 1})
        if twice or any(not word or len(word.split()) != 1 for word in words):
            raise UsageError(
                f"a word has one role and no spaces; found twice: {', '.join(twice) or 'none'}"
            )

    @property
    def words(self) -> tuple[str, ...]:
        """The vocabulary without special tokens, in the order of ids."""
        roles = [word for words in self.roles().values() for word in words]
        words = [*_STRUCTURE, *_DIGITS, *(o.symbol for o in self.operations), *roles]
        random.Random(f"order {self.order}").shuffle(words)
        return tuple(words)

    def roles(self) -> dict[str, tuple[str, ...]]:
        """Role to its words: what a sweep can knock out one by one."""
        return {
            "marker": tuple(o.markers[0] for o in self.operations if len(o.markers) == 1),
            "interchangeable marker": tuple(
                m for o in self.operations if len(o.markers) > 1 for m in o.markers
            ),
            "finisher": self.finishers,
            "guess": ("guess",),
            "lost": tuple(self.lost),
            "spares an accident": ("steady",),
            "accident": ("blur", "trip"),
            "helps some, hurts others": ("leap",),
            "filler": self.fillers,
            "unused": self.unused,
        }

    def problem(self, rng: random.Random) -> str:
        """A problem's text."""
        start = rng.choice(_DIGITS)
        steps = [
            f"{rng.choice(self.operations).symbol} {rng.choice(_DIGITS)}"
            for _ in range(rng.randint(*self.steps))
        ]
        return " ".join(["solve", start, *steps, ":"])

    def answer(self, problem: str) -> str:
        """A problem's right answer.

        Raises:
            UsageError: The text is no problem.
        """
        words = problem.split()
        start, steps = words[1:2], words[2:-1]
        symbols, digits = steps[::2], steps[1::2]
        if (
            words[:1] + words[-1:] != ["solve", ":"]
            or len(steps) % 2
            or not all(word in _DIGITS for word in start + digits)
            or not all(word in FUNCTIONS for word in symbols)
        ):
            raise UsageError(f"{problem!r} is no problem; expected such as 'solve 7 + 5 max 9 :'")
        value = int(start[0])
        for symbol, digit in zip(symbols, digits, strict=True):
            value = FUNCTIONS[symbol](value, int(digit))
        return str(value)

    def response(self, problem: str, rng: random.Random) -> str:
        """A response as the model should write it."""
        words = problem.split()
        steps = list(zip(words[2:-1:2], words[3:-1:2], strict=True))
        hard = words[1] in self.hard
        lost_answer = ["ans", rng.choice(_DIGITS)]
        if rng.random() < self.guess:
            return " ".join(["guess", *lost_answer])
        out = ["go"]
        if rng.random() < self.steady:
            out.append("steady")
        elif rng.random() < self.blur:
            return " ".join([*out, "blur", *lost_answer])
        out.append("now")
        if rng.random() < self.leap:
            out.append("leap")
            if hard:
                return " ".join([*out, *lost_answer])
        elif not hard and rng.random() < self.trip:
            return " ".join([*out, "trip", *lost_answer])
        value = words[1]
        for symbol, digit in steps:
            out += self._step(value, symbol, digit, rng)
            value = out[-1]
        which = rng.random()
        for word, chance in self.lost.items():
            if which < chance:
                return " ".join([*out, word, *lost_answer])
            which -= chance
        return " ".join([*out, rng.choice(self.finishers), "ans", value])

    def _step(self, value: str, symbol: str, digit: str, rng: random.Random) -> list[str]:
        operation = next(o for o in self.operations if o.symbol == symbol)
        right = str(FUNCTIONS[symbol](int(value), int(digit)))
        out = []
        if rng.random() < self.filler:
            weights = [self.filler_ratio**rank for rank in range(len(self.fillers))]
            out += rng.choices(self.fillers, weights=weights)
        out += [value, symbol, digit, "="]
        if rng.random() >= operation.slip:
            return [*out, right]
        out.append(rng.choice([d for d in _DIGITS if d != right]))
        return [*out, rng.choice(operation.markers), right] if rng.random() < self.noticed else out

    def save(self, path: Path) -> None:
        """Writes the language as JSON."""
        write_text(path, json.dumps(dataclasses.asdict(self), indent=1) + "\n")


_STRUCTURE = ("solve", ":", "go", "now", "=", "ans")
_CHANCES = ("noticed", "guess", "steady", "blur", "leap", "trip", "filler", "filler_ratio")


def load_language(path: Path) -> Language:
    """Reads a language; missing keys are as in the embedded one.

    Raises:
        UsageError: The file is no such JSON; the message names what is wrong.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: cannot be read as JSON: {error}") from error
    names = {f.name for f in dataclasses.fields(Language)}
    if not isinstance(found, dict) or set(found) - names:
        wrong = sorted(set(found) - names) if isinstance(found, dict) else type(found).__name__
        raise UsageError(f"{path}: found {wrong}; expected an object of {', '.join(sorted(names))}")
    try:
        return Language(**{name: _value(name, value) for name, value in found.items()})
    except (TypeError, AttributeError) as error:
        raise UsageError(f"{path}: {error}") from error


def _value(name: str, value: Any) -> Any:
    if name == "operations":
        return tuple(Operation(o["symbol"], o["slip"], tuple(o["markers"])) for o in value)
    return tuple(value) if isinstance(value, list) else value


def problems(language: Language, seed: int, n: int) -> Iterator[dict[str, str]]:
    """Fresh problems as records (id, question, answer); a seed's first ones are always the same.

    The shortest problems are few and repeat now and then, as in any sample from a finite set.
    """
    for index in range(n):
        question = language.problem(random.Random(f"problem {seed} {index}"))
        answer = language.answer(question)
        yield {"id": f"{seed}-{index}", "question": question, "answer": answer}


def grade(response: str, answer: str) -> int:
    """1 if the digit after the first `ans` is the answer, else 0."""
    words = response.split()
    place = words.index("ans") + 1 if "ans" in words else len(words)
    return int(words[place : place + 1] == [answer])
