"""The server of a warehouse: reads, writes and copies of other nodes, straight from and into the
arena."""

from __future__ import annotations

import asyncio
import socket
import ssl as tls
import struct
import time
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import structlog

from pipeline.data.arena import Arena, StaleHandle
from pipeline.data.blocks import BlockError, BlockReader, Found, Runs
from pipeline.data.columns import ColumnError, Schema
from pipeline.first_of import cancel_all
from pipeline.warehouse.requests import (
    MAX_MESSAGE,
    OK,
    REFUSED,
    SERVICE,
    STALE,
    WELCOME,
    CopyRequest,
    Limits,
    ReadRequest,
    Request,
    WriteRequest,
    parse_request,
    schema_digest,
)
from pipeline.wire.frames import HEAD, TransferError, parse_head
from pipeline.wire.handshake import ProofRefused, ServerHandshake, Unproven, check_secret
from pipeline.wire.stream import PIECE, SLICES, Stream

log = structlog.get_logger()

# Measured: copying a word costs 10 to 20 ns, a slice of the arena (made, sent and accounted for)
# 300 to 400 ns. So runs of at least so many words on average are sent from where they lie, shorter
# ones are copied together.
_SLICED = 32


def plan_reply(reader: BlockReader, schema: Schema, request: ReadRequest, limits: Limits) -> Found:
    """Where the bytes of a read's reply lie.

    Raises BlockError, ColumnError, StaleHandle, and TransferError for a reply that is larger than
    ``limits``.
    """
    found = reader.find(request.blocks, request.offsets, request.slots, schema.names(request.mask))
    nbytes = sum(
        runs.nbytes + (0 if offsets is None else offsets.nbytes) for offsets, runs in found
    )
    if nbytes > limits.nbytes:
        raise TransferError(
            f"read: {nbytes} bytes, at most {limits.nbytes} are sent at a time; ask for the rows "
            f"in parts"
        )
    return found


def reply_batches(reader: BlockReader, found: Found) -> Iterator[list[memoryview]]:
    """The payload of a reply, offsets and values column by column, in lists for one call of sendmsg
    each. Long runs are slices of the arena, short ones are copied together; only about ``PIECE``
    bytes of copies exist at a time."""
    batch = list[memoryview]()
    copied = 0
    for offsets, runs in found:
        if offsets is not None:
            batch.append(offsets.data.cast("B"))
        unit = runs.unit
        if runs.nbytes >= _SLICED * unit * len(runs.starts):
            starts = runs.starts.tolist()
            ends = (runs.starts + runs.lengths).tolist()
            for i in range(0, len(starts), SLICES):
                pairs = zip(starts[i : i + SLICES], ends[i : i + SLICES], strict=True)
                batch += [reader.memory[a:b] for a, b in pairs]
                if len(batch) >= SLICES:
                    yield batch
                    batch = []
                    copied = 0
            continue
        for piece in _copies(reader, runs, unit):
            batch.append(piece)
            copied += len(piece)
            if copied >= PIECE or len(batch) >= SLICES:
                yield batch
                batch = []
                copied = 0
    yield batch


def _copies(reader: BlockReader, runs: Runs, unit: int) -> Iterator[memoryview]:
    """``runs`` in pieces of about ``PIECE`` bytes; a longer run among them is a slice of the
    arena."""
    ends = np.cumsum(runs.lengths)
    first = 0
    copied = 0
    while first < len(ends):
        last = max(first + 1, int(np.searchsorted(ends, copied + PIECE // 8 * unit, "right")))
        part = Runs(runs.starts[first:last], runs.lengths[first:last])
        if last == first + 1:
            yield reader.memory[int(part.starts[0]) : int(part.starts[0] + part.lengths[0])]
        else:
            yield reader.gather(part, unit).data.cast("B")
        first = last
        copied = int(ends[last - 1])


class WarehouseServer:
    """Serves ``arena`` to clients that prove that they know ``secret``.

        async with WarehouseServer(arena, schema, secret=secret, host="0.0.0.0") as server:
            print(server.address)

    ``bytes_sent`` and ``bytes_received`` count all bytes above TCP (inside TLS), ``payload_sent``
    and ``payload_received`` those of column values and offsets alone; ``connections`` are those
    open now.
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
        self._arena = arena
        self._schema = schema
        self._secret = check_secret(secret)
        self._ssl = ssl
        self.address = (host, port)
        self.limits = limits or Limits()
        self._reader = BlockReader(arena.slice(0, arena.nbytes), schema)
        self._serving: asyncio.Task[None] | None = None
        self._open = set[Stream]()
        self._handshakes = Unproven[asyncio.Task[None]](self.limits.handshakes)
        self._sent = self._received = self.payload_sent = self.payload_received = 0

    @property
    def connections(self) -> int:
        return len(self._open)

    @property
    def bytes_sent(self) -> int:
        return self._sent + sum(peer.sent for peer in self._open)

    @property
    def bytes_received(self) -> int:
        return self._received + sum(peer.received for peer in self._open)

    async def start(self) -> tuple[str, int]:
        """Listen; returns the address, with the port that the system chose when it was 0."""
        addresses = await asyncio.get_running_loop().getaddrinfo(
            *self.address, type=socket.SOCK_STREAM
        )
        listening = socket.create_server(self.address, family=addresses[0][0], backlog=128)
        listening.setblocking(False)
        self.address = listening.getsockname()[:2]
        self._serving = asyncio.create_task(
            self._serve(listening), name=f"warehouse at {self.address}"
        )
        return self.address

    async def close(self) -> None:
        """Stop listening and close every connection."""
        await cancel_all(self._serving)
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
                        stream = Stream(sock)
                    except OSError as error:  # no file descriptor is left, or the peer has gone
                        log.warning("a connection could not be accepted", error=str(error))
                        await asyncio.sleep(0.1)
                        continue
                    self._open.add(stream)
                    task = tasks.create_task(self._run_connection(stream, peer))
                    oldest = self._handshakes.add(task)
                    task.add_done_callback(self._handshakes.discard)
                    if oldest is not None:
                        oldest.cancel()
                        log.warning(
                            "handshake ended: too many at once", handshakes=self.limits.handshakes
                        )

    async def _run_connection(self, stream: Stream, peer: object) -> None:
        """One connection, from its handshake to its end. An error ends this connection alone."""
        task = asyncio.current_task()
        assert task is not None
        try:
            async with asyncio.timeout(self.limits.hello_seconds):
                await stream.start_tls(self._ssl, None)
                handshake = ServerHandshake(self._secret, SERVICE)
                await stream.greet_client(handshake, self._welcome)
                self._handshakes.discard(task)
            if self.connections - len(self._handshakes) > self.limits.connections:
                log.warning(
                    "connection refused: too many", peer=peer, connections=self.limits.connections
                )
                return
            while await self._answer_one(stream):
                pass
        except ProofRefused as error:
            log.warning("handshake refused", peer=peer, reason=str(error))
        except (OSError, TimeoutError) as error:
            log.info("connection ended", peer=peer, error=f"{type(error).__name__}: {error}")
        except Exception:
            log.exception("connection failed", peer=peer)
        finally:
            self._open.remove(stream)
            self._sent = self._sent + stream.sent
            self._received = self._received + stream.received
            stream.close()

    def _welcome(self) -> bytes:
        """What a client learns once it has proven that it knows the secret."""
        return WELCOME.pack(
            time.monotonic(),
            self.limits.rows,
            self.limits.nbytes,
            self._arena.nbytes,
            schema_digest(self._schema),
        )

    async def _answer_one(self, stream: Stream) -> bool:
        """Take one request and send its reply. Returns False when the connection must end."""
        try:
            async with asyncio.timeout(self.limits.idle_seconds):
                head = await stream.receive(HEAD.size)
        except ConnectionResetError:
            return False  # the client closed it
        in_step = False
        try:
            kind, size, payload = parse_head(head, self.limits.requests)
            async with asyncio.timeout(self.limits.seconds(size)):
                control = await stream.receive(size)
            in_step = payload == 0  # the payload of a refused request is not waited for
            request = parse_request(
                kind, control, payload, self._schema, self._arena.nbytes, self.limits
            )
            async with asyncio.timeout(self.limits.seconds(payload)):
                reply, size, batches = await self._execute(stream, request)
        except (TransferError, BlockError, ColumnError, StaleHandle) as error:
            log.warning("request refused", error=str(error))
            message = str(error).encode()[:MAX_MESSAGE]
            status = STALE if isinstance(error, StaleHandle) else REFUSED
            async with asyncio.timeout(self.limits.frame_seconds):
                await stream.send(HEAD.pack(status, len(message), 0) + message)
            if not in_step:
                await stream.linger(min(2.0, self.limits.frame_seconds))
            return in_step
        self.payload_received += payload
        async with asyncio.timeout(self.limits.seconds(size)):
            first = [HEAD.pack(OK, len(reply), size) + reply]
            for batch in batches:
                await stream.send(*first, *batch)
                first = []
        self.payload_sent += size
        return True

    async def _execute(
        self, stream: Stream, request: Request
    ) -> tuple[bytes, int, Iterable[list[memoryview]]]:
        """Returns the reply: control, bytes of payload, and the payload in batches.

        Receives the bytes of a write.
        """
        if isinstance(request, ReadRequest):
            found = plan_reply(self._reader, self._schema, request, self.limits)
            sizes = [runs.nbytes for _, runs in found]
            offsets = sum(offsets.nbytes for offsets, _ in found if offsets is not None)
            return (
                struct.pack(f"<{len(sizes)}Q", *sizes),
                sum(sizes) + offsets,
                reply_batches(self._reader, found),
            )
        if isinstance(request, CopyRequest):
            memory = self._arena.slice(request.offset, request.nbytes)
            await stream.receive_into(memory, check=_check_deadline(request.expires))
        else:
            await self._write(stream, request)
        return b"", 0, [[]]

    async def _write(self, stream: Stream, request: WriteRequest) -> None:
        at = request.offset // 8
        header = request.header
        words = self._reader.words
        present = words[at : at + len(header)]
        # the client repeats a write, because it did not receive the answer
        if (present == header).all():
            await stream.discard(request.payload)
            return
        check = _check_deadline(request.expires)
        check()
        present[0] = 0  # from here on readers see no block at this place
        await stream.receive_into(
            self._arena.slice(request.offset + header.nbytes, request.payload), check=check
        )
        for bit, offsets_at, _, size in header[4:].reshape(-1, 4).tolist():
            column = self._schema.columns[bit]
            if column.shape is None:
                begin = at + offsets_at // 8
                bounds = words[begin : begin + int(header[2]) + 1]
                if (
                    bounds[0] != 0
                    or bounds[-1] * column.itemsize != size
                    or (bounds[1:] < bounds[:-1]).any()
                ):
                    raise TransferError(
                        f"write: offsets of column {column.name!r} do not divide its {size} bytes "
                        f"into rows; pack it again"
                    )
        present[1:] = header[1:]
        present[0] = header[0]


def _check_deadline(expires: float) -> Callable[[], None]:
    """A function that raises TransferError after ``expires``, server's clock."""

    def check() -> None:
        if time.monotonic() > expires:
            raise TransferError("write: came after its client's deadline; give writes more time")

    return check
