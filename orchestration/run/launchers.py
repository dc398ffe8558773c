"""Launchers: start workers. The supervisor sees a started worker as a :class:`Life`.

inline    a task in this process: debugging, exact tests
process   a process of its own, forked or started, which the kernel ends when its supervisor dies (Linux)
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from orchestration.processes.forkserver import ForkServer, Launch
from orchestration.processes.starter import Starter
from orchestration.recipe.devices import Devices
from orchestration.run.exit_codes import EXIT_FAILED
from pipeline.index.client import INDEX_VARIABLE


class Life(Protocol):
    """One life of a worker, from launch to exit."""

    @property
    def pid(self) -> int: ...

    @property
    def orphaned(self) -> object:
        """Equal for workers that died together, with their fork server; None when it died alone. Known once it has ended."""

    async def wait(self) -> int | None:
        """Returns the exit code: 0, ``EXIT_FATAL``, ``EXIT_NOT_STARTED``, another one, or None where it is not known."""

    def end(self) -> None:
        """End it now. Does nothing when it has ended."""


class Launcher(Protocol):
    async def launch(self, run: str, url: str, kind: str, number: int, name: str) -> Life: ...

    def close(self) -> None:
        """Launch nothing more, and end the workers that are still alive."""


class InlineLife:
    def __init__(self, work: asyncio.Task[None]) -> None:
        self.pid, self.orphaned, self._work = os.getpid(), None, work

    async def wait(self) -> int:
        await asyncio.wait([self._work])
        from orchestration.run.worker import exit_code

        return EXIT_FAILED if self._work.cancelled() else exit_code(self._work.exception())

    def end(self) -> None:
        self._work.cancel()


class InlineLauncher:
    def close(self) -> None:
        """Does nothing: its workers end by themselves, or are killed one by one."""

    async def launch(self, run: str, url: str, kind: str, number: int, name: str) -> Life:
        from orchestration.run.worker import Worker  # imports torch

        return InlineLife(asyncio.create_task(Worker(run, url, kind, number, name).run(), name=name))


class ProcessLauncher:
    """Each worker writes its log, JSON Lines, to ``logs/KIND-NUMBER.log``, and sees its own of ``devices``. See
    :class:`Starter` for the rest."""

    def __init__(
        self,
        logs: Path,
        method: str,
        server: ForkServer | None = None,
        devices: Mapping[tuple[str, int], Devices] | None = None,
    ) -> None:
        self._logs, self._starter, self._devices = logs, Starter(method, server), devices or {}

    async def launch(self, run: str, url: str, kind: str, number: int, name: str) -> Life:
        self._logs.mkdir(parents=True, exist_ok=True)
        given = self._devices.get((kind, number))
        options = {"run": run, "kind": kind, "number": str(number), "name": name}
        launch = Launch(
            "orchestration.run.worker:main",
            [part for option, value in options.items() for part in (f"--{option}", value)],
            {**os.environ, INDEX_VARIABLE: url, **(given.environment() if given else {})},
            os.getcwd(),
            str(self._logs / f"{kind}-{number}.log"),
            f"asyncdock worker {kind}-{number} of {run}",
        )
        return await self._starter.start(launch)

    def close(self) -> None:
        self._starter.close()
