"""Only a client that proves that it knows the secret may read or write."""

from __future__ import annotations

import asyncio
import os
import ssl
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.data.arena import Arena, WarehouseUnreachable
from pipeline.data.blocks import pack
from pipeline.data.columns import Schema
from pipeline.warehouse.requests import (
    Limits,
)
from pipeline.warehouse.server import WarehouseServer
from pipeline.wire.frames import TransferError
from pipeline.wire.handshake import ANSWER, HELLO, MAGIC, VERSION
from tests.pipeline.wire.served import (
    EIGHT,
    SCHEMA,
    SECRET,
    certificate,
    places,
    proxy,
    remote,
    until,
)


async def test_a_wrong_secret_raises_an_error_that_names_what_to_set(arena: Arena) -> None:
    async with WarehouseServer(arena, SCHEMA, secret=SECRET) as server:
        with pytest.raises(TransferError, match="set the secret that its server was started with"):
            await remote(server, secret=b"another secret of enough bytes").copy_in(0, EIGHT)
        await until(lambda: server.connections == 0)
        assert server.payload_sent == 0


@pytest.mark.parametrize("secret", [b"", b"short", "a string, no bytes", None])
async def test_no_secret_or_a_weak_one_is_refused_before_anything_listens(
    secret: Any, arena: Arena
) -> None:
    with pytest.raises(ValueError, match=r"secret: .* must be 16 bytes or more"):
        WarehouseServer(arena, SCHEMA, secret=secret)
    with pytest.raises(ValueError, match=r"secret: .* must be 16 bytes or more"):
        remote(("127.0.0.1", 1), secret=secret)


async def test_a_server_that_does_not_know_the_secret_is_not_believed() -> None:
    """The server must prove the secret too: here it sends the client's own proof back."""

    async def mirror(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HELLO.pack(MAGIC, VERSION, b"warehouse", bytes(32)))
        proof = (await reader.readexactly(ANSWER.size))[-32:]
        writer.write(struct.pack("<dQQQ32s32s", 0.0, 10, 10, 10, bytes(32), proof))
        await reader.read()
        writer.close()

    async with await asyncio.start_server(mirror, "127.0.0.1", 0) as imposter:
        with pytest.raises(TransferError, match="does not prove that it knows the secret"):
            await remote(imposter.sockets[0].getsockname()).copy_in(0, EIGHT)


@pytest.mark.parametrize(
    ("hello", "message"),
    [
        (HELLO.pack(b"HTTP", VERSION, b"warehouse", bytes(32)), "serves no warehouse"),
        (HELLO.pack(MAGIC, VERSION, b"weights", bytes(32)), "serves no warehouse"),
        (HELLO.pack(MAGIC, 1, b"warehouse", bytes(32)), f"speaks version 1, we speak {VERSION}"),
    ],
)
async def test_what_answers_must_speak_our_version(hello: bytes, message: str) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(hello)
        await reader.read()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as other:
        with pytest.raises(TransferError, match=message):
            await remote(other.sockets[0].getsockname()).copy_in(0, EIGHT)


async def test_another_schema_is_refused(arena: Arena) -> None:
    """Columns travel as bits: ends that number them differently would exchange them silently."""
    async with WarehouseServer(arena, SCHEMA, secret=SECRET) as server:
        with pytest.raises(TransferError, match="another schema"):
            await remote(server, Schema(SCHEMA.columns[::-1])).copy_in(0, EIGHT)


async def test_a_recorded_handshake_opens_nothing(arena: Arena) -> None:
    async with WarehouseServer(arena, SCHEMA, secret=SECRET) as server:
        heard = bytearray()
        async with proxy(server.address, on_request=heard.extend) as address:
            warehouse = remote(address)
            await warehouse.copy_in(0, EIGHT)
            await warehouse.close()
        assert len(heard) > ANSWER.size
        reader, writer = await asyncio.open_connection(*server.address)
        writer.write(heard)
        async with asyncio.timeout(10):
            try:
                answer = await reader.read()
            except ConnectionResetError:
                answer = b""
        assert len(answer) <= HELLO.size, "no more than its hello"
        writer.close()
        await until(lambda: server.connections == 0)


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\n\r\n", bytes(64), os.urandom(300)])
async def test_a_stranger_learns_nothing_and_is_gone_in_time(sent: bytes, arena: Arena) -> None:
    async with WarehouseServer(
        arena, SCHEMA, secret=SECRET, limits=Limits(hello_seconds=0.2)
    ) as server:
        reader, writer = await asyncio.open_connection(*server.address)
        writer.write(sent)
        async with asyncio.timeout(10):
            with suppress(ConnectionResetError):  # when it sent more than a handshake's bytes
                assert len(await reader.read()) <= HELLO.size
        await until(lambda: server.connections == 0)
        writer.close()


async def test_connections_are_limited(arena: Arena) -> None:
    async with WarehouseServer(
        arena, SCHEMA, secret=SECRET, limits=Limits(connections=1)
    ) as server:
        first = remote(server)
        await first.copy_in(0, EIGHT)
        with pytest.raises(WarehouseUnreachable, match="closed the connection"):
            await remote(server, timeout=1.0).copy_in(0, EIGHT)
        await first.close()
        await remote(server).copy_in(0, EIGHT)


async def test_half_open_connections_do_not_refuse_an_authenticated_peer(arena: Arena) -> None:
    limits = Limits(handshakes=8, connections=2, hello_seconds=60.0)
    async with WarehouseServer(arena, SCHEMA, secret=SECRET, limits=limits) as server:
        strangers = [await asyncio.open_connection(*server.address) for _ in range(100)]
        warehouse = remote(server, timeout=5.0)
        await warehouse.copy_in(0, EIGHT)
        # The oldest were closed, and the known peer takes none of the strangers' places.
        await until(lambda: server.connections <= limits.handshakes + 1)
        for reader, _ in strangers[:80]:
            async with asyncio.timeout(10):
                assert len(await reader.read()) <= HELLO.size
        await warehouse.copy_in(0, EIGHT)
        await warehouse.close()
        for _, writer in strangers:
            writer.close()
        await until(lambda: server.connections == 0)


async def test_everything_travels_under_tls(arena: Arena, tmp_path: Path) -> None:
    rows = pack(SCHEMA, {"wide": torch.arange(256, dtype=torch.uint8).repeat(5000, 1)})
    with certificate(tmp_path) as (at_server, at_client):
        async with WarehouseServer(arena, SCHEMA, secret=SECRET, ssl=at_server) as server:
            heard = bytearray()
            async with proxy(
                server.address, on_request=heard.extend, on_reply=heard.extend
            ) as address:
                warehouse = remote(address, ssl=at_client)
                await warehouse.write(0, 1, rows)
                for slots in (range(5000), range(4999, -1, -1)):
                    found = await warehouse.read(*places(1, 0, slots), ["wide"])
                    assert (
                        found["wide"].values.view(5000, 256) == torch.arange(256, dtype=torch.uint8)
                    ).all()
                await warehouse.close()
            assert len(heard) > 2 * rows.nbytes
            assert bytes(range(256)) not in heard


async def test_tls_on_one_end_only_or_an_unknown_certificate_is_refused(
    arena: Arena, tmp_path: Path
) -> None:
    with certificate(tmp_path) as (at_server, at_client):
        async with WarehouseServer(arena, SCHEMA, secret=SECRET, ssl=at_server) as server:
            with pytest.raises(TransferError, match="trusts its certificate"):
                await remote(server, ssl=ssl.create_default_context()).copy_in(0, EIGHT)
            with pytest.raises(WarehouseUnreachable, match="TLS on both ends or on none"):
                await remote(server, timeout=0.3).copy_in(0, EIGHT)
        async with WarehouseServer(arena, SCHEMA, secret=SECRET) as server:
            with pytest.raises(TransferError, match="check that it serves TLS"):
                await remote(server, ssl=at_client).copy_in(0, EIGHT)
