"""The handshake of every connection between nodes: both ends prove that they know the run's secret
before either reads anything else.

    client                                                server
      connect ─────────────────────────────────────────▶  accept   (TLS first, where the recipe has certificates)
      ◀──────────── hello: magic, version, service, nonce
      answer: nonce, HMAC("client", all so far) ───────▶  compare, else close
      ◀────────────────── welcome: body, HMAC("server", all so far)
      compare, else close
      frames, both ways (``frames.py``)

Before the proof a server reads 64 bytes, and a client as many as its service's hello and welcome
have; a nonce of each end makes each proof good for one connection. The service is part of the
proof: what one service of a run was told opens no other one. Only TLS protects against a third
party that reads or changes the packets that follow.

This module has the bytes alone. ``stream.py`` moves them for asyncio, ``blocking.py`` for threads.
"""

from __future__ import annotations

import hmac
import os
import struct
from typing import Generic, TypeVar

VERSION = 2
MAGIC = b"ADKW"
HELLO = struct.Struct("<4sHxx16s32s")  # magic, version, service, nonce
ANSWER = struct.Struct("<32s32s")  # nonce, proof
PROOF_BYTES = 32

HELLO_SECONDS = 5.0  # for all of a handshake
UNPROVEN = 64  # connections that have not proven the secret; one more closes the oldest of them
_MIN_SECRET = 16

T = TypeVar("T")


class ProofRefused(ConnectionError):
    """The other end has not proven that it knows the run's secret, or is no such service."""


class HungUp(ProofRefused):
    """The server closed the connection in answer to our proof."""


class ServerHandshake:
    """The server's end: send :attr:`hello`, receive an ``ANSWER``, send the :meth:`welcome`.

    ``service`` names what is served, in at most 16 bytes.
    """

    def __init__(self, secret: bytes, service: bytes) -> None:
        self._secret = secret
        self.hello = HELLO.pack(MAGIC, VERSION, service, os.urandom(32))

    def welcome(self, answer: bytes, body: bytes = b"") -> bytes:
        """Returns ``body`` and our own proof. Raises ProofRefused for a wrong ``answer``."""
        nonce, client_proof = ANSWER.unpack(answer)
        expected = _proof(self._secret, b"client", self.hello, nonce)
        if not hmac.compare_digest(client_proof, expected):
            raise ProofRefused("a wrong proof came")
        return body + _proof(self._secret, b"server", self.hello, answer, body)


class ClientHandshake:
    """The client's end: receive a ``HELLO``, send the :meth:`answer`, receive the welcome, whose
    ``body_bytes`` :meth:`opened` gives.

    ``where`` names the server in errors.
    """

    def __init__(self, secret: bytes, service: bytes, where: str, body_bytes: int = 0) -> None:
        self._secret = secret
        self._service = service
        self._where = where
        self._sent = b""
        self.welcome_bytes = body_bytes + PROOF_BYTES

    def answer(self, hello: bytes) -> bytes:
        """Returns our proof. Raises ProofRefused for a ``hello`` of something else."""
        magic, version, service, _ = HELLO.unpack(hello)
        if magic == MAGIC and version != VERSION:
            raise ProofRefused(
                f"{self._where}: speaks version {version}, we speak {VERSION}; "
                f"install the same release on both nodes"
            )
        if magic != MAGIC or service.rstrip(b"\0") != self._service:
            raise ProofRefused(
                f"{self._where}: what answers there serves no {self._service.decode()}; "
                f"check host, port and TLS"
            )
        nonce = os.urandom(32)
        answer = nonce + _proof(self._secret, b"client", hello, nonce)
        self._sent = hello + answer
        return answer

    def opened(self, welcome: bytes) -> bytes:
        """Returns the body of ``welcome``. Raises ProofRefused for a wrong proof."""
        body = welcome[:-PROOF_BYTES]
        expected = _proof(self._secret, b"server", self._sent, body)
        if not hmac.compare_digest(welcome[-PROOF_BYTES:], expected):
            raise ProofRefused(
                f"{self._where}: does not prove that it knows the secret; another program "
                f"answers there, or set the secret that its server was started with"
            )
        return body

    def hung_up(self) -> HungUp:
        """Returns the error for a connection that ended where the welcome was to come."""
        return HungUp(
            f"{self._where}: hung up on our proof, which another secret makes it do; "
            f"set the secret that its server was started with"
        )


class Unproven(Generic[T]):
    """Connections that have not proven the secret yet, the oldest first, at most ``most``.

    A client that knows the secret proves it within a round trip, so the oldest is the least likely
    to.
    """

    def __init__(self, most: int = UNPROVEN) -> None:
        self._most = most
        self._connections = dict[T, None]()

    def __len__(self) -> int:
        return len(self._connections)

    def add(self, connection: T) -> T | None:
        """Add ``connection``. Returns the oldest when there is one too many: close that."""
        self._connections[connection] = None
        if len(self._connections) <= self._most:
            return None
        oldest = next(iter(self._connections))
        del self._connections[oldest]
        return oldest

    def discard(self, connection: T) -> None:
        self._connections.pop(connection, None)


def check_secret(secret: bytes) -> bytes:
    """Returns ``secret``. Raises ValueError for one that is no bytes, or too short."""
    if not isinstance(secret, bytes) or len(secret) < _MIN_SECRET:
        given = f"{len(secret)} bytes" if isinstance(secret, bytes) else type(secret).__name__
        raise ValueError(
            f"secret: is {given}, must be {_MIN_SECRET} bytes or more; make one with "
            f"secrets.token_bytes(32) "
            "and give it to every node"
        )
    return secret


def _proof(secret: bytes, side: bytes, *messages: bytes) -> bytes:
    """Returns the HMAC of one side of the handshake over all messages so far."""
    return hmac.digest(secret, side + b"".join(messages), "sha256")
