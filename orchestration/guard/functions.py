"""The judgement of several reward functions: which has stopped rising, or fell at once.

    StepEvent.rewards ──▶ FunctionJudge.of_step ──▶ judgements, of which the guard makes alarms

A function rises while its last 32 means correlate with their steps by more than 0.8. It has stopped
when it rose before and now correlates by 0 or less, while another function rises and its own scores
differ by two thirds or more of what they ever did: one that has reached its best score has little
left to differ by.
"""

from __future__ import annotations

import statistics
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from orchestration.guard.rules import COMPARED_STEPS, NORMAL, RECENT, WARM_UP, Judgement, Rule
from pipeline.data.events import StepEvent

RISING = 0.8  # correlation of means with their steps
LEAST_SPREAD = 2 / 3  # of the largest deviation: of scores that are not at their best
STOPPED = (
    "What is learned raises the reward by the other functions. Compare samples that this function "
    "scores high and low; give it more weight, or have the others pay less for what it is against."
)
FELL = (
    "Look at what the function returns for the newest samples: a service that fails and gives a "
    "default, a parser that meets another format, or a policy that found what the others pay for."
)


@dataclass
class _Function:
    """What is known of one function: of the last steps the mean scores and their deviations.
    ``widest``: largest deviation; ``trend``: correlation of the means with their steps, 0 before
    there are enough."""

    means: deque[float] = field(default_factory=lambda: deque(maxlen=COMPARED_STEPS))
    spreads: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    widest: float = 0.0
    trend: float = 0.0
    has_risen: bool = False
    has_stopped: bool = False


class FunctionJudge:
    """The judge of a run's reward functions, in the order of its steps. ``sensitivity``: deviations
    that are a fall."""

    def __init__(self, sensitivity: float) -> None:
        self._sensitivity = sensitivity
        self._functions = defaultdict[str, _Function](_Function)

    def of_step(self, event: StepEvent) -> Iterator[Judgement]:
        falls = dict[str, str]()
        for name, figures in event.rewards.items():
            mean, spread = figures.get("mean"), figures.get("std")
            if mean is not None and spread is not None:
                falls[name] = self._add(self._functions[name], mean, spread, len(event.groups))
        for name, fall in falls.items():
            function = self._functions[name]
            rising = [o for o in falls if o != name and self._functions[o].trend > RISING]
            function.has_stopped = (
                function.has_risen
                and function.trend <= (RISING if function.has_stopped else 0)
                and (function.has_stopped or bool(rising))
                and statistics.median(function.spreads) >= LEAST_SPREAD * function.widest
            )
            mean = function.means[-1]
            reason = fall or f"{mean:.3g}, which has not risen for {COMPARED_STEPS} steps"
            if rising:
                reason += f", while that of {' and '.join(rising)} rises"
            if (correlation := event.rewards[name].get("correlation")) is not None:
                reason += f"; with the rest of the reward it correlates by {correlation:.2f}"
            rule = Rule(f"rewards/{name}/mean", FELL if fall else STOPPED)
            usual = statistics.median(function.means)
            yield bool(fall) or function.has_stopped, rule, event.step, mean, usual, None, reason

    def _add(self, function: _Function, mean: float, spread: float, groups: int) -> str:
        """Add a step of ``groups``. Returns how its mean fell at once; "": it did not."""
        fall = ""
        function.spreads.append(spread)
        function.widest = max(function.widest, spread)
        if len(function.means) >= WARM_UP:
            usual = statistics.median(function.means)
            deviation = NORMAL * statistics.median(abs(other - usual) for other in function.means)
            # at least half the standard error of a step's mean, were a group's rows all alike
            deviation = max(deviation, function.widest / groups**0.5 / 2, 1e-9)
            if usual - mean > self._sensitivity * deviation:
                fall = f"{mean:.3g} at once, where {usual:.3g} is usual"
        function.means.append(mean)
        if len(function.means) == COMPARED_STEPS and len(set(function.means)) > 1:
            function.trend = statistics.correlation(function.means, range(COMPARED_STEPS))
            function.has_risen |= function.trend > RISING
        return fall
