"""Where the time of external workers goes, as far as it can be told from the calls that they make.

    claim ──▶ waiting_input ──▶ rows under a lease: busy ──▶ their last commit, a release, the lease's end ──▶ other
    twice a second, of each worker that was heard of lately: a `stage` event, and a `span` event of what it has done

They are the events that the run's own workers tell of themselves, so whoever shows those shows these. What is known here
goes with the process that serves the calls; the next one counts anew, as for a worker that was started again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import structlog

from orchestration.service.registry import ENDED
from pipeline.clock import Clock
from pipeline.controller import EVENT_SECONDS
from pipeline.events import SpanEvent, StageEvent
from pipeline.index.client import Index, IndexRefused, IndexUnreachable
from pipeline.spans import Spans

log = structlog.get_logger()

PREFIX = "external-"  # of the names of these workers
OVER = ("stopping", *ENDED)
SILENT_SECONDS = 60.0  # after which a worker that holds nothing and asks for nothing is not told of any more
MOST = 256  # workers of one run: their names are their own choice, and each is a series in the metrics


@dataclass
class Held:
    """Rows under a lease: since when (Unix s), and until when (monotonic s) if it is not renewed."""

    began: float
    until: float
    rows: int
    left: int
    version: int | None


@dataclass
class StageTime:
    """One worker's, in one stage."""

    stage: str
    worker: str
    clock: Clock = field(default_factory=Clock)
    spans: Spans = field(default_factory=Spans)
    held: dict[str, Held] = field(default_factory=dict)  # by token
    claims: int = 0  # that wait
    rows: int = 0
    tokens: int = 0
    parked: int = 0
    heard: float = field(default_factory=time.monotonic)

    def account(self) -> None:
        """Whatever has changed holds from now on."""
        self.clock.account()
        self.clock.working, self.clock.waiting = len(self.held), self.claims > 0
        self.heard = time.monotonic()

    def drop(self, token: str) -> None:
        """Nothing is left under the lease."""
        if held := self.held.pop(token, None):
            self.spans.add(self.stage, held.began, time.time() - held.began, rows=held.rows, version=held.version)
            self.account()

    def expire(self) -> None:
        """Leases that were not renewed end by themselves."""
        for token in [token for token, held in self.held.items() if held.until < time.monotonic()]:
            self.drop(token)

    @property
    def silent(self) -> bool:
        return not self.held and not self.claims and time.monotonic() - self.heard > SILENT_SECONDS


class StageTimes:
    """Of all external workers of a run whose calls are served here."""

    def __init__(self, index: Index) -> None:
        self.index = index
        self._sheets: dict[tuple[str, str], StageTime] = {}
        self._reporting: asyncio.Task[None] | None = None

    async def close(self) -> None:
        if self._reporting is not None:
            self._reporting.cancel()
            await asyncio.gather(self._reporting, return_exceptions=True)

    @contextmanager
    def claiming(self, stage: str, worker: str) -> Iterator[StageTime]:
        """``worker`` waits meanwhile for something to do."""
        sheet = self._sheets.get((stage, worker)) or StageTime(stage, f"{PREFIX}{stage}-{worker}")
        if len(self._sheets) < MOST:
            self._sheets[stage, worker] = sheet
        if self._reporting is None or self._reporting.done():
            self._reporting = asyncio.create_task(self._report())
        sheet.claims += 1
        sheet.account()
        try:
            yield sheet
        finally:
            sheet.claims -= 1
            sheet.account()

    def took(self, sheet: StageTime, token: str, rows: int, lease: float, version: int | None) -> None:
        """The worker is answered with ``rows`` under a lease of so many seconds."""
        sheet.held[token] = Held(time.time(), time.monotonic() + lease, rows, rows, version)
        sheet.account()

    def renewed(self, token: str, lease: float) -> None:
        if sheet := self._of(token):
            sheet.held[token].until = time.monotonic() + lease
            sheet.account()

    def put(self, token: str, rows: int, tokens: int, left: int, *, parked: bool = False) -> None:
        """``rows`` were committed, or ``parked``; so many are ``left`` under the token."""
        if sheet := self._of(token):
            sheet.tokens += tokens
            if parked:
                sheet.parked += rows
            else:
                sheet.rows += rows
            sheet.held[token].left = left
            if not left:
                sheet.drop(token)
            sheet.account()

    def ended(self, token: str) -> None:
        """The lease is given back, or lost."""
        if sheet := self._of(token):
            sheet.drop(token)

    def _of(self, token: str) -> StageTime | None:
        return next((sheet for sheet in self._sheets.values() if token in sheet.held), None)

    async def _report(self) -> None:
        """Until nobody was heard of for a while, or the run is over: then nothing may be told of it any more."""
        while self._sheets:
            await asyncio.sleep(EVENT_SECONDS)
            for who, sheet in list(self._sheets.items()):
                sheet.expire()
                if sheet.silent:
                    del self._sheets[who]
            try:
                state = (await self.index.state())[0]
                if state in OVER:
                    return
                for sheet in list(self._sheets.values()) if state else ():  # one that waits in the queue has no events
                    await self._tell(sheet)
            except (IndexUnreachable, IndexRefused) as lost:
                log.warning("what external workers do cannot be told", run=self.index.run, reason=str(lost))

    async def _tell(self, sheet: StageTime) -> None:
        depth = await self.index.queue_depth(sheet.stage)
        await self.index.emit(
            StageEvent(
                stage=sheet.stage,
                worker=sheet.worker,
                **sheet.clock.read(),
                rows=sheet.rows,
                tokens=sheet.tokens,
                parked=sheet.parked,
                queue_depth=depth,
                in_flight=sum(held.left for held in sheet.held.values()),
            )
        )
        spans, left_out = sheet.spans.take()
        if spans:
            await self.index.emit(SpanEvent(stage=sheet.stage, worker=sheet.worker, spans=spans, left_out=left_out))
