"""Room for a worker's next progress, which comes with the present one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pipeline.data.columns import Column, Schema
from pipeline.index.client import Claim, Index, RunConfig, StageSpec
from pipeline.warehouse.dock import Dock

SCHEMA = Schema([Column.scalar("prompt", torch.int64), Column.ragged("response", torch.int64)])
STAGES = (
    StageSpec(
        "rollout", "groups", SCHEMA.mask(["prompt"]), SCHEMA.mask(["response"]), releases=True
    ),
)


@pytest.fixture
async def dock(index: Index, tmp_path: Path) -> Dock:
    await index.init(RunConfig(STAGES), {})
    dock = Dock(index, SCHEMA, worker="w", directory=tmp_path)
    await dock.join(64 << 10)
    await dock.put({"prompt": torch.arange(2)})
    return dock


async def claim(dock: Dock) -> Claim:
    claimed = await dock.claim("rollout", 2)
    assert claimed is not None
    return claimed


async def park(dock: Dock, claimed: Claim, position: int, tokens: int) -> None:
    rows = {"response": [torch.arange(tokens)]}
    await dock.park(claimed, [position], rows, generated=[(0, tokens)])


async def calls(dock: Dock) -> int:
    return int((await dock.index._redis.info("commandstats"))["cmdstat_fcall"]["calls"])


async def used(dock: Dock) -> int:
    return int((await dock.index.stats())["warehouses"]["local"]["used"])


async def test_a_row_is_handed_on_by_one_call(dock: Dock) -> None:
    claimed = await claim(dock)
    await park(dock, claimed, 0, 10)
    before = await calls(dock)
    await park(dock, claimed, 1, 20)
    assert await calls(dock) == before + 1
    again = await claim(dock)
    assert again.tokens.tolist() == [10, 20]
    _, columns = await dock.begun(again, ["response"])
    assert columns["response"].lists() == [[*range(10)], [*range(20)]]


async def test_what_does_not_fit_takes_room_of_its_own(dock: Dock) -> None:
    claimed = await claim(dock)
    await park(dock, claimed, 0, 10)
    await park(dock, claimed, 1, 2000)
    again = await claim(dock)
    _, columns = await dock.begun(again, ["response"])
    assert columns["response"].lists() == [[*range(10)], [*range(2000)]]


async def test_room_that_is_not_used_is_given_back(dock: Dock) -> None:
    claimed = await claim(dock)
    await park(dock, claimed, 0, 10)
    await park(dock, claimed, 1, 10)
    rows = {"response": [torch.arange(11)] * 2}
    await dock.commit(await claim(dock), [0, 1], rows, generated=[(0, 11)] * 2)
    assert await used(dock) > 0
    await dock.writer.flush()
    assert await used(dock) == 0


async def test_none_is_taken_from_a_warehouse_that_is_nearly_full(dock: Dock) -> None:
    claimed = await claim(dock)
    fill = await dock.writer.allocate(44 << 10)
    before = await used(dock)
    await park(dock, claimed, 0, 10)
    assert await used(dock) == before + 256  # the row's own block
    await dock.index.close_blocks("w", [fill.block])
