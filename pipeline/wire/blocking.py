"""The wire for threads: proven connections, their server, and frames (``frames.py``) on them.

A connection is plain TCP after its proof (``handshake.py``), or TLS from its first byte.
"""

from __future__ import annotations

import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import msgpack
import structlog

from pipeline.wire.frames import (
    HEAD,
    MESSAGE,
    MESSAGE_BYTES,
    Head,
    Most,
    TransferError,
    advance,
    parse_head,
)
from pipeline.wire.handshake import (
    ANSWER,
    HELLO,
    HELLO_SECONDS,
    ClientHandshake,
    ServerHandshake,
    Unproven,
    check_secret,
)

log = structlog.get_logger()

PIECE = 2**22  # bytes that are received at once


class BlockingStream:
    """One end of a proven connection.

    ``timeout``: seconds for which it waits for the other end, each time.
    """

    def __init__(self, sock: socket.socket, timeout: float) -> None:
        self._sock = sock
        self._tls = isinstance(sock, ssl.SSLSocket)
        self._flags = 0 if self._tls else socket.MSG_WAITALL
        sock.settimeout(timeout)
        # the kernel keeps the deadline: Python's own costs a call before each piece
        if not self._tls:
            sock.settimeout(None)
            for direction in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                sock.setsockopt(
                    socket.SOL_SOCKET,
                    direction,
                    struct.pack("@ll", int(timeout), int(timeout % 1 * 1e6)),
                )
        with suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @property
    def own_address(self) -> str:
        """The address of this end."""
        return str(self._sock.getsockname()[0])

    def send_frame(
        self, kind: int, control: bytes = b"", payload: bytes | memoryview = b""
    ) -> None:
        """Send a frame, ``payload`` from where it lies. Raises OSError."""
        head = HEAD.pack(kind, len(control), len(payload)) + control
        pending = [memoryview(head)]
        if payload:
            pending.append(memoryview(payload))
        try:
            while pending:
                if self._tls:
                    self._sock.sendall(pending.pop(0))
                else:
                    advance(pending, self._sock.sendmsg(pending))
        except BlockingIOError:
            raise TimeoutError("the other end takes nothing any more") from None

    def receive_head(self, most: Mapping[int, Most]) -> Head:
        """Returns the head of the next frame, one of the kinds ``most``; what it announces is to be
        received next. Raises OSError, and TransferError for any other head."""
        return parse_head(self.receive(HEAD.size), most)

    def receive_into(self, memory: memoryview) -> None:
        """Fill ``memory``. Raises ``ConnectionError`` when the other end closes before."""
        at = 0
        while at < len(memory):
            try:
                count = self._sock.recv_into(memory[at : at + PIECE], 0, self._flags)
            except BlockingIOError:
                raise TimeoutError("the other end has fallen silent") from None
            if not count:
                raise ConnectionError("the other end closed the connection")
            at += count

    def send_message(self, message: Any) -> None:
        self.send_frame(MESSAGE, msgpack.packb(message))

    def receive_message(self) -> Any:
        """Returns the next message. Raises OSError, and TransferError for bytes that are none."""
        head = self.receive_head({MESSAGE: Most(control=MESSAGE_BYTES)})
        try:
            return msgpack.unpackb(self.receive(head.control))
        except ValueError as error:
            raise TransferError(f"message: cannot be read ({error})") from None

    def close(self) -> None:
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()

    def receive(self, count: int) -> bytearray:
        """Returns the next ``count`` bytes. Raises OSError."""
        data = bytearray(count)
        self.receive_into(memoryview(data))
        return data


class BlockingServer:
    """Listens on a free port of ``host`` alone; ``serve`` gets each proven connection to
    ``service``, in a thread of its own. Raises ``OSError`` where ``host`` is no address of this
    machine."""

    def __init__(
        self,
        host: str,
        secret: bytes,
        service: bytes,
        serve: Callable[[BlockingStream], None],
        *,
        timeout: float,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._secret = check_secret(secret)
        self._service = service
        self._serve = serve
        self._timeout = timeout
        self._tls = tls
        family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        self._listening = socket.create_server(address[:2], family=family, backlog=128)
        self.address: tuple[str, int] = self._listening.getsockname()[:2]
        self._unproven = Unproven[socket.socket]()
        self._turn = threading.Lock()
        self._closed = False
        self._accepting = threading.Thread(
            target=self._accept, name=f"{service.decode()}-asked", daemon=True
        )
        self._accepting.start()

    def close(self) -> None:
        """Take no more connections; those that are proven go on."""
        self._closed = True
        with suppress(OSError):  # wakes the thread that waits for one
            socket.create_connection(self.address, timeout=HELLO_SECONDS).close()
        self._accepting.join()
        self._listening.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                sock, _ = self._listening.accept()
            except OSError as error:  # no descriptor is free, or the other end is gone already
                log.warning("a connection could not be accepted", reason=str(error))
                time.sleep(0.1)
                continue
            with self._turn:
                oldest = self._unproven.add(sock)
            if oldest is not None:
                with suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)
            threading.Thread(
                target=self._run_connection,
                args=(sock,),
                name=f"{self._service.decode()}-sent",
                daemon=True,
            ).start()

    def _run_connection(self, sock: socket.socket) -> None:
        try:
            try:
                proven = self._greet(sock)
            finally:
                with self._turn:
                    self._unproven.discard(sock)
        except OSError as error:
            log.debug(
                "a connection was dropped before it proved the run's secret", reason=str(error)
            )
            sock.close()
            return
        peer = BlockingStream(proven, self._timeout)
        try:
            self._serve(peer)
        finally:
            peer.close()

    def _greet(self, sock: socket.socket) -> socket.socket:
        """Do the server's part of the handshake, and return the socket. Raises OSError."""
        deadline = time.monotonic() + HELLO_SECONDS
        sock.settimeout(HELLO_SECONDS)
        if self._tls is not None:
            sock = self._tls.wrap_socket(sock, server_side=True)
        handshake = ServerHandshake(self._secret, self._service)
        sock.sendall(handshake.hello)
        sock.sendall(handshake.welcome(_received(sock, ANSWER.size, deadline)))
        return sock


def connect(
    address: tuple[str, int],
    secret: bytes,
    service: bytes,
    *,
    connecting: float,
    timeout: float,
    tls: ssl.SSLContext | None = None,
) -> BlockingStream:
    """A proven connection to the :class:`BlockingServer` of ``service`` at ``address``, made within
    ``connecting`` seconds. Raises ``OSError``, and :class:`ProofRefused` when what answers there
    does not know the secret."""
    handshake = ClientHandshake(check_secret(secret), service, str(address))
    deadline = time.monotonic() + connecting
    sock = socket.create_connection(address, timeout=connecting)
    try:
        if tls is not None:
            sock = tls.wrap_socket(sock, server_hostname=address[0])
        answer = handshake.answer(_received(sock, HELLO.size, deadline))
        try:
            sock.sendall(answer)
            welcome = _received(sock, handshake.welcome_bytes, deadline)
        except ConnectionError:
            raise handshake.hung_up() from None
        handshake.opened(welcome)
        return BlockingStream(sock, timeout)
    except BaseException:
        sock.close()
        raise


def _received(sock: socket.socket, count: int, deadline: float) -> bytes:
    """Returns exactly ``count`` bytes of a handshake. Raises ConnectionError, TimeoutError."""
    data = bytearray()
    while len(data) < count:
        seconds = deadline - time.monotonic()
        if seconds <= 0:
            raise TimeoutError("the handshake took too long")
        sock.settimeout(seconds)
        part = sock.recv(count - len(data))
        if not part:
            raise ConnectionError("the other end closed the connection")
        data += part
    return bytes(data)
