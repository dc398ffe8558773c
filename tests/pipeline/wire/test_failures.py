"""Real processes and real kills: an error in time, and memory and time bounded for every peer."""

from __future__ import annotations

import asyncio
import signal
import socket
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch

from pipeline.data.arena import Arena, WarehouseUnreachable
from pipeline.data.blocks import pack
from pipeline.warehouse.requests import (
    Limits,
)
from pipeline.warehouse.server import WarehouseServer
from pipeline.wire.frames import TransferError
from tests.pipeline.block_view import BlockView
from tests.pipeline.wire.served import (
    COLUMNS,
    EIGHT,
    ROWS,
    SCHEMA,
    SECRET,
    assert_rows,
    bits,
    places,
    process,
    proxy,
    put,
    remote,
    until,
)


async def test_a_server_in_another_process(arena: Arena) -> None:
    with process(arena) as (_, address):
        warehouse = remote(address)
        rows = pack(SCHEMA, ROWS)
        await warehouse.write(192, 3, rows)
        view = BlockView(SCHEMA, arena.slice(192, rows.nbytes), 3)
        found = await warehouse.read(*places(3, 192, [2, 0, 1]), COLUMNS)
        assert_rows(found, SCHEMA, COLUMNS, [(view, slot) for slot in (2, 0, 1)])
        await warehouse.close()


async def test_a_server_killed_in_the_middle_of_a_reply_and_its_successor(tmp_path: Path) -> None:
    arena = Arena.create(tmp_path / "arena", 1 << 24)
    wide = torch.arange(256, dtype=torch.uint8).repeat(60_000, 1)  # more than sockets hold
    put(arena, pack(SCHEMA, {"wide": wide}), 0, 1)
    ask = (*places(1, 0, range(60_000)), ["wide"])
    with process(arena) as (child, address):
        passed = 0

        def kill(data: bytes) -> None:
            nonlocal passed
            passed += len(data)
            if passed > 1 << 18:
                child.send_signal(signal.SIGKILL)

        async with proxy(address, on_reply=kill) as through:
            warehouse = remote(through, timeout=3.0)
            started = asyncio.get_running_loop().time()
            with pytest.raises(
                WarehouseUnreachable,
                match=r"was not reached within 3 s "
                r"\(Connection",
            ):
                await warehouse.read(*ask)
            assert asyncio.get_running_loop().time() - started < 10.0
            assert child.wait(10) == -signal.SIGKILL
            assert 1 << 18 < passed < wide.numel(), "it died in the middle of its reply"
            patient = remote(through, timeout=60.0)
            waiting = asyncio.create_task(patient.read(*ask))
            passed = -(1 << 30)
            with process(arena, address[1]):
                for found in (await waiting, await warehouse.read(*ask)):
                    assert bits(found["wide"].values) == bits(wide)
            await patient.close()
            await warehouse.close()


async def test_a_server_that_stands_still_is_an_error_in_time_and_a_late_write_never_lands(
    arena: Arena,
) -> None:
    with process(arena) as (child, address):
        warehouse = remote(address, timeout=2.0)
        await warehouse.copy_in(0, EIGHT)
        child.send_signal(signal.SIGSTOP)
        started = asyncio.get_running_loop().time()
        with pytest.raises(WarehouseUnreachable, match="was not reached within 2 s"):
            await warehouse.write(0, 1, pack(SCHEMA, ROWS))
        assert asyncio.get_running_loop().time() - started < 10.0
        child.send_signal(signal.SIGCONT)
        patient = remote(address)
        for _ in range(20):  # what was in its sockets came before
            await patient.copy_in(0, EIGHT)
            assert not any(arena.slice(0, arena.nbytes))
        await patient.write(0, 1, pack(SCHEMA, ROWS))
        await patient.close()
        await warehouse.close()


async def test_nobody_listening_is_an_error_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = taken.getsockname()
    with pytest.raises(WarehouseUnreachable, match=r"within 0.3 s \(ConnectionRefusedError"):
        await remote(address, timeout=0.3).copy_in(0, EIGHT)


async def test_a_listener_that_never_answers_is_an_error_in_time() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        pytest.raises(WarehouseUnreachable, match="did not answer"),
    ):
        await remote(silent.getsockname(), timeout=0.3).copy_in(0, EIGHT)


async def test_a_connection_that_the_server_closed_for_idleness_is_replaced(arena: Arena) -> None:
    async with WarehouseServer(
        arena, SCHEMA, secret=SECRET, limits=Limits(idle_seconds=0.05)
    ) as server:
        warehouse = remote(server)
        for _ in range(3):
            await warehouse.copy_in(0, EIGHT)
            await until(lambda: server.connections == 0)
        await warehouse.close()


async def test_a_cancelled_call_leaves_the_next_one_its_own_answer(arena: Arena) -> None:
    put(
        arena,
        pack(
            SCHEMA,
            {"wide": torch.ones(14_000, 256, dtype=torch.uint8), "reward": torch.arange(14_000.0)},
        ),
        0,
        1,
    )
    async with WarehouseServer(arena, SCHEMA, secret=SECRET) as server:
        warehouse = remote(server, connections=1)
        for turn in range(20):
            large = asyncio.create_task(warehouse.read(*places(1, 0, range(14_000)), ["wide"]))
            for _ in range(turn):
                await asyncio.sleep(0)
            large.cancel()
            await asyncio.gather(large, return_exceptions=True)
            assert (await warehouse.read(*places(1, 0, [turn]), ["reward"]))[
                "reward"
            ].values.tolist() == [turn]
        await warehouse.close()
        await until(lambda: server.connections == 0)


async def test_clients_that_stop_reading_cost_the_server_little_and_not_for_long(
    tmp_path: Path,
) -> None:
    arena = Arena.create(tmp_path / "arena", 1 << 25)
    count = 1 << 16
    peers = 4
    put(arena, pack(SCHEMA, {"wide": torch.zeros(count, 256, dtype=torch.uint8)}), 0, 1)
    control = (
        struct.pack("<II", 16, count) + np.stack(places(1, 0, range(count - 1, -1, -1))).tobytes()
    )
    frame = struct.pack("<B3xIQ", 1, len(control), 0) + control
    limits = Limits(frame_seconds=2.0, slowest=1e12)
    async with WarehouseServer(arena, SCHEMA, secret=SECRET, limits=limits) as server:
        before = len(asyncio.all_tasks())
        stalled = [await remote(server)._connect() for _ in range(peers)]
        tracemalloc.start()
        for peer in stalled:
            await peer.stream.send(frame)
        sent = -1
        while sent != server.bytes_sent:  # until every socket is full
            sent = server.bytes_sent
            await asyncio.sleep(0.1)
        held, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert 0 < sent < peers * count * 256, "they would have had more"
        assert held < peers * (8 << 20), (
            "a request, where its rows lie, and one piece of them, for each"
        )
        assert peak < peers * (12 << 20)
        await until(lambda: server.connections == 0)
        for peer in stalled:
            peer.stream.close()
        await until(lambda: len(asyncio.all_tasks()) == before)


async def test_a_client_that_stops_in_the_middle_of_a_frame_is_dropped(arena: Arena) -> None:
    limits = Limits(frame_seconds=0.1, idle_seconds=60.0)
    async with WarehouseServer(arena, SCHEMA, secret=SECRET, limits=limits) as server:
        for part in (
            struct.pack("<B3xIQ", 1, 32, 0),
            struct.pack("<B3xIQqqd", 4, 24, 64, 0, 64, 1e18) + b"half",
        ):
            peer = await remote(server)._connect()
            await peer.stream.send(part)
            await until(lambda: server.connections == 0)
            peer.stream.close()


async def test_closing_a_server_in_use_ends_its_connections_and_tasks(arena: Arena) -> None:
    before = len(asyncio.all_tasks())
    server = WarehouseServer(arena, SCHEMA, secret=SECRET)
    await server.start()
    warehouse = remote(server, timeout=0.3)
    await warehouse.copy_in(0, EIGHT)
    await server.close()
    assert server.connections == 0
    assert len(asyncio.all_tasks()) == before
    with pytest.raises(WarehouseUnreachable):
        await warehouse.copy_in(0, EIGHT)
    await warehouse.close()
    with pytest.raises(TransferError, match="was closed"):
        await warehouse.copy_in(0, EIGHT)
