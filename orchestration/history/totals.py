"""Totals of a run, added up from its events.

Views, reports, metrics, trackers and REST read them; nothing here does I/O.

Event ──▶ RunTotals.apply ──▶ state, newest step, weights, restarts, what was dropped ──▶ wire ──▶ of, in another process
              └─ stage ──▶ WorkerTotals: times and counts over all lives of a worker, shares, rates
"""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from orchestration.history.worker_clock import CUMULATED, WorkerClock
from pipeline.data.events import (
    AlarmEvent,
    Event,
    EventData,
    LedgerEvent,
    PromptEvent,
    StageEvent,
    StateEvent,
    StepEvent,
    SyncEvent,
    WorkerEvent,
)

ALARMS = 100  # newest alarms that are kept; all are counted
RATE_SECONDS = 10.0  # recent rates and shares are those of this long a past
SHARES = ("busy", "waiting_input", "waiting_room", "other")
OPEN = "open"  # of the numbers of trajectories the one that does not only grow
DRAFTS = ("drafted_tokens", "held_tokens")  # the numbers of drafts
COUNTED_TOKENS = ("generated", "trained", "filtered")
# of a reward function
OF_CALLS = ("responses", "lost", "calls", "failed", "again", "seconds", "waited")
# Fields of RunTotals: plain values; and newest events.
_PLAIN = (
    *(
        "state",
        "reason",
        "processes",
        "nodes",
        "sync_seconds",
        "published_bytes",
        "restarts",
        "epochs",
    ),
    *("prompts_skipped", "prompts_cut", "alarm_counts", "reward_calls"),
    *("began", "now", "former_seconds"),
)
_EVENTS: dict[str, type[EventData]] = {
    "step": StepEvent,
    "published": SyncEvent,
    "swapped": SyncEvent,
    "ledger": LedgerEvent,
}


class WorkerTotals:
    """Times and counts of one worker. ``latest`` is its newest event, of the Unix time ``time``."""

    def __init__(
        self,
        first: StageEvent,
        time: float,
        former: Mapping[str, float] | None = None,
        before_recent: Mapping[str, float] | None = None,
    ) -> None:
        """``former``: totals of the worker's processes before the one that sent ``first``;
        ``before_recent``: totals before the recent ones."""
        self.latest = first
        self.time = time
        self.clock = WorkerClock(former=former)
        self._recent = deque[Mapping[str, float]]([before_recent] if before_recent else ())
        self.apply(first, time)

    def wire(self) -> dict[str, Any]:
        """Return the state as plain values, from which :meth:`of` makes it again."""
        return {
            "latest": self.latest.wire(),
            "time": self.time,
            "former": self.clock.former,
            "before_recent": self._before_recent,
        }

    @classmethod
    def of(cls, wire: Mapping[str, Any]) -> Self:
        """Restore a worker from :meth:`wire`. What an older version did not write is not known."""
        latest = StageEvent.of(wire["latest"])
        return cls(latest, wire.get("time", 0.0), wire["former"], wire.get("before_recent"))

    def apply(self, event: StageEvent, time: float) -> None:
        self.latest = event
        self.time = time
        counts = {name: n for name, n in event.trajectories.items() if name != OPEN}
        self.clock.add(vars(event), {**counts, **event.drafts})
        self._recent.append(self.totals)
        while (
            len(self._recent) > 2 and self.totals["wall"] - self._recent[1]["wall"] >= RATE_SECONDS
        ):
            self._recent.popleft()

    @property
    def totals(self) -> dict[str, float]:
        """Of all of its processes."""
        return self.clock.totals

    @property
    def recent(self) -> dict[str, float]:
        """Totals that were added within the last :data:`RATE_SECONDS`."""
        return self.clock.since(self._before_recent)

    @property
    def _before_recent(self) -> Mapping[str, float]:
        return self._recent[0] if len(self._recent) > 1 else {}

    def rate(self, name: str) -> float:
        """Recent ``rows`` or ``tokens`` per second."""
        return per_second(self.recent, name)


def per_second(counts: Mapping[str, float], name: str) -> float:
    return counts[name] / counts["wall"] if counts["wall"] > 0 else 0.0


def shares(counts: Mapping[str, float]) -> dict[str, float]:
    """Return the parts of the wall time, which add up to 1 (all 0 before any time has passed)."""
    return {name: per_second(counts, name) for name in SHARES}


class RunTotals:
    """One run's totals.

    ``step``, ``published`` and ``swapped`` are its newest events of these kinds; ``processes`` has
    the last change and the pid of each worker process, ``names`` all workers that events named.

    A run that is resumed has several parts, with time between them that is not its own. Unix
    seconds: ``began`` of the newest part, without its time in the queue; ``now`` of the last event.
    ``former_seconds``: of the parts before.
    """

    def __init__(self) -> None:
        self.state = "created"
        self.reason = ""
        self.began: float | None = None
        self.now: float | None = None
        self.former_seconds = 0.0
        self.step: StepEvent | None = None
        self.workers: dict[str, WorkerTotals] = {}
        self.names: set[str] = set()
        self.processes: dict[str, tuple[str, int]] = {}
        # machine and host of each process, since it was ready
        self.nodes: dict[str, tuple[str, str]] = {}
        self.published: SyncEvent | None = None
        self.swapped: SyncEvent | None = None
        self.sync_seconds = {"publish": 0.0, "exposed": 0.0, "hidden": 0.0}
        self.published_bytes = self.restarts = 0
        self.ledger: LedgerEvent | None = None
        self.epochs: dict[str, int] = {}  # that each source of prompts is in, from 1
        self.prompts_skipped = self.prompts_cut = 0  # as they were too long
        self.alarms: deque[tuple[float, AlarmEvent]] = deque(maxlen=ALARMS)  # with their times
        self.alarm_counts: dict[str, int] = {}  # by metric
        # by reward function what its calls have come to, as each step says of those before it
        self.reward_calls: dict[str, dict[str, float]] = {}

    def wire(self) -> dict[str, Any]:
        """Return the totals as plain values, from which :meth:`of` makes them again."""
        events = {
            name: event.wire() for name in _EVENTS if (event := getattr(self, name)) is not None
        }
        sets = {
            "names": sorted(self.names),
            "alarms": [(time, alarm.wire()) for time, alarm in self.alarms],
        }
        workers = {name: worker.wire() for name, worker in self.workers.items()}
        return {name: getattr(self, name) for name in _PLAIN} | events | sets | {"workers": workers}

    @classmethod
    def of(cls, wire: Mapping[str, Any]) -> Self:
        """Restore totals from :meth:`wire`.

        A field that an older version did not write has its initial value.
        """
        totals = cls()
        for name in _PLAIN:
            setattr(totals, name, wire.get(name, getattr(totals, name)))
        for name, kind in _EVENTS.items():
            event = Event("", 0.0, kind.kind, wire[name]) if name in wire else None
            setattr(totals, name, event and event.decoded())
        totals.names = set(wire["names"])
        totals.processes = {name: (change, pid) for name, (change, pid) in totals.processes.items()}
        totals.nodes = {name: (machine, host) for name, (machine, host) in totals.nodes.items()}
        for time, alarm in wire["alarms"]:
            totals.alarms.append((time, AlarmEvent.of(Event("", time, "alarm", alarm).data)))
        for name, worker in wire["workers"].items():
            totals.workers[name] = WorkerTotals.of(worker)
        return totals

    def apply(self, event: Event) -> EventData | None:
        """Add ``event``; returns its payload."""
        data = event.decoded()
        if self.began is None:
            self.began = event.time
        match data:
            case StateEvent():
                if data.state in ("created", "starting") and data.state != self.state:
                    if self.state != "created":
                        self._begin_part()
                    self.began = event.time
                self.state = data.state
                self.reason = data.reason or ""
            case StepEvent():
                self.step = data
                for name, figures in data.rewards.items():
                    calls = self.reward_calls.setdefault(name, {})
                    for what in OF_CALLS:
                        calls[what] = calls.get(what, 0) + (figures.get(what) or 0)
            case LedgerEvent():
                self.ledger = data
            case StageEvent():
                self.names.add(data.worker)
                if data.worker in self.workers:
                    self.workers[data.worker].apply(data, event.time)
                else:
                    self.workers[data.worker] = WorkerTotals(data, event.time)
            case SyncEvent():
                self.names.add(data.worker)
                self._sync(data)
            case WorkerEvent():
                self.names.add(data.worker)
                _, pid = self.processes.get(data.worker, ("", 0))
                self.processes[data.worker] = data.change, data.pid or pid
                if data.node:
                    self.nodes[data.worker] = data.node, data.host
                self.restarts += data.change == "restarted"
            case AlarmEvent():
                self.alarms.append((event.time, data))
                self.alarm_counts[data.metric] = self.alarm_counts.get(data.metric, 0) + 1
            case PromptEvent(change="epoch"):
                self.epochs = dict(data.epochs)
            case PromptEvent(
                change="too long"
            ):  # counted by one worker, which begins at 0 after a restart
                self.prompts_skipped = max(self.prompts_skipped, data.skipped)
                self.prompts_cut = max(self.prompts_cut, data.cut)
        self.now = event.time
        return data

    def _begin_part(self) -> None:
        self.former_seconds = self.elapsed

    @property
    def elapsed(self) -> float:
        """Seconds in which the run ran: from the beginning to the last event of each part."""
        if self.began is None or self.now is None:
            return self.former_seconds
        return self.former_seconds + self.now - self.began

    @property
    def tokens(self) -> dict[str, int]:
        """Tokens generated, trained and filtered since the run's beginning, also where no step was
        made."""
        step = self.step
        ledger = self.ledger
        of_step = {name: getattr(step, f"tokens_{name}", 0) for name in COUNTED_TOKENS}
        return {
            name: max(getattr(ledger, f"{name}_tokens", 0), of_step[name])
            for name in COUNTED_TOKENS
        }

    @property
    def trajectories(self) -> dict[str, float]:
        """The numbers of trajectories that `stage` events have, of all processes of the workers; {} in
        a run without environments."""
        counts = Counter[str]()
        for worker in self.workers.values():
            if latest := worker.latest.trajectories:
                more = {
                    name: n
                    for name, n in worker.totals.items()
                    if name not in (*CUMULATED, *DRAFTS)
                }
                counts.update({OPEN: latest.get(OPEN, 0), **more})  # type: ignore[dict-item]
        return dict(counts)

    @property
    def drafts(self) -> dict[str, float]:
        """Tokens that rollout engines looked up, and those that were drawn, of all processes of the
        workers; {} where no engine drafts."""
        totals = [worker.totals for worker in self.workers.values()]
        return {
            name: sum(of_worker.get(name, 0) for of_worker in totals)
            for name in DRAFTS
            if any(name in of_worker for of_worker in totals)
        }

    @property
    def dropped(self) -> dict[str, tuple[int, int]]:
        """Groups that were dropped and their tokens, by reason; the reason with the most groups
        first."""
        ledger = self.ledger
        groups = {} if ledger is None else ledger.dropped or {}
        tokens = {} if ledger is None else ledger.dropped_tokens or {}
        return {
            reason: (groups[reason], tokens.get(reason, 0))
            for reason in sorted(groups, key=lambda r: (-groups[r], r))
        }

    def _sync(self, data: SyncEvent) -> None:
        if data.publish_seconds:
            self.published = data
            self.published_bytes += data.bytes
        else:  # an engine has loaded the same bytes
            self.swapped = data
        for part in self.sync_seconds:
            self.sync_seconds[part] += getattr(data, f"{part}_seconds") or 0.0


@dataclass(frozen=True)
class RecordedTotals:
    """The ``totals`` of a run up to the event with the id ``after``.

    ``file``: the last id in its file, which then has all events; "": the file may lack some.
    """

    totals: RunTotals
    after: str = "0"
    file: str = ""

    def to_json(self) -> str:
        return json.dumps({"after": self.after, "file": self.file, "totals": self.totals.wire()})

    @classmethod
    def from_json(cls, text: str) -> Self:
        known = json.loads(text)
        return cls(RunTotals.of(known["totals"]), known["after"], known["file"])
