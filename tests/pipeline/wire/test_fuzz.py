"""Each frame is understood or refused, and leaves no trace."""

from __future__ import annotations

import asyncio
import gc
import socket
import struct

import numpy as np
import psutil
import torch

from pipeline.data.arena import Arena, StaleHandle
from pipeline.data.blocks import BlockError, BlockReader, pack
from pipeline.data.columns import ColumnError
from pipeline.warehouse.requests import (
    Limits,
    ReadRequest,
    parse_request,
)
from pipeline.warehouse.server import WarehouseServer, plan_reply, reply_batches
from pipeline.wire.frames import TransferError, parse_head
from tests.pipeline.wire.served import (
    COLUMNS,
    ROWS,
    SCHEMA,
    SECRET,
    places,
    put,
    remote,
    until,
)


def valid_frames(arena: Arena) -> list[bytes]:
    """Requests of each kind as a client sends them; writes come too late, so that none of them
    lands."""
    rows = pack(SCHEMA, ROWS)
    put(arena, rows, 64, 1)
    put(arena, pack(SCHEMA, {"reward": torch.zeros(5)}), 8192, 2)
    memory = bytearray(rows.nbytes)
    rows.write_into(memoryview(memory), 3)
    edge = 32 + 32 * len(COLUMNS)
    frames = []
    for mask, ask in (
        (15, places(1, 64, [2, 0, 1])),
        (1, places(1, 64, [0, 1, 2])),
        (2, places(2, 8192, [4])),
    ):
        frames.append((1, struct.pack("<II", mask, len(ask[0])) + np.stack(ask).tobytes(), b""))
    mixed = np.array([[1, 2, 1], [64, 8192, 64], [0, 4, 2]], np.int64)
    frames.append((1, struct.pack("<II", 2, 3) + mixed.tobytes(), b""))
    frames.append(
        (2, struct.pack("<qqqd", 16384, 3, rows.nbytes, 0.0) + memory[:edge], bytes(memory[edge:]))
    )
    frames.append((4, struct.pack("<qqd", 64, 256, 0.0), bytes(256)))
    return [
        struct.pack("<B3xIQ", kind, len(control), len(body)) + control + body
        for kind, control, body in frames
    ]


EXTREMES = [
    0,
    1,
    -1,
    2,
    7,
    63,
    64,
    255,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**40,
    2**62,
    2**63 - 1,
    -(2**63),
    -(2**63) + 7,
]


def mutated(frame: bytes, rng: np.random.Generator) -> bytes:
    data = bytearray(frame)
    for _ in range(int(rng.integers(1, 4))):
        how = int(rng.integers(7))
        at = int(rng.integers(min(len(data), 400) or 1))
        if how == 0:
            data[at : at + 1] = bytes([int(rng.integers(256))])
        elif how == 1:
            data[at // 8 * 8 : at // 8 * 8 + 8] = struct.pack(
                "<q", EXTREMES[int(rng.integers(len(EXTREMES)))]
            )
        elif how == 2:
            data[at // 4 * 4 : at // 4 * 4 + 4] = struct.pack(
                "<i", int(rng.integers(-(2**31), 2**31))
            )
        elif how == 3:
            del data[at:]
        elif how == 4:
            data += rng.bytes(int(rng.integers(1, 64)))
        elif how == 5:
            del data[at : at + int(rng.integers(1, 32))]
        else:
            data[at:at] = rng.bytes(int(rng.integers(1, 32)))
    return bytes(data)


def fuzzed(frames: list[bytes], rng: np.random.Generator) -> bytes:
    if rng.integers(8) == 0:
        return rng.bytes(int(rng.integers(0, 200)))
    return mutated(frames[int(rng.integers(len(frames)))], rng)


def taken(frame: bytes, reader: BlockReader, room: int, limits: Limits) -> str:
    """What the server makes of a frame, without its sockets: the request's kind, or why it is
    refused."""
    if len(frame) < 16:
        return "short"
    try:
        kind, size, payload = parse_head(frame[:16], limits.requests)
        request = parse_request(kind, frame[16 : 16 + size], payload, SCHEMA, room, limits)
        if isinstance(request, ReadRequest):
            found = plan_reply(reader, SCHEMA, request, limits)
            nbytes = sum(
                runs.nbytes + (0 if offsets is None else 8 * (len(request.slots) + 1))
                for offsets, runs in found
            )
            batches = list(reply_batches(reader, found))
            assert sum(len(buffer) for batch in batches for buffer in batch) == nbytes
            assert max(map(len, batches)) < 1000, "the kernel takes 1024"
    except (TransferError, BlockError, ColumnError, StaleHandle) as error:
        return type(error).__name__ if len(str(error)) > 20 else "says nothing"
    return type(request).__name__


def test_100_000_frames_are_each_understood_or_refused(arena: Arena) -> None:
    frames = valid_frames(arena)
    rng = np.random.default_rng(5)
    limits = Limits()
    reader = BlockReader(arena.slice(0, arena.nbytes), SCHEMA)
    before = bytes(arena.slice(0, arena.nbytes))
    outcomes = dict[str, int]()
    assert [taken(frame, reader, arena.nbytes, limits) for frame in frames] == (
        ["ReadRequest"] * 4 + ["WriteRequest", "CopyRequest"]
    )
    resident = 0
    for turn in range(100_000):
        if turn == 20_000:
            gc.collect()
            resident = psutil.Process().memory_info().rss
        outcome = taken(fuzzed(frames, rng), reader, arena.nbytes, limits)
        outcomes[outcome] = outcomes.get(outcome, 0) + 1
    gc.collect()
    assert psutil.Process().memory_info().rss - resident < 8 << 20
    assert bytes(arena.slice(0, arena.nbytes)) == before
    for outcome in (
        "TransferError",
        "BlockError",
        "StaleHandle",
        "ReadRequest",
        "WriteRequest",
        "CopyRequest",
        "short",
    ):
        assert outcomes[outcome] > 100, "the fuzzer reaches each end"


def test_reads_of_a_damaged_arena_are_refused_or_stay_inside_it(arena: Arena) -> None:
    """Whatever a block's header and offsets say."""
    frames = valid_frames(arena)[:4]
    rng = np.random.default_rng(6)
    limits = Limits()
    reader = BlockReader(arena.slice(0, arena.nbytes), SCHEMA)
    words = np.frombuffer(arena.slice(0, arena.nbytes), np.int64)
    whole = words.copy()
    outcomes = set[str]()
    for _ in range(10_000):
        first = int(rng.choice([8, 1024]))
        at = first + 2 + int(rng.integers(60 if first == 8 else 6))
        words[at] = (
            rng.choice(EXTREMES) if rng.integers(2) else int(words[at]) + int(rng.integers(-64, 64))
        )
        outcomes.add(taken(frames[int(rng.integers(4))], reader, arena.nbytes, limits))
        words[at] = whole[at]
    assert outcomes <= {"BlockError", "ColumnError", "ReadRequest"}
    assert {"BlockError", "ReadRequest"} <= outcomes


async def test_fuzzed_frames_over_real_connections_leave_no_trace(arena: Arena) -> None:
    frames = valid_frames(arena)
    rng = np.random.default_rng(7)
    limits = Limits(frame_seconds=1.0, idle_seconds=5.0)
    reader = BlockReader(arena.slice(0, arena.nbytes), SCHEMA)
    before = bytes(arena.slice(0, arena.nbytes))
    lands = {"WriteRequest", "CopyRequest"}
    async with WarehouseServer(arena, SCHEMA, secret=SECRET, limits=limits) as server:
        tasks = len(asyncio.all_tasks())
        warehouse = remote(server)
        resident = 0
        answered = 0
        for turn in range(400):
            if turn == 100:
                gc.collect()
                resident = psutil.Process().memory_info().rss
            batch = [fuzzed(frames, rng) for _ in range(10)]
            batch = [
                f
                for f in batch
                if f[:1] not in (b"\2", b"\4")
                or taken(f, reader, arena.nbytes, limits) not in lands
            ]
            batch.insert(0, frames[int(rng.choice(4))])
            connection = await warehouse._connect()
            sock = connection.stream.sock
            try:
                async with asyncio.timeout(20):
                    await connection.stream.send(b"".join(batch))
                    sock.shutdown(socket.SHUT_WR)
                    while True:
                        answered += len(await connection.stream.receive(1))
            except ConnectionError:
                pass
            connection.stream.close()
        await until(lambda: server.connections == 0)
        assert len(asyncio.all_tasks()) == tasks
        assert answered > 400 * 16, "each first frame was answered"
        gc.collect()
        assert psutil.Process().memory_info().rss - resident < 8 << 20
        assert bytes(arena.slice(0, arena.nbytes)) == before
        found = await warehouse.read(*places(1, 64, [2]), ["reward"])
        assert found["reward"].values.tolist() == [2.0]
        await warehouse.close()
