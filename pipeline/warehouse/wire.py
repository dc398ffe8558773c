"""The wire between nodes: a warehouse's arena, served to workers elsewhere.

    RemoteWarehouse                                 WarehouseServer
      connect ────────────────────────────────────▶ accept             (at most ``limits.connections``)
              ◀── hello: version, nonce ───────────
      proof: version, nonce, HMAC(secret, all) ───▶ compare, else drop
              ◀── welcome: clock, limits, HMAC ────
      request: head │ control │ payload ──────────▶ head ─▶ control ─▶ arena    (a read plans, a write is checked first)
              ◀── reply: head │ control │ payload ─ slices of the arena
      └── the next request on this connection ───▶ waits ``limits.idle_seconds`` for it, then closes

One request is in flight on a connection; a client keeps a few. A head is 16 bytes: kind or status, bytes of control, bytes
of payload. Control is fixed binary fields and int64 arrays, never a pickle. A read's payload is, column by column in the
schema's order, int64 [n + 1] offsets (ragged and text) and the packed values: the server sends them from the arena where
they lie and the client receives them where they stay, so one column costs one buffer whatever its rows.

Every wait has a deadline. Both ends prove that they know the secret before anything else is parsed; whoever could read or
change the packets in between must be kept out by TLS. A refused request changes nothing in the arena.

A write is safe to repeat: a block that is there already is acknowledged and left alone. Before each piece of a write is
taken its client's deadline is checked on the server's clock, so that no late byte falls into room that the client gave back.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import math
import os
import socket
import ssl as tls
import struct
import time
import weakref
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np
import structlog
import torch

from pipeline.columns import _MAGIC, MAX_COLUMNS, Column, Packed, PackedRows, Schema
from pipeline.warehouse.arena import Arena, StaleHandle

log = structlog.get_logger()
T = TypeVar("T")

VERSION = 1
_HELLO = struct.Struct("<4sHxx32s")  # magic, version, nonce
_PROOF = struct.Struct("<4sHxx32s32s")  # magic, version, nonce, proof
_WELCOME = struct.Struct("<dQQQ32s32s")  # server's clock, rows and bytes of a frame, arena's bytes, schema, proof
_HEAD = struct.Struct("<B3xIQ")  # kind or status, bytes of control, bytes of payload
_WIRE = b"ADKW"
_READ, _WRITE, _COPY_OUT, _COPY_IN = 1, 2, 3, 4
_OK, _REFUSED, _STALE = 0, 1, 2
_MAX_MESSAGE = 4096
_MIN_SECRET = 16
_SLICES = 400  # buffers after which a batch is sent; it may have twice as many then, and sendmsg takes 1024 on Linux
_PIECE = 1 << 20  # bytes gathered at a time, and received before other tasks get a turn
_TLS_PIECE = 1 << 18
_KEPT = 64 << 20
_REUSED = 1 << 16  # bytes: smaller buffers come from pages that the allocator has anyway
_WAKE = 1 << 20  # bytes that a receiver of many lets gather before it is woken
# Measured: copying a word costs 10 to 20 ns, a slice of the arena (made, sent and accounted for) 300 to 400 ns. So runs of
# at least so many words on average are sent from where they lie, shorter ones are copied together.
_SLICED = 32


class TransferError(RuntimeError):
    """A frame was refused, or the other end is not what it should be. The message names field, value and fix."""


class WarehouseUnreachable(ConnectionError):
    """A warehouse did not answer within the deadline, reconnections included."""


@dataclass(frozen=True)
class Limits:
    """What one end takes from the other. A frame that would need more is refused before anything is allocated for it."""

    rows: int = 1 << 18  # of one read or one block
    nbytes: int = 4 << 30  # of one payload
    connections: int = 64  # of peers that have proven the secret
    handshakes: int = 64  # connections that have not; one more ends the oldest of them
    hello_seconds: float = 5.0  # for all of the handshake
    idle_seconds: float = 300.0  # between two requests
    frame_seconds: float = 30.0  # for a frame, and on top of it
    slowest: float = 1 << 20  # bytes a second, at least, of a payload

    @property
    def control(self) -> int:
        """Bytes of the largest control part: three int64 for each row of a read."""
        return 1024 + 24 * self.rows

    def seconds(self, nbytes: int) -> float:
        return self.frame_seconds + nbytes / self.slowest


@dataclass(frozen=True)
class ReadRequest:
    """Rows [n] by block, block's byte offset in the arena, and slot; the columns are the bits of ``mask``."""

    mask: int
    blocks: np.ndarray
    offsets: np.ndarray
    slots: np.ndarray


@dataclass(frozen=True)
class WriteRequest:
    """A block's header and where the block goes; its other ``payload`` bytes follow, until ``expires``, server's clock."""

    offset: int
    block: int
    nbytes: int
    expires: float
    header: np.ndarray

    @property
    def payload(self) -> int:
        return self.nbytes - self.header.nbytes


@dataclass(frozen=True)
class CopyRequest:
    """Raw bytes out of the arena, or into it when ``expires`` is a time."""

    offset: int
    nbytes: int
    expires: float | None


Request = ReadRequest | WriteRequest | CopyRequest


def schema_digest(schema: Schema) -> bytes:
    """What both ends must agree on: names, kinds and order of the columns."""
    return hashlib.sha256(repr([(c.name, c.describe()) for c in schema.columns]).encode()).digest()


# ── frames: checked numbers out of bytes; nothing here touches an arena or a socket ──


def parse_head(head: bytes | bytearray | memoryview, limits: Limits) -> tuple[int, int, int]:
    """Kind, bytes of control and bytes of payload of a request. Raises :class:`TransferError`."""
    kind, control, payload = _HEAD.unpack(head)
    if not _READ <= kind <= _COPY_IN or head[1:4] != b"\0\0\0":
        raise TransferError(f"frame: kind {bytes(head[:4]).hex()} is not known; both ends must run the same version")
    if control > limits.control:
        raise TransferError(
            f"frame: {control} bytes of control, at most {limits.control} are taken; ask for fewer rows"
        )
    if payload > limits.nbytes:
        raise TransferError(
            f"frame: {payload} bytes of payload, at most {limits.nbytes} are taken; send less at a time"
        )
    return kind, control, payload


def parse_request(
    kind: int, control: bytes | bytearray | memoryview, payload: int, schema: Schema, room: int, limits: Limits
) -> Request:
    """A request for an arena of ``room`` bytes. Raises :class:`TransferError`, which names what is wrong."""
    if kind == _READ:
        return _parse_read(control, payload, schema, limits)
    if kind == _WRITE:
        return _parse_write(control, payload, schema, room, limits)
    if len(control) != 24:
        raise TransferError(f"copy: control is {len(control)} bytes, must be 24")
    offset, nbytes, expires = struct.unpack("<qqd", control)
    _check_range("copy", offset, nbytes, room, limits)
    if payload != (nbytes if kind == _COPY_IN else 0):
        raise TransferError(f"copy: payload is {payload} bytes, {nbytes} were told; send them, or none to copy out")
    return CopyRequest(offset, nbytes, _expiry(expires) if kind == _COPY_IN else None)


def _parse_read(control: bytes | bytearray | memoryview, payload: int, schema: Schema, limits: Limits) -> ReadRequest:
    if payload:
        raise TransferError(f"read: payload is {payload} bytes; a read has none")
    head = _read_head(schema)
    if len(control) < head.size:
        raise TransferError(f"read: control is {len(control)} bytes; {head.size} tell columns and rows")
    mask, rows = head.unpack_from(control)
    if not 0 < mask < 1 << len(schema.columns):
        raise TransferError(
            f"read: column bits {mask:#x}, the schema has {len(schema.columns)} columns; name some of them"
        )
    if not 0 < rows <= limits.rows:
        raise TransferError(f"read: {rows} rows, must be 1 to {limits.rows}; ask for them in parts")
    if len(control) != head.size + 24 * rows:
        raise TransferError(f"read: control is {len(control)} bytes, must be {head.size + 24 * rows} for {rows} rows")
    blocks, offsets, slots = np.frombuffer(control, "<i8", 3 * rows, head.size).reshape(3, rows)
    return ReadRequest(mask, blocks, offsets, slots)


def _read_head(schema: Schema) -> struct.Struct:
    """Columns as bits, and rows; the partitions of a transfer queue have more columns than a run."""
    return struct.Struct("<II" if len(schema.columns) <= MAX_COLUMNS else "<QQ")


def _parse_write(
    control: bytes | bytearray | memoryview, payload: int, schema: Schema, room: int, limits: Limits
) -> WriteRequest:
    if not 32 + 64 <= len(control) <= 32 + 32 + 32 * len(schema.columns) or len(control) % 32:
        raise TransferError(f"write: control is {len(control)} bytes, must be 64 and 32 for each column")
    offset, block, nbytes, expires = struct.unpack_from("<qqqd", control)
    _check_range("write", offset, nbytes, room, limits)
    header = np.frombuffer(control, "<i8", offset=32)
    if payload != nbytes - header.nbytes:
        raise TransferError(f"write: payload is {payload} bytes, must be {nbytes - header.nbytes}: block less header")
    magic, found, rows, columns = header[:4].tolist()
    if magic != _MAGIC or found != block:
        raise TransferError(f"write: header is of block {found} ({magic:#x}), must be of {block}; send what was packed")
    if not 0 < rows <= limits.rows:
        raise TransferError(f"write: {rows} rows, must be 1 to {limits.rows}; write them in parts")
    if columns != len(header) // 4 - 1:
        raise TransferError(f"write: header tells {columns} columns and describes {len(header) // 4 - 1}")
    end, seen = header.nbytes, set()
    for bit, offsets_at, values_at, size in header[4:].reshape(-1, 4).tolist():
        if not 0 <= bit < len(schema.columns) or bit in seen:
            raise TransferError(f"write: column bit {bit} is not in the schema, or told twice")
        seen.add(bit)
        column = schema.columns[bit]
        places = [(values_at, size, column.itemsize)]
        if column.shape is None:
            places.insert(0, (offsets_at, 8 * (rows + 1), 8))
        elif offsets_at != -1 or size != rows * _width(column):
            raise TransferError(
                f"write: column {column.name!r} has {size} bytes, must be {rows} times {_width(column)} and no offsets"
            )
        for at, length, unit in places:
            if at < end or at % unit or length < 0 or length % unit or length > nbytes - at:
                raise TransferError(
                    f"write: column {column.name!r} lies at {at}, {length} bytes; sections follow one another inside the "
                    f"block's {nbytes}"
                )
            end = at + length
    return WriteRequest(offset, block, nbytes, _expiry(expires), header)


def _check_range(what: str, offset: int, nbytes: int, room: int, limits: Limits) -> None:
    if not 0 < nbytes <= limits.nbytes:
        raise TransferError(f"{what}: {nbytes} bytes, must be 1 to {limits.nbytes}; move them in parts")
    if offset < 0 or offset % 8 or nbytes > room - offset:
        raise TransferError(
            f"{what}: bytes {offset} to {offset + nbytes} must start at a multiple of 8 inside the arena's {room}; use the "
            "offset that the index gave"
        )


def _expiry(expires: float) -> float:
    if not math.isfinite(expires):
        raise TransferError(f"write: expires at {expires}, must be a time of the server's clock")
    return expires


def _width(column: Column) -> int:
    """Bytes of one row of a scalar or fixed column."""
    assert column.shape is not None
    return column.itemsize * math.prod(column.shape)


# ── reads: where the asked bytes lie ──


@dataclass(frozen=True)
class Runs:
    """Bytes of the arena to send one after the other: run i is ``lengths[i]`` bytes at ``starts[i]``, both int64."""

    starts: np.ndarray
    lengths: np.ndarray

    @property
    def nbytes(self) -> int:
        return int(self.lengths.sum())

    @property
    def unit(self) -> int:
        """Bytes of the largest words, 8 at most, that all runs consist of."""
        together = int(np.bitwise_or.reduce(self.starts | self.lengths)) | 8
        return together & -together


# For each asked column, in the schema's order: offsets int64 [n + 1] in elements (None for scalar and fixed) and its values.
Found = list[tuple[np.ndarray | None, Runs]]


class ArenaReader:
    """Finds rows in an arena, for a whole request at once; every number that it reads from the arena is checked."""

    def __init__(self, arena: Arena, schema: Schema) -> None:
        self._memory, self._schema = arena.slice(0, arena.nbytes), schema
        self._words = np.frombuffer(self._memory, np.int64, arena.nbytes // 8)
        self._bytes = np.frombuffer(self._memory, np.uint8)

    def plan(self, request: ReadRequest, limits: Limits) -> Found:
        """Where the asked rows lie. Raises :class:`StaleHandle` and :class:`TransferError`."""
        found = self._side_by_side(request) or self._scattered(request)
        nbytes = sum(runs.nbytes + (0 if offsets is None else offsets.nbytes) for offsets, runs in found)
        if nbytes > limits.nbytes:
            raise TransferError(
                f"read: {nbytes} bytes, at most {limits.nbytes} are sent at a time; ask for the rows in parts"
            )
        return found

    def _side_by_side(self, request: ReadRequest) -> Found | None:
        """Rows that follow one another in one block, found with a few numbers. None when they do not, or when anything is
        wrong: the general case says what."""
        at, block, slot, count = int(request.offsets[0]), request.blocks[0], int(request.slots[0]), len(request.slots)
        memory, room = self._memory, len(self._memory) - at
        if at < 0 or at & 7 or room < 64 or (request.offsets != at).any() or (request.blocks != block).any():
            return None
        magic, found, rows, columns = struct.unpack_from("4q", memory, at)
        if magic != _MAGIC or found != block or not 0 <= slot <= rows - count or not 0 < 32 * columns <= room - 32:
            return None
        if (request.slots[1:] - request.slots[:-1] != 1).any():
            return None
        table = struct.unpack_from(f"{4 * columns}q", memory, at + 32)
        places = {table[i]: table[i + 1 : i + 4] for i in range(0, 4 * columns, 4)}
        out: Found = []
        for bit, column in _asked(self._schema, request.mask):
            offsets_at, values_at, nbytes = places.get(bit, (-1, -1, 0))
            if values_at < 32 or nbytes < 0 or values_at + nbytes > room:
                return None
            if column.shape is not None:
                width, bounds = _width(column), None
                if nbytes != rows * width:
                    return None
                begin, end = slot * width, (slot + count) * width
            else:
                if offsets_at < 32 or offsets_at & 7 or offsets_at + 8 * (rows + 1) > room:
                    return None
                first = (at + offsets_at) // 8 + slot
                bounds = self._words[first : first + count + 1]
                low, high = int(bounds[0]), int(bounds[-1])
                begin, end = low * column.itemsize, high * column.itemsize
                if not 0 <= begin <= end <= nbytes:
                    return None
                bounds = bounds - low if low else bounds
            out.append((bounds, Runs(np.array([at + values_at + begin]), np.array([end - begin]))))
        return out

    def _scattered(self, request: ReadRequest) -> Found:
        words, room = self._words, len(self._memory)
        at, block_of = np.unique(request.offsets, return_inverse=True)
        wrong = (at < 0) | (at > room - 64) | (at & 7 != 0)
        if wrong.any():
            raise TransferError(
                f"read: offset {at[wrong][0]} is not a block's in an arena of {room} bytes; use what the index gave"
            )
        head = at >> 3
        stamp = words[head[:, None] + np.arange(4)]
        stale = (stamp[:, 0] != _MAGIC)[block_of] | (stamp[:, 1][block_of] != request.blocks)
        if stale.any():
            raise StaleHandle(
                f"block {request.blocks[stale][0]} was released: its bytes now hold something else; "
                "fetch rows you still hold"
            )
        rows, columns = stamp[:, 2], stamp[:, 3]
        widest = int(columns.max())
        if rows.min() < 1 or rows.max() > room or columns.min() < 1 or widest > len(self._schema.columns):
            raise TransferError(
                f"read: a block header tells {rows.max()} rows of {widest} columns; the arena is damaged"
            )
        beyond = (request.slots < 0) | (request.slots >= rows[block_of])
        if beyond.any():
            row = int(np.flatnonzero(beyond)[0])
            raise TransferError(
                f"read: slot {request.slots[row]} of block {request.blocks[row]}, which has {rows[block_of[row]]} rows; "
                "use the slots that the index gave"
            )
        if (at > room - 32 - 32 * columns).any():
            raise TransferError("read: a block header reaches beyond the arena; the arena is damaged")
        cells = head[:, None] + 4 + np.arange(4 * widest)
        table = words[np.minimum(cells, len(words) - 1)].reshape(-1, widest, 4)
        told = np.arange(widest) < columns[:, None]
        out: Found = []
        for bit, column in _asked(self._schema, request.mask):
            here = told & (table[:, :, 0] == bit)
            if not here.any(1).all():
                row = int(np.flatnonzero(~here.any(1)[block_of])[0])
                raise TransferError(
                    f"read: column {column.name!r} is not in block {request.blocks[row]}; ask that row of the block that "
                    "has it"
                )
            place = table[np.arange(len(at)), here.argmax(1), 1:]
            out.append(self._column(column, at, place, rows, block_of, request.slots))
        return out

    def _column(
        self,
        column: Column,
        at: np.ndarray,
        place: np.ndarray,
        rows: np.ndarray,
        block_of: np.ndarray,
        slots: np.ndarray,
    ) -> tuple[np.ndarray | None, Runs]:
        """Of blocks at ``at`` with ``rows`` rows, whose headers tell ``place`` [blocks, 3], row i is ``slots[i]`` of block
        ``block_of[i]``."""
        room, size = len(self._memory) - at, column.itemsize
        offsets_at, values_at, nbytes = place[:, 0], place[:, 1], place[:, 2]
        bad = (values_at < 32) | (values_at > room)
        bad |= (nbytes < 0) | (nbytes > room - np.where(bad, 0, values_at))
        if column.shape is None:
            bad |= (offsets_at < 32) | (offsets_at & 7 != 0) | (offsets_at > room - 8 * (rows + 1))
        else:
            bad |= nbytes != rows * _width(column)
        if bad.any():
            raise TransferError(f"read: column {column.name!r} of a block reaches beyond it; the arena is damaged")
        base = (at + values_at)[block_of]
        if column.shape is not None:
            width = _width(column)
            return None, _joined(base + slots * width, np.full(len(slots), width))
        index = ((at + offsets_at) >> 3)[block_of] + slots
        begins, ends = self._words[index], self._words[index + 1]
        if ((begins < 0) | (begins > ends) | (ends > (nbytes // size)[block_of])).any():
            raise TransferError(f"read: offsets of column {column.name!r} are not in order; the arena is damaged")
        lengths = ends - begins
        offsets = np.zeros(len(lengths) + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        return offsets, _joined(base + begins * size, lengths * size)

    def batches(self, found: Found) -> Iterator[list[memoryview]]:
        """What :meth:`plan` found, offsets and values column by column, in lists for one call of sendmsg each. Long runs are
        slices of the arena, short ones copied together; only about ``_PIECE`` bytes of copies exist at a time."""
        batch, copied = list[memoryview](), 0
        for offsets, runs in found:
            if offsets is not None:
                batch.append(offsets.data.cast("B"))
            unit = runs.unit
            if runs.nbytes >= _SLICED * unit * len(runs.starts):
                starts, ends = runs.starts.tolist(), (runs.starts + runs.lengths).tolist()
                for i in range(0, len(starts), _SLICES):
                    batch += [
                        self._memory[a:b] for a, b in zip(starts[i : i + _SLICES], ends[i : i + _SLICES], strict=True)
                    ]
                    if len(batch) >= _SLICES:
                        yield batch
                        batch, copied = [], 0
                continue
            for piece in self._copies(runs, unit):
                batch.append(piece)
                copied += len(piece)
                if copied >= _PIECE or len(batch) >= _SLICES:
                    yield batch
                    batch, copied = [], 0
        yield batch

    def _copies(self, runs: Runs, unit: int) -> Iterator[memoryview]:
        """``runs`` in pieces of at most ``_PIECE`` bytes; a longer one among them as it lies."""
        elements = self._bytes[: len(self._bytes) // unit * unit].view(f"u{unit}")
        starts, lengths = runs.starts // unit, runs.lengths // unit
        ends, first, done = np.cumsum(lengths), 0, 0
        while first < len(ends):
            last = max(first + 1, int(np.searchsorted(ends, done + _PIECE // 8, "right")))
            if last == first + 1:
                yield self._memory[unit * int(starts[first]) : unit * int(starts[first] + lengths[first])]
            else:
                yield _gathered(elements, starts[first:last], lengths[first:last]).data.cast("B")
            first, done = last, int(ends[last - 1])


def _gathered(elements: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    ends = np.cumsum(lengths)
    if ends[-1] == len(starts):
        return elements[starts]
    index = np.repeat(starts - (ends - lengths), lengths)
    index += np.arange(ends[-1])
    return elements[index]


def _asked(schema: Schema, mask: int) -> list[tuple[int, Column]]:
    return [(bit, column) for bit, column in enumerate(schema.columns) if mask >> bit & 1]


def _joined(starts: np.ndarray, lengths: np.ndarray) -> Runs:
    """Runs that touch become one; empty ones go."""
    some = lengths > 0
    if not some.all():
        starts, lengths = starts[some], lengths[some]
    if len(starts) == 0:
        return Runs(starts, lengths)
    ends = starts + lengths
    begins = np.flatnonzero(np.concatenate([[True], starts[1:] != ends[:-1]]))
    if len(begins) == len(starts):
        return Runs(starts, lengths)
    last = np.concatenate([begins[1:] - 1, [len(starts) - 1]])
    return Runs(starts[begins], ends[last] - starts[begins])


# ── bytes over a socket ──


class _Stream:
    """A connected socket, plain or TLS, for one task at a time. Moves bytes between the socket and memory of its caller's;
    keeps none. Callers set the deadline."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock, self._loop = sock, asyncio.get_running_loop()
        self.sent = self.received = self._moved = 0
        self._woken_at = 1

    @classmethod
    async def open(cls, sock: socket.socket, ssl: tls.SSLContext | None, server: str | None) -> _Stream:
        """Over the connected ``sock``; ``server`` is the name to check its certificate against, None on its own side."""
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if ssl is None:
            return cls(sock)
        wrapped = ssl.wrap_socket(
            sock, server_side=server is None, do_handshake_on_connect=False, server_hostname=server
        )
        stream = cls(wrapped)
        try:
            await stream._until(wrapped.do_handshake)
        except BaseException:
            wrapped.close()
            raise
        return stream

    async def _until(self, step: Callable[[], T], *, sends: bool = False) -> T:
        """``step``, when the socket is ready for it. TLS may have to read in order to send, and says so."""
        while True:
            try:
                return step()
            except tls.SSLWantReadError:
                await self._ready(to_send=False)
            except tls.SSLWantWriteError:
                await self._ready(to_send=True)
            except BlockingIOError:
                await self._ready(to_send=sends)

    async def _ready(self, *, to_send: bool) -> None:
        loop, descriptor = self._loop, self._sock.fileno()
        add, remove = (loop.add_writer, loop.remove_writer) if to_send else (loop.add_reader, loop.remove_reader)
        ready = loop.create_future()
        add(descriptor, lambda: None if ready.done() else ready.set_result(None))
        try:
            await ready
        finally:
            remove(descriptor)

    async def receive_into(self, *memories: memoryview, check: Callable[[], None] | None = None) -> None:
        """Fill ``memories`` one after the other; ``check`` runs before each piece is taken. Raises ConnectionResetError at
        the stream's end."""
        pending = [memory for memory in memories if len(memory)]
        while pending:
            if check is not None:
                check()
            try:
                if len(pending) == 1 or isinstance(self._sock, tls.SSLSocket):
                    count = self._sock.recv_into(pending[0])
                else:
                    count = self._sock.recvmsg_into(pending[:_SLICES])[0]
            except (BlockingIOError, tls.SSLWantReadError):
                self._wake_at(min(sum(map(len, pending)), _WAKE))
                await self._ready(to_send=False)
                continue
            except tls.SSLWantWriteError:
                await self._ready(to_send=True)
                continue
            if count == 0:
                raise ConnectionResetError("the other end closed the connection")
            self.received += count
            _advance(pending, count)
            await self._give_turns(count)

    def _wake_at(self, nbytes: int) -> None:
        """Have the kernel wake us when ``nbytes`` are there (or no more will come): many small wake-ups cost more than the
        bytes. Under TLS bytes come in records, which the kernel does not know."""
        if nbytes != self._woken_at and not isinstance(self._sock, tls.SSLSocket):
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, nbytes)
            self._woken_at = nbytes

    async def _give_turns(self, moved: int) -> None:
        """A fast peer never makes us wait, so others (and deadlines) get their turn by bytes."""
        self._moved += moved
        if self._moved >= 8 * _PIECE:
            self._moved = 0
            await asyncio.sleep(0)

    async def receive(self, nbytes: int) -> bytearray:
        data = bytearray(nbytes)
        await self.receive_into(memoryview(data))
        return data

    async def discard(self, nbytes: int) -> None:
        scratch = memoryview(bytearray(min(nbytes, _PIECE >> 2)))
        for at in range(0, nbytes, _PIECE >> 2):
            await self.receive_into(scratch[: nbytes - at])

    async def send(self, *buffers: bytes | memoryview) -> None:
        """Send ``buffers``, about ``_SLICES`` of them at most, one after the other."""
        pending = [buffer if isinstance(buffer, memoryview) else memoryview(buffer) for buffer in buffers]
        while pending:
            if isinstance(self._sock, tls.SSLSocket):
                count = await self._until(partial(self._sock.send, pending[0][:_TLS_PIECE]), sends=True)
            else:
                count = await self._until(partial(self._sock.sendmsg, pending), sends=True)
            self.sent += count
            _advance(pending, count)
            await self._give_turns(count)

    def close(self) -> None:
        self._sock.close()

    async def linger(self, seconds: float) -> None:
        """Close so that what was sent arrives: bytes that come in unread would make the other end's kernel drop it."""
        scratch = memoryview(bytearray(_PIECE >> 2))
        try:
            self._sock.shutdown(socket.SHUT_WR)
            async with asyncio.timeout(seconds):
                while True:
                    await self.receive_into(scratch)
        except (OSError, TimeoutError):
            pass
        self.close()


def _advance(pending: list[memoryview], count: int) -> None:
    """Take the first ``count`` bytes off ``pending``."""
    if count == sum(map(len, pending)):
        pending.clear()
        return
    done = 0
    while done < len(pending) and count >= len(pending[done]):
        count -= len(pending[done])
        done += 1
    del pending[:done]
    if count:
        pending[0] = pending[0][count:]


def _check_secret(secret: bytes) -> bytes:
    if not isinstance(secret, bytes) or len(secret) < _MIN_SECRET:
        given = f"{len(secret)} bytes" if isinstance(secret, bytes) else type(secret).__name__
        raise ValueError(
            f"secret: is {given}, must be {_MIN_SECRET} bytes or more; make one with secrets.token_bytes(32) "
            "and give it to every node"
        )
    return secret


def _proof(secret: bytes, side: bytes, *said: bytes) -> bytes:
    return hmac.digest(secret, side + b"".join(said), "sha256")


# ── the server ──


class WarehouseServer:
    """Serves ``arena`` to whoever knows ``secret``.

        async with WarehouseServer(arena, schema, secret=secret, host="0.0.0.0") as server:
            print(server.address)

    ``bytes_sent`` and ``bytes_received`` count all bytes above TCP (inside TLS), ``payload_sent`` and ``payload_received``
    those of column values and offsets alone; ``connections`` are those open now.
    """

    def __init__(
        self,
        arena: Arena,
        schema: Schema,
        *,
        secret: bytes,
        host: str = "127.0.0.1",
        port: int = 0,
        limits: Limits | None = None,
        ssl: tls.SSLContext | None = None,
    ) -> None:
        self._arena, self._schema, self._secret, self._ssl = arena, schema, _check_secret(secret), ssl
        self.address, self.limits = (host, port), limits or Limits()
        self._reader = ArenaReader(arena, schema)
        self._words = np.frombuffer(arena.slice(0, arena.nbytes), np.int64, arena.nbytes // 8)
        self._serving: asyncio.Task[None] | None = None
        self._open = set[_Stream | socket.socket]()
        self._handshakes: dict[asyncio.Task[None], None] = {}  # of peers that have not proven the secret, oldest first
        self._sent = self._received = self.payload_sent = self.payload_received = 0

    @property
    def connections(self) -> int:
        return len(self._open)

    @property
    def bytes_sent(self) -> int:
        return self._sent + sum(peer.sent for peer in self._open if isinstance(peer, _Stream))

    @property
    def bytes_received(self) -> int:
        return self._received + sum(peer.received for peer in self._open if isinstance(peer, _Stream))

    async def start(self) -> tuple[str, int]:
        """Listen; returns the address, with the port that the system chose when it was 0."""
        listening = socket.create_server(self.address, family=await self._family(), backlog=128)
        listening.setblocking(False)
        self.address = listening.getsockname()[:2]
        self._serving = asyncio.create_task(self._serve(listening), name=f"warehouse at {self.address}")
        return self.address

    async def _family(self) -> socket.AddressFamily:
        found = await asyncio.get_running_loop().getaddrinfo(*self.address, type=socket.SOCK_STREAM)
        return found[0][0]

    async def close(self) -> None:
        """Stop listening and drop every connection."""
        if self._serving is not None:
            self._serving.cancel()
            await asyncio.gather(self._serving, return_exceptions=True)
            self._serving = None

    async def __aenter__(self) -> WarehouseServer:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _serve(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with listening:
            async with asyncio.TaskGroup() as tasks:
                while True:
                    try:
                        sock, peer = await loop.sock_accept(listening)
                    except OSError as error:  # no descriptor left, or the peer is gone already
                        log.warning("a connection could not be accepted", error=str(error))
                        await asyncio.sleep(0.1)
                        continue
                    if len(self._handshakes) >= self.limits.handshakes:
                        # A peer that knows the secret proves it within a round trip: the oldest is the least likely to.
                        oldest = next(iter(self._handshakes))
                        del self._handshakes[oldest]
                        oldest.cancel()
                        log.warning("handshake ended: too many at once", handshakes=self.limits.handshakes)
                    self._open.add(sock)
                    task = tasks.create_task(self._peer(sock, peer))
                    self._handshakes[task] = None
                    task.add_done_callback(lambda task: self._handshakes.pop(task, None))

    async def _peer(self, sock: socket.socket, peer: object) -> None:
        """All of one connection's life. Whatever goes wrong in it ends it alone."""
        held: _Stream | socket.socket = sock
        task = asyncio.current_task()
        assert task is not None
        try:
            async with asyncio.timeout(self.limits.hello_seconds):
                stream = await _Stream.open(sock, self._ssl, None)
                self._open.remove(held)
                self._open.add(held := stream)
                if not await self._known(stream):
                    log.warning("handshake refused: version or secret", peer=peer)
                    return
                self._handshakes.pop(task, None)
            if self.connections - len(self._handshakes) > self.limits.connections:
                log.warning("connection refused: too many", peer=peer, connections=self.limits.connections)
                return
            while await self._turn(stream):
                pass
        except (OSError, TimeoutError) as error:
            log.info("connection ended", peer=peer, error=f"{type(error).__name__}: {error}")
        except Exception:
            log.exception("connection failed", peer=peer)
        finally:
            self._open.remove(held)
            if isinstance(held, _Stream):
                self._sent, self._received = self._sent + held.sent, self._received + held.received
            held.close()

    async def _known(self, stream: _Stream) -> bool:
        """Whether the peer knows the secret; it learns no more than that."""
        hello = _HELLO.pack(_WIRE, VERSION, os.urandom(32))
        await stream.send(hello)
        said = bytes(await stream.receive(_PROOF.size))
        wire, version, _, proof = _PROOF.unpack(said)
        right = hmac.compare_digest(proof, _proof(self._secret, b"client", hello, said[:-32]))
        if not right or wire != _WIRE or version != VERSION:
            return False
        welcome = _WELCOME.pack(
            time.monotonic(), self.limits.rows, self.limits.nbytes, self._arena.nbytes, schema_digest(self._schema), b""
        )[:-32]
        await stream.send(welcome + _proof(self._secret, b"warehouse", hello, said, welcome))
        return True

    async def _turn(self, stream: _Stream) -> bool:
        """One request and its reply; False when the connection must end."""
        try:
            async with asyncio.timeout(self.limits.idle_seconds):
                head = await stream.receive(_HEAD.size)
        except ConnectionResetError:
            return False  # the client closed it
        in_step = False
        try:
            kind, size, payload = parse_head(head, self.limits)
            async with asyncio.timeout(self.limits.seconds(size)):
                control = await stream.receive(size)
            in_step = payload == 0  # a payload is not waited for when it is refused
            request = parse_request(kind, control, payload, self._schema, self._arena.nbytes, self.limits)
            async with asyncio.timeout(self.limits.seconds(payload)):
                told, size, batches = await self._answer(stream, request)
        except (TransferError, StaleHandle) as error:
            log.warning("request refused", error=str(error))
            message = str(error).encode()[:_MAX_MESSAGE]
            status = _STALE if isinstance(error, StaleHandle) else _REFUSED
            async with asyncio.timeout(self.limits.frame_seconds):
                await stream.send(_HEAD.pack(status, len(message), 0) + message)
            if not in_step:
                await stream.linger(min(2.0, self.limits.frame_seconds))
            return in_step
        self.payload_received += payload
        async with asyncio.timeout(self.limits.seconds(size)):
            first = [_HEAD.pack(_OK, len(told), size) + told]
            for batch in batches:
                await stream.send(*first, *batch)
                first = []
        self.payload_sent += size
        return True

    async def _answer(self, stream: _Stream, request: Request) -> tuple[bytes, int, Iterable[list[memoryview]]]:
        """Control, bytes of payload, and the payload of the reply in batches; a write's bytes are taken here."""
        if isinstance(request, ReadRequest):
            found = self._reader.plan(request, self.limits)
            sizes = [runs.nbytes for _, runs in found]
            offsets = sum(offsets.nbytes for offsets, _ in found if offsets is not None)
            return struct.pack(f"<{len(sizes)}Q", *sizes), sum(sizes) + offsets, self._reader.batches(found)
        if isinstance(request, WriteRequest):
            await self._write(stream, request)
            return b"", 0, [[]]
        memory = self._arena.slice(request.offset, request.nbytes)
        if request.expires is None:
            return b"", request.nbytes, [[memory]]
        await stream.receive_into(memory, check=_before(request.expires))
        return b"", 0, [[]]

    async def _write(self, stream: _Stream, request: WriteRequest) -> None:
        at, header = request.offset // 8, request.header
        there = self._words[at : at + len(header)]
        if (there == header).all():  # repeated by a client that did not hear our answer
            await stream.discard(request.payload)
            return
        in_time = _before(request.expires)
        in_time()
        there[0] = 0  # no reader takes what stood here for a block any more
        await stream.receive_into(self._arena.slice(request.offset + header.nbytes, request.payload), check=in_time)
        for bit, offsets_at, _, size in header[4:].reshape(-1, 4).tolist():
            column = self._schema.columns[bit]
            if column.shape is None:
                begin = at + offsets_at // 8
                bounds = self._words[begin : begin + int(header[2]) + 1]
                if bounds[0] != 0 or bounds[-1] * column.itemsize != size or (bounds[1:] < bounds[:-1]).any():
                    raise TransferError(
                        f"write: offsets of column {column.name!r} do not divide its {size} bytes into rows; pack it again"
                    )
        there[1:] = header[1:]
        there[0] = header[0]


def _before(expires: float) -> Callable[[], None]:
    def check() -> None:
        if time.monotonic() > expires:
            raise TransferError("write: came after its client's deadline, nobody waits for it; give writes more time")

    return check


# ── the client ──


class _ProofRefused(ConnectionError):
    """The server hung up on our proof."""


class _Connection:
    """One authenticated connection. ``in_step`` is False while a request is under way: then it must not be used again."""

    def __init__(self, stream: _Stream, clock: float, rows: int, nbytes: int, room: int) -> None:
        self.stream, self.rows, self.nbytes, self.room = stream, rows, nbytes, room
        self._clock, self._at = clock, asyncio.get_running_loop().time()
        self.in_step = True

    def servers_clock(self, when: float) -> float:
        """A time of the server's clock that is not later than ``when`` is here: its welcome was under way for a while."""
        return self._clock + when - self._at

    async def request(self, kind: int, control: bytes, payload: memoryview | None = None) -> tuple[bytes, int]:
        """Send a request; control and bytes of payload of the reply. The caller takes the payload, then sets ``in_step``."""
        self.in_step = False
        size = 0 if payload is None else len(payload)
        head = _HEAD.pack(kind, len(control), size) + control
        await (self.stream.send(head) if payload is None else self.stream.send(head, payload))
        status, told, size = _HEAD.unpack(await self.stream.receive(_HEAD.size))
        if status == _OK:
            if told > 8 * 64:
                raise TransferError(
                    f"reply: {told} bytes of control, at most 512 are taken; both ends must run the same version"
                )
            return bytes(await self.stream.receive(told)), size
        if status not in (_REFUSED, _STALE) or told > _MAX_MESSAGE or size:
            raise TransferError(f"reply: status {status} is not known; both ends must run the same version")
        message = (await self.stream.receive(told)).decode(errors="replace")
        self.in_step = payload is None
        raise (StaleHandle if status == _STALE else TransferError)(message)


class _Memory:
    """Memory to receive into. What readers let go is used again, up to ``_KEPT`` bytes of it: clearing a new page takes the
    kernel as long as filling it."""

    def __init__(self) -> None:
        self._free = list[np.ndarray]()

    @property
    def kept(self) -> int:
        return sum(memory.nbytes for memory in self._free)

    def take(self, nbytes: int, dtype: torch.dtype) -> tuple[torch.Tensor, memoryview]:
        """A flat tensor of ``nbytes`` bytes, and the bytes. Its memory is ours again when nothing refers to it any more."""
        if nbytes < _REUSED:
            tensor = torch.empty(nbytes // dtype.itemsize, dtype=dtype)
            return tensor, tensor.view(torch.uint8).numpy().data
        fits = [i for i, memory in enumerate(self._free) if nbytes <= memory.nbytes <= 2 * nbytes]
        memory = self._free.pop(fits[0]) if fits else np.empty(nbytes, np.uint8)
        part = memory[:nbytes]  # an object of its own, which lives as long as the tensor's storage
        weakref.finalize(part, self._give, memory).atexit = False
        return torch.from_numpy(part).view(dtype), part.data

    def _give(self, memory: np.ndarray) -> None:
        if self.kept + memory.nbytes <= _KEPT:
            self._free.append(memory)


class RemoteWarehouse:
    """A warehouse on another node. Connects at the first call; calls may run at the same time, ``connections`` of them.

    Each call ends within ``timeout`` seconds, reconnections included, or raises :class:`WarehouseUnreachable`. Raises
    :class:`TransferError` for what no repetition mends, :class:`StaleHandle` for released blocks.
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
        self._address, self._schema, self._secret, self._ssl = (host, port), schema, _check_secret(secret), ssl
        self._timeout, self._limits = timeout, limits or Limits()
        self._idle, self._memory = list[_Connection](), _Memory()
        self._turns = asyncio.Semaphore(connections)
        self._closed = False

    async def read(
        self, blocks: np.ndarray, offsets: np.ndarray, slots: np.ndarray, columns: Sequence[str]
    ) -> dict[str, Packed]:
        """Rows [n] in the order asked, by ``blocks``, ``offsets`` (bytes, of each row's block in the arena) and ``slots``,
        all int64 [n]. Every row's block must have all of ``columns``."""
        mask = self._schema.mask(columns)
        asked = [column for _, column in _asked(self._schema, mask)]
        rows = len(slots)
        for name, array in (("blocks", blocks), ("offsets", offsets), ("slots", slots)):
            if array.dtype != np.int64 or array.shape != (rows,):
                raise TransferError(f"read: {name} is {array.dtype} {list(array.shape)}, must be int64 [{rows}]")
        if not rows or not asked:
            return {name: _nothing(self._schema[name]) for name in columns}
        control = _read_head(self._schema).pack(mask, rows) + np.stack([blocks, offsets, slots]).tobytes()

        async def work(connection: _Connection, deadline: float) -> dict[str, Packed]:
            if rows > connection.rows:
                raise TransferError(f"read: {rows} rows, the warehouse takes {connection.rows}; ask for them in parts")
            told, payload = await connection.request(_READ, control)
            if len(told) != 8 * len(asked):
                raise TransferError(f"reply: {len(told)} bytes tell sizes, must be {8 * len(asked)}")
            sizes = struct.unpack(f"<{len(asked)}Q", told)
            ragged = sum(column.shape is None for column in asked)
            if payload > self._limits.nbytes or payload != sum(sizes) + ragged * 8 * (rows + 1):
                raise TransferError(
                    f"reply: payload is {payload} bytes, sizes tell {sizes}; at most {self._limits.nbytes}"
                )
            found, memories = dict[str, Packed](), list[memoryview]()
            for column, size in zip(asked, sizes, strict=True):
                if size % column.itemsize or (column.shape is not None and size != rows * _width(column)):
                    raise TransferError(f"reply: column {column.name!r} has {size} bytes for {rows} rows")
                bounds = np.empty(rows + 1, np.int64) if column.shape is None else None
                if bounds is not None:
                    memories.append(bounds.data.cast("B"))
                dtype = torch.uint8 if column.dtype == "utf8" else column.dtype
                values, memory = self._memory.take(size, dtype)
                memories.append(memory)
                found[column.name] = Packed(values, None if bounds is None else torch.from_numpy(bounds))
            await connection.stream.receive_into(*memories)
            for name, packed in found.items():
                if packed.offsets is not None:
                    edges = packed.offsets.numpy()
                    if edges[0] != 0 or edges[-1] != len(packed.values) or (edges[1:] < edges[:-1]).any():
                        raise TransferError(f"reply: offsets of column {name!r} do not divide its values into rows")
            connection.in_step = True
            return found

        found = await self._call("read", work)
        return {name: found[name] for name in columns}

    async def write(self, offset: int, block: int, rows: PackedRows) -> None:
        """Write ``rows`` as ``block`` at ``offset``, which the index gave us. When it raises :class:`WarehouseUnreachable`
        no byte lands there any more; when it is cancelled, bytes may land until ``timeout`` would have passed."""
        whole = np.empty(rows.nbytes, np.uint8)
        rows.write_into(whole.data, block)
        edge = 32 + 32 * int(whole[24:32].view(np.int64)[0])
        header, payload = whole[:edge].tobytes(), whole[edge:].data
        await self._put("write", _WRITE, (offset, block, rows.nbytes), header, payload)

    async def copy_in(self, offset: int, data: memoryview) -> None:
        """Put raw bytes at ``offset``, a multiple of 8. Ends as :meth:`write` does."""
        data = data.cast("B")
        if len(data):
            await self._put("copy", _COPY_IN, (offset, len(data)), b"", data)

    async def _put(self, what: str, kind: int, numbers: tuple[int, ...], header: bytes, payload: memoryview) -> None:
        async def work(connection: _Connection, deadline: float) -> None:
            _check_range(what, numbers[0], numbers[-1], connection.room, self._limits)
            if len(payload) > connection.nbytes:
                raise TransferError(f"{what}: {len(payload)} bytes, the warehouse takes {connection.nbytes} at a time")
            expires = struct.pack("<d", connection.servers_clock(deadline))
            await connection.request(kind, struct.pack(f"<{len(numbers)}q", *numbers) + expires + header, payload)
            connection.in_step = True

        await self._call(what, work)

    async def copy_out(self, offset: int, nbytes: int) -> memoryview:
        """``nbytes`` raw bytes from ``offset``, a multiple of 8."""
        if nbytes == 0:
            return memoryview(b"")

        async def work(connection: _Connection, deadline: float) -> memoryview:
            _check_range("copy", offset, nbytes, connection.room, self._limits)
            _, payload = await connection.request(_COPY_OUT, struct.pack("<qqd", offset, nbytes, 0.0))
            if payload != nbytes:
                raise TransferError(f"reply: payload is {payload} bytes, {nbytes} were asked for")
            memory = np.empty(nbytes, np.uint8).data
            await connection.stream.receive_into(memory)
            connection.in_step = True
            return memory

        return await self._call("copy", work)

    async def close(self) -> None:
        """Close the connections; those in use close when their call ends."""
        self._closed = True
        while self._idle:
            self._idle.pop().stream.close()

    async def _call(self, what: str, work: Callable[[_Connection, float], Awaitable[T]]) -> T:
        """``work`` on a connection, again on a new one when it is lost: all requests may be repeated."""
        deadline = asyncio.get_running_loop().time() + self._timeout
        pause, denied, lost = 0.02, 0, "no connection was free"
        try:
            async with asyncio.timeout_at(deadline), self._turns:
                while True:
                    if self._closed:
                        raise TransferError(f"{what}: this RemoteWarehouse was closed; make another")
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
                    except _ProofRefused:
                        denied += 1
                        if denied > 1:
                            raise TransferError(
                                f"warehouse {self._address}: hung up on our handshake, which a wrong secret makes it do; "
                                "set the secret that its server was started with"
                            ) from None
                    except OSError as error:
                        lost = f"{type(error).__name__}: {error}"
                        if used:
                            continue  # it may have been closed long ago, for idleness
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, 1.0)
        except TimeoutError:
            raise WarehouseUnreachable(
                f"{what}: warehouse {self._address} was not reached within {self._timeout:g} s ({lost}); "
                "see that its server runs there, with TLS on both ends or on none, or give a longer timeout"
            ) from None

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        failed: OSError | None = None
        for family, kind, protocol, _, address in await loop.getaddrinfo(*self._address, type=socket.SOCK_STREAM):
            sock = socket.socket(family, kind, protocol)
            try:
                sock.setblocking(False)
                await loop.sock_connect(sock, address)
                stream = await _Stream.open(sock, self._ssl, self._address[0])
            except tls.SSLError as error:
                sock.close()
                if isinstance(error, tls.SSLEOFError | tls.SSLZeroReturnError):
                    raise
                raise TransferError(
                    f"warehouse {self._address}: no TLS with it ({error}); check that it serves TLS, and that the "
                    "client's context trusts its certificate under this name"
                ) from None
            except OSError as error:
                sock.close()
                failed = error
                continue
            except BaseException:
                sock.close()
                raise
            try:
                return await self._greet(stream)
            except BaseException:
                stream.close()
                raise
        assert failed is not None
        raise failed

    async def _greet(self, stream: _Stream) -> _Connection:
        hello = bytes(await stream.receive(_HELLO.size))
        wire, version, _ = _HELLO.unpack(hello)
        if wire != _WIRE:
            raise TransferError(
                f"warehouse {self._address}: what answers there is no warehouse; check host, port and TLS"
            )
        if version != VERSION:
            raise TransferError(
                f"warehouse {self._address}: speaks version {version}, we speak {VERSION}; "
                "install the same release on both nodes"
            )
        said = _PROOF.pack(_WIRE, VERSION, os.urandom(32), b"")[:-32]
        said += _proof(self._secret, b"client", hello, said)
        try:
            await stream.send(said)
            welcome = bytes(await stream.receive(_WELCOME.size))
        except ConnectionError as error:
            raise _ProofRefused(str(error)) from None
        clock, rows, nbytes, room, schema, proof = _WELCOME.unpack(welcome)
        if not hmac.compare_digest(proof, _proof(self._secret, b"warehouse", hello, said, welcome[:-32])):
            raise TransferError(
                f"warehouse {self._address}: does not prove that it knows the secret; somebody else answers there, "
                "or set the secret that its server was started with"
            )
        if schema != schema_digest(self._schema):
            raise TransferError(
                f"warehouse {self._address}: has another schema; give both ends the same columns in the same order"
            )
        return _Connection(stream, clock, rows, nbytes, room)


def _nothing(column: Column) -> Packed:
    dtype = torch.uint8 if column.dtype == "utf8" else column.dtype
    return Packed(torch.empty(0, dtype=dtype), torch.zeros(1, dtype=torch.int64) if column.shape is None else None)
