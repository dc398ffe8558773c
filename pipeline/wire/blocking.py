"""A blocking connection: both ends prove that they know the run's secret before either reads
anything else.

    connect ─────────────────────────────▶ accept
            ◀── hello: magic, version, nonce
    nonce, HMAC(secret, all so far) ─────▶ compare, else drop
            ◀── HMAC(secret, all so far)    compare, else drop
    messages (msgpack, small) and bytes, both ways

The same proof as the warehouse's, for threads. What follows the proof is
neither encrypted nor signed: where a third party could read or change packets, give TLS contexts.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
import ssl
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgpack
import structlog

from pipeline.warehouse.requests import check_secret, proof

log = structlog.get_logger()

HELLO_SECONDS = 5.0  # for all of a handshake
# connections that have not proven the secret yet; with one more the oldest is dropped
UNPROVEN = 32
MOST_MESSAGE = 2**16  # bytes
PIECE = 2**22  # bytes that are received at once
VERSION = 1
_MAGIC = b"ADKL"
_HELLO = struct.Struct("<4sH32s")  # magic, version, nonce
_LENGTH = struct.Struct("<I")
_PROOF = hashlib.sha256().digest_size
_NONCE = 32


class ProofRefused(ConnectionError):
    """The other end has not proven that it knows the secret."""


class SecretSocket:
    """One end of a proven connection.

    ``timeout``: seconds for which it waits for the other end, each time.
    """

    def __init__(self, sock: socket.socket, timeout: float) -> None:
        self._sock = sock
        self._flags = 0 if isinstance(sock, ssl.SSLSocket) else socket.MSG_WAITALL
        sock.settimeout(timeout)
        # the kernel keeps the deadline: Python's own costs a call before each piece
        if self._flags:
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

    def send_message(self, message: Any) -> None:
        packed = msgpack.packb(message)
        self._sock.sendall(_LENGTH.pack(len(packed)) + packed)

    def receive_message(self) -> Any:
        """Returns the next message. Raises ConnectionError, also for bytes that are no message."""
        (length,) = _LENGTH.unpack(_received(self._sock, _LENGTH.size))
        if length > MOST_MESSAGE:
            raise ConnectionError(
                f"a message of {length} bytes came, at most {MOST_MESSAGE} are taken"
            )
        try:
            return msgpack.unpackb(_received(self._sock, length))
        except ValueError as error:
            raise ConnectionError(f"a message came that cannot be read ({error})") from None

    def send(self, data: memoryview) -> None:
        try:
            self._sock.sendall(data)
        except BlockingIOError:
            raise TimeoutError("the other end takes nothing any more") from None

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

    def close(self) -> None:
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()


class SecretServer:
    """Listens on a free port of ``host`` alone; ``serve`` gets each proven connection, in a thread
    of its own. Raises ``OSError`` where ``host`` is no address of this machine."""

    def __init__(
        self,
        host: str,
        secret: bytes,
        serve: Callable[[SecretSocket], None],
        *,
        timeout: float,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._secret = check_secret(secret)
        self._serve = serve
        self._timeout = timeout
        self._tls = tls
        family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        self._listening = socket.create_server(address[:2], family=family, backlog=128)
        self.address: tuple[str, int] = self._listening.getsockname()[:2]
        self._unproven: deque[socket.socket] = deque()
        self._turn = threading.Lock()
        self._closed = False
        self._accepting = threading.Thread(target=self._accept, name="weights-asked", daemon=True)
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
                self._unproven.append(sock)
                dropped = self._unproven.popleft() if len(self._unproven) > UNPROVEN else None
            if dropped is not None:
                with suppress(OSError):
                    dropped.shutdown(socket.SHUT_RDWR)
            threading.Thread(
                target=self._greet, args=(sock,), name="weights-sent", daemon=True
            ).start()

    def _greet(self, sock: socket.socket) -> None:
        try:
            try:
                proven = _accepted(sock, self._secret, self._tls)
            finally:
                with self._turn, suppress(ValueError):
                    self._unproven.remove(sock)
        except OSError as error:
            log.debug(
                "a connection was dropped before it proved the run's secret", reason=str(error)
            )
            sock.close()
            return
        peer = SecretSocket(proven, self._timeout)
        try:
            self._serve(peer)
        finally:
            peer.close()


def connect(
    address: tuple[str, int],
    secret: bytes,
    *,
    connecting: float,
    timeout: float,
    tls: ssl.SSLContext | None = None,
) -> SecretSocket:
    """A proven connection to the :class:`SecretServer` at ``address``, made within ``connecting``
    seconds. Raises ``OSError``, and :class:`ProofRefused` when what answers there does not know the
    secret."""
    check_secret(secret)
    deadline = time.monotonic() + connecting
    sock = socket.create_connection(address, timeout=connecting)
    try:
        if tls is not None:
            sock = tls.wrap_socket(sock, server_hostname=address[0])
        hello = _received(sock, _HELLO.size, deadline)
        magic, version, _ = _HELLO.unpack(hello)
        if magic != _MAGIC or version != VERSION:
            raise ProofRefused(f"what answers at {address} is no trainer of this release")
        nonce = os.urandom(_NONCE)
        reply = nonce + proof(secret, b"engine", hello, nonce)
        sock.sendall(reply)
        try:
            given = _received(sock, _PROOF, deadline)
        except ConnectionError:
            raise ProofRefused(f"{address} hung up on the proof: it has another secret") from None
        if not hmac.compare_digest(given, proof(secret, b"trainer", hello, reply)):
            raise ProofRefused(
                f"what answers at {address} does not prove that it knows the run's secret"
            )
        return SecretSocket(sock, timeout)
    except BaseException:
        sock.close()
        raise


def _accepted(sock: socket.socket, secret: bytes, tls: ssl.SSLContext | None) -> socket.socket:
    """Do the server's part of the handshake, and return the socket. Raises OSError."""
    deadline = time.monotonic() + HELLO_SECONDS
    sock.settimeout(HELLO_SECONDS)
    if tls is not None:
        sock = tls.wrap_socket(sock, server_side=True)
    hello = _HELLO.pack(_MAGIC, VERSION, os.urandom(_NONCE))
    sock.sendall(hello)
    reply = _received(sock, _NONCE + _PROOF, deadline)
    if not hmac.compare_digest(reply[_NONCE:], proof(secret, b"engine", hello, reply[:_NONCE])):
        raise ProofRefused("a wrong proof came")
    sock.sendall(proof(secret, b"trainer", hello, reply))
    return sock


def _received(sock: socket.socket, count: int, deadline: float | None = None) -> bytes:
    """Returns exactly ``count`` bytes. Raises ConnectionError, TimeoutError."""
    out = bytearray()
    while len(out) < count:
        if deadline is not None:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError("the handshake took too long")
            sock.settimeout(left)
        try:
            part = sock.recv(count - len(out))
        except BlockingIOError:
            raise TimeoutError("the other end has fallen silent") from None
        if not part:
            raise ConnectionError("the other end closed the connection")
        out += part
    return bytes(out)
