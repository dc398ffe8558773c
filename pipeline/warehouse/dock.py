"""The dock: one run's index and warehouses as one thing to put samples into and take them out of.

    put / admit ─▶ … claim(stage) ─▶ fetch(claim, columns) ─▶ commit(claim, positions, columns) ─▶ …
                       ▲                                   ├▶ train(claim, step) ─▶ release(before=step)
                       └── begun(claim, columns) ◀─────────┴▶ park(claim, positions, columns so far)

TensorDict at the borders. Every wait has a deadline.

A worker writes small outputs one behind the other into a *slab*, a block that it holds open, so that most writes need no
call for room: the bytes are carved here and the commit tells the index where they lie. A slab's bytes are free when it
is closed and all rows that point to it are released.
"""

from __future__ import annotations

import asyncio
import platform
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import structlog
from tensordict import NonTensorStack, TensorDict, TensorDictBase

from pipeline.blocks import BlockReader, PackedRows, missing_column, pack
from pipeline.columns import ColumnError, Packed, Schema, in_order
from pipeline.index.client import (
    REF,
    STATES,
    Block,
    BlockLost,
    Claim,
    Full,
    Index,
    IndexRefused,
    Lost,
    NeverFits,
    Nothing,
    RunConfig,
    StageSpec,
    Stored,
    WarehouseGone,
    WarehouseRecord,
    pack_made,
    ranges,
    redacted,
)
from pipeline.warehouse.arena import Arena, StaleHandle, shared_memory_directory
from pipeline.warehouse.wire.client import RemoteWarehouse
from pipeline.warehouse.wire.protocol import WarehouseUnreachable
from pipeline.warehouse.wire.server import WarehouseServer

log = structlog.get_logger()

Rows = Mapping[str, Any] | TensorDictBase
T = TypeVar("T")

SIGN_SECONDS = 2.0  # between a served warehouse's signs of life
SILENT_SECONDS = 10.0  # without one, a warehouse that cannot be reached is taken for lost
_CLOSE_SECONDS = 2.0
_PUTS_TOGETHER = 256
SLAB = 8 << 20  # bytes, at most a 32nd of the arena
_SLAB_SHARE = 1 / 3  # of a slab; a larger write takes a block of its own
_OFFSET_BITS = 48
_SOURCE_RESERVE = 0.25  # of the arena, kept from what enters, so that samples find the room to get out


class NoRoom(TimeoutError):
    """The warehouse stayed full until the deadline."""


@dataclass
class _Slab:
    """A block that this worker holds open, written up to ``used``; ``writers`` are writes not yet committed."""

    home: WarehouseRecord
    block: int
    offset: int
    nbytes: int
    used: int = 0
    writers: int = 0


@dataclass(frozen=True)
class _Written:
    """Rows that lie in a warehouse and that no row of the index points to yet."""

    block: int
    place: int  # as in REF
    mask: int
    slab: _Slab | None  # None: a block of their own, which closes with their commit


@dataclass(frozen=True, eq=False)
class _Put:
    written: _Written
    rows: int
    samples: int
    admitted: asyncio.Future[int]


class Dock:
    """One worker's access to a run's samples.

    ``warehouse`` names the one that this worker writes to; its arena lies in ``directory``. ``node`` says which warehouses
    can be mapped here: those that joined with the same name. Others are reached over the wire with ``secret``, within
    ``wire_timeout`` seconds, inside TLS when ``tls`` gives the contexts of a server and of a client. ``lease`` and
    ``room_timeout`` are seconds, ``slab`` bytes (0: each write takes a block of its own).
    """

    def __init__(
        self,
        index: Index,
        schema: Schema,
        *,
        worker: str,
        directory: Path,
        warehouse: str = "local",
        node: str | None = None,
        secret: bytes = b"",
        tls: tuple[ssl.SSLContext, ssl.SSLContext] | None = None,
        lease: float = 60.0,
        room_timeout: float = 600.0,
        wire_timeout: float = 10.0,
        slab: int = SLAB,
    ) -> None:
        self.index, self.schema, self.worker = index, schema, worker
        self.lease, self.room_timeout = lease, room_timeout
        self.node = node or platform.node()
        self._directory, self._name, self._slab_bytes = directory, warehouse, slab
        self._secret, self._tls, self._wire_timeout = secret, tls, wire_timeout
        self._home: WarehouseRecord | None = None
        self._warehouses: dict[int, WarehouseRecord] = {}
        self._arenas: dict[int, Arena] = {}
        self._remotes: dict[tuple[str, int], RemoteWarehouse] = {}  # by address
        self._server: WarehouseServer | None = None
        self._living: asyncio.Task[None] | None = None
        self._producer: dict[str, int] = {}  # column → who makes it
        self._slab: _Slab | None = None
        self._retired: list[_Slab] = []
        self._carving = asyncio.Lock()
        self._puts: list[_Put] = []
        self._admitting = False  # a put is under way: those that come now wait, and share the next call
        self._putting: asyncio.Task[None] | None = None
        # What a wait for room runs in; a controller accounts its time with it.
        self.on_room: Callable[[], AbstractContextManager[None]] = nullcontext

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        url: str,
        run: str,
        schema: Schema,
        stages: Sequence[StageSpec],
        *,
        worker: str,
        arena: int,
        directory: Path | None = None,
        **options: Any,
    ) -> AsyncIterator[Dock]:
        """A flow on its own, without a trainer's gate: ``stages`` joined by their columns alone, the last of which releases
        the rows. Whoever comes first makes it, the others join. ``arena`` is the warehouse's size in bytes."""
        index = Index(url, run)
        dock = cls(
            index, schema, worker=worker, directory=directory or shared_memory_directory() / f"dock-{run}", **options
        )
        try:
            await index.init(RunConfig(tuple(stages)), {})
            await dock.join(arena)
            yield dock
        finally:
            await dock.close()
            await index.close()

    @classmethod
    async def attach(cls, url: str, run: str, **options: Any) -> Dock:
        """To look at a run from outside, with the schema that its workers agreed on and the secret that they know each
        other by; ``options`` as ``node`` and ``tls``. Close its index too. Raises LookupError when the index knows no such
        run."""
        index = Index(url, run, timeout=5.0)
        try:
            told = await index.get("schema")
        except BaseException:
            await index.close()
            raise
        if told is None:
            await index.close()
            raise LookupError(f"run: {run!r} is not in index {redacted(url)}; give the id of a run that is")
        options = {"secret": (await index.get("secret") or "").encode(), **options}
        return cls(index, Schema.from_json(told), worker="onlooker", directory=Path(), **options)

    async def _agree(self) -> None:
        """All workers of a run have one schema, or the longer of two that begin alike."""
        told, mine = await self.index.put_once("schema", self.schema.to_json()), self.schema.columns
        known = Schema.from_json(told).columns
        if mine[: len(known)] != known[: len(mine)]:
            names = [[column.name for column in columns] for columns in (known, mine)]
            raise ColumnError(
                f"schema: run {self.index.run!r} has columns {names[0]}, this worker {names[1]}; give the same"
            )
        if len(mine) > len(known):
            await self.index.put("schema", self.schema.to_json())

    async def join(self, nbytes: int) -> None:
        """Bring this node's warehouse into the run, with ``nbytes`` bytes; harmless when it is there."""
        await self._agree()
        path = (self._directory / f"arena-{self._name}").resolve()
        arena = Arena.create(path, nbytes)
        self._arenas[await self.index.join_warehouse(self._name, self.node, path, nbytes)] = arena
        await self._enter()

    async def _learn(self) -> None:
        """Learn the run's stages and warehouses, and which of these to write to."""
        if not self._producer:
            config = await self.index.config()
            makers = {stage["producer"]: stage["makes"] for stage in config["stages"] if stage["producer"] > 0}
            for bit, column in enumerate(self.schema.columns):
                self._producer[column.name] = next((p for p, makes in makers.items() if makes >> bit & 1), 0)
        self._warehouses = {warehouse.number: warehouse for warehouse in await self.index.warehouses()}
        for number in [number for number in self._arenas if number not in self._warehouses]:
            del self._arenas[number]
        staying = [w for w in self._warehouses.values() if not w.leaving]
        home = next((w for w in staying if w.name == self._name), None)
        if home is None and staying and self._home is not None:  # ours has gone: any other, near ones first
            home = min(staying, key=lambda w: (w.node != self.node, w.number))
        if self._home != home:  # an equal one stays the same object, as slabs compare
            self._home = home

    async def enter(self) -> None:
        """Learn where the run's samples lie, to read and write them without a warehouse of one's own."""
        await self._enter()

    def producer(self, column: str) -> int:
        """Which of a claim's ``refs`` say where ``column`` lies; 0 is the admission. Known after :meth:`enter`."""
        return self._producer[column]

    async def _enter(self) -> WarehouseRecord:
        """Learn, and return the warehouse to write to."""
        await self._learn()
        if self._home is None:
            staying = [w.name for w in self._warehouses.values() if not w.leaving]
            raise WarehouseGone(
                f"warehouse {self._name!r} is not in run {self.index.run!r}, which has {staying}; join() it first, or name "
                "one of these"
            )
        return self._home

    async def serve(self, host: str, port: int = 0, *, advertise: str | None = None) -> tuple[str, int]:
        """Let other nodes reach this node's warehouse at ``host``, or at ``advertise`` where they know it by another name.
        Returns the address. One worker of a node does this, until it closes."""
        home = self._home or await self._enter()
        await self._serve_no_more()  # a former server's signs of life would go on telling its address
        server_side = self._tls[0] if self._tls else None
        self._server = WarehouseServer(
            self._arena(home), self.schema, secret=self._secret, host=host, port=port, ssl=server_side
        )
        _, port = await self._server.start()
        name = advertise or host
        await self.index.announce_warehouse(home.number, name, port)
        self._living = asyncio.create_task(self._live(home.number, name, port))
        await self._enter()
        return name, port

    async def _serve_no_more(self) -> None:
        if self._living is not None:
            self._living.cancel()
            await asyncio.gather(self._living, return_exceptions=True)
        if self._server is not None:
            await self._server.close()
        self._living = self._server = None

    async def _live(self, number: int, host: str, port: int) -> None:
        """Signs of life, until the warehouse is out of the run."""
        try:
            while True:
                await asyncio.sleep(SIGN_SECONDS)
                await self.index.announce_warehouse(number, host, port)
        except WarehouseGone:
            log.warning("this node's warehouse is out of the run", warehouse=self._name)

    @property
    def served(self) -> WarehouseServer | None:
        return self._server

    async def close(self) -> None:
        """Give back what this worker holds open, and its connections. The rows that it wrote stay."""
        if self._putting is not None:
            await self._putting
        if not self.index.closed:
            with suppress(
                TimeoutError, ConnectionError, IndexRefused
            ):  # whoever forgets this worker takes back the same
                async with asyncio.timeout(_CLOSE_SECONDS):
                    await self.flush()
        await self._serve_no_more()
        for remote in self._remotes.values():
            await remote.close()
        self._remotes.clear()

    # ── writing ──

    async def flush(self) -> None:
        """Close slabs that nothing is being written to: their bytes can be free as soon as their rows are."""
        self._retire()
        if idle := self._idle():
            await self.index.close_blocks(self.worker, idle)

    def _retire(self) -> None:
        if self._slab is not None:
            self._retired.append(self._slab)
        self._slab = None

    def _idle(self) -> list[int]:
        """Retired slabs without writers, taken off the list."""
        idle = [slab.block for slab in self._retired if not slab.writers]
        self._retired = [slab for slab in self._retired if slab.writers]
        return idle

    async def _open_slab(self, nbytes: int, reserve: float) -> _Slab | None:
        """A slab, or None when there is no room for one: then a smaller block may still find some."""
        try:
            return await self._allocate(nbytes, reserve, wait=False)
        except (NoRoom, NeverFits):
            return None

    async def _allocate(self, nbytes: int, reserve: float, *, wait: bool = True) -> _Slab:
        """Room in the warehouse; waits while it is full."""
        started = time.monotonic()
        while True:
            home = self._home or await self._enter()
            try:
                given = await self._ask_for_room(home.number, nbytes, int(reserve * home.nbytes))
            except WarehouseGone:
                await self._enter()
                continue
            if isinstance(given, Block):
                return _Slab(home, given.number, given.offset, nbytes)
            left = started + self.room_timeout - time.monotonic() if wait else 0.0
            if left <= 0:
                raise NoRoom(
                    f"warehouse {home.name!r} stayed full for {self.room_timeout:.0f} s: {nbytes} bytes found no room; "
                    "give pipeline.arena more, or let checkpoints release rows sooner"
                )
            with self.on_room():
                await self.index.wait("room", given.wait, min(left, 5.0))

    async def _ask_for_room(self, warehouse: int, nbytes: int, reserve: int) -> Block | Full:
        """Allocate a block. One that is allocated after the caller was cancelled is closed again."""
        allocation = self.index.allocate(warehouse, self.worker, nbytes, reserve=reserve, close=self._idle())
        call = asyncio.ensure_future(allocation)
        try:
            return await asyncio.shield(call)
        except asyncio.CancelledError:
            with suppress(TimeoutError, ConnectionError, IndexRefused):
                async with asyncio.timeout(_CLOSE_SECONDS):
                    if isinstance(given := await call, Block):
                        await self.index.close_blocks(self.worker, [given.number])
            raise

    async def _write(self, rows: Rows, reserve: float = 0.0, *, apart: bool = False) -> _Written:
        """Write ``rows`` packed, ``apart`` in a block of their own; waits while the warehouse is full."""
        packed = pack(self.schema, rows)
        home = self._home or await self._enter()
        size = min(self._slab_bytes, home.nbytes // 32) // 64 * 64
        slab: _Slab | None = None
        if packed.nbytes <= _SLAB_SHARE * size and not apart:
            async with self._carving:
                slab = self._slab
                if slab is None or slab.used + packed.nbytes > slab.nbytes or slab.home is not self._home:
                    self._retire()
                    slab = self._slab = await self._open_slab(size, reserve)
                if slab is not None:
                    place = slab.home.number << _OFFSET_BITS | slab.offset + slab.used
                    written = _Written(slab.block, place, packed.mask, slab)
                    slab.used += packed.nbytes
                    slab.writers += 1
        if slab is None:
            slab = await self._allocate(packed.nbytes, reserve)
            written = _Written(slab.block, slab.home.number << _OFFSET_BITS | slab.offset, packed.mask, None)
        try:
            await self._fill(slab.home, written, packed)
        except BaseException:
            await asyncio.shield(self._give_up(written))
            raise
        return written

    async def _fill(self, home: WarehouseRecord, written: _Written, packed: PackedRows) -> None:
        offset = written.place & (1 << _OFFSET_BITS) - 1
        if home.node == self.node:
            packed.write_into(self._arena(home).slice(offset, packed.nbytes), written.block)
        else:
            if not home.port:  # it serves since we looked
                await self._learn()
                home = self._warehouses.get(home.number, home)
            try:
                await self._remote(home).write(offset, written.block, packed)
            except WarehouseUnreachable as silent:
                await self._suspect(home, silent)
                raise BlockLost(f"warehouse {home.name!r} is gone; the rows are written again") from silent

    async def _give_up(self, written: _Written) -> None:
        if written.slab is None:
            await self.index.close_blocks(self.worker, [written.block])
        else:
            written.slab.writers -= 1  # its bytes stay unused until the slab is free

    async def _place(
        self,
        send: Callable[[Stored], Awaitable[T]],
        columns: Rows | None,
        slots: np.ndarray,
        reserve: float = 0.0,
        *,
        apart: bool = False,
    ) -> T:
        """Write ``columns`` and call the index with rows that point to them: the i-th to slot ``slots[i]``."""
        if columns is None:
            home = self._home or await self._enter()
            return await send(Stored(self.worker, home.number))
        try:
            return await self._point(send, await self._write(columns, reserve, apart=apart), slots)
        except BlockLost:  # this worker was taken for dead, or its warehouse is gone; its next block is its own again
            self._retire()
            return await self._point(send, await self._write(columns, reserve, apart=apart), slots)

    async def _point(self, send: Callable[[Stored], Awaitable[T]], written: _Written, slots: np.ndarray) -> T:
        refs = np.empty(len(slots), REF)
        refs["slot"], refs["place"] = slots, written.place
        try:
            reply = await send(self._stored(written, refs))
        except BaseException:  # cancelled too: if the call is done after all, giving up its block changes nothing
            await asyncio.shield(self._give_up(written))
            raise
        if written.slab is not None:
            written.slab.writers -= 1
        return reply

    def _stored(self, written: _Written, refs: np.ndarray) -> Stored:
        refs["block"] = written.block
        home, close = written.place >> _OFFSET_BITS, written.slab is None
        return Stored(self.worker, home, written.block, written.mask, close, refs.tobytes())

    # ── samples come, and go from stage to stage ──

    async def admit(self, groups: Sequence[tuple[int, int]], prompts: Rows) -> int:
        """Let groups in: ``groups`` are (number, samples), ``prompts`` holds one row of columns per group, which all of
        its samples share. Returns the next group's number. Raises GateClosed past the gate."""
        entries: list[tuple[int | None, int, int]] = []
        for _, run in groupby(enumerate(groups), key=lambda item: (item[1][0] - item[0], item[1][1])):
            members = [group for _, group in run]
            entries.append((members[0][0], len(members), members[0][1]))
        slots = np.repeat(np.arange(len(groups)), [samples for _, samples in groups])
        return await self._place(
            lambda stored: self.index.admit(stored, entries), prompts, slots, reserve=_SOURCE_RESERVE
        )

    async def put(self, rows: Rows, *, samples: int = 1) -> int:
        """Let B rows in, each ``samples`` of them one group, under the next free numbers; visible to claims when this
        returns. Returns the number after the last group's. Puts that come while others are under way share a call."""
        count = rows.batch_size[0] if isinstance(rows, TensorDictBase) else len(next(iter(rows.values())))
        if count % samples:
            raise ValueError(f"samples: {count} rows are no whole groups of {samples}; put them group by group")
        slots = np.arange(count)

        async def admit(stored: Stored) -> int:
            return await self.index.admit(stored, [(None, count // samples, samples)])

        try:
            written = await self._write(rows, reserve=_SOURCE_RESERVE)
            if written.slab is None:
                return await self._point(admit, written, slots)
            if not self._admitting:  # alone so far
                self._admitting = True
                try:
                    return await self._point(admit, written, slots)
                finally:
                    self._admitting = bool(self._puts)
                    if self._puts:  # they came meanwhile
                        self._putting = asyncio.create_task(self._admit_puts())
            put = _Put(written, count, samples, asyncio.get_running_loop().create_future())
            self._puts.append(put)
            return await asyncio.shield(put.admitted)
        except BlockLost:
            self._retire()
            return await self._place(admit, rows, slots, reserve=_SOURCE_RESERVE)

    async def _admit_puts(self) -> None:
        """Admit the puts that wait, those that lie in one block together, until none does."""
        try:
            while self._puts:
                first = self._puts[0].written
                together = [
                    put for put in self._puts if put.written.block == first.block and put.written.mask == first.mask
                ]
                together = together[:_PUTS_TOGETHER]
                self._puts = [put for put in self._puts if put not in together]
                refs = np.empty(sum(put.rows for put in together), REF)
                refs["slot"] = np.concatenate([np.arange(put.rows) for put in together])
                refs["place"] = np.repeat([put.written.place for put in together], [put.rows for put in together])
                entries = [(None, put.rows // put.samples, put.samples) for put in together]
                try:
                    after = await self.index.admit(self._stored(first, refs), entries)
                except Exception as refused:
                    for put in together:
                        await self._give_up(put.written)
                        if not put.admitted.done():
                            put.admitted.set_exception(refused)
                    continue
                for put in reversed(together):
                    put.written.slab.writers -= 1  # type: ignore[union-attr]
                    if not put.admitted.done():
                        put.admitted.set_result(after)
                    after -= put.rows // put.samples
        finally:
            self._admitting = False

    async def claim(self, stage: str, most: int, *, version: int | None = None, timeout: float = 0.0) -> Claim | None:
        """Lease up to ``most`` rows (groups, for stages that take groups), waiting up to ``timeout`` seconds for some."""
        deadline = time.monotonic() + timeout
        while True:
            found = await self.try_claim(stage, most, version=version)
            if isinstance(found, Claim):
                return found
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            await self.wait(stage, found, left)

    @property
    def home(self) -> int:
        """The number of the warehouse that this worker writes to; 0 before it is known."""
        return self._home.number if self._home else 0

    async def try_claim(self, stage: str, most: int, *, version: int | None = None) -> Claim | Nothing:
        return await self.index.claim(stage, self.worker, most, self.lease, version, self.home, patient=True)

    async def wait(self, stage: str, nothing: Nothing, timeout: float) -> bool:
        """Wait until a claim of ``stage`` that found ``nothing`` may find something."""
        return await self.index.wait(nothing.topic, nothing.wait, min(timeout, nothing.due or timeout))

    async def fetch(
        self, claim: Claim, columns: Sequence[str], *, ragged: Literal["jagged", "padded"] = "jagged", fill: float = 0
    ) -> TensorDict:
        """The claimed rows' ``columns``, batch size [B], in the claim's order; views of shared memory where they lie
        side by side on this node, valid while the lease is held. Ragged columns come as jagged nested tensors [B, j],
        or ``padded`` with ``fill``; text as strings. Raises StaleHandle for released rows."""
        found = await self.fetch_packed(claim, columns)
        out: dict[str, Any] = {}
        for name in columns:
            column, packed = self.schema[name], found[name]
            if column.shape is not None:
                out[name] = packed.values.view(len(claim), *column.shape)
            elif column.dtype == "utf8":
                out[name] = NonTensorStack(*packed.texts())
            else:
                out[name] = packed.jagged() if ragged == "jagged" else packed.padded(fill)
        return TensorDict(out, batch_size=[len(claim)])

    async def fetch_packed(self, claim: Claim, columns: Sequence[str]) -> dict[str, Packed]:
        """Like :meth:`fetch`, each column as one packed buffer with its offsets: what packed training wants."""
        if not self._producer:
            await self._learn()
        producers: dict[int, list[str]] = {}
        for name in columns:
            self.schema.bit(name)  # a clear error for a column that is not there
            producers.setdefault(self._producer[name], []).append(name)
        out: dict[str, Packed] = {}
        for producer, names in producers.items():
            refs = claim.refs[producer]
            if len(refs) < len(claim):
                raise ColumnError(
                    f"column {names[0]!r}: stage {claim.stage!r} does not need what its maker makes, so it may come later "
                    "than the rows; declare it as needed"
                )
            if not refs["block"].all():
                raise missing_column(names[0], int((refs["block"] == 0).argmax()))
            out |= await self.gather(refs, names)
        return out

    async def gather(self, refs: np.ndarray, names: list[str]) -> dict[str, Packed]:
        """The columns ``names`` of the rows that lie where ``refs`` say (REF [B], B > 0), in that order."""
        numbers = (refs["place"] >> _OFFSET_BITS).astype(np.int64)
        if len(numbers) == 1 or (numbers == numbers[0]).all():
            return await self._read(int(numbers[0]), names, refs)
        parts = []
        for number in np.unique(numbers).tolist():
            positions = np.flatnonzero(numbers == number)
            parts.append((positions, await self._read(number, names, refs[positions])))
        return {name: in_order([(positions, part[name]) for positions, part in parts], len(refs)) for name in names}

    async def _read(self, number: int, names: list[str], refs: np.ndarray) -> dict[str, Packed]:
        warehouse = self._warehouses.get(number)
        if warehouse is None or (warehouse.node != self.node and not warehouse.port):  # it came, or serves, since then
            await self._learn()
            warehouse = self._warehouses.get(number)
        if warehouse is None:
            raise StaleHandle(f"warehouse {number} has left the run, and these rows with it; claim again")
        places = (refs["place"] & (1 << _OFFSET_BITS) - 1).astype(np.int64)
        blocks, slots = refs["block"].astype(np.int64), refs["slot"].astype(np.int64)
        if warehouse.node == self.node:
            arena = self._arena(warehouse)
            return BlockReader(arena.slice(0, arena.nbytes), self.schema).read(blocks, places, slots, names)
        try:
            return await self._remote(warehouse).read(blocks, places, slots, names)
        except WarehouseUnreachable as silent:
            await self._suspect(warehouse, silent)
        if number in self._warehouses:
            return await self._remote(self._warehouses[number]).read(blocks, places, slots, names)
        raise StaleHandle(
            f"warehouse {warehouse.name!r} on node {warehouse.node!r} is gone; its samples are made again"
        )

    async def _suspect(self, warehouse: WarehouseRecord, silent: WarehouseUnreachable) -> None:
        """Returns when the warehouse is out of the run, or back at another address; raises when it is alive and only cannot
        be reached from here."""
        await self._learn()
        if (now := self._warehouses.get(warehouse.number)) is not None and now != warehouse:
            return
        found = await self.index.suspect_warehouse(warehouse.number, SILENT_SECONDS)
        if found == "alive":
            raise WarehouseUnreachable(
                f"warehouse {warehouse.name!r} on node {warehouse.node!r} is alive, but cannot be reached from node "
                f"{self.node!r} ({silent}); check the network between them"
            ) from silent
        if isinstance(found, Lost):
            log.warning("warehouse lost", warehouse=warehouse.name, groups_made_again=found.groups, rows=found.rows)
        await self._learn()

    async def commit(
        self,
        claim: Claim,
        positions: Sequence[int],
        rows: Rows | None,
        *,
        generated: Sequence[tuple[int, int]] | None = None,
    ) -> None:
        """Write ``rows`` (the outputs of the claim's rows at ``positions``) and release their leases in one step.

        ``generated`` gives (oldest policy version, tokens) of each row when this stage makes the responses. Raises
        LeaseLost, and writes nothing, when any of the rows is held by somebody else by now.
        """
        if not len(positions):
            return
        held, order = ranges(claim.row[np.asarray(positions)])
        made = pack_made(generated, order) if generated is not None else None
        await self._place(
            lambda stored: self.index.commit(stored, claim.stage, claim.token, held, made, claim.owner), rows, order
        )

    async def park(
        self, claim: Claim, positions: Sequence[int], rows: Rows, *, generated: Sequence[tuple[int, int]]
    ) -> None:
        """Put the claim's rows at ``positions`` aside with what this stage has made of them so far: ``rows`` are columns
        that it produces, ``generated`` as in :meth:`commit`. They leave the claim, and are the first that the stage's next
        claims bring, one by one; earlier progress of theirs is let go. Raises LeaseLost as :meth:`commit` does."""
        if not len(positions):
            return
        held, order = ranges(claim.row[np.asarray(positions)])
        made = pack_made(generated, order)
        # Progress lives shorter than what lies beside it in a slab, whose bytes are free only all together.
        await self._place(
            lambda stored: self.index.park(stored, claim.stage, claim.token, held, made, claim.owner),
            rows,
            order,
            apart=True,
        )

    async def begun(self, claim: Claim, columns: Sequence[str]) -> tuple[list[int], TensorDict]:
        """Which of the claim's rows were parked before, as positions [b], and the ``columns`` that they were parked with,
        batch size [b], valid as in :meth:`fetch`."""
        if not self._producer:
            await self._learn()
        refs = claim.refs[self._producer[columns[0]]]
        positions = np.flatnonzero(refs["block"]).tolist()
        if not positions:
            return [], TensorDict({}, batch_size=[0])
        return positions, await self.fetch(claim.part(positions), columns)

    async def inspect(self, group: int) -> list[dict[str, Any]]:
        """The rows of a group: ``row``, ``place``, ``state``, the stages that are ``done``, ``oldest_version``, ``tokens``
        and the ``columns`` it has so far, ragged ones as lists. Empty when the group is not there."""
        found = await self.index.inspect(group)
        if found is None:
            return []
        claim, states = found
        config, out = await self.index.config(), []
        for i, handle in enumerate(claim.rows):
            row = claim.part([i])
            names = self.schema.names(int(states["columns"][i]))
            values = await self.fetch(row, names)
            done = [stage["name"] for stage in config["stages"] if int(states["done"][i]) & stage["bit"]]
            columns = {name: v if isinstance(v := values[name][0], str) else v.tolist() for name in names}
            out.append({**handle._asdict(), "state": STATES[states["state"][i]], "done": done, "columns": columns})
        return out

    # ── warehouses ──

    async def drain(self) -> int:
        """Move all that lies on this node's warehouse to the others, and take it out of the run. Returns the bytes moved.
        Rows that are leased meanwhile are delivered again if their reader came too late."""
        home, moved = self._home or await self._enter(), 0
        await self.flush()
        while True:
            left = await self.index.leave_warehouse(home.number)
            await self._enter()
            if not left.closed and not left.open:
                break
            pairs = []
            for block, offset, nbytes in left.closed:
                room = await self._allocate(nbytes, 0)
                data = self._arena(home).slice(offset, nbytes)
                if room.home.node == self.node:
                    self._arena(room.home).slice(room.offset, nbytes)[:] = data
                else:
                    await self._remote(room.home).copy_in(room.offset, data)
                pairs.append((block, room.block))
                moved += nbytes
            if pairs:
                await self.index.move_blocks(self.worker, home.number, pairs)
            else:
                await self.index.wait("room", left.wait, 5.0)  # others still write there, and will stop
        await self.index.lose_warehouse(home.number)
        return moved

    def _arena(self, warehouse: WarehouseRecord) -> Arena:
        if warehouse.number not in self._arenas:
            self._arenas[warehouse.number] = Arena(warehouse.path)
        return self._arenas[warehouse.number]

    def _remote(self, warehouse: WarehouseRecord) -> RemoteWarehouse:
        address = (warehouse.host, warehouse.port)
        if not warehouse.port:
            raise ConnectionError(
                f"warehouse {warehouse.name!r} lies on node {warehouse.node!r} and serves nobody; start its server"
            )
        if address not in self._remotes:
            self._remotes[address] = RemoteWarehouse(
                *address,
                self.schema,
                secret=self._secret,
                timeout=self._wire_timeout,
                ssl=self._tls[1] if self._tls else None,
            )
        return self._remotes[address]
