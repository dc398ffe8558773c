"""Controller: the asyncio loop of one stage worker, which claims rows, processes them and commits
the outputs.

claim ──▶ fetch ──▶ process ──▶ write + commit ──▶ (next claim)
  │                   └─ each output commits itself as the stage yields it (outputs.py): written, parked, dropped, trained
  └─ nothing more is ready: the index claims when a row becomes ready, or a lease expires; wake() ends that wait
concurrently: renew leases at a third of their length; emit a `stage` event twice a second, and a `span` event of
              what was processed since the last one
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import structlog

from pipeline.data.arena import StaleHandle
from pipeline.data.events import SpanEvent, StageEvent
from pipeline.index.claims import Nothing
from pipeline.index.client import Claim, Index, LeaseLost
from pipeline.worker.clock import Clock
from pipeline.worker.outputs import Output, Parked
from pipeline.worker.spans import Spans

if TYPE_CHECKING:  # these import torch
    from tensordict import TensorDict

    from pipeline.warehouse.dock import Dock

log = structlog.get_logger()

EVENT_SECONDS = 0.5
# a wait on the server is renewed this often, so that nothing depends on a single wake-up
WAIT_SECONDS = 10.0


class Stage(Protocol):
    """Code that processes the rows of a claim.

    ``fetches`` are the columns that :meth:`process` gets.
    """

    name: str
    fetches: tuple[str, ...]

    def room(self, held: int) -> float:
        """Return how many more rows (or groups) to claim now, while ``held`` rows are not yet
        committed; 0: none. A part of a group is room for rows of it that were parked."""

    def version(self) -> int | None:
        """Return the policy version that a generating stage has loaded; None for other stages."""
        return None

    def figures(self) -> Mapping[str, Any]:
        """Return further fields of the stage's events."""
        return {}

    def process(self, claim: Claim, rows: TensorDict) -> AsyncGenerator[Output, None]:
        """Yield outputs as they are made. Each is committed before the generator continues."""


class Controller:
    """The loop that runs ``stage`` on the rows of ``dock`` until :meth:`stop`.

    ``number`` distinguishes the workers of a stage. ``spans`` are reported together with the
    controller's own, one for each claim.
    """

    def __init__(
        self, dock: Dock, stage: Stage, *, number: int = 0, spans: Spans | None = None
    ) -> None:
        self.dock = dock
        self.stage = stage
        self.number = number
        self.clock = Clock()
        self.spans = spans or Spans()
        self.rows = self.tokens = self.parked = 0
        self._tasks: dict[str, asyncio.Task[None]] = {}  # by token
        self._held: dict[str, int] = {}  # rows not yet committed, by token
        # tokens of leases that end with their last commit; they are not renewed
        self._settled: set[str] = set()
        self._stopping = False
        self._running = asyncio.Event()
        self._running.set()
        self._is_woken = False
        self._woken: asyncio.Future[None] | None = None  # of a wait for rows
        self._has_room = asyncio.Event()  # perhaps
        # of the last claim: it left nothing that could be claimed
        self._nothing: Nothing | None = None
        self._has_whole_room = False  # the last claim had room for a row or a whole group
        self.on_nothing: Callable[[], None] = lambda: None  # called when a claim found nothing
        # called when all claimed rows are finished, after a stop
        self.on_end: Callable[[], None] = lambda: None
        dock.writer.on_room = lambda: self.clock.during("blocked")

    @property
    def held(self) -> int:
        """Rows that are claimed and not committed."""
        return sum(self._held.values())

    @property
    def is_idle(self) -> bool:
        """Whether nothing was left to claim."""
        return self._nothing is not None and self._has_whole_room

    def wake(self) -> None:
        """Claim again: the stage's room or version has changed."""
        self._is_woken = True
        if self._woken is not None and not self._woken.done():
            self._woken.set_result(None)
        self._has_room.set()

    def stop(self) -> None:
        """Claim nothing more. :meth:`run` returns when the rows that are held are finished."""
        self._stopping = True
        self._running.set()
        self.wake()

    def pause(self) -> None:
        """Claim nothing until :meth:`resume`. Rows that are held are finished."""
        self._running.clear()

    def resume(self) -> None:
        """Claim again after :meth:`pause`."""
        self._running.set()
        self.wake()

    async def run(self) -> None:
        """Run the loop.

        Raises the exceptions of the stage; the rows that it held are then redelivered.
        """
        async with asyncio.TaskGroup() as tasks:
            concurrent = [tasks.create_task(self._renew()), tasks.create_task(self._report())]
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
            for task in concurrent:
                task.cancel()
        await self.report()
        self.on_end()

    async def _claim(self) -> Claim | None:
        """Return one claim, or None after a wait."""
        if self._is_woken:
            self._is_woken = False
            self._nothing = None
        self._has_room.clear()
        stage = self.stage
        room = stage.room(self.held)
        if room <= 0:
            await self._has_room.wait()
            return None
        self._has_whole_room = room >= 1
        nothing = self._nothing
        if nothing is None:
            outcome = await self.dock.try_claim(stage.name, room, version=stage.version())
        else:
            outcome = await self._claim_after(nothing, room)
        self._nothing = outcome.rest if isinstance(outcome, Claim) else outcome
        if self.is_idle:
            self.on_nothing()
        return outcome if isinstance(outcome, Claim) else None

    def _free(self) -> None:
        """Claim again if there was no room for it."""
        self._has_room.set()
        if not self._has_whole_room and self.stage.room(self.held) >= 1:
            self.wake()

    async def _claim_after(self, nothing: Nothing, room: float) -> Claim | Nothing:
        """Wait until there may be something, and claim it."""
        stage = self.stage
        self._woken = asyncio.get_running_loop().create_future()
        with self.clock.during("waiting"):
            outcome = await self.dock.claim_after(
                nothing,
                stage.name,
                room,
                version=stage.version(),
                timeout=WAIT_SECONDS,
                early=self._woken,
            )
        may_work = self._running.is_set() and not self._stopping
        if isinstance(outcome, Claim) and not (may_work and stage.room(self.held) > 0):
            await self.dock.index.hand_back(outcome)
            return nothing
        return outcome

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
                        self._free()
                finally:
                    await outputs.aclose()
            if self._stopping and claim.token not in self._settled and self._held[claim.token] > 0:
                await self.dock.index.hand_back(claim)  # the stage gives back what it has not begun
        except (LeaseLost, StaleHandle) as lost:
            # Another worker may hold these rows now: drop their outputs, and keep those that are
            # committed.
            log.warning("lease lost", stage=self.stage.name, rows=len(claim), reason=str(lost))
            await self.dock.index.hand_back(claim)  # the rows that are left under the lease, if any
        finally:
            self._tasks.pop(claim.token, None)
            self._held.pop(claim.token, None)
            self._settled.discard(claim.token)
            self._free()

    async def _commit(self, claim: Claim, output: Output) -> None:
        if output.ends_lease:
            self._settled.add(claim.token)
        await output.commit(self.dock, claim)
        count = len(output.positions)
        if not output.ends_lease:
            self._held[claim.token] -= count
        if output.finished:
            self.rows += count
        elif isinstance(output, Parked):
            self.parked += count
        self.tokens += output.tokens

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self.dock.lease / 3)
            held = [token for token in self._tasks if token not in self._settled]
            if not held:
                continue
            renewed_tokens = await self.dock.index.renew(self.stage.name, held, self.dock.lease)
            for token in set(held) - renewed_tokens:
                if (
                    token in self._tasks
                    and token not in self._settled
                    and self._held.get(token, 0) > 0
                ):
                    log.warning("lease lost", stage=self.stage.name, lease=token[:8])
                    self._tasks[token].cancel()

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(EVENT_SECONDS)
            await self.report()

    async def report(self) -> None:
        """Emit a `stage` event, and a `span` event when there are spans."""
        worker = f"{self.stage.name}-{self.number}"
        counts = {"rows": self.rows, "tokens": self.tokens}
        counts |= {"parked": self.parked, "in_flight": self.held, **self.stage.figures()}
        await report_stage(self.dock.index, self.stage.name, worker, self.clock, self.spans, counts)


async def report_stage(
    index: Index, stage: str, worker: str, clock: Clock, spans: Spans, counts: Mapping[str, Any]
) -> None:
    """Emit the `stage` event of a worker, with the other ``counts`` that it has, and a `span` event
    when there are spans."""
    figures: dict[str, Any] = {
        **clock.read(),
        **counts,
        "queue_depth": await index.queue_depth(stage),
    }
    await index.emit(StageEvent(stage=stage, worker=worker, **figures))
    taken, left_out = spans.take()
    if taken:
        await index.emit(SpanEvent(stage=stage, worker=worker, spans=taken, left_out=left_out))
