"""A claim that waits on the server: it is made when rows come, once, whatever happens to the wait."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import uuid
from pathlib import Path
from typing import Any

import msgpack
import pytest
import torch
from redis.exceptions import ResponseError

from pipeline.data.columns import Column, Schema
from pipeline.index.claims import Nothing
from pipeline.index.client import Claim, Index, RunConfig, StageSpec
from pipeline.index.embedded import EmbeddedIndex
from pipeline.warehouse.dock import Dock

SCHEMA = Schema([Column.scalar("number", torch.int64)])
STAGES = (StageSpec("read", "rows", SCHEMA.mask(["number"]), 0, releases=True),)


@pytest.fixture
async def dock(index: Index, tmp_path: Path) -> Dock:
    await index.init(RunConfig(STAGES), {})
    dock = Dock(index, SCHEMA, worker="w", directory=tmp_path)
    await dock.join(1 << 20)
    return dock


async def put(dock: Dock, count: int) -> None:
    await dock.put({"number": torch.arange(count)})


async def nothing(dock: Dock) -> Nothing:
    outcome = await dock.try_claim("read", 1)
    assert isinstance(outcome, Nothing)
    return outcome


async def until_waiting(index: Index, count: int = 1) -> None:
    """Wait until so many claims wait on the server."""
    async with asyncio.timeout(10):
        while (await index._redis.info("clients"))["blocked_clients"] != count:  # noqa: ASYNC110
            await asyncio.sleep(0.002)


async def test_a_claim_says_whether_its_rows_were_the_last_ones(dock: Dock) -> None:
    await put(dock, 3)
    some = await dock.try_claim("read", 2)
    last = await dock.try_claim("read", 2)
    assert isinstance(some, Claim)
    assert isinstance(last, Claim)
    assert some.rest is None
    assert last.rest is not None
    waiting = asyncio.create_task(dock.claim_after(last.rest, "read", 5, timeout=60))
    await until_waiting(dock.index)
    await put(dock, 2)
    later = await asyncio.wait_for(waiting, 10)
    assert isinstance(later, Claim)
    assert len(later) == 2


async def test_rows_that_came_before_the_wait_began_end_it(dock: Dock) -> None:
    before = await nothing(dock)
    await put(dock, 1)
    claim = await asyncio.wait_for(dock.claim_after(before, "read", 1, timeout=60), 10)
    assert isinstance(claim, Claim)


@pytest.mark.parametrize("moment", ["before", "during"])
async def test_a_wait_that_is_ended_early_claims_what_there_is(dock: Dock, moment: str) -> None:
    early = asyncio.get_running_loop().create_future()
    if moment == "before":
        early.set_result(None)
    waiting = asyncio.create_task(
        dock.claim_after(await nothing(dock), "read", 1, timeout=60, early=early)
    )
    if moment == "during":
        await until_waiting(dock.index)
        early.set_result(None)
    assert isinstance(await asyncio.wait_for(waiting, 10), Nothing)


async def test_waits_one_after_the_other_keep_their_connection(dock: Dock) -> None:
    async def connections() -> int:
        return len(await dock.index._redis.client_list())

    await dock.claim_after(await nothing(dock), "read", 1, timeout=0.001)
    before = await connections()
    for _ in range(5):
        await dock.claim_after(await nothing(dock), "read", 1, timeout=0.001)
    assert await connections() == before


@pytest.mark.parametrize("ended_early", [False, True])
async def test_a_wait_that_is_given_up_leaves_no_error_behind(
    dock: Dock, ended_early: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """asyncio logs an error of a future that nobody has looked at, when the future is removed."""
    early = asyncio.get_running_loop().create_future() if ended_early else None
    waiting = asyncio.create_task(
        dock.claim_after(await nothing(dock), "read", 1, timeout=60, early=early)
    )
    await until_waiting(dock.index)
    waiting.cancel()
    await asyncio.wait([waiting])
    del waiting, early  # which have the future
    await asyncio.sleep(0.1)  # the connection is lost by now
    gc.collect()
    assert not [record for record in caplog.records if record.name == "asyncio"]


async def test_a_wait_that_is_given_up_takes_no_rows(dock: Dock) -> None:
    waiting = asyncio.create_task(dock.claim_after(await nothing(dock), "read", 1, timeout=60))
    await until_waiting(dock.index)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await until_waiting(dock.index, 0)
    await put(dock, 1)
    assert (await dock.index.stats())["stages"]["read"]["leased"] == 0


async def test_a_worker_that_is_taken_for_dead_while_it_waits_takes_no_rows(dock: Dock) -> None:
    """Its next claim does, if it was only slow."""
    waiting = asyncio.create_task(dock.claim_after(await nothing(dock), "read", 1, timeout=60))
    await until_waiting(dock.index)
    await dock.index.forget_worker("w", ended=False)
    await put(dock, 1)
    assert isinstance(await asyncio.wait_for(waiting, 10), Nothing)
    assert (await dock.index.stats())["stages"]["read"]["leased"] == 0
    assert isinstance(await dock.try_claim("read", 1), Claim)


async def test_a_connection_that_is_cut_while_it_waits_costs_no_rows(dock: Dock) -> None:
    """Of all: the claim is made again, by a connection of its own, and takes each row once."""
    waiting = asyncio.create_task(dock.claim("read", 5, timeout=60))
    await until_waiting(dock.index)
    await dock.index._redis.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "no")
    await until_waiting(dock.index)
    await put(dock, 2)
    claim = await asyncio.wait_for(waiting, 20)
    assert claim is not None
    assert len(claim) == 2
    assert (await dock.index.stats())["stages"]["read"]["leased"] == 2


async def test_a_server_that_is_started_again_serves_those_that_waited(tmp_path: Path) -> None:
    server = EmbeddedIndex(tmp_path / "index")
    server.start()
    index = Index(server.url, uuid.uuid4().hex[:8])
    try:
        await index.init(RunConfig(STAGES), {})
        dock = Dock(index, SCHEMA, worker="w", directory=tmp_path)
        await dock.join(1 << 20)
        waiting = asyncio.create_task(dock.claim("read", 5, timeout=60))
        await until_waiting(index)
        assert server.pid is not None
        os.kill(server.pid, signal.SIGKILL)
        server.stop()
        server.start()
        await put(dock, 2)
        claim = await asyncio.wait_for(waiting, 30)
        assert claim is not None
        assert len(claim) == 2
    finally:
        await index.close()
        server.stop()


async def test_a_claim_that_comes_late_takes_nothing(dock: Dock) -> None:
    """Its client has repeated it on another connection, and has made its next call since: the server
    may still hold the first one, behind a wait on a connection that is gone."""
    await put(dock, 1)
    link = dock.index._link
    fields: dict[str, Any] = {"stage": "read", "worker": "w", "home": 1, "token": "late"}
    limits: dict[str, Any] = {"most": 1, "least": 1, "lease": 60_000, "patient": True, "owner": ""}
    packed = msgpack.packb(fields | limits, use_bin_type=False)
    late = f"{link.client}-{next(link.calls)}:"
    await dock.index.renew("read", [], 1.0)  # the next call takes the same lane
    head = ("FCALL", "asyncdock_claim", 1, dock.index.prefix, packed, late)
    with pytest.raises(ResponseError, match="LATE"):
        await link.send((*head, "1", link.client, 0))
    assert (await dock.index.stats())["stages"]["read"] == {
        "ready": 1,
        "leased": 0,
        "takes": "rows",
    }


async def test_an_early_end_and_rows_at_the_same_moment_lose_nothing(dock: Dock) -> None:
    """Whichever the server sees first, the rows are in one claim."""
    seen = list[int]()
    for round_number in range(20):
        early = asyncio.get_running_loop().create_future()
        waiting = asyncio.create_task(
            dock.claim_after(await nothing(dock), "read", 9, timeout=60, early=early)
        )
        await until_waiting(dock.index)
        putting = asyncio.create_task(put(dock, 1))
        if round_number % 2:
            await asyncio.sleep(0)
        early.set_result(None)
        await putting
        outcome = await asyncio.wait_for(waiting, 10)
        claim = outcome if isinstance(outcome, Claim) else await dock.claim("read", 9)
        assert claim is not None
        seen += claim.row.tolist()
        await dock.commit(claim, range(len(claim)), None)
    assert seen == sorted(set(seen))
    assert len(seen) == 20


async def test_a_worker_that_hands_its_rows_on_is_not_woken_by_that(
    index: Index, tmp_path: Path
) -> None:
    """Its next claim waits already, and would be made for nothing."""
    schema = Schema([Column.scalar("prompt", torch.int64), Column.scalar("response", torch.int64)])
    makes = schema.mask(["response"])
    stages = (
        StageSpec("environment", "groups", schema.mask(["prompt"]), makes),
        StageSpec("rollout", "groups", 0, 0, takes_turns_with="environment"),
    )
    await index.init(RunConfig(stages), {})
    dock = Dock(index, schema, worker="w", directory=tmp_path)
    await dock.join(1 << 20)
    await dock.put({"prompt": torch.arange(1)})
    claim = await dock.claim("environment", 1)
    assert claim is not None
    assert claim.rest is not None
    await dock.park(claim, [0], {"response": torch.arange(1)}, generated=[(-1, 0)], to="rollout")
    after = await dock.try_claim("environment", 1)
    assert isinstance(after, Nothing)
    assert after.wait == claim.rest.wait
