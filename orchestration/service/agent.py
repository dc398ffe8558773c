"""The agent: starts a runner process for each waiting run of a service on this machine, and
restarts runners that die.

    the list changes ─▶ room for another run? ─▶ take the run that has waited longest ─▶ start its runner, in its own session
                                                                                          │
    supervise (a task per run): its process ends, does not answer, or does not stop ◀─────┘
       ├ the run has ended ─▶ done                    ├ its restarts are used up ─▶ failed, with the reason
       └ it was killed ─▶ another runner takes it over: same run, same index, same shared memory

Runners continue when their agent ends; the next agent of the same folder finds their runs in the
registry and supervises them. Agents keep no state beside the index. They remove folders of deleted
runs and shared memory of ended ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import shutil
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

import structlog

from orchestration.private_files import private_folder
from orchestration.processes.environment import without_secrets
from orchestration.processes.forkserver import PRELOAD, Child, ForkServer, Launch
from orchestration.processes.handles import Process
from orchestration.processes.starter import Starter
from orchestration.recipe.sections import LaunchSection
from orchestration.service.index_server import ServiceIndex
from orchestration.state.lifecycle import LEASE_VARIABLE, conclude
from orchestration.state.paths import shared_prefix
from orchestration.state.registry import LEASE_SECONDS, ActiveRun, Registry, UnknownRun
from pipeline.data.arena import shared_memory_directory
from pipeline.data.events import ENDED, WorkerEvent
from pipeline.first_of import cancel_all, first_of
from pipeline.index.client import INDEX_VARIABLE, Index, IndexUnreachable
from pipeline.locks import Locked, locked
from pipeline.node import node_id

log = structlog.get_logger()

RUNNER = "orchestration.service.runner"
START_SECONDS = 300.0  # from a runner's launch to its first renewal of the lease
SILENT_SECONDS = 30.0  # past the end of its lease, a live runner is considered hung and killed
ABANDONED_SECONDS = 60.0  # past the end of its lease, a run of another agent may be taken over
GRACE_SECONDS = 10.0  # past launch.stop_timeout, a runner that has not stopped is killed
LONGEST_PAUSE = 30.0  # seconds before a runner is started after one that died while starting
TICK_SECONDS = 1.0  # well below the longest gap between calls that counts as time for leases
LOOK_SECONDS = 5.0  # between checks of leases when the list does not change


class AgentError(RuntimeError):
    """An agent cannot work here; the message has the reason and the fix."""


class Agent:
    """The agent that executes up to ``runs`` runs of the service at ``url`` at once, with their
    folders below ``data``. Keeps ``index`` running, the service's own index server. Runners are
    forked from ``forks``, or from a fork server of its own."""

    def __init__(
        self,
        url: str,
        data: Path,
        runs: int,
        *,
        index: ServiceIndex | None = None,
        forks: ForkServer | None = None,
    ) -> None:
        self.url = url
        self.data = data.resolve()
        self.runs = runs
        self.index = index
        self._named = data  # another user may have made the link that was named
        self.folders = self.data / "runs"
        self.name = ""  # set while it runs
        self._registry = Registry(url)
        self._forks = forks
        self._starter: Starter  # set while it runs
        self._supervised: dict[str, asyncio.Task[None]] = {}
        self._freed = asyncio.Event()

    async def run(self, stop: asyncio.Event) -> None:
        """Work until ``stop`` is set; runs continue.

        Raises AgentError when another agent works in the folder.
        """
        private_folder(self._named)
        self.folders.mkdir(exist_ok=True)
        self.name = node_id(self.folders)  # the same for the next agent of this folder
        try:
            with locked(self.data / "agent.lock"):
                self._starter = Starter(server=self._forks, preload=(RUNNER, *PRELOAD))
                try:
                    keep_index = [self.index.keep()] if self.index is not None else []
                    await first_of(self._work(), self._tick(), stop.wait(), *keep_index)
                finally:
                    await cancel_all(*self._supervised.values())
                    await self._registry.close()
                    self._starter.close()
        except Locked as held:
            raise AgentError(
                f"data: another agent works in {self.data} (process {held.process}); give this one "
                f"a folder of its own"
            ) from None

    async def _tick(self) -> None:
        """Have the time of leases pass while this agent is there to judge by it."""
        while True:
            with contextlib.suppress(IndexUnreachable):
                await self._registry.tick()
            await asyncio.sleep(TICK_SECONDS)

    async def _work(self) -> None:
        marker = ""
        log.info("agent works", agent=self.name, data=str(self.data), runs=self.runs)
        while True:
            self._freed.clear()
            try:
                active = await self._registry.active()
                await self._remove_leftovers(active)
                await self._adopt(active)
                while len(self._supervised) < self.runs and await self._take():
                    pass
                changed, _ = await first_of(
                    self._registry.wait(marker, LOOK_SECONDS), self._freed.wait()
                )
                marker = changed or marker
            except IndexUnreachable as lost:
                log.warning("the index does not answer; runs go on when it does", reason=str(lost))

    # ── which runs to supervise ──

    async def _take(self) -> bool:
        """Take the run that has waited longest, of those that begin and those whose folder is here.

        Returns False when none waits.
        """
        here = [
            run
            for run, folder in (await self._registry.reopened()).items()
            if await self._has(run, folder)
        ]
        run = await self._registry.take(
            self.name, str(self.folders), uuid.uuid4().hex, START_SECONDS, here
        )
        if run is None:
            return False
        log.info("run taken", run=run.record.id)
        self._supervise(run, begin=True)
        return True

    async def _adopt(self, active: Sequence[ActiveRun]) -> None:
        """Supervise the runs of this folder's previous agent, also of one before the machine was
        restarted, and abandoned runs of others with folders that are found here."""
        for run in active:
            record = run.record
            if record.id in self._supervised:
                continue
            if record.agent == self.name:
                log.info("run found", run=record.id, process=run.process)
                self._supervise(run)
            elif (
                run.left
                < (0.0 if await self._has(record.id, record.folder) else -ABANDONED_SECONDS)
                and len(self._supervised) < self.runs
                and await asyncio.to_thread(Path(record.folder, "recipe.json").is_file)
            ):
                log.warning("run was abandoned", run=record.id, by=record.agent)
                if process := Process.parse(run.process):
                    process.end()
                self._supervise(run, reason=f"its agent {record.agent} is gone")

    async def _has(self, run: str, folder: str) -> bool:
        """Return whether ``folder`` is the run's, below this agent's own: another machine may have
        one at the same path."""
        path = Path(folder)
        return path == self.folders / run and await asyncio.to_thread(
            (path / "recipe.json").is_file
        )

    def _supervise(self, active: ActiveRun, *, begin: bool = False, reason: str = "") -> None:
        task = asyncio.create_task(self._keep(active, begin, reason), name=active.record.id)
        self._supervised[active.record.id] = task

    async def _keep(self, active: ActiveRun, begin: bool, reason: str) -> None:
        run = active.record.id
        try:
            await self._until_ended(active, begin, reason)
            self._freed.set()
        except IndexUnreachable as lost:
            log.warning("the index does not answer", run=run, reason=str(lost))
        except Exception as error:  # the next look at the list finds the run again
            log.exception("a run cannot be supervised", run=run, error=repr(error))
        finally:
            # otherwise the run was resumed, and taken again
            if self._supervised.get(run) is asyncio.current_task():
                del self._supervised[run]

    # ── one run ──

    async def _until_ended(self, active: ActiveRun, begin: bool, reason: str) -> None:
        """Supervise a run through all of its runners.

        ``begin``: it needs its first one; ``reason``: another one, for it.
        """
        run = active.record.id
        launch = LaunchSection.model_validate(active.record.recipe["launch"])
        token = active.token
        process = await self._launch(active, active.token) if begin else None
        while True:
            if process is not None or not reason:
                reason = await self._until_gone(run, process, launch.stop_timeout)
            current_run = await self._registry.find_active(run)
            if current_run is None or current_run.token != token:
                return
            if current_run.record.state in (*ENDED, "stopping"):
                await conclude(
                    self._registry, run, token, "stopped", f"stopped by request; {reason}"
                )
                return
            if current_run.record.state == "starting":  # it died while starting: the cause may pass
                await asyncio.sleep(min(2.0 ** (current_run.record.attempts - 2), LONGEST_PAUSE))
            previous = token
            token = uuid.uuid4().hex
            most = launch.max_restarts
            window = launch.restart_window
            taken = await self._registry.retake(
                run, previous, token, self.name, START_SECONDS, most=most, window=window
            )
            if taken == "used up":
                used_up = (
                    f"its runner died and launch.max_restarts = {launch.max_restarts} is "
                    f"used up: {reason}"
                )
                await conclude(self._registry, run, previous, "failed", used_up)
            if taken != "taken":
                return
            log.warning("another runner takes the run over", run=run, reason=reason)
            await self._report_takeover(run, reason)
            process = await self._launch(current_run, token)

    async def _report_takeover(self, run: str, reason: str) -> None:
        """Set the run's state from running to starting, and emit an event with the reason."""
        async with Index(self._registry.link, run) as index:
            await index.transition(["running"], "starting", f"taken over: {reason}")
            await index.emit(
                WorkerEvent(stage="runner", worker="runner-0", change="taken over", reason=reason)
            )

    async def _launch(self, active: ActiveRun, token: str) -> Child | Process | None:
        """Start a runner.

        When the machine has no process left, the run fails for it and None is returned.
        """
        logs = Path(active.record.folder) / "logs"
        launch = Launch(
            f"{RUNNER}:forked",
            ["--run", active.record.id],
            {**without_secrets(os.environ), INDEX_VARIABLE: self.url, LEASE_VARIABLE: token},
            os.getcwd(),
            str(logs / "runner.log"),
            f"asyncdock runner of {active.record.id}",
            outlives=True,
        )
        try:
            logs.mkdir(parents=True, exist_ok=True)
            process = await self._starter.start(launch)
        except OSError as error:
            await conclude(
                self._registry,
                active.record.id,
                token,
                "failed",
                f"its runner cannot be started: {error}",
            )
            return None
        log.info("runner started", run=active.record.id, pid=process.pid)
        # for this agent's successor
        await self._registry.renew(active.record.id, token, str(process), START_SECONDS)
        return process

    async def _until_gone(
        self, run: str, process: Child | Process | None, stop_timeout: float
    ) -> str:
        """Wait until no runner executes the run, and return why.

        A runner that hangs or does not stop is killed.
        """
        marker = ""
        stop_by = math.inf
        while True:
            active = await self._registry.find_active(run)
            if process is None and active is not None:
                process = Process.parse(active.process)
            if active is None or active.record.state == "stopping":  # its process is about to end
                stop_by = min(
                    stop_by, time.monotonic() + GRACE_SECONDS + (stop_timeout if active else 0)
                )
            forced = ""
            if time.monotonic() >= stop_by:
                forced = (
                    f"its runner did not end within {stop_timeout + GRACE_SECONDS:.0f} s and "
                    f"was killed"
                )
            elif active is not None and active.left < (
                -SILENT_SECONDS if process is not None else 0
            ):
                forced = (
                    f"its runner had not renewed its lease for {LEASE_SECONDS - active.left:.0f} s"
                )
            if process is None:
                if active is None or forced:
                    return forced or "it has ended"
            elif forced:
                process.end()
                await process.wait()
                return forced
            changed = self._registry.wait(marker, min(LOOK_SECONDS, stop_by - time.monotonic()))
            if process is None:
                marker = await changed
                continue
            new_marker, reason = await first_of(changed, _exit_reason(process))
            if reason is not None:
                return reason
            marker = new_marker or marker

    # ── what runs leave behind ──

    async def _remove_leftovers(self, active: Sequence[ActiveRun]) -> None:
        """Remove the folders of deleted runs, and the shared memory of ended ones."""
        for run, folder in (await self._registry.doomed()).items():
            if Path(folder) == self.folders / run and await asyncio.to_thread(Path(folder).exists):
                # the process that deleted it may have died before it could
                await self._registry.erase(run)
                await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
                await self._registry.remove(run)
                log.info("removed the folder of a deleted run", run=run)
        used = {run.record.id for run in active} | self._supervised.keys()
        prefix = shared_prefix(self.folders)
        for shared_folder in shared_memory_directory().glob(f"{prefix}*"):
            run = shared_folder.name.removeprefix(prefix)
            if run not in used and await self._knows_end(run):
                log.info("removed shared memory of an ended run", folder=str(shared_folder))
                await asyncio.to_thread(shutil.rmtree, shared_folder, ignore_errors=True)

    async def _knows_end(self, run: str) -> bool:
        """Return whether the list has ``run`` as ended, or it was deleted.

        A list that does not know a run whose folder is here is another one: the service's index is
        on a disk that is not mounted.
        """
        try:
            return (await self._registry.get(run)).state in ENDED
        except UnknownRun:
            return not await asyncio.to_thread((self.folders / run).exists)


async def _exit_reason(process: Child | Process) -> str:
    code = await process.wait()
    if code is None:
        return "its runner was gone"
    if code < 0:
        return f"its runner was ended by signal {-code}"
    return f"its runner ended with exit code {code}; see logs/runner.log in its folder"
