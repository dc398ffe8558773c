"""A refusal names what is wrong, changes nothing, and the next call works."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import torch

from pipeline.data.arena import Arena, StaleHandle
from pipeline.data.blocks import PackedRows, pack
from pipeline.warehouse.requests import (
    WRITE,
    Limits,
    Request,
    WriteRequest,
    parse_request,
)
from pipeline.warehouse.server import WarehouseServer
from pipeline.wire.frames import TransferError
from tests.pipeline.wire.served import (
    ROWS,
    SCHEMA,
    SECRET,
    places,
    put,
    remote,
    until,
)


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
    ask: tuple[np.ndarray, np.ndarray, np.ndarray],
    error: type[Exception],
    message: str,
    arena: Arena,
) -> None:
    put(arena, pack(SCHEMA, ROWS), 64, 1)
    before = bytes(arena.slice(0, arena.nbytes))
    async with WarehouseServer(arena, SCHEMA, secret=SECRET, limits=Limits(rows=100)) as server:
        warehouse = remote(server)
        with pytest.raises(error, match=message):
            await warehouse.read(*ask, ["reward"])
        assert (await warehouse.read(*places(1, 64, [2]), ["reward"]))[
            "reward"
        ].values.tolist() == [2.0]
        assert server.connections == 1, "the refusal cost no connection"
        await warehouse.close()
    assert bytes(arena.slice(0, arena.nbytes)) == before


async def test_a_column_that_a_block_does_not_have_is_named(arena: Arena) -> None:
    put(arena, pack(SCHEMA, {"reward": torch.zeros(2)}), 0, 4)
    async with WarehouseServer(arena, SCHEMA, secret=SECRET) as server:
        with pytest.raises(
            TransferError, match="column 'ids': row 0 of this claim does not have it"
        ):
            await remote(server).read(*places(4, 0, [0]), ["ids"])


async def test_more_bytes_than_the_limits_are_refused_on_either_end(arena: Arena) -> None:
    put(arena, pack(SCHEMA, {"wide": torch.zeros(100, 256, dtype=torch.uint8)}), 0, 1)
    ask = (*places(1, 0, range(100)), ["wide"])
    async with WarehouseServer(
        arena, SCHEMA, secret=SECRET, limits=Limits(nbytes=20_000)
    ) as server:
        with pytest.raises(TransferError, match="25600 bytes, at most 20000 are sent at a time"):
            await remote(server).read(*ask)
        with pytest.raises(TransferError, match="the warehouse takes 20000 at a time"):
            await remote(server).copy_in(0, memoryview(bytes(20_008)))
    async with WarehouseServer(arena, SCHEMA, secret=SECRET) as server:
        with pytest.raises(TransferError, match="25600 bytes of payload, at most 20000"):
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


# of a block's header; then four words for each column
MAGIC_WORD, BLOCK, COUNT, COLUMN_COUNT = range(4)
IDS_BIT, IDS_OFFSETS, IDS_VALUES, IDS_BYTES, REWARD_BIT, REWARD_OFFSETS, _, REWARD_BYTES = range(
    4, 12
)
MISPLACED = "column 'ids' lies at .* sections follow one another inside the block's"


@pytest.mark.parametrize(
    ("word", "added", "message"),
    [
        (MAGIC_WORD, 1, "header is of block 3 .* must be of 3"),
        (BLOCK, 1, "header is of block 4 .* must be of 3"),
        (COUNT, -3, "0 rows, must be 1 to 100"),
        (COUNT, 98, "101 rows, must be 1 to 100"),
        (COLUMN_COUNT, -1, "header counts 3 columns and describes 4"),
        (IDS_BIT, 5, "column bit 5 is not in the schema"),
        (IDS_BIT, -1, "column bit -1 is not in the schema"),
        (REWARD_BIT, -1, "column bit 0 .* comes twice"),
        (IDS_OFFSETS, -64, MISPLACED),  # inside the header
        (IDS_OFFSETS, 4, MISPLACED),  # no multiple of the offsets' 8 bytes
        (IDS_VALUES, -64, MISPLACED),  # inside the offsets
        (IDS_BYTES, 4, MISPLACED),  # half a value
        (IDS_BYTES, -48, MISPLACED),  # 40 bytes less 48
        (IDS_BYTES, 1 << 40, MISPLACED),
        (REWARD_OFFSETS, 1, "column 'reward' has 12 bytes, must be 3 times 4 and no offsets"),
        (REWARD_BYTES, 4, "column 'reward' has 16 bytes, must be 3 times 4 and no offsets"),
    ],
)
def test_a_header_that_does_not_describe_its_block_is_refused(
    word: int, added: int, message: str
) -> None:
    rows = pack(SCHEMA, ROWS)
    memory = bytearray(rows.nbytes)
    rows.write_into(memoryview(memory), 3)
    header = np.frombuffer(memory, np.int64, 4 + 4 * len(ROWS)).copy()

    def parsed() -> Request:
        control = struct.pack("<qqqd", 64, 3, rows.nbytes, 0.0) + header.tobytes()
        return parse_request(
            WRITE, control, rows.nbytes - header.nbytes, SCHEMA, 4096, Limits(rows=100)
        )

    request = parsed()
    assert isinstance(request, WriteRequest)
    assert (request.offset, request.block, request.nbytes) == (64, 3, rows.nbytes)
    header[word] += added
    with pytest.raises(TransferError, match=f"write: {message}"):
        parsed()


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
        with pytest.raises(
            TransferError, match="offsets of column 'ids' do not divide its 40 bytes"
        ):
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
        assert (await warehouse.read(*places(2, 0, [3999]), ["wide"]))["wide"].values.tolist() == [
            1
        ] * 256
        await warehouse.close()
