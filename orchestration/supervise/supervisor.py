"""The supervisor: starts a run's workers, restarts those that die, and ends the run.

    launch ──▶ ready ──▶ … ──▶ exit 0: done
                 │ died: its leases end and its bytes are free at once ──▶ launch again, within its restart budget
                 └ a fatal error, too many deaths, or the same error twice before it was ready: the run fails

    created → starting → running ⇄ paused → stopping → finished | stopped | failed

The ranks of the train engine are a rank group, with the critic where it has a worker of its own:
each waits for the others. When one dies the supervisor ends the others and launches all of them
again, which counts as one restart.

A worker of an elastic kind (``orchestration.recipe.worker_kinds``) whose budget is used up does not end the
run while another one of its kind works: it is absent until the budget allows a restart. At its end
the trainer waits for the engines that are not. What a group of workers may become stands in
``orchestration.supervise.group``.

The number of workers of such a kind changes on request (``orchestration.supervise.scale``): new ones
are launched, and the last ones leave within ``stop_timeout`` seconds. One that leaves because its
host does is launched again, on another host.

The work is done when all workers of the kinds that end by themselves (``orchestration.recipe.worker_kinds``)
have ended; the others are stopped then. Where another program trains, it is done when that has
published the last of ``steps``.

A supervisor may follow a killed one in the same index: the rows that its workers held are given
back first.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import structlog

from orchestration.event_feed import EventFeed
from orchestration.guard.guard import Guard
from orchestration.launch.launchers import Launcher, Life, Unplaceable
from orchestration.recipe.schema import Recipe
from orchestration.recipe.worker_kinds import kind_of, remote_workers, workers_of
from orchestration.simulation.live import CostFollower, is_forecast
from orchestration.state.documents import LEAVE, PROCESS, SCALE, SCALES, Ending, EndKind
from orchestration.supervise.budget import RestartBudget
from orchestration.supervise.group import (
    State,
    Worker,
    WorkerGroup,
    engines_of,
    groups_of,
    missing,
    others_work,
    shown,
    work_is_done,
)
from orchestration.supervise.liveness import Liveness
from orchestration.supervise.lives import Lives, RunFailed
from orchestration.supervise.watch import GuardFailed, GuardWatch, options_of
from pipeline.data.events import LIVE, Event, WorkerEvent
from pipeline.documents.flow import STATE, VERSION
from pipeline.first_of import cancel_all, first_of
from pipeline.index.client import Index, IndexRefused, IndexUnreachable
from pipeline.index.errors import IndexUnwritable
from stages.weights.documents import ENGINES

log = structlog.get_logger()

T = TypeVar("T")
STOPPED = "stopped by request"
# outcome of a supervisor whose run another one continues from the newest checkpoint
REWIND = "rewind"
SCALE_SECONDS = 10.0  # a wait for another number of workers is renewed this often


@dataclass(frozen=True)
class Outcome:
    """The end of a run: ``finished``, ``stopped`` or ``failed``, or that it is to be rewound, and
    why."""

    state: str
    reason: str = ""
    worker: str = field(default="", compare=False)  # whose log has more


class _Rewind(Exception):
    """The run can go on from its newest checkpoint alone."""


class Supervisor:
    """The supervisor that runs the workers of ``recipe`` until the work is done, ``stop`` is set,
    or it cannot go on. ``events``: of the run.

    ``begins``: optimizer steps that were made before; ``folder``: of the run, with what it has
    recorded; None: nothing is forecast.
    """

    def __init__(
        self,
        index: Index,
        launcher: Launcher,
        recipe: Recipe,
        events: EventFeed,
        *,
        begins: int,
        folder: Path | None = None,
    ) -> None:
        self.index = index
        self.launcher = launcher
        self.recipe = recipe
        self.launch = recipe.launch
        self.events = events
        self.folder = folder
        self.workers = workers_of(recipe)
        self.begins = begins
        self.restarts = 0
        self.guard = GuardWatch(index, Guard(options_of(recipe)), recipe.guard.on_alarm, folder)
        self._groups: dict[Worker, WorkerGroup] = {}  # by their first workers
        self._keepers: dict[Worker, asyncio.Task[None]] = {}  # likewise
        self._liveness = Liveness(index, recipe.launch, self._record_unplaced)
        self._lives = Lives(index, launcher, self._liveness)
        self._tasks: list[asyncio.Task[Any]] = []
        # None: look again whether all is done
        self._ended: asyncio.Queue[asyncio.Task[Any] | None] = asyncio.Queue()
        self._stopping = False

    def pids(self) -> dict[str, int]:
        """Return the process of each worker, by ``KIND-NUMBER``."""
        return {worker: life.pid for worker, life in self._lives.by_worker.items()}

    async def run(self, stop: asyncio.Event) -> Outcome:
        await self.index.transition(["created"], "starting")
        if self.begins:  # what this part of the run adds to
            await _report_ledger(self.index)
        try:
            outcome = await self._supervise(stop)
        except (RunFailed, GuardFailed, Unplaceable) as failed:
            outcome = Outcome("failed", str(failed), getattr(failed, "worker", ""))
        except _Rewind as gone:
            outcome = Outcome(REWIND, str(gone))
        except IndexUnwritable:  # who executes the run has the words for it
            raise
        except Exception as error:
            log.exception("supervision failed")
            outcome = Outcome("failed", f"{type(error).__name__}: {error}")
        finally:
            self._stopping = True
            await cancel_all(*self._tasks)
            await self._lives.end()
        if outcome.state != REWIND:
            await _report_ledger(self.index)
            await self.index.transition(
                ["created", *LIVE, "stopping"], outcome.state, outcome.reason
            )
        return outcome

    async def _supervise(self, stop: asyncio.Event) -> Outcome:
        await _forget_former_workers(self.index, self.recipe, self.workers)
        if (await self.index.state())[0] == "stopping":  # requested before anything was launched
            return Outcome("stopped", STOPPED)
        _, began = await self.index.event_ends()
        await self.guard.begin()
        for workers in groups_of(self.workers):
            self._add(workers)
        await self._record_engines()
        stopping = self._begin(first_of(stop.wait(), _stop_requested(self.index)))
        guarding = self._begin(self.events.feed(self.guard.take, self.guard.after))
        self._begin(self.events.feed(self._note_ready, began))
        for work in (self._limit_start(), self._liveness.run(), self._scale()):
            self._begin(work)
        if self.launch.autoscale.max:
            from orchestration.supervise.autoscale import LoadFollower

            self._begin(self.events.feed(LoadFollower(self.index, self.recipe).take, began))
        if self.folder is not None and is_forecast(self.recipe):
            costs = await CostFollower.begin(self.index, self.recipe, self.folder)
            self._begin(self.events.feed(costs.take, began))
        trained = None
        # another program trains
        if not any(group.kind.rank_group for group in self._groups.values()):
            trained = self._begin(_last_published(self.index, self.recipe.train.steps))
        is_done = False
        while not is_done and not stopping.done():
            ended = await self._ended.get()
            if ended is not None and not ended.cancelled():  # cancelled: an absent worker left
                ended.result()
            is_published = trained is None or trained.done()
            is_done = is_published and work_is_done(self._groups.values())
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
        """Launch a further group, and keep it alive."""
        budget = RestartBudget(self.launch.max_restarts, self.launch.restart_window)
        group = WorkerGroup(workers, budget)
        self._groups[group.first] = group
        self._keepers[group.first] = self._begin(self._keep(group))

    async def _stop(self) -> None:
        """Stop the workers, and give them ``stop_timeout`` seconds to finish what they hold: the
        trainer ends with a checkpoint. Those that are still starting hold nothing and are ended at
        once, unless a trainer has to replay steps that no checkpoint has."""
        self._stopping = True
        await self.index.transition(LIVE, "stopping")
        unready = {worker for group in self._groups.values() for worker in group.unready}
        if unready and (await self.index.status()).trained <= self.begins:
            for worker, life in self._lives.by_worker.items():
                if worker in unready:
                    life.end()
        for group in self._groups.values():
            if group.state is State.ABSENT:
                self._keepers[group.first].cancel()
        keepers = self._keepers.values()
        _, late = await asyncio.wait(keepers, timeout=self.launch.stop_timeout)
        if late:
            log.warning(
                "workers did not stop in time and are ended",
                count=len(late),
                seconds=self.launch.stop_timeout,
            )

    async def _keep(self, group: WorkerGroup) -> None:
        """Launch the workers of ``group``, again when they die, until they are done."""
        while not self._stopping:
            await self._lives.launch(group)
            endings = await self._lives.wait(group)
            # The group's host asks it to leave, too.
            asked = await LEAVE.get(self.index, name=group.names[group.first])
            leaves = asked or group.state is State.LEAVING
            if not leaves and all(ending.kind is EndKind.DONE for ending in endings.values()):
                break
            for worker, name in group.names.items():
                # a host knows when its worker has ended, and frees what that holds open
                life = self._lives.of(worker)
                await self.index.forget_worker(name, ended=life is None or life.pid != 0)
            if self._stopping:
                for worker, ending in endings.items():
                    if ending.reason:  # such as a last checkpoint that could not be written
                        name = group.names[worker]
                        reason = ending.reason
                        log.warning("worker failed while it stopped", worker=name, reason=reason)
                        await self._emit(worker, "died", ending)
                break
            if not leaves:
                await self._report_deaths(group, endings)
                death = await self._take_restart(group, endings)
                if group.state is not State.LEAVING:
                    await self._emit(group.first, "restarted", death)
                    continue
            await self._emit(group.first, "left", endings[group.first])
            if not await self._stays(group):
                return
        group.move(State.DONE)

    async def _report_deaths(self, group: WorkerGroup, endings: dict[Worker, Ending]) -> None:
        """Emit why the first of ``endings`` died. Raises RunFailed and _Rewind where a restart
        would not help."""
        dead, *_ = endings
        await self._emit(dead, "died", endings[dead])
        for worker, ending in endings.items():
            name = group.names[worker]
            if worker == dead:
                log.debug("worker died", worker=name, code=ending.code, reason=str(ending))
            elif ending.reason:  # it failed by itself, it was not ended for the first one's death
                log.warning("worker died too", worker=name, reason=ending.reason)
            if ending.kind is EndKind.FATAL:
                raise RunFailed(f"{shown(worker)}: {ending}", worker)
            if ending.kind is EndKind.REWIND:
                raise _Rewind(str(ending))

    async def _take_restart(self, group: WorkerGroup, endings: dict[Worker, Ending]) -> Ending:
        """Return the first of ``endings`` when ``group`` may be restarted, or is to leave. Raises
        RunFailed when it may not be, and the run cannot go on without it."""
        dead, *_ = endings
        death = endings[dead]
        if death.kind is EndKind.NOT_STARTED and not self._others_work(group):
            if group.fault == death.fault:
                twice = "failed twice before its first work, for the same reason"
                raise RunFailed(f"{shown(dead)} {twice}: {death}", dead)
            group.fault = death.fault
        while group.state is not State.LEAVING:
            seconds = group.budget.take(time.monotonic())
            if not seconds:
                self.restarts += 1
                await self._go_on(group)
                break
            used_up = f"launch.max_restarts = {group.budget.most} is used up: {death}"
            if not self._others_work(group):
                raise RunFailed(f"{shown(dead)} died and {used_up}", dead)
            await self._set_absent(group, used_up)
            await asyncio.sleep(min(seconds, self.launch.restart_window))
        return death

    def _others_work(self, group: WorkerGroup) -> bool:
        return others_work(group, self._groups.values())

    async def _scale(self) -> None:
        """Follow the number of rollout workers that is asked for: launch those that are new, and
        have those leave that are too many."""
        after = ""
        asked = 0
        while True:
            after = await self.index.woken(SCALES, after, SCALE_SECONDS)
            wanted = await SCALE.get(self.index) or asked
            if wanted != asked and not self._stopping:
                from orchestration.supervise.scale import scaled

                asked = wanted
                recipe = await asyncio.to_thread(scaled, self.recipe, wanted)
                self.launcher.rescale(recipe)
                self.workers = workers_of(recipe)
            new = [
                each
                for each in self.workers
                if kind_of(each[0]).elastic and each not in self._groups
            ]
            await _forget_former_workers(self.index, self.recipe, new)
            for worker in new:
                self._add([worker])
            for group in list(self._groups.values()):
                if group.first in self.workers:
                    continue
                if group.state is State.ABSENT:
                    await self._dismiss(group)
                elif group.is_present and (life := self._lives.of(group.first)):
                    group.move(State.LEAVING)
                    self._begin(self._leave(group.first, group.names[group.first], life))
            await self._record_engines()

    async def _leave(self, worker: Worker, name: str, life: Life) -> None:
        """Have ``worker`` leave, and end it where it does not within ``stop_timeout``."""
        await self._emit(worker, "leaves")
        await LEAVE.put(self.index, True, name=name)
        await first_of(life.wait(), timeout=self.launch.stop_timeout)
        life.end()

    async def _dismiss(self, group: WorkerGroup) -> None:
        """Forget ``group``, which is absent. Its keeper waits for a restart, or for a host."""
        self._keepers[group.first].cancel()
        self._forget(group)
        await self._emit(group.first, "left")

    async def _stays(self, group: WorkerGroup) -> bool:
        """Return whether ``group``, which has left, is to be launched again; otherwise it is
        forgotten."""
        stays = group.first in self.workers
        if not stays:
            self._forget(group)
        elif group.state is State.LEAVING:
            group.go_on()
        await self._record_engines()
        return stays

    def _forget(self, group: WorkerGroup) -> None:
        group.move(State.DONE)
        del self._groups[group.first], self._keepers[group.first]
        self._lives.forget(group)

    async def _record_unplaced(self, name: str, is_unplaced: bool) -> None:
        """Set a worker absent that no machine starts, until one does: the run ends without it."""
        group = next(each for each in self._groups.values() if name in each.names.values())
        if not is_unplaced:
            await self._go_on(group)
        elif group.is_present and self._others_work(group):
            await self._set_absent(group, "no host has room for it")

    async def _go_on(self, group: WorkerGroup) -> None:
        """Note that ``group`` is not absent any more."""
        if group.state is State.ABSENT:
            group.go_on()
            await self._record_engines()

    async def _set_absent(self, group: WorkerGroup, reason: str) -> None:
        if group.state is State.ABSENT:
            return
        group.move(State.ABSENT)
        await self._record_engines()
        log.warning("worker is absent", worker=shown(group.first), reason=reason)
        await self._emit(group.first, "absent", Ending(reason=reason))
        self._ended.put_nowait(None)  # perhaps all the others are done

    async def _record_engines(self) -> None:
        """Record for the trainer which engines must have the last version before the run ends."""
        await ENGINES.put(self.index, engines_of(self._groups.values()))

    async def _note_ready(self, event: Event) -> None:
        """Let a worker be ready where ``event`` says so, and the run be `running` when it can
        train."""
        if event.kind != "worker" or event.data["change"] != "ready":
            return
        for group in self._groups.values():
            group.ready(event.data["worker"])
        if not missing(self._groups.values()):
            # A run that was paused when its supervisor was killed stays so.
            await self.index.transition(["starting"], "running")

    async def _limit_start(self) -> None:
        """Raise RunFailed when the run cannot train within ``startup_timeout``: of an elastic kind
        one worker is enough."""
        await asyncio.sleep(self.launch.startup_timeout)
        groups = self._groups.values()
        limit = f"launch.startup_timeout = {self.launch.startup_timeout:.0f} s"
        if late := missing(groups):
            unplaced = await _unplaced(self.index, self.recipe, groups)
            waiting = [worker for worker in late if worker in unplaced]
            fix = "see the logs"
            if waiting:
                fix = f"no host has started {waiting}: start one with `asyncdock host`"
            raise RunFailed(f"{late} not ready within {limit}; {fix}")
        if unready := sorted(worker for group in groups for worker in group.unready):
            problem = "the run goes on without workers that are not ready"
            log.warning(problem, workers=unready, within=limit)

    async def _emit(self, worker: Worker, change: str, why: Ending | None = None) -> None:
        reason = "" if why is None or why.code == 0 else str(why)
        event = WorkerEvent(stage=worker[0], worker=shown(worker), change=change, reason=reason)
        await self.index.emit(event)


async def _unplaced(index: Index, recipe: Recipe, groups: Iterable[WorkerGroup]) -> list[str]:
    """Return the workers that hosts are to start and that have never given a sign of life."""
    alive = await index.alive()
    remote = remote_workers(recipe)
    names = {worker: name for group in groups for worker, name in group.names.items()}
    never = [worker for worker, name in names.items() if worker in remote and name not in alive]
    return list(map(shown, never))


async def _report_ledger(index: Index) -> None:
    """Emit what the run has made, also where no step reported it."""
    try:
        await index.emit(await index.ledger_event())
    except (IndexRefused, IndexUnreachable) as error:
        log.warning("the ledger of the run is not known", reason=str(error))


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


async def _forget_former_workers(index: Index, recipe: Recipe, workers: Iterable[Worker]) -> None:
    """Free the rows that ``workers`` of a killed supervisor held, and the open bytes of those that
    ended with it."""
    remote = remote_workers(recipe)
    for worker in workers:
        if name := await PROCESS.get(index, worker=shown(worker)):
            await index.forget_worker(name, ended=worker not in remote)
