"""One process at a time works on a run directory."""

from __future__ import annotations

import fcntl
import json
import os
import socket
from pathlib import Path

from knockout.errors import KnockoutError, UsageError

__all__ = ["RunLock", "filesystem_of", "is_network"]

_NETWORK = (
    "nfs",
    "cifs",
    "smb",
    "fuse",
    "9p",
    "lustre",
    "ceph",
    "beegfs",
    "gpfs",
    "afs",
    "glusterfs",
)


class RunLock:
    """Locks `run.lock`, which names the owner's host and process.

    The operating system's lock decides; it ends with its process, so a killed run leaves nothing to
    clean up. On a file system without locks the recorded process decides.
    """

    def __init__(self, directory: Path) -> None:
        self.path = directory / "run.lock"
        self._file: int | None = None

    def __enter__(self) -> RunLock:
        try:
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise KnockoutError(f"{self.path}: cannot be written: {error.strerror}") from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._refuse()
        except OSError:
            if self._recorded_holder_may_live():
                self._refuse()
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, json.dumps(_me()).encode(), 0)
        return self

    def __exit__(self, *error: object) -> None:
        if self._file is not None:
            os.ftruncate(self._file, 0)
            os.close(self._file)
            self._file = None

    def holder(self) -> str | None:
        """Which process works on the run directory now, or None; does not lock."""
        try:
            self._file = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            fcntl.flock(self._file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            found = self._holder()
            return f"process {found.get('pid', '?')} on {found.get('host', '?')}"
        except OSError:
            return None
        finally:
            os.close(self._file)
            self._file = None
        return None

    def _holder(self) -> dict[str, object]:
        assert self._file is not None
        try:
            holder = json.loads(os.pread(self._file, 4096, 0))
        except ValueError:
            return {}
        return holder if isinstance(holder, dict) else {}

    def _recorded_holder_may_live(self) -> bool:
        import psutil

        holder = self._holder()
        if not holder:
            return False
        pid = holder.get("pid")
        here = holder.get("host") == socket.gethostname()
        return not (here and isinstance(pid, int) and not psutil.pid_exists(pid))

    def _refuse(self) -> None:
        holder = self._holder()
        assert self._file is not None
        os.close(self._file)
        self._file = None
        who = f"process {holder.get('pid', '?')} on {holder.get('host', 'an unknown host')}"
        raise UsageError(
            f"{self.path.parent}: {who} is working on this run directory; "
            "wait for it, stop it, or give another --out"
        )


def _me() -> dict[str, object]:
    return {"host": socket.gethostname(), "pid": os.getpid()}


def filesystem_of(path: Path) -> str:
    """The type of the file system of a path, for example "ext4"; "" if unknown."""
    import psutil

    resolved = path.resolve()
    best, kind = -1, ""
    for part in psutil.disk_partitions(all=True):
        mount = Path(part.mountpoint)
        if resolved.is_relative_to(mount) and len(mount.parts) >= best:
            best, kind = len(mount.parts), part.fstype
    return kind


def is_network(kind: str) -> bool:
    """Whether a file system of this type may be shared between machines."""
    return kind.lower().startswith(_NETWORK)
