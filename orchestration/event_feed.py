"""Reads the events of a run once, for all that follow them in this process.

    index ── XREAD ──▶ EventFeed: the newest RECENT events ─┬▶ follow(): recording, terminal
                                                            └▶ feed(): guard, readiness, load, costs

Each follower runs in a task of its own and goes on from its own position, so that a slow or a
failed one does not stop the others. One that is behind the newest RECENT events reads the ones
before them from the index, page by page: none is missing, and memory is bounded.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Self

from pipeline.data.events import Event, order
from pipeline.first_of import cancel_all
from pipeline.index.client import EVENTS_AT_ONCE, Index

RECENT = 2 * EVENTS_AT_ONCE  # events in memory: more than one reply of the index


class EventFeed:
    """The feed of the events of the run in ``index``; see :meth:`reading`.

    ``begin``: the id after which the feed reads. Followers may begin before it.
    """

    def __init__(self, index: Index, begin: str) -> None:
        self._index = index
        self._recent = deque[Event](maxlen=RECENT)
        self._before = begin  # the id after which the recent events begin
        self._count = 0  # events that were read
        self._news = asyncio.Event()
        self._is_over = False
        self._failure: Exception | None = None

    @classmethod
    @asynccontextmanager
    async def reading(cls, index: Index) -> AsyncIterator[Self]:
        """Yield a feed that reads the events from now on. Its followers end with it."""
        _, newest = await index.event_ends()
        feed = cls(index, newest)
        task = asyncio.create_task(feed._read(newest))
        try:
            yield feed
        finally:
            await cancel_all(task)

    async def _read(self, after: str) -> None:
        try:
            while True:
                if not (events := await self._index.events(after)):
                    continue
                for event in events:
                    if len(self._recent) == RECENT:
                        self._before = self._recent[0].id
                    self._recent.append(event)
                after = events[-1].id
                self._count += len(events)
                self._wake()
        except Exception as error:  # each follower raises it
            self._failure = error
        finally:
            self._is_over = True
            self._wake()

    async def follow(self, after: str = "0") -> AsyncIterator[Event]:
        """Yield the events after id ``after`` until the feed ends. Raises IndexUnreachable."""
        while True:
            while order(after) < order(begin := self._before):
                page = await self._index.past_events(after)
                for event in page:
                    after = event.id
                    yield event
                if not page:
                    after = begin
            number = self._count - len(self._recent)  # of the next event
            while number >= self._count - len(self._recent):
                if number < self._count:
                    event = self._recent[number - self._count]
                    number += 1
                    if order(event.id) > order(after):
                        after = event.id
                        yield event
                elif self._failure is not None:
                    raise self._failure
                elif self._is_over:
                    return
                else:
                    await self._news.wait()

    async def feed(self, take: Callable[[Event], Awaitable[None]], after: str) -> None:
        """Have ``take`` take the events after id ``after``, one after the other, until the feed
        ends. Raises what it raises."""
        async for event in self.follow(after):
            await take(event)

    def _wake(self) -> None:
        self._news.set()
        self._news.clear()
