"""The processes of worker groups: starts them under new names, and says how each one has ended.

launch ──▶ Life, name ──▶ index: PROCESS, RANKS, event `started`
wait   ◀── exit codes, in the order of the deaths ◀── ENDING, hangs, lost hosts and fork servers
"""

from __future__ import annotations

import asyncio
import signal
from dataclasses import replace

from orchestration.launch.launchers import Launcher, Life
from orchestration.state.documents import ENDING, PROCESS, RANKS, Ending
from orchestration.supervise.group import Worker, WorkerGroup, shown
from orchestration.supervise.liveness import Liveness
from pipeline.data.events import WorkerEvent
from pipeline.first_of import cancel_all
from pipeline.index.client import Index, worker_name


class RunFailed(Exception):
    """The run cannot go on. ``worker``: whose log has more, where it is one's."""

    def __init__(self, reason: str, worker: Worker | None = None) -> None:
        super().__init__(reason)
        self.worker = shown(worker) if worker else ""


class Lives:
    """The present processes of a run's workers. ``by_worker``: by KIND-NUMBER."""

    def __init__(self, index: Index, launcher: Launcher, liveness: Liveness) -> None:
        self.index = index
        self.launcher = launcher
        self.liveness = liveness
        self.by_worker: dict[str, Life] = {}

    async def launch(self, group: WorkerGroup) -> None:
        """Launch the workers of ``group``. Raises RunFailed when the machine has no process or
        memory to give."""
        group.names = {worker: worker_name(*worker) for worker in group.workers}
        if len(group.workers) > 1:
            await RANKS.put(self.index, group.names[group.first], kind=group.first[0])
        for worker, name in group.names.items():
            label = shown(worker)
            await PROCESS.put(self.index, name, worker=label)
            try:
                life = await self.launcher.launch(self.index.run, self.index.url, *worker, name)
            except OSError as error:
                raise RunFailed(f"{label} cannot be started: {error}", worker) from error
            self.by_worker[label] = self.liveness.lives[name] = life
            started = WorkerEvent(stage=worker[0], worker=label, change="started", pid=life.pid)
            await self.index.emit(started)

    async def wait(self, group: WorkerGroup) -> dict[Worker, Ending]:
        """Return how the workers of ``group`` have ended, in that order. Those that were done come
        last. When one dies the others, which would wait for it, are ended at once."""
        lives = {worker: self.by_worker[shown(worker)] for worker in group.workers}
        codes = await _exit_codes(lives)
        endings = {}
        for worker, code in sorted(codes.items(), key=lambda item: item[1] == 0):
            name = group.names[worker]
            self.liveness.lives.pop(name, None)
            orphaned = lives[worker].orphaned
            written = await ENDING.get(self.index, name=name) or Ending()
            endings[worker] = replace(
                written,
                code=code,
                reason=self.liveness.hung.pop(name, written.reason),
                lost="" if orphaned is None else str(orphaned),
            )
        return endings

    def of(self, worker: Worker) -> Life | None:
        """Return the present process of ``worker``, or its last one."""
        return self.by_worker.get(shown(worker))

    def forget(self, group: WorkerGroup) -> None:
        """End the workers of ``group``, which are not watched any more."""
        for worker, name in group.names.items():
            self.liveness.lives.pop(name, None)
            if life := self.by_worker.pop(shown(worker), None):
                life.end()

    async def end(self) -> None:
        """End all of them."""
        for life in self.by_worker.values():
            life.end()
        await asyncio.gather(
            *(life.wait() for life in self.by_worker.values()),
            return_exceptions=True,
        )


async def _exit_codes(lives: dict[Worker, Life]) -> dict[Worker, int]:
    """Return the exit codes, in the order of the ends. When one process dies the others are
    ended."""
    codes: dict[Worker, int] = {}
    waiting = {asyncio.create_task(life.wait()): worker for worker, life in lives.items()}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            ended: dict[Worker, int] = {}
            for task in done:
                code = task.result()
                ended[waiting.pop(task)] = -signal.SIGKILL if code is None else code
            # Of several at once, the killed one comes first: the others died because of it.
            codes |= sorted(ended.items(), key=lambda item: item[1])
            if any(codes.values()):
                for worker in waiting.values():
                    lives[worker].end()
        return codes
    finally:
        await cancel_all(*waiting)
