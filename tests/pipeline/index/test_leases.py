"""Leases are safe from callers that have not claimed them: tokens cannot be guessed, and run, stage
and owner must fit."""

from __future__ import annotations

import asyncio
import time
from copy import copy
from pathlib import Path

import pytest
import redis.asyncio
import torch

from pipeline.index.calls import library
from pipeline.index.claims import Nothing
from pipeline.index.client import Claim, Index, LeaseLost
from pipeline.warehouse.dock import Dock
from tests.pipeline.warehouse.test_dock import COUNTERS, SCHEMA, admit, config, respond

OWNERS = ["", "bearer:a"]  # the run's own workers, and a program outside
FOREIGN = ["", "bearer:b", "index"]


@pytest.fixture
async def dock(index: Index, tmp_path: Path) -> Dock:
    await index.init(config(), COUNTERS)
    dock = Dock(index, SCHEMA, worker="w", directory=tmp_path, slab=0)
    await dock.join(1 << 20)
    await admit(dock, range(2))
    return dock


async def claim(dock: Dock, owner: str, stage: str = "rollout", lease: float = 60.0) -> Claim:
    version = 0 if stage == "rollout" else None
    found = await dock.index.claim(stage, dock.worker, 1, lease, version, dock.home, owner=owner)
    assert isinstance(found, Claim)
    return found


def disguised(
    claim: Claim, *, owner: str | None = None, token: str | None = None, stage: str | None = None
) -> Claim:
    """A claim on the same rows, with parts of the lease replaced."""
    other = copy(claim)
    other.owner = claim.owner if owner is None else owner
    other.token = claim.token if token is None else token
    other.stage = claim.stage if stage is None else stage
    return other


async def assert_untouched(dock: Dock, held: Claim) -> None:
    """Check that every call with the lease of ``held`` is refused or changes nothing."""
    index = dock.index
    assert await index.renew(held.stage, [held.token], 3600, held.owner) == set()
    assert held.stage != "rollout" or await index.lease(held.token, held.owner) is None
    await index.hand_back(held)
    if held.stage == "rollout":
        with pytest.raises(LeaseLost):
            await respond(dock, held)
        progress = {"response_ids": [torch.ones(2, dtype=torch.int64)] * len(held)}
        with pytest.raises(LeaseLost):
            await dock.park(held, range(len(held)), progress, generated=[(0, 2)] * len(held))
        with pytest.raises(LeaseLost):
            await index.drop_groups(held, [0])
    with pytest.raises(LeaseLost):
        await index.train(disguised(held, stage="update"), 0)


@pytest.mark.parametrize("owner", OWNERS)
async def test_only_its_owner_can_use_a_lease(owner: str, dock: Dock) -> None:
    held = await claim(dock, owner)
    before = await dock.index.stats()
    for foreign in set(FOREIGN) - {owner}:
        await assert_untouched(dock, disguised(held, owner=foreign))
    assert await dock.index.stats() == before, (
        "a foreign call has changed something, if only a deadline"
    )
    assert (await dock.index.ledger())["redelivered"] == 0
    assert await dock.index.renew("rollout", [held.token], 60, owner) == {held.token}
    await respond(dock, held)


async def test_a_token_holds_for_the_stage_of_its_claim_alone(dock: Dock) -> None:
    held = await claim(dock, "")
    before = await dock.index.stats()
    for stage in ("reward", "advantage", "update"):
        await assert_untouched(dock, disguised(held, stage=stage))
    assert await dock.index.stats() == before
    await respond(dock, held)


async def test_a_token_holds_for_its_own_run_alone(
    dock: Dock, index: Index, tmp_path: Path
) -> None:
    other = Dock(
        Index(index.url, f"{index.run}-other"),
        SCHEMA,
        worker="w",
        directory=tmp_path / "other",
        slab=0,
    )
    try:
        await other.index.init(config(), COUNTERS)
        await other.join(1 << 20)
        await admit(other, range(2))
        held = await claim(dock, "")
        there = await claim(other, "")
        assert held.row.tolist() == there.row.tolist(), "only the token differs"
        await assert_untouched(dock, there)
        await respond(dock, held)
        await respond(other, there)
    finally:
        await other.index.erase()
        await other.close()
        await other.index.close()


async def test_tokens_are_random_and_no_status_shows_them(dock: Dock) -> None:
    first = await claim(dock, "")
    second = await claim(dock, "")
    assert len({first.token, second.token}) == 2
    for token in (first.token, second.token):
        assert len(bytes.fromhex(token)) == 16
        assert token not in repr(await dock.index.stats())
    for guess in ("1", "2", "3", "", f"{int(first.token, 16) + 1:032x}"):
        await assert_untouched(dock, disguised(first, token=guess))
    await respond(dock, first)
    await respond(dock, second)


@pytest.mark.parametrize("shift", [-3600, 3600, 86400])
async def test_a_clock_that_is_set_makes_no_lease_longer_or_shorter(
    shift: int, index: Index, tmp_path: Path
) -> None:
    """The server's clock, as the library reads it, is moved by the key ``shift``, in seconds."""
    await index.init(config(), COUNTERS)
    async with redis.asyncio.Redis.from_url(index.url) as server:
        await server.set("shift", 0)
        await index.load(with_a_clock_that_can_be_set())
        try:
            dock = Dock(index, SCHEMA, worker="w", directory=tmp_path, slab=0)
            await dock.join(1 << 20)
            await admit(dock, range(1))
            began = time.monotonic()
            lost = await claim(dock, "", lease=2.0)
            await server.set("shift", shift)
            while isinstance(
                found := await index.claim("rollout", "w", 1, 60.0, 0, dock.home), Nothing
            ):
                assert found.due is not None
                assert found.due <= 0.5, "it looks again in a quarter of the lease"
                await index.wait("rollout", found.wait, found.due)
            lasted = time.monotonic() - began
            assert lasted > 1.4, "at most a quarter of the lease is lost by the jump"
            assert lasted < 60, "a busy machine may be late, but not by the jump"
            assert found.row.tolist() == lost.row.tolist()
            assert (await index.take_swap_turn("a", most=1, lease=20.0)).granted
            await server.set("shift", 2 * shift)
            assert not (await index.take_swap_turn("b", most=1, lease=20.0)).granted
        finally:
            await server.delete("shift")
            await index.load()


async def test_time_in_which_nobody_calls_does_not_end_a_lease(dock: Dock) -> None:
    """All processes of a run, the server among them, were stopped for longer than the lease; then a
    server that is started again goes on where time was."""
    held = await claim(dock, "", lease=1.0)
    await asyncio.sleep(1.5)
    assert await dock.index.renew("rollout", [held.token], 1.0) == {held.token}
    await dock.index.load(library() + "\n")  # another library, which remembers nothing
    try:
        await asyncio.sleep(1.5)
        assert await dock.index.renew("rollout", [held.token], 1.0) == {held.token}
        for _ in range(20):
            await dock.index.stats()
            await asyncio.sleep(0.1)
        assert await dock.index.renew("rollout", [held.token], 1.0) == set()
    finally:
        await dock.index.load()


def with_a_clock_that_can_be_set() -> str:
    set_by_key = "local t = call('TIME')\n  t[1] = t[1] + int(call('GET', 'shift'))"
    return library().replace("local t = call('TIME')", set_by_key)
