"""Recording of a run's events, for when the index gives its stream up.

    the index's stream ─▶ Recording ─┬─▶ metrics.jsonl, by steps
                                     └─▶ RunTotals ─▶ document TOTALS of the run, each minute and at the end
    a minute after the run's end, when both have all of it ─▶ give_up: the stream is empty

A runner records the events of its run as they come. If it was killed, :func:`record_rest` records
the remaining events when the run is concluded. A worker that outlives its run may emit events after
that: :func:`give_up` records them.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Self

from orchestration.history.events_file import MetricsFile, newest_id
from orchestration.history.totals import RecordedTotals, RunTotals
from orchestration.state.documents import TOTALS
from orchestration.state.lock import RunLocked, lock_run
from pipeline.data.events import Event, order
from pipeline.index.client import Index

EVERY = 60.0  # seconds between two versions of TOTALS


async def recorded_totals(index: Index) -> RecordedTotals:
    """Return the totals that the index has of the run; empty ones where it has none."""
    return await TOTALS.get(index) or RecordedTotals(RunTotals())


class Recording:
    """The recording of the events of the run of ``index`` in the file at ``path``, and of their
    totals in the index. ``after``: the id after which they are to be given."""

    def __init__(self, index: Index, path: Path, recorded: RecordedTotals) -> None:
        self._index = index
        self._path = path
        self._file = MetricsFile(path)
        self._totals = recorded.totals
        self._after = recorded.after
        self.after = min(self._file.after, recorded.after, key=order)
        self._saved = time.monotonic()

    @classmethod
    async def begin(cls, index: Index, path: Path) -> Self:
        return cls(index, path, await recorded_totals(index))

    async def take(self, event: Event) -> None:
        """Take ``event``. Raises OSError when the disk takes no more."""
        if order(event.id) > order(self._file.after):
            self._file.event(event)
        if order(event.id) > order(self._after):
            self._totals.apply(event)
            self._after = event.id
        if time.monotonic() - self._saved >= EVERY:
            await self._save("")

    async def close(self) -> None:
        """Write what waits. Raises OSError when events are lost."""
        if lost := self._file.close():
            raise OSError(lost)
        await self._save(await asyncio.to_thread(newest_id, self._path))

    async def _save(self, file: str) -> None:
        self._saved = time.monotonic()
        await TOTALS.put(self._index, RecordedTotals(self._totals, self._after, file))


async def record_rest(index: Index, path: Path) -> None:
    """Record what is not yet of the events of a run that has ended.

    Raises OSError when the disk takes no more.
    """
    recorded, (_, newest) = await recorded_totals(index), await index.event_ends()
    if recorded.file and order(recorded.after) >= order(newest):
        return
    recording = await Recording.begin(index, path)
    after = recording.after
    while page := await index.past_events(after):
        for event in page:
            await recording.take(event)
        after = page[-1].id
    await recording.close()


async def give_up(index: Index, path: Path) -> bool:
    """Record what came after the end of an ended run, and remove its events from the index.

    Returns False, and removes nothing, where the file at ``path`` lacks events that were recorded,
    and while another process executes the run. Raises OSError when the disk takes no more.
    """
    recorded, (_, newest) = await recorded_totals(index), await index.event_ends()
    if not recorded.file:
        return False
    if order(await asyncio.to_thread(newest_id, path)) < order(recorded.file):
        return False
    if order(recorded.after) < order(newest):
        try:
            with lock_run(path.parent, wait=0.0):
                await record_rest(index, path)
        except RunLocked:
            return False
        recorded = await recorded_totals(index)
        newest = recorded.after
    await index.give_events_up(newest, recorded.file)
    return True
