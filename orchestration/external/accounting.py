"""Stage time of external workers, derived from the calls that they make.

    claim ──▶ waiting_input ──▶ rows under a lease: busy ──▶ last commit, release or end of the lease ──▶ other
    twice a second, for each worker that made a call lately: a `stage` event, and a `span` event of ended leases

The events are those of the run's own workers, so that every reader shows both. The counts belong to
this process: after a restart they begin at 0, as for a restarted worker.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import structlog

from pipeline.data.events import ENDED
from pipeline.first_of import cancel_all
from pipeline.index.client import Claim, Index, IndexRefused, IndexUnreachable
from pipeline.worker.clock import Clock
from pipeline.worker.controller import EVENT_SECONDS, report_stage
from pipeline.worker.spans import Spans

log = structlog.get_logger()

PREFIX = "external-"  # of the names of these workers
OVER = ("stopping", *ENDED)
# without a lease or a claim, after which no more events are emitted for a worker
SILENT_SECONDS = 60.0
MOST = 256  # workers of one run: they choose their names, and each name is a series in the metrics


@dataclass
class LeaseTime:
    """A lease: ``began`` in Unix seconds, ``taken`` at the same moment and ``until`` (its deadline)
    in monotonic seconds; ``left`` of its rows are not committed."""

    began: float
    taken: float
    until: float
    rows: int
    left: int
    version: int | None


@dataclass
class StageTime:
    """The time and the counts of one worker in one stage."""

    stage: str
    worker: str
    clock: Clock = field(default_factory=Clock)
    spans: Spans = field(default_factory=Spans)
    leases: dict[str, LeaseTime] = field(default_factory=dict)  # by token
    rows: int = 0
    tokens: int = 0
    parked: int = 0
    active: float = 0.0  # when it last had a lease or a claim, in monotonic seconds

    def begin(self, token: str, rows: int, lease: float, version: int | None) -> None:
        """Record that the worker got ``rows`` under a lease of ``lease`` seconds."""
        self.clock.account()
        self.clock.working += 1
        now = time.monotonic()
        self.leases[token] = LeaseTime(time.time(), now, now + lease, rows, rows, version)

    def end(self, token: str) -> None:
        lease = self.leases.pop(token)
        self.clock.account()
        self.clock.working -= 1
        seconds = time.monotonic() - lease.taken
        self.spans.add(self.stage, lease.began, seconds, rows=lease.rows, version=lease.version)

    def is_silent(self) -> bool:
        """End the leases that are past their deadline.

        Returns whether the worker made no claim lately.
        """
        now = time.monotonic()
        for token in [token for token, lease in self.leases.items() if lease.until < now]:
            self.end(token)
        if self.leases or self.clock.waiting:
            self.active = now
        return now - self.active > SILENT_SECONDS


class StageTimes:
    """The stage times of all external workers of a run that this process serves."""

    def __init__(self, index: Index) -> None:
        self.index = index
        self._times: dict[tuple[str, str], StageTime] = {}
        self._reporting: asyncio.Task[None] | None = None

    async def close(self) -> None:
        await cancel_all(self._reporting)

    @contextmanager
    def claiming(self, stage: str, worker: str) -> Iterator[StageTime]:
        """Count the time inside as waiting of ``worker``."""
        times = self._times.get((stage, worker)) or StageTime(stage, f"{PREFIX}{stage}-{worker}")
        if len(self._times) < MOST:
            self._times[stage, worker] = times
        if self._reporting is None or self._reporting.done():
            self._reporting = asyncio.create_task(self._report())
        times.active = time.monotonic()
        with times.clock.during("waiting"):
            yield times

    def renewed(self, token: str, lease: float) -> None:
        """Record a new deadline, ``lease`` seconds from now."""
        if times := self._of(token):
            times.leases[token].until = time.monotonic() + lease

    def put(self, part: Claim, left: int, tokens: int, *, park: bool = False) -> int:
        """Record that the rows of ``part`` were committed, or parked, and that the lease still
        holds ``left``. Return ``left``."""
        if times := self._of(part.token):
            times.tokens += tokens
            times.parked += len(part) * park
            times.rows += len(part) * (not park)
            times.leases[part.token].left = left
            if not left:
                times.end(part.token)
        return left

    def ended(self, token: str) -> None:
        """Record that a lease was given back, or lost."""
        if times := self._of(token):
            times.end(token)

    def _of(self, token: str) -> StageTime | None:
        return next((times for times in self._times.values() if token in times.leases), None)

    async def _report(self) -> None:
        """Emit the events until all workers are silent or the run is over: an ended run takes no
        more events."""
        while self._times:
            await asyncio.sleep(EVENT_SECONDS)
            for key, times in list(self._times.items()):
                if times.is_silent():
                    del self._times[key]
            try:
                state = (await self.index.state())[0]
                if state in OVER:
                    return
                # a run that waits in the queue has no events
                for times in list(self._times.values()) if state else ():
                    counts = {"rows": times.rows, "tokens": times.tokens, "parked": times.parked}
                    counts["in_flight"] = sum(lease.left for lease in times.leases.values())
                    await report_stage(
                        self.index, times.stage, times.worker, times.clock, times.spans, counts
                    )
            except (IndexUnreachable, IndexRefused) as lost:
                log.warning(
                    "events of external workers are lost", run=self.index.run, reason=str(lost)
                )
