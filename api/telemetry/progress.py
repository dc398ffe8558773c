"""Progress of a run: its totals and the curves of its steps and evaluations. Nothing here does I/O.

Event ──▶ Progress.apply ──▶ RunTotals, steps, evaluations, times, messages

A run of any length takes the same memory: curves are thinned (:mod:`api.telemetry.thinned`).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
import zlib
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Self

from api.telemetry.thinned import Thinned
from orchestration.history.totals import RunTotals, shares
from pipeline.data.events import (
    ENDED,
    AlarmEvent,
    EvaluationEvent,
    Event,
    EventData,
    ForecastEvent,
    LedgerEvent,
    PromptEvent,
    StateEvent,
    StepEvent,
    WorkerEvent,
)

STEPS_OF_RATE = 8  # time left and tokens per second follow from this many last steps
MESSAGES = 5


@dataclass(frozen=True, slots=True)
class StepPoint:
    """One step, or several that follow each other, added up.

    ``reward_sum`` is of the ``rewarded`` steps, whose mean reward is finite. ``step_seconds`` is of
    one of the steps, picked at random. ``version``, ``tokens_generated`` and ``rewards`` are of the
    last one.
    """

    first: int
    last: int
    steps: int
    version: int
    rewarded: int
    reward_sum: float
    reward_low: float
    reward_high: float
    equal_rewards: bool  # in each of its steps all samples had one reward
    reward_failed: int
    reward_absent: int
    staleness_sum: float
    staleness_max: float
    tokens_generated: int
    seconds: float
    step_seconds: float
    rewards: Mapping[str, Mapping[str, float | None]]

    @classmethod
    def of(cls, step: StepEvent) -> Self:
        reward = math.nan if step.reward_mean is None else step.reward_mean
        rewarded = math.isfinite(reward)
        staleness = step.staleness_mean or 0.0
        return cls(
            first=step.step,
            last=step.step,
            steps=1,
            version=step.version,
            rewarded=int(rewarded),
            reward_sum=reward if rewarded else 0.0,
            reward_low=reward if rewarded else math.inf,
            reward_high=reward if rewarded else -math.inf,
            equal_rewards=step.reward_std == 0,
            reward_failed=step.reward_failed,
            reward_absent=step.reward_absent,
            staleness_sum=staleness if math.isfinite(staleness) else 0.0,
            staleness_max=step.staleness_max or 0.0,
            tokens_generated=step.tokens_generated,
            seconds=step.seconds or 0.0,
            step_seconds=step.seconds or 0.0,
            rewards=step.rewards,
        )

    @property
    def reward_mean(self) -> float:
        """Mean reward; NaN where no step has a finite one."""
        return self.reward_sum / self.rewarded if self.rewarded else math.nan

    @property
    def staleness_mean(self) -> float:
        return self.staleness_sum / self.steps

    @property
    def middle(self) -> float:
        """The version in the middle of it."""
        return self.version - (self.last - self.first) / 2

    def plus(self, later: Self) -> Self:
        steps = self.steps + later.steps
        # Each step is as likely, whatever a run does at every so many steps, such as a checkpoint.
        draw = zlib.crc32(b"%d %d" % (self.first, later.last)) / 2**32
        return dataclasses.replace(
            later,
            first=self.first,
            steps=steps,
            rewarded=self.rewarded + later.rewarded,
            reward_sum=self.reward_sum + later.reward_sum,
            reward_low=min(self.reward_low, later.reward_low),
            reward_high=max(self.reward_high, later.reward_high),
            equal_rewards=self.equal_rewards and later.equal_rewards,
            reward_failed=self.reward_failed + later.reward_failed,
            reward_absent=self.reward_absent + later.reward_absent,
            staleness_sum=self.staleness_sum + later.staleness_sum,
            staleness_max=max(self.staleness_max, later.staleness_max),
            seconds=self.seconds + later.seconds,
            step_seconds=later.step_seconds if draw * steps < later.steps else self.step_seconds,
        )

    def before(self, key: int) -> Self:
        share = (key - self.first) / (self.last + 1 - self.first)
        steps = max(1, round(share * self.steps))
        rewarded = round(share * self.rewarded)
        return dataclasses.replace(
            self,
            last=key - 1,
            version=self.version - (self.last + 1 - key),
            steps=steps,
            rewarded=rewarded,
            reward_sum=self.reward_mean * rewarded if rewarded else 0.0,
            reward_failed=round(share * self.reward_failed),
            reward_absent=round(share * self.reward_absent),
            staleness_sum=self.staleness_mean * steps,
            seconds=share * self.seconds,
        )


@dataclass(frozen=True, slots=True)
class EvaluationPoint:
    """One evaluation, or several that follow each other.

    ``event`` is the first one; the sums are of all. ``engine_seconds``: as if each had taken a
    whole engine.
    """

    first: int  # policy versions
    last: int
    event: EvaluationEvent
    count: int
    missed: int
    answers: int
    failed: int
    absent: int
    tokens: int
    seconds: float
    engine_seconds: float

    @classmethod
    def of(cls, event: EvaluationEvent) -> Self:
        seconds = event.seconds or 0.0
        return cls(
            first=event.version,
            last=event.version,
            event=event,
            count=1,
            missed=event.missed,
            answers=event.count + event.failed + event.absent,
            failed=event.failed,
            absent=event.absent,
            tokens=event.tokens,
            seconds=seconds,
            engine_seconds=seconds * (event.share or 0.0),
        )

    def without_samples(self) -> Self:
        return dataclasses.replace(self, event=dataclasses.replace(self.event, samples=()))

    def plus(self, later: Self) -> Self:
        return dataclasses.replace(
            self,
            last=later.last,
            count=self.count + later.count,
            missed=self.missed + later.missed,
            answers=self.answers + later.answers,
            failed=self.failed + later.failed,
            absent=self.absent + later.absent,
            tokens=self.tokens + later.tokens,
            seconds=self.seconds + later.seconds,
            engine_seconds=self.engine_seconds + later.engine_seconds,
        )

    def before(self, key: int) -> Self:
        share = (key - self.first) / (self.last + 1 - self.first)
        return dataclasses.replace(
            self,
            last=key - 1,
            count=max(1, round(share * self.count)),
            missed=round(share * self.missed),
            answers=round(share * self.answers),
            failed=round(share * self.failed),
            absent=round(share * self.absent),
            tokens=round(share * self.tokens),
            seconds=share * self.seconds,
            engine_seconds=share * self.engine_seconds,
        )


class Message(NamedTuple):
    """A line for the user. ``reason``: the part of it that says why, "" without one."""

    text: str
    reason: str


class Progress(RunTotals):
    """A run of ``steps`` steps with the staleness bound ``bound`` on ``devices`` devices.

    Times in Unix seconds: ``working`` of the first ready worker of the newest part, ``stepped`` of
    the last step.
    """

    def __init__(self, name: str, steps: int, bound: int, devices: int = 1) -> None:
        super().__init__()
        self.name = name
        self.steps = steps
        self.bound = bound
        self.devices = devices
        self.working: float | None = None
        self.stepped: float | None = None
        self._steps_of_part = 0
        self._generated_before = 0  # tokens, when the newest part began
        self.curve = Thinned[StepPoint]()  # of steps; one that is made again stands once
        self.last: StepEvent | None = None
        # by version; the first and the last with samples
        self.evaluated = Thinned[EvaluationPoint]()
        self.forecast: ForecastEvent | None = None  # the newest
        self.messages: deque[Message] = deque(maxlen=MESSAGES)

    def apply(self, event: Event) -> EventData | None:
        data = super().apply(event)
        match data:
            case StateEvent():
                if self.state == "running":
                    self._note_work(event.time)
                if self.reason:
                    self._note(f"{self.state}: ", self.reason)
            case StepEvent():
                self._add_step(data)
                self.stepped = event.time
            case LedgerEvent() if not self._steps_of_part:
                self._generated_before = data.generated_tokens
            case WorkerEvent(change="ready"):
                self._note_work(event.time)
            case EvaluationEvent():
                self._add_evaluation(data)
            case WorkerEvent(change="died", reason=reason) if reason:
                self._note(f"{data.worker} died: ", reason)
            case WorkerEvent(change="died" | "restarted"):
                self._note(f"{data.worker} {data.change}")
            case AlarmEvent():
                self._note(f"alarm at step {data.step}: ", f"{data.reason}. {data.look}")
            case ForecastEvent():
                self.forecast = data
                if data.reason:
                    self._note(f"from step {data.step}: ", data.reason)
            case PromptEvent(change="too long"):
                self._note("", data.reason)
        return data

    def _begin_part(self) -> None:
        super()._begin_part()
        self.working = None
        self._steps_of_part = 0
        self._generated_before = self.tokens["generated"]

    def _note_work(self, time: float) -> None:
        self.working = time if self.working is None else self.working

    def _note(self, begin: str, reason: str = "") -> None:
        self.messages.append(Message(begin + reason, reason))

    def _add_step(self, step: StepEvent) -> None:
        if self.last is not None and step.step <= self.last.step:  # it went on from a checkpoint
            self.curve.remove_from(step.step)
            self.evaluated.remove_from(step.version)
        self.curve.add(StepPoint.of(step))
        self._steps_of_part += 1
        self.last = step

    def _add_evaluation(self, event: EvaluationEvent) -> None:
        points = self.evaluated.points
        point = EvaluationPoint.of(event)
        if len(points) > 1 and points[-1].last < event.version:
            points[-1] = points[-1].without_samples()
        if points and points[0].first < event.version < points[-1].last:  # it comes late
            point = point.without_samples()
        self.evaluated.add(point)

    @property
    def ended(self) -> bool:
        return self.state in ENDED

    @property
    def history(self) -> list[StepPoint]:
        """The steps in their order. In a long run most points are of several steps."""
        return self.curve.points

    @property
    def evaluations(self) -> dict[int, EvaluationEvent]:
        """Evaluations by policy version, in their order; of many, the first ones of several."""
        return {point.first: point.event for point in self.evaluated.points}

    def _recent(self, count: int) -> list[StepPoint]:
        """Return the last ``count`` steps, in their order."""
        single = itertools.takewhile(lambda point: point.steps == 1, reversed(self.history))
        return list(itertools.islice(single, count))[::-1]

    @property
    def steps_done(self) -> int:
        return self.last.step if self.last else 0

    @property
    def stepping_seconds(self) -> float:
        """Seconds of all steps but the first one, which waits for the start."""
        return sum(point.seconds for point in self.history[1:])

    @property
    def median_step_seconds(self) -> float | None:
        """Median seconds of all steps but the first one; of a long run, of one step for each point.
        None before two steps."""
        points = self.history[1:]
        if not points:
            return None
        import numpy as np

        counts = [point.steps for point in points]
        return float(np.median(np.repeat([point.step_seconds for point in points], counts)))

    @property
    def seconds_left(self) -> float | None:
        """Seconds to the end, by the median of the last steps; None before there are two."""
        timed = min(STEPS_OF_RATE, len(self.history) - 1)  # the first one waits for the start
        recent = [step.seconds or 0.0 for step in self._recent(max(0, timed))]
        return statistics.median(recent) * (self.steps - self.steps_done) if recent else None

    @property
    def tokens_per_second(self) -> float | None:
        """Generated tokens per second over the last steps of the newest part, or since its first
        worker was ready where these made none: the responses of a short run are all made before its
        second step. None before the first step."""
        recent = self._recent(min(STEPS_OF_RATE + 1, self._steps_of_part))
        if not recent:
            return None
        newest = recent[-1].tokens_generated
        seconds = sum(step.seconds or 0.0 for step in recent[1:])
        generated = newest - recent[0].tokens_generated
        if seconds > 0 and generated > 0:
            return float(generated / seconds)
        if self.working is None or self.stepped is None or self.stepped <= self.working:
            return None
        return float((newest - self._generated_before) / (self.stepped - self.working))

    def busiest(self, *, recent: bool = True) -> tuple[str, float] | None:
        """Return the stage with the largest busy share (mean over its workers), and that share: of
        the last seconds, or with ``recent=False`` of the whole run. None before a worker has
        reported."""
        by_stage = dict[str, list[float]]()
        for worker in self.workers.values():
            seconds = worker.recent if recent else worker.totals
            if seconds["wall"] > 0:
                by_stage.setdefault(worker.latest.stage, []).append(shares(seconds)["busy"])
        busy_shares = {
            stage: statistics.fmean(worker_shares) for stage, worker_shares in by_stage.items()
        }
        return max(busy_shares.items(), key=lambda item: item[1]) if busy_shares else None

    def rewards(self) -> list[float]:
        """Return the mean rewards of the points of :attr:`history`; NaN where none was finite."""
        return [point.reward_mean for point in self.history]

    def staleness_max(self) -> float:
        return max((point.staleness_max for point in self.history), default=0.0)
