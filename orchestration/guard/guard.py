"""The guard's state machine: events in, alarms out.

It does no I/O, so tests, a live run and a recorded one use the same.

StepEvent, SyncEvent ─▶ Guard.observe ─▶ rule of each metric ─▶ AlarmEvent, once until the metric is usual again
                                           └─ the value joins the metric's window
StageEvent: the trajectories that have ended since the last judgement
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from orchestration.guard.fall import FallJudge
from orchestration.guard.rules import (
    COLLAPSED,
    COMPARED_STEPS,
    CONSTANT,
    EQUAL_WEIGHTS,
    NORMAL,
    RECENT,
    RESUMED,
    REWARDS,
    TRENDS,
    WARM_UP,
    Rule,
)
from orchestration.history.lines import finite_numbers
from orchestration.words import words
from pipeline.data.events import AlarmEvent, EventData, StageEvent, StepEvent, SyncEvent

if TYPE_CHECKING:
    from orchestration.guard.functions import FunctionJudge
    from orchestration.guard.trajectories import TrajectoryJudge

# by which a step's mean may exceed the probe's limit: it is of other tokens, and of as few as 16
MARGIN = 2.0
# Below which a step of equal groups is an alarm; the latter where the mean jumps too.
CHANCE = 1e-6
CHANCE_OF_JUMP = 1e-3
JUMP = 4.0  # deviations of the mean reward


@dataclass(frozen=True)
class GuardOptions:
    """Options of a guard.

    ``sensitivity``: deviations that are an alarm. ``off``: metrics that are not judged.
    ``gap_limit``: largest mean difference of two engines' logprobs with the same weights, as far as
    it is known before the first probe (0: it is not). ``grad_clip``: gradients up to it are no
    alarm. ``rebuilds``: whether the KV cache of a response in flight is computed again after a
    swap. ``constants``: metrics that are constant by construction, and why; they are not judged.
    """

    sensitivity: float = 8.0
    off: Collection[str] = ()
    gap_limit: float = 0.0
    grad_clip: float = 1.0
    rebuilds: bool = False
    constants: Mapping[str, str] = field(default_factory=dict)


class Window:
    """The last values of one metric, with their median and deviation."""

    def __init__(self) -> None:
        self.values: deque[float] = deque(maxlen=COMPARED_STEPS)

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def deviations(self, value: float, floor: float) -> float:
        """Return how far ``value`` is above the median, in deviations of at least ``floor``.

        >>> window = Window(); window.values.extend([1, 2, 3, 4, 5]); round(window.deviations(5.9652, 0.1), 4)
        2.0
        """
        median = self.median
        spread = NORMAL * statistics.median(abs(other - median) for other in self.values)
        return (value - median) / max(spread, floor)


class Guard:
    """The judge of the steps and swaps of one run, in the order of its events.

    A step that comes again, in a run that went on from a checkpoint, is judged again; the alarms
    that last are kept.
    """

    def __init__(self, options: GuardOptions) -> None:
        self.options = options
        self._windows: dict[str, Window] = {}
        self._alarmed: set[str] = set()  # metrics with an alarm that lasts
        self._gap_limit = options.gap_limit
        self._steps = 0
        self._step = 0  # the newest one
        self._trajectories: TrajectoryJudge | None = None  # of a run that has any
        self._functions: FunctionJudge | None = None  # of a run that has several
        self._falls = FallJudge(options.sensitivity)

    def observe(self, event: EventData) -> list[AlarmEvent]:
        """Return the alarms that ``event`` raises: at most one for each metric."""
        match event:
            case StepEvent(skipped=""):
                alarms = list(self._of_step(event))
                self._steps += 1
                self._step = event.step
            case StageEvent(worker=worker, trajectories=counts) if counts:
                from orchestration.guard.trajectories import TrajectoryJudge

                self._trajectories = self._trajectories or TrajectoryJudge()
                judgements = self._trajectories.of_counts(self._step, worker, counts)
                alarms = [alarm for each in judgements for alarm in self._changed(*each)]
            case SyncEvent(gap_mean=float() as gap, gap_mean_limit=float() as limit) if limit > 0:
                self._gap_limit = limit
                alarms = list(
                    self._trends(
                        event.version,
                        {"probe_share": gap / limit},
                        f"probe_share/{event.worker}",
                    )
                )
            case _:
                alarms = []
        return alarms

    def _of_step(self, event: StepEvent) -> Iterator[AlarmEvent]:
        values = finite_numbers({**asdict(event), **event.metrics})
        rows = event.rows
        groups = len(event.groups)
        yield from self._limited(event.step, values, EQUAL_WEIGHTS)
        if self.options.rebuilds:
            yield from self._limited(event.step, values, RESUMED)
        yield from self._constant(event.step, values, groups)
        yield from self._collapsed(event.step, values, rows, groups)
        yield from self._trends(event.step, values)
        if len(event.rewards) > 1 and REWARDS not in self.options.off:
            from orchestration.guard.functions import FunctionJudge

            self._functions = self._functions or FunctionJudge(self.options.sensitivity)
            for judgement in self._functions.of_step(event):
                yield from self._changed(*judgement)
        if "reward_mean" in values and (
            fall := self._falls.of_reward(event.step, values["reward_mean"])
        ):
            yield from self._changed(*fall)
        for name in ("reward_mean", COLLAPSED.metric):
            if name in values:
                self._window(name).values.append(values[name])

    def _limited(self, step: int, values: Mapping[str, float], rule: Rule) -> Iterator[AlarmEvent]:
        """Judge a mean difference at equal weights, whose limit follows from the dtype."""
        value = values.get(rule.metric)
        limit = MARGIN * self._gap_limit
        if value is None or not limit:
            return
        reason = (
            f"{_shown(value)} nats, where two engines with the same weights differ by at "
            f"most "
            f"{_shown(limit)}"
        )
        yield from self._changed(value > limit, rule, step, value, None, limit, reason)

    def _constant(
        self, step: int, values: Mapping[str, float], groups: int
    ) -> Iterator[AlarmEvent]:
        """Judge the share of groups with equal rewards: all of them are, which by the last steps'
        share is most unlikely."""
        share = values.get(CONSTANT.metric)
        if share is None:
            return
        window = self._window(CONSTANT.metric)
        reward = values.get("reward_mean", math.nan)
        recent = list(window.values)[-RECENT:]
        judged = False
        reason = ""
        usual = None
        if share == 1 and len(window.values) >= WARM_UP:
            usual = (sum(recent) * groups + 0.5) / (len(recent) * groups + 1)
            rewards = self._window("reward_mean")
            jumps = bool(rewards.values) and abs(rewards.deviations(reward, 1e-3)) > JUMP
            judged = usual**groups < (CHANCE_OF_JUMP if jumps else CHANCE)
            reason = (
                f"in all {groups} groups, where {usual:.0%} of them are usual; the mean "
                f"reward is {_shown(reward)}"
            )
        is_first = self._steps == WARM_UP - 1 and step <= 2 * WARM_UP  # a few may have been skipped
        if (
            share == 1
            and is_first
            and len(window.values) == WARM_UP - 1
            and min(window.values) == 1
        ):
            judged = True
            reason = (
                f"in all groups of the first {WARM_UP} steps; the mean reward is {_shown(reward)}"
            )
        lasts = share == 1 and CONSTANT.metric in self._alarmed
        yield from self._changed(
            judged or lasts, CONSTANT, step, share, usual, 1.0, f"rewards are equal {reason}"
        )
        if not lasts and not judged:  # what is judged is not what is usual
            window.values.append(share)

    def _collapsed(
        self, step: int, values: Mapping[str, float], rows: int, groups: int
    ) -> Iterator[AlarmEvent]:
        """Judge the share of distinct responses: all of a step's are one text, which is unusual in
        the run."""
        share = values.get(COLLAPSED.metric)
        if share is None:
            return
        window = self._window(COLLAPSED.metric)
        usual = window.median if window.values else None
        is_one = round(share * rows) <= 1 and groups > 1 and rows > groups
        judged = is_one and (
            usual is None or usual * rows > 2.5 or COLLAPSED.metric in self._alarmed
        )
        before = "" if usual is None else f"; usual are {round(usual * rows)} different ones"
        reason = f"all {rows} responses to {groups} prompts are one text{before}"
        yield from self._changed(judged, COLLAPSED, step, share, usual, 1 / rows, reason)

    def _trends(
        self, step: int, values: Mapping[str, float], key: str = ""
    ) -> Iterator[AlarmEvent]:
        for rule in TRENDS:
            if (value := values.get(rule.metric)) is None or rule.metric in self.options.constants:
                continue
            window = self._window(key or rule.metric)
            before = list(window.values)[1 - rule.steps :] if rule.steps > 1 else []
            newest = [*map(math.exp, before)] if rule.log else before
            newest.append(value)
            if len(newest) == rule.steps:
                yield from self._trend(step, statistics.median(newest), rule, window)
            if value > 0 or not rule.log:
                window.values.append(math.log(value) if rule.log else value)

    def _trend(self, step: int, value: float, rule: Rule, window: Window) -> Iterator[AlarmEvent]:
        beyond = self.options.grad_clip if rule.metric == "grad_norm" else rule.beyond
        sign = -1 if rule.way == "down" else 1
        usual = None
        limit = rule.limit
        # An alarm lasts until the value is half as far off as one that raises it.
        lasts = 2 if rule.metric in self._alarmed else 1
        past = limit is not None and sign * value > sign * limit * (lasts if sign < 0 else 1)
        reason = f"{_shown(value)}, past {rule.limit}"
        unusual = False
        if len(window.values) >= WARM_UP and (value > 0 or not rule.log):
            compared = math.log(value) if rule.log else value
            deviations = window.deviations(compared, rule.floor)
            off = abs(deviations) if rule.way == "both" else sign * deviations
            unusual = off > self.options.sensitivity / lasts and (beyond is None or value > beyond)
            usual = math.exp(window.median) if rule.log else window.median
            if not past:
                limit = None
                reason = (
                    f"{_shown(value)}, where {_shown(usual)} is usual (the median of "
                    f"{len(window.values)} values); it is {off:.0f} deviations off"
                )
        yield from self._changed(past or unusual, rule, step, value, usual, limit, reason)

    def _changed(
        self,
        judged: bool,
        rule: Rule,
        step: int,
        value: float,
        usual: float | None,
        limit: float | None,
        reason: str,
    ) -> Iterator[AlarmEvent]:
        """Yield the alarm, where one begins."""
        name = rule.metric
        if name in self.options.off:
            return
        if not judged:
            self._alarmed.discard(name)
        elif name not in self._alarmed:
            self._alarmed.add(name)
            yield AlarmEvent(
                metric=name,
                step=step,
                version=step,
                value=value,
                usual=usual,
                limit=limit,
                reason=f"{words(name)}: {reason}",
                look=rule.look,
            )

    def _window(self, name: str) -> Window:
        return self._windows.setdefault(name, Window())


def _shown(value: float) -> str:
    return f"{value:.3g}"
