"""Environments that answer single letters: their replies say what they have seen."""

from __future__ import annotations

import random
import threading

waiting = threading.Event()  # a turn ``w`` has begun
opened_again = threading.Event()
go_on = threading.Event()  # it may end
opened = list[str]()  # the names of classes, in the order in which they were reset


class Replayed:
    """Its hints are of its seed and of how many turns it has seen; so is its last reward."""

    replayable = True
    gives_reward = True

    def reset(self, seed: int, fails: bool = False) -> str | None:
        opened.append(type(self).__name__)
        if len(opened) > 1:
            opened_again.set()
        self._seen = 0
        self._random = random.Random(seed)
        if fails:
            raise RuntimeError("not today")
        return self.hint()

    def hint(self) -> str:
        return f"{self._random.randrange(10)}{self._seen}"

    def step(self, text: str) -> tuple[str | None, float, bool]:
        """``e`` ends it, ``x`` raises, ``h`` hangs, ``w`` waits."""
        self._seen += 1
        if text == "x":
            raise RuntimeError("an x")
        if text == "h":
            threading.Event().wait()
        if text == "e":
            return None, float(self._seen), True
        if text == "w":
            waiting.set()
            go_on.wait()
        return self.hint(), 0.5, False


class Lost(Replayed):
    """The same, which cannot be replayed."""

    replayable = False


class Judged(Lost):
    """Gives its reward at the end alone: how many turns it has seen."""

    def get_reward(self) -> float:
        return float(self._seen)


class Silent:
    """Knows no reward, and begins with nothing."""

    def reset(self) -> None:
        opened.append("Silent")

    def step(self, text: str) -> tuple[str | None, None, bool]:
        return "more", None, text == "e"


class Tools:
    """A tool that fails for zero."""

    def reset(self) -> str:
        return "?"

    def invert(self, number: float) -> float:
        """
        Inverts a number.

        Args:
            number: The number.
        """
        return 1 / number

    def get_reward(self) -> float:
        return 1.0
