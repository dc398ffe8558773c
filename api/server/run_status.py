"""How runs fare, from their events: the newest step of each, and what every worker said last.

events of a run ──(only those that are new)──▶ Fold: the newest of each worker      one fold a run, at most FOLDS of them
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from orchestration.external.accounting import PREFIX
from orchestration.service.registry import ENDED, RunRecord
from pipeline.events import Event
from pipeline.index.client import Index

FRESH_SECONDS = 0.25  # within which what was read is not read again
FOLDS = 128  # runs whose workers are kept in mind
STEPS = 10_000  # runs whose newest step is


@dataclass
class Fold:
    """``stages``: the newest `stage` event by worker. ``processes``: state and pid by worker process. ``workers``: the names
    of all that were heard of."""

    after: str = "0"
    read: float = 0.0
    stages: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    processes: dict[str, tuple[str, int]] = field(default_factory=dict)
    workers: set[str] = field(default_factory=set)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def apply(self, event: Event) -> None:
        data = event.data
        if event.kind in ("stage", "sync", "worker") and "worker" in data:
            self.workers.add(data["worker"])
        if event.kind == "stage":
            self.stages[data["worker"]] = data
        elif event.kind == "worker" and "worker" in data:
            _, pid = self.processes.get(data["worker"], ("", 0))
            self.processes[data["worker"]] = data["change"], data.get("pid") or pid

    def process(self, worker: str) -> str:
        """The process that a stage's worker runs in: its own, or the one that the light stages share; "" for somebody
        else's."""
        if worker in self.processes:
            return worker
        return "" if worker.startswith(PREFIX) else "flow-0"


class Watching:
    def __init__(self) -> None:
        self._folds: OrderedDict[str, Fold] = OrderedDict()
        self._steps: OrderedDict[str, tuple[float, Mapping[str, Any] | None]] = OrderedDict()

    async def fold(self, index: Index) -> Fold:
        """What the workers of the run said last. The first time, all of its events are read."""
        fold = self._folds.setdefault(index.run, Fold())
        self._folds.move_to_end(index.run)
        while len(self._folds) > FOLDS:
            self._folds.popitem(last=False)
        async with fold.lock:
            while time.monotonic() - fold.read > FRESH_SECONDS:
                events = await index.past_events(fold.after)
                for event in events:
                    fold.apply(event)
                    fold.after = event.id
                if not events:
                    fold.read = time.monotonic()
        return fold

    async def step(self, index: Index, record: RunRecord) -> Mapping[str, Any] | None:
        """The newest `step` event of the run."""
        read, known = self._steps.pop(record.id, (0.0, None))
        fresh = time.time() - read <= FRESH_SECONDS
        if record.ended is not None:
            fresh = read > record.ended + 1  # by two clocks, perhaps
        if record.state != "created" and not fresh:
            event = await index.newest("step")
            read, known = time.time(), event.data if event else known
        if record.state in ENDED or known is not None:
            self._steps[record.id] = read, known
        while len(self._steps) > STEPS:
            self._steps.popitem(last=False)
        return known

    def forget(self, run: str) -> None:
        self._folds.pop(run, None)
        self._steps.pop(run, None)
