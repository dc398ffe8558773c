"""Workers on other nodes get the same rows as workers on the rows' own node."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.data.arena import Arena
from pipeline.data.blocks import pack
from pipeline.data.columns import DTYPES, Column, ColumnError, Schema
from pipeline.warehouse.server import WarehouseServer
from tests.pipeline.block_view import BlockView
from tests.pipeline.wire.served import (
    COLUMNS,
    ROWS,
    SCHEMA,
    SECRET,
    assert_rows,
    bits,
    places,
    put,
    random_values,
    remote,
    until,
)

column_kinds = st.tuples(
    st.sampled_from(["scalar", "fixed", "ragged", "text"]), st.sampled_from(DTYPES)
)


@settings(max_examples=60, deadline=None)
@given(
    kinds=st.lists(column_kinds, min_size=1, max_size=5), seed=st.integers(0, 2**32), data=st.data()
)
async def test_a_read_equals_the_rows_on_their_own_node(
    kinds: list[tuple[str, torch.dtype]],
    seed: int,
    data: st.DataObject,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Any schema, blocks written there or sent there, rows in any order with repeats, columns in
    any order."""
    rng = np.random.default_rng(seed)
    columns = []
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
        warehouse = remote(server, schema)
        at = 64 * int(rng.integers(0, 4))
        for block in range(1, int(rng.integers(2, 5))):
            count = int(rng.integers(1, 9))
            rows: dict[str, Any] = {}
            for column in columns:
                lengths = rng.integers(0, data.draw(st.sampled_from([1, 4, 300])), count)
                if column.dtype == "utf8":
                    rows[column.name] = [
                        "".join(map(chr, rng.integers(32, 0xD7FF, n))) for n in lengths
                    ]
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
            names = [
                str(name)
                for name in rng.permutation([c.name for c in columns])[: int(rng.integers(1, 6))]
            ]
            found = await warehouse.read(
                np.array(asked, np.int64),
                np.array([views[b][0] for b in asked], np.int64),
                np.array(slots, np.int64),
                names,
            )
            assert_rows(
                found,
                schema,
                names,
                [(views[b][1], slot) for b, slot in zip(asked, slots, strict=True)],
            )
        await warehouse.close()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
async def test_every_dtype_comes_back_bit_for_bit(dtype: torch.dtype, arena: Arena) -> None:
    rng = np.random.default_rng(3)
    schema = Schema(
        [Column.scalar("s", dtype), Column.fixed("f", dtype, [5]), Column.ragged("r", dtype)]
    )
    ragged = [random_values(dtype, [n], rng) for n in (3, 0, 700)]
    rows = {
        "s": random_values(dtype, [3], rng),
        "f": random_values(dtype, [3, 5], rng),
        "r": ragged,
    }
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


@pytest.mark.parametrize("count", [31, 32, 60])
async def test_a_schema_may_have_more_columns_than_a_word_has_bits(
    count: int, arena: Arena
) -> None:
    schema = Schema(
        [Column.scalar(f"c{number}", torch.int64) for number in range(count)], most=count
    )
    rows = {f"c{number}": torch.tensor([number, -number]) for number in range(count)}
    async with WarehouseServer(arena, schema, secret=SECRET) as server:
        warehouse = remote(server, schema)
        await warehouse.write(64, 9, pack(schema, rows))
        found = await warehouse.read(*places(9, 64, [1, 0]), list(rows))
        values = {name: packed.values.tolist() for name, packed in found.items()}
        assert values == {f"c{number}": [-number, number] for number in range(count)}
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
    with pytest.raises(ColumnError, match="'nope': is not in the schema"):
        await warehouse.read(*places(1, 0, [0]), ["nope"])


async def test_raw_bytes_move_a_block_from_one_warehouse_to_another(
    arena: Arena, tmp_path: Path
) -> None:
    other = Arena.create(tmp_path / "other", 1 << 16)
    rows = pack(SCHEMA, ROWS)
    view = put(arena, rows, 128, 5)
    async with WarehouseServer(other, SCHEMA, secret=SECRET) as server:
        target = remote(server)
        await target.copy_in(4096, arena.slice(128, rows.nbytes))
        found = await target.read(*places(5, 4096, [2, 0]), COLUMNS)
        assert_rows(found, SCHEMA, COLUMNS, [(view, 2), (view, 0)])
        await target.close()


async def test_calls_at_the_same_time_do_not_mix(arena: Arena) -> None:
    count = 200
    rows = {
        "ids": [torch.full((i,), i) for i in range(count)],
        "reward": torch.arange(count, dtype=torch.float32),
    }
    put(arena, pack(SCHEMA, rows), 0, 1)
    async with WarehouseServer(arena, SCHEMA, secret=SECRET) as server:
        warehouse = remote(server, connections=3)

        async def one(slot: int) -> None:
            found = await warehouse.read(*places(1, 0, [slot, count - 1 - slot]), ["reward", "ids"])
            assert found["reward"].values.tolist() == [slot, count - 1 - slot]
            assert found["ids"].values.tolist() == [slot] * slot + [count - 1 - slot] * (
                count - 1 - slot
            )

        async with asyncio.TaskGroup() as tasks:
            for slot in range(count):
                tasks.create_task(one(slot))
        assert 1 <= server.connections <= 3
        await warehouse.close()
        await until(lambda: server.connections == 0)


async def test_memory_is_used_again_only_when_its_reader_let_it_go(arena: Arena) -> None:
    count = 12_000
    put(
        arena,
        pack(
            SCHEMA,
            {"wide": torch.arange(count).remainder(251).to(torch.uint8)[:, None].repeat(1, 256)},
        ),
        0,
        1,
    )

    def right(values: torch.Tensor, slots: Sequence[int]) -> bool:
        return bool((values.view(-1, 256) == torch.tensor(slots).remainder(251)[:, None]).all())

    async with WarehouseServer(arena, SCHEMA, secret=SECRET) as server:
        warehouse = remote(server)
        rng = np.random.default_rng(4)
        held = list[tuple[torch.Tensor, list[int]]]()
        addresses = set[int]()
        for _ in range(200):
            first, last = sorted(rng.integers(0, count, 2).tolist())
            slots = list(range(first, last + 1))
            values = (await warehouse.read(*places(1, 0, slots), ["wide"]))["wide"].values
            addresses.add(values.data_ptr())
            part = int(rng.integers(len(slots)))
            held.append(
                (values[256 * part :].view(torch.int16), slots[part:])
                if rng.integers(2)
                else (values, slots)
            )
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
        sent = server.bytes_sent
        received = server.bytes_received
        assert sent > server.payload_sent
        await warehouse.close()
        await until(lambda: server.connections == 0)
        assert (server.bytes_sent, server.bytes_received) == (sent, received), (
            "closed connections stay in the count"
        )
