"""The supervisor: starts a run's workers, restarts those that die, and ends the run.

    launch ──▶ ready ──▶ … ──▶ exit 0: done
                 │ died: its leases end and its bytes are free at once ──▶ launch again, within its restart budget
                 └ a fatal error, too many deaths, or the same error twice before it was ready: the run fails

    created → starting → running ⇄ paused → stopping → finished | stopped | failed

The ranks of the train engine are a rank group, with the critic where it has a worker of its own: each waits for the others.
When one dies the supervisor ends the others and launches all of them again, which counts as one restart.

A worker of an elastic kind (``orchestration.run.kinds``) whose budget is used up does not end the run while another one of
its kind works: it is absent until the budget allows a restart. At its end the trainer waits for the engines that are not.

The number of workers of such a kind changes on request (``orchestration.elastic.scale``): new ones are launched, and the
last ones leave within ``leave_timeout`` seconds. One that leaves because its host does is launched again, on another host.

The work is done when all workers of the kinds that end by themselves (``orchestration.run.kinds``) have ended; the others
are stopped then. Where another program trains, it is done when that has published the last of ``steps``.

A supervisor may follow a killed one in the same index: the rows that its workers held are given back first.
"""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import structlog

from orchestration.elastic.budget import RestartBudget
from orchestration.elastic.scale import SCALE, leaves, request_leave
from orchestration.guard.liveness import Liveness
from orchestration.guard.waiting import shown
from orchestration.guard.watch import GuardFailed, GuardWatch
from orchestration.recipe.sections import LaunchSection
from orchestration.run.exit_codes import EXIT_FATAL, EXIT_NOT_STARTED, EXIT_REWIND
from orchestration.run.kinds import kind_of
from orchestration.run.launchers import Launcher, Life, Unplaceable
from orchestration.service.registry import LIVE
from pipeline.events import WorkerEvent
from pipeline.first_of import first_of
from pipeline.index.client import ENGINES, TAKEN, Index, worker_name

log = structlog.get_logger()

Worker = tuple[str, int]  # kind and number
STOPPED = "stopped by request"
REWIND = "rewind"  # outcome of a supervisor whose run another one continues from the newest checkpoint
SCALE_SECONDS = 10.0  # a wait for another number of workers is renewed this often


@dataclass(frozen=True)
class Outcome:
    """How a run ended: ``finished``, ``stopped`` or ``failed``, or that it is to be rewound, and why."""

    state: str
    reason: str = ""


class _Failed(Exception):
    """The run cannot go on."""


class _Rewind(Exception):
    """The run can go on from its newest checkpoint alone."""


class Supervisor:
    """Runs ``workers``, (kind, number) each, until the work is done, ``stop`` is set, or it cannot go on. ``rescale``
    returns the workers of the run for a number of rollout workers, and prepares the launcher for them."""

    def __init__(
        self,
        index: Index,
        launcher: Launcher,
        workers: Sequence[Worker],
        launch: LaunchSection,
        *,
        steps: int,
        begins: int,
        guard: GuardWatch | None = None,
        rescale: Callable[[int], Sequence[Worker]] | None = None,
    ) -> None:
        self.guard = guard
        self.index, self.launcher, self.workers, self.launch = index, launcher, list(workers), launch
        self.steps, self.begins, self.restarts = steps, begins, 0
        self._rescale = rescale or (lambda _: self.workers)
        self._lives: dict[Worker, Life] = {}
        self._liveness = Liveness(index, launch, self._record_unplaced)
        self._budgets: dict[Worker, RestartBudget] = {}
        self._keepers: dict[Worker, asyncio.Task[None]] = {}  # by the first worker of a rank group
        self._absent: set[Worker] = set()  # wait until their budgets allow a restart
        self._leaving: dict[Worker, asyncio.Task[None]] = {}
        self._asked, self._asked_at = 0, ""  # rollout workers, and the position of the topic of SCALE
        self._not_started: dict[Worker, str] = {}  # the last reason
        self._stopping = False
        self._unready = {_shown(worker) for worker in self.workers}  # of the workers that were launched first
        self._began = "0"  # the last event before those of this supervisor

    def pids(self) -> dict[str, int]:
        """Returns the process of each worker, by ``KIND-NUMBER``."""
        return {_shown(worker): life.pid for worker, life in self._lives.items()}

    async def run(self, stop: asyncio.Event) -> Outcome:
        await self.index.transition(["created"], "starting")
        try:
            outcome = await self._supervise(stop)
        except (_Failed, GuardFailed, Unplaceable) as failed:
            outcome = Outcome("failed", str(failed))
        except _Rewind as gone:
            outcome = Outcome(REWIND, str(gone))
        except Exception as error:
            log.exception("supervision failed")
            outcome = Outcome("failed", f"{type(error).__name__}: {error}")
        finally:
            self._stopping = True
            for life in self._lives.values():
                life.end()
            await asyncio.gather(*(life.wait() for life in self._lives.values()), return_exceptions=True)
        if outcome.state != REWIND:
            await self.index.transition(["created", *LIVE, "stopping"], outcome.state, outcome.reason)
        return outcome

    async def _supervise(self, stop: asyncio.Event) -> Outcome:
        await _forget_former_workers(self.index, self.workers)
        if (await self.index.state())[0] == "stopping":  # requested before anything was launched
            return Outcome("stopped", STOPPED)
        _, self._began = await self.index.event_ends()
        if self.guard is not None:
            await self.guard.begin()
        self._keepers = keepers = {
            group[0]: asyncio.create_task(self._keep(group)) for group in _rank_groups(self.workers)
        }
        await self._record_engines()
        stopping = asyncio.create_task(first_of(stop.wait(), _stop_requested(self.index)))
        watchers: list[asyncio.Task[Any]] = [
            stopping,
            asyncio.create_task(self._start()),
            asyncio.create_task(self._liveness.run()),
        ]
        guarding = asyncio.create_task(self.guard.run()) if self.guard is not None else None
        watchers += [guarding] if guarding is not None else []
        trained = None
        if not any(kind_of(kind).rank_group for kind, _ in keepers):  # another program trains
            watchers.append(trained := asyncio.create_task(_last_published(self.index, self.steps)))
        scaling = asyncio.create_task(self._scale())
        watchers.append(scaling)
        try:
            while True:
                pending = {task for task in (*keepers.values(), *watchers) if not task.done()}
                ended, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for task in ended:
                    if not task.cancelled():  # an absent worker left
                        task.result()
                if scaling.done():  # `keepers` may have changed
                    watchers[-1] = scaling = asyncio.create_task(self._scale())
                if self._work_is_done() and (trained is None or trained.done()):
                    outcome = Outcome("finished")
                    break
                if stopping.done():
                    outcome = Outcome("stopped", STOPPED)
                    break
            await self._stop(list(keepers.values()))
            if guarding is not None and self.guard is not None:  # the last step is judged too
                await self.guard.catch_up()
                if guarding.done():
                    guarding.result()
            return outcome
        finally:
            tasks = [*keepers.values(), *self._leaving.values(), *watchers]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _work_is_done(self) -> bool:
        work = {worker: task for worker, task in self._keepers.items() if kind_of(worker[0]).ends_by_itself}
        return all(task.done() or worker in self._absent for worker, task in work.items())

    async def _stop(self, keepers: list[asyncio.Task[None]]) -> None:
        """Stop the workers, and give them ``stop_timeout`` seconds to finish what they hold: the trainer ends with a
        checkpoint. Those that are still starting hold nothing and are ended at once, unless a trainer has to replay steps
        that no checkpoint has."""
        self._stopping = True
        await self.index.transition(LIVE, "stopping")
        if self._unready and (await self.index.status()).trained <= self.begins:
            for worker, life in self._lives.items():
                if _shown(worker) in self._unready:
                    life.end()
        for worker in self._absent:
            self._keepers[worker].cancel()
        _, late = await asyncio.wait(keepers, timeout=self.launch.stop_timeout)
        if late:
            log.warning("workers did not stop in time and are ended", count=len(late), seconds=self.launch.stop_timeout)

    async def _keep(self, group: list[Worker]) -> None:
        """Launch the workers of ``group``, again when they die, until they are done."""
        while not self._stopping:
            names = {worker: worker_name(*worker) for worker in group}
            await self._launch(names)
            codes = await _wait({worker: self._lives[worker] for worker in group})
            for name in names.values():
                self._liveness.leave(name)
            left = await leaves(self.index, names[group[0]])
            if not any(codes.values()) and not left:
                return
            reasons = {worker: await self.index.get(f"reason:{names[worker]}") for worker in group}
            for name in names.values():
                await self.index.forget_worker(name)
            if self._stopping:
                for worker, reason in reasons.items():
                    if codes.get(worker) and reason:  # such as a last checkpoint that could not be written
                        log.warning("worker failed while it stopped", worker=names[worker], reason=reason)
                        await self._emit(worker, "died", reason=reason)
                return
            if left:
                await self._emit(group[0], "left", reason=ending(code) if (code := codes[group[0]]) else "")
                if not await self._stays(group[0]):
                    return
                continue
            reason = await self._report_deaths(codes, reasons, names)
            await self._take_restart(group[0], next(iter(codes)), codes, reason)
            await self._emit(group[0], "restarted", reason=reason)

    async def _launch(self, names: dict[Worker, str]) -> None:
        """Launch one worker under each of ``names``. Raises _Failed when the machine has no process or memory to give."""
        first = next(iter(names))
        if len(names) > 1:
            await self.index.put(f"ranks:{first[0]}", names[first])
        for worker, name in names.items():
            await self.index.put(_life(worker), name)
            try:
                life = await self.launcher.launch(self.index.run, self.index.url, *worker, name)
            except OSError as error:
                raise _Failed(f"{_shown(worker)} cannot be started: {error}") from error
            self._lives[worker] = life
            self._liveness.follow(name, life)
            await self._emit(worker, "started", pid=life.pid)

    async def _report_deaths(
        self, codes: dict[Worker, int], reasons: dict[Worker, str | None], names: dict[Worker, str]
    ) -> str:
        """Emit why the first of ``codes`` died, and return it. Raises _Failed when a restart would not help."""
        first = next(iter(codes))
        orphaned = self._lives[first].orphaned
        reason = reasons[first] or (ending(codes[first]) if orphaned is None else str(orphaned))
        log.debug("worker died", worker=names[first], code=codes[first], reason=reason)
        await self._emit(first, "died", reason=reason)
        for worker, code in codes.items():
            if worker != first and reasons[worker]:  # it failed by itself, it was not ended for the first one's death
                log.warning("worker died too", worker=names[worker], reason=reasons[worker])
            if code == EXIT_FATAL:
                raise _Failed(f"{_shown(worker)}: {reasons[worker] or ending(code)}")
            if code == EXIT_REWIND:
                raise _Rewind(reasons[worker] or ending(code))
        return reason

    async def _take_restart(self, group: Worker, first: Worker, codes: dict[Worker, int], reason: str) -> None:
        """Return when the rank group of ``group`` may be restarted after the death of ``first``. Raises _Failed when it may
        not be, and the run cannot go on without it."""
        if codes[first] == EXIT_NOT_STARTED and not self._others_work(group):
            if self._not_started.get(first) == reason:
                raise _Failed(f"{_shown(first)} failed twice before its first work, for the same reason: {reason}")
            self._not_started[first] = reason
        most = self.launch.max_restarts
        budget = self._budgets.setdefault(group, RestartBudget(most, self.launch.restart_window))
        while seconds := budget.take(time.monotonic()):
            used_up = f"launch.max_restarts = {most} is used up: {reason}"
            if not self._others_work(group):
                raise _Failed(f"{_shown(first)} died and {used_up}")
            if group not in self._absent:
                self._absent.add(group)
                await self._record_engines()
                log.warning("worker is absent", worker=_shown(group), reason=used_up, seconds=seconds)
                await self._emit(group, "absent", reason=used_up)
            await asyncio.sleep(min(seconds, self.launch.restart_window))
        self.restarts += 1
        if group in self._absent:
            self._absent.remove(group)
            await self._record_engines()

    async def _scale(self) -> None:
        """Wait until the number of rollout workers is asked for, or a while; launch those that are new, and have those leave
        that are too many."""
        self._asked_at = await self.index.woken(SCALE, self._asked_at, SCALE_SECONDS)
        asked = int(await self.index.get(SCALE) or self._asked)
        if asked != self._asked and not self._stopping:
            self._asked, self.workers = asked, list(await asyncio.to_thread(self._rescale, asked))
        new = [each for each in self.workers if kind_of(each[0]).elastic and each not in self._keepers]
        await _forget_former_workers(self.index, new)
        self._keepers |= {worker: asyncio.create_task(self._keep([worker])) for worker in new}
        for worker in self._keepers.keys() - set(self.workers) - self._leaving.keys():
            if worker in self._absent or (worker in self._lives and not self._keepers[worker].done()):
                self._leaving[worker] = asyncio.create_task(self._leave(worker))
        await self._record_engines()

    async def _leave(self, worker: Worker) -> None:
        """Have ``worker`` leave, and end it where it does not within ``leave_timeout``."""
        if worker in self._absent:
            self._keepers[worker].cancel()
            self._lives[worker].end()  # an order that no host has taken
            self._liveness.leave(await self.index.get(_life(worker)) or "")
            await self._emit(worker, "left")
            await self._stays(worker)
            return
        life = self._lives[worker]
        await self._emit(worker, "leaves")
        await request_leave(self.index, await self.index.get(_life(worker)) or "")
        await first_of(life.wait(), timeout=self.launch.leave_timeout)
        life.end()

    async def _stays(self, worker: Worker) -> bool:
        """Whether ``worker``, which has left, is to be launched again; otherwise it is forgotten."""
        self._leaving.pop(worker, None)
        if worker not in self.workers:
            self._absent.discard(worker)
            del self._keepers[worker], self._lives[worker]
        await self._record_engines()
        return worker in self.workers

    def _others_work(self, worker: Worker) -> bool:
        """Whether the run goes on without ``worker``, as others of its elastic kind work, or have done all of it."""
        return kind_of(worker[0]).elastic and any(
            other[0] == worker[0] and other != worker and other not in self._absent for other in self._keepers
        )

    async def _record_unplaced(self, name: str, is_unplaced: bool) -> None:
        """A worker that no machine starts is absent, until one does: the run ends without it."""
        kind, _, number = shown(name).rpartition("-")
        worker = kind, int(number)
        if is_unplaced and worker not in self._absent and worker not in self._leaving and self._others_work(worker):
            self._absent.add(worker)
            await self._emit(worker, "absent", reason="no host has room for it")
        elif not is_unplaced and worker in self._absent:
            self._absent.remove(worker)
        else:
            return
        await self._record_engines()

    async def _record_engines(self) -> None:
        """Record for the trainer which engines must have the last version before the run ends."""
        away = {*self._absent, *self._leaving}
        engines = [_shown(worker) for worker in self._keepers if kind_of(worker[0]).elastic and worker not in away]
        await self.index.put(ENGINES, json.dumps(engines))
        await self.index.wake(TAKEN)

    async def _start(self) -> None:
        """Wait until every worker is ready."""
        after = self._began
        try:
            async with asyncio.timeout(self.launch.startup_timeout):
                while self._unready:
                    for event in await self.index.events(after):
                        after = event.id
                        if event.kind == "worker" and event.data["change"] == "ready":
                            self._unready.discard(event.data["worker"])
        except TimeoutError:
            limit = f"launch.startup_timeout = {self.launch.startup_timeout:.0f} s"
            raise _Failed(f"{sorted(self._unready)} not ready within {limit}; see the logs") from None
        # A run that was paused when its supervisor was killed stays so.
        await self.index.transition(["starting"], "running")

    async def _emit(self, worker: Worker, change: str, *, pid: int = 0, reason: str = "") -> None:
        await self.index.emit(
            WorkerEvent(stage=worker[0], worker=_shown(worker), change=change, pid=pid, reason=reason)
        )


def _shown(worker: Worker) -> str:
    return f"{worker[0]}-{worker[1]}"


def _life(worker: Worker) -> str:
    """Returns the key of the document that names the present process of ``worker``."""
    return f"life:{_shown(worker)}"


def ending(code: int) -> str:
    """Returns in words how a process with this exit code has ended."""
    return f"ended by signal {-code}" if code < 0 else f"ended with exit code {code}"


def _rank_groups(workers: Iterable[Worker]) -> list[list[Worker]]:
    """Returns the workers in groups that start and end together: most groups have one worker."""
    groups: dict[Worker, list[Worker]] = {}
    for kind, number in workers:
        group = kind_of(kind).rank_group
        groups.setdefault((group, 0) if group else (kind, number), []).append((kind, number))
    return list(groups.values())


async def _wait(lives: dict[Worker, Life]) -> dict[Worker, int]:
    """Returns the exit codes of a rank group in the order in which its members ended. When one dies the others, which
    would wait for it, are ended at once."""
    codes: dict[Worker, int] = {}
    waiting = {asyncio.create_task(life.wait()): worker for worker, life in lives.items()}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            # Of several at once, the one that was killed comes first: the others died because of it.
            ended = [(task, -signal.SIGKILL if (code := task.result()) is None else code) for task in done]
            for task, code in sorted(ended, key=lambda item: item[1]):
                codes[waiting.pop(task)] = code
            if any(codes.values()):
                for worker in waiting.values():
                    lives[worker].end()
        return dict(sorted(codes.items(), key=lambda item: item[1] == 0))  # those that were done come last
    finally:
        for task in waiting:
            task.cancel()


async def _stop_requested(index: Index) -> None:
    """Return when the run's state in the index becomes "stopping"."""
    while True:
        state, _, after = await index.state()
        if state == "stopping":
            return
        await index.wait("state", after, 10.0)


async def _last_published(index: Index, steps: int) -> None:
    """Return when the last version is published."""
    while (status := await index.status()).published < steps:
        await index.wait("version", status.wait, 10.0)


async def _forget_former_workers(index: Index, workers: Iterable[Worker]) -> None:
    """Free the rows and the open bytes that ``workers`` of a killed supervisor held."""
    for worker in workers:
        if name := await index.get(_life(worker)):
            await index.forget_worker(name)
