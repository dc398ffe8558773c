"""How the bytes of a version travel between nodes: in a chain, each node sending on what it has
while the rest arrives.

    trainer ── pieces ──▶ node A ── pieces ──▶ node B ── …      the trainer's :class:`Chain` gives each node its sender

N nodes have a version after bytes / bandwidth + (N - 1) · piece / bandwidth, and each link carries
it once. A sender that waits for its own bytes sends a sign of life each second, so that silence
means that it has failed, and not one before it.

Where both ends of a link have an older version of the same layout, a piece is sent as its changes
from that one. Each link decides for itself, and the bytes that a node has in the end are the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from pipeline.wire.blocking import BlockingStream
from pipeline.wire.frames import Most, TransferError
from stages.weights.published import Published
from stages.weights.transport.changes import apply_changes, changes

PIECE_BYTES = 2**20  # that are sent on at once
ALIVE_SECONDS = 1.0  # between two signs of life
SILENT_SECONDS = 5.0  # without one, a node counts as failed
AVOIDED_SECONDS = 60.0  # for which a node that has failed sends to no other node
SERVICE = b"weights"
# kinds of frames: a sign of life, the bytes of a piece, a piece as its changes
ALIVE = 1
WHOLE = 2
CHANGES = 3

Address: TypeAlias = tuple[str, int]


class Piece(NamedTuple):
    bucket: int
    offset: int
    nbytes: int
    is_last: bool  # of its bucket


def pieces_of(published: Published, source: int, sources: int) -> list[Piece]:
    """Returns what one of ``sources`` processes sends of a version, in order: of each ``sources``
    buckets one."""
    return [
        Piece(bucket, offset + at, min(PIECE_BYTES, nbytes - at), at + PIECE_BYTES >= nbytes)
        for bucket, (offset, nbytes, _) in enumerate(published.buckets)
        if bucket % sources == source
        for at in range(0, nbytes, PIECE_BYTES)
    ]


class Chain:
    """The nodes that receive each version, in the order in which they asked for it.

    Not thread-safe.
    """

    def __init__(self) -> None:
        self._nodes: dict[str, list[Address]] = {}
        self._failed: dict[Address, float] = {}

    def sender_to(
        self, node: Address | None, version: str, failed: Sequence[Address]
    ) -> Address | None:
        """Returns the node that sends ``version`` to ``node`` (None: one that other nodes cannot
        reach); None: the trainer does. ``failed``: senders that ``node`` has tried. After two of
        them it gets the trainer."""
        now = time.monotonic()
        self._failed.update(dict.fromkeys(failed, now))
        nodes = self._nodes.setdefault(version, [])
        before = nodes[: nodes.index(node)] if node in nodes else nodes[:]
        if node is not None and node not in nodes:
            nodes.append(node)
        usable = (
            one
            for one in reversed(before)
            if now - self._failed.get(one, -AVOIDED_SECONDS) >= AVOIDED_SECONDS
        )
        return None if len(failed) > 1 else next(usable, None)

    def forget(self, version: str) -> None:
        self._nodes.pop(version, None)


def send_pieces(
    peer: BlockingStream,
    memory: np.ndarray,
    pieces: Sequence[Piece],
    first: int,
    wait: Callable[[int, float], bool] = lambda number, seconds: True,
    base: Callable[[], np.ndarray | None] = lambda: None,
) -> None:
    """Send ``pieces`` of ``memory`` from number ``first`` on.

    ``wait(number, seconds)`` returns whether that one is there within ``seconds``; ``base`` the
    bytes of the older version that the other end has, and None once they are no longer that
    version.
    """
    whole = -1  # the bucket of which too much has changed
    for number in range(first, len(pieces)):
        while not wait(number, ALIVE_SECONDS):
            peer.send_frame(ALIVE)
        piece = pieces[number]
        new = _of(piece, memory)
        old = None if piece.bucket == whole else base()
        packed = None if old is None else changes(new, _of(piece, old))
        if packed is None or base() is None:
            whole = piece.bucket
            peer.send_frame(WHOLE, payload=new.data)
        else:
            peer.send_frame(CHANGES, payload=packed)


def receive_pieces(
    peer: BlockingStream,
    memory: np.ndarray,
    pieces: Sequence[Piece],
    first: int,
    timeout: float,
    base: np.ndarray | None = None,
) -> Iterator[int]:
    """Fill ``memory``, and yield the number of each piece when it is there.

    ``base``: the bytes of the older version that the sender knows of. Raises OSError, also when the
    other end has had nothing but signs of life for ``timeout`` seconds, ValueError and
    TransferError.
    """
    for number in range(first, len(pieces)):
        since = time.monotonic()
        piece = pieces[number]
        most = {ALIVE: Most(), WHOLE: Most(payload=piece.nbytes)}
        if base is not None:
            most[CHANGES] = Most(payload=piece.nbytes)
        while (head := peer.receive_head(most)).kind == ALIVE:
            if time.monotonic() - since > timeout:
                raise TimeoutError(f"the sender has had nothing to send for {timeout:g} s")
        if base is None or head.kind == WHOLE:
            if head.payload != piece.nbytes:
                raise TransferError(
                    f"frame: a piece of {head.payload} bytes, must be {piece.nbytes}; both ends "
                    f"must run the same version"
                )
            peer.receive_into(_of(piece, memory).data)
        else:
            packed = bytearray(head.payload)
            peer.receive_into(memoryview(packed))
            apply_changes(_of(piece, memory), _of(piece, base), packed)
        yield number


def _of(piece: Piece, memory: np.ndarray) -> np.ndarray:
    return memory[piece.offset :][: piece.nbytes]
