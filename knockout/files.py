"""Files that are written whole or not at all."""

from __future__ import annotations

import contextlib
import glob
import hashlib
import os
import re
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

__all__ = ["atomic_path", "write_text"]


_OLD_S = 24 * 3600.0
_open: set[Path] = set()


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yields a temporary file next to `path`, which replaces it if the block succeeds.

    Temporary files that a killed process left of the same path are removed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    _clear_left_over(path)
    descriptor, name = tempfile.mkstemp(
        dir=path.parent, prefix=f".{path.name}.{_host()}-{os.getpid()}-", suffix=path.suffix
    )
    os.close(descriptor)
    temporary = Path(name)
    _open.add(temporary)
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.chmod(0o666 & ~_umask())
        temporary.replace(path)
        _sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)
        _open.discard(temporary)


def _clear_left_over(path: Path) -> None:
    """Removes what no living process of this machine, nor of the last day, still writes."""
    own = re.compile(rf"\.{re.escape(path.name)}\.(?:(\w+)-(\d+)-)?\w{{8}}{re.escape(path.suffix)}")
    for other in path.parent.glob(f".{glob.escape(path.name)}.*"):
        found = own.fullmatch(other.name)
        if found is None or other in _open:
            continue
        with contextlib.suppress(OSError):  # somebody else was faster
            here = found[1] == _host()
            dead = here and (int(found[2]) == os.getpid() or not _lives(int(found[2])))
            if dead or time.time() - other.stat().st_mtime > _OLD_S:
                other.unlink()


def _host() -> str:
    return hashlib.blake2b(socket.gethostname().encode(), digest_size=4).hexdigest()


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def write_text(path: Path, text: str) -> None:
    """Writes a text file atomically."""
    with atomic_path(path) as temporary:
        file: IO[str]
        with temporary.open("w", encoding="utf-8", errors="backslashreplace", newline="\n") as file:
            file.write(text)


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current


def _sync_folder(folder: Path) -> None:
    """Makes the rename itself durable, if the system lets a folder be synced."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:
        pass
    finally:
        os.close(descriptor)
