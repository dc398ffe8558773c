"""The wire for asyncio: a connected socket, plain or TLS, its handshake (``handshake.py``), and bytes
that move straight between the socket and the caller's memory."""

from __future__ import annotations

import asyncio
import socket
import ssl as tls
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from pipeline.wire.frames import advance
from pipeline.wire.handshake import ANSWER, HELLO, ClientHandshake, ServerHandshake

T = TypeVar("T")

# buffers after which a batch is sent; it may have twice as many then, and sendmsg takes 1024 on
# Linux
SLICES = 400
PIECE = 1 << 20  # bytes gathered at a time, and received before other tasks get a turn
_TLS_PIECE = 1 << 18
_WAKE = 1 << 20  # bytes that a receiver of many lets gather before it is woken


class Stream:
    """The connected ``sock`` for one task at a time.

    It keeps no bytes, and its callers set the deadline.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._loop = asyncio.get_running_loop()
        self.sent = self.received = self._moved = 0
        self._woken_at = 1
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    async def start_tls(self, ssl: tls.SSLContext | None, server: str | None) -> None:
        """Use TLS, unless ``ssl`` is None.

        ``server``: the name to check its certificate against; None for a server.
        """
        if ssl is not None:
            self.sock = wrapped = ssl.wrap_socket(
                self.sock,
                server_side=server is None,
                do_handshake_on_connect=False,
                server_hostname=server,
            )
            await self._until(wrapped.do_handshake)

    async def greet_client(self, handshake: ServerHandshake, body: Callable[[], bytes]) -> None:
        """Do the server's part of the handshake; ``body`` gives that of the welcome when the answer
        is there. Raises ProofRefused."""
        await self.send(handshake.hello)
        answer = bytes(await self.receive(ANSWER.size))
        await self.send(handshake.welcome(answer, body()))

    async def greet_server(self, handshake: ClientHandshake) -> bytes:
        """Do the client's part of the handshake, and return the body of the server's welcome.

        Raises ProofRefused.
        """
        answer = handshake.answer(bytes(await self.receive(HELLO.size)))
        try:
            await self.send(answer)
            welcome = bytes(await self.receive(handshake.welcome_bytes))
        except ConnectionError:
            raise handshake.hung_up() from None
        return handshake.opened(welcome)

    async def _until(self, step: Callable[[], T], *, sends: bool = False) -> T:
        """``step``, once the socket is ready for it.

        TLS may have to read in order to send, and the other way round.
        """
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
        loop = self._loop
        descriptor = self.sock.fileno()
        add, remove = (
            (loop.add_writer, loop.remove_writer)
            if to_send
            else (loop.add_reader, loop.remove_reader)
        )
        ready = loop.create_future()
        add(descriptor, lambda: None if ready.done() else ready.set_result(None))
        try:
            await ready
        finally:
            remove(descriptor)

    async def receive_into(
        self, *memories: memoryview, check: Callable[[], None] | None = None
    ) -> None:
        """Fill ``memories`` one after the other; ``check`` runs before each piece is taken.

        Raises ConnectionResetError at the stream's end.
        """
        pending = [memory for memory in memories if len(memory)]
        while pending:
            if check is not None:
                check()
            try:
                if len(pending) == 1 or isinstance(self.sock, tls.SSLSocket):
                    count = self.sock.recv_into(pending[0])
                else:
                    count = self.sock.recvmsg_into(pending[:SLICES])[0]
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
            advance(pending, count)
            await self._yield_after(count)

    def _wake_at(self, nbytes: int) -> None:
        """Have the kernel wake this task when ``nbytes`` are there (or no more will come): many
        small wake-ups cost more than the bytes. Not under TLS: the kernel does not see its records.
        """
        if nbytes != self._woken_at and not isinstance(self.sock, tls.SSLSocket):
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, nbytes)
            self._woken_at = nbytes

    async def _yield_after(self, moved: int) -> None:
        """Give other tasks (and deadlines) a turn every few pieces: a fast peer never makes this
        task wait."""
        self._moved += moved
        if self._moved >= 8 * PIECE:
            self._moved = 0
            await asyncio.sleep(0)

    async def receive(self, nbytes: int) -> bytearray:
        data = bytearray(nbytes)
        await self.receive_into(memoryview(data))
        return data

    async def discard(self, nbytes: int) -> None:
        scratch = memoryview(bytearray(min(nbytes, PIECE >> 2)))
        for at in range(0, nbytes, PIECE >> 2):
            await self.receive_into(scratch[: nbytes - at])

    async def send(self, *buffers: bytes | memoryview) -> None:
        """Send ``buffers``, about ``SLICES`` of them at most, one after the other."""
        pending = [
            buffer if isinstance(buffer, memoryview) else memoryview(buffer) for buffer in buffers
        ]
        while pending:
            if isinstance(self.sock, tls.SSLSocket):
                count = await self._until(
                    partial(self.sock.send, pending[0][:_TLS_PIECE]), sends=True
                )
            else:
                count = await self._until(partial(self.sock.sendmsg, pending), sends=True)
            self.sent += count
            advance(pending, count)
            await self._yield_after(count)

    def close(self) -> None:
        self.sock.close()

    async def linger(self, seconds: float) -> None:
        """Close so that what was sent arrives: with unread bytes here, the kernel would drop it at
        the other end."""
        try:
            self.sock.shutdown(socket.SHUT_WR)
            async with asyncio.timeout(seconds):
                await self.discard(1 << 62)
        except (OSError, TimeoutError):
            pass
        self.close()
