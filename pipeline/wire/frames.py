"""Frames: what follows the handshake on every connection between nodes, both ways.

    head, 16 bytes: kind │ bytes of control │ bytes of payload        control: small        payload: bytes in bulk

What a head announces is compared with what its reader takes before anything is allocated for it.
Each service numbers its kinds; a message is control alone, packed by msgpack, never a pickle.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import NamedTuple

HEAD = struct.Struct("<B3xIQ")  # kind, bytes of control, bytes of payload
MESSAGE = 255  # the kind of a message, in every service
MESSAGE_BYTES = 2**16  # that are taken of one


class TransferError(RuntimeError):
    """The other end refused a frame, or is not one of this run.

    The message names field, value and fix.
    """


class Head(NamedTuple):
    kind: int
    control: int  # bytes
    payload: int  # bytes


class Most(NamedTuple):
    """The most bytes that a reader takes of one kind."""

    control: int = 0
    payload: int = 0


def parse_head(head: bytes | bytearray, most: Mapping[int, Most]) -> Head:
    """Returns a head of the kinds ``most``. Raises TransferError."""
    parsed = Head(*HEAD.unpack(head))
    if parsed.kind not in most or head[1:4] != b"\0\0\0":
        raise TransferError(
            f"frame: kind {bytes(head[:4]).hex()} is not known; both ends must run the same version"
        )
    limit = most[parsed.kind]
    if parsed.control > limit.control:
        raise TransferError(
            f"frame: {parsed.control} bytes of control, at most {limit.control} are taken; "
            f"ask for less at a time"
        )
    if parsed.payload > limit.payload:
        raise TransferError(
            f"frame: {parsed.payload} bytes of payload, at most {limit.payload} are taken; "
            f"send less at a time"
        )
    return parsed


def advance(pending: list[memoryview], count: int) -> None:
    """Take the first ``count`` bytes off ``pending``, in place."""
    if count == sum(map(len, pending)):
        return pending.clear()
    full = 0
    while full < len(pending) and count >= len(pending[full]):
        count -= len(pending[full])
        full += 1
    del pending[:full]
    if count:
        pending[0] = pending[0][count:]
