"""The lock of a run's folder, held by the process that executes the run. The kernel releases it when that process ends."""

from __future__ import annotations

import contextlib
import errno
import time
from pathlib import Path
from typing import BinaryIO

import structlog

from pipeline.locks import Locked, take

log = structlog.get_logger()

LOCK = "run.lock"  # in the run's folder
WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)  # of some network file systems


class RunError(RuntimeError):
    """A run cannot be made or resumed; the message says why and what to do."""


class RunLocked(RunError):
    """Another process executes the run; the message names it."""


class RunLock:
    """The lock of the run's folder ``folder``, held from :meth:`take` to :meth:`release`."""

    def __init__(self, folder: Path, file: BinaryIO | None) -> None:
        self.folder, self._file = folder, file

    @classmethod
    def take(cls, folder: Path) -> RunLock:
        """Raises RunLocked when another process, or another run in this one, holds the lock of ``folder``."""
        try:
            return cls(folder, take(folder / LOCK))
        except Locked as held:
            raise RunLocked(f"run: {folder} is executed by {held.holder}{_since(folder)}; stop it first") from None
        except OSError as error:
            if error.errno not in WITHOUT_LOCKS:
                raise
            log.warning(
                "the run's folder cannot be locked; do not execute it twice", folder=str(folder), error=str(error)
            )
            return cls(folder, None)

    def release(self) -> None:
        """Release the lock. Does nothing when repeated."""
        if self._file is not None:
            self._file.close()


def _since(folder: Path) -> str:
    with contextlib.suppress(OSError):
        taken = (folder / LOCK).stat().st_mtime
        return f" since {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(taken))}"
    return ""
