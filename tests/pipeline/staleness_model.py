"""Model of gate, claims and picks in plain Python, against which the index is tested."""

from __future__ import annotations

from collections.abc import Collection

from pipeline.schedule.staleness import StalenessPlan


class Plan(StalenessPlan):
    """A staleness plan with the decisions that the index makes by it.

    >>> plan = Plan(bound=2, groups_per_step=4, window=3)
    >>> plan.admissible(version=0), plan.required_version(group=7), plan.required_version(group=8)
    (8, 0, 1)
    """

    def admissible(self, version: int) -> int:
        """How many groups may have been admitted in all once ``version`` is published: groups 0 ..
        this - 1."""
        return (version + self.slack + 1) * self.groups_per_step

    def required_version(self, group: int) -> int:
        """The oldest policy version that may make tokens of ``group``."""
        return max(0, group // self.groups_per_step - self.slack)

    def may_claim(self, group: int, version: int) -> bool:
        """Whether a rollout engine that has loaded ``version`` may begin ``group``."""
        return group < self.admissible(version)

    def pick(
        self, oldest: int, ready: Collection[int], passed: Collection[int] = ()
    ) -> list[int] | None:
        """See :func:`windowed_pick`."""
        return windowed_pick(oldest, ready, self.groups_per_step, self.window, passed)


def windowed_pick(
    oldest: int, ready: Collection[int], groups: int, window: int, passed: Collection[int] = ()
) -> list[int] | None:
    """The groups of the next step, in admission order, or None while there are not ``groups`` of
    them to take.

    ``oldest`` is the oldest unconsumed group, ``ready`` the complete ones, ``passed`` those after
    ``oldest`` that are already consumed. Group q may be taken only while q < (oldest group not yet
    taken) + ``window``; taking the smallest first moves that anchor as far as it can go, so if any
    choice of ``groups`` exists, this finds one.

    >>> windowed_pick(0, [1, 2, 3], groups=2, window=3)
    [1, 2]
    >>> windowed_pick(0, [1, 3], groups=2, window=3) is None
    True
    >>> windowed_pick(0, [0, 3, 4], groups=3, window=2, passed=[1, 2])
    [0, 3, 4]
    """
    gone = set(passed)
    picked: list[int] = []
    for group in sorted(ready):
        while oldest in gone:
            oldest += 1
        if group >= oldest + window:
            return None
        picked.append(group)
        if len(picked) == groups:
            return picked
        gone.add(group)
    return None
