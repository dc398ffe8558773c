"""Messages between the server and an engine's process, both ways over a Unix socket.

bytes of the head, bytes of the blob │ head: a map of msgpack's values │ blob: as in a journal
"""

from __future__ import annotations

import asyncio
import struct
from typing import Any

import msgpack

HEAD = struct.Struct("<IQ")
HEAD_BYTES = 16 << 20  # that are taken
BLOB_BYTES = 4 << 30
BUFFER_BYTES = 1 << 20
FAILED = "failed"  # of the errors that an answer may have, the one that is no mistake of a client

Message = tuple[dict[str, Any], bytes]


async def receive(reader: asyncio.StreamReader) -> Message | None:
    """Return the next message; None at the end. Raises ValueError for what is too large."""
    try:
        head_bytes, blob_bytes = HEAD.unpack(await reader.readexactly(HEAD.size))
        if head_bytes > HEAD_BYTES or blob_bytes > BLOB_BYTES:
            raise ValueError(f"a message of {head_bytes} and {blob_bytes} bytes is not taken")
        head = await reader.readexactly(head_bytes)
        return msgpack.unpackb(head), await reader.readexactly(blob_bytes)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


def send(writer: asyncio.StreamWriter, head: dict[str, Any], blob: bytes = b"") -> None:
    """Queue a message; ``writer.drain`` waits until most of it is sent."""
    packed = msgpack.packb(head)
    writer.write(HEAD.pack(len(packed), len(blob)) + packed)
    if blob:
        writer.write(blob)
