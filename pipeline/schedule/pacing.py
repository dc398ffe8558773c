"""Just-in-time admission: the latest moment at which the groups of a step may enter without the
trainer waiting for them.

    published v at t_v ──▶ step v + j begins at t_v + j·T at the earliest ──▶ its groups enter D before that
                                                         T: seconds of a step            D: seconds from entry to complete

Groups that enter as early as the bound allows only get old while they wait for the trainer. T is
the shortest of the last steps, without the time in which the trainer waited; D the longest of the
last steps' groups, and a margin for the tail of the lengths. Both are measured all the time. Where
generation is the busiest stage groups queue for it, D grows with the queue, and all enter as early
as the bound allows. The bound itself is the index's (``pipeline/schedule/staleness.py``).
"""

from __future__ import annotations

from collections import deque
from math import floor, inf

from pipeline.schedule.staleness import StalenessPlan

STEPS = 4  # that are remembered
MARGIN = 1.25  # of D
LOOKS = 32  # in a step
# seconds; the first one before a step is measured
SHORTEST_LOOK = 0.02
FIRST_LOOK = 0.25
LONGEST_LOOK = 1.0


class Pacer:
    """The rule that says when groups may enter.

    Groups are counted without the filtered ones, from the first of the run.
    """

    def __init__(self, plan: StalenessPlan) -> None:
        self._plan = plan
        self._version: int | None = None
        self._since = 0.0  # when it was published
        # step: when all of its groups were admitted, until they are complete
        self._entered: dict[int, float] = {}
        self._next = 0  # the first step whose groups were not all admitted
        self._complete = (-1, 0.0)  # the newest step whose groups were complete, and when
        self._steps: deque[float] = deque(maxlen=STEPS)  # seconds
        self._leads: deque[float] = deque(maxlen=STEPS)

    def see(self, now: float, version: int, admitted: int, done: int) -> None:
        """Take note of the run's progress. ``version``: published; ``admitted``: groups; ``done``:
        those that were trained or can be picked."""
        size = self._plan.groups_per_step
        if self._version is None:
            self._version = version
            self._since = now
            self._next = admitted // size
        while (self._next + 1) * size <= admitted:
            self._entered[self._next] = now
            self._next += 1
        for step in [step for step in self._entered if (step + 1) * size <= done]:
            self._leads.append(now - self._entered.pop(step))
            self._complete = step, now
        if version > self._version:
            step, complete = self._complete
            if version == self._version + 1:
                begun = complete if step == self._version else self._since
                self._steps.append(now - max(begun, self._since))
            self._version = version
            self._since = now

    @property
    def lead(self) -> float:
        """D, in seconds; infinite until as many steps are measured as are remembered."""
        return MARGIN * max(self._leads) if len(self._steps) == STEPS and self._leads else inf

    def limit(self, now: float) -> int:
        """Return the number below which groups may enter now; the bound may allow fewer."""
        if self._version is None or self.lead == inf:
            return 1 << 62
        ahead = floor((now - self._since + self.lead) / max(min(self._steps), 1e-9))
        return (self._version + 1 + min(ahead, self._plan.slack)) * self._plan.groups_per_step

    def look(self) -> float:
        """Return the seconds until it is time to look again."""
        if not self._steps:
            return FIRST_LOOK
        return min(max(min(self._steps) / LOOKS, SHORTEST_LOOK), LONGEST_LOOK)
