"""Append-only streams of a run: its events, and logs of numbered entries that several readers agree
on."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import msgpack
from redis.exceptions import ResponseError

from pipeline.data.events import Event, EventData, order
from pipeline.index.calls import Calls
from pipeline.index.errors import IndexRefused

EVENTS_KEPT = 100_000  # about; older ones are only in the run's folder
EVENTS_AT_ONCE = 500


class Events(Calls):
    """Calls that write and read the run's event stream."""

    async def emit(self, event: EventData, *documents: tuple[str, str]) -> None:
        """Append ``event``, with the time of this moment.

        ``documents`` of the run (:meth:`Document.entry`) that say that it was emitted are written
        in the same transaction: a process that is killed has done both or neither.
        """
        fields = {"kind": event.kind, **stamped(event)}
        added = [part for field in fields.items() for part in field]
        events = ("XADD", f"{self.prefix}events", "MAXLEN", "~", EVENTS_KEPT, "*", *added)
        written = [("SET", f"{self.prefix}doc:{name}", value) for name, value in documents]
        await self._link.send_all(
            [("MULTI",), events, *written, ("EXEC",)] if written else [events]
        )

    async def continue_events(self, after: str) -> None:
        """Give the events that follow greater ids than ``after``, also where the clock is behind
        it: the server counts on from the greatest id that a stream has had. Does nothing where the
        stream is there already."""
        key = f"{self.prefix}events"
        if order(after) <= (0, 0) or await self._redis.exists(key):
            return
        await self._place(after)

    async def _place(self, event: str) -> None:
        """Have the server give ids that are greater than ``event``."""
        milliseconds, number = order(event)
        key = f"{self.prefix}events"
        placed = f"{milliseconds}-{number}"
        await self._link.send_all(
            [("MULTI",), ("XADD", key, placed, "-", ""), ("XDEL", key, placed), ("EXEC",)]
        )

    async def events(self, after: str = "0", timeout: float = 1.0) -> list[Event]:
        """Return the next events after id ``after``, waiting for them; empty when none came within
        ``timeout`` seconds."""
        streams = await self._read({"events": after}, timeout, EVENTS_AT_ONCE)
        return [_event(entry, fields) for _, entries in streams or () for entry, fields in entries]

    async def past_events(self, after: str = "0", count: int = EVENTS_AT_ONCE) -> list[Event]:
        """Return at most ``count`` events after id ``after``, without waiting.

        The stream keeps about :data:`EVENTS_KEPT`; use :meth:`event_ends` to find out whether
        ``after`` is still in it.
        """
        entries = await self._redis.xrange(
            f"{self.prefix}events", min=f"({after}", max="+", count=count
        )
        return [_event(entry, fields) for entry, fields in entries]

    async def give_events_up(self, newest: str, last: str) -> None:
        """Remove the events up to the id ``newest``.

        Ids that follow are greater than it, and than ``last``.
        """
        milliseconds, number = order(newest)
        key = f"{self.prefix}events"
        await self._redis.xtrim(key, minid=f"{milliseconds}-{number + 1}", approximate=False)
        if order(last) > order(newest) and not await self._redis.xlen(key):
            await self._place(last)

    async def last_event_id(self) -> str:
        """Return the id of the newest event that the stream has had; "0": it has had none."""
        key = f"{self.prefix}events"
        if not await self._redis.exists(key):
            return "0"
        last_id = (await self._redis.xinfo_stream(key))["last-generated-id"]
        return last_id.decode() if isinstance(last_id, bytes) else str(last_id)

    async def event_ends(self) -> tuple[str, str]:
        """Return the ids of the oldest and the newest event in the stream; "0" and "0" when it is
        empty."""
        key = f"{self.prefix}events"
        commands = [("XRANGE", key, "-", "+", "COUNT", 1), ("XREVRANGE", key, "+", "-", "COUNT", 1)]
        replies = await self._link.send_all(commands)
        oldest, newest = (entries[0][0].decode() if entries else "0" for entries in replies)
        return oldest, newest

    async def newest(self, kind: str, within: int = 1000) -> Event | None:
        """Return the newest event of this kind among the last ``within`` events; None when there is
        none."""
        entries = await self._redis.xrevrange(f"{self.prefix}events", count=within)
        return next(
            (
                _event(entry, fields)
                for entry, fields in entries
                if fields[b"kind"] == kind.encode()
            ),
            None,
        )


LOG_SECONDS = 10.0  # a wait on the server for an entry is renewed this often


class Logs(Calls):
    """Calls that write and read logs: streams of entries 0, 1, 2, …, for
    :class:`pipeline.documents.kinds.Log` alone."""

    async def append_log(self, log: str, number: int, entry: bytes) -> None:
        """Write entry ``number`` of ``log``. Raises IndexRefused when it was written before."""

        async def once(again: bool) -> None:
            try:
                await self._link.redis.xadd(self.prefix + log, {"e": entry}, id=f"{number + 1}-0")
            except ResponseError as refused:
                if not again:
                    raise IndexRefused(
                        f"log {log!r} has an entry {number} already ({refused}); give another name"
                    ) from None

        await self._link.retry(once)

    async def log_end(self, log: str) -> int:
        """Return the number of the entry that ``log`` gets next."""
        entries = await self._redis.xrevrange(self.prefix + log, count=1)
        return int(entries[0][0].decode().partition("-")[0]) if entries else 0

    async def read_log(self, log: str, number: int, timeout: float) -> bytes | None:
        """Return entry ``number`` of ``log``, waiting ``timeout`` seconds for it.

        Raises IndexRefused when it was trimmed.
        """
        streams = await self._read({log: f"{number}-0"}, timeout, 1)
        if not streams:
            return None
        position, fields = streams[0][1][0]
        if position != f"{number + 1}-0".encode():
            raise IndexRefused(
                f"entry {number} of log {log!r} was removed: all of its readers had "
                f"finished with it"
            )
        return fields[b"e"]

    async def next_entry(self, log: str, number: int) -> bytes:
        """Return entry ``number`` of ``log``, waiting for it as long as it takes.

        Raises IndexRefused when it was trimmed.
        """
        while (entry := await self.read_log(log, number, LOG_SECONDS)) is None:
            pass
        return entry

    async def sign_entry(self, log: str, number: int, owner: str) -> int:
        """Add ``owner`` to the set of owners that have signed entry ``number`` of ``log``; returns
        how many have."""
        signatures = self._signatures(log, number)
        both = ("SADD", signatures, owner), ("SCARD", signatures)
        *_, (_, count) = await self._link.send_all([("MULTI",), *both, ("EXEC",)])
        return int(count)

    async def trim_log(self, log: str, number: int) -> None:
        """Remove entry ``number`` of ``log``, and the set of owners that have signed it."""
        await self._redis.xdel(self.prefix + log, f"{number + 1}-0")
        await self._redis.delete(self._signatures(log, number))

    def _signatures(self, log: str, number: int) -> str:
        return f"{self.prefix}{log}:done:{number}"


def stamped(event: EventData) -> dict[str, Any]:
    """Return the fields of an event of this moment, without its kind."""
    return {"time": repr(time.time()), "data": msgpack.packb(event.wire())}


def _event(entry: bytes, fields: Mapping[bytes, bytes]) -> Event:
    data = msgpack.unpackb(fields[b"data"], strict_map_key=False)
    return Event(entry.decode(), float(fields[b"time"]), fields[b"kind"].decode(), data)
