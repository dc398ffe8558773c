"""Signs of life: who gives them, and how another process judges that they stay out.

    host, head ── BEAT, a count that grows each BEAT_SECONDS ──▶ index ──▶ Pulse.silent: seconds without a change

No clocks are compared. A watcher adds up its own seconds from look to look, and a long gap counts little: after a
machine has slept, or the watcher was stopped, whoever it watches has time to give the next sign.
"""

from __future__ import annotations

import asyncio
import itertools
import time

from orchestration.state.documents import BEAT
from pipeline.index.client import Index

BEAT_SECONDS = 2.0  # between two signs of life of a host
LOST_SECONDS = 10.0  # without one, a host is lost with its workers


class AwakeTime:
    """The time of a watcher that looks each ``pause`` seconds: a gap between two looks counts as at
    most twice that."""

    def __init__(self, pause: float) -> None:
        self._longest = 2 * pause
        self._looked = time.monotonic()

    def passed(self) -> float:
        """Return the seconds since the last call, or since this object was made."""
        now = time.monotonic()
        passed = min(now - self._looked, self._longest)
        self._looked = now
        return passed


async def beat(index: Index, name: str) -> None:
    """Give signs of life of the host ``name``, until cancelled."""
    for count in itertools.count():
        await BEAT.put(index, count, host=name)
        await asyncio.sleep(BEAT_SECONDS)


class Pulse:
    """The signs of life of one host, seen by a process that looks at least each
    :data:`BEAT_SECONDS`."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._awake = AwakeTime(BEAT_SECONDS)
        self._beat: int | None = None
        self._silent = 0.0

    async def silent(self, name: str) -> float:
        """Return the seconds since the host ``name`` gave a sign of life, or since this object was
        made. While the index did not answer, nobody could give one."""
        asked = time.monotonic()
        beat = await BEAT.get(self._index, host=name)
        unanswered = time.monotonic() - asked > BEAT_SECONDS
        passed = self._awake.passed()
        self._silent = 0.0 if beat != self._beat or unanswered else self._silent + passed
        self._beat = beat
        return self._silent
