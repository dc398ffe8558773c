"""Fan-out of a run's events to many listeners: the index is read once, and each event is encoded
once.

    index ── XREAD, blocking ──▶ Fanout ── a batch, at most every 50 ms ──▶ its bytes ──▶ every listener's socket
                                  ▲ joins when it is up to date                 └ too much unsent: `dropped`, closed
    history ── pages after Last-Event-ID ──▶ a new listener, at the pace at which it reads

No event is missing or sent twice between history and live: a listener joins with the id of its last
event, in the turn of the event loop in which that is not behind the fanout, and of the next batch
it gets only the events after that id.

A reader that does not read costs at most MOST_UNSENT bytes: of a page of history it takes what has
room, and the rest of the page is read again when its socket has taken that. What was freed goes
back to the system once readers have left.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import structlog
from aiohttp import HttpVersion11, web

from api.telemetry.history import BEGINNING, History
from orchestration.history.lines import finite
from orchestration.state.registry import RunRecord
from pipeline.data.events import ENDED, Event, order
from pipeline.first_of import cancel_all
from pipeline.index.client import EVENTS_AT_ONCE, IndexUnreachable

log = structlog.get_logger()

NOW = "$"  # as an id: from now on
FLUSH_SECONDS = 0.05
DELIVERIES_AT_ONCE = 25  # before other tasks get their turn: each costs a system call
HEARTBEAT_SECONDS = 10.0
MOST_UNSENT = 24 << 10  # bytes in the write buffer of a reader; with more it is too slow
EVENTS_OF_A_DELIVERY = 64  # at most: a delivery of few costs each reader a system call
# of the past, at most, of which a reader's buffer may hold some beyond its limit
EVENTS_OF_A_WRITE = 16
SEND_BUFFER = 64 << 10  # bytes in the kernel, where it would grow to megabytes for each reader
CATCH_UP_SECONDS = 30.0  # for a reader to take one page of history
CLOSE_SECONDS = 5.0  # for a reader that is closed to take the rest of its buffer
MANY_LEFT = 50  # readers, after which what they held goes back to the system
LEFT_SECONDS = CLOSE_SECONDS + 1.0  # without more that leave
PAGES_AT_ONCE = 4  # of history, for all listeners of a run
EVENTS_OF_A_PAGE = 128  # of which a slow reader takes some, and reads the others again
LAST_EVENT_SECONDS = 5.0  # after a run's end, in which its last event may still come

HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-store",
    "X-Accel-Buffering": "no",  # a buffering proxy would delay events
}
Kinds = frozenset[str] | None  # kinds of events that a reader wants; None: all


@dataclass(frozen=True)
class Ending:
    """The end of a run; ``at`` in Unix seconds."""

    state: str
    reason: str
    at: float


class Batch:
    """Events, and their bytes as server-sent events, encoded once for each choice of kinds."""

    def __init__(self, events: Sequence[Event]) -> None:
        self.events = events
        self._payloads: dict[Kinds, bytes] = {}

    @cached_property
    def _encoded(self) -> list[bytes]:
        return [encode(event) for event in self.events]

    def payload(self, kinds: Kinds = None) -> bytes:
        if kinds not in self._payloads:
            pairs = zip(self.events, self._encoded, strict=True)
            self._payloads[kinds] = b"".join(
                text for event, text in pairs if kinds is None or event.kind in kinds
            )
        return self._payloads[kinds]

    def after(self, event_id: str) -> Batch:
        past = order(event_id)
        return Batch([event for event in self.events if order(event.id) > past])


def encode(event: Event) -> bytes:
    """Return ``event`` as a server-sent event; numbers that are not finite become null."""
    return f"id: {event.id}\n{_message(event.kind, {'time': event.time, **event.data})}".encode()


def _message(kind: str, data: dict[str, Any]) -> str:
    try:
        text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except ValueError:
        text = json.dumps(finite(data), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return f"event: {kind}\ndata: {text}\n\n"


class Listener(Protocol):
    """Receiver of a run's events. Only :meth:`ready` may wait."""

    async def ready(self) -> None:
        """Wait until the listener takes events of the past. Raises ConnectionError when it does not
        in time."""

    def catch_up(self, events: Sequence[Event]) -> str:
        """Take some of ``events`` from the first one on, at least one.

        Returns the id of the last one.
        """

    def deliver(self, batch: Batch) -> None: ...
    def heartbeat(self, event_id: str) -> None: ...
    def end(self, ending: Ending) -> None: ...
    def drop(self, why: str, reason: str) -> None: ...


class Fanout:
    """The stream of one run's events to its listeners.

    ``ending`` returns how the run has ended (None: it has not). ``observe_delay`` is called with
    each event's age in seconds once it is on its way to all listeners.
    """

    def __init__(
        self,
        history: History,
        ending: Callable[[], Awaitable[Ending | None]],
        *,
        observe_delay: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        self.history = history
        self._read_ending = ending
        self._observe_delay = observe_delay
        self.position = BEGINNING  # of the last event that was delivered
        self._live: set[Listener] = set()
        # by the id of its last event, which is past `position`
        self._joining: dict[Listener, str] = {}
        self._starting = asyncio.Lock()
        self._turn = asyncio.Semaphore(PAGES_AT_ONCE)
        self._task: asyncio.Task[None] | None = None
        self._ending: Ending | None = None
        self._beat = time.monotonic()

    async def join(self, listener: Listener, after: str = BEGINNING) -> None:
        """Send ``listener`` the events after ``after``.

        Returns when the listener is up to date; later events are delivered as they come.
        """
        ending = await self._read_ending()
        if ending is not None:
            await self._replay(listener, BEGINNING if after == NOW else after, ending)
            return
        await self._start()
        after = self.position if after == NOW else after
        while order(after) < order(self.position):
            position = self.position
            before = after
            await listener.ready()
            async with self._turn:
                after, ending = _caught_up(
                    listener, await self.history.page(after, EVENTS_OF_A_PAGE), after, ending
                )
            if after == before and position == self.position:
                break  # no event lies between the two
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
        await cancel_all(self._task)

    async def _replay(self, listener: Listener, after: str, ending: Ending) -> None:
        """Send the history of a run that has ended, and its end."""
        last = None
        before = ""
        # the clock may have been set
        patience = min(LAST_EVENT_SECONDS, ending.at + LAST_EVENT_SECONDS - time.time())
        until = time.monotonic() + patience
        while after != before:
            before = after
            await listener.ready()
            async with self._turn:
                after, last = _caught_up(
                    listener, await self.history.page(after, EVENTS_OF_A_PAGE), after, last
                )
        while last is None and time.monotonic() < until:  # the event comes just after the fact
            after, last = _caught_up(listener, await self.history.wait(after, 0.5), after, None)
            await listener.ready()
        listener.end(ending)

    async def _start(self) -> None:
        async with self._starting:
            if self._task is None or self._task.done():
                self._ending = None  # the run may have been resumed since
                self.position = await self.history.newest()
                self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        try:
            while self._ending is None:
                timeout = self._beat + HEARTBEAT_SECONDS - time.monotonic()
                events = await self.history.wait(self.position, max(timeout, 0.001))
                await self._deliver(events)
                if time.monotonic() - self._beat >= HEARTBEAT_SECONDS:
                    self._beat = time.monotonic()
                    for listener in [*self._live, *self._joining]:
                        listener.heartbeat(self.position)
                    # without a `state` event
                    if not events and (ending := await self._read_ending()) is not None:
                        self._end(ending)
                elif len(events) < EVENTS_AT_ONCE:
                    await asyncio.sleep(FLUSH_SECONDS)  # events of this time are delivered together
        except IndexUnreachable:
            self._drop_all("index", "the index does not answer; connect again")
        except LookupError:
            self._drop_all("deleted", "the run was deleted")
        except Exception:
            log.exception("a fanout failed")
            self._drop_all("failed", "reading the run's events failed; connect again")

    async def _deliver(self, events: Sequence[Event]) -> None:
        """Deliver to all listeners that are live now; other tasks run in between.

        A listener that joins meanwhile has these events already.
        """
        if not events:
            return
        for begin in range(0, len(events), EVENTS_OF_A_DELIVERY):
            await self._deliver_some(events[begin : begin + EVENTS_OF_A_DELIVERY])
        now = time.time()
        for event in events:
            self._observe_delay(now - event.time)
        if (ending := _ending_in(events)) is not None:
            self._end(ending)

    async def _deliver_some(self, events: Sequence[Event]) -> None:
        batch = Batch(events)
        self.position = events[-1].id
        for number, listener in enumerate(list(self._live), 1):
            if listener in self._live:
                listener.deliver(batch)
            if number % DELIVERIES_AT_ONCE == 0:
                await asyncio.sleep(0)
        for listener, after in list(self._joining.items()):
            if order(after) <= order(self.position):
                del self._joining[listener]
                self._live.add(listener)
                listener.deliver(batch.after(after))

    def _end(self, ending: Ending) -> None:
        self._ending = ending
        for listener in [*self._live, *self._joining]:
            listener.end(ending)

    def _drop_all(self, why: str, reason: str) -> None:
        for listener in [*self._live, *self._joining]:
            listener.drop(why, reason)
        self._live.clear()
        self._joining.clear()


def _caught_up(
    listener: Listener, page: Sequence[Event], after: str, ending: Ending | None
) -> tuple[str, Ending | None]:
    """Give ``listener`` what it takes of ``page``, the events after ``after``.

    Returns the id of the last event taken, and the ending up to there. ``ending``: the one before
    ``after``.
    """
    if not page:
        return after, ending
    last = listener.catch_up(page)
    return last, _ending_in([event for event in page if order(event.id) <= order(last)], ending)


def trim() -> None:
    """Return freed memory to the system, where the C library keeps it (glibc)."""
    if (trims := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trims(0)


def _ending_in(events: Sequence[Event], before: Ending | None = None) -> Ending | None:
    """Return the ending in the last `state` event, if that is one; ``before`` without a `state`
    event."""
    last = next((event for event in reversed(events) if event.kind == "state"), None)
    if last is None:
        return before
    if last.data["state"] not in ENDED:
        return None  # the run was resumed after it had ended
    return Ending(last.data["state"], last.data.get("reason", ""), last.time)


class Fanouts:
    """The fanouts of a server, one for each run with listeners.

    ``make`` makes one for a run's record.
    """

    def __init__(self, make: Callable[[RunRecord], Fanout]) -> None:
        self._make = make
        self._fanouts: dict[str, Fanout] = {}
        self._listeners: dict[Listener, Fanout] = {}
        self._left = 0  # listeners, since memory was given back

    @asynccontextmanager
    async def listening(self, record: RunRecord, listener: Listener) -> AsyncIterator[Fanout]:
        """Yield the run's fanout, which ends with the last of its listeners."""
        run = record.id
        fanout = self._fanouts.get(run) or self._fanouts.setdefault(run, self._make(record))
        self._listeners[listener] = fanout
        try:
            yield fanout
        finally:
            fanout.leave(listener)
            self._listeners.pop(listener, None)
            self._left += 1
            if self._left == MANY_LEFT:
                asyncio.get_running_loop().call_later(LEFT_SECONDS, self._give_back, self._left)
            if fanout not in self._listeners.values() and self._fanouts.get(run) is fanout:
                del self._fanouts[run]
                await fanout.close()

    def _give_back(self, left: int) -> None:
        """Return the memory of listeners that have left to the system, once no more leave than
        ``left``: allocators keep it, and the objects of connections that ended refer to each
        other."""
        if self._left != left:
            asyncio.get_running_loop().call_later(LEFT_SECONDS, self._give_back, self._left)
            return
        self._left = 0
        gc.collect()
        threading.Thread(target=trim, name="trim", daemon=True).start()

    def __len__(self) -> int:
        """Return the number of listeners."""
        return len(self._listeners)

    def close(self) -> None:
        """Drop every listener: the server goes down."""
        for listener in list(self._listeners):
            listener.drop("closing", "the server goes down; connect again")


class EventReader:
    """A connection that events are sent to, straight to its socket.

    What the socket does not take is kept, up to ``most`` bytes; a reader that leaves more unread is
    dropped. :attr:`closed` becomes why it was dropped ("": it was not).
    """

    def __init__(
        self, request: web.Request, kinds: Kinds = None, *, most: int = MOST_UNSENT
    ) -> None:
        self.kinds = kinds
        self.most = most
        self.closed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._request = request
        self.response = web.StreamResponse(headers=HEADERS)
        self.response.force_close()

    async def open(self) -> None:
        """Begin the answer. Raises ConnectionResetError when the connection is gone."""
        await self.response.prepare(self._request)
        transport = self._request.transport
        if transport is None:
            raise ConnectionResetError("the reader has gone")
        self._transport = transport
        self._framed = self._request.version >= HttpVersion11
        if (
            connection := transport.get_extra_info("socket")
        ) is not None and connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
        transport.set_write_buffer_limits(high=self.most // 4, low=self.most // 8)
        await self.response.write(b"retry: 2000\n\n")

    async def ready(self) -> None:
        try:
            async with asyncio.timeout(CATCH_UP_SECONDS):
                if not self.closed.done():
                    await self._drained()
        except TimeoutError:
            self.drop(
                "slow", f"what was sent of the past was not taken within {CATCH_UP_SECONDS:.0f} s"
            )
        if self.closed.done() or self._transport.is_closing():
            raise ConnectionResetError("the reader has gone, or was too slow")

    def catch_up(self, events: Sequence[Event]) -> str:
        for begin in range(0, len(events), EVENTS_OF_A_WRITE):
            part = events[begin : begin + EVENTS_OF_A_WRITE]
            if payload := Batch(part).payload(self.kinds):
                self._put(payload)
            if (
                self._transport.is_closing()
                or self._transport.get_write_buffer_size() > self.most // 4
            ):
                break
        return part[-1].id

    def deliver(self, batch: Batch) -> None:
        if payload := batch.payload(self.kinds):
            self._write(payload)

    def heartbeat(self, event_id: str) -> None:
        # With the id a reader of rare kinds reconnects near here.
        self._write(f": heartbeat\nid: {event_id}\n\n".encode())

    def end(self, ending: Ending) -> None:
        self._write(_message("end", {"state": ending.state, "reason": ending.reason}).encode())
        self._close("")

    def drop(self, why: str, reason: str) -> None:
        if not self.closed.done():
            self._put(_message("dropped", {"reason": reason}).encode())
            self._close(why)

    async def _drained(self) -> None:
        """Wait until the socket has taken most of what was written."""
        if (writer := self.response._payload_writer) is not None:
            await writer.drain()

    def _write(self, data: bytes) -> None:
        if self.closed.done():
            return
        if self._transport.is_closing():
            self.closed.set_result("")  # the client has closed it
        elif (unsent := self._transport.get_write_buffer_size()) > self.most:
            self.drop(
                "slow", f"too slow: {unsent} bytes were not taken; connect again with Last-Event-ID"
            )
        else:
            self._put(data)

    def _put(self, data: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._framed else data)

    def _close(self, why: str) -> None:
        """Close; the client may take the rest of the buffer for :data:`CLOSE_SECONDS`."""
        if not self.closed.done():
            self.closed.set_result(why)
            if self._framed and not self._transport.is_closing():
                self._transport.write(b"0\r\n\r\n")
            self._transport.close()
            asyncio.get_running_loop().call_later(CLOSE_SECONDS, self._transport.abort)
