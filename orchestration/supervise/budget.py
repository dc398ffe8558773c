"""Restart budgets: how often a process may be restarted.

Pure arithmetic on times that the caller gives.
"""

from __future__ import annotations

from collections import deque


class RestartBudget:
    """A budget of ``most`` restarts of one worker within ``window`` seconds: each is counted for
    that long, and is then available again.

    >>> budget = RestartBudget(2, window=60.0)
    >>> [budget.take(now=0.0), budget.take(now=10.0), budget.take(now=20.0)]
    [0.0, 0.0, 40.0]
    >>> budget.take(now=60.0)
    0.0
    """

    def __init__(self, most: int, window: float) -> None:
        self.most = most
        self._window = window
        self._taken: deque[float] = deque()

    def take(self, now: float) -> float:
        """Take one restart at time ``now``, in seconds of any steady clock, and return 0; where
        none is left, take none and return the seconds until one is (infinite where ``most`` is 0).
        """
        while self._taken and now - self._taken[0] >= self._window:
            self._taken.popleft()
        if len(self._taken) < self.most:
            self._taken.append(now)
            return 0.0
        return self._taken[0] + self._window - now if self._taken else float("inf")
