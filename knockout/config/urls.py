"""Addresses of servers without the secrets that may stand in them."""

from __future__ import annotations

import re

__all__ = ["split_secret", "without_secrets"]

_USERINFO = re.compile(r"(?<=://)[^\s'\"]*@")


def without_secrets(text: str) -> str:
    """A text with the user and password of every address in it left out."""
    return _USERINFO.sub("", text)


def split_secret(url: str) -> tuple[str, tuple[str, str] | None]:
    """An address without its user and password, and these."""
    from urllib.parse import unquote

    found = _USERINFO.search(url)
    if found is None:
        return url, None
    user, _, password = found.group()[:-1].partition(":")
    return without_secrets(url), (unquote(user), unquote(password))
