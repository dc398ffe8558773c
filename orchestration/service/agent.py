"""The agent: turns a service's waiting runs into runner processes on this machine, and sees each to its end.

    the list changes ─▶ room for another? ─▶ take the run that has waited longest ─▶ its runner, a process of its own session
                                                                                       │
    mind (one for each run): its process ends, or does not answer, or does not stop ◀──┘
       ├ the run has ended ─▶ done                    ├ its restarts are used up ─▶ failed, with the reason
       └ it was killed ─▶ another runner takes it over: same run, same index, same shared memory

Runners live on when their agent ends; the next agent of the same folder finds them by the list, and minds them as its own.
All that it knows is in the index. What deleted runs leave in its folder, and ended ones in shared memory, it removes.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import os
import platform
import shutil
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import structlog

from orchestration.private_files import private_folder
from orchestration.processes.forkserver import Child, ForkServer, Launch
from orchestration.processes.handles import Process
from orchestration.processes.starter import Starter
from orchestration.recipe.sections import LaunchSection
from orchestration.service.index_server import ServiceIndex
from orchestration.service.lifecycle import LEASE_VARIABLE, conclude, shared_of, shared_prefix
from orchestration.service.registry import ENDED, LEASE_SECONDS, Held, Registry
from pipeline.events import WorkerEvent
from pipeline.index.client import INDEX_VARIABLE, Index, IndexUnreachable
from pipeline.locks import Locked, locked
from pipeline.warehouse.arena import shared_memory_directory

log = structlog.get_logger()

START_SECONDS = 300.0  # from a runner's launch to its first sign of life
SILENT_SECONDS = 30.0  # past the end of its lease, a runner that is alive is taken for hung and ended by force
ABANDONED_SECONDS = 60.0  # past the end of its lease, a run of another agent may be taken over
GRACE_SECONDS = 10.0  # past launch.stop_timeout, a runner that still stops is ended by force
LONGEST_PAUSE = 30.0  # seconds before another runner follows on one that never came to work
LOOK_SECONDS = 5.0  # the list is looked at this often even when nothing in it changes: leases end


class AgentError(RuntimeError):
    """An agent cannot work here; the message says why and what to do."""


class Agent:
    """Executes at most ``runs`` of the service at ``url`` at once, with their folders below ``data``. It keeps ``index`` up
    where that is the service's own. Runners come from ``forks``, or from a fork server of its own."""

    def __init__(
        self, url: str, data: Path, runs: int, *, index: ServiceIndex | None = None, forks: ForkServer | None = None
    ) -> None:
        self.url, self.data, self.runs, self.index = url, data.resolve(), runs, index
        self.folders = self.data / "runs"
        digest = hashlib.sha256(os.fsencode(self.data)).hexdigest()[:6]
        self.name = f"{platform.node()}-{digest}"  # the same for the next agent of this folder
        self._registry = Registry(url)
        self._forks = forks
        self._starter: Starter  # while it works
        self._minded: dict[str, asyncio.Task[None]] = {}
        self._freed = asyncio.Event()

    async def run(self, stop: asyncio.Event) -> None:
        """Work until ``stop`` is set; runs go on without it. Raises AgentError when another agent has the folder."""
        private_folder(self.data)
        self.folders.mkdir(exist_ok=True)
        try:
            with locked(self.data / "agent.lock"):
                self._starter = Starter(server=self._forks)
                try:
                    await self._until(stop)
                finally:
                    self._starter.close()
        except Locked as held:
            raise AgentError(
                f"data: another agent works in {self.data} (process {held.process}); give this one a folder of its own"
            ) from None

    async def _until(self, stop: asyncio.Event) -> None:
        tasks = [asyncio.create_task(self._work()), asyncio.create_task(stop.wait())]
        if self.index is not None:
            tasks.append(asyncio.create_task(self.index.keep()))
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            tasks += self._minded.values()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._registry.close()

    async def _work(self) -> None:
        marker = ""
        log.info("agent works", agent=self.name, data=str(self.data), runs=self.runs)
        while True:
            self._freed.clear()
            try:
                active = await self._registry.active()
                await self._tidy(active)
                await self._find(active)
                while len(self._minded) < self.runs and await self._take():
                    pass
                marker = await self._changed(marker)
            except IndexUnreachable as lost:
                log.warning("the index is not there; runs go on when it is", reason=str(lost))

    async def _changed(self, marker: str) -> str:
        """Wait until there may be something to do: the list has changed, or a place is free."""
        listed = asyncio.create_task(self._registry.wait(marker, LOOK_SECONDS))
        freed = asyncio.create_task(self._freed.wait())
        try:
            await asyncio.wait([listed, freed], return_when=asyncio.FIRST_COMPLETED)
            return listed.result() if listed.done() else marker
        finally:
            for task in (listed, freed):
                task.cancel()
            await asyncio.gather(listed, freed, return_exceptions=True)

    # ── which runs are ours ──

    async def _take(self) -> bool:
        """Begin the run that has waited longest, if any."""
        held = await self._registry.take(self.name, str(self.folders), uuid.uuid4().hex, START_SECONDS)
        if held is None:
            return False
        log.info("run taken", run=held.record.id)
        self._mind(held, begin=True)
        return True

    async def _find(self, active: Sequence[Held]) -> None:
        """Mind runs that this folder's last agent had, and those that another one has abandoned where we can reach them."""
        for held in active:
            if held.record.id in self._minded:
                continue
            if held.record.agent == self.name:
                log.info("run found", run=held.record.id, process=held.process)
                self._mind(held)
            elif (
                held.left < -ABANDONED_SECONDS
                and len(self._minded) < self.runs
                and await asyncio.to_thread(Path(held.record.folder, "recipe.json").is_file)
            ):
                log.warning("run was abandoned", run=held.record.id, by=held.record.agent)
                if held.record.agent.rpartition("-")[0] == platform.node() and (process := Process.parse(held.process)):
                    process.end()
                self._mind(held, reason=f"its agent {held.record.agent} is gone")

    def _mind(self, held: Held, *, begin: bool = False, reason: str = "") -> None:
        run = held.record.id
        task = asyncio.create_task(self._see_to_its_end(held, begin, reason), name=run)
        self._minded[run] = task

        def over(task: asyncio.Task[None]) -> None:
            del self._minded[run]
            if task.cancelled():
                return
            if (error := task.exception()) is None:
                self._freed.set()
            elif isinstance(error, IndexUnreachable):
                log.warning("the index is not there", run=run, reason=str(error))
            else:  # it is found again at the next look
                log.error("a run cannot be minded", run=run, error=repr(error), exc_info=error)

        task.add_done_callback(over)

    # ── one run ──

    async def _see_to_its_end(self, held: Held, begin: bool, reason: str) -> None:
        """Through as many runners as it may have. ``begin``: it needs one now; ``reason``: another one, for that."""
        run, launch = held.record.id, LaunchSection.model_validate(held.record.recipe["launch"])
        token, process = held.token, cast("Child | Process | None", None)
        if begin:
            process = await self._launch(held, token)
        while True:
            if process is not None or not reason:
                reason = await self._until_gone(run, process, launch.stop_timeout)
            found = await self._registry.held(run)
            if found is None or found.token != token:
                return
            if found.record.state in (*ENDED, "stopping"):
                await conclude(self._registry, run, token, "stopped", f"stopped by request; {reason}")
                return
            if found.record.attempts > launch.max_restarts:
                used_up = f"its runner died and launch.max_restarts = {launch.max_restarts} is used up: {reason}"
                await conclude(self._registry, run, token, "failed", used_up)
                return
            log.warning("another runner takes the run over", run=run, reason=reason)
            if found.record.state == "starting":  # it never came to work: what was wrong with it may pass
                await asyncio.sleep(min(2.0 ** (found.record.attempts - 2), LONGEST_PAUSE))
            await self._tell(run, reason)
            followed, token = token, uuid.uuid4().hex
            if not await self._registry.retake(run, followed, token, self.name, START_SECONDS):
                return
            process = await self._launch(found, token)

    async def _tell(self, run: str, reason: str) -> None:
        """A run that nobody executes is not running; its readers learn why."""
        index = Index(self.url, run)
        try:
            await index.transition(["running"], "starting", f"taken over: {reason}")
            await index.emit(WorkerEvent(stage="runner", worker="runner-0", change="taken over", reason=reason))
        finally:
            await index.close()

    async def _launch(self, held: Held, token: str) -> Child | Process | None:
        """A new runner; None when the machine has none to give, and the run has failed for that."""
        logs = Path(held.record.folder) / "logs"
        launch = Launch(
            "orchestration.service.runner:forked",
            ["--run", held.record.id],
            {**os.environ, INDEX_VARIABLE: self.url, LEASE_VARIABLE: token},
            os.getcwd(),
            str(logs / "runner.log"),
            f"asyncdock runner of {held.record.id}",
            outlives=True,  # and Ctrl-C here is not for it
        )
        try:
            logs.mkdir(parents=True, exist_ok=True)
            process = await self._starter.start(launch)
        except OSError as error:
            await conclude(self._registry, held.record.id, token, "failed", f"its runner cannot be started: {error}")
            return None
        log.info("runner started", run=held.record.id, pid=process.pid)
        await self._registry.renew(held.record.id, token, str(process), START_SECONDS)  # whoever follows us knows it
        return process

    async def _until_gone(self, run: str, process: Child | Process | None, stop_timeout: float) -> str:
        """Return when nobody executes the run any more, and why. A runner that hangs or does not stop is ended by force."""
        marker, stop_by, ended = "", math.inf, None
        try:
            while True:
                held = await self._registry.held(run)
                if process is None and held is not None:
                    process = Process.parse(held.process)
                if process is not None and ended is None:
                    ended = asyncio.create_task(process.wait())
                if held is None:
                    stop_by = min(stop_by, time.monotonic() + GRACE_SECONDS)  # it has said so, and is about to end
                elif held.record.state == "stopping":
                    stop_by = min(stop_by, time.monotonic() + stop_timeout + GRACE_SECONDS)
                forced = ""
                if time.monotonic() >= stop_by:
                    forced = (
                        f"its runner did not end within {stop_timeout + GRACE_SECONDS:.0f} s and was ended by force"
                    )
                elif held is not None and held.left < (-SILENT_SECONDS if process is not None else 0):
                    forced = f"its runner had not been heard of for {LEASE_SECONDS - held.left:.0f} s"
                if process is None or ended is None:
                    if held is None or forced:
                        return forced or "it has ended"
                elif forced:
                    process.end()
                    await ended
                    return forced
                listed = asyncio.create_task(self._registry.wait(marker, min(LOOK_SECONDS, stop_by - time.monotonic())))
                waiting: set[asyncio.Task] = {listed} if ended is None else {listed, ended}
                try:
                    await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                    if ended is not None and ended.done():
                        return _said(ended.result())
                    marker = listed.result()
                finally:
                    listed.cancel()
                    await asyncio.gather(listed, return_exceptions=True)
        finally:
            if ended is not None:
                ended.cancel()
                await asyncio.gather(ended, return_exceptions=True)

    # ── what runs leave behind ──

    async def _tidy(self, active: Sequence[Held]) -> None:
        """Remove the folders of deleted runs, and the shared memory of those that have ended."""
        for run, folder in (await self._registry.doomed()).items():
            if Path(folder).parent == self.folders and Path(folder).name == run:
                await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
                await self._registry.erase(run)  # who deleted it may have been killed before it came to this
                await self._registry.remove(run)
                log.info("a deleted run's folder is gone", run=run)
        used = {shared_of(Path(held.record.folder)) for held in active}
        for left in shared_memory_directory().glob(f"{shared_prefix(self.folders)}*"):
            if left not in used and left.name.removeprefix(shared_prefix(self.folders)) not in self._minded:
                log.info("removed what an ended run left in shared memory", folder=str(left))
                await asyncio.to_thread(shutil.rmtree, left, ignore_errors=True)


def _said(code: int | None) -> str:
    if code is None:
        return "its runner was gone"
    if code < 0:
        return f"its runner was ended by signal {-code}"
    return f"its runner ended with exit code {code}; see logs/runner.log in its folder"
