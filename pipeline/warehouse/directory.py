"""The warehouses of a run as one worker knows them: which to write to, which are mapped here, which
are reached by wire.

read / write ─▶ on this node:  the arena, mapped
             └▶ on another:    a client of its server ─ unreachable ─▶ the index decides: alive, moved, or lost
"""

from __future__ import annotations

import asyncio
import platform
import ssl
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import structlog

from pipeline.data.arena import Arena, StaleHandle, WarehouseUnreachable
from pipeline.data.blocks import BlockReader, PackedRows
from pipeline.data.columns import ColumnError, Packed, Schema
from pipeline.documents.flow import SCHEMA
from pipeline.first_of import cancel_all
from pipeline.index.client import Index
from pipeline.index.errors import BlockLost, WarehouseGone
from pipeline.index.warehouses import Lost, WarehouseRecord
from pipeline.node import AUTO, announced, node_id

if TYPE_CHECKING:
    from pipeline.warehouse.client import RemoteWarehouse
    from pipeline.warehouse.server import WarehouseServer

log = structlog.get_logger()

HEARTBEAT_SECONDS = 2.0  # between the heartbeats of a served warehouse
SILENT_SECONDS = 10.0  # without a heartbeat, a warehouse that cannot be reached is taken for lost
# of a place in REF: the offset in the arena; the bits above are the warehouse's number
OFFSET_BITS = 48


class WarehouseDirectory:
    """Finds, maps and serves the warehouses of a run.

    ``name`` is the warehouse that this worker writes to; ``node``: see
    :class:`~pipeline.warehouse.dock.Dock`.
    """

    def __init__(
        self,
        index: Index,
        schema: Schema,
        *,
        name: str,
        node: str | None,
        secret: bytes,
        tls: tuple[ssl.SSLContext, ssl.SSLContext] | None,
        wire_timeout: float,
    ) -> None:
        self._index = index
        self._schema = schema
        self._name = name
        self.node = node
        self._secret = secret
        self._tls = tls
        self._wire_timeout = wire_timeout
        self.records: dict[int, WarehouseRecord] = {}
        self.known_home: WarehouseRecord | None = None
        # column → which of a claim's ``refs`` say where it lies
        self.producers: dict[str, int] = {}
        self._near: dict[int, bool] = {}  # which warehouses are on this node
        self._arenas: dict[int, tuple[Arena, BlockReader]] = {}
        self._remotes: dict[tuple[str, int], RemoteWarehouse] = {}  # by address
        self.server: WarehouseServer | None = None
        self._heartbeat: asyncio.Task[None] | None = None

    async def refresh(self) -> None:
        """Read the run's warehouses from the index, and choose the one to write to; the first time
        also its stages."""
        if not self.producers:
            stages = (await self._index.config())["stages"]
            for bit, column in enumerate(self._schema.columns):
                makers = (
                    s["producer"] for s in stages if s["producer"] > 0 and s["makes"] >> bit & 1
                )
                self.producers[column.name] = next(makers, 0)
        self.records = {record.number: record for record in await self._index.warehouses()}
        for number in [number for number in self._arenas if number not in self.records]:
            del self._arenas[number]
        staying = [record for record in self.records.values() if not record.leaving]
        home = next((record for record in staying if record.name == self._name), None)
        # it left the run: any other, near ones first
        if home is None and staying and self.known_home is not None:
            home = min(staying, key=lambda record: (not self.is_near(record), record.number))
        if self.known_home != home:  # an equal record stays the same object, as slabs compare
            self.known_home = home

    async def enter(self) -> WarehouseRecord:
        """Refresh, and return the warehouse to write to.

        Raises WarehouseGone when the run has none under this name.
        """
        await self.refresh()
        if self.known_home is None:
            staying = [record.name for record in self.records.values() if not record.leaving]
            raise WarehouseGone(
                f"warehouse {self._name!r} is not in run {self._index.run!r}, which has {staying}; "
                f"join() it first, or name "
                "one of these"
            )
        return self.known_home

    async def home(self) -> WarehouseRecord:
        """The warehouse to write to."""
        return self.known_home or await self.enter()

    async def producer(self, column: str) -> int:
        """Which of a claim's ``refs`` say where ``column`` lies; 0 is the admission."""
        if not self.producers:
            await self.refresh()
        return self.producers[column]

    async def join(self, folder: Path, nbytes: int) -> None:
        """Create this worker's warehouse in ``folder`` with ``nbytes`` bytes, or map it when it is
        there."""
        await self._agree_on_schema()
        path = (folder / f"arena-{self._name}").resolve()
        Arena.create(path, nbytes)
        node: str = self.node or node_id(path.parent)
        await self._index.join_warehouse(self._name, node, path, nbytes)
        await self.enter()

    async def _agree_on_schema(self) -> None:
        """All workers of a run have one schema, or the longer of two that begin alike."""
        own = self._schema.columns
        known = (await SCHEMA.put_once(self._index, self._schema)).columns
        if own[: len(known)] != known[: len(own)]:
            names = [[column.name for column in columns] for columns in (known, own)]
            raise ColumnError(
                "",
                f"run {self._index.run!r} has columns {names[0]}, this worker {names[1]}",
                "give the same",
                subject="schema",
            )
        if len(own) > len(known):
            await SCHEMA.put(self._index, self._schema)

    # ── bytes ──

    def is_near(self, record: WarehouseRecord) -> bool:
        """Whether a warehouse is on this node, so that its arena can be mapped."""
        if record.number not in self._near:
            self._near[record.number] = record.is_near(self.node)
        return self._near[record.number]

    def _mapped(self, record: WarehouseRecord) -> tuple[Arena, BlockReader]:
        if record.number not in self._arenas:
            arena = Arena(record.path)
            self._arenas[record.number] = (
                arena,
                BlockReader(arena.slice(0, arena.nbytes), self._schema),
            )
        return self._arenas[record.number]

    def arena(self, record: WarehouseRecord) -> Arena:
        """The arena of a warehouse on this node."""
        return self._mapped(record)[0]

    def _remote(self, record: WarehouseRecord) -> RemoteWarehouse:
        address = (record.host, record.port)
        if not record.port:
            raise ConnectionError(
                f"warehouse {record.name!r} lies on node {record.node!r}, which does not serve it; "
                f"start its server"
            )
        if address not in self._remotes:
            from pipeline.warehouse.client import RemoteWarehouse

            context = self._tls[1] if self._tls else None
            self._remotes[address] = RemoteWarehouse(
                *address, self._schema, secret=self._secret, timeout=self._wire_timeout, ssl=context
            )
        return self._remotes[address]

    async def write(
        self, record: WarehouseRecord, offset: int, block: int, rows: PackedRows
    ) -> None:
        """Write ``rows`` as ``block`` at ``offset`` of a warehouse.

        Raises BlockLost when it is gone: write them again.
        """
        if self.is_near(record):
            rows.write_into(self.arena(record).slice(offset, rows.nbytes), block)
            return
        if not record.port:  # it may be served by now
            await self.refresh()
            record = self.records.get(record.number, record)
        try:
            await self._remote(record).write(offset, block, rows)
        except WarehouseUnreachable as silent:
            await self._suspect(record, silent)
            raise BlockLost(
                f"warehouse {record.name!r} is gone; the rows are written again"
            ) from silent

    async def copy(
        self, source: WarehouseRecord, offset: int, nbytes: int, target: WarehouseRecord, to: int
    ) -> None:
        """Copy raw bytes from a warehouse on this node to byte ``to`` of ``target``."""
        data = self.arena(source).slice(offset, nbytes)
        if self.is_near(target):
            self.arena(target).slice(to, nbytes)[:] = data
        else:
            await self._remote(target).copy_in(to, data)

    async def read(self, number: int, refs: np.ndarray, names: list[str]) -> dict[str, Packed]:
        """The columns ``names`` of the rows ``refs`` (REF [B]), which all lie on warehouse
        ``number``."""
        record = self.records.get(number)
        # it may have joined, or be served, by now
        if record is None or (not self.is_near(record) and not record.port):
            await self.refresh()
            record = self.records.get(number)
        if record is None:
            raise StaleHandle(
                f"warehouse {number} has left the run, and these rows with it; claim again"
            )
        offsets = (refs["place"] & (1 << OFFSET_BITS) - 1).astype(np.int64)
        blocks = refs["block"].astype(np.int64)
        slots = refs["slot"].astype(np.int64)
        if self.is_near(record):
            return self._mapped(record)[1].read(blocks, offsets, slots, names)
        while number in self.records:
            record = self.records[number]
            try:
                return await self._remote(record).read(blocks, offsets, slots, names)
            except WarehouseUnreachable as silent:
                await self._suspect(record, silent)
        raise StaleHandle(
            f"warehouse {record.name!r} on node {record.node!r} is gone; its samples are made again"
        )

    async def _suspect(self, record: WarehouseRecord, silent: WarehouseUnreachable) -> None:
        """Returns when the warehouse is out of the run, or back at another address.

        Raises WarehouseUnreachable when it is alive and only cannot be reached from here: it has
        sent a heartbeat since. The last one of a lost node may be young when its first reader
        fails, so no reader fails before that is known.
        """
        age = 0.0
        while True:
            await self.refresh()
            if (now := self.records.get(record.number)) is not None and now != record:
                return
            verdict = await self._index.suspect_warehouse(record.number, SILENT_SECONDS)
            if not isinstance(verdict, float):
                break
            if verdict < age:
                raise WarehouseUnreachable(
                    f"warehouse {record.name!r} on node {record.node!r} is alive, but cannot be "
                    f"reached from node {self.node or platform.node()!r} ({silent}); check the "
                    f"network between them"
                ) from silent
            age = verdict
            await asyncio.sleep(HEARTBEAT_SECONDS / 4)
        if isinstance(verdict, Lost):
            log.warning(
                "warehouse lost",
                warehouse=record.name,
                groups_made_again=verdict.groups,
                rows=verdict.rows,
            )
        await self.refresh()

    # ── serving ──

    async def serve(
        self, host: str, port: int = 0, *, advertise: str | None = None
    ) -> tuple[str, int]:
        """Serve this node's warehouse to other nodes at ``host``, announced as ``advertise``
        (default: see :func:`pipeline.node.announced`; `auto` listens on that address alone).
        Returns the address. Raises ValueError where others cannot reach it."""
        from pipeline.warehouse.server import WarehouseServer

        home = await self.home()
        name = advertise
        if name is None:
            name = await asyncio.to_thread(announced, host, *await self._index.reach())
        host = name if host == AUTO else host
        await self._stop_serving()  # a former server's heartbeat would announce its old address
        context = self._tls[0] if self._tls else None
        self.server = WarehouseServer(
            self.arena(home), self._schema, secret=self._secret, host=host, port=port, ssl=context
        )
        _, port = await self.server.start()
        await self._index.announce_warehouse(home.number, name, port)
        self._heartbeat = asyncio.create_task(self._beat(home.number, name, port))
        await self.enter()
        return name, port

    async def _beat(self, number: int, host: str, port: int) -> None:
        """Announce the address again and again, until the warehouse is out of the run."""
        try:
            while True:
                await asyncio.sleep(HEARTBEAT_SECONDS)
                await self._index.announce_warehouse(number, host, port)
        except WarehouseGone:
            log.warning("this node's warehouse is out of the run", warehouse=self._name)

    async def _stop_serving(self) -> None:
        await cancel_all(self._heartbeat)
        if self.server is not None:
            await self.server.close()
        self._heartbeat = self.server = None

    async def close(self) -> None:
        """Stop the server and close the connections to other nodes."""
        await self._stop_serving()
        for remote in self._remotes.values():
            await remote.close()
        self._remotes.clear()
