"""One reader of a run's events for all that follow them: nothing is missing or doubled, whatever
the others do."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import pytest

from orchestration import event_feed
from orchestration.event_feed import EventFeed
from orchestration.run.execution import Execution
from orchestration.run.folder import RunFolder
from pipeline.data.events import Event
from pipeline.index.client import Index, IndexUnreachable
from pipeline.index.embedded import EmbeddedIndex
from tests.any_event import AnyEvent
from tests.orchestration.runs import MOCK, complete, recipe

RECENT = 20


@pytest.fixture(autouse=True)
def few_recent_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_feed, "RECENT", RECENT)


class Taker:
    """Takes events up to the number ``until``. It waits for ``go`` with each, and fails at the
    number ``fails_at``."""

    def __init__(self, until: int, fails_at: int | None = None) -> None:
        self.numbers = list[int]()
        self.go = asyncio.Event()
        self.go.set()
        self.done = asyncio.Event()
        self._until = until
        self._fails_at = fails_at

    async def take(self, event: Event) -> None:
        await self.go.wait()
        if event.data["number"] == self._fails_at:
            raise ValueError("it does not like this one")
        self.numbers.append(event.data["number"])
        if self.numbers[-1] == self._until:
            self.done.set()


async def emit(index: Index, numbers: range) -> str:
    """Emit events with these numbers; returns the id of the last one."""
    for number in numbers:
        await index.emit(AnyEvent(kind="step", data={"number": number}))
    return await index.last_event_id()


async def wait(*takers: Taker) -> None:
    async with asyncio.timeout(20):
        for taker in takers:
            await taker.done.wait()


async def test_a_slow_and_a_failing_follower_stop_no_other_and_the_slow_one_misses_nothing(
    index: Index,
) -> None:
    most = 10 * RECENT
    quick, slow, failing = Taker(most - 1), Taker(most - 1), Taker(most - 1, fails_at=3)
    slow.go.clear()
    async with EventFeed.reading(index) as feed, asyncio.TaskGroup() as tasks:
        feeding = [tasks.create_task(feed.feed(taker.take, "0")) for taker in (quick, slow)]
        failed = asyncio.create_task(feed.feed(failing.take, "0"))
        await emit(index, range(most))
        await wait(quick)
        assert quick.numbers == list(range(most))
        assert slow.numbers == []
        slow.go.set()
        await wait(slow)
        assert slow.numbers == list(range(most)), "more than the feed has in memory"
        with pytest.raises(ValueError, match="does not like"):
            await failed
        for task in feeding:
            task.cancel()


async def test_followers_begin_anywhere_and_go_on_into_what_comes(index: Index) -> None:
    early = await emit(index, range(5))
    await emit(index, range(5, 3 * RECENT))
    async with EventFeed.reading(index) as feed:
        last = await emit(index, range(3 * RECENT, 4 * RECENT))
        takers = [Taker(5 * RECENT - 1) for _ in range(4)]
        feeding = [
            asyncio.create_task(feed.feed(taker.take, after))
            for taker, after in zip(takers, ("0", early, last, "1"), strict=True)
        ]
        await emit(index, range(4 * RECENT, 5 * RECENT))
        await wait(*takers)
        firsts = [taker.numbers[0] for taker in takers]
        assert firsts == [0, 5, 4 * RECENT, 0]
        for taker in takers:
            assert taker.numbers == list(range(taker.numbers[0], 5 * RECENT))
        await index.emit(AnyEvent(kind="step", data={"number": -1}))
    async with asyncio.timeout(20):
        await asyncio.gather(*feeding)  # they end with the feed


async def test_what_a_page_of_the_past_has_before_the_feed_comes_once(index: Index) -> None:
    """The page is read while the feed still waits for the same events."""
    await emit(index, range(3))
    async with EventFeed.reading(index) as feed:
        reply = asyncio.Event()
        read_events = index.events

        async def late(after: str = "0", timeout: float = 1.0) -> list[Event]:
            events = await read_events(after, timeout)
            await reply.wait()
            return events

        index.events = late  # type: ignore[method-assign]
        await emit(index, range(3, 6))
        taker = Taker(5)
        feeding = asyncio.create_task(feed.feed(taker.take, "0"))
        await wait(taker)
        reply.set()
        taker.done.clear()
        await emit(index, range(6, 9))
        while len(taker.numbers) < 9:  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert taker.numbers == list(range(9))
        feeding.cancel()


async def test_all_followers_cost_one_read(index: Index) -> None:
    reads = list[str]()
    read_events = index.events

    async def counted(after: str = "0", timeout: float = 1.0) -> list[Event]:
        reads.append(after)
        return await read_events(after, timeout)

    async def refused(*_: Any) -> list[Event]:
        raise AssertionError("all of it is in memory")

    index.events = counted  # type: ignore[method-assign]
    index.past_events = refused  # type: ignore[method-assign]
    async with EventFeed.reading(index) as feed:
        takers = [Taker(RECENT - 1) for _ in range(6)]
        feeding = [asyncio.create_task(feed.feed(taker.take, "0")) for taker in takers]
        await emit(index, range(RECENT))
        await wait(*takers)
        assert 1 <= len(reads) <= RECENT + 2
        assert len(set(reads)) == len(reads), "no event was read twice"
        for task in feeding:
            task.cancel()


async def test_a_run_reads_its_events_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For its guard, readiness and forecast, and for who watches it."""
    positions = list[str]()
    reads = Index.events

    async def counted(index: Index, after: str = "0", timeout: float = 1.0) -> list[Event]:
        events = await reads(index, after, timeout)
        positions.extend(event.id for event in events)
        return events

    monkeypatch.setattr(Index, "events", counted)
    watched, result = await complete(Execution(RunFolder.create(recipe(MOCK), tmp_path / "run")))
    assert result.state == "finished"
    assert len(watched.of("step")) == 6
    assert len(positions) > 20
    assert len(set(positions)) == len(positions)


async def test_a_killed_index_that_comes_back_loses_no_event_and_one_that_does_not_is_said() -> (
    None
):
    takers = [Taker(19) for _ in range(3)]
    # a socket's path must be short
    with tempfile.TemporaryDirectory(prefix="adk-") as home, EmbeddedIndex(Path(home)) as server:
        index = Index(server.url, "run", timeout=3.0)
        async with EventFeed.reading(index) as feed:
            feeding = [asyncio.create_task(feed.feed(taker.take, "0")) for taker in takers]
            await emit(index, range(10))
            assert server.pid is not None
            os.kill(server.pid, signal.SIGKILL)
            while server.alive():  # noqa: ASYNC110
                await asyncio.sleep(0.005)
            await asyncio.to_thread(server.start)
            await emit(index, range(10, 20))
            await wait(*takers)
            assert [taker.numbers for taker in takers] == [list(range(20))] * 3
            os.kill(server.pid, signal.SIGKILL)
            async with asyncio.timeout(30):
                for task in feeding:
                    with pytest.raises(IndexUnreachable):
                        await task
        await index.close()
