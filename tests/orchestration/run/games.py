"""Environments of runs: the game of the task ``guess``, some of whose answers take several steps."""

from __future__ import annotations

import time

from stages.tasks.guess import Guess


class Slow(Guess):
    """Each fifth trajectory has answers that take ``seconds``; which ones depends on seeds alone."""

    def __init__(self, seconds: float = 0.0) -> None:
        self._seconds = seconds

    def reset(self, answer: int, seed: int) -> None:  # type: ignore[override]
        super().reset(answer)
        self._is_slow = seed % 5 == 0

    def step(self, text: str) -> tuple[str | None, float, bool]:
        if self._is_slow:
            time.sleep(self._seconds)
        return super().step(text)


class Lost(Slow):
    """The same, which cannot be replayed."""

    replayable = False
