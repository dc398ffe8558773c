"""The lock of a run's folder, held by the process that executes the run. The kernel releases it when that process ends."""

from __future__ import annotations

import fcntl
import json
import os
import time
from pathlib import Path
from typing import TextIO

import structlog

from orchestration.processes import Process

log = structlog.get_logger()

LOCK = "run.lock"  # in the run's folder: who holds the lock, or held it last


class RunError(RuntimeError):
    """A run cannot be made or resumed; the message says why and what to do."""


class RunLocked(RunError):
    """Another process executes the run; the message names it."""


class RunLock:
    """The lock of the run's folder ``folder``, held from :meth:`take` to :meth:`release`.

    A lock file is never removed: a process that waits for a removed file's lock would hold another one than its successor.
    """

    def __init__(self, folder: Path, file: TextIO) -> None:
        self.folder, self._file = folder, file

    @classmethod
    def take(cls, folder: Path) -> RunLock:
        """Raises RunLocked when another process, or another run in this one, holds the lock of ``folder``."""
        file = open(os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600), "r+")  # noqa: SIM115  (closed by release)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with file:
                raise RunLocked(f"run: {folder} is executed by {_holder(file)}; stop it first") from None
        except OSError as error:  # some network file systems have no locks
            log.warning(
                "the run's folder cannot be locked; do not execute it twice", folder=str(folder), error=str(error)
            )
        file.truncate()
        json.dump({"process": str(Process.of(os.getpid())), "host": os.uname().nodename, "since": time.time()}, file)
        file.flush()
        return cls(folder, file)

    def release(self) -> None:
        """Harmless when repeated."""
        self._file.close()


def _holder(file: TextIO) -> str:
    """The process that holds the lock of ``file``, in words."""
    try:
        written = json.load(file)
        process, host, since = Process.parse(written["process"]), str(written["host"]), float(written["since"])
    except (ValueError, KeyError, TypeError):  # it has just taken the lock
        return "another process"
    if process is None or (host == os.uname().nodename and not process.alive()):
        return "another process"
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(since))
    return f"process {process.pid} on {host} since {when}"
