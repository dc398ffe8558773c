"""Groups of a simulated run between the gate and a step, in the order of their numbers.

admit ──▶ open ──┬─ drop ─▶ dropped: each makes room for a group more
                 └─ complete ─▶ pick: the next step's groups, within the window
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

from pipeline.schedule.staleness import StalenessPlan


@dataclass(eq=False)
class Group:
    """Rows of one prompt, with the tokens that each will have."""

    number: int
    lengths: Sequence[int]
    left: int  # rows that have not ended
    versions: dict[int, int] = field(default_factory=dict)  # of each row's first token, by place

    @property
    def tokens(self) -> int:
        return sum(self.lengths)


class Groups:
    """Groups of a run with the bound, the groups of a step and the window of ``plan``."""

    def __init__(self, plan: StalenessPlan) -> None:
        self.plan = plan
        self.admitted = 0
        self._open: list[int] = []  # admitted ones that are neither picked nor dropped, in order
        self._complete: dict[int, Group] = {}
        self._dropped: list[int] = []
        # a complete group from here on leaves the next step's groups as incomplete as they are
        self._reach = inf

    @property
    def dropped(self) -> int:
        return len(self._dropped)

    @property
    def left(self) -> int:
        """How many steps have taken, or could take now."""
        return self.admitted - self.dropped - len(self._open) + self._pickable()

    def limit(self, version: int) -> int:
        """The number below which an engine of ``version`` may make groups, and below which the gate
        admits at it."""
        base = limit = (version + self.plan.slack + 1) * self.plan.groups_per_step + len(
            self._dropped
        )
        while (fewer := base - len(self._dropped) + bisect_left(self._dropped, limit)) != limit:
            limit = fewer
        return limit

    def admit(self, limit: int) -> range:
        """Open the groups below ``limit``. Returns the numbers of the new ones."""
        new = range(self.admitted, max(self.admitted, limit))
        self._open.extend(new)
        self.admitted = new.stop
        return new

    def drop(self, group: Group) -> None:
        self._open.remove(group.number)
        insort(self._dropped, group.number)

    def complete(self, group: Group) -> bool:
        """``group`` may be trained. Returns False where no step can begin because of it."""
        self._complete[group.number] = group
        return group.number < self._reach

    def pick(self) -> list[Group]:
        """Take the groups of the next step: P complete ones in order, past an incomplete one only
        within the window."""
        picked = list[int]()
        anchor = None
        wanted = self.plan.groups_per_step
        self._reach = inf
        if len(self._complete) < wanted:
            return []
        for number in self._open:
            if anchor is not None and number >= anchor + self.plan.window:
                self._reach = anchor + self.plan.window
                return []
            if number in self._complete:
                picked.append(number)
                if len(picked) == wanted:
                    gone = set(picked)
                    self._open = [one for one in self._open if one not in gone]
                    return [self._complete.pop(one) for one in picked]
            elif anchor is None:
                anchor = number
        return []

    def _pickable(self) -> int:
        found = 0
        anchor = None
        for number in self._open:
            if anchor is not None and number >= anchor + self.plan.window:
                break
            if number in self._complete:
                found += 1
            elif anchor is None:
                anchor = number
        return found
