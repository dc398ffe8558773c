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
import signal
import time
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import structlog

from orchestration.elastic.autoscale import follow_load
from orchestration.elastic.budget import RestartBudget
from orchestration.elastic.scale import scaled
from orchestration.guard.guard import Guard
from orchestration.guard.liveness import Liveness
from orchestration.guard.watch import GuardFailed, GuardWatch, options_of
from orchestration.recipe.schema import Recipe
from orchestration.run.documents import (
    EXIT_FATAL,
    EXIT_NOT_STARTED,
    EXIT_REWIND,
    LEAVE,
    PROCESS,
    RANKS,
    REASON,
    SCALE,
    SCALES,
)
from orchestration.run.kinds import WorkerKind, kind_of, remote_workers, workers_of
from orchestration.run.launchers import Launcher, Life, Unplaceable
from orchestration.service.registry import LIVE
from orchestration.simulation.live import follow_costs
from pipeline.documents.flow import STATE, VERSION
from pipeline.events import WorkerEvent
from pipeline.first_of import cancel_all, first_of
from pipeline.index.client import Index, IndexRefused, IndexUnreachable, worker_name
from stages.weights.documents import ENGINES

log = structlog.get_logger()

T = TypeVar("T")
Worker = tuple[str, int]  # kind and number
STOPPED = "stopped by request"
REWIND = "rewind"  # outcome of a supervisor whose run another one continues from the newest checkpoint
SCALE_SECONDS = 10.0  # a wait for another number of workers is renewed this often


@dataclass(frozen=True)
class Outcome:
    """How a run ended: ``finished``, ``stopped`` or ``failed``, or that it is to be rewound, and why."""

    state: str
    reason: str = ""
    worker: str = field(default="", compare=False)  # whose log has more


class _Failed(Exception):
    """The run cannot go on. ``worker``: whose log has more, where it is one's."""

    def __init__(self, reason: str, worker: Worker | None = None) -> None:
        super().__init__(reason)
        self.worker = _shown(worker) if worker else ""


class _Rewind(Exception):
    """The run can go on from its newest checkpoint alone."""


@dataclass(eq=False)
class _Group:
    """A rank group: workers that start and end together. Most groups have one worker. ``first``: the one that it goes by;
    ``names`` and ``lives``: of the present processes."""

    workers: list[Worker]
    budget: RestartBudget
    keeper: asyncio.Task[None]
    names: dict[Worker, str] = field(default_factory=dict)
    lives: dict[Worker, Life] = field(default_factory=dict)
    is_absent: bool = False  # waits for its budget, or for a host, and the run goes on without it
    is_leaving: bool = False
    not_started: str = ""  # why it failed before its first work, at the last attempt

    @property
    def first(self) -> Worker:
        return self.workers[0]

    @property
    def kind(self) -> WorkerKind:
        return kind_of(self.first[0])


class Supervisor:
    """Runs the workers of ``recipe`` until the work is done, ``stop`` is set, or it cannot go on. ``begins``: optimizer
    steps that were made before; ``folder``: of the run, with what it has recorded; None: nothing is forecast."""

    def __init__(
        self, index: Index, launcher: Launcher, recipe: Recipe, *, begins: int, folder: Path | None = None
    ) -> None:
        self.index, self.launcher, self.recipe, self.launch = index, launcher, recipe, recipe.launch
        self.folder = folder
        self.workers, self.begins, self.restarts = workers_of(recipe), begins, 0
        self.guard = GuardWatch(index, Guard(options_of(recipe)), recipe.guard.on_alarm, folder)
        self._groups: dict[Worker, _Group] = {}  # by their first workers
        self._liveness = Liveness(index, recipe.launch, self._record_unplaced)
        self._tasks: list[asyncio.Task[Any]] = []
        self._ended: asyncio.Queue[asyncio.Task[Any] | None] = asyncio.Queue()  # None: look again whether all is done
        self._stopping = False
        self._unready = {_shown(worker) for worker in self.workers}  # of the workers that were launched first
        self._began = "0"  # the last event before those of this supervisor

    def pids(self) -> dict[str, int]:
        """Returns the process of each worker, by ``KIND-NUMBER``."""
        return {_shown(worker): life.pid for group in self._groups.values() for worker, life in group.lives.items()}

    async def run(self, stop: asyncio.Event) -> Outcome:
        await self.index.transition(["created"], "starting")
        try:
            outcome = await self._supervise(stop)
        except (_Failed, GuardFailed, Unplaceable) as failed:
            outcome = Outcome("failed", str(failed), getattr(failed, "worker", ""))
        except _Rewind as gone:
            outcome = Outcome(REWIND, str(gone))
        except Exception as error:
            log.exception("supervision failed")
            outcome = Outcome("failed", f"{type(error).__name__}: {error}")
        finally:
            self._stopping = True
            await cancel_all(*self._tasks)
            lives = [life for group in self._groups.values() for life in group.lives.values()]
            for life in lives:
                life.end()
            await asyncio.gather(*(life.wait() for life in lives), return_exceptions=True)
        if outcome.state != REWIND:
            await _report_ledger(self.index)
            await self.index.transition(["created", *LIVE, "stopping"], outcome.state, outcome.reason)
        return outcome

    async def _supervise(self, stop: asyncio.Event) -> Outcome:
        await _forget_former_workers(self.index, self.workers)
        if (await self.index.state())[0] == "stopping":  # requested before anything was launched
            return Outcome("stopped", STOPPED)
        _, self._began = await self.index.event_ends()
        await self.guard.begin()
        for workers in _rank_groups(self.workers):
            self._add(workers)
        await self._record_engines()
        stopping = self._begin(first_of(stop.wait(), _stop_requested(self.index)))
        guarding = self._begin(self.guard.run())
        for work in (self._start(), self._liveness.run(), self._scale()):
            self._begin(work)
        if self.launch.autoscale.max:
            self._begin(follow_load(self.index, self.recipe))
        if self.folder is not None:
            self._begin(follow_costs(self.index, self.recipe, self.folder))
        trained = None
        if not any(group.kind.rank_group for group in self._groups.values()):  # another program trains
            trained = self._begin(_last_published(self.index, self.recipe.train.steps))
        is_done = False
        while not is_done and not stopping.done():
            ended = await self._ended.get()
            if ended is not None and not ended.cancelled():  # cancelled: an absent worker left
                ended.result()
            is_done = self._work_is_done() and (trained is None or trained.done())
        await self._stop()
        await self.guard.catch_up()  # the last step is judged too
        if guarding.done():
            guarding.result()
        return Outcome("finished") if is_done else Outcome("stopped", STOPPED)

    def _begin(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run ``work`` beside the rest of the supervision. Its failure is the supervision's."""
        task = asyncio.create_task(work)
        self._tasks.append(task)
        task.add_done_callback(self._ended.put_nowait)
        return task

    def _add(self, workers: list[Worker]) -> None:
        """Launch a further rank group, and keep it alive."""
        first, budget = workers[0], RestartBudget(self.launch.max_restarts, self.launch.restart_window)
        self._groups[first] = _Group(workers, budget, self._begin(self._keep(first)))

    def _work_is_done(self) -> bool:
        work = [group for group in self._groups.values() if group.kind.ends_by_itself]
        return all(group.keeper.done() or group.is_absent for group in work)

    async def _stop(self) -> None:
        """Stop the workers, and give them ``stop_timeout`` seconds to finish what they hold: the trainer ends with a
        checkpoint. Those that are still starting hold nothing and are ended at once, unless a trainer has to replay steps
        that no checkpoint has."""
        self._stopping = True
        await self.index.transition(LIVE, "stopping")
        end_unready = self._unready and (await self.index.status()).trained <= self.begins
        for group in self._groups.values():
            for worker, life in group.lives.items():
                if end_unready and _shown(worker) in self._unready:
                    life.end()
            if group.is_absent:
                group.keeper.cancel()
        keepers = [group.keeper for group in self._groups.values()]
        _, late = await asyncio.wait(keepers, timeout=self.launch.stop_timeout)
        if late:
            log.warning("workers did not stop in time and are ended", count=len(late), seconds=self.launch.stop_timeout)

    async def _keep(self, first: Worker) -> None:
        """Launch the workers of the group of ``first``, again when they die, until they are done."""
        group = self._groups[first]
        while not self._stopping:
            await self._launch(group)
            codes = await _wait(group.lives)
            left = await LEAVE.get(self.index, name=group.names[first])
            for name in group.names.values():
                self._liveness.lives.pop(name, None)
            if not any(codes.values()) and not left:
                return
            reasons = {worker: await REASON.get(self.index, name=name) for worker, name in group.names.items()}
            for name in group.names.values():
                await self.index.forget_worker(name)
            if self._stopping:
                for worker, reason in reasons.items():
                    if codes.get(worker) and reason:  # such as a last checkpoint that could not be written
                        log.warning("worker failed while it stopped", worker=group.names[worker], reason=reason)
                        await self._emit(worker, "died", reason=reason)
                return
            if left:
                await self._emit(first, "left", reason=ending(code) if (code := codes[first]) else "")
                if not await self._stays(group):
                    return
                continue
            reason = await self._report_deaths(group, codes, reasons)
            await self._take_restart(group, next(iter(codes)), codes, reason)
            await self._emit(first, "restarted", reason=reason)

    async def _launch(self, group: _Group) -> None:
        """Launch the workers of ``group`` under new names. Raises _Failed when the machine has no process or memory to
        give."""
        group.names = {worker: worker_name(*worker) for worker in group.workers}
        if len(group.workers) > 1:
            await RANKS.put(self.index, group.names[group.first], kind=group.first[0])
        for worker, name in group.names.items():
            await PROCESS.put(self.index, name, worker=_shown(worker))
            try:
                life = await self.launcher.launch(self.index.run, self.index.url, *worker, name)
            except OSError as error:
                raise _Failed(f"{_shown(worker)} cannot be started: {error}", worker) from error
            group.lives[worker] = self._liveness.lives[name] = life
            await self._emit(worker, "started", pid=life.pid)

    async def _report_deaths(self, group: _Group, codes: dict[Worker, int], reasons: dict[Worker, str | None]) -> str:
        """Emit why the first of ``codes`` died, and return it. Raises _Failed when a restart would not help."""
        first = next(iter(codes))
        orphaned = group.lives[first].orphaned
        reason = reasons[first] or (ending(codes[first]) if orphaned is None else str(orphaned))
        log.debug("worker died", worker=group.names[first], code=codes[first], reason=reason)
        await self._emit(first, "died", reason=reason)
        for worker, code in codes.items():
            if worker != first and reasons[worker]:  # it failed by itself, it was not ended for the first one's death
                log.warning("worker died too", worker=group.names[worker], reason=reasons[worker])
            if code == EXIT_FATAL:
                raise _Failed(f"{_shown(worker)}: {reasons[worker] or ending(code)}", worker)
            if code == EXIT_REWIND:
                raise _Rewind(reasons[worker] or ending(code))
        return reason

    async def _take_restart(self, group: _Group, dead: Worker, codes: dict[Worker, int], reason: str) -> None:
        """Return when ``group`` may be restarted after the death of its worker ``dead``. Raises _Failed when it may not be,
        and the run cannot go on without it."""
        if codes[dead] == EXIT_NOT_STARTED and not self._others_work(group):
            if group.not_started == reason:
                raise _Failed(f"{_shown(dead)} failed twice before its first work, for the same reason: {reason}", dead)
            group.not_started = reason
        while seconds := group.budget.take(time.monotonic()):
            used_up = f"launch.max_restarts = {group.budget.most} is used up: {reason}"
            if not self._others_work(group):
                raise _Failed(f"{_shown(dead)} died and {used_up}", dead)
            await self._set_absent(group, used_up)
            await asyncio.sleep(min(seconds, self.launch.restart_window))
        self.restarts += 1
        await self._set_absent(group, "")

    async def _scale(self) -> None:
        """Follow the number of rollout workers that is asked for: launch those that are new, and have those leave that are
        too many."""
        after, asked = "", 0
        while True:
            after = await self.index.woken(SCALES, after, SCALE_SECONDS)
            wanted = await SCALE.get(self.index) or asked
            if wanted != asked and not self._stopping:
                asked, recipe = wanted, await asyncio.to_thread(scaled, self.recipe, wanted)
                self.launcher.rescale(recipe)
                self.workers = workers_of(recipe)
            new = [each for each in self.workers if kind_of(each[0]).elastic and each not in self._groups]
            await _forget_former_workers(self.index, new)
            for worker in new:
                self._add([worker])
            for group in self._groups.values():
                is_there = group.is_absent or (group.lives and not group.keeper.done())
                if group.first not in self.workers and is_there and not group.is_leaving:
                    group.is_leaving = True
                    self._begin(self._leave(group))
            await self._record_engines()

    async def _leave(self, group: _Group) -> None:
        """Have the worker of ``group`` leave, and end it where it does not within ``leave_timeout``."""
        name, life = group.names[group.first], group.lives[group.first]
        if group.is_absent:
            group.keeper.cancel()
            life.end()  # an order that no host has taken
            self._liveness.lives.pop(name, None)
            await self._emit(group.first, "left")
            await self._stays(group)
            return
        await self._emit(group.first, "leaves")
        await LEAVE.put(self.index, True, name=name)
        await first_of(life.wait(), timeout=self.launch.leave_timeout)
        life.end()

    async def _stays(self, group: _Group) -> bool:
        """Whether ``group``, which has left, is to be launched again; otherwise it is forgotten."""
        group.is_leaving = False
        stays = group.first in self.workers
        if not stays:
            del self._groups[group.first]
        await self._record_engines()
        return stays

    def _others_work(self, group: _Group) -> bool:
        """Whether the run goes on without ``group``, as others of its elastic kind work, or have done all of it."""
        others = (other for other in self._groups.values() if other is not group and other.kind is group.kind)
        return group.kind.elastic and not all(other.is_absent for other in others)

    async def _record_unplaced(self, name: str, is_unplaced: bool) -> None:
        """A worker that no machine starts is absent, until one does: the run ends without it."""
        group = next(group for group in self._groups.values() if name in group.names.values())
        if not is_unplaced:
            await self._set_absent(group, "")
        elif not group.is_leaving and self._others_work(group):
            await self._set_absent(group, "no host has room for it")

    async def _set_absent(self, group: _Group, reason: str) -> None:
        """Record that ``group`` is absent for ``reason``; "": it is not."""
        if group.is_absent == bool(reason):
            return
        group.is_absent = bool(reason)
        await self._record_engines()
        if reason:
            log.warning("worker is absent", worker=_shown(group.first), reason=reason)
            await self._emit(group.first, "absent", reason=reason)
            self._ended.put_nowait(None)  # perhaps all the others are done

    async def _record_engines(self) -> None:
        """Record for the trainer which engines must have the last version before the run ends."""
        groups = [group for group in self._groups.values() if not group.is_absent and not group.is_leaving]
        engines = [_shown(group.first) for group in groups if group.kind.elastic]
        await ENGINES.put(self.index, engines)

    async def _start(self) -> None:
        """Let the run be `running` when it can train: of an elastic kind one worker is enough. Wait for the others no longer
        than ``startup_timeout``."""
        try:
            async with asyncio.timeout(self.launch.startup_timeout):
                async for event in self.index.follow(self._began):
                    if event.kind == "worker" and event.data["change"] == "ready":
                        self._unready.discard(event.data["worker"])
                    if not self._missing():
                        # A run that was paused when its supervisor was killed stays so.
                        await self.index.transition(["starting"], "running")
                    if not self._unready:
                        return
        except TimeoutError:
            limit = f"launch.startup_timeout = {self.launch.startup_timeout:.0f} s"
            if missing := self._missing():
                unplaced = await _unplaced(self.index, self.recipe, self._groups.values())
                hosts = [worker for worker in missing if worker in unplaced]
                fix = f"no host has started {hosts}: start one with `asyncdock host`" if hosts else "see the logs"
                raise _Failed(f"{missing} not ready within {limit}; {fix}") from None
            log.warning(
                "the run goes on without workers that are not ready", workers=sorted(self._unready), within=limit
            )

    def _missing(self) -> list[str]:
        """The workers without which the run cannot train that are not ready."""
        groups = [group for group in self._groups.values() if _shown(group.first) not in self._unready]
        ready = {group.kind for group in groups if group.kind.elastic}
        elastic = {_shown(group.first) for group in self._groups.values() if group.kind in ready}
        return sorted(self._unready - elastic)

    async def _emit(self, worker: Worker, change: str, *, pid: int = 0, reason: str = "") -> None:
        await self.index.emit(
            WorkerEvent(stage=worker[0], worker=_shown(worker), change=change, pid=pid, reason=reason)
        )


async def _unplaced(index: Index, recipe: Recipe, groups: Iterable[_Group]) -> list[str]:
    """The workers that hosts are to start and that have never given a sign of life."""
    alive, remote = await index.alive(), remote_workers(recipe)
    names = {worker: name for group in groups for worker, name in group.names.items()}
    return [_shown(worker) for worker, name in names.items() if worker in remote and name not in alive]


async def _report_ledger(index: Index) -> None:
    """Emit what the run has made, also where no step reported it."""
    try:
        await index.emit(await index.ledger_event())
    except (IndexRefused, IndexUnreachable) as error:
        log.warning("the ledger of the run is not known", reason=str(error))


def _shown(worker: Worker) -> str:
    return f"{worker[0]}-{worker[1]}"


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
        await cancel_all(*waiting)


async def _stop_requested(index: Index) -> None:
    """Return when the run's state in the index becomes "stopping"."""
    while True:
        state, _, after = await index.state()
        if state == "stopping":
            return
        await index.wait(STATE, after, 10.0)


async def _last_published(index: Index, steps: int) -> None:
    """Return when the last version is published."""
    while (status := await index.status()).published < steps:
        await index.wait(VERSION, status.wait, 10.0)


async def _forget_former_workers(index: Index, workers: Iterable[Worker]) -> None:
    """Free the rows and the open bytes that ``workers`` of a killed supervisor held."""
    for worker in workers:
        if name := await PROCESS.get(index, worker=_shown(worker)):
            await index.forget_worker(name)
