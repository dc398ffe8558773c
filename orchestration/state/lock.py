"""The lock of a run's folder, held by the process that executes the run.

The kernel releases it when that process ends.
"""

from __future__ import annotations

import contextlib
import errno
import io
import time
from pathlib import Path
from typing import BinaryIO

import structlog

from pipeline.locks import Locked, take

log = structlog.get_logger()

LOCK = "run.lock"  # in the run's folder
MOMENT = 0.5  # seconds: who only looks, or records late events, holds the lock for less
WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)  # of some network file systems


class RunError(RuntimeError):
    """A run cannot be made or resumed; the message says why and what to do."""


class RunLocked(RunError):
    """Another process executes the run; the message names it."""


def lock_run(folder: Path, wait: float = MOMENT) -> BinaryIO:
    """Lock the run's folder ``folder`` until the returned file is closed, waiting at most ``wait``
    seconds.

    Raises RunLocked when another process, or another run in this one, holds the lock.
    """
    try:
        return take(folder / LOCK, wait=wait)
    except Locked as held:
        fix = f"stop it first; if it is paused, `asyncdock runs resume {folder}` lets it go on"
        raise RunLocked(
            f"run: {folder} is executed by {held.holder}{_since(folder)}; {fix}"
        ) from None
    except OSError as error:
        if error.errno not in WITHOUT_LOCKS:
            raise
        log.warning(
            "the run's folder cannot be locked; do not execute it twice",
            folder=str(folder),
            error=str(error),
        )
        return io.BytesIO()


def _since(folder: Path) -> str:
    with contextlib.suppress(OSError):
        taken = (folder / LOCK).stat().st_mtime
        return f" since {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(taken))}"
    return ""
