"""The errors that speak to a user: what was found, what was expected, what to do."""

from __future__ import annotations

__all__ = ["KnockoutError", "UsageError"]


class KnockoutError(Exception):
    """Something failed that the user can act on; the command line prints it without a traceback.

    The message says what was found, where (file, key, row) and what to do.
    """

    exit_code = 1


class UsageError(KnockoutError):
    """The request itself was wrong: a bad key, an id outside the vocabulary, a missing file."""

    exit_code = 2
