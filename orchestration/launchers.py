"""Launchers: how a worker comes to life. The supervisor sees only :class:`Life`.

inline    a task in this process: debugging, exact tests
process   a process of its own, which the kernel ends when its supervisor dies (Linux)
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Protocol

from orchestration.worker import EXIT_FAILED, EXIT_FATAL, FATAL, Worker
from pipeline.embedded import die_with_parent
from pipeline.index import INDEX_VARIABLE


class Life(Protocol):
    """One life of a worker, from launch to exit."""

    name: str
    pid: int

    async def wait(self) -> int:
        """The exit code: 0 done, ``EXIT_FATAL`` what no restart mends, anything else died."""

    def kill(self) -> None:
        """End it now. Harmless when it has ended."""


class Launcher(Protocol):
    async def launch(self, run: str, url: str, kind: str, number: int, name: str) -> Life: ...


class InlineLife:
    def __init__(self, name: str, work: asyncio.Task[None]) -> None:
        self.name, self.pid, self._work = name, os.getpid(), work

    async def wait(self) -> int:
        await asyncio.wait([self._work])
        if self._work.cancelled():
            return EXIT_FAILED
        error = self._work.exception()
        return 0 if error is None else EXIT_FATAL if isinstance(error, FATAL) else EXIT_FAILED

    def kill(self) -> None:
        self._work.cancel()


class InlineLauncher:
    async def launch(self, run: str, url: str, kind: str, number: int, name: str) -> Life:
        return InlineLife(name, asyncio.create_task(Worker(run, url, kind, number, name).run(), name=name))


class ProcessLife:
    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self.name, self.pid, self._process = name, process.pid, process

    async def wait(self) -> int:
        return await self._process.wait()

    def kill(self) -> None:
        if self._process.returncode is None:
            self._process.kill()


class ProcessLauncher:
    """Each worker writes its log, JSON Lines, to ``logs/KIND-NUMBER.log``."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs

    async def launch(self, run: str, url: str, kind: str, number: int, name: str) -> Life:
        self._logs.mkdir(parents=True, exist_ok=True)
        # -P: a folder called `api` or `stages` where the user stands must not be taken for ours.
        command = [sys.executable, "-P", "-m", "orchestration.worker"]
        options = {"run": run, "kind": kind, "number": str(number), "name": name}
        for option, value in options.items():
            command += [f"--{option}", value]
        with (self._logs / f"{kind}-{number}.log").open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for the supervisor alone
                preexec_fn=die_with_parent,
                # Threads that wait for each other must not spin: the cores are shared with the other workers.
                env={"OMP_WAIT_POLICY": "PASSIVE", **os.environ, INDEX_VARIABLE: url},
            )
        return ProcessLife(name, process)
