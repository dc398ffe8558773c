"""The engines of one served policy: requests under way keep the version that they began with.

    request ──▶ the newest engine ──▶ tokens of one version
    version v+1 ──▶ an engine without pinned requests loads it (itself, or a second one that is made for this) ──▶ it is the
                    newest; the other one ends its requests with v, and then is free for the next version

At most two engines exist. While both have pinned requests a new version waits, and a newer one
takes its place.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from orchestration.policy.rows import Rows, spare_of
from stages.engines.protocols import RolloutEngine
from stages.threads import run_in_temporary_thread

# of a version, with the model of a checkpoint
MakeEngine = Callable[[int, Path | None], RolloutEngine]
TURN_SECONDS = 0.05  # of computing, between two pauses of engines with a share


@dataclass(eq=False)
class _Slot:
    engine: RolloutEngine
    rows: Rows
    requests: int = 0
    pinned: int = 0  # of them, those that keep their version
    swapping: bool = False


class PolicyEngines:
    """The engines of one policy, of which each has room for ``max_rows`` rows, and the spare ones
    of them. ``make`` blocks; it is called in a thread."""

    def __init__(self, make: MakeEngine, max_rows: int = 64) -> None:
        self._make = make
        self._max_rows = max_rows
        self._begin: tuple[int, Path | None] = (0, None)  # what a second engine is made from
        self._slots: list[_Slot] = []  # the last one takes new requests
        self._changed = asyncio.Condition()

    @property
    def version(self) -> int:
        return self._slots[-1].engine.version

    def all(self) -> list[RolloutEngine]:
        return [slot.engine for slot in self._slots]

    def rows_of(self, engine: RolloutEngine) -> Rows:
        """Return the rows of ``engine``, which its requests share."""
        return next(slot.rows for slot in self._slots if slot.engine is engine)

    async def open(self, version: int, checkpoint: Path | None) -> None:
        """Make the first engine, or for a new checkpoint one in the place of a free one."""
        self._begin = (version, checkpoint)
        new_slot = await self._new_slot()
        await self._until(
            lambda: len(self._slots) < 2 or any(not slot.requests for slot in self._slots)
        )
        free = next((slot for slot in self._slots if not slot.requests), None)
        self._slots = [slot for slot in self._slots if slot is not free] + [new_slot]
        if free is not None:
            await free.engine.close()

    @contextlib.asynccontextmanager
    async def engine(self, *, mixed: bool) -> AsyncIterator[RolloutEngine]:
        """The newest engine, for one request.

        Unless ``mixed``, it keeps its weights until the request ends.
        """
        await self._until(lambda: not self._slots[-1].swapping)
        slot = self._slots[-1]
        slot.requests = slot.requests + 1
        slot.pinned = slot.pinned + (not mixed)
        try:
            yield slot.engine
        finally:
            slot.requests = slot.requests - 1
            slot.pinned = slot.pinned - (not mixed)
            await self._notify()

    async def free(self) -> None:
        """Wait until a version can be loaded at once."""
        await self._until(
            lambda: len(self._slots) < 2 or any(not slot.pinned for slot in self._slots)
        )

    async def swap(self, version: int, weights: Mapping[str, torch.Tensor]) -> None:
        """Load ``weights``, as :meth:`RolloutEngine.load_weights` takes them, for the requests from
        now on. Raises WeightMismatch, and keeps the old ones."""
        await self.free()
        unpinned = [slot for slot in self._slots if not slot.pinned]
        if not unpinned:
            unpinned = [await self._new_slot()]
            self._slots[:0] = unpinned
        # requests that mix versions get this one
        slot = max(unpinned, key=lambda slot: slot.requests)
        slot.swapping = True
        try:
            await slot.engine.load_weights(version, weights)
            self._slots = [other for other in self._slots if other is not slot] + [slot]
        finally:
            slot.swapping = False
            await self._notify()

    async def close(self) -> None:
        for slot in self._slots:
            await slot.engine.close()

    async def _new_slot(self) -> _Slot:
        begin = self._begin
        engine = await asyncio.to_thread(run_in_temporary_thread, lambda: self._make(*begin))
        return _Slot(engine, Rows(self._max_rows, spare_of(self._max_rows)))

    async def _until(self, holds: Callable[[], bool]) -> None:
        async with self._changed:
            await self._changed.wait_for(holds)

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()


async def keep_share(
    busy: asyncio.Event, engines: Callable[[], Sequence[RolloutEngine]], share: Callable[[], float]
) -> None:
    """Let all of ``engines()`` together compute for at most ``share()`` of the time while ``busy``
    is set."""
    while True:
        await busy.wait()
        began = time.monotonic()
        await asyncio.sleep(TURN_SECONDS)
        if (part := share()) >= 1:
            continue
        paused = engines()
        try:  # one may be closed
            await asyncio.gather(*(engine.pause() for engine in paused), return_exceptions=True)
            await asyncio.sleep((time.monotonic() - began) * (1 / part - 1))
        finally:
            await asyncio.gather(*(engine.resume() for engine in paused), return_exceptions=True)
