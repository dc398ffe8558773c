"""Ends workers that hang, so that the supervisor restarts them as it does dead ones.

    worker ── a sign of life every few seconds ─▶ index ─▶ none for `launch.hang_timeout`: end that worker
    stages ── rows that were processed ─────────▶ index ─▶ none for `launch.stall_timeout`: end the worker with which the
                                                           chain of waiting ends
Seconds are added up here, between two looks at the index, and a long one counts little: while the index or the supervisor
is paused, or a clock is set, no worker becomes silent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import structlog

from orchestration.launch.launchers import Life
from orchestration.launch.pulse import AwakeTime
from orchestration.recipe.sections import LaunchSection
from pipeline.index.client import Index

log = structlog.get_logger()

# until a worker that no host has started is absent: hosts that are there need less
UNPLACED_SECONDS = 5.0


class Liveness:
    """The watch that ends those of the workers in ``lives``, by name, which hang. ``hung``: why, by
    name. ``on_unplaced`` is called with a worker that other machines are to start, and whether none
    has done so for :data:`UNPLACED_SECONDS`; on a cluster, or where that is less, for
    `launch.hang_timeout`."""

    def __init__(
        self,
        index: Index,
        launch: LaunchSection,
        on_unplaced: Callable[[str, bool], Awaitable[None]],
    ) -> None:
        self._index = index
        self._launch = launch
        self._on_unplaced = on_unplaced
        self._unplaced = (
            launch.hang_timeout if launch.on_cluster else min(UNPLACED_SECONDS, launch.hang_timeout)
        )
        self.lives: dict[str, Life] = {}
        self.hung: dict[str, str] = {}
        # by worker: its last sign of life, seconds since
        self._silent: dict[str, tuple[int, float]] = {}
        self._progress = (0, 0, 0)
        self._still = 0.0  # rows and versions, seconds since they changed

    async def run(self) -> None:
        """Watch, without end."""
        pause = min(self._launch.beat_seconds, self._launch.stall_timeout / 8)
        awake = AwakeTime(pause)
        while True:
            await asyncio.sleep(pause)
            alive = await self._index.alive()
            passed = awake.passed()
            self._silent = {name: self._silent.get(name, (0, 0.0)) for name in self.lives}
            for name, (last, silent) in list(self._silent.items()):
                at = alive[name].at if name in alive else 0
                self._silent[name] = at, silent = at, silent + passed if at == last else 0.0
                # it has ended while this loop awaited something
                if (life := self.lives.get(name)) is None:
                    continue
                limit = "hang_timeout" if at else "startup_timeout"
                if not life.pid:
                    await self._on_unplaced(name, not at and silent > self._unplaced)
                if silent > (seconds := getattr(self._launch, limit)) and (at or life.pid):
                    self._end(name, f"it gave no sign of life for launch.{limit} = {seconds:g} s")
            await self._look_for_progress(passed)

    async def _look_for_progress(self, passed: float) -> None:
        status = await self._index.status()
        missing = await self._index.waiting()
        progress = missing.settled, status.published, status.admitted
        running = (await self._index.state())[0] == "running"
        self._still = self._still + passed if running and progress == self._progress else 0.0
        self._progress = progress
        if self._still <= (limit := self._launch.stall_timeout):
            return
        from orchestration.supervise.waiting import waiting_chain

        self._still, chain = 0.0, await waiting_chain(self._index)
        log.warning("the run stands still", seconds=limit, chain=[wait.text for wait in chain])
        if chain and chain[-1].process in self.lives:
            links = " ← ".join(wait.text for wait in chain)
            reason = f"no progress of the run for launch.stall_timeout = {limit:g} s: {links}"
            self._end(chain[-1].process, reason)

    def _end(self, name: str, reason: str) -> None:
        log.warning("worker hangs", worker=name, reason=reason)
        if life := self.lives.pop(name, None):  # it may have ended in the meantime
            self.hung[name] = reason
            life.end()
