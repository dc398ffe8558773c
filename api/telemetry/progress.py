"""Progress of a run: its totals with every step and evaluation, as views and reports show them. Nothing here does I/O.

Event ──▶ Progress.apply ──▶ RunTotals, steps, evaluations, times, messages
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections import deque
from dataclasses import dataclass

from api.telemetry.totals import RunTotals, shares
from pipeline.events import (
    ENDED,
    AlarmEvent,
    EvaluationEvent,
    Event,
    EventData,
    ForecastEvent,
    PromptEvent,
    StateEvent,
    StepEvent,
    WorkerEvent,
)

STEPS_OF_RATE = 8  # time left and tokens per second follow from this many last steps
MESSAGES = 5


@dataclass(frozen=True, slots=True)
class Made:
    """What is kept of each step event: some hundred bytes of a run of any length."""

    version: int
    reward_mean: float | None
    reward_std: float | None
    reward_failed: int
    reward_absent: int
    staleness_mean: float | None
    staleness_max: float | None
    tokens_generated: int
    seconds: float | None


class Progress(RunTotals):
    """A run of ``steps`` steps with the staleness bound ``bound`` on ``devices`` devices. Times in Unix seconds: ``began``
    of the first event, ``running`` of the first event of training, ``stepped`` of the last step, ``now`` of the last
    event."""

    def __init__(self, name: str, steps: int, bound: int, devices: int = 1) -> None:
        super().__init__()
        self.name, self.steps, self.bound, self.devices = name, steps, bound, devices
        self.began: float | None = None
        self.running: float | None = None
        self.stepped: float | None = None
        self.now: float | None = None
        self.made: dict[int, Made] = {}  # by step; a replayed step stands once
        self.last: StepEvent | None = None
        self.evaluations: dict[int, EvaluationEvent] = {}  # by policy version; the first and the last with samples
        self.forecast: ForecastEvent | None = None  # the newest
        self.messages: deque[str] = deque(maxlen=MESSAGES)

    def apply(self, event: Event) -> EventData | None:
        data = super().apply(event)
        self.began = event.time if self.began is None else self.began
        self.now = event.time
        match data:
            case StateEvent():
                if self.state == "running" and self.running is None:
                    self.running = event.time
                if self.reason:
                    self.messages.append(f"{self.state}: {self.reason}")
            case StepEvent():
                self.made[data.step] = Made(*(getattr(data, field.name) for field in dataclasses.fields(Made)))
                if self.last is None or data.step >= self.last.step:
                    self.last = data
                self.stepped = event.time
            case EvaluationEvent():
                if len(self.evaluations) > 1 and (former := max(self.evaluations)) < data.version:
                    self.evaluations[former] = dataclasses.replace(self.evaluations[former], samples=())
                self.evaluations[data.version] = data
            case WorkerEvent(change="died", reason=reason) if reason:
                self.messages.append(f"{data.worker} died: {reason}")
            case WorkerEvent(change="died" | "restarted"):
                self.messages.append(f"{data.worker} {data.change}")
            case AlarmEvent():
                self.messages.append(f"alarm at step {data.step + 1}: {data.reason}. {data.look}")
            case ForecastEvent():
                self.forecast = data
                if data.reason:
                    self.messages.append(f"from step {data.step + 1}: {data.reason}")
            case PromptEvent(change="too long"):
                self.messages.append(data.reason)
        return data

    @property
    def ended(self) -> bool:
        return self.state in ENDED

    @property
    def history(self) -> list[Made]:
        """The steps in their order, in which they come."""
        return list(self.made.values())

    def _recent(self, count: int) -> list[Made]:
        """The last ``count`` steps, in their order."""
        return list(itertools.islice(reversed(self.made.values()), count))[::-1]

    @property
    def steps_done(self) -> int:
        return self.last.step + 1 if self.last else 0

    @property
    def elapsed(self) -> float:
        """Seconds between the first and the last event."""
        return 0.0 if self.began is None or self.now is None else self.now - self.began

    @property
    def step_seconds(self) -> list[float]:
        """Seconds of each step but the first one, which waits for the start."""
        return [step.seconds or 0.0 for step in self.history[1:]]

    @property
    def seconds_left(self) -> float | None:
        """By the median of the last steps; None before there are two."""
        timed = min(STEPS_OF_RATE, len(self.made) - 1)  # the first one waits for the start
        recent = [step.seconds or 0.0 for step in self._recent(max(0, timed))]
        return statistics.median(recent) * (self.steps - self.steps_done) if recent else None

    @property
    def tokens_per_second(self) -> float | None:
        """Generated tokens per second over the last steps, or since training began where these made none: the responses of
        a short run are all made before its second step. None before the first step."""
        recent = self._recent(STEPS_OF_RATE + 1)
        seconds = sum(step.seconds or 0.0 for step in recent[1:])
        generated = recent[-1].tokens_generated - recent[0].tokens_generated if recent else 0
        if seconds > 0 and generated > 0:
            return float(generated / seconds)
        if not recent or self.running is None or self.stepped is None or self.stepped <= self.running:
            return None
        return float(recent[-1].tokens_generated / (self.stepped - self.running))

    def busiest(self, *, recent: bool = True) -> tuple[str, float] | None:
        """Returns the stage with the largest busy share (mean over its workers), and that share: of the last seconds, or
        with ``recent=False`` of the whole run. None before a worker has reported."""
        by_stage = dict[str, list[float]]()
        for worker in self.workers.values():
            spent = worker.recent if recent else worker.totals
            if spent["wall"] > 0:
                by_stage.setdefault(worker.latest.stage, []).append(shares(spent)["busy"])
        found = {stage: statistics.fmean(each) for stage, each in by_stage.items()}
        return max(found.items(), key=lambda one: one[1]) if found else None

    def rewards(self) -> list[float]:
        """Mean rewards by step; NaN where one was not finite."""
        return [math.nan if step.reward_mean is None else step.reward_mean for step in self.history]

    def staleness_max(self) -> float:
        return max((step.staleness_max or 0.0 for step in self.history), default=0.0)
