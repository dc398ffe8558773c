"""One handshake serves warehouses, weights and ranks, and what one of them was told opens no other."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

from pipeline.data.arena import Arena
from pipeline.warehouse.requests import WELCOME, schema_digest
from pipeline.warehouse.server import WarehouseServer
from pipeline.wire import blocking
from pipeline.wire.blocking import BlockingServer, BlockingStream, connect
from pipeline.wire.frames import HEAD, MESSAGE, MESSAGE_BYTES, Most, TransferError
from pipeline.wire.handshake import (
    ANSWER,
    HELLO,
    PROOF_BYTES,
    ClientHandshake,
    ProofRefused,
    ServerHandshake,
    Unproven,
)
from tests.pipeline.wire.served import SCHEMA, SECRET, remote


def echo(peer: BlockingStream) -> None:
    """Send each message back."""
    try:
        while True:
            peer.send_message(peer.receive_message())
    except (OSError, TransferError):
        return


@pytest.fixture
def ranks() -> Iterator[BlockingServer]:
    server = BlockingServer("127.0.0.1", SECRET, b"ranks", echo, timeout=5.0)
    yield server
    server.close()


def raw(server: BlockingServer) -> tuple[socket.socket, bytes]:
    """A connection without a proof, and the hello that came on it."""
    sock = socket.create_connection(server.address, timeout=10.0)
    return sock, sock.recv(HELLO.size, socket.MSG_WAITALL)


def hung_up(sock: socket.socket) -> bool:
    try:
        return not sock.recv(1)
    except ConnectionResetError:
        return True


def test_a_client_of_one_service_tells_another_one_nothing(ranks: BlockingServer) -> None:
    with pytest.raises(ProofRefused, match="serves no weights"):
        connect(ranks.address, SECRET, b"weights", connecting=5.0, timeout=5.0)


def test_a_proof_for_one_service_opens_no_other(ranks: BlockingServer) -> None:
    """A process in between that gives a client of the weights the hello of the ranks, under the
    name of the weights."""
    sock, hello = raw(ranks)
    with sock:
        magic, version, _, nonce = HELLO.unpack(hello)
        renamed = HELLO.pack(magic, version, b"weights", nonce)
        sock.sendall(ClientHandshake(SECRET, b"weights", "in between").answer(renamed))
        assert hung_up(sock)


async def test_a_warehouse_client_is_told_that_ranks_are_no_warehouse(
    ranks: BlockingServer,
) -> None:
    with pytest.raises(TransferError, match="serves no warehouse"):
        await remote(ranks.address).copy_in(0, memoryview(bytes(8)))


async def test_threads_and_asyncio_speak_one_handshake(arena: Arena) -> None:
    """The warehouse's server in asyncio believes a proof that a thread sends."""

    def prove(address: tuple[str, int]) -> bytes:
        handshake = ClientHandshake(SECRET, b"warehouse", str(address), WELCOME.size)
        with socket.create_connection(address, timeout=10.0) as sock:
            sock.sendall(handshake.answer(sock.recv(HELLO.size, socket.MSG_WAITALL)))
            return handshake.opened(sock.recv(handshake.welcome_bytes, socket.MSG_WAITALL))

    async with WarehouseServer(arena, SCHEMA, secret=SECRET) as server:
        welcome = await asyncio.to_thread(prove, (server.address[0], server.address[1]))
    assert WELCOME.unpack(welcome)[4] == schema_digest(SCHEMA)


def test_the_servers_proof_covers_the_body_of_its_welcome() -> None:
    server = ServerHandshake(SECRET, b"ranks")
    client = ClientHandshake(SECRET, b"ranks", "there", body_bytes=4)
    welcome = server.welcome(client.answer(server.hello), b"body")
    assert len(welcome) == client.welcome_bytes == 4 + PROOF_BYTES
    assert client.opened(welcome) == b"body"
    with pytest.raises(ProofRefused, match="does not prove"):
        client.opened(b"B" + welcome[1:])


def test_a_client_that_dribbles_its_answer_is_dropped_in_time(
    ranks: BlockingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each byte came in time, and the handshake never ended."""
    monkeypatch.setattr(blocking, "HELLO_SECONDS", 0.3)
    sock, hello = raw(ranks)
    answer = ClientHandshake(SECRET, b"ranks", "").answer(hello)
    assert len(answer) == ANSWER.size
    sent = 0
    with sock, suppress(ConnectionError):
        for byte in answer:
            sock.sendall(bytes([byte]))
            time.sleep(0.05)
            sent += 1
    assert sent < ANSWER.size


@pytest.mark.parametrize(
    ("head", "message"),
    [
        (HEAD.pack(MESSAGE, MESSAGE_BYTES + 1, 0), "65537 bytes of control, at most 65536"),
        (HEAD.pack(MESSAGE, 2**32 - 1, 0), "at most 65536 are taken"),
        (HEAD.pack(MESSAGE, 1, 2**63), "bytes of payload, at most 0 are taken"),
        (HEAD.pack(7, 1, 0), "kind 07000000 is not known"),
        (b"\xff\1" + HEAD.pack(MESSAGE, 1, 0)[2:], "kind ff010000 is not known"),
        (HEAD.pack(MESSAGE, 1, 0) + b"\xc1", "message: cannot be read"),
    ],
)
def test_a_frame_is_refused_before_anything_is_allocated_for_it(head: bytes, message: str) -> None:
    here, there = socket.socketpair()
    with here, there:
        there.sendall(head)
        with pytest.raises(TransferError, match=message):
            BlockingStream(here, 5.0).receive_message()


def test_a_payload_goes_from_and_to_where_it_lies() -> None:
    here, there = socket.socketpair()
    payload = bytes(range(256)) * (1 << 14)  # more than a socket's buffers hold
    memory = bytearray(len(payload))
    with here, there:
        sender = threading.Thread(
            target=BlockingStream(here, 20.0).send_frame, args=(9, b"of", memoryview(payload))
        )
        sender.start()
        receiver = BlockingStream(there, 20.0)
        head = receiver.receive_head({9: Most(control=2, payload=len(payload))})
        assert head == (9, 2, len(payload))
        assert receiver.receive(head.control) == b"of"
        receiver.receive_into(memoryview(memory))
        sender.join()
    assert memory == payload


def test_one_connection_too_many_closes_the_oldest_that_is_unproven() -> None:
    unproven = Unproven[str](most=2)
    assert [unproven.add(name) for name in "abc"] == [None, None, "a"]
    unproven.discard("b")
    assert [unproven.add("d"), unproven.add("e"), len(unproven)] == [None, "c", 2]
