"""The last steps and swaps of a run, from which the guard's windows are made again.

    metrics.jsonl (its end) ──▶ read_past ─┐
    the run's stream, behind that ─────────┴▶ Past.add ──▶ Past.events: of these, what the run stands on

A step that comes again, and a run that was rewound, remove what came after it.
"""

from __future__ import annotations

from collections import deque
from pathlib import Path

from orchestration.history.events_file import read_metrics
from orchestration.history.facts import made_after
from pipeline.data.events import Event, order

# The kinds that the guard judges or acts on, and what it reads of them: a file may be of any
# origin.
KINDS = {
    "step": {"step", "version", "rows", "groups"},
    "sync": {"version", "worker"},
    "alarm": {"step", "metric"},
}
READ_BYTES = (1 << 20, 8 << 20, 32 << 20)  # of the end of a file, until there are enough steps


class Past:
    """Events in their order: of those up to the id ``judged`` the ones of the last ``steps`` steps,
    and all behind them."""

    def __init__(self, steps: int, judged: str) -> None:
        self.events: deque[Event] = deque()
        self._most = steps
        self._judged = order(judged)
        self._steps = deque[int]()  # numbers of the steps among the events

    def add(self, event: Event) -> None:
        if event.kind == "worker" and event.data.get("change") == "rewound":
            self._rewind(event.data.get("version") or 0)
        if not (event.kind in KINDS and KINDS[event.kind] <= event.data.keys()):
            return
        if event.kind == "step":
            if self._steps and event.data["step"] <= self._steps[-1]:
                self._rewind(event.data["step"] - 1)
            self._steps.append(event.data["step"])
        self.events.append(event)
        while len(self._steps) > self._most and order(self.events[0].id) <= self._judged:
            self._forget_first()

    def _forget_first(self) -> None:
        """Forget the first step, and all that came before it."""
        while self.events.popleft().kind != "step":
            pass
        self._steps.popleft()

    def _rewind(self, version: int) -> None:
        """Remove what was made after policy ``version``."""
        self.events = deque(event for event in self.events if not made_after(version, event))
        self._steps = deque(step for step in self._steps if step <= version)


def read_past(path: Path, steps: int) -> list[Event]:
    """Return the last events of ``path`` of these kinds, with ``steps`` steps among them where
    there are as many in its last READ_BYTES. Empty without a file."""
    events = list[Event]()
    before = -1
    for size in READ_BYTES:
        count = 0
        events = []
        for event in read_metrics(path, size):
            count += 1
            if event.kind in KINDS:
                events.append(event)
        if count == before or sum(event.kind == "step" for event in events) >= steps:
            break  # it has no more, or these are enough
        before = count
    return events
