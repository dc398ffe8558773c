"""History of a run: all of its events in order of their ids, from the index and from the run's
folder.

    metrics/*.gz, metrics.jsonl  |0 ────────── older ones, those that are kept ─────────|─ ─ (the same again) ─ ─▶
    index                                                          oldest there |────────────────────▶ newest

    page(after) ──▶ below the oldest in the index: from the file; everything else: from the index

An id is a Unix time in milliseconds and a number, given by the index's server, so ids only grow. A
resumed run appends to the same file.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from orchestration.history.detail import detail_after, detail_begins, with_detail
from orchestration.history.segments import EventLog
from pipeline.data.events import Event, order
from pipeline.index.client import EVENTS_AT_ONCE, Index

BEGINNING = "0"


def id_at(seconds: float) -> str:
    """Return an id before all events from the Unix time ``seconds`` on, by the clock of the index's
    server."""
    return f"{max(0, int(seconds * 1000) - 1)}-{2**63}"


class History:
    """All events of one run.

    ``index`` returns the run's index and is called at each use (None: the index is gone); ``file``
    is the run's ``metrics.jsonl``. ``detail``: with the stage and span events of the last minutes
    beside it.
    """

    def __init__(
        self, index: Callable[[], Index] | None, file: Path, *, detail: bool = False
    ) -> None:
        self._index = index
        self._file = file
        self._detail = detail
        self._log = EventLog(file)

    async def newest(self) -> str:
        """Return the id of the newest event that the index has had."""
        return await self._index().last_event_id() if self._index else BEGINNING

    async def page(self, after: str, count: int = EVENTS_AT_ONCE) -> list[Event]:
        """Return the next events after ``after`` that exist now, at most ``count``, in order and
        without a gap."""
        if self._index is None:
            return await asyncio.to_thread(self._of_file, after, count)
        oldest, newest = await self._index().event_ends()
        if newest == BEGINNING or order(after) < order(oldest):
            file_events = await asyncio.to_thread(self._of_file, after, count)
            older = [
                event
                for event in file_events
                if newest == BEGINNING or order(event.id) < order(oldest)
            ]
            if older:
                return older
        return await self._index().past_events(after, count)

    def _of_file(self, after: str, count: int) -> list[Event]:
        events = self._log.after(after, count)
        if not self._detail:
            return events
        begins = order(detail_begins(self._file))
        if len(events) == count and order(events[-1].id) < begins:
            return events
        return list(with_detail(events, detail_after(self._file, after, count)))[:count]

    async def wait(self, after: str, seconds: float) -> list[Event]:
        """Return the next events in the index after ``after``; empty when none came within
        ``seconds``."""
        assert self._index is not None, "waiting for events needs an index"
        return await self._index().events(after, seconds)

    async def pages(
        self, after: str = BEGINNING, until: float = float("inf")
    ) -> AsyncIterator[list[Event]]:
        """Yield pages of the events after ``after`` that exist now, up to the Unix time ``until``
        by the index's clock."""
        last = (int(until * 1000), 2**63) if until != float("inf") else None
        while page := await self.page(after):
            after = page[-1].id
            events = [event for event in page if order(event.id) <= last] if last else page
            if events:
                yield events
            if len(events) < len(page):
                return
