"""Writes rows into a warehouse, and records their places in the index.

    rows ─ pack ─▶ room: in the open slab, or a block of their own ─ fill ─▶ index call with places ─▶ visible
                     └ full: wait for the topic `room`                          └ refused, cancelled: give the room up

A worker writes small outputs one behind the other into a *slab*, a block that it holds open, so
that most writes need no call for room: the bytes are carved here, and the commit says where they
lie. A slab's bytes are free when it is closed and all rows that point to it are released. A write
of a block of its own mostly finds it allocated: by the call that pointed to the one before.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np
from tensordict import TensorDictBase

from pipeline.data.blocks import PackedRows, pack
from pipeline.data.columns import Schema
from pipeline.documents.flow import ROOM
from pipeline.index.claims import REF, Stored
from pipeline.index.client import Index
from pipeline.index.errors import BlockLost, IndexRefused, NeverFits, WarehouseGone
from pipeline.index.warehouses import Block, Full, WarehouseRecord
from pipeline.warehouse.directory import OFFSET_BITS, WarehouseDirectory

Rows = Mapping[str, Any] | TensorDictBase
T = TypeVar("T")


class SendApart(Protocol):
    """A call of the index that points rows to where they lie, and asks for a block."""

    def __call__(self, stored: Stored, *, spare: int, reserve: int) -> Awaitable[Block | None]: ...


SLAB = 8 << 20  # bytes, at most a 32nd of the arena
# of the arena, kept free from new samples, so that those inside find room to be finished
SOURCE_RESERVE = 0.25
_SLAB_SHARE = 1 / 3  # of a slab; a larger write takes a block of its own
# A write of a block of its own brings the room for another one, a little larger: of so many bytes
# at least, and for writes of at most so many. What is larger takes longer than a call for room.
_SPARE_SIZE = 1.25
_LEAST_SPARE = 4 << 10
_LARGEST_SPARE = 64 << 10
_MOST_SPARES = 8  # of a worker
_CLOSE_SECONDS = 2.0
_PUTS_TOGETHER = 256


class NoRoom(TimeoutError):
    """The warehouse stayed full until the deadline."""


@dataclass
class Slab:
    """A block that this worker holds open, written up to ``used``; ``writers`` are writes not yet
    committed."""

    home: WarehouseRecord
    block: int
    offset: int
    nbytes: int
    used: int = 0
    writers: int = 0


@dataclass(frozen=True, slots=True)
class _Written:
    """Rows in a warehouse to which no row of the index points yet."""

    block: int
    place: int  # as in REF
    mask: int
    slab: Slab | None  # None: a block of their own, which their commit closes


@dataclass(frozen=True, eq=False, slots=True)
class _Put:
    """Written groups that wait to be admitted."""

    written: _Written
    rows: int
    samples: int
    admitted: asyncio.Future[int]


class Writer:
    """Writes rows of one worker.

    ``room_timeout`` is in seconds; ``slab`` in bytes (0: each write takes its own block).
    """

    def __init__(
        self,
        index: Index,
        schema: Schema,
        directory: WarehouseDirectory,
        *,
        worker: str,
        room_timeout: float,
        slab: int,
    ) -> None:
        self._index = index
        self._schema = schema
        self._directory = directory
        self._worker = worker
        self.room_timeout = room_timeout
        self._slab_bytes = slab
        self._slab: Slab | None = None
        self._spares: list[Slab] = []  # empty ones, for writes of a block of their own
        self._retired: list[Slab] = []
        self._carving = asyncio.Lock()
        self._admitting = False  # the call of a put is under way
        self._admission: asyncio.Task[None] | None = None  # admits the puts that wait for it
        self._puts: list[_Put] = []
        # entered around each wait for room
        self.on_room: Callable[[], AbstractContextManager[None]] = nullcontext

    async def store(
        self,
        send: Callable[[Stored], Awaitable[T]],
        rows: Rows | None,
        slots: np.ndarray,
        *,
        reserve: float = 0.0,
    ) -> T:
        """Write ``rows`` and call ``send`` with places that point to them: the i-th to slot
        ``slots[i]``.

        ``reserve`` is the share of the arena to keep free. Waits while the warehouse is full, and
        raises NoRoom after ``room_timeout``."""
        if rows is None:
            return await send(Stored(self._worker, (await self._directory.home()).number))
        try:
            return await self._point(send, await self.write(rows, reserve), slots)
        except (
            BlockLost
        ):  # the index took this worker for dead, or the warehouse is gone: write the rows again
            self._retire()
            return await self._point(send, await self.write(rows, reserve), slots)

    async def store_apart(self, send: SendApart, rows: Rows, slots: np.ndarray) -> None:
        """Write and send as :meth:`store` does, into a block of their own: the bytes of a slab
        become free all together, and these rows are released sooner than others.

        ``send`` also asks for the block of a next write, ``spare`` bytes of which ``reserve`` stay
        free, and returns it."""
        packed = pack(self._schema, rows)
        try:
            await self._store_apart(send, packed, slots)
        except BlockLost:
            self._retire()
            await self._store_apart(send, packed, slots)

    async def _store_apart(self, send: SendApart, packed: PackedRows, slots: np.ndarray) -> None:
        room = self._take_spare(packed.nbytes) or await self.allocate(packed.nbytes)
        written = await self._fill(room, 0, packed, None)
        spare = self._spare_bytes(packed.nbytes)
        asking = partial(send, spare=spare, reserve=int(SOURCE_RESERVE * room.home.nbytes))
        block = await self._point(asking, written, slots)
        if block is not None:
            self._spares.append(Slab(room.home, block.number, block.offset, spare))

    async def write(self, rows: Rows, reserve: float = 0.0) -> _Written:
        """Write ``rows`` packed; waits while the warehouse is full."""
        packed = pack(self._schema, rows)
        size = min(self._slab_bytes, (await self._directory.home()).nbytes // 32) // 64 * 64
        slab = None
        at = 0
        if packed.nbytes <= _SLAB_SHARE * size:
            async with self._carving:
                slab = self._slab
                if (
                    slab is None
                    or slab.used + packed.nbytes > slab.nbytes
                    or slab.home is not self._directory.known_home
                ):
                    self._retire()
                    with suppress(NoRoom, NeverFits):  # then a smaller block may still find room
                        self._slab = await self.allocate(size, reserve, wait=False)
                    slab = self._slab
                if slab is not None:
                    at = slab.used
                    slab.used += packed.nbytes
                    slab.writers += 1
        room = slab or await self.allocate(packed.nbytes, reserve)
        return await self._fill(room, at, packed, slab)

    async def _fill(self, room: Slab, at: int, packed: PackedRows, slab: Slab | None) -> _Written:
        """Write into ``room`` from byte ``at`` on."""
        offset = room.offset + at
        written = _Written(room.block, room.home.number << OFFSET_BITS | offset, packed.mask, slab)
        try:
            await self._directory.write(room.home, offset, room.block, packed)
        except BaseException:
            await asyncio.shield(self._give_up(written))
            raise
        return written

    async def _point(
        self, send: Callable[[Stored], Awaitable[T]], written: _Written, slots: np.ndarray
    ) -> T:
        refs = np.empty(len(slots), REF)
        refs["slot"], refs["place"] = slots, written.place
        try:
            reply = await send(self._stored(written, refs))
        except (
            BaseException
        ):  # cancelled too: if the call took effect, giving up its block changes nothing
            await asyncio.shield(self._give_up(written))
            raise
        if written.slab is not None:
            written.slab.writers -= 1
        return reply

    def _stored(self, written: _Written, refs: np.ndarray) -> Stored:
        refs["block"] = written.block
        home = written.place >> OFFSET_BITS
        close = written.slab is None
        return Stored(self._worker, home, written.block, written.mask, close, refs.tobytes())

    async def _give_up(self, written: _Written) -> None:
        if written.slab is None:
            await self._index.close_blocks(self._worker, [written.block])
        else:
            written.slab.writers -= 1  # its bytes stay unused until the slab is free

    # ── blocks that came with earlier writes ──

    def _take_spare(self, nbytes: int) -> Slab | None:
        """Return a block for ``nbytes``, of which it does not leave too many unused."""
        home = self._directory.known_home
        most = max(_LEAST_SPARE, _SPARE_SIZE * _SPARE_SIZE * nbytes)
        fitting = [s for s in self._spares if s.home is home and nbytes <= s.nbytes <= most]
        if fitting:
            spare = min(fitting, key=lambda slab: slab.nbytes)
            self._spares.remove(spare)
            return spare
        if len(self._spares) == _MOST_SPARES:
            self._retire_spares()
        return None

    def _spare_bytes(self, nbytes: int) -> int:
        """Return how many bytes to ask for, with a write of ``nbytes``, for one that follows."""
        if not self._slab_bytes or nbytes > _LARGEST_SPARE or len(self._spares) >= _MOST_SPARES:
            return 0
        return max(_LEAST_SPARE, int(_SPARE_SIZE * nbytes))

    def _retire_spares(self) -> None:
        self._retired += self._spares
        self._spares = []

    # ── room ──

    async def allocate(self, nbytes: int, reserve: float = 0.0, *, wait: bool = True) -> Slab:
        """A new block in the warehouse; waits while it is full."""
        started = time.monotonic()
        while True:
            home = await self._directory.home()
            try:
                given = await self._ask_for_room(home.number, nbytes, int(reserve * home.nbytes))
            except WarehouseGone:
                await self._directory.enter()
                continue
            if isinstance(given, Block):
                return Slab(home, given.number, given.offset, nbytes)
            left = started + self.room_timeout - time.monotonic() if wait else 0.0
            if left <= 0:
                raise NoRoom(
                    f"warehouse {home.name!r} stayed full for {self.room_timeout:.0f} s: {nbytes} "
                    f"bytes found no room; "
                    "give pipeline.arena more, or let checkpoints release rows sooner"
                )
            with self.on_room():
                await self._index.wait(ROOM, given.wait, min(left, 5.0))

    async def _ask_for_room(self, warehouse: int, nbytes: int, reserve: int) -> Block | Full:
        """Allocate a block. One that is allocated after the caller was cancelled is closed
        again."""
        allocation = self._index.allocate(
            warehouse, self._worker, nbytes, reserve=reserve, close=self._idle()
        )
        call = asyncio.ensure_future(allocation)
        try:
            return await asyncio.shield(call)
        except asyncio.CancelledError:
            with suppress(TimeoutError, ConnectionError, IndexRefused):
                async with asyncio.timeout(_CLOSE_SECONDS):
                    if isinstance(given := await call, Block):
                        await self._index.close_blocks(self._worker, [given.number])
            raise

    def _retire(self) -> None:
        if self._slab is not None:
            self._retired.append(self._slab)
        self._slab = None
        self._retire_spares()

    def _idle(self) -> list[int]:
        """Takes the retired slabs without writers off the list, and returns their blocks."""
        idle = [slab.block for slab in self._retired if not slab.writers]
        self._retired = [slab for slab in self._retired if slab.writers]
        return idle

    async def flush(self) -> None:
        """Close slabs that no write is using: their bytes can be free as soon as their rows are."""
        self._retire()
        if idle := self._idle():
            await self._index.close_blocks(self._worker, idle)

    async def close(self) -> None:
        """Flush, within a few seconds; the index takes back the same when it forgets this
        worker."""
        with suppress(TimeoutError, ConnectionError, IndexRefused):
            async with asyncio.timeout(_CLOSE_SECONDS):
                if self._admission is not None:
                    await self._admission
                await self.flush()

    # ── puts that share a call ──

    async def put(self, rows: Rows, samples: int) -> int:
        """Admit B rows, each ``samples`` of them one group, under the next free numbers.

        Returns the number after the last.

        Puts that come while another one's call is under way wait for it; then one call admits all
        of them that are in one block. While they wait they hold few objects: many of them would
        otherwise set off full garbage collections.
        """
        count = (
            rows.batch_size[0]
            if isinstance(rows, TensorDictBase)
            else len(next(iter(rows.values())))
        )
        if count % samples:
            raise ValueError(
                f"samples: {count} rows are no whole groups of {samples}; put them group by group"
            )
        try:
            written = await self.write(rows, SOURCE_RESERVE)
            if written.slab is None or not self._admitting:
                return await self._admit_alone(written, count, samples)
            put = _Put(written, count, samples, asyncio.get_running_loop().create_future())
            self._puts.append(put)
            return await asyncio.shield(put.admitted)
        except BlockLost:
            self._retire()
            return await self._admit_alone(await self.write(rows, SOURCE_RESERVE), count, samples)

    async def _admit_alone(self, written: _Written, count: int, samples: int) -> int:
        """Admit one put by a call of its own; then the puts that came meanwhile are admitted by a
        task."""
        first = not self._admitting
        self._admitting = True
        try:
            entries = [(None, count // samples, samples)]
            return await self._point(
                lambda stored: self._index.admit(stored, entries), written, np.arange(count)
            )
        finally:
            if first:
                self._admitting = bool(self._puts)
                if self._puts:
                    self._admission = asyncio.create_task(self._admit_puts())

    async def _admit_puts(self) -> None:
        """Admit the waiting puts, those of one block together, until none waits."""
        try:
            while self._puts:
                first = self._puts[0].written
                alike = [
                    p
                    for p in self._puts
                    if (p.written.block, p.written.mask) == (first.block, first.mask)
                ]
                together = dict.fromkeys(alike[:_PUTS_TOGETHER])
                self._puts = [put for put in self._puts if put not in together]
                await self._admit(list(together))
        finally:
            self._admitting = False

    async def _admit(self, together: Sequence[_Put]) -> None:
        """Admit puts of one block, and set their results."""
        refs = np.empty(sum(put.rows for put in together), REF)
        refs["slot"] = np.concatenate([np.arange(put.rows) for put in together])
        refs["place"] = np.repeat(
            [put.written.place for put in together], [put.rows for put in together]
        )
        entries = [(None, put.rows // put.samples, put.samples) for put in together]
        try:
            after = await self._index.admit(self._stored(together[0].written, refs), entries)
        except Exception as error:
            for put in together:
                await self._give_up(put.written)
                if not put.admitted.done():
                    put.admitted.set_exception(error)
            return
        for put in reversed(together):
            await self._give_up(put.written)
            if not put.admitted.done():
                put.admitted.set_result(after)
            after -= put.rows // put.samples
