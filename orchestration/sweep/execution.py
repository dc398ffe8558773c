"""The execution of a sweep: which run begins when, and what becomes of each.

    waiting, stopped ─▶ room, --at-once ─▶ Executor.execute ──▶ finished, failed, stopped
          ▲                                     │    ▲
       Search.next                          each value of the metric ─▶ --stop-below, pruner ─▶ stop ─▶ pruned
                                                 └ Ctrl-C ─▶ stop ─▶ stopped

Each change of a run's state is in sweep.json before the next thing happens, so that a kill at any
moment leaves runs that wait, runs that are over, and runs of which the executor finds out how far
they are.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from orchestration.comparison.compare import outcome
from orchestration.comparison.results import HELD_OUT, RunResult
from orchestration.recipe.problems import suggest
from orchestration.state.lock import RunError
from orchestration.sweep.record import State, Sweep, SweepRun
from orchestration.sweep.stopping import parse_stops
from pipeline.data.events import Event

if TYPE_CHECKING:
    from orchestration.sweep.search import Search

Report = Callable[[Event], None]


class Executor(Protocol):
    """Where the runs of a sweep are executed."""

    def has_room(self, running: Collection[SweepRun], run: SweepRun) -> bool:
        """Return whether ``run`` can begin beside those that are ``running``."""

    async def execute(self, run: SweepRun, report: Report, stop: asyncio.Event) -> tuple[str, str]:
        """Execute ``run`` from wherever it stands, and return its last state and the reason.

        ``report`` gets its events from its beginning on, those of former processes too. Once
        ``stop`` is set the run ends cleanly, with a checkpoint. Cancelling ends it at once.
        """

    async def result(self, run: SweepRun) -> RunResult:
        """Return what has come of ``run``, which has ended. Raises OSError where nothing is left
        of it."""


class Judge(Protocol):
    """What may stop a run early."""

    def judge(self, run: SweepRun, previous: int, step: int, value: float) -> str:
        """Return why ``run`` is stopped; "": it goes on. The arguments are as for
        :meth:`orchestration.sweep.stopping.StopBelow.judge`."""


@dataclass
class Progress:
    """How far a run is: the step of its newest value."""

    step: int = 0
    value: float | None = None
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    stopped_for: str = ""


class SweepExecution:
    """The one execution of ``sweep``. ``show`` is called after each change of a run or of its
    progress."""

    def __init__(
        self,
        sweep: Sweep,
        executor: Executor,
        *,
        show: Callable[[SweepRun], None] = lambda run: None,
    ) -> None:
        self.sweep = sweep
        self.executor = executor
        self.progress = defaultdict[str, Progress](Progress)
        request = sweep.request
        self._at_once = request.most_at_once
        self._judges: list[Judge] = [*parse_stops(request)]
        self._search: Search | None = None
        if request.has_study:
            from orchestration.sweep.search import Search

            self._search = Search(sweep, request.parsed_over())
            self._judges.append(self._search)
        self._show = show
        self._tasks: dict[asyncio.Task[Any], SweepRun] = {}
        self._begun: set[str] = set()  # a run that was stopped is not begun again by this execution

    async def execute(self, stop: asyncio.Event) -> None:
        """Execute the runs that are not over, until all are or ``stop`` is set; then end those that
        run. Raises what an executor raises, after the other runs have ended cleanly."""
        stopping = asyncio.create_task(stop.wait())
        try:
            while not stop.is_set():
                while (run := self._next()) is not None:
                    self._begun.add(run.name)
                    self._tasks[asyncio.create_task(self._execute(run))] = run
                if not self._tasks:
                    return
                done, _ = await asyncio.wait(
                    {stopping, *self._tasks}, return_when=asyncio.FIRST_COMPLETED
                )
                for task in done - {stopping}:
                    self._tasks.pop(task)
                    task.result()
        finally:
            stopping.cancel()
            await self._end()

    def _next(self) -> SweepRun | None:
        """Return the run to begin now; None: there is none, or no room for it."""
        if len(self._tasks) >= self._at_once:
            return None
        open_runs = (
            run for run in self.sweep.runs if not run.is_over and run.name not in self._begun
        )
        run = next(open_runs, None) or (self._search.next() if self._search else None)
        if run is None or not self.executor.has_room(self._tasks.values(), run):
            return None
        return run

    async def results(self) -> list[RunResult]:
        """Return what has come of the runs that have finished or were pruned."""
        results = []
        for run in self.sweep.runs:
            if run.state in ("finished", "pruned"):
                with contextlib.suppress(OSError):  # somebody has removed it
                    results.append(await self.executor.result(run))
        return results

    async def _end(self) -> None:
        """End the runs that are executed: cleanly, or at once when this is cancelled."""
        for run in self._tasks.values():
            self.progress[run.name].stop.set()
        if self._tasks:
            try:
                await asyncio.gather(*self._tasks)
            except BaseException:
                for task in self._tasks:
                    task.cancel()
                await asyncio.gather(*self._tasks, return_exceptions=True)
                raise

    async def _execute(self, run: SweepRun) -> None:
        progress = self.progress[run.name] = Progress()
        self.sweep.change(run, "running")
        self._show(run)

        def report(event: Event) -> None:
            self._report(run, progress, event)

        state, reason = await self.executor.execute(run, report, progress.stop)
        await self._record_end(run, progress, state, reason)

    def _report(self, run: SweepRun, progress: Progress, event: Event) -> None:
        metric = self.sweep.request.metric
        kind = "evaluation" if metric.startswith(HELD_OUT) else "step"
        value = event.data.get(metric.removeprefix(HELD_OUT)) if event.kind == kind else None
        if not isinstance(value, int | float) or not math.isfinite(value):
            return
        step = int(event.data["version"])
        for judge in self._judges:
            progress.stopped_for = progress.stopped_for or judge.judge(
                run, progress.step, step, value
            )
        progress.step = step
        progress.value = value
        if progress.stopped_for:
            progress.stop.set()
        self._show(run)

    async def _record_end(self, run: SweepRun, progress: Progress, state: str, reason: str) -> None:
        states: dict[str, State] = {"finished": "finished", "stopped": "stopped"}
        ended = states.get(state, "failed")
        if progress.stopped_for and ended == "stopped":
            ended, reason = "pruned", progress.stopped_for
        metric = self.sweep.request.metric
        value = None
        known: list[str] = []
        with contextlib.suppress(OSError):  # a run that could not begin has no files
            result = await self.executor.result(run)
            value = outcome(result, metric).end
            known = result.metrics()
        self.sweep.change(run, ended, reason, value=value)
        if self._search is not None and run.is_over:
            self._search.ended(run)
        self._show(run)
        if ended == "finished" and value is None and self._judges:
            raise RunError(
                f"--metric: {run.name} has finished without a value of {metric!r}; "
                f"{suggest(metric, known)}"
            )
