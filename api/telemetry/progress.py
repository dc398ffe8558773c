"""What is known of a run from its events so far. Views and reports read it; nothing here does I/O.

Event ──▶ Progress.apply ──▶ state, steps, evaluations, stages with their rates and shares, syncs, messages
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from orchestration.events_file import Told as Event

RATE_SECONDS = 10.0  # rates and shares shown live are those of this long a past
STEPS_OF_RATE = 8  # time left and tokens per second follow from this many last steps
MESSAGES = 5
ENDED = ("finished", "stopped", "failed")
SHARES = ("busy", "waiting_input", "waiting_room", "other")


@dataclass
class StageProgress:
    """One worker's stage. ``latest`` is its newest event; totals count from the start of its present process."""

    latest: Mapping[str, Any]
    past: deque[Mapping[str, Any]] = field(default_factory=deque)

    def apply(self, data: Mapping[str, Any]) -> None:
        if data["wall"] < self.latest["wall"]:  # restarted: its clock began anew
            self.past.clear()
        self.latest = data
        self.past.append(data)
        while len(self.past) > 2 and data["wall"] - self.past[1]["wall"] >= RATE_SECONDS:
            self.past.popleft()

    def shares(self, *, recent: bool = True) -> dict[str, float]:
        """Parts of wall time, which add up to 1 (all 0 before any time has passed)."""
        wall = self._since("wall", recent)
        return {name: self._since(name, recent) / wall if wall > 0 else 0.0 for name in SHARES}

    def rate(self, name: str) -> float:
        """``rows`` or ``tokens`` per second, lately."""
        wall = self._since("wall", recent=True)
        return self._since(name, recent=True) / wall if wall > 0 else 0.0

    def _since(self, name: str, recent: bool) -> float:
        begin = self.past[0][name] if recent and len(self.past) > 1 else 0.0
        return float(self.latest[name] - begin)


@dataclass
class Progress:
    """A run of ``steps`` steps whose staleness bound is ``bound``."""

    name: str
    steps: int
    bound: int
    state: str = "created"
    reason: str = ""
    began: float | None = None  # Unix seconds of the first event
    running: float | None = None  # of the first event of training
    stepped: float | None = None  # of the last step's event
    now: float | None = None  # of the last event
    done: dict[int, Mapping[str, Any]] = field(default_factory=dict)  # step events by step; a replayed step once
    evaluations: dict[int, Mapping[str, Any]] = field(default_factory=dict)  # by policy version
    stages: dict[str, StageProgress] = field(default_factory=dict)  # by worker
    published: Mapping[str, Any] | None = None
    swapped: Mapping[str, Any] | None = None
    ledger: Mapping[str, Any] | None = None
    restarts: int = 0
    prompts_skipped: int = 0  # as they were too long
    prompts_cut: int = 0
    messages: deque[str] = field(default_factory=lambda: deque(maxlen=MESSAGES))

    def apply(self, event: Event) -> None:
        data = event.data
        self.began = event.time if self.began is None else self.began
        self.now = event.time
        match event.kind:
            case "state":
                self.state, self.reason = data["state"], data.get("reason", "")
                if self.state == "running" and self.running is None:
                    self.running = event.time
                if self.reason:
                    self.messages.append(f"{self.state}: {self.reason}")
            case "step":
                self.done[int(data["step"])], self.stepped = data, event.time
            case "evaluation":
                self.evaluations[int(data["version"])] = data
            case "stage":
                if data["worker"] not in self.stages:
                    self.stages[data["worker"]] = StageProgress(data)
                self.stages[data["worker"]].apply(data)
            case "sync" if data.get("publish_seconds"):
                self.published = data
            case "sync":
                self.swapped = data
            case "ledger":
                self.ledger = data
            case "worker":
                self._worker(data)
            case "prompt":
                self._prompt(data)

    def _worker(self, data: Mapping[str, Any]) -> None:
        change, reason = data["change"], data.get("reason", "")
        self.restarts += change == "restarted"
        if change in ("died", "restarted"):
            self.messages.append(f"{data['worker']} {change}" + (f": {reason}" if reason and change == "died" else ""))

    def _prompt(self, data: Mapping[str, Any]) -> None:
        if data["change"] == "too long":  # totals; a restarted worker counts from 0
            self.prompts_skipped = max(self.prompts_skipped, data["skipped"])
            self.prompts_cut = max(self.prompts_cut, data["cut"])
            self.messages.append(data["reason"])

    @property
    def ended(self) -> bool:
        return self.state in ENDED

    @property
    def history(self) -> list[Mapping[str, Any]]:
        """Step events in order of their steps."""
        return [self.done[step] for step in sorted(self.done)]

    @property
    def last(self) -> Mapping[str, Any] | None:
        return self.done[max(self.done)] if self.done else None

    @property
    def steps_done(self) -> int:
        return max(self.done) + 1 if self.done else 0

    @property
    def elapsed(self) -> float:
        """Seconds between the first and the last event."""
        return 0.0 if self.began is None or self.now is None else self.now - self.began

    @property
    def seconds_left(self) -> float | None:
        """By the median of the last steps; None before there are two of them: the first one waits for a start."""
        recent = [step["seconds"] for step in self.history[1:][-STEPS_OF_RATE:]]
        return statistics.median(recent) * (self.steps - self.steps_done) if recent else None

    @property
    def tokens_per_second(self) -> float | None:
        """Generated tokens per second over the last steps, or since the run's first moment where these made none: the
        responses of a short run are all made before its second step. None before the first step."""
        recent = self.history[-STEPS_OF_RATE - 1 :]
        seconds = sum(step["seconds"] for step in recent[1:])
        generated = recent[-1]["tokens_generated"] - recent[0]["tokens_generated"] if recent else 0
        if seconds > 0 and generated > 0:
            return float(generated / seconds)
        if not recent or self.running is None or self.stepped is None or self.stepped <= self.running:
            return None
        return float(recent[-1]["tokens_generated"] / (self.stepped - self.running))

    def rewards(self) -> list[float]:
        """Mean rewards by step; NaN where a file had to leave one out."""
        return [math.nan if step["reward_mean"] is None else float(step["reward_mean"]) for step in self.history]

    def staleness_max(self) -> float:
        return max((float(step["staleness_max"]) for step in self.history), default=0.0)
