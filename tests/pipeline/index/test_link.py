"""What shares connections to the index: hundreds of calls at once, and hundreds that wait, on few
of them."""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

import pytest
from redis.exceptions import TimeoutError as RedisTimeoutError

from orchestration.state.documents import JUDGED
from pipeline.index.client import Index, IndexUnreachable, Link


@pytest.fixture
async def link(index_url: str) -> AsyncIterator[Link]:
    made = Link(index_url, timeout=5.0)
    yield made
    await made.close()


async def connections_of(link: Link, name: str) -> int:
    """How many connections the server has that call themselves ``name``."""
    found: Any = await link.retry(lambda again: link.redis.client_list())
    return sum(client["name"] == name for client in found)


def named(url: str, name: str) -> str:
    return f"{url}{'&' if '?' in url else '?'}client_name={name}"


async def test_hundreds_of_calls_and_waits_take_few_connections(link: Link, index_url: str) -> None:
    """Of one server: its requests' calls, runs that are listed, and programs that wait for the
    same."""
    name = uuid.uuid4().hex[:8]
    shared = Link(named(index_url, name), timeout=5.0)
    try:
        indexes = [Index(shared, f"{name}-{number}") for number in range(300)]
        await asyncio.gather(
            *(JUDGED.put(index, str(number)) for number, index in enumerate(indexes))
        )
        found = await asyncio.gather(*(JUDGED.get(index) for index in indexes))
        assert found == [str(number) for number in range(300)]
        assert (
            await asyncio.gather(*(index.event_ends() for index in indexes)) == [("0", "0")] * 300
        )
        states = [f"{name}-{number}" for number in range(300)]
        assert (
            await asyncio.gather(*(index.states(states) for index in indexes[:5]))
            == [[("", "")] * 300] * 5
        )
        waits = [asyncio.create_task(indexes[0].woken("versions", "", 20.0)) for _ in range(300)]
        async with asyncio.timeout(10):
            while await connections_of(link, name) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert await connections_of(link, name) == 2
        woken = await link.redis.xadd(f"{indexes[0].prefix}wake:versions", {"e": 1})
        assert set(await asyncio.gather(*waits)) == {woken.decode()}
    finally:
        for index in indexes:
            await index.erase()
        await shared.close()


async def test_longer_and_later_waits_go_on(link: Link) -> None:
    """The first of those that wait for the same gives up, or is cancelled: the others miss
    nothing."""
    index = Index(link, uuid.uuid4().hex[:8])
    first = asyncio.create_task(index.wait("topic", "0", 0.1))
    cancelled = asyncio.create_task(index.wait("topic", "0", 10.0))
    last = asyncio.create_task(index.wait("topic", "0", 10.0))
    assert await first is False
    cancelled.cancel()
    await asyncio.gather(cancelled, return_exceptions=True)
    await link.redis.xadd(f"{index.prefix}wake:topic", {"e": 1})
    async with asyncio.timeout(5):
        assert await last is True
    async with asyncio.timeout(40):  # side by side: one after the other they take 50 seconds
        assert (
            await asyncio.gather(*(index.wait("other", "0", 1.0) for _ in range(50)))
            == [False] * 50
        )
    await index.erase()


async def test_closing_an_index_ends_its_waits_and_leaves_the_link(link: Link) -> None:
    closed, other = (Index(link, uuid.uuid4().hex[:8]) for _ in range(2))
    waits = [
        asyncio.create_task(index.wait("topic", "0", 3600.0)) for index in (closed, closed, other)
    ]
    async with asyncio.timeout(10):
        while len(closed._waits) < 2 or not link._reads:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await closed.close()
        for wait in waits[:2]:
            with pytest.raises(IndexUnreachable, match="closed"):
                await wait
    assert not waits[2].done()
    assert await JUDGED.get(other) is None
    await link.close()
    with pytest.raises(IndexUnreachable):
        await waits[2]


async def test_a_reader_that_was_frozen_beyond_its_deadline_asks_again(
    link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As all processes of a container that is paused: the time has passed without them."""
    real = time.monotonic
    asked = list[bool]()

    async def read(again: bool) -> str:
        asked.append(again)
        if not again:
            monkeypatch.setattr(time, "monotonic", lambda: real() + 1000)
            raise RedisTimeoutError("its timer ended while it was frozen")
        return "found"

    assert await link.retry(read) == "found"
    assert asked == [False, True]


async def test_an_index_that_is_gone_fails_all_that_wait_for_it_by_their_deadline() -> None:
    link = Link("unix:///nowhere/index.sock", timeout=1.0)
    index = Index(link, "run")
    async with asyncio.timeout(40):  # one after the other they take 50 seconds
        found = await asyncio.gather(
            *(index.wait("topic", "0", 2.0) for _ in range(50)), return_exceptions=True
        )
    assert all(isinstance(error, IndexUnreachable) for error in found)
    await link.close()


async def test_a_server_that_does_not_answer_costs_no_descriptors() -> None:
    """It takes connections, as one that is stopped does, and never replies: each attempt to reach
    it is closed."""
    opened: list[asyncio.StreamWriter] = []
    server = await asyncio.start_server(
        lambda reader, writer: opened.append(writer), "127.0.0.1", 0
    )
    link = Link(f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}", timeout=0.9)
    before = len(os.listdir("/proc/self/fd"))
    calls = [JUDGED.get(Index(link, "run")) for _ in range(30)]
    assert all(
        isinstance(found, IndexUnreachable)
        for found in await asyncio.gather(*calls, return_exceptions=True)
    )
    for writer in opened:
        writer.transport.abort()
    async with asyncio.timeout(5):
        while len(os.listdir("/proc/self/fd")) > before + 1:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert len(opened) >= 3
    await link.close()
    server.close()
