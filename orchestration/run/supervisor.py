"""The supervisor: keeps a run's workers alive, and ends the run when its work is done or cannot go on.

    launch ──▶ ready ──▶ … ──▶ exit 0: done
                 │ died: its leases end and its bytes come back at once ──▶ launch again, at most `max_restarts` times
                 └ fatal, too often, or twice of one thing before it was ready: the run fails with that reason

    created → starting → running ⇄ paused → stopping → finished | stopped | failed

The ranks of the train engine (in a colocated run each has a rollout engine too) are a rank group: each waits for the others
in every call. When one dies the supervisor ends the others and launches all of them again, which counts as one restart.

The work is done when whoever trains and whoever generates has ended by itself; the others are then told. Where another
program trains, it is done when that has published the last of ``steps``.

A supervisor may follow on another that was killed, in the same index: what its workers held is given back first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import structlog

from orchestration.run.kinds import kind_of
from orchestration.run.launchers import EXIT_FATAL, EXIT_NOT_STARTED, Launcher, Life
from pipeline.events import WorkerEvent
from pipeline.index.client import Index, worker_name

log = structlog.get_logger()

STOPPED = "stopped by request"
LIVE = ("starting", "running", "paused")


@dataclass(frozen=True)
class Outcome:
    """How a run ended: ``finished``, ``stopped`` or ``failed``, and why."""

    state: str
    reason: str = ""


class _Failed(Exception):
    """The run cannot go on."""


class Supervisor:
    """Runs ``workers``, (kind, number) each, until the work is done, ``stop`` is set, or it cannot go on."""

    def __init__(
        self,
        index: Index,
        launcher: Launcher,
        workers: Sequence[tuple[str, int]],
        *,
        max_restarts: int,
        startup_timeout: float,
        stop_timeout: float,
        steps: int = 0,
        begins: int = 0,
    ) -> None:
        self.steps, self.begins = steps, begins
        self.index, self.launcher, self.workers = index, launcher, list(workers)
        self.max_restarts, self.startup_timeout, self.stop_timeout = max_restarts, startup_timeout, stop_timeout
        self.restarts = 0
        self._lives: dict[tuple[str, int], Life] = {}
        self._failure_domains: list[object] = []
        self._not_started: dict[tuple[str, int], str] = {}  # why, the last time
        self._stopping = False
        self._unready = {f"{kind}-{number}" for kind, number in self.workers}  # of those that were launched first
        self._began = "0"  # the last event before this supervisor's

    def pids(self) -> dict[str, int]:
        """The process of each worker, as ``KIND-NUMBER``."""
        return {f"{kind}-{number}": life.pid for (kind, number), life in self._lives.items()}

    async def run(self, stop: asyncio.Event) -> Outcome:
        await self.index.transition(["created"], "starting")
        try:
            outcome = await self._supervise(stop)
        except _Failed as failed:
            outcome = Outcome("failed", str(failed))
        except Exception as error:
            log.exception("supervision failed")
            outcome = Outcome("failed", f"{type(error).__name__}: {error}")
        finally:
            self._stopping = True
            for life in self._lives.values():
                life.kill()
            await asyncio.gather(*(life.wait() for life in self._lives.values()))
        await self.index.transition(["created", *LIVE, "stopping"], outcome.state, outcome.reason)
        return outcome

    async def _supervise(self, stop: asyncio.Event) -> Outcome:
        await self._forget_former_lives()
        if (await self.index.state())[0] == "stopping":  # asked before anything was launched
            return Outcome("stopped", STOPPED)
        _, self._began = await self.index.event_ends()
        keepers = {rank_group[0]: asyncio.create_task(self._keep(rank_group)) for rank_group in self._gangs()}
        stopped: asyncio.Task = asyncio.create_task(stop.wait())
        told = asyncio.create_task(self._stopped_from_outside())
        watchers = {stopped, told, asyncio.create_task(self._start())}
        ending = [task for (kind, _), task in keepers.items() if kind_of(kind).ends_by_itself]
        if not any(kind_of(kind).is_rank_group for kind, _ in keepers):  # nobody of ours trains
            ending.append(asyncio.create_task(self._last_published()))
            watchers.add(ending[-1])
        try:
            pending: set[asyncio.Task] = {*keepers.values(), *watchers}
            while True:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
                if all(task.done() for task in ending):
                    outcome = Outcome("finished")
                    break
                if stopped.done() or told.done():
                    outcome = Outcome("stopped", STOPPED)
                    break
            await self._stop(list(keepers.values()))
            return outcome
        finally:
            for task in {*keepers.values(), *watchers}:
                task.cancel()
            await asyncio.gather(*keepers.values(), *watchers, return_exceptions=True)

    async def _stop(self, keepers: list[asyncio.Task[None]]) -> None:
        """Tell the workers, and give them ``stop_timeout`` seconds to finish what they hold: the trainer ends with a
        checkpoint. Those that are still starting hold nothing, and are ended at once, unless a trainer is to bring back
        steps that no checkpoint has."""
        self._stopping = True
        await self.index.transition(LIVE, "stopping")
        if self._unready and (await self.index.status()).trained <= self.begins:
            for (kind, number), life in self._lives.items():
                if f"{kind}-{number}" in self._unready:
                    life.kill()
        _, late = await asyncio.wait(keepers, timeout=self.stop_timeout)
        if late:
            log.warning("workers did not stop in time and are ended", count=len(late), seconds=self.stop_timeout)

    def _gangs(self) -> list[list[tuple[str, int]]]:
        """The workers by who lives and dies together: most of them alone."""
        rank_groups: dict[tuple[str, int], list[tuple[str, int]]] = {}
        for kind, number in self.workers:
            rank_groups.setdefault((kind, 0 if kind_of(kind).is_rank_group else number), []).append((kind, number))
        return list(rank_groups.values())

    async def _keep(self, rank_group: list[tuple[str, int]]) -> None:
        """Keep the workers of one rank_group alive until they are done."""
        while not self._stopping:
            names = {worker: worker_name(*worker) for worker in rank_group}
            if len(rank_group) > 1:
                await self.index.put(f"ranks:{rank_group[0][0]}", names[rank_group[0]])
            for (kind, number), name in names.items():
                await self.index.put(_life(kind, number), name)
                try:
                    life = await self.launcher.launch(self.index.run, self.index.url, kind, number, name)
                except OSError as error:  # no process, no descriptor, no memory to be had
                    raise _Failed(f"{kind}-{number} cannot be started: {error}") from error
                self._lives[kind, number] = life
                await self._tell(kind, number, "started", pid=life.pid)
            codes = await self._wait({worker: self._lives[worker] for worker in rank_group})
            if not any(codes.values()):
                return
            reasons = {worker: await self.index.get(f"reason:{names[worker]}") for worker in rank_group}
            for name in names.values():
                await self.index.forget_worker(name)
            if self._stopping:
                return
            first = next(iter(codes))
            kind, number = first
            failure_domain = self._lives[first].failure_domain
            reason = reasons[first] or ("its fork server has ended" if failure_domain else ending(codes[first]))
            log.debug("worker died", worker=names[first], code=codes[first], reason=reason)
            await self._tell(kind, number, "died", reason=reason)
            for other in rank_group:
                if other != first and reasons[other]:  # not only ended: it had something to say
                    log.warning("worker died too", worker=names[other], reason=reasons[other])
            for (kind, number), code in codes.items():
                if code == EXIT_FATAL:
                    raise _Failed(f"{kind}-{number}: {reasons[kind, number] or ending(code)}")
            if codes[first] == EXIT_NOT_STARTED:
                if self._not_started.get(first) == reason:
                    raise _Failed("{}-{} did not start, twice for the same reason: {}".format(*first, reason))
                self._not_started[first] = reason
            if (
                failure_domain is None or failure_domain not in self._failure_domains
            ):  # several that died of one thing count once
                if self.restarts >= self.max_restarts:
                    kind, number = first
                    raise _Failed(
                        f"{kind}-{number} died and launch.max_restarts = {self.max_restarts} is used up: {reason}"
                    )
                self.restarts += 1
                self._failure_domains.append(failure_domain)
            await self._tell(*rank_group[0], "restarted", reason=reason)

    async def _wait(self, lives: dict[tuple[str, int], Life]) -> dict[tuple[str, int], int]:
        """Exit codes of a rank group in the order in which its members ended. When one dies the others, which would wait for
        it, are ended at once."""
        codes: dict[tuple[str, int], int] = {}
        waiting = {asyncio.create_task(life.wait()): worker for worker, life in lives.items()}
        try:
            while waiting:
                done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                # Of several at once the one that was killed comes first: the others have died of it.
                for task in sorted(done, key=lambda task: task.result()):
                    codes[waiting.pop(task)] = task.result()
                if any(codes.values()):
                    for worker in waiting.values():
                        lives[worker].kill()
            return dict(sorted(codes.items(), key=lambda item: item[1] == 0))  # those that were done come last
        finally:
            for task in waiting:
                task.cancel()

    async def _start(self) -> None:
        """Wait until every worker has said that it is ready."""
        after = self._began
        try:
            async with asyncio.timeout(self.startup_timeout):
                while self._unready:
                    for event in await self.index.events(after):
                        after = event.id
                        if event.kind == "worker" and event.data["change"] == "ready":
                            self._unready.discard(event.data["worker"])
        except TimeoutError:
            raise _Failed(
                f"{sorted(self._unready)} not ready within launch.startup_timeout = {self.startup_timeout:.0f} s; "
                "see the logs"
            ) from None
        await self.index.transition(
            ["starting"], "running"
        )  # one that was paused when its supervisor was killed stays so

    async def _stopped_from_outside(self) -> None:
        """Return when somebody else asks the run to stop."""
        while True:
            state, _, after = await self.index.state()
            if state == "stopping":
                return
            await self.index.wait("state", after, 10.0)

    async def _last_published(self) -> None:
        """Return when somebody has published the last version."""
        while (status := await self.index.status()).published < self.steps:
            await self.index.wait("version", status.wait, 10.0)

    async def _tell(self, kind: str, number: int, change: str, *, pid: int = 0, reason: str = "") -> None:
        worker = f"{kind}-{number}"
        await self.index.emit(WorkerEvent(stage=kind, worker=worker, change=change, pid=pid, reason=reason))

    async def _forget_former_lives(self) -> None:
        """What the workers of a killed supervisor held can be claimed again at once, and their open bytes are free."""
        for kind, number in self.workers:
            if name := await self.index.get(_life(kind, number)):
                await self.index.forget_worker(name)


def _life(kind: str, number: int) -> str:
    """The document that names the present life of a worker."""
    return f"life:{kind}-{number}"


def ending(code: int) -> str:
    """How a process with this exit code has ended, in words."""
    return f"ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
