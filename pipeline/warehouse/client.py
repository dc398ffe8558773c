"""The client of a warehouse on another node: its connections, their handshake and retries, and the
memory it reads into."""

from __future__ import annotations

import asyncio
import socket
import ssl as tls
import struct
import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

import numpy as np
import torch
from aiohappyeyeballs import start_connection

from pipeline.data.arena import StaleHandle, WarehouseUnreachable
from pipeline.data.blocks import PackedRows
from pipeline.data.columns import Column, Packed, Schema
from pipeline.warehouse.requests import (
    COPY,
    MAX_MESSAGE,
    OK,
    READ,
    REFUSED,
    SERVICE,
    STALE,
    WELCOME,
    WRITE,
    Limits,
    check_range,
    read_head,
    schema_digest,
)
from pipeline.wire.frames import HEAD, Most, TransferError, parse_head
from pipeline.wire.handshake import ClientHandshake, HungUp, ProofRefused, check_secret
from pipeline.wire.stream import Stream

T = TypeVar("T")

_KEPT = 64 << 20
_REUSED = 1 << 16  # bytes: the allocator keeps the pages of smaller buffers itself
_MESSAGE = Most(control=MAX_MESSAGE)
_DONE = {OK: Most(), REFUSED: _MESSAGE, STALE: _MESSAGE}  # what is taken of an answer to a write


class _Connection:
    """One authenticated connection.

    ``in_step`` is False while a request is under way: then it must not be used again.
    """

    def __init__(self, stream: Stream, clock: float, rows: int, nbytes: int, room: int) -> None:
        self.stream = stream
        self.rows = rows
        self.nbytes = nbytes
        self.room = room
        self._clock = clock
        self._at = asyncio.get_running_loop().time()
        self.in_step = True

    def servers_clock(self, when: float) -> float:
        """``when`` on the server's clock, or earlier by the time that its welcome was under way."""
        return self._clock + when - self._at

    async def request(
        self,
        kind: int,
        control: bytes,
        payload: memoryview | None = None,
        most: Mapping[int, Most] = _DONE,
    ) -> tuple[bytes, int]:
        """Send a request; returns control and bytes of payload of the reply, ``most`` of each.

        The caller takes the payload, then sets ``in_step``.
        """
        self.in_step = False
        head = HEAD.pack(kind, len(control), 0 if payload is None else len(payload)) + control
        await (self.stream.send(head) if payload is None else self.stream.send(head, payload))
        reply = parse_head(await self.stream.receive(HEAD.size), most)
        answer = await self.stream.receive(reply.control)
        if reply.kind == OK:
            return bytes(answer), reply.payload
        message = answer.decode(errors="replace")
        self.in_step = payload is None
        raise (StaleHandle if reply.kind == STALE else TransferError)(message)


class _Memory:
    """Memory to receive into.

    What readers release is used again, up to ``_KEPT`` bytes of it: the kernel needs as long to
    clear a new page as to fill it.
    """

    def __init__(self) -> None:
        self._free = list[np.ndarray]()

    @property
    def kept(self) -> int:
        return sum(memory.nbytes for memory in self._free)

    def take(self, nbytes: int, dtype: torch.dtype) -> tuple[torch.Tensor, memoryview]:
        """A flat tensor of ``nbytes`` bytes, and the bytes.

        The memory comes back when nothing refers to it any more.
        """
        if nbytes < _REUSED:
            tensor = torch.empty(nbytes // dtype.itemsize, dtype=dtype)
            return tensor, tensor.view(torch.uint8).numpy().data
        fits = [i for i, memory in enumerate(self._free) if nbytes <= memory.nbytes <= 2 * nbytes]
        memory = self._free.pop(fits[0]) if fits else np.empty(nbytes, np.uint8)
        part = memory[:nbytes]  # a new object, which lives as long as the tensor's storage
        weakref.finalize(part, self._give, memory).atexit = False
        return torch.from_numpy(part).view(dtype), part.data

    def _give(self, memory: np.ndarray) -> None:
        if self.kept + memory.nbytes <= _KEPT:
            self._free.append(memory)


class RemoteWarehouse:
    """A warehouse on another node.

    Connects at the first call; calls may run at the same time, ``connections`` of them.

    Each call ends within ``timeout`` seconds, reconnections included, or raises
    :class:`WarehouseUnreachable`. Raises :class:`TransferError` for what no repetition mends,
    :class:`StaleHandle` for released blocks.
    """

    def __init__(
        self,
        host: str,
        port: int,
        schema: Schema,
        *,
        secret: bytes,
        timeout: float,
        ssl: tls.SSLContext | None = None,
        connections: int = 4,
        limits: Limits | None = None,
    ) -> None:
        self._address = (host, port)
        self._schema = schema
        self._secret = check_secret(secret)
        self._ssl = ssl
        self._timeout = timeout
        self._limits = limits or Limits()
        self._idle = list[_Connection]()
        self._memory = _Memory()
        self._turns = asyncio.Semaphore(connections)
        self._closed = False

    async def read(
        self, blocks: np.ndarray, offsets: np.ndarray, slots: np.ndarray, names: Sequence[str]
    ) -> dict[str, Packed]:
        """The columns ``names`` of rows [n] in the order asked, as :meth:`BlockReader.read` gives
        them on their node."""
        mask = self._schema.mask(names)
        asked = [self._schema[name] for name in self._schema.names(mask)]
        rows = len(slots)
        for name, array in (("blocks", blocks), ("offsets", offsets), ("slots", slots)):
            if array.dtype != np.int64 or array.shape != (rows,):
                raise TransferError(
                    f"read: {name} is {array.dtype} {list(array.shape)}, must be int64 [{rows}]"
                )
        if not rows or not asked:
            return {name: self._schema[name].empty() for name in names}
        control = (
            read_head(self._schema).pack(mask, rows) + np.stack([blocks, offsets, slots]).tobytes()
        )
        most = {**_DONE, OK: Most(8 * len(asked), self._limits.nbytes)}

        async def work(connection: _Connection, deadline: float) -> dict[str, Packed]:
            if rows > connection.rows:
                raise TransferError(
                    f"read: {rows} rows, the warehouse takes {connection.rows}; "
                    f"ask for them in parts"
                )
            reply, payload = await connection.request(READ, control, most=most)
            found, memories = self._buffers(asked, rows, reply, payload)
            await connection.stream.receive_into(*memories)
            for name, packed in found.items():
                if packed.offsets is not None:
                    edges = packed.offsets.numpy()
                    if (
                        edges[0] != 0
                        or edges[-1] != len(packed.values)
                        or (edges[1:] < edges[:-1]).any()
                    ):
                        raise TransferError(
                            f"reply: offsets of column {name!r} do not divide its values into rows"
                        )
            connection.in_step = True
            return found

        found = await self._call("read", work)
        return {name: found[name] for name in names}

    def _buffers(
        self, asked: Sequence[Column], rows: int, reply: bytes, payload: int
    ) -> tuple[dict[str, Packed], list[memoryview]]:
        """Columns to receive, and their memory in the order of the wire, by the sizes that a
        checked ``reply`` says."""
        if len(reply) != 8 * len(asked):
            raise TransferError(f"reply: {len(reply)} bytes of sizes, must be {8 * len(asked)}")
        sizes = struct.unpack(f"<{len(asked)}Q", reply)
        ragged = sum(column.shape is None for column in asked)
        if payload != sum(sizes) + ragged * 8 * (rows + 1):
            raise TransferError(f"reply: payload is {payload} bytes for columns of {sizes}")
        found = dict[str, Packed]()
        memories = list[memoryview]()
        for column, size in zip(asked, sizes, strict=True):
            if size % column.itemsize or (column.shape is not None and size != rows * column.width):
                raise TransferError(
                    f"reply: column {column.name!r} has {size} bytes for {rows} rows"
                )
            bounds = None
            if column.shape is None:
                bounds = np.empty(rows + 1, np.int64)
                memories.append(bounds.data.cast("B"))
            values, memory = self._memory.take(size, column.stored)
            memories.append(memory)
            found[column.name] = Packed(
                values, None if bounds is None else torch.from_numpy(bounds)
            )
        return found, memories

    async def write(self, offset: int, block: int, rows: PackedRows) -> None:
        """Write ``rows`` as ``block`` at ``offset``, which the index gave us.

        When it raises :class:`WarehouseUnreachable` no byte lands there any more; when it is
        cancelled, bytes may land until ``timeout`` would have passed.
        """
        whole = np.empty(rows.nbytes, np.uint8)
        rows.write_into(whole.data, block)
        edge = 32 + 32 * int(whole[24:32].view(np.int64)[0])
        await self._put(
            "write", WRITE, (offset, block, rows.nbytes), whole[:edge].tobytes(), whole[edge:].data
        )

    async def copy_in(self, offset: int, data: memoryview) -> None:
        """Put raw bytes at ``offset``, a multiple of 8. Ends as :meth:`write` does."""
        data = data.cast("B")
        if len(data):
            await self._put("copy", COPY, (offset, len(data)), b"", data)

    async def _put(
        self, request: str, kind: int, numbers: tuple[int, ...], header: bytes, payload: memoryview
    ) -> None:
        async def work(connection: _Connection, deadline: float) -> None:
            check_range(request, numbers[0], numbers[-1], connection.room, self._limits)
            if len(payload) > connection.nbytes:
                raise TransferError(
                    f"{request}: {len(payload)} bytes, the warehouse takes {connection.nbytes} at "
                    f"a time; send fewer"
                )
            expires = struct.pack("<d", connection.servers_clock(deadline))
            await connection.request(
                kind, struct.pack(f"<{len(numbers)}q", *numbers) + expires + header, payload
            )
            connection.in_step = True

        await self._call(request, work)

    async def close(self) -> None:
        """Close the connections; those in use close when their call ends."""
        self._closed = True
        while self._idle:
            self._idle.pop().stream.close()

    async def _call(self, request: str, work: Callable[[_Connection, float], Awaitable[T]]) -> T:
        """``work`` on a connection, again on a new one when it is lost: all requests may be
        repeated."""
        deadline = asyncio.get_running_loop().time() + self._timeout
        pause = 0.02
        denied = 0
        lost = "no connection was free"
        try:
            async with asyncio.timeout_at(deadline), self._turns:
                while True:
                    if self._closed:
                        raise TransferError(
                            f"{request}: this RemoteWarehouse was closed; make another"
                        )
                    used = bool(self._idle)
                    lost = "it did not answer"
                    try:
                        connection = self._idle.pop() if used else await self._connect()
                        denied = 0
                        try:
                            return await work(connection, deadline)
                        finally:
                            if connection.in_step and not self._closed:
                                self._idle.append(connection)
                            else:
                                connection.stream.close()
                    except HungUp as error:
                        denied += 1
                        if denied > 1:
                            raise TransferError(str(error)) from None
                    except OSError as error:
                        lost = f"{type(error).__name__}: {error}"
                        if used:
                            continue  # the server may have closed it long ago, for idleness
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, 1.0)
        except TimeoutError:
            raise WarehouseUnreachable(
                f"{request}: warehouse {self._address} was not reached within {self._timeout:g} s "
                f"({lost}); "
                "see that its server runs there, with TLS on both ends or on none, or give a "
                "longer timeout"
            ) from None

    async def _connect(self) -> _Connection:
        found = await asyncio.get_running_loop().getaddrinfo(
            *self._address, type=socket.SOCK_STREAM
        )
        stream = Stream(await start_connection(found))
        try:
            await stream.start_tls(self._ssl, self._address[0])
            return await self._greet(stream)
        except BaseException as error:
            stream.close()
            if isinstance(error, tls.SSLError) and not isinstance(
                error, tls.SSLEOFError | tls.SSLZeroReturnError
            ):
                raise TransferError(
                    f"warehouse {self._address}: no TLS with it ({error}); check that it serves "
                    f"TLS, and that the "
                    "client's context trusts its certificate under this name"
                ) from None
            raise

    async def _greet(self, stream: Stream) -> _Connection:
        handshake = ClientHandshake(
            self._secret, SERVICE, f"warehouse {self._address}", WELCOME.size
        )
        try:
            welcome = await stream.greet_server(handshake)
        except HungUp:
            raise
        except ProofRefused as error:
            raise TransferError(str(error)) from None
        clock, rows, nbytes, room, schema = WELCOME.unpack(welcome)
        if schema != schema_digest(self._schema):
            raise TransferError(
                f"warehouse {self._address}: has another schema; give both ends the same columns "
                f"in the same order"
            )
        return _Connection(stream, clock, rows, nbytes, room)
