"""History of a run: all of its events in order of their ids, from the index and from the run's folder.

    metrics.jsonl  |0 ─────────────── older ones ───────────────|─ ─ (the same again) ─ ─▶
    index                                              oldest there |────────────────────▶ newest

    page(after) ──▶ below the oldest in the index: from the file; everything else: from the index

An id is a Unix time in milliseconds and a number, given by the index's server, so ids only grow. A resumed run appends
to the same file.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import IO

from pipeline.events import Event, order
from pipeline.index.client import EVENTS_AT_ONCE, Index

BEGINNING = "0"
_ID_OF_LINE = re.compile(rb'\{"id": ?"(\d+-\d+)"')


def id_at(seconds: float) -> str:
    """An id before all events from the Unix time ``seconds`` on, by the clock of the index's server."""
    return f"{max(0, int(seconds * 1000) - 1)}-{2**63}"


def read_after(path: Path, event_id: str, count: int = EVENTS_AT_ONCE) -> list[Event]:
    """The next ``count`` events after ``event_id`` in a ``metrics.jsonl`` (one event a line, with growing ids); empty when
    there are none, or no file. Lines that a kill cut short are skipped."""
    found: list[Event] = []
    last = order(event_id)
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        file.seek(_place(file, last))
        for line in file:
            if (event := _event_of(line)) is not None and order(event.id) > last:
                last = order(event.id)
                found.append(event)
                if len(found) == count:
                    break
    return found


def _place(file: IO[bytes], wanted: tuple[int, int]) -> int:
    """Start of a line at or a few lines before the first id past ``wanted``, found by bisection."""
    low, high = 0, file.seek(0, 2)  # a line begins at `low`; ids before it are not past `wanted`
    while high - low > 4096:
        middle = (low + high) // 2
        file.seek(middle)
        file.readline()  # the rest of a line
        at, found = file.tell(), None
        while at < high and (line := file.readline()) and (found := _ID_OF_LINE.match(line)) is None:
            at = file.tell()  # a line that was cut short
        if found is None or order(found[1].decode()) > wanted:
            high = middle
        else:
            low = at
    return low


def _event_of(line: bytes) -> Event | None:
    if not line.endswith(b"\n"):
        return None
    try:
        event = json.loads(line)
        return Event(str(event["id"]), float(event["time"]), str(event["kind"]), dict(event["data"]))
    except (ValueError, TypeError, KeyError):  # a kill cut it short, and the next runner wrote on behind it
        return None


class History:
    """All events of one run. ``index`` returns the run's index and is called at each use (None: the index is gone);
    ``file`` is the run's ``metrics.jsonl``."""

    def __init__(self, index: Callable[[], Index] | None, file: Path) -> None:
        self._index, self._file = index, file

    async def newest(self) -> str:
        """The id of the newest event in the index."""
        return (await self._index().event_ends())[1] if self._index else BEGINNING

    async def page(self, after: str, count: int = EVENTS_AT_ONCE) -> list[Event]:
        """The next events after ``after`` that exist now, at most ``count``, in order and without a gap."""
        if self._index is None:
            return await asyncio.to_thread(read_after, self._file, after, count)
        oldest, newest = await self._index().event_ends()
        if newest == BEGINNING or order(after) < order(oldest):
            found = await asyncio.to_thread(read_after, self._file, after, count)
            older = [event for event in found if newest == BEGINNING or order(event.id) < order(oldest)]
            if older:
                return older
        return await self._index().past_events(after, count)

    async def wait(self, after: str, seconds: float) -> list[Event]:
        """The next events in the index after ``after``; empty when none came within ``seconds``."""
        assert self._index is not None, "waiting for events needs an index"
        return await self._index().events(after, seconds)

    async def pages(self, after: str = BEGINNING, until: float = float("inf")) -> AsyncIterator[list[Event]]:
        """Pages of the events after ``after`` that exist now, up to the Unix time ``until`` by the index's clock."""
        last = (int(until * 1000), 2**63) if until != float("inf") else None
        while page := await self.page(after):
            after = page[-1].id
            kept = [event for event in page if order(event.id) <= last] if last else page
            if kept:
                yield kept
            if len(kept) < len(page):
                return
