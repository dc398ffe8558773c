"""The requests to a warehouse on another node: numbers checked on their way out of bytes, without
arena or socket.

    RemoteWarehouse (client.py)                     WarehouseServer (server.py)
      connect ─── the handshake of the wire ──────▶ accept             (at most ``limits.connections``)
              ◀── in its welcome: clock, limits ───
      request: head │ control │ payload ──────────▶ head ─▶ control ─▶ arena    (a read plans, a write is checked first)
              ◀── reply: head │ control │ payload ─ slices of the arena
      └── the next request on this connection ───▶ waits ``limits.idle_seconds`` for it, then closes

One request is in flight on a connection; a client keeps a few connections. A reply's kind is its
status. Control is fixed binary fields and int64 arrays, never a pickle. The payload of a read's
reply is, column by column in the schema's order, int64 [n + 1] offsets (ragged and text) and the
packed values. The server sends them from the arena and the client receives them into the tensors'
memory, so a column costs one buffer whatever its rows.

Every wait has a deadline. A refused request changes nothing in the arena. Handshake and frames are
those of :mod:`pipeline.wire`.

A write may be repeated: the server acknowledges a block that is already there and leaves it alone.
Before the server takes a piece of a write it checks the client's deadline on its own clock, so no
late byte falls into room that was given back.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pipeline.data.blocks import MAGIC
from pipeline.data.columns import MAX_COLUMNS, Schema
from pipeline.wire.frames import Most, TransferError
from pipeline.wire.handshake import HELLO_SECONDS, UNPROVEN

SERVICE = b"warehouse"
# server's clock, rows and bytes of a frame, arena's bytes, schema
WELCOME = struct.Struct("<dQQQ32s")
READ = 1
WRITE = 2
COPY = 4
OK = 0
REFUSED = 1
STALE = 2
MAX_MESSAGE = 4096


@dataclass(frozen=True)
class Limits:
    """What one end takes from the other.

    A frame that would need more is refused before anything is allocated for it.
    """

    rows: int = 1 << 18  # of one read or one block
    nbytes: int = 4 << 30  # of one payload
    connections: int = 64  # of clients that have proven the secret
    handshakes: int = UNPROVEN  # connections that have not; one more closes the oldest of them
    hello_seconds: float = HELLO_SECONDS  # for the whole handshake
    idle_seconds: float = 300.0  # between two requests
    frame_seconds: float = 30.0  # for a frame, plus the time of its payload
    slowest: float = 1 << 20  # bytes a second, at least, of a payload

    @property
    def control(self) -> int:
        """Bytes of the largest control part: three int64 for each row of a read."""
        return 1024 + 24 * self.rows

    @cached_property
    def requests(self) -> Mapping[int, Most]:
        """What is taken of each kind of request."""
        return dict.fromkeys((READ, WRITE, COPY), Most(self.control, self.nbytes))

    def seconds(self, nbytes: int) -> float:
        """Deadline of a frame with ``nbytes`` bytes."""
        return self.frame_seconds + nbytes / self.slowest


@dataclass(frozen=True)
class ReadRequest:
    """Rows [n] by block, the block's byte offset in the arena, and slot; the columns are the bits
    of ``mask``."""

    mask: int
    blocks: np.ndarray
    offsets: np.ndarray
    slots: np.ndarray


@dataclass(frozen=True)
class WriteRequest:
    """A block's header and where the block goes; its other ``payload`` bytes follow, until
    ``expires``, server's clock."""

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
    """Raw bytes for the arena, until ``expires``, server's clock."""

    offset: int
    nbytes: int
    expires: float


Request = ReadRequest | WriteRequest | CopyRequest
Bytes = bytes | bytearray | memoryview


def schema_digest(schema: Schema) -> bytes:
    """SHA-256 of the names, kinds and order of the columns, on which both ends must agree."""
    return hashlib.sha256(repr([(c.name, c.describe()) for c in schema.columns]).encode()).digest()


def read_head(schema: Schema) -> struct.Struct:
    """Columns as bits, and number of rows; the partitions of a transfer queue have more columns
    than a run."""
    return struct.Struct("<II" if len(schema.columns) <= MAX_COLUMNS else "<QQ")


def parse_request(
    kind: int, control: Bytes, payload: int, schema: Schema, room: int, limits: Limits
) -> Request:
    """A request for an arena of ``room`` bytes.

    Raises :class:`TransferError`, which names what is wrong.
    """
    if kind == READ:
        return _parse_read(control, payload, schema, limits)
    if kind == WRITE:
        return _parse_write(control, payload, schema, room, limits)
    if len(control) != 24:
        raise TransferError(f"copy: control is {len(control)} bytes, must be 24")
    offset, nbytes, expires = struct.unpack("<qqd", control)
    check_range("copy", offset, nbytes, room, limits)
    if payload != nbytes:
        raise TransferError(
            f"copy: payload is {payload} bytes, must be the {nbytes} that control announces"
        )
    return CopyRequest(offset, nbytes, _expiry(expires))


def _parse_read(control: Bytes, payload: int, schema: Schema, limits: Limits) -> ReadRequest:
    if payload:
        raise TransferError(f"read: payload is {payload} bytes; a read has none")
    head = read_head(schema)
    if len(control) < head.size:
        raise TransferError(
            f"read: control is {len(control)} bytes, must have {head.size} for columns and rows"
        )
    mask, rows = head.unpack_from(control)
    if not 0 < mask < 1 << len(schema.columns):
        raise TransferError(
            f"read: column bits {mask:#x}, the schema has {len(schema.columns)} columns; name some "
            f"of them"
        )
    if not 0 < rows <= limits.rows:
        raise TransferError(f"read: {rows} rows, must be 1 to {limits.rows}; ask for them in parts")
    if len(control) != head.size + 24 * rows:
        raise TransferError(
            f"read: control is {len(control)} bytes, must be "
            f"{head.size + 24 * rows} for {rows} rows"
        )
    return ReadRequest(mask, *np.frombuffer(control, "<i8", 3 * rows, head.size).reshape(3, rows))


def _parse_write(
    control: Bytes, payload: int, schema: Schema, room: int, limits: Limits
) -> WriteRequest:
    if not 32 + 64 <= len(control) <= 32 + 32 + 32 * len(schema.columns) or len(control) % 32:
        raise TransferError(
            f"write: control is {len(control)} bytes, must be 64 and 32 for each column"
        )
    offset, block, nbytes, expires = struct.unpack_from("<qqqd", control)
    check_range("write", offset, nbytes, room, limits)
    header = np.frombuffer(control, "<i8", offset=32)
    if payload != nbytes - header.nbytes:
        raise TransferError(
            f"write: payload is {payload} bytes, must be {nbytes - header.nbytes}: "
            f"block less header"
        )
    magic, found, rows, columns = header[:4].tolist()
    if magic != MAGIC or found != block:
        raise TransferError(
            f"write: header is of block {found} ({magic:#x}), must be of {block}; "
            f"send what was packed"
        )
    if not 0 < rows <= limits.rows:
        raise TransferError(f"write: {rows} rows, must be 1 to {limits.rows}; write them in parts")
    if columns != len(header) // 4 - 1:
        raise TransferError(
            f"write: header counts {columns} columns and describes {len(header) // 4 - 1}"
        )
    end = header.nbytes
    bits = set()
    for bit, offsets_at, values_at, size in header[4:].reshape(-1, 4).tolist():
        if not 0 <= bit < len(schema.columns) or bit in bits:
            raise TransferError(f"write: column bit {bit} is not in the schema, or comes twice")
        bits.add(bit)
        column = schema.columns[bit]
        sections = [(values_at, size, column.itemsize)]
        if column.shape is None:
            sections.insert(0, (offsets_at, 8 * (rows + 1), 8))
        elif offsets_at != -1 or size != rows * column.width:
            raise TransferError(
                f"write: column {column.name!r} has {size} bytes, must be {rows} times "
                f"{column.width} and no offsets"
            )
        for at, length, unit in sections:
            if at < end or at % unit or length < 0 or length % unit or length > nbytes - at:
                raise TransferError(
                    f"write: column {column.name!r} lies at {at}, {length} bytes; sections follow "
                    f"one another inside the block's {nbytes}"
                )
            end = at + length
    return WriteRequest(offset, block, nbytes, _expiry(expires), header)


def check_range(request: str, offset: int, nbytes: int, room: int, limits: Limits) -> None:
    """Raises :class:`TransferError` when ``nbytes`` bytes at ``offset`` do not lie in an arena of
    ``room`` bytes."""
    if not 0 < nbytes <= limits.nbytes:
        raise TransferError(
            f"{request}: {nbytes} bytes, must be 1 to {limits.nbytes}; move them in parts"
        )
    if offset < 0 or offset % 8 or nbytes > room - offset:
        raise TransferError(
            f"{request}: bytes {offset} to {offset + nbytes} must start at a multiple of 8 inside "
            f"the arena's {room}; use "
            "the offset that the index gave"
        )


def _expiry(expires: float) -> float:
    if not math.isfinite(expires):
        raise TransferError(f"write: expires at {expires}, must be a time of the server's clock")
    return expires
