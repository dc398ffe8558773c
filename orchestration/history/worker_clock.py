"""The cumulated values of a worker, which begin at 0 again with each of its processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

CUMULATED = ("busy", "waiting_input", "waiting_room", "other", "wall", "rows", "tokens")


class WorkerClock:
    """The clock of one worker over all of its processes.

    Each process reports its own seconds and counts from 0 on. A smaller ``wall`` shows that another
    process has begun; the totals go on from those of the former ones.

    >>> clock = WorkerClock(("wall", "busy"))
    >>> reports = [(10.0, 4.0), (12.0, 5.0), (1.0, 0.5), (3.0, 1.5)]
    >>> [clock.add({"wall": wall, "busy": busy}) for wall, busy in reports]
    [False, True, False, True]
    >>> clock.totals
    {'wall': 15.0, 'busy': 6.5}
    >>> clock.since({"wall": 12.0, "busy": 5.0})
    {'wall': 3.0, 'busy': 1.5}
    """

    def __init__(
        self, names: Sequence[str] = CUMULATED, former: Mapping[str, float] | None = None
    ) -> None:
        """``names`` of the values; ``former``: totals of the processes before the present one."""
        self.former = dict(former or dict.fromkeys(names, 0))
        self.totals = self.former
        self._wall: float | None = None  # of the present process, at its last report

    def add(self, values: Mapping[str, Any], counts: Mapping[str, float] | None = None) -> bool:
        """Add a report of the worker's values, of which those that are missing are 0, and of
        further ``counts``. Return whether the process has reported before."""
        wall = values.get("wall") or 0.0
        goes_on = self._wall is not None and wall >= self._wall
        if self._wall is not None and not goes_on:
            self.former = self.totals
        self._wall = wall
        reported = {name: values.get(name) or 0 for name in self.former} | dict(counts or {})
        self.totals = {name: self.former.get(name, 0) + value for name, value in reported.items()}
        return goes_on

    def since(self, before: Mapping[str, float]) -> dict[str, float]:
        """Return what was added to the totals ``before``; {}: to none."""
        return {name: total - before.get(name, 0) for name, total in self.totals.items()}
