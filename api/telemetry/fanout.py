"""A run's events to whoever listens: one reader of the index, each event encoded once, nobody waits for anybody.

    index ── XREAD, blocking ──▶ Feed ── a batch, at most every 50 ms ──▶ its bytes ──▶ every listener's socket
                                  ▲ joins when it has all up to here            └ too much unsent: `dropped`, closed
    history ── pages after Last-Event-ID ──▶ a new listener, at the pace at which it reads

Between history and live nothing is missing and nothing comes twice: a listener joins with the id up to which it was told, in
the same turn of the event loop in which it is not behind the feed, and of the next batch it is told only what is past that.
"""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import structlog
from aiohttp import HttpVersion11, web

from api.telemetry.history import BEGINNING, History, order
from orchestration.events_file import finite
from orchestration.service.registry import ENDED, RunRecord
from pipeline.events import Event
from pipeline.index.client import EVENTS_AT_ONCE, IndexUnreachable

log = structlog.get_logger()

NOW = "$"  # as an id: from now on
FLUSH_SECONDS = 0.05
TOLD_AT_ONCE = 25  # listeners, before others have their turn: each costs a system call
HEARTBEAT_SECONDS = 10.0
MOST_UNSENT = 256 << 10  # bytes in a reader's buffer here, past which it is too slow
SEND_BUFFER = 64 << 10  # bytes in the kernel's, which would grow to megabytes for each reader
CATCH_UP_SECONDS = 30.0  # for one page of history to be taken
FAREWELL_SECONDS = 5.0  # for what is in the buffer of a reader that is closed
PAGES_AT_ONCE = 4  # of history, for all listeners of a run
LAST_EVENT_SECONDS = 5.0  # after a run's end in which its last event may still come

HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-store",
    "X-Accel-Buffering": "no",  # a proxy that gathers what it passes on would hold events back
}
Kinds = frozenset[str] | None  # of the events that are wanted; None: all


@dataclass(frozen=True)
class Ending:
    """How a run ended; ``at`` in Unix seconds."""

    state: str
    reason: str
    at: float


class Batch:
    """Events as the bytes of server-sent ones, made once for each choice of kinds."""

    def __init__(self, events: Sequence[Event]) -> None:
        self.events = events
        self._payloads: dict[Kinds, bytes] = {}

    @cached_property
    def _encoded(self) -> list[bytes]:
        return [encode(event) for event in self.events]

    def payload(self, kinds: Kinds = None) -> bytes:
        if kinds not in self._payloads:
            pairs = zip(self.events, self._encoded, strict=True)
            self._payloads[kinds] = b"".join(text for event, text in pairs if kinds is None or event.kind in kinds)
        return self._payloads[kinds]

    def after(self, event_id: str) -> Batch:
        past = order(event_id)
        return Batch([event for event in self.events if order(event.id) > past])


def encode(event: Event) -> bytes:
    """``event`` as a server-sent one, of finite numbers."""
    return f"id: {event.id}\n{_message(event.kind, {'time': event.time, **event.data})}".encode()


def _message(kind: str, data: dict[str, Any]) -> str:
    try:
        text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except ValueError:
        text = json.dumps(finite(data), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return f"event: {kind}\ndata: {text}\n\n"


class Listener(Protocol):
    """Who is told a run's events. Only :meth:`catch_up` may wait."""

    async def catch_up(self, batch: Batch) -> None: ...
    def deliver(self, batch: Batch) -> None: ...
    def heartbeat(self, event_id: str) -> None: ...
    def end(self, ending: Ending) -> None: ...
    def drop(self, why: str, reason: str) -> None: ...


class Feed:
    """One run's events. ``over`` says how the run has ended, when it has; ``delayed`` is told each event's age, in seconds,
    when it is on its way to all listeners."""

    def __init__(
        self,
        history: History,
        over: Callable[[], Awaitable[Ending | None]],
        *,
        delayed: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        self.history, self._over, self._delayed = history, over, delayed
        self.position = BEGINNING  # of the last event that was delivered
        self._live: set[Listener] = set()
        self._joining: dict[Listener, str] = {}  # told up to this id, which is past `position`
        self._starting, self._turn = asyncio.Lock(), asyncio.Semaphore(PAGES_AT_ONCE)
        self._task: asyncio.Task[None] | None = None
        self._ending: Ending | None = None
        self._beat = time.monotonic()

    async def join(self, listener: Listener, after: str = BEGINNING) -> None:
        """Tell ``listener`` what comes after ``after``; returns when it is up to date, and is told the rest as it comes."""
        ending = await self._over()
        if ending is not None:
            await self._tell_all(listener, BEGINNING if after == NOW else after, ending)
            return
        await self._start()
        after = self.position if after == NOW else after
        while order(after) < order(self.position):
            position = self.position
            async with self._turn:
                page = await self.history.page(after)
            if page:
                await listener.catch_up(Batch(page))
                after, ending = page[-1].id, _ending_in(page, ending)
            elif position == self.position:
                break  # there is nothing to be had between the two
        if (ending := self._ending or ending) is not None:
            listener.end(ending)
        elif order(after) > order(self.position):
            self._joining[listener] = after
        else:
            self._live.add(listener)

    def leave(self, listener: Listener) -> None:
        self._live.discard(listener)
        self._joining.pop(listener, None)

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _tell_all(self, listener: Listener, after: str, ending: Ending) -> None:
        """The history of a run that has ended, and its end."""
        last: Ending | None = None
        async for page in self.history.pages(after):
            await listener.catch_up(Batch(page))
            after, last = page[-1].id, _ending_in(page, last)
        while last is None and time.time() - ending.at < LAST_EVENT_SECONDS:  # the event comes just after the fact
            page = await self.history.wait(after, 0.5)
            if page:
                await listener.catch_up(Batch(page))
                after, last = page[-1].id, _ending_in(page)
        listener.end(ending)

    async def _start(self) -> None:
        async with self._starting:
            if self._task is None or self._task.done():
                self.position = await self.history.newest()
                self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        try:
            while self._ending is None:
                left = self._beat + HEARTBEAT_SECONDS - time.monotonic()
                events = await self.history.wait(self.position, max(left, 0.001))
                await self._deliver(events)
                if time.monotonic() - self._beat >= HEARTBEAT_SECONDS:
                    self._beat = time.monotonic()
                    for listener in [*self._live, *self._joining]:
                        listener.heartbeat(self.position)
                    if not events and (ending := await self._over()) is not None:  # nobody was left to tell it
                        self._end(ending)
                elif len(events) < EVENTS_AT_ONCE:
                    await asyncio.sleep(FLUSH_SECONDS)  # what comes meanwhile is told together
        except IndexUnreachable:
            self._drop_all("index", "the index does not answer; connect again")
        except LookupError:
            self._drop_all("deleted", "the run was deleted")
        except Exception:
            log.exception("a feed failed")
            self._drop_all("failed", "reading the run's events failed; connect again")

    async def _deliver(self, events: Sequence[Event]) -> None:
        """Tell all who were live when it began, answering requests meanwhile. Who joins meanwhile is past these events."""
        if not events:
            return
        batch, self.position = Batch(events), events[-1].id
        for number, listener in enumerate(list(self._live), 1):
            if listener in self._live:
                listener.deliver(batch)
            if number % TOLD_AT_ONCE == 0:
                await asyncio.sleep(0)
        for listener, after in list(self._joining.items()):
            if order(after) <= order(self.position):
                del self._joining[listener]
                self._live.add(listener)
                listener.deliver(batch.after(after))
        now = time.time()
        for event in events:
            self._delayed(now - event.time)
        if (ending := _ending_in(events)) is not None:
            self._end(ending)

    def _end(self, ending: Ending) -> None:
        self._ending = ending
        for listener in [*self._live, *self._joining]:
            listener.end(ending)

    def _drop_all(self, why: str, reason: str) -> None:
        for listener in [*self._live, *self._joining]:
            listener.drop(why, reason)
        self._live.clear()
        self._joining.clear()


def _ending_in(events: Sequence[Event], before: Ending | None = None) -> Ending | None:
    """What the last of the `state` events says, if that is an end; ``before`` when there is none of them."""
    last = next((event for event in reversed(events) if event.kind == "state"), None)
    if last is None:
        return before
    if last.data["state"] not in ENDED:
        return None  # a run that was resumed has ended before
    return Ending(last.data["state"], last.data.get("reason", ""), last.time)


class Feeds:
    """The feeds of a server, one for each run that anybody listens to. ``make`` makes one for a run's record."""

    def __init__(self, make: Callable[[RunRecord], Feed]) -> None:
        self._make = make
        self._feeds: dict[str, Feed] = {}
        self._listeners: dict[Listener, Feed] = {}

    @asynccontextmanager
    async def listening(self, record: RunRecord, listener: Listener) -> AsyncIterator[Feed]:
        """The run's feed, which ends with the last of its listeners."""
        run = record.id
        feed = self._feeds.get(run) or self._feeds.setdefault(run, self._make(record))
        self._listeners[listener] = feed
        try:
            yield feed
        finally:
            feed.leave(listener)
            self._listeners.pop(listener, None)
            if feed not in self._listeners.values() and self._feeds.get(run) is feed:
                del self._feeds[run]
                await feed.close()

    def __len__(self) -> int:
        """How many listen."""
        return len(self._listeners)

    def close(self) -> None:
        """Tell every listener that the server goes down."""
        for listener in list(self._listeners):
            listener.drop("closing", "the server goes down; connect again")


class Reader:
    """A connection that is sent events. Writing goes straight to the socket; what it does not take is kept, up to ``most``
    bytes, and a reader that leaves more unread is dropped. :attr:`done` comes to why it was dropped, "" if it was not."""

    def __init__(self, request: web.Request, kinds: Kinds = None, *, most: int = MOST_UNSENT) -> None:
        self.kinds, self.most = kinds, most
        self.done: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._request = request
        self.response = web.StreamResponse(headers=HEADERS)
        self.response.force_close()

    async def open(self) -> None:
        """Begin the answer. Raises ConnectionResetError when the reader has gone."""
        await self.response.prepare(self._request)
        transport = self._request.transport
        if transport is None:
            raise ConnectionResetError("the reader has gone")
        self._transport, self._framed = transport, self._request.version >= HttpVersion11
        if (connection := transport.get_extra_info("socket")) is not None and connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
        await self.response.write(b"retry: 2000\n\n")

    async def catch_up(self, batch: Batch) -> None:
        if self.done.done():
            raise ConnectionResetError("the reader has gone")
        if payload := batch.payload(self.kinds):
            try:
                async with asyncio.timeout(CATCH_UP_SECONDS):
                    await self.response.write(payload)
            except TimeoutError:
                self.drop("slow", f"a page of history was not taken within {CATCH_UP_SECONDS:.0f} s")
                raise ConnectionResetError("the reader was too slow") from None

    def deliver(self, batch: Batch) -> None:
        if payload := batch.payload(self.kinds):
            self._write(payload)

    def heartbeat(self, event_id: str) -> None:
        self._write(
            f": heartbeat\nid: {event_id}\n\n".encode()
        )  # with it a reader of rare kinds begins again near here

    def end(self, ending: Ending) -> None:
        self._write(_message("end", {"state": ending.state, "reason": ending.reason}).encode())
        self._close("")

    def drop(self, why: str, reason: str) -> None:
        if not self.done.done():
            self._put(_message("dropped", {"reason": reason}).encode())
            self._close(why)

    def _write(self, data: bytes) -> None:
        if self.done.done():
            return
        if self._transport.is_closing():
            self.done.set_result("")  # it went by itself
        elif (unsent := self._transport.get_write_buffer_size()) > self.most:
            self.drop("slow", f"too slow: {unsent} bytes were not taken; connect again with Last-Event-ID")
        else:
            self._put(data)

    def _put(self, data: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._framed else data)

    def _close(self, why: str) -> None:
        """What is in the buffer may still be taken, for a while."""
        if not self.done.done():
            self.done.set_result(why)
            if self._framed and not self._transport.is_closing():
                self._transport.write(b"0\r\n\r\n")
            self._transport.close()
            asyncio.get_running_loop().call_later(FAREWELL_SECONDS, self._transport.abort)
