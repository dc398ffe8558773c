"""The controller: one stage worker's own loop. There is no dispatcher between it and the samples.

    claim ──▶ fetch ──▶ process ──▶ write + commit ──▶ (next claim)
      │                   └─ outputs are committed, or parked to be continued, one by one as the stage yields them
      └─ nothing there: sleep on the server until a row becomes ready, a version is published or a lease expires
    beside it: leases renewed at a third of their length; time accounted; a `stage` event twice a second, and a `span`
               event of what was processed since the last one

Where the time of a worker goes is one of four, at every instant, so they add up to wall time:
``busy`` (something is being processed), ``waiting_room`` (all that is being done waits for bytes), ``waiting_input``
(nothing to claim), ``other``.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

import structlog

from pipeline.events import EventData, SpanEvent, StageEvent
from pipeline.index.client import Claim, LeaseLost
from pipeline.spans import Spans
from pipeline.warehouse.arena import StaleHandle

if TYPE_CHECKING:  # its clock is also for who shows what stages do, which goes without torch
    from tensordict import TensorDict

    from pipeline.warehouse.dock import Dock, Rows

log = structlog.get_logger()

EVENT_SECONDS = 0.5
WAIT_SECONDS = 10.0  # a wait on the server is renewed this often, so that nothing depends on a single wake-up

What = Literal["busy", "waiting_input", "waiting_room", "other"]


@dataclass(frozen=True)
class Output:
    """What a stage has made of the rows at ``positions`` of its claim.

    ``rows`` are the columns to write (None: none). ``generated`` gives (oldest policy version, tokens) per row where the
    stage makes responses; with ``parked`` they have not ended, and the rows can be claimed again to go on. ``step`` says
    that all of the claim's rows were trained in that optimizer step, and ``event`` is told to the readers of the run in the
    same atomic step.
    """

    positions: Sequence[int] = ()
    rows: Rows | None = None
    generated: Sequence[tuple[int, int]] | None = None
    step: int | None = None
    event: EventData | None = None
    tokens: int = 0
    parked: bool = False


class Stage(Protocol):
    """What happens to samples in one place. ``fetches`` are the columns that :meth:`process` is given."""

    name: str
    fetches: tuple[str, ...]

    def room(self, held: int) -> int:
        """How many rows (or groups) this worker would take now, while it holds ``held`` rows uncommitted; 0: enough."""

    def version(self) -> int | None:
        """The policy version that a generating stage has loaded; None for others."""

    def process(self, claim: Claim, rows: TensorDict) -> AsyncGenerator[Output, None]:
        """Yield outputs as they are made. What is yielded is committed before the generator goes on."""


@dataclass
class Clock:
    """Attributes every instant to one of four. ``working`` and ``blocked`` count what is being processed, and how much
    of it waits for room."""

    now: Callable[[], float] = time.monotonic
    seconds: dict[What, float] = field(
        default_factory=lambda: {"busy": 0.0, "waiting_input": 0.0, "waiting_room": 0.0, "other": 0.0}
    )
    working: int = 0
    blocked: int = 0
    waiting: bool = False

    def __post_init__(self) -> None:
        self.began = self._since = self.now()

    def state(self) -> What:
        if self.working > self.blocked:
            return "busy"
        if self.blocked:
            return "waiting_room"
        return "waiting_input" if self.waiting else "other"

    @contextmanager
    def during(self, kind: Literal["working", "blocked", "waiting"]) -> Iterator[None]:
        self.account()
        if kind == "waiting":
            self.waiting = True
        else:
            setattr(self, kind, getattr(self, kind) + 1)
        try:
            yield
        finally:
            self.account()
            if kind == "waiting":
                self.waiting = False
            else:
                setattr(self, kind, getattr(self, kind) - 1)

    def account(self) -> None:
        now = self.now()
        self.seconds[self.state()] += now - self._since
        self._since = now

    def read(self) -> dict[str, float]:
        """Seconds of each kind, and ``wall``, their sum."""
        self.account()
        return {**{str(what): spent for what, spent in self.seconds.items()}, "wall": self._since - self.began}


class Controller:
    """Runs ``stage`` against ``dock`` until :meth:`stop`. ``number`` tells workers of one stage apart. ``spans`` are
    reported with the controller's own, one for each claim."""

    def __init__(self, dock: Dock, stage: Stage, *, number: int = 0, spans: Spans | None = None) -> None:
        self.dock, self.stage, self.number = dock, stage, number
        self.clock, self.spans = Clock(), spans or Spans()
        self.rows = self.tokens = self.parked = 0
        self._tasks: dict[str, asyncio.Task[None]] = {}  # by token
        self._held: dict[str, int] = {}  # rows not yet committed, by token
        self._settled: set[str] = set()  # tokens whose lease ends by their own last commit: nothing to renew or to lose
        self._stopping = False
        self._running = asyncio.Event()
        self._running.set()
        self._nudged = asyncio.Event()
        self.on_nothing: Callable[[], None] = lambda: None  # a claim has found nothing
        self.on_end: Callable[[], None] = lambda: None  # all that was claimed is done, and nothing more will be
        dock.writer.on_room = lambda: self.clock.during("blocked")

    def nudge(self) -> None:
        """Look for work again: the stage's room or version has changed."""
        self._nudged.set()

    def stop(self) -> None:
        """Claim nothing more. :meth:`run` returns when what is held is done."""
        self._stopping = True
        self._running.set()
        self.nudge()

    def pause(self) -> None:
        self._running.clear()

    def resume(self) -> None:
        self._running.set()
        self.nudge()

    async def run(self) -> None:
        """The loop. Raises what the stage raises; what it held is then delivered again."""
        async with asyncio.TaskGroup() as tasks:
            beside = [tasks.create_task(self._renew()), tasks.create_task(self._report())]
            async with asyncio.TaskGroup() as handling:
                while True:
                    await self._running.wait()
                    if self._stopping:
                        break
                    claim = await self._claim()
                    if claim is not None:
                        self._held[claim.token] = len(claim)
                        task = handling.create_task(self._handle(claim))
                        self._tasks[claim.token] = task
            for task in beside:
                task.cancel()
        await self.report()
        self.on_end()

    async def _claim(self) -> Claim | None:
        """One claim, or None after a wait that something ended."""
        self._nudged.clear()
        room = self.stage.room(sum(self._held.values()))
        if room < 1:
            await self._nudged.wait()
            return None
        found = await self.dock.try_claim(self.stage.name, room, version=self.stage.version())
        if isinstance(found, Claim):
            return found
        self.on_nothing()
        with self.clock.during("waiting"):
            woken = asyncio.create_task(self.dock.wait(self.stage.name, found, WAIT_SECONDS))
            nudged = asyncio.create_task(self._nudged.wait())
            try:
                done, _ = await asyncio.wait([woken, nudged], return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
            finally:
                for task in (woken, nudged):
                    task.cancel()
                await asyncio.gather(woken, nudged, return_exceptions=True)
        return None

    async def _handle(self, claim: Claim) -> None:
        try:
            with (
                self.clock.during("working"),
                self.spans.during(self.stage.name, rows=len(claim), version=self.stage.version()),
            ):
                rows = await self.dock.fetch(claim, self.stage.fetches)
                outputs = self.stage.process(claim, rows)
                try:
                    async for output in outputs:
                        await self._commit(claim, output)
                        self.nudge()
                finally:
                    await outputs.aclose()
        except (LeaseLost, StaleHandle) as lost:
            # Somebody else has these rows now; what was made of them here is dropped, and nothing else is touched.
            log.warning("lease lost", stage=self.stage.name, rows=len(claim), reason=str(lost))
            await self.dock.index.hand_back(claim)  # what is left of it, if anything
        finally:
            self._tasks.pop(claim.token, None)
            self._held.pop(claim.token, None)
            self._settled.discard(claim.token)
            self.nudge()

    async def _commit(self, claim: Claim, output: Output) -> None:
        if output.step is not None:
            self._settled.add(claim.token)
            await self.dock.index.train(claim, output.step, output.event)
            self.rows += len(claim)
        elif output.parked:
            assert output.rows is not None
            assert output.generated is not None
            await self.dock.park(claim, output.positions, output.rows, generated=output.generated)
            self.parked += len(output.positions)
            self._held[claim.token] -= len(output.positions)
        elif output.positions:
            await self.dock.commit(claim, output.positions, output.rows, generated=output.generated)
            self.rows += len(output.positions)
            self._held[claim.token] -= len(output.positions)
        self.tokens += output.tokens

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self.dock.lease / 3)
            held = [token for token in self._tasks if token not in self._settled]
            if not held:
                continue
            kept = await self.dock.index.renew(self.stage.name, held, self.dock.lease)
            for token in set(held) - kept:
                if token in self._tasks and token not in self._settled and self._held.get(token, 0) > 0:
                    log.warning("lease lost", stage=self.stage.name, lease=token[:8])
                    self._tasks[token].cancel()

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(EVENT_SECONDS)
            await self.report()

    async def report(self) -> None:
        depth = await self.dock.index.queue_depth(self.stage.name)
        stage, worker = self.stage.name, f"{self.stage.name}-{self.number}"
        await self.dock.index.emit(
            StageEvent(
                stage=stage,
                worker=worker,
                **self.clock.read(),
                rows=self.rows,
                tokens=self.tokens,
                parked=self.parked,
                queue_depth=depth,
                in_flight=sum(self._held.values()),
            )
        )
        spans, left_out = self.spans.take()
        if spans:
            await self.dock.index.emit(SpanEvent(stage=stage, worker=worker, spans=spans, left_out=left_out))
