"""Launchers: how a worker comes to life. The supervisor sees only :class:`Life`.

inline    a task in this process: debugging, exact tests
process   a process of its own, by fork or from nothing, which the kernel ends when its supervisor dies (Linux)
"""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Protocol

from orchestration.processes.forkserver import Child, ForkServer, Launch
from orchestration.processes.handles import Process
from orchestration.processes.starter import Starter
from pipeline.index.client import INDEX_VARIABLE

EXIT_FATAL = 3  # of a worker: nothing that a restart could mend
EXIT_FAILED = 1
EXIT_NOT_STARTED = 4  # before it was ready, by an error that may pass


class Life(Protocol):
    """One life of a worker, from launch to exit."""

    name: str
    pid: int

    @property
    def failure_domain(self) -> object:
        """What it died of together with others; None when it was alone. Known once it has ended."""

    async def wait(self) -> int:
        """The exit code: 0 done, ``EXIT_FATAL`` what no restart mends, ``EXIT_NOT_STARTED`` what may, anything else died."""

    def kill(self) -> None:
        """End it now. Harmless when it has ended."""


class Launcher(Protocol):
    async def launch(self, run: str, url: str, kind: str, number: int, name: str) -> Life: ...

    def close(self) -> None:
        """Nothing more is launched; who is still alive is ended."""


class InlineLife:
    failure_domain = None

    def __init__(self, name: str, work: asyncio.Task[None]) -> None:
        self.name, self.pid, self._work = name, os.getpid(), work

    async def wait(self) -> int:
        await asyncio.wait([self._work])
        from orchestration.run.worker import exit_code

        return EXIT_FAILED if self._work.cancelled() else exit_code(self._work.exception())

    def kill(self) -> None:
        self._work.cancel()


class InlineLauncher:
    def close(self) -> None:
        """Its workers end by themselves, or are killed one by one."""

    async def launch(self, run: str, url: str, kind: str, number: int, name: str) -> Life:
        from orchestration.run.worker import Worker  # with all that computes

        return InlineLife(name, asyncio.create_task(Worker(run, url, kind, number, name).run(), name=name))


class ProcessLife:
    def __init__(self, name: str, process: Child | Process) -> None:
        self.name, self.pid, self._process = name, process.pid, process

    @property
    def failure_domain(self) -> object:
        return self._process.orphaned if isinstance(self._process, Child) else None

    async def wait(self) -> int:
        code = await self._process.wait()
        return -signal.SIGKILL if code is None else code

    def kill(self) -> None:
        self._process.end()


class ProcessLauncher:
    """Each worker writes its log, JSON Lines, to ``logs/KIND-NUMBER.log``. See :class:`Starter` for the rest."""

    def __init__(self, logs: Path, method: str, server: ForkServer | None = None) -> None:
        self._logs, self._starter = logs, Starter(method, server)

    async def launch(self, run: str, url: str, kind: str, number: int, name: str) -> Life:
        self._logs.mkdir(parents=True, exist_ok=True)
        options = {"run": run, "kind": kind, "number": str(number), "name": name}
        launch = Launch(
            "orchestration.run.worker:main",
            [part for option, value in options.items() for part in (f"--{option}", value)],
            {**os.environ, INDEX_VARIABLE: url},
            os.getcwd(),
            str(self._logs / f"{kind}-{number}.log"),
            f"asyncdock worker {kind}-{number} of {run}",
        )
        return ProcessLife(name, await self._starter.start(launch))

    def close(self) -> None:
        self._starter.close()
