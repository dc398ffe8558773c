"""Status of the runs of a service, from their events: totals with each worker's newest event, and
the newest step.

events of a run ──(only new ones)──▶ RunStatus: RunTotals      one for each run, at most MOST_TOTALS of them
what its runner has added up ──────▶┘ where these are too many, or are not in the index any more
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import OrderedDict

from orchestration.external.accounting import PREFIX
from orchestration.history.totals import RunTotals
from orchestration.state.recording import recorded_totals
from orchestration.state.registry import RunRecord
from pipeline.data.events import ENDED, StepEvent, order
from pipeline.index.client import Index

FRESH_SECONDS = 0.25  # for which an answer of the index is used again
OLD_SECONDS = 20.0  # after which events that follow may have left the index
MOST_TOTALS = 128  # runs with totals in memory
MOST_STEPS = 10_000  # runs with their newest step in memory


class RunStatus:
    """The ``totals`` of a run's events up to the id ``after``, and the time ``read`` of the last
    reading, on the monotonic clock."""

    def __init__(self) -> None:
        self.totals = RunTotals()
        self.after = "0"
        self.read = -math.inf
        self.lock = asyncio.Lock()

    def process(self, worker: str) -> str:
        """Return the process that runs a stage's worker: its own, or the one of the light stages;
        "" for an external worker."""
        if worker in self.totals.processes:
            return worker
        return "" if worker.startswith(PREFIX) else "flow-0"

    async def update(self, index: Index) -> None:
        """Add the events that came since it was read."""
        if time.monotonic() - self.read > OLD_SECONDS:
            recorded = await recorded_totals(index)
            if order(recorded.after) > order(self.after):
                self.totals = recorded.totals
                self.after = recorded.after
        while events := await index.past_events(self.after):
            for event in events:
                self.totals.apply(event)
            self.after = events[-1].id
        self.read = time.monotonic()


class RunStatuses:
    """Status of runs; that of the runs that were asked for last is kept."""

    def __init__(self) -> None:
        self._runs: OrderedDict[str, RunStatus] = OrderedDict()
        # by run: when it was read, on the monotonic clock; when the run had ended then; the step
        self._steps: OrderedDict[str, tuple[float, float | None, StepEvent | None]] = OrderedDict()

    async def of(self, index: Index) -> RunStatus:
        """Return the status of the run now."""
        run = self._runs.setdefault(index.run, RunStatus())
        self._runs.move_to_end(index.run)
        while len(self._runs) > MOST_TOTALS:
            self._runs.popitem(last=False)
        async with run.lock:
            if time.monotonic() - run.read > FRESH_SECONDS:
                await run.update(index)
        return run

    async def step(self, index: Index, record: RunRecord) -> StepEvent | None:
        """Return the newest step of the run."""
        read_at, ended, step = self._steps.pop(record.id, (-math.inf, None, None))
        if record.ended is None:
            fresh = record.state not in ENDED and time.monotonic() - read_at <= FRESH_SECONDS
        else:
            fresh = ended == record.ended  # read after its end: it has no further step
        if record.state != "created" and not fresh:
            event = await index.newest("step")
            newest_step = (
                StepEvent.of(event.data) if event else (await recorded_totals(index)).totals.step
            )
            read_at = time.monotonic()
            step = newest_step or step
        if record.state in ENDED or step is not None:
            self._steps[record.id] = read_at, record.ended, step
        while len(self._steps) > MOST_STEPS:
            self._steps.popitem(last=False)
        return step

    def forget(self, run: str) -> None:
        self._runs.pop(run, None)
        self._steps.pop(run, None)
