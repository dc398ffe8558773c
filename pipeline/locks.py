"""Lock files: one process at a time holds a lock; a waiting process logs the holder's number, and
has a deadline.

The kernel frees a lock when its holder ends, even when it is killed. The library `filelock` does
not name the holder, and changes to another kind of lock on file systems without flock, where
callers here must decide.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, cast

import structlog

log = structlog.get_logger()

QUIET_SECONDS = 1.0  # a longer wait is logged
AGAIN_SECONDS = 0.05  # between two attempts: flock has no deadline of its own


class Locked(RuntimeError):
    """Another process holds a lock.

    ``process`` is its number, 0 when unknown; ``holder`` describes it for people.
    """

    def __init__(self, path: Path, process: int, waited: float) -> None:
        self.process = process
        self.holder = _named(process)
        duration = f" and did not free it for {waited:g} s" if waited else ""
        super().__init__(
            f"{path}: {self.holder} holds this lock{duration}; end that process, or "
            f"give another folder"
        )


@contextlib.contextmanager
def locked(path: Path, *, wait: float = 0.0) -> Iterator[None]:
    """Hold the lock file ``path``, waiting at most ``wait`` seconds.

    Raises Locked, or OSError when it is no plain file.
    """
    with take(path, wait=wait):
        yield


def take(path: Path, *, wait: float = 0.0) -> BinaryIO:
    """Open and lock the file ``path``, until the file is closed; see :func:`locked`.

    The file is never removed: a process that waits for a removed file would get a lock that others
    do not see.
    """
    flags = os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK
    file = open(os.open(path, flags, 0o600), "r+b", buffering=0)  # noqa: SIM115
    try:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(f"{path}: is no plain file, so it can be no lock; remove it")
        _acquire(file.fileno(), path, wait)
        file.truncate(0)
        file.write(b"%d\n" % os.getpid())  # for systems without /proc/locks
    except BaseException:
        file.close()
        raise
    return cast(BinaryIO, file)


def is_held(path: Path) -> bool:
    """Return whether a process holds the lock file ``path``; False where there is no such file, or
    its file system has no locks.

    Others may look at the same time. A process that takes the lock at this very moment has to try
    again. Raises OSError when the file cannot be opened.
    """
    try:
        descriptor = os.open(path, os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    finally:
        os.close(descriptor)
    return False


def _acquire(descriptor: int, path: Path, wait: float) -> None:
    began = time.monotonic()
    silent = True
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waited = time.monotonic() - began
            if waited >= wait:
                raise Locked(path, holder(path), wait) from None
            if silent and waited >= QUIET_SECONDS:
                log.warning(
                    "waiting for a lock",
                    file=str(path),
                    held_by=_named(holder(path)),
                    at_most=f"{wait:g} s",
                )
                silent = False
            time.sleep(AGAIN_SECONDS)


def holder(path: Path) -> int:
    """Return the number of the process that holds the lock file ``path``; 0 when unknown."""
    try:
        inode = path.stat().st_ino
        known = path.read_text().strip()
    except OSError:
        return 0
    with contextlib.suppress(OSError):
        for line in Path("/proc/locks").read_text().splitlines():
            # number: FLOCK ADVISORY WRITE process major:minor:inode begin end
            fields = line.split()
            if fields[1] == "FLOCK" and fields[5].rpartition(":")[2] == str(inode):
                return max(0, int(fields[4]))  # of a process in another container: 0, or -1
    return int(known) if known.isdigit() else 0


def _named(process: int) -> str:
    """Return ``process`` with its command line, for people."""
    if not process:
        return "another process"
    with contextlib.suppress(OSError):
        words = (
            Path(f"/proc/{process}/cmdline")
            .read_bytes()
            .replace(b"\0", b" ")
            .decode(errors="replace")
            .strip()
        )
        shown = "".join(c if c.isprintable() else "?" for c in words)
        return f"process {process} ({shown[:100]})"
    return f"process {process}"
