"""The errors that speak to a user: what was found, what was expected, what to do."""

from __future__ import annotations

__all__ = ["KnockoutError", "UsageError", "counted", "shortened", "shown"]


class KnockoutError(Exception):
    """Something failed that the user can act on; the command line prints it without a traceback.

    The message says what was found, where (file, key, row) and what to do.
    """

    exit_code = 1


class UsageError(KnockoutError):
    """The request itself was wrong: a bad key, an id outside the vocabulary, a missing file."""

    exit_code = 2


def counted(n: int, noun: str) -> str:
    """A number with its noun: "1 candidate", "1,131 problems"."""
    return f"{n:,} {noun}{'' if n == 1 else 's'}"


def shortened(text: str, most: int = 120) -> str:
    """A text for a message: cut if it is long, with its length in brackets.

    Example:
        >>> shortened("a" * 500, 4)
        'aaaa… (500 characters)'
    """
    return text if len(text) <= most else f"{text[:most]}… ({len(text):,} characters)"


def shown(value: object, most: int = 120) -> str:
    """A value for a message, as Python writes it, cut if it is long."""
    try:
        return shortened(repr(value), most)
    except (ValueError, RecursionError):  # a number of thousands of digits
        return f"a {type(value).__name__} too long to show"
