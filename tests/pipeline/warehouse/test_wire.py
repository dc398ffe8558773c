"""What workers on other nodes rely on: the same rows as on their node, a clear refusal, or an error in time."""

from __future__ import annotations

import asyncio
import gc
import math
import os
import shutil
import signal
import socket
import ssl
import struct
import subprocess
import sys
import tracemalloc
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.blocks import BlockError, BlockReader, PackedRows, pack
from pipeline.columns import Column, ColumnError, Packed, Schema
from pipeline.warehouse.arena import Arena, StaleHandle
from pipeline.warehouse.wire.client import RemoteWarehouse
from pipeline.warehouse.wire.protocol import (
    Limits,
    ReadRequest,
    TransferError,
    WarehouseUnreachable,
    parse_head,
    parse_request,
)
from pipeline.warehouse.wire.server import WarehouseServer, plan_reply, reply_batches
from tests.pipeline.block_view import BlockView

SECRET = b"known to every node of the run"
DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
]
SCHEMA = Schema(
    [
        Column.ragged("ids", torch.int64),
        Column.scalar("reward", torch.float32),
        Column.fixed("scores", torch.bfloat16, [2, 3]),
        Column.text("answer"),
        Column.fixed("wide", torch.uint8, [256]),
    ]
)
ROWS = {
    "ids": [torch.tensor([5, 6]), torch.tensor([], dtype=torch.int64), torch.tensor([7, 8, 9])],
    "reward": torch.tensor([0.5, -1.0, 2.0]),
    "scores": torch.arange(18, dtype=torch.bfloat16).view(3, 2, 3),
    "answer": ["äpfel", "", "z"],
}
COLUMNS = list(ROWS)
EIGHT = memoryview(bytes(8))


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def arena(tmp_path: Path) -> Arena:
    return Arena.create(tmp_path / "arena", 1 << 22)


def put(arena: Arena, rows: PackedRows, offset: int, block: int) -> BlockView:
    """As a writer on the warehouse's own node does it."""
    rows.write_into(arena.slice(offset, rows.nbytes), block)
    return BlockView(SCHEMA, arena.slice(offset, rows.nbytes), block)


def remote(server: WarehouseServer | tuple[str, int], schema: Schema = SCHEMA, **options: Any) -> RemoteWarehouse:
    host, port = server.address if isinstance(server, WarehouseServer) else server
    return RemoteWarehouse(host, port, schema, **{"secret": SECRET, "timeout": 20.0, **options})


def places(block: int, offset: int, slots: Sequence[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    count = len(slots)
    return np.full(count, block, np.int64), np.full(count, offset, np.int64), np.array(slots, np.int64)


async def until(condition: Callable[[], object], seconds: float = 10.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - some conditions are another process's
            await asyncio.sleep(0.005)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def random_values(dtype: torch.dtype, shape: Sequence[int], rng: np.random.Generator) -> torch.Tensor:
    """Every bit pattern may occur, NaNs with payloads included."""
    raw = rng.integers(0, 2 if dtype == torch.bool else 256, math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.frombuffer(bytearray(raw), dtype=dtype).view(*shape) if len(raw) else torch.empty(*shape, dtype=dtype)


def assert_rows(
    found: dict[str, Packed], schema: Schema, columns: Sequence[str], rows: Sequence[tuple[BlockView, int]]
) -> None:
    """``found`` holds to the bit what a reader on the rows' own node sees, in the order of ``rows``."""
    assert list(found) == list(columns)
    for name in columns:
        column, packed = schema[name], found[name]
        assert packed.values.dtype == (torch.uint8 if column.dtype == "utf8" else column.dtype)
        assert packed.values.dim() == 1
        parts = [view.row(name, slot) for view, slot in rows]
        if column.shape is None:
            assert packed.offsets is not None
            assert packed.offsets.dtype == torch.int64
            assert packed.offsets.tolist() == np.cumsum([0, *map(len, parts)]).tolist()
        else:
            assert packed.offsets is None
        assert bits(packed.values) == b"".join(map(bits, parts))


# ── what is read is what was written ──

column_kinds = st.tuples(st.sampled_from(["scalar", "fixed", "ragged", "text"]), st.sampled_from(DTYPES))


@settings(max_examples=60, deadline=None)
@given(kinds=st.lists(column_kinds, min_size=1, max_size=5), seed=st.integers(0, 2**32), data=st.data())
async def test_a_read_equals_the_rows_on_their_own_node(
    kinds: list[tuple[str, torch.dtype]], seed: int, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Any schema, blocks written there or sent there, rows in any order with repeats, columns in any order."""
    rng, columns = np.random.default_rng(seed), []
    for i, (kind, dtype) in enumerate(kinds):
        columns.append(
            {
                "scalar": Column.scalar(f"c{i}", dtype),
                "fixed": Column.fixed(f"c{i}", dtype, [3, int(rng.integers(1, 90))]),
                "ragged": Column.ragged(f"c{i}", dtype),
                "text": Column.text(f"c{i}"),
            }[kind]
        )
    schema = Schema(columns)
    arena = Arena.create(tmp_path_factory.mktemp("arena") / "a", 1 << 20)
    views: dict[int, tuple[int, BlockView]] = {}
    async with WarehouseServer(arena, schema, secret=SECRET) as server:
        warehouse, at = remote(server, schema), 64 * int(rng.integers(0, 4))
        for block in range(1, int(rng.integers(2, 5))):
            count = int(rng.integers(1, 9))
            rows: dict[str, Any] = {}
            for column in columns:
                lengths = rng.integers(0, data.draw(st.sampled_from([1, 4, 300])), count)
                if column.dtype == "utf8":
                    rows[column.name] = ["".join(map(chr, rng.integers(32, 0xD7FF, n))) for n in lengths]
                elif column.shape is None:
                    rows[column.name] = [random_values(column.dtype, [n], rng) for n in lengths]
                else:
                    rows[column.name] = random_values(column.dtype, [count, *column.shape], rng)
            packed = pack(schema, rows)
            if rng.integers(2):
                await warehouse.write(at, block, packed)
            else:
                packed.write_into(arena.slice(at, packed.nbytes), block)
            views[block] = at, BlockView(schema, arena.slice(at, packed.nbytes), block)
            at += packed.nbytes + 64 * int(rng.integers(0, 3))
        for _ in range(4):
            asked = [int(block) for block in rng.choice(list(views), int(rng.integers(1, 12)))]
            slots = [int(rng.integers(views[block][1].rows)) for block in asked]
            if rng.integers(2):  # side by side in one block
                asked = [asked[0]] * views[asked[0]][1].rows
                slots = list(range(len(asked)))[int(rng.integers(len(asked))) :]
                asked = asked[: len(slots)]
            names = [str(name) for name in rng.permutation([c.name for c in columns])[: int(rng.integers(1, 6))]]
            found = await warehouse.read(
                np.array(asked, np.int64),
                np.array([views[b][0] for b in asked], np.int64),
                np.array(slots, np.int64),
                names,
            )
            assert_rows(found, schema, names, [(views[b][1], slot) for b, slot in zip(asked, slots, strict=True)])
        await warehouse.close()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
async def test_every_dtype_comes_back_bit_for_bit(dtype: torch.dtype, arena: Arena) -> None:
    rng = np.random.default_rng(3)
    schema = Schema([Column.scalar("s", dtype), Column.fixed("f", dtype, [5]), Column.ragged("r", dtype)])
    ragged = [random_values(dtype, [n], rng) for n in (3, 0, 700)]
    rows = {"s": random_values(dtype, [3], rng), "f": random_values(dtype, [3, 5], rng), "r": ragged}
    async with WarehouseServer(arena, schema, secret=SECRET) as server:
        warehouse = remote(server, schema)
        await warehouse.write(64, 9, pack(schema, rows))
        for slots in ([0, 1, 2], [2, 0], [1]):
            found = await warehouse.read(*places(9, 64, slots), ["r", "s", "f"])
            assert bits(found["s"].values) == bits(rows["s"][slots])
            assert bits(found["f"].values) == bits(rows["f"][slots])
            assert bits(found["r"].values) == b"".join(bits(ragged[slot]) for slot in slots)
            assert {packed.values.dtype for packed in found.values()} == {dtype}
        await warehouse.close()


async def test_no_rows_and_no_columns_are_answered_without_the_network() -> None:
    warehouse = remote(("203.0.113.1", 9), timeout=0.1)
    none = np.empty(0, np.int64)
    found = await warehouse.read(none, none, none, ["answer", "reward"])
    assert found["answer"].offsets is not None
    assert found["answer"].offsets.tolist() == [0]
    assert found["reward"].offsets is None
    assert len(found["reward"].values) == len(found["answer"].values) == 0
    assert await warehouse.read(*places(1, 0, [0]), []) == {}
    with pytest.raises(ColumnError, match="'nope' is not in the schema"):
        await warehouse.read(*places(1, 0, [0]), ["nope"])


async def test_raw_bytes_move_a_block_from_one_warehouse_to_another(arena: Arena, tmp_path: Path) -> None:
    other, rows = Arena.create(tmp_path / "other", 1 << 16), pack(SCHEMA, ROWS)
    view = put(arena, rows, 128, 5)
    async with WarehouseServer(other, SCHEMA, secret=SECRET) as server:
        target = remote(server)
        await target.copy_in(4096, arena.slice(128, rows.nbytes))
        found = await target.read(*places(5, 4096, [2, 0]), COLUMNS)
        assert_rows(found, SCHEMA, COLUMNS, [(view, 2), (view, 0)])
        await target.close()


async def test_calls_at_the_same_time_do_not_mix(arena: Arena) -> None:
    count = 200
    rows = {"ids": [torch.full((i,), i) for i in range(count)], "reward": torch.arange(count, dtype=torch.float32)}
    put(arena, pack(SCHEMA, rows), 0, 1)
    async with WarehouseServer(arena, SCHEMA, secret=SECRET) as server:
        warehouse = remote(server, connections=3)

        async def one(slot: int) -> None:
            found = await warehouse.read(*places(1, 0, [slot, count - 1 - slot]), ["reward", "ids"])
            assert found["reward"].values.tolist() == [slot, count - 1 - slot]
            assert found["ids"].values.tolist() == [slot] * slot + [count - 1 - slot] * (count - 1 - slot)

        async with asyncio.TaskGroup() as tasks:
            for slot in range(count):
                tasks.create_task(one(slot))
        assert 1 <= server.connections <= 3
        await warehouse.close()
        await until(lambda: server.connections == 0)


async def test_memory_is_used_again_only_when_its_reader_let_it_go(arena: Arena) -> None:
    count = 12_000
    put(arena, pack(SCHEMA, {"wide": torch.arange(count).remainder(251).to(torch.uint8)[:, None].repeat(1, 256)}), 0, 1)

    def right(values: torch.Tensor, slots: Sequence[int]) -> bool:
        return bool((values.view(-1, 256) == torch.tensor(slots).remainder(251)[:, None]).all())

    async with WarehouseServer(arena, SCHEMA, secret=SECRET) as server:
        warehouse, rng, held = remote(server), np.random.default_rng(4), list[tuple[torch.Tensor, list[int]]]()
        addresses = set[int]()
        for _ in range(200):
            first, last = sorted(rng.integers(0, count, 2).tolist())
            slots = list(range(first, last + 1))
            values = (await warehouse.read(*places(1, 0, slots), ["wide"]))["wide"].values
            addresses.add(values.data_ptr())
            part = int(rng.integers(len(slots)))
            held.append((values[256 * part :].view(torch.int16), slots[part:]) if rng.integers(2) else (values, slots))
            del values
            while len(held) > 4:
                del held[int(rng.integers(len(held)))]
            assert all(right(values.view(torch.uint8), slots) for values, slots in held)
        held.clear()
        gc.collect()
        assert len(addresses) < 150
        assert 0 < warehouse._memory.kept <= 64 << 20
        await warehouse.close()


async def test_bytes_are_counted(arena: Arena) -> None:
    rows = pack(SCHEMA, ROWS)
    async with WarehouseServer(arena, SCHEMA, secret=SECRET) as server:
        warehouse = remote(server)
        await warehouse.write(0, 1, rows)
        header = 32 + 32 * len(COLUMNS)
        assert server.payload_received == rows.nbytes - header
        assert rows.nbytes < server.bytes_received < rows.nbytes + 400
        await warehouse.read(*places(1, 0, [0, 1, 2]), ["ids", "reward"])
        assert server.payload_sent == 8 * 5 + 8 * 4 + 4 * 3
        sent, received = server.bytes_sent, server.bytes_received
        assert sent > server.payload_sent
        await warehouse.close()
        await until(lambda: server.connections == 0)
        assert (server.bytes_sent, server.bytes_received) == (sent, received), "closed connections stay in the count"


# ── a refusal says what is wrong, changes nothing, and the next call works ──


@pytest.mark.parametrize(
    ("ask", "error", "message"),
    [
        (places(2, 64, [0]), StaleHandle, "block 2 was released"),
        (places(1, 128, [0]), StaleHandle, "block 1 was released"),
        (places(1, 65, [0]), TransferError, "offset 65 is not a block's"),
        (places(1, -64, [0]), TransferError, "offset -64 is not a block's"),
        (places(1, 1 << 22, [0]), TransferError, "in an arena of 4194304 bytes"),
        (places(1, 64, [0, 3]), TransferError, "slot 3 of block 1, which has 3 rows"),
        (places(1, 64, [-1]), TransferError, "slot -1 of block 1"),
        ((*places(1, 64, [0])[:2], np.array([0.0])), TransferError, "slots is float64"),
        (places(1, 64, [0] * 101), TransferError, "101 rows, the warehouse takes 100"),
    ],
)
async def test_a_wrong_handle_is_refused(
    ask: tuple[np.ndarray, np.ndarray, np.ndarray], error: type[Exception], message: str, arena: Arena
) -> None:
    put(arena, pack(SCHEMA, ROWS), 64, 1)
    before = bytes(arena.slice(0, arena.nbytes))
    async with WarehouseServer(arena, SCHEMA, secret=SECRET, limits=Limits(rows=100)) as server:
        warehouse = remote(server)
        with pytest.raises(error, match=message):
            await warehouse.read(*ask, ["reward"])
        assert (await warehouse.read(*places(1, 64, [2]), ["reward"]))["reward"].values.tolist() == [2.0]
        assert server.connections == 1, "the refusal cost no connection"
        await warehouse.close()
    assert bytes(arena.slice(0, arena.nbytes)) == before


async def test_a_column_that_a_block_does_not_have_is_named(arena: Arena) -> None:
    put(arena, pack(SCHEMA, {"reward": torch.zeros(2)}), 0, 4)
    async with WarehouseServer(arena, SCHEMA, secret=SECRET) as server:
        with pytest.raises(TransferError, match="column 'ids': row 0 of this claim does not have it"):
            await remote(server).read(*places(4, 0, [0]), ["ids"])


async def test_more_bytes_than_the_limits_are_refused_on_either_end(arena: Arena) -> None:
    put(arena, pack(SCHEMA, {"wide": torch.zeros(100, 256, dtype=torch.uint8)}), 0, 1)
    ask = (*places(1, 0, range(100)), ["wide"])
    async with WarehouseServer(arena, SCHEMA, secret=SECRET, limits=Limits(nbytes=20_000)) as server:
        with pytest.raises(TransferError, match="25600 bytes, at most 20000 are sent at a time"):
            await remote(server).read(*ask)
        with pytest.raises(TransferError, match="the warehouse takes 20000 at a time"):
            await remote(server).copy_in(0, memoryview(bytes(20_008)))
    async with WarehouseServer(arena, SCHEMA, secret=SECRET) as server:
        with pytest.raises(TransferError, match="payload is 25600 bytes"):
            await remote(server, limits=Limits(nbytes=20_000)).read(*ask)


@pytest.mark.parametrize("offset", [-64, 4, (1 << 22) - 64])
async def test_a_write_outside_the_arena_is_refused(offset: int, arena: Arena) -> None:
    async with WarehouseServer(arena, SCHEMA, secret=SECRET) as server:
        warehouse = remote(server)
        with pytest.raises(TransferError, match=f"write: bytes {offset} to"):
            await warehouse.write(offset, 1, pack(SCHEMA, ROWS))
        with pytest.raises(TransferError, match=f"copy: bytes {offset} to"):
            await warehouse.copy_in(offset, memoryview(bytes(128)))
        await warehouse.close()
    assert not any(arena.slice(0, arena.nbytes))


async def test_a_repeated_write_leaves_the_block_alone(arena: Arena) -> None:
    """Its client may not have heard our answer, and the block may be in use already."""
    rows = pack(SCHEMA, {"reward": torch.tensor([1.0, 2.0])})
    async with WarehouseServer(arena, SCHEMA, secret=SECRET) as server:
        warehouse = remote(server)
        await warehouse.write(0, 1, rows)
        before = bytes(arena.slice(0, arena.nbytes))
        await warehouse.write(0, 1, pack(SCHEMA, {"reward": torch.tensor([7.0, 8.0])}))
        assert bytes(arena.slice(0, arena.nbytes)) == before
        await warehouse.write(0, 2, rows)
        with pytest.raises(StaleHandle):
            await warehouse.read(*places(1, 0, [0]), ["reward"])
        await warehouse.close()


async def test_a_block_whose_offsets_lie_never_becomes_readable(arena: Arena) -> None:
    class Lying(PackedRows):
        def write_into(self, memory: memoryview, block_id: int) -> None:
            super().write_into(memory, block_id)
            at = int(np.frombuffer(memory, np.int64)[5])  # of the first column's offsets
            np.frombuffer(memory, np.int64)[at // 8 + 1] = 100

    rows = pack(SCHEMA, {"ids": ROWS["ids"]})
    rows.__class__ = Lying
    async with WarehouseServer(arena, SCHEMA, secret=SECRET) as server:
        warehouse = remote(server)
        with pytest.raises(TransferError, match="offsets of column 'ids' do not divide its 40 bytes"):
            await warehouse.write(0, 1, rows)
        with pytest.raises(StaleHandle):
            await warehouse.read(*places(1, 0, [0]), ["ids"])
        await warehouse.close()


async def test_a_write_cut_off_leaves_no_block_and_the_former_one_is_gone(arena: Arena) -> None:
    put(arena, pack(SCHEMA, {"reward": torch.zeros(4)}), 0, 1)
    rows = pack(SCHEMA, {"wide": torch.ones(4000, 256, dtype=torch.uint8)})
    async with WarehouseServer(arena, SCHEMA, secret=SECRET) as server:
        memory = bytearray(rows.nbytes)
        rows.write_into(memoryview(memory), 2)
        control = struct.pack("<qqqd", 0, 2, rows.nbytes, 1e18) + memory[:64]
        connection = await remote(server)._connect()
        head = struct.pack("<B3xIQ", 2, len(control), rows.nbytes - 64)
        await connection.stream.send(head + control + memory[64:300_000])
        connection.stream.close()
        await until(lambda: server.connections == 0)
        warehouse = remote(server)
        for block in (1, 2):
            with pytest.raises(StaleHandle):
                await warehouse.read(*places(block, 0, [0]), ["wide"])
        await warehouse.write(0, 2, rows)
        assert (await warehouse.read(*places(2, 0, [3999]), ["wide"]))["wide"].values.tolist() == [1] * 256
        await warehouse.close()


# ── who may connect ──


async def test_a_wrong_secret_is_told_to_the_client_with_what_to_set(arena: Arena) -> None:
    async with WarehouseServer(arena, SCHEMA, secret=SECRET) as server:
        with pytest.raises(TransferError, match="set the secret that its server was started with"):
            await remote(server, secret=b"another secret of enough bytes").copy_in(0, EIGHT)
        await until(lambda: server.connections == 0)
        assert server.payload_sent == 0


@pytest.mark.parametrize("secret", [b"", b"short", "a string, no bytes", None])
async def test_no_secret_or_a_weak_one_is_refused_before_anything_listens(secret: Any, arena: Arena) -> None:
    with pytest.raises(ValueError, match=r"secret: .* must be 16 bytes or more"):
        WarehouseServer(arena, SCHEMA, secret=secret)
    with pytest.raises(ValueError, match=r"secret: .* must be 16 bytes or more"):
        remote(("127.0.0.1", 1), secret=secret)


async def test_a_server_that_does_not_know_the_secret_is_not_believed() -> None:
    """Whoever answers must prove it, too: here somebody who sends our own proof back."""

    async def mirror(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(struct.pack("<4sHxx32s", b"ADKW", 1, bytes(32)))
        proof = (await reader.readexactly(72))[-32:]
        writer.write(struct.pack("<dQQQ32s32s", 0.0, 10, 10, 10, bytes(32), proof))
        await reader.read()
        writer.close()

    async with await asyncio.start_server(mirror, "127.0.0.1", 0) as imposter:
        with pytest.raises(TransferError, match="does not prove that it knows the secret"):
            await remote(imposter.sockets[0].getsockname()).copy_in(0, EIGHT)


@pytest.mark.parametrize(
    ("hello", "message"),
    [
        (struct.pack("<4sHxx32s", b"HTTP", 1, bytes(32)), "what answers there is no warehouse"),
        (struct.pack("<4sHxx32s", b"ADKW", 2, bytes(32)), "speaks version 2, we speak 1"),
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
        assert len(heard) > 72
        reader, writer = await asyncio.open_connection(*server.address)
        writer.write(heard)
        async with asyncio.timeout(10):
            try:
                answer = await reader.read()
            except ConnectionResetError:
                answer = b""
        assert len(answer) <= 40, "no more than its hello"
        writer.close()
        await until(lambda: server.connections == 0)


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\n\r\n", bytes(72), os.urandom(300)])
async def test_a_stranger_learns_nothing_and_is_gone_in_time(sent: bytes, arena: Arena) -> None:
    async with WarehouseServer(arena, SCHEMA, secret=SECRET, limits=Limits(hello_seconds=0.2)) as server:
        reader, writer = await asyncio.open_connection(*server.address)
        writer.write(sent)
        async with asyncio.timeout(10):
            with suppress(ConnectionResetError):  # when it sent more than a handshake's bytes
                assert len(await reader.read()) <= 40
        await until(lambda: server.connections == 0)
        writer.close()


async def test_connections_are_limited(arena: Arena) -> None:
    async with WarehouseServer(arena, SCHEMA, secret=SECRET, limits=Limits(connections=1)) as server:
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
                assert len(await reader.read()) <= 40
        await warehouse.copy_in(0, EIGHT)
        await warehouse.close()
        for _, writer in strangers:
            writer.close()
        await until(lambda: server.connections == 0)


@contextmanager
def certificate(directory: Path) -> Iterator[tuple[ssl.SSLContext, ssl.SSLContext]]:
    """TLS contexts of a server with a new certificate for 127.0.0.1, and of a client that trusts it."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("the openssl command makes the certificate, and is not installed")
    key, cert = directory / "key.pem", directory / "cert.pem"
    subprocess.run(
        f"{openssl} req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=warehouse "
        f"-addext subjectAltName=IP:127.0.0.1 -keyout '{key}' -out '{cert}'",
        shell=True,
        check=True,
        capture_output=True,
    )
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(cert, key)
    yield server, ssl.create_default_context(cafile=str(cert))


async def test_everything_travels_under_tls(arena: Arena, tmp_path: Path) -> None:
    rows = pack(SCHEMA, {"wide": torch.arange(256, dtype=torch.uint8).repeat(5000, 1)})
    with certificate(tmp_path) as (at_server, at_client):
        async with WarehouseServer(arena, SCHEMA, secret=SECRET, ssl=at_server) as server:
            heard = bytearray()
            async with proxy(server.address, on_request=heard.extend, on_reply=heard.extend) as address:
                warehouse = remote(address, ssl=at_client)
                await warehouse.write(0, 1, rows)
                for slots in (range(5000), range(4999, -1, -1)):
                    found = await warehouse.read(*places(1, 0, slots), ["wide"])
                    assert (found["wide"].values.view(5000, 256) == torch.arange(256, dtype=torch.uint8)).all()
                await warehouse.close()
            assert len(heard) > 2 * rows.nbytes
            assert bytes(range(256)) not in heard


async def test_tls_on_one_end_only_or_an_unknown_certificate_is_refused(arena: Arena, tmp_path: Path) -> None:
    with certificate(tmp_path) as (at_server, at_client):
        async with WarehouseServer(arena, SCHEMA, secret=SECRET, ssl=at_server) as server:
            with pytest.raises(TransferError, match="trusts its certificate"):
                await remote(server, ssl=ssl.create_default_context()).copy_in(0, EIGHT)
            with pytest.raises(WarehouseUnreachable, match="TLS on both ends or on none"):
                await remote(server, timeout=0.3).copy_in(0, EIGHT)
        async with WarehouseServer(arena, SCHEMA, secret=SECRET) as server:
            with pytest.raises(TransferError, match="check that it serves TLS"):
                await remote(server, ssl=at_client).copy_in(0, EIGHT)


# ── real processes, real kills ──

PROCESS = """
import asyncio, sys
from pathlib import Path
import torch
from pipeline.columns import Column, Schema
from pipeline.warehouse.wire.server import WarehouseServer
from pipeline.warehouse.arena import Arena, StaleHandle

async def main(path, secret, port):
    schema = Schema([
        Column.ragged("ids", torch.int64), Column.scalar("reward", torch.float32),
        Column.fixed("scores", torch.bfloat16, [2, 3]), Column.text("answer"), Column.fixed("wide", torch.uint8, [256]),
    ])
    async with WarehouseServer(Arena(Path(path)), schema, secret=secret.encode(), port=int(port)) as server:
        print(server.address[1], flush=True)
        await asyncio.Event().wait()

asyncio.run(main(*sys.argv[1:]))
"""


@contextmanager
def process(arena: Arena, port: int = 0) -> Iterator[tuple[subprocess.Popen[str], tuple[str, int]]]:
    """A server of ``arena`` in a process of its own, and its address."""
    command = [sys.executable, "-c", PROCESS, str(arena.path), SECRET.decode(), str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[3]) as child:
        try:
            assert child.stdout is not None
            yield child, ("127.0.0.1", int(child.stdout.readline()))
        finally:
            child.kill()


@asynccontextmanager
async def proxy(
    target: tuple[str, int],
    on_request: Callable[[bytes], object] = lambda data: None,
    on_reply: Callable[[bytes], object] = lambda data: None,
) -> AsyncIterator[tuple[str, int]]:
    """Everything on its way, for a look."""

    async def forward(
        source: asyncio.StreamReader, sink: asyncio.StreamWriter, look: Callable[[bytes], object]
    ) -> None:
        try:
            while data := await source.read(1 << 16):
                look(data)
                sink.write(data)
                await sink.drain()
        except ConnectionError:
            pass
        finally:
            sink.close()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        narrow = socket.socket()
        narrow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        narrow.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(narrow, target)
        except ConnectionError:
            narrow.close()
            writer.close()
            return
        there, back = await asyncio.open_connection(sock=narrow)
        await asyncio.gather(forward(reader, back, on_request), forward(there, writer, on_reply))

    async with await asyncio.start_server(accept, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()


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
            warehouse, started = remote(through, timeout=3.0), asyncio.get_running_loop().time()
            with pytest.raises(WarehouseUnreachable, match=r"was not reached within 3 s \(Connection"):
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


async def test_a_server_that_stands_still_is_an_error_in_time_and_a_late_write_never_lands(arena: Arena) -> None:
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
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(WarehouseUnreachable, match="did not answer"):
        await remote(silent.getsockname(), timeout=0.3).copy_in(0, EIGHT)


async def test_a_connection_that_the_server_closed_for_idleness_is_replaced(arena: Arena) -> None:
    async with WarehouseServer(arena, SCHEMA, secret=SECRET, limits=Limits(idle_seconds=0.05)) as server:
        warehouse = remote(server)
        for _ in range(3):
            await warehouse.copy_in(0, EIGHT)
            await until(lambda: server.connections == 0)
        await warehouse.close()


async def test_a_cancelled_call_leaves_the_next_one_its_own_answer(arena: Arena) -> None:
    put(
        arena,
        pack(SCHEMA, {"wide": torch.ones(14_000, 256, dtype=torch.uint8), "reward": torch.arange(14_000.0)}),
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
            assert (await warehouse.read(*places(1, 0, [turn]), ["reward"]))["reward"].values.tolist() == [turn]
        await warehouse.close()
        await until(lambda: server.connections == 0)


# ── memory and time are bounded, whoever is at the other end ──


async def test_clients_that_stop_reading_cost_the_server_little_and_not_for_long(tmp_path: Path) -> None:
    arena = Arena.create(tmp_path / "arena", 1 << 25)
    count, peers = 1 << 16, 4
    put(arena, pack(SCHEMA, {"wide": torch.zeros(count, 256, dtype=torch.uint8)}), 0, 1)
    control = struct.pack("<II", 16, count) + np.stack(places(1, 0, range(count - 1, -1, -1))).tobytes()
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
        assert held < peers * (8 << 20), "a request, where its rows lie, and one piece of them, for each"
        assert peak < peers * (12 << 20)
        await until(lambda: server.connections == 0)
        for peer in stalled:
            peer.stream.close()
        await until(lambda: len(asyncio.all_tasks()) == before)


async def test_a_client_that_stops_in_the_middle_of_a_frame_is_dropped(arena: Arena) -> None:
    limits = Limits(frame_seconds=0.1, idle_seconds=60.0)
    async with WarehouseServer(arena, SCHEMA, secret=SECRET, limits=limits) as server:
        for part in (struct.pack("<B3xIQ", 1, 32, 0), struct.pack("<B3xIQqqd", 4, 24, 64, 0, 64, 1e18) + b"half"):
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


# ── fuzz ──


def valid_frames(arena: Arena) -> list[bytes]:
    """Requests of each kind as a client sends them; writes come too late, so that none of them lands."""
    rows = pack(SCHEMA, ROWS)
    put(arena, rows, 64, 1)
    put(arena, pack(SCHEMA, {"reward": torch.zeros(5)}), 8192, 2)
    memory = bytearray(rows.nbytes)
    rows.write_into(memoryview(memory), 3)
    edge = 32 + 32 * len(COLUMNS)
    frames = []
    for mask, ask in ((15, places(1, 64, [2, 0, 1])), (1, places(1, 64, [0, 1, 2])), (2, places(2, 8192, [4]))):
        frames.append((1, struct.pack("<II", mask, len(ask[0])) + np.stack(ask).tobytes(), b""))
    mixed = np.array([[1, 2, 1], [64, 8192, 64], [0, 4, 2]], np.int64)
    frames.append((1, struct.pack("<II", 2, 3) + mixed.tobytes(), b""))
    frames.append((2, struct.pack("<qqqd", 16384, 3, rows.nbytes, 0.0) + memory[:edge], bytes(memory[edge:])))
    frames.append((4, struct.pack("<qqd", 64, 256, 0.0), bytes(256)))
    return [struct.pack("<B3xIQ", kind, len(control), len(body)) + control + body for kind, control, body in frames]


EXTREMES = [0, 1, -1, 2, 7, 63, 64, 255, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63 - 1, -(2**63), -(2**63) + 7]


def mutated(frame: bytes, rng: np.random.Generator) -> bytes:
    data = bytearray(frame)
    for _ in range(int(rng.integers(1, 4))):
        how, at = int(rng.integers(7)), int(rng.integers(min(len(data), 400) or 1))
        if how == 0:
            data[at : at + 1] = bytes([int(rng.integers(256))])
        elif how == 1:
            data[at // 8 * 8 : at // 8 * 8 + 8] = struct.pack("<q", EXTREMES[int(rng.integers(len(EXTREMES)))])
        elif how == 2:
            data[at // 4 * 4 : at // 4 * 4 + 4] = struct.pack("<i", int(rng.integers(-(2**31), 2**31)))
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
    """What the server makes of a frame, without its sockets: the request's kind, or why it is refused."""
    if len(frame) < 16:
        return "short"
    try:
        kind, size, payload = parse_head(frame[:16], limits)
        request = parse_request(kind, frame[16 : 16 + size], payload, SCHEMA, room, limits)
        if isinstance(request, ReadRequest):
            found = plan_reply(reader, SCHEMA, request, limits)
            told = sum(
                runs.nbytes + (0 if offsets is None else 8 * (len(request.slots) + 1)) for offsets, runs in found
            )
            batches = list(reply_batches(reader, found))
            assert sum(len(buffer) for batch in batches for buffer in batch) == told
            assert max(map(len, batches)) < 1000, "the kernel takes 1024"
    except (TransferError, BlockError, ColumnError, StaleHandle) as error:
        return type(error).__name__ if len(str(error)) > 20 else "says nothing"
    return type(request).__name__


def test_100_000_frames_are_each_understood_or_refused(arena: Arena) -> None:
    frames, rng, limits = valid_frames(arena), np.random.default_rng(5), Limits()
    reader, before, seen = (
        BlockReader(arena.slice(0, arena.nbytes), SCHEMA),
        bytes(arena.slice(0, arena.nbytes)),
        dict[str, int](),
    )
    assert [taken(frame, reader, arena.nbytes, limits) for frame in frames] == (
        ["ReadRequest"] * 4 + ["WriteRequest", "CopyRequest"]
    )
    resident = 0
    for turn in range(100_000):
        if turn == 20_000:
            gc.collect()
            resident = psutil.Process().memory_info().rss
        outcome = taken(fuzzed(frames, rng), reader, arena.nbytes, limits)
        seen[outcome] = seen.get(outcome, 0) + 1
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
        assert seen[outcome] > 100, "the fuzzer reaches each end"


def test_reads_of_a_damaged_arena_are_refused_or_stay_inside_it(arena: Arena) -> None:
    """Whatever a block's header and offsets say."""
    frames, rng, limits = valid_frames(arena)[:4], np.random.default_rng(6), Limits()
    reader, words = (
        BlockReader(arena.slice(0, arena.nbytes), SCHEMA),
        np.frombuffer(arena.slice(0, arena.nbytes), np.int64),
    )
    whole, seen = words.copy(), set[str]()
    for _ in range(10_000):
        first = int(rng.choice([8, 1024]))
        at = first + 2 + int(rng.integers(60 if first == 8 else 6))
        words[at] = rng.choice(EXTREMES) if rng.integers(2) else int(words[at]) + int(rng.integers(-64, 64))
        seen.add(taken(frames[int(rng.integers(4))], reader, arena.nbytes, limits))
        words[at] = whole[at]
    assert seen <= {"BlockError", "ColumnError", "ReadRequest"}
    assert {"BlockError", "ReadRequest"} <= seen


async def test_fuzzed_frames_over_real_connections_leave_no_trace(arena: Arena) -> None:
    frames, rng = valid_frames(arena), np.random.default_rng(7)
    limits = Limits(frame_seconds=1.0, idle_seconds=5.0)
    reader, before = BlockReader(arena.slice(0, arena.nbytes), SCHEMA), bytes(arena.slice(0, arena.nbytes))
    lands = {"WriteRequest", "CopyRequest"}
    async with WarehouseServer(arena, SCHEMA, secret=SECRET, limits=limits) as server:
        tasks, warehouse, resident, told = len(asyncio.all_tasks()), remote(server), 0, 0
        for turn in range(400):
            if turn == 100:
                gc.collect()
                resident = psutil.Process().memory_info().rss
            batch = [fuzzed(frames, rng) for _ in range(10)]
            batch = [
                f for f in batch if f[:1] not in (b"\2", b"\4") or taken(f, reader, arena.nbytes, limits) not in lands
            ]
            batch.insert(0, frames[int(rng.choice(4))])
            connection = await warehouse._connect()
            sock = connection.stream.sock
            try:
                async with asyncio.timeout(20):
                    await connection.stream.send(b"".join(batch))
                    sock.shutdown(socket.SHUT_WR)
                    while True:
                        told += len(await connection.stream.receive(1))
            except ConnectionError:
                pass
            connection.stream.close()
        await until(lambda: server.connections == 0)
        assert len(asyncio.all_tasks()) == tasks
        assert told > 400 * 16, "each first frame was answered"
        gc.collect()
        assert psutil.Process().memory_info().rss - resident < 8 << 20
        assert bytes(arena.slice(0, arena.nbytes)) == before
        found = await warehouse.read(*places(1, 64, [2]), ["reward"])
        assert found["reward"].values.tolist() == [2.0]
        await warehouse.close()
