"""What the index itself refuses and remembers of training, whoever calls it: no trainer, gate or
worker is trusted."""

from __future__ import annotations

from pathlib import Path

import pytest
import redis.asyncio
import torch

from pipeline.data.columns import Column, Schema
from pipeline.documents.flow import VERSION
from pipeline.index.client import BoundBroken, GateClosed, Index, RunConfig, StageSpec, WrittenTwice
from pipeline.index.warehouses import Lost
from pipeline.warehouse.dock import Dock
from tests.pipeline.index.test_leases import with_a_clock_that_can_be_set
from tests.pipeline.warehouse.test_dock import (
    COUNTERS,
    SCHEMA,
    admit,
    claim,
    config,
    through_advantage,
)


async def opened(index: Index, folder: Path, run: RunConfig) -> Dock:
    await index.init(run, COUNTERS)
    dock = Dock(index, SCHEMA, worker="w", directory=folder, slab=0)
    await dock.join(1 << 20)
    return dock


def ledger_of(ledger: dict[str, int], *names: str) -> tuple[int, ...]:
    return tuple(ledger[name] for name in names)


async def test_a_step_past_the_bound_is_refused_though_its_claim_was_within_it(
    index: Index, tmp_path: Path
) -> None:
    """Two trainers hold a batch each at version 0.

    When the first has trained, the second's batch is one version old.
    """
    dock = await opened(index, tmp_path, config(groups_per_step=1, slack=1, window=2, staleness=0))
    await admit(dock, range(2))
    await through_advantage(dock)
    first = await claim(dock, "update")
    second = await claim(dock, "update")
    assert await index.train(first, 0) == 1
    with pytest.raises(BoundBroken, match="of version 0 at version 1: the bound is 0"):
        await index.train(second, 1)
    assert ledger_of(await index.ledger(), "trained", "in_flight") == (2, 2)


async def test_what_stages_have_done_is_reported_by_one_step_and_only_when_it_is_made(
    index: Index, tmp_path: Path
) -> None:
    dock = await opened(index, tmp_path, config(groups_per_step=1, slack=1, window=2, staleness=0))
    await admit(dock, range(2))
    await through_advantage(dock)
    first, second = await claim(dock, "update"), await claim(dock, "update")
    await index.add_amounts({"calls": 2, "seconds": 0.1})
    await index.add_amounts({"calls": 1, "seconds": 0.2})
    amounts = await index.amounts()
    assert amounts == pytest.approx({"calls": 3, "seconds": 0.3})
    await index.add_amounts({"calls": 5})  # while the step is made
    await index.train(first, 0, None, amounts)
    with pytest.raises(BoundBroken):
        await index.train(second, 1, None, await index.amounts())
    assert await index.amounts() == {"calls": 5}


async def test_rows_without_a_response_are_never_trained(index: Index, tmp_path: Path) -> None:
    """A flow in which the trainer needs nothing but the prompts: the ledger could not close over
    such rows."""
    schema = Schema([Column.ragged("prompt_ids", torch.int64)])
    stages = (StageSpec("update", "batch", schema.mask(["prompt_ids"]), 0),)
    await index.init(RunConfig(stages, 2, 1, 1, 1), COUNTERS)
    dock = Dock(index, schema, worker="w", directory=tmp_path, slab=0)
    await dock.join(1 << 20)
    await dock.admit([(0, 2), (1, 2)], {"prompt_ids": [torch.arange(3), torch.arange(4)]})
    batch = await claim(dock, "update")
    with pytest.raises(WrittenTwice, match="row 0 was trained before, or never generated"):
        await index.train(batch, 0)
    assert (await index.status()).trained == 0
    assert ledger_of(await index.ledger(), "generated", "trained", "in_flight") == (0, 0, 0)


async def test_the_gate_opens_with_the_published_version_and_not_with_the_trained_one(
    index: Index, tmp_path: Path
) -> None:
    """What waits for the gate wakes up by the publication, too, and not by chance later on."""
    dock = await opened(index, tmp_path, config(groups_per_step=1, slack=1, staleness=1))
    await admit(dock, range(2))
    await through_advantage(dock)
    assert await index.train(await claim(dock, "update"), 0) == 1
    before = await index.status()
    with pytest.raises(GateClosed, match="group 2 is past the gate, which stands at 2"):
        await admit(dock, range(2, 3))
    await index.publish_weights(1, {})
    assert await index.wait(VERSION, before.wait, 0.01), "the publication has woken nobody"
    await admit(dock, range(2, 3))


async def test_samples_that_were_made_again_stay_in_the_ledger_of_a_resumed_run(
    index: Index, tmp_path: Path
) -> None:
    """Of 3 groups of 2 rows with 3 tokens each, one is trained, and the other two are lost with
    their warehouse."""
    dock = await opened(index, tmp_path, config(groups_per_step=1, slack=3, staleness=3))
    await admit(dock, range(3))
    await through_advantage(dock)
    await index.train(await claim(dock, "update"), 0)
    home = next(record.number for record in await index.warehouses())
    assert await index.lose_warehouse(home) == Lost(groups=2, rows=4)
    figures = ("generated", "trained", "filtered", "remade", "in_flight")
    assert ledger_of(await index.ledger(), *figures) == (6, 2, 0, 4, 0)
    state = await index.resume_point()
    await index.erase()
    await index.init(config(groups_per_step=1, slack=3, staleness=3), state.counters, state.remake)
    ledger = await index.ledger()
    assert ledger_of(ledger, *figures) == (6, 2, 0, 4, 0)
    assert ledger_of(ledger, *(f"{name}_tokens" for name in figures)) == (18, 6, 0, 12, 0)


async def test_a_warehouse_is_lost_after_exactly_the_silence_that_is_allowed(
    index: Index, tmp_path: Path
) -> None:
    """The server's clock is moved by the key ``shift``, in seconds."""
    dock = await opened(index, tmp_path, config())
    await admit(dock, range(2))
    assert dock.home is not None
    async with redis.asyncio.Redis.from_url(index.url) as server:
        await server.set("shift", 0)
        await index.load(with_a_clock_that_can_be_set())
        try:
            await index.announce_warehouse(dock.home, "127.0.0.1", 1)
            for seconds in (2, 4, 6, 4000):
                await server.set("shift", seconds)
                heard = await index.suspect_warehouse(dock.home, 9)
                assert isinstance(heard, float)
                assert min(seconds, 8) <= heard < 9, "of a jump 2.5 s count"
            await server.set("shift", 4001)
            assert await index.suspect_warehouse(dock.home, 9) == Lost(groups=2, rows=4)
            assert await index.suspect_warehouse(dock.home, 9) == "gone"
        finally:
            await server.delete("shift")
            await index.load()
