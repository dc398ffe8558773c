"""The line of a process that runs a user's code: messages over the socket that is its standard
input.

    message: bytes of its head (4) and of its body (8) ── the head in JSON ── the body, bytes whose meaning the head says

Neither end unpickles anything. The process is not trusted: a message of it that says more bytes
than are taken is not read. Importing this takes the standard library alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import json
import os
import resource
import socket
import struct
import sys
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

SIZES = struct.Struct("<IQ")
HEAD_BYTES = 16 << 20  # at most
READ_AHEAD = 1 << 20  # bytes that a stream of messages buffers
FULL = 0.9  # of the limit of memory: a process that fails with more than this is replaced

Message = tuple[dict[str, Any], bytes | bytearray]


class BadMessage(ValueError):
    """Bytes that were sent are no message. ``str``: what they are."""


def packed(head: Mapping[str, Any], body: bytes | bytearray = b"") -> bytes:
    """Return the bytes of a message before its body."""
    data = json.dumps(head).encode()
    return SIZES.pack(len(data), len(body)) + data


def send(line: socket.socket, head: Mapping[str, Any]) -> None:
    """Send a message without a body."""
    line.sendall(packed(head))


def receive(line: socket.socket) -> dict[str, Any]:
    """Receive the head of the next message, which has no body, in the process.

    Raises EOFError at the end of the line.
    """
    head_bytes, body_bytes = SIZES.unpack(_exactly(line, SIZES.size))
    return head_of(_exactly(line, head_bytes + body_bytes))


async def receive_from(stream: asyncio.StreamReader, most: int | None = None) -> Message:
    """Receive the next message.

    ``most``: bytes of a body that are taken, and HEAD_BYTES of a head; None: any number, as the
    sender is trusted. Raises IncompleteReadError and ConnectionError at the end of the line,
    BadMessage.
    """
    head_bytes, body_bytes = SIZES.unpack(await stream.readexactly(SIZES.size))
    if most is not None and (head_bytes > HEAD_BYTES or body_bytes > most):
        taken = f"{HEAD_BYTES} and {most} are taken"
        raise BadMessage(
            f"a message of {head_bytes} bytes and {body_bytes} bytes of columns; {taken}"
        )
    head = head_of(await stream.readexactly(head_bytes))
    return head, await stream.readexactly(body_bytes)


def head_of(data: bytes) -> dict[str, Any]:
    """Return the head of a message from its JSON. Raises BadMessage."""
    try:
        head = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BadMessage(f"{len(data)} bytes that are no JSON ({type(error).__name__})") from None
    if not isinstance(head, dict):
        raise BadMessage(f"a {type(head).__name__} in JSON; a message is an object")
    return head


def _exactly(line: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        piece = line.recv(count - len(data))
        if not piece:
            raise EOFError("the line has ended")
        data += piece
    return bytes(data)


# --------------------------------------------------------------------------------------------------
# In the process


def take_line() -> socket.socket:
    """Return standard input as a socket. Code that reads its input then reads nothing."""
    line = socket.socket(fileno=os.dup(0))
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    return line


def prepare(path: list[str], memory: int = 0) -> None:
    """Set what a process that runs a user's code has: no core dump but a trace in its log,
    ``memory`` bytes of data (0: no limit), ``path`` of imports."""
    faulthandler.enable()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if memory:
        resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    sys.path[:] = path


async def serve(
    line: socket.socket,
    answer: Callable[[dict[str, Any], bytes | bytearray], Awaitable[Message | None]],
) -> None:
    """Answer each message by a task of its own, with the message's id, until the line ends. None is
    not sent. What has not been answered then is left.

    A child that the code has forked ends instead of answering too.
    """
    process = os.getpid()
    stream, writer = await asyncio.open_connection(sock=line, limit=READ_AHEAD)
    answering = set[asyncio.Task[None]]()

    async def respond(head: dict[str, Any], body: bytes | bytearray) -> None:
        message = await answer(head, body)
        if os.getpid() != process:
            os._exit(0)
        if message is not None:
            writer.write(packed({"id": head.get("id"), **message[0]}, message[1]))
            writer.write(message[1])
            with contextlib.suppress(ConnectionError):
                await writer.drain()

    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            task = asyncio.create_task(respond(*await receive_from(stream)))
            answering.add(task)
            task.add_done_callback(answering.discard)


def is_full() -> bool:
    """Return whether this process holds nearly as much data as it may."""
    limit = resource.getrlimit(resource.RLIMIT_DATA)[0]
    if limit == resource.RLIM_INFINITY or sys.platform != "linux":
        return False
    with open("/proc/self/statm") as sizes:
        return int(sizes.read().split()[5]) * resource.getpagesize() > FULL * limit
